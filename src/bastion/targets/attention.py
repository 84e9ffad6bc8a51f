"""Attention of pending rows to a cached prefix and to each other's tree."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


class TreeMask:
    """Additive mask whose prefix part is written once and stays.

    Every row sees the whole prefix, so only the square of pending rows ever changes. It lies in the last columns of
    a buffer of zeros; the mask for a context of any length is a view that ends there. Nothing of the prefix's length
    is written in a round. Grouped queries of one row are neighbours, so each row of the square stands `groups` times.
    """

    __slots__ = ("_buffer", "_dirty", "_groups")

    def __init__(self, groups: int, device: torch.device, dtype: torch.dtype):
        self._groups = groups
        self._buffer = torch.zeros(0, 0, device=device, dtype=dtype)
        self._dirty = 0  # how many of the last columns may hold something else than zero

    def view(self, visible: Tensor | None, rows: int, length: int) -> Tensor | None:
        """Mask [rows * groups, length] for `rows` rows at the end of `length` keys; None where all is visible."""
        if rows == 1:
            return None
        queries = rows * self._groups
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
        self._buffer[:queries, width - rows :] = square.repeat_interleave(self._groups, 0)
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
