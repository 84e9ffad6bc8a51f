"""Key/value cache of one sequence: allocated once, written in place, compacted in place."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bastion.targets.attention import TreeMask


class KeyValueCache:
    """Keys and values of all layers in one buffer, `length` committed tokens and `pending` rows behind them."""

    __slots__ = ("buffer", "length", "mask", "pending")

    def __init__(self, buffer: Tensor, mask: TreeMask):
        self.buffer = buffer  # [layers, 2, kv_heads, capacity, head_dim]; index 1: keys, values
        self.length = 0
        self.pending = 0
        self.mask = mask

    def reserve(self, rows: int) -> None:
        """Make room for `rows` pending rows, and forget the ones that were pending. Grows by doubling."""
        needed, capacity = self.length + rows, self.buffer.shape[3]
        if needed > capacity:
            layers, pair, heads, _, width = self.buffer.shape
            grown = self.buffer.new_empty(layers, pair, heads, max(needed, 2 * capacity), width)
            grown[:, :, :, : self.length] = self.buffer[:, :, :, : self.length]
            self.buffer = grown
        self.pending = rows

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write the pending rows [n, kv_heads, head_dim] in place.

        Returns all keys and all values, each [kv_heads, length + n, head_dim].
        """
        end = self.length + self.pending
        held = self.buffer[layer]
        held[0, :, self.length : end] = keys.transpose(0, 1)
        held[1, :, self.length : end] = values.transpose(0, 1)
        return held[0, :, :end], held[1, :, :end]

    def commit(self, nodes: Sequence[int]) -> None:
        """Keep the pending rows `nodes` (ascending). Moves only those not already in place, never the prefix."""
        if any(node >= self.pending for node in nodes):
            raise IndexError(f"commit of rows {list(nodes)}, but only {self.pending} are pending")
        settled = next((i for i, node in enumerate(nodes) if node != i), len(nodes))
        if settled < len(nodes):
            source = torch.tensor([self.length + node for node in nodes[settled:]], device=self.buffer.device)
            kept = self.buffer.index_select(3, source)
            self.buffer[:, :, :, self.length + settled : self.length + len(nodes)] = kept
        self.length += len(nodes)
        self.pending = 0
