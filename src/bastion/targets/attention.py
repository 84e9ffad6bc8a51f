"""Attention of pending rows to a cached prefix and to each other's tree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from bastion.targets.base import Rows
from bastion.targets.cache import Slab, SlotCache

CALL = 256  # what a call costs beyond the keys that it reads, in keys; measured on two CPU cores


class TreeMask:
    """Additive mask whose prefix part is written once and stays.

    Every row sees the whole prefix, so only the square of pending rows ever changes. It lies in the last columns of
    a buffer of zeros; the mask for a context of any length is a view that ends there. Nothing of the prefix's length
    is written in a round. Grouped queries of one row are neighbours, so each row of the square stands `groups` times.
    """

    __slots__ = ("_buffer", "_dirty", "groups")

    def __init__(self, groups: int, device: torch.device, dtype: torch.dtype):
        self.groups = groups  # query heads that share a key head
        self._buffer = torch.zeros(0, 0, device=device, dtype=dtype)
        self._dirty = 0  # how many of the last columns may hold something else than zero

    def view(self, visible: Tensor | None, rows: int, length: int) -> Tensor | None:
        """Mask [rows * groups, length] for `rows` rows at the end of `length` keys; None where all is visible."""
        if rows == 1:
            return None
        queries = rows * self.groups
        if queries > self._buffer.shape[0] or length > self._buffer.shape[1]:
            height, width = self._buffer.shape
            self._buffer = self._buffer.new_zeros(max(queries, height), max(length, 2 * width))
            self._dirty = 0
        if visible is None:
            visible = torch.ones(rows, rows, dtype=torch.bool, device=self._buffer.device).tril_()
        square = torch.zeros(rows, rows, dtype=self._buffer.dtype, device=self._buffer.device)
        square.masked_fill_(~visible, float("-inf"))
        width = self._buffer.shape[1]
        if self._dirty > rows:
            self._buffer[:queries, width - self._dirty : width - rows] = 0
        self._dirty = max(self._dirty, rows)
        self._buffer[:queries, width - rows :] = square.repeat_interleave(self.groups, 0)
        return self._buffer[:queries, width - length :]


def attend(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """Grouped-query attention without expanding keys or values: the queries of a group become rows of its head.

    queries [n, heads, head_dim], keys and values [1, kv_heads, length, head_dim], mask from `TreeMask.view`;
    returns [n, heads * head_dim].
    """
    rows, heads, width = queries.shape
    kv_heads = keys.shape[1]
    packed = queries.view(rows, kv_heads, -1, width).transpose(0, 1).reshape(1, kv_heads, -1, width)
    out = functional.scaled_dot_product_attention(packed, keys, values, attn_mask=mask)
    return out.view(kv_heads, rows, -1, width).transpose(0, 1).reshape(rows, heads * width)


class Part(Protocol):
    """Rows of a pass that attend in one call."""

    places: Sequence[int]  # of their sequences in the pass

    def mix(self, layer: int, fused: Tensor) -> Tensor:
        """Write the rows' keys and values, and attend.

        fused [n, heads + 2 * kv_heads, head_dim]: queries, keys and values; returns [n, heads * head_dim].
        """


class Alone:
    """Any rows of one sequence."""

    __slots__ = ("_cache", "_mask", "places")

    def __init__(self, place: int, row: Rows):
        self.places: Sequence[int] = (place,)
        self._cache: SlotCache = row.cache
        rows = len(row.tokens)
        self._mask = row.cache.mask.view(row.visible, rows, row.cache.length + rows)

    def mix(self, layer: int, fused: Tensor) -> Tensor:
        """See `Part`."""
        heads = fused.shape[1] - 2 * self._cache.buffer.shape[2]
        keys, values = self._cache.write(layer, fused[:, heads:])
        return attend(fused[:, :heads], keys, values, self._mask)


class SideBySide:
    """One row of each of several sequences in one slab, padded to the longest.

    All slots from the first to the last take part; what comes out of those in between that belong to other
    sequences, or to none, is dropped.
    """

    __slots__ = ("_first", "_inside", "_length", "_mask", "_positions", "_slab", "_slots", "_span", "places")

    def __init__(self, places: Sequence[int], caches: Sequence[SlotCache]):
        """The caches lie in one slab, their slots ascending."""
        self.places, self._slab = places, caches[0].slab
        buffer, mask = self._slab.buffer, caches[0].mask
        self._first = caches[0].slot
        self._span = caches[-1].slot - self._first + 1
        self._length = max(one.length for one in caches) + 1
        where = torch.tensor([[one.slot, one.length] for one in caches], device=buffer.device)
        self._slots, self._positions = where.unbind(1)
        self._inside = self._slots - self._first
        ends = where.new_zeros(self._span).index_copy_(0, self._inside, self._positions)
        hidden = torch.arange(self._length, device=buffer.device) > ends[:, None]
        additive = torch.zeros(hidden.shape, device=buffer.device, dtype=buffer.dtype)
        self._mask = additive.masked_fill_(hidden, float("-inf"))[:, None, None].expand(-1, -1, mask.groups, -1)

    def mix(self, layer: int, fused: Tensor) -> Tensor:
        """See `Part`."""
        held, rows = self._slab.layers[layer], len(self.places)
        _, _, kv_heads, _, width = held.shape
        heads = fused.shape[1] - 2 * kv_heads
        held[self._slots, :, :, self._positions] = fused[:, heads:].view(rows, 2, kv_heads, width)
        queries = fused[:, :heads]
        if self._span > rows:
            queries = queries.new_zeros(self._span, heads, width).index_copy_(0, self._inside, queries)
        keys, values = held[self._first : self._first + self._span, :, :, : self._length].unbind(1)
        packed = queries.view(self._span, kv_heads, -1, width)
        out = functional.scaled_dot_product_attention(packed, keys, values, attn_mask=self._mask)
        out = out.reshape(self._span, heads * width)
        return out if self._span == rows else out[self._inside]


def plan(rows: Sequence[Rows]) -> list[Part]:
    """Which rows of a pass attend in one call. Makes room for them in their caches."""
    slabs: dict[Slab, list[int]] = {}
    alone = []
    for place, row in enumerate(rows):
        row.cache.reserve(len(row.tokens))
        if len(row.tokens) == 1:
            slabs.setdefault(row.cache.slab, []).append(place)
        else:
            alone.append(place)
    parts: list[Part] = []
    for places in slabs.values():
        places.sort(key=lambda place: int(rows[place].cache.length))
        shared = worth_sharing([rows[place].cache for place in places])
        alone += places[shared:]
        if shared:
            together = sorted(places[:shared], key=lambda place: int(rows[place].cache.slot))
            parts.append(SideBySide(together, [rows[place].cache for place in together]))
    return parts + [Alone(place, rows[place]) for place in alone]


def worth_sharing(caches: Sequence[SlotCache]) -> int:
    """How many of the shortest caches of a slab, given in ascending length, are best read in one call.

    A call costs CALL and the keys that it reads: a shared one the longest's for each slot from the first to the last.
    """
    apart = sum(cache.length + CALL for cache in caches)
    best, count = apart, 0
    first = last = caches[0].slot
    for size, cache in enumerate(caches, 1):
        first, last = min(first, cache.slot), max(last, cache.slot)
        apart -= cache.length + CALL
        cost = CALL + (last - first + 1) * cache.length + apart
        if cost < best:
            best, count = cost, size
    return count
