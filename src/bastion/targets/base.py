"""What the decode loop asks of a model that verifies drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes that decide what a forward pass costs."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int


class Cache(Protocol):
    """Keys and values of one sequence. Made by `Target.new_cache`, read by that target only."""

    @property
    def length(self) -> int:
        """Number of committed tokens."""


@dataclass(slots=True)
class Rows:
    """The new tokens of one sequence in one forward pass: a piece of prompt, one token, a chain or a tree.

    They are written behind the `cache.length` committed tokens, all of which every row sees.
    """

    tokens: Tensor  # [n] int64, on the target's device
    positions: Tensor  # [n] int64: the token's place in the text (siblings share one)
    cache: Any  # the Cache that this target made
    visible: Tensor | None = None  # [n, n] bool, row i sees row j; None: causal (itself and all rows before)
    first_logit: int = 0  # logits are computed for the rows from here on
    prompt_length: int = 0  # of the whole prompt, where the rows are a piece of one; some RoPE scalings depend on it


@dataclass(slots=True)
class Verification:
    """What the target says about `n` rows."""

    logits: Tensor  # [n - first_logit, vocab], in the target's dtype
    features: Tensor | None  # [n, len(feature_layers) * hidden]; None when no feature layers are set


TreeSupport = Literal["tree", "chain", "none"]


class Target(Protocol):
    """A causal language model that can check many rows in one pass, and keep some of them.

    `forward` leaves the rows pending behind `cache.length`; `commit` keeps some and forgets the rest. A forward
    pass on a cache with pending rows overwrites them.
    """

    shape: ModelShape
    device: torch.device
    dtype: torch.dtype
    name: str  # what the user called it
    digest: str  # identifies weights and architecture, for calibrations
    tree_support: TreeSupport  # what `Rows.visible` may be: any tree, causal chains only, or one row at a time
    max_context: int  # positions the model was made for
    attention: str  # what computes the attention, for calibrations

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """Ids of the layers whose output is returned as features; id i is transformers' hidden_states[i + 1]."""

    def set_feature_layers(self, layers: Sequence[int]) -> None:
        """Choose the feature layers. Raises BastionError for an id that the model does not have."""

    def new_cache(self, capacity: int = 0) -> Any:
        """An empty cache, with room for `capacity` tokens before it has to grow."""

    def forward(self, rows: list[Rows]) -> list[Verification]:
        """Run all rows of all sequences in one pass; one Verification for each, in order."""

    def commit(self, cache: Any, nodes: Sequence[int]) -> None:
        """Keep the pending rows `nodes` (ascending indices into the last forward's rows) and drop the others."""

    def embed(self, tokens: Tensor) -> Tensor:
        """Input embeddings [..., hidden] of tokens [...]: drafters share them."""

    def head(self, hidden: Tensor, token_ids: Tensor | None = None) -> Tensor:
        """Language-model head without final norm: logits [..., vocab] of hidden [..., hidden].

        With `token_ids` [v], only those rows of the head: logits [..., v] in their order.
        """
