"""Key/value cache of one sequence: allocated once, written in place, compacted in place."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bastion.targets.attention import TreeMask


class KeyValueCache:
    """Keys and values of all layers in one buffer, `length` committed tokens and `pending` rows behind them."""

    __slots__ = ("_layers", "buffer", "length", "mask", "pending")

    def __init__(self, buffer: Tensor, mask: TreeMask):
        self.buffer = buffer  # [layers, 2, kv_heads, capacity, head_dim]; index 1: keys, values
        self.length = 0
        self.pending = 0
        self.mask = mask
        self._layers = buffer.unbind(0)

    def reserve(self, rows: int) -> None:
        """Make room for `rows` pending rows, and forget the ones that were pending. Grows by doubling."""
        needed, capacity = self.length + rows, self.buffer.shape[3]
        if needed > capacity:
            layers, pair, heads, _, width = self.buffer.shape
            grown = self.buffer.new_empty(layers, pair, heads, max(needed, 2 * capacity), width)
            grown[:, :, :, : self.length] = self.buffer[:, :, :, : self.length]
            self.buffer, self._layers = grown, grown.unbind(0)
        self.pending = rows

    def write(self, layer: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Put the pending rows [n, 2 * kv_heads, head_dim], keys then values, in place.

        Returns all keys and all values of the layer, each [1, kv_heads, length + n, head_dim].
        """
        held, pending = self._layers[layer], self.pending
        _, heads, _, width = held.shape
        held.narrow(2, self.length, pending).copy_(rows.view(pending, 2, heads, width).permute(1, 2, 0, 3))
        return torch.tensor_split(held.narrow(2, 0, self.length + pending), 2)  # type: ignore[return-value]

    def commit(self, nodes: Sequence[int]) -> None:
        """Keep the pending rows `nodes` (ascending). Moves only those not in place already, never the prefix."""
        if any(node >= self.pending for node in nodes):
            raise IndexError(f"commit of rows {list(nodes)}, but only {self.pending} are pending")
        settled = next((i for i, node in enumerate(nodes) if node != i), len(nodes))
        if settled < len(nodes):
            source = torch.tensor([self.length + node for node in nodes[settled:]], device=self.buffer.device)
            kept = self.buffer.index_select(3, source)
            self.buffer[:, :, :, self.length + settled : self.length + len(nodes)] = kept
        self.length += len(nodes)
        self.pending = 0
