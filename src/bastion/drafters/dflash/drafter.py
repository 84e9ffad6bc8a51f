"""DFlash as a `Drafter`: one pass over a block of masks guesses all its positions (arXiv 2602.06036)."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from bastion.drafters.base import DraftContext, Proposal
from bastion.drafters.dflash.checkpoint import load_model
from bastion.drafters.dflash.config import DFlashConfig
from bastion.drafters.dflash.model import DFlashModel
from bastion.drafters.marginal import MarginalProposal
from bastion.errors import BastionError
from bastion.layers.linear import for_inference
from bastion.targets.base import Target
from bastion.targets.cache import KeyValueCache


class DFlashDrafter:
    """Drafts `block_size - 1` tokens with a DFlash model and its target's embeddings and head."""

    def __init__(self, model: DFlashModel, target: Target, name: str = "dflash"):
        """Join a model and its target. Raises BastionError if they were not made for each other."""
        check_target(model.config, target)
        _try_target(model.config, target)
        self.model, self.target, self.name = model, target, name
        self.digest = model.digest()
        self.depth = model.config.block_size - 1
        self.feature_layers = model.config.target_layers
        token_ids = model.token_ids()
        self._token_ids = None if token_ids is None else token_ids.to(target.device)
        self._temperatures = torch.tensor(model.config.draft_temperatures, device=target.device)

    @classmethod
    def load(
        cls,
        source: str | Path,
        target: Target,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> DFlashDrafter:
        """Load a checkpoint (a folder or a hub id) for inference, on the target's device and in its dtype.

        Raises BastionError if there is none, it is damaged, or it was made for another target.
        """
        model = load_model(source, device or target.device, dtype or target.dtype)
        drafter = cls(model.eval().requires_grad_(False), target, str(source))
        for_inference(model)
        return drafter

    @property
    def draft_temperatures(self) -> tuple[float, ...]:
        """What the logits of each depth are divided by when the target's temperature is 0."""
        return tuple(self._temperatures.tolist())

    def with_draft_temperatures(self, temperatures: Sequence[float]) -> DFlashDrafter:
        """This drafter with other draft temperatures, `depth` of them; it keeps the digest, for it costs the same."""
        other = copy.copy(self)
        other._temperatures = self._temperatures.new_tensor(temperatures)
        return other

    def with_block_size(self, size: int) -> DFlashDrafter:
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
        roots = torch.tensor([context.tokens[-1] for context in contexts], device=self.target.device)
        masks = roots.new_full((len(contexts), self.depth), self.model.config.mask_token)
        blocks = self.target.embed(torch.cat((roots[:, None], masks), 1))
        hidden = torch.cat([self._guess(*pair) for pair in zip(contexts, blocks, strict=True)])
        hidden = hidden.to(self.target.device, self.target.dtype)
        logits = self.target.head(hidden, self._token_ids).float().view(len(contexts), self.depth, -1)
        return [
            MarginalProposal(
                (rows / (context.temperature or self._temperatures[:, None])).log_softmax(-1), self._token_ids
            )
            for context, rows in zip(contexts, logits, strict=True)
        ]

    def _guess(self, context: DraftContext, block: Tensor) -> Tensor:
        """Read one sequence's new features, then hidden states [depth, hidden] of its block's masks."""
        if context.memory is None:
            context.memory = self.model.new_cache()
        cache: KeyValueCache = context.memory
        if context.features:
            features = torch.cat(context.features).to(self.model.device, self.model.dtype)
            context.features.clear()
            self.model.read(cache, features)
        if cache.length != len(context.tokens) - 1:
            raise ValueError(f"{len(context.tokens) - 1} tokens precede the root, but features came for {cache.length}")
        return self.model.draft(cache, block.to(self.model.device, self.model.dtype))[1:]


def check_target(config: DFlashConfig, target: Target) -> None:
    """Raise BastionError, with what differs, if a drafter with this config was made for another target."""
    shape = target.shape
    outside = [i for i in config.target_layers if not 0 <= i < shape.layers]
    if config.vocab != shape.vocab:
        difference = f"has a vocabulary of {config.vocab} tokens, {target.name} of {shape.vocab}"
    elif config.hidden != shape.hidden:
        difference = f"has hidden size {config.hidden}, {target.name} {shape.hidden}"
    elif config.num_target_layers not in (None, shape.layers):
        difference = f"was made for {config.num_target_layers} layers, {target.name} has {shape.layers}"
    elif outside:
        difference = f"reads layers {outside}, {target.name} has layers 0 to {shape.layers - 1}"
    else:
        return
    raise BastionError(f"the drafter {difference}: use the drafter that was trained for this target")


def _try_target(config: DFlashConfig, target: Target) -> None:
    """Raise what the target raises if it does not give the drafter its layers or its head (both see `Target`)."""
    before = target.feature_layers
    target.set_feature_layers(config.target_layers)
    target.set_feature_layers(before)
    target.head(torch.zeros(1, config.hidden, device=target.device, dtype=target.dtype))
