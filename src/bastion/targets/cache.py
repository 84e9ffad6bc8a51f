"""Key/value caches: one a sequence, in place in a buffer that sequences of the same size share."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:  # attention.py reads the caches
    from bastion.targets.attention import TreeMask

LEAST_CAPACITY = 64
COARSE = 1024  # capacities are powers of two up to here, and multiples of it beyond
MOST_SLOTS = 32  # of a slab; bounds what is allocated ahead of need


class KeyValueCache:
    """Keys and values of all layers in one buffer, `length` committed tokens and `pending` rows behind them."""

    __slots__ = ("__weakref__", "_layers", "buffer", "length", "mask", "pending")

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
            grown = self._allocate(max(needed, 2 * capacity))
            grown[:, :, :, : self.length] = self.buffer[:, :, :, : self.length]
            self.buffer, self._layers = grown, grown.unbind(0)
        self.pending = rows

    def _allocate(self, capacity: int) -> Tensor:
        layers, pair, heads, _, width = self.buffer.shape
        return self.buffer.new_empty(layers, pair, heads, capacity, width)

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


class SlotCache(KeyValueCache):
    """A cache that lies in a slot of a slab, so that one operation can serve it and its neighbours."""

    __slots__ = ("_slabs", "slab", "slot")

    def __init__(self, slabs: Slabs, capacity: int, mask: TreeMask):
        self._slabs = slabs
        super().__init__(self._allocate(capacity), mask)

    def _allocate(self, capacity: int) -> Tensor:
        self.slab: Slab
        self.slab, self.slot = self._slabs.take(self, capacity)
        return self.slab.buffer[:, self.slot]


class Slab:
    """The keys and values of several sequences of the same capacity in one buffer, a slot each.

    A slot belongs to a cache for as long as the cache lives and has not moved to a larger one.
    """

    __slots__ = ("__weakref__", "_owners", "buffer", "layers")

    def __init__(self, buffer: Tensor):
        self.buffer = buffer  # [layers, slots, 2, kv_heads, capacity, head_dim]
        self.layers = buffer.unbind(0)
        self._owners: list[weakref.ref[SlotCache] | None] = [None] * self.slots

    @property
    def slots(self) -> int:
        """How many sequences it can hold."""
        return self.buffer.shape[1]

    @property
    def capacity(self) -> int:
        """How many tokens a slot can hold."""
        return self.buffer.shape[4]

    def free(self) -> list[int]:
        """The slots that belong to no cache, ascending."""
        owners = [None if owner is None else owner() for owner in self._owners]
        return [slot for slot, owner in enumerate(owners) if owner is None or owner.slab is not self]

    def give(self, slot: int, cache: SlotCache) -> None:
        """Let the slot belong to a cache.

        It is cleared: a neighbour's longer row reads on behind this one's end, where a masked NaN is still a NaN.
        """
        self._owners[slot] = weakref.ref(cache)
        if self.slots > 1:
            self.buffer[:, slot].zero_()


class Slabs:
    """Hands out slots. The next slab of a capacity has as many slots as are in use, as far as MOST_SLOTS.

    Slabs live as long as a cache lies in them: a sequence alone takes memory for itself only, and gives it back. They
    serve one thread, as targets do.
    """

    def __init__(self, layers: int, kv_heads: int, head_dim: int, device: torch.device, dtype: torch.dtype):
        self._sizes = layers, kv_heads, head_dim
        self._device, self._dtype = device, dtype
        self._slabs: list[weakref.ref[Slab]] = []

    @torch.inference_mode(False)  # what grows inside a forward pass is written to outside too
    def take(self, cache: SlotCache, capacity: int) -> tuple[Slab, int]:
        """A slab and a slot of at least `capacity` tokens for a cache, among many neighbours rather than few."""
        capacity = _rounded(capacity)
        alive = [slab for reference in self._slabs if (slab := reference()) is not None]
        alike = [(slab, slab.free()) for slab in alive if slab.capacity == capacity]
        slab, free = max(alike, key=lambda pair: pair[0].slots if pair[1] else 0, default=(None, []))
        if slab is None or not free:
            in_use = sum(slab.slots - len(free) for slab, free in alike)
            slab, free = self._new(min(max(in_use, 1), MOST_SLOTS), capacity), [0]
            alive.append(slab)
        slab.give(free[0], cache)
        self._slabs = [weakref.ref(slab) for slab in alive]
        return slab, free[0]

    def _new(self, slots: int, capacity: int) -> Slab:
        layers, heads, width = self._sizes
        size = layers, slots, 2, heads, capacity, width
        return Slab(torch.empty(size, device=self._device, dtype=self._dtype))


def _rounded(capacity: int) -> int:
    """The capacity of a slot: sequences of about the same size get the same."""
    if capacity > COARSE:
        return -(-capacity // COARSE) * COARSE
    return max(LEAST_CAPACITY, 1 << (capacity - 1).bit_length())
