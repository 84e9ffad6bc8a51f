"""Caches for transformers models: one that keeps any branch of a tree, and transformers' own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

from bastion.errors import BastionError

SMALLEST_CAPACITY = 64  # tokens
# Windows that attention modules apply by themselves, by the number of a row (GPT-Neo); DynamicCache ignores them.
OWN_WINDOWS = ("window_size", "local_window", "attention_window", "attention_window_size", "local_attention")


class TreeLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers is untyped
    """Keys and values of one layer: allocated once, growing by doubling, written and compacted in place.

    `update` writes behind the `length` committed tokens and does not move `length`, so the rows it wrote stay
    pending until `keep` is called, and the next `update` overwrites them.
    """

    is_sliding = False
    is_croppable = False  # `keep` takes tokens back, not transformers' crop

    def __init__(self, capacity: int):
        super().__init__()
        self.capacity = max(capacity, SMALLEST_CAPACITY)
        self.length = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate buffers [1, kv_heads, capacity, head_dim]; with MLA, values have their own head_dim."""
        self.keys = _empty_like(key_states, self.capacity)
        self.values = _empty_like(value_states, self.capacity)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write new rows [1, kv_heads, n, head_dim]; returns views [1, kv_heads, length + n, head_dim]."""
        end = self.length + key_states.shape[-2]
        if end > self.capacity:
            self.capacity = max(end, 2 * self.capacity)
            if self.is_initialized:
                self.keys = self._grown(self.keys)
                self.values = self._grown(self.values)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys[:, :, self.length : end] = key_states
        self.values[:, :, self.length : end] = value_states
        return self.keys[:, :, :end], self.values[:, :, :end]

    def _grown(self, buffer: Tensor) -> Tensor:
        grown = _empty_like(buffer, self.capacity)
        grown[:, :, : self.length] = buffer[:, :, : self.length]
        return grown

    def keep(self, settled: int, moved: Tensor) -> None:
        """Commit `settled` pending rows that are in place, and the rows at slots `moved` [k] behind them."""
        start = self.length + settled
        end = start + len(moved)
        if len(moved) and self.is_initialized:  # not initialized: the layer reads another layer's keys
            slots = moved.to(self.keys.device)
            self.keys[:, :, start:end] = self.keys.index_select(2, slots)
            self.values[:, :, start:end] = self.values.index_select(2, slots)
        self.length = end

    def get_seq_length(self) -> int:
        """Number of committed tokens."""
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the keys that `query_length` new rows see."""
        return self.length + query_length, 0

    def get_max_length(self) -> int:
        """No limit."""
        return -1

    get_max_cache_shape = get_max_length  # its name in transformers 5.10


def _empty_like(states: Tensor, capacity: int) -> Tensor:
    batch, heads, _, width = states.shape
    return states.new_empty(batch, heads, capacity, width)


class TreeCache:
    """The cache of one sequence for models whose layers all see the whole context."""

    __slots__ = ("length", "pending", "states")

    def __init__(self, config: Any, capacity: int):
        """`config`: the model's transformers config."""
        layers = DynamicCache(config=config).layers
        # Layers without keys of their own (dummy layers) stay as they are.
        self.states = Cache(
            layers=[TreeLayer(capacity) if isinstance(layer, DynamicLayer) else layer for layer in layers]
        )
        self.length = 0
        self.pending = 0

    def forget(self) -> None:
        """Drop the pending rows: the next ones are written over them."""
        self.pending = 0

    def commit(self, nodes: Sequence[int]) -> None:
        """Keep the pending rows `nodes` (ascending). Moves only those not in place, never the prefix."""
        _check(nodes, self.pending)
        settled = next((i for i, node in enumerate(nodes) if node != i), len(nodes))
        moved = torch.tensor([self.length + node for node in nodes[settled:]], dtype=torch.long)
        for layer in self.states.layers:
            if isinstance(layer, TreeLayer):
                layer.keep(settled, moved)
        self.length += len(nodes)
        self.pending = 0


class ModelCache:
    """The cache that transformers gives the model. Rows can be cut off at its end, if at all."""

    __slots__ = ("can_roll_back", "length", "pending", "states")

    def __init__(self, config: Any, can_roll_back: bool):
        """`config`: the model's transformers config."""
        self.states = DynamicCache(config=config)
        if can_roll_back and hasattr(self.states, "activate_past_recording"):
            self.states.activate_past_recording()
        self.can_roll_back = can_roll_back
        self.length = 0
        self.pending = 0

    def forget(self) -> None:
        """Drop the pending rows. Raises BastionError if the model cannot take tokens back."""
        if self.pending:
            self.commit(())

    def commit(self, nodes: Sequence[int]) -> None:
        """Keep the first `len(nodes)` pending rows. Raises BastionError if that is not what `nodes` says."""
        _check(nodes, self.pending)
        if list(nodes) != list(range(len(nodes))):
            raise BastionError(f"cannot keep rows {list(nodes)} of a chain: draft chains for this model")
        surplus = self.pending - len(nodes)
        if surplus and not self.can_roll_back:
            raise BastionError("the model cannot take tokens back: decode it plainly, without a drafter")
        if surplus:
            self.states.crop(-surplus)
        else:  # not `crop(0)` of the whole cache: in transformers 5.10 that empties it
            for layer in self.states.layers:
                if getattr(layer, "record_past", False):
                    layer.crop(0)  # drops what the layer recorded in order to be able to go back
        self.length += len(nodes)
        self.pending = 0


def _check(nodes: Sequence[int], pending: int) -> None:
    if any(node >= pending for node in nodes):
        raise IndexError(f"commit of rows {list(nodes)}, but only {pending} are pending")


def obstacle_to_trees(config: Any, max_context: int) -> str | None:
    """Why the model's layers cannot verify trees; None if each sees the whole context (or keeps no keys)."""
    layers = DynamicCache(config=config).layers
    decoder = config.get_text_config(decoder=True)
    windows = [getattr(layer, "sliding_window", None) for layer in layers]
    windows += [getattr(decoder, name, None) for name in OWN_WINDOWS]
    for window in windows:
        if isinstance(window, int) and 0 < window < max_context:
            return f"a layer sees the last {window} tokens only, fewer than the context of {max_context}"
    for layer in layers:
        if type(layer).__name__ not in ("DynamicLayer", "DynamicSlidingWindowLayer", "DummyLayer"):
            return f"a layer keeps a state other than keys and values ({type(layer).__name__})"
    return None


def obstacle_to_chains(cache: ModelCache) -> str | None:
    """Why a cache that has seen some tokens cannot take tokens back; None if it can."""
    states = cache.states
    if hasattr(states, "is_croppable"):
        croppable = states.is_croppable
    else:  # transformers 5.10: only layers that hold the whole context
        croppable = all(type(layer) is DynamicLayer for layer in states.layers)
    return None if croppable else "transformers cannot take tokens back from its cache"
