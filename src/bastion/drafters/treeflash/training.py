"""Training TreeFlash's correction on a frozen DFlash drafter (arXiv 2606.03819)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bastion.drafters.dflash.model import DFlashModel
from bastion.drafters.dflash.training import DFlashRecipe, DFlashSettings
from bastion.drafters.treeflash.checkpoint import save_model
from bastion.drafters.treeflash.config import TOP_M, TreeFlashConfig
from bastion.drafters.treeflash.model import TreeFlashModel
from bastion.targets.base import Target
from bastion.training.data import Conversation
from bastion.training.features import Features
from bastion.training.measures import Outcome


def new_model(body: DFlashModel, intermediate: int | None = None, top_m: int = TOP_M) -> TreeFlashModel:
    """A drafter on the weights of a DFlash drafter, which it copies; its correction does nothing yet.

    `intermediate` is the correction's width, the body's by default. Raises BastionError for sizes that make no sense.
    """
    names = {"architectures": ["TreeFlashDraftModel"]}
    settings: dict[str, Any] = {"ar_approximation": "swiglu", "top_m": top_m}
    if intermediate is not None:
        settings["intermediate_size"] = intermediate
    model = TreeFlashModel(TreeFlashConfig.from_dict(body.config.raw | names | {"treeflash_config": settings}))
    model.model.load_state_dict(body.state_dict())
    return model


class TreeFlashRecipe(DFlashRecipe):
    """TreeFlash's correction in training, as `training.trainer.Trainer` takes it.

    Blocks, labels and losses are DFlash's, except that each slot is corrected for the text's own token before it. Only
    the correction learns: with the body trained too the paper finds about the same accepted lengths.
    """

    def __init__(
        self,
        model: TreeFlashModel,
        target: Target,
        conversations: Sequence[Conversation],
        features: Features,
        settings: DFlashSettings,
        device: torch.device,
    ):
        """Join what is needed; see `DFlashRecipe`."""
        self.treeflash, self._body_digest = model.config, model.model.digest()
        super().__init__(model.model, target, conversations, features, settings, device)
        self.body.requires_grad_(False).to(device)
        self.model = model.ar_approximation

    def save(self, folder: Path) -> None:
        """Export body and correction as one drafter, in bfloat16."""
        exported = TreeFlashModel(self.treeflash)
        exported.model.load_state_dict(self.exported().state_dict())
        exported.ar_approximation.load_state_dict(self.model.state_dict())
        save_model(exported.to(torch.bfloat16), folder)

    def identity(self) -> dict[str, Any]:
        """What a run that is resumed must have in common with the one that it continues; the body's weights too."""
        return super().identity() | {"body": self._body_digest}

    def run(self, module: nn.Module, indices: Sequence[int], generator: torch.Generator) -> Outcome:
        """Loss and hits of random blocks of some conversations. `module` is the correction, as wrapped for training."""
        drafts = self.draw(indices, self.config.block_size - 1, generator)
        with torch.no_grad():
            hidden = self.slots(self.body.block_states(*self.inputs(drafts)))
            normed = self.body.norm(hidden)
        corrected = module(hidden, normed, self.embed(drafts.tokens))
        return self.outcome(drafts, self.body.norm(corrected))
