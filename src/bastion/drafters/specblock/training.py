"""Training a SpecBlock drafter: drafts of several blocks, and the valid-prefix mask (arXiv 2605.07243)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from bastion.drafters.dflash import training as dflash
from bastion.drafters.loading import checkpoint_source
from bastion.drafters.pairing import check_target
from bastion.drafters.specblock.checkpoint import load_model, save_model
from bastion.drafters.specblock.config import ARCHITECTURE, DEFAULTS, SpecBlockConfig
from bastion.drafters.specblock.model import SpecBlockModel
from bastion.errors import BastionError
from bastion.targets.base import Target
from bastion.training.data import Conversation
from bastion.training.features import Features
from bastion.training.ingredients import head_weights
from bastion.training.losses import IGNORED, decay_loss
from bastion.training.measures import Outcome
from bastion.training.recipe import Drafts, FeatureRecipe, block_outcome

RANK_WEIGHT = 0.1  # of the rank head's cross-entropy in the loss


@dataclass(frozen=True, slots=True)
class SpecBlockSettings:
    """What a SpecBlock drafter learns from, and how. Raises BastionError for values that make no sense."""

    anchors: int = 16  # drafts of each conversation in a step
    distill: float = 0.0  # share of the target's distribution in the labels; the rest is the token it wrote

    def __post_init__(self) -> None:
        if self.anchors < 1 or not 0 <= self.distill <= 1:
            raise BastionError("anchors must be 1 or more, and distill between 0 and 1")


def new_model(
    target: Target,
    conversations: Sequence[Conversation],
    layers: int = 2,
    positions: int = DEFAULTS["positions"],
    passes: int = DEFAULTS["passes"],
    draft_vocab: int | None = None,
    taps: int = 5,
) -> SpecBlockModel:
    """A drafter with random weights, in the sizes of its target's layers: up to `passes` blocks of `positions`.

    Raises BastionError for sizes that make no sense, and for a target that verifies no drafts.
    """
    body = dflash.new_model(target, conversations, layers, positions + 1, draft_vocab, taps)
    raw = {key: value for key, value in body.config.raw.items() if key not in ("block_size", "dflash_config")}
    settings = {"target_layer_ids": list(body.config.target_layers), "positions": positions, "passes": passes}
    names = {"architectures": [ARCHITECTURE], "specblock_config": DEFAULTS | settings}
    model = SpecBlockModel(SpecBlockConfig.from_dict(raw | names))
    model.body.load_state_dict(body.state_dict())
    return model


def existing_model(source: str) -> SpecBlockModel:
    """A drafter to train further, in float32: a folder or a hub id."""
    return load_model(checkpoint_source(source), torch.device("cpu"), torch.float32)


def label_ranks(logits: Tensor, columns: Tensor) -> Tensor:
    """The rank of each label, 1 for the drafter's best guess; behind all, where it cannot be drafted.

    logits [n, v] of the labels in `columns` [...] that are not `IGNORED`, n of them; returns [...].
    """
    valid = columns != IGNORED
    own = logits.gather(1, columns[valid][:, None])
    ranks = torch.full_like(columns, logits.shape[1] + 1)
    return ranks.masked_scatter_(valid, 1 + (logits > own).sum(1))


def valid_prefix(ranks: Tensor, positions: int, reach: int) -> Tensor:
    """Which slots are trained, bool [drafts, slots], by the ranks [drafts, slots] of their labels.

    In drafting a position does not see the tokens that its block chose before it: it assumes the best guesses. So it
    counts only while those were the labels. A further block is told the tokens before it, so it counts whenever the
    tree can reach it: while all labels before it were among the best `reach`.
    """
    blocks = ranks.view(len(ranks), -1, positions)
    right = (blocks == 1).cumprod(2).roll(1, 2)
    right[:, :, 0] = 1
    reached = (blocks <= reach).all(2).cumprod(1).roll(1, 1)
    reached[:, 0] = 1
    return (right & reached[:, :, None]).flatten(1).bool()


class SpecBlockRecipe(FeatureRecipe):
    """A SpecBlock drafter in training, as `training.trainer.Trainer` takes it."""

    def __init__(
        self,
        model: SpecBlockModel,
        target: Target,
        conversations: Sequence[Conversation],
        features: Features,
        settings: SpecBlockSettings,
        device: torch.device,
    ):
        """Join what is needed; `features` are those of the model's target layers for all conversations."""
        check_target(model.config.body, target)
        super().__init__(model.body, target, conversations, features, settings, device)
        self._head, self._bias = head_weights(target, model.body.token_ids(), device)
        self.model = self.drafter = model

    def save(self, folder: Path) -> None:
        """Export the drafter in bfloat16."""
        exported = SpecBlockModel(self.drafter.config)
        exported.load_state_dict(self.drafter.state_dict())
        exported.body.load_state_dict(self.exported().state_dict())  # which reads features as they are
        save_model(exported.to(torch.bfloat16), folder)

    def identity(self) -> dict[str, Any]:
        """What a run that is resumed must have in common with the one that it continues."""
        return super().identity() | {"sizes": self.drafter.config.raw}

    def run(self, module: nn.Module, indices: Sequence[int], generator: torch.Generator) -> Outcome:
        """Loss and hits of drafts at random anchors. `module` is the model, as wrapped for training."""
        config = self.drafter.config
        drafts = self.draw(indices, config.depth, generator)
        hidden, rank_logits = module(
            self.embed(drafts.tokens[:, : config.depth - config.positions + 1]),
            torch.cat(drafts.anchors).to(self.device),
            drafts.features,
            drafts.positions,
            drafts.before,
            drafts.sees(),
        )
        return self.outcome(drafts, hidden, rank_logits)

    def outcome(self, drafts: Drafts, hidden: Tensor, rank_logits: Tensor) -> Outcome:
        """Loss and hits of final hidden states [k, slots, hidden] and the rank head's logits [k, slots, buckets]."""
        config, columns = self.drafter.config, drafts.columns
        found: list[Tensor] = []

        def logits(rows: Tensor) -> Tensor:
            found.append(functional.linear(rows, self._head, self._bias).float())
            return found[0]

        def loss(objective: Tensor, valid: Tensor, _: Tensor) -> Tensor:
            ranks = label_ranks(found[0].detach(), columns)
            trained = valid_prefix(ranks, config.positions, config.rank_bounds[-1]) & drafts.present
            buckets = torch.bucketize(ranks[trained], torch.tensor(config.rank_bounds, device=ranks.device))
            of_ranks = functional.cross_entropy(rank_logits[trained].float(), buckets)
            return decay_loss(objective, valid & trained, None) + RANK_WEIGHT * of_ranks

        return block_outcome(logits, hidden, drafts, loss, self.settings.distill)
