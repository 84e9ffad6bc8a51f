"""DFlash as a `Drafter`: one pass over a block of masks guesses all its positions (arXiv 2602.06036)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from bastion.drafters.base import DraftContext, Proposal
from bastion.drafters.dflash.checkpoint import load_model
from bastion.drafters.dflash.model import DFlashModel
from bastion.drafters.marginal import MarginalProposal
from bastion.drafters.pairing import check_target, try_target
from bastion.drafters.pretrained import Pretrained
from bastion.errors import BastionError
from bastion.targets.base import Target
from bastion.targets.cache import KeyValueCache

Draft = Callable[[KeyValueCache, Tensor], Tensor]  # from the context and a block's embeddings to its hidden states


class DFlashDrafter(Pretrained):
    """Drafts `block_size - 1` tokens with a DFlash model and its target's embeddings and head."""

    load_model: ClassVar[Any] = staticmethod(load_model)

    def __init__(self, model: DFlashModel, target: Target, name: str = "dflash"):
        """Join a model and its target. Raises BastionError if they were not made for each other."""
        check_target(model.config, target)
        try_target(model.config, target)
        self.model, self.target, self.name = model, target, name
        self.digest = model.digest()
        self.depth = model.config.block_size - 1
        self.feature_layers = model.config.target_layers
        token_ids = model.token_ids()
        self._token_ids = None if token_ids is None else token_ids.to(target.device)
        self._temperatures = torch.tensor(model.config.draft_temperatures, device=target.device)

    @property
    def draft_temperatures(self) -> tuple[float, ...]:
        """What the logits of each depth are divided by when the target's temperature is 0."""
        return tuple(self._temperatures.tolist())

    def with_draft_temperatures(self, temperatures: Sequence[float]) -> Self:
        """This drafter with other draft temperatures, `depth` of them; it keeps the digest, for it costs the same."""
        other = copy.copy(self)
        other._temperatures = self._temperatures.new_tensor(temperatures)
        return other

    def with_block_size(self, size: int) -> Self:
        """This drafter with smaller blocks, root included: it drafts `size - 1` tokens.

        Raises BastionError for a size that it was not trained for.
        """
        largest = self.model.config.block_size
        if not 2 <= size <= largest:
            raise BastionError(f"the block size of {self.name} must be from 2 to {largest}, not {size}")
        other = copy.copy(self)
        other.depth = size - 1
        other._temperatures = self._temperatures[: other.depth]
        return other

    @torch.no_grad()
    def propose(self, contexts: list[DraftContext]) -> list[Proposal]:
        """Draft for every sequence; embeddings and head run over all sequences together.

        At temperature 0 the draft temperatures apply, which were fitted there, above it the target's alone.
        """
        logits = self._logits(self._hidden(contexts, self.model.draft)) / self._divisors(contexts)
        return [MarginalProposal(rows, self._token_ids) for rows in logits.log_softmax(-1)]

    def _hidden(self, contexts: list[DraftContext], draft: Draft) -> Tensor:
        """Hidden states [n, depth, hidden] of the masks of each sequence's block, by the model's `draft`."""
        roots = torch.tensor([context.tokens[-1] for context in contexts], device=self.target.device)
        masks = roots.new_full((len(contexts), self.depth), self.model.config.mask_token)
        blocks = self.target.embed(torch.cat((roots[:, None], masks), 1)).to(self.model.device, self.model.dtype)
        return torch.stack(
            [draft(self._read(context), block)[1:] for context, block in zip(contexts, blocks, strict=True)]
        )

    def _read(self, context: DraftContext) -> KeyValueCache:
        """Read one sequence's new features; its cache, up to its root."""
        if context.memory is None:
            context.memory = self.model.new_cache()
        cache: KeyValueCache = context.memory
        if (features := context.take_features(self.model.device, self.model.dtype)) is not None:
            self.model.read(cache, features)
        context.check_read(cache.length)
        return cache

    def _logits(self, hidden: Tensor) -> Tensor:
        """The target's head on hidden states [n, rows, hidden], all in one call: [n, rows, v] in float32."""
        rows = hidden.flatten(0, 1).to(self.target.device, self.target.dtype)
        logits = self.target.head(rows, self._token_ids).float()
        return logits.view(*hidden.shape[:2], logits.shape[-1])

    def _divisors(self, contexts: list[DraftContext]) -> Tensor:
        """What the logits of each sequence's depths are divided by, [n, depth, 1]."""
        own = self._temperatures
        return torch.stack([own.new_full(own.shape, one.temperature) if one.temperature else own for one in contexts])[
            :, :, None
        ]
