"""Training a DFlash drafter: anchored blocks, their mask and labels, and the loss (arXiv 2602.06036, section 4)."""

from __future__ import annotations

import collections
import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bastion.drafters.dflash.checkpoint import load_model, save_model
from bastion.drafters.dflash.config import DFlashConfig
from bastion.drafters.dflash.model import DFlashModel
from bastion.drafters.loading import checkpoint_source
from bastion.drafters.pairing import check_target
from bastion.errors import BastionError
from bastion.targets.base import Target
from bastion.training.data import Conversation
from bastion.training.features import Features
from bastion.training.ingredients import check_sizes, frequent_tokens, head_weights, target_layers
from bastion.training.losses import decay_loss, dpace_loss
from bastion.training.measures import Outcome
from bastion.training.recipe import Drafts, FeatureRecipe, block_outcome

LARGEST_BLOCK = 256  # positions; masks and memory grow with it, and no drafter is right so far ahead


@dataclass(frozen=True, slots=True)
class DFlashSettings:
    """What a DFlash drafter learns from, and how. Raises BastionError for values that make no sense."""

    anchors: int = 16  # blocks of each conversation in a step
    loss: str = "decay"  # or "dpace"
    gamma: float | None = None  # of the decay; None: by the block size, as DFlash does
    distill: float = 0.0  # share of the target's distribution in the labels; the rest is the token it wrote

    def __post_init__(self) -> None:
        if self.loss not in ("decay", "dpace"):
            raise BastionError(f"unknown loss {self.loss!r}: use decay or dpace")
        if self.loss == "dpace" and self.gamma is not None:
            raise BastionError("gamma belongs to the loss 'decay': leave it out with 'dpace'")
        if self.anchors < 1 or not 0 <= self.distill <= 1 or not (self.gamma is None or 0.1 <= self.gamma < math.inf):
            raise BastionError("anchors must be 1 or more, distill between 0 and 1, and gamma 0.1 or more")


def mask_token(conversations: Sequence[Conversation], vocab: int) -> int:
    """The token that the conversations hold least often, of several the highest: it serves as the mask."""
    counts = collections.Counter(token for one in conversations for token in one.ids)
    return min(range(vocab), key=lambda token: (counts[token], -token))


def new_model(
    target: Target,
    conversations: Sequence[Conversation],
    layers: int = 3,
    block_size: int = 8,
    draft_vocab: int | None = None,
    taps: int = 5,
) -> DFlashModel:
    """A drafter with random weights, in the sizes of its target's layers.

    Raises BastionError for sizes that make no sense, and for a target that verifies no drafts.
    """
    check_sizes(target, draft_vocab)
    if layers < 1 or not 2 <= block_size <= min(target.max_context, LARGEST_BLOCK):
        raise BastionError(f"a drafter has 1 layer or more, and a block 2 to {LARGEST_BLOCK} positions")
    shape = target.shape
    raw = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "attention_bias": False,
        "block_size": block_size,
        "dflash_config": {
            "mask_token_id": mask_token(conversations, shape.vocab),
            "target_layer_ids": list(target_layers(shape.layers, taps)),
        },
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "initializer_range": 0.02,
        "intermediate_size": shape.intermediate,
        "layer_types": ["full_attention"] * layers,
        "max_position_embeddings": target.max_context,
        "num_attention_heads": shape.heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": shape.kv_heads,
        "num_target_layers": shape.layers,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "vocab_size": shape.vocab,
    }
    if draft_vocab is not None:
        raw["draft_vocab_size"] = draft_vocab
    model = DFlashModel(DFlashConfig.from_dict(raw))
    if model.config.draft_vocab is not None and draft_vocab is not None:
        model.d2t.copy_(frequent_tokens(conversations, draft_vocab) - torch.arange(draft_vocab))
    return model


def existing_model(source: str) -> DFlashModel:
    """A drafter to train further, in float32: a folder, a hub id, or one that comes with the package."""
    model = load_model(checkpoint_source(source), torch.device("cpu"), torch.float32)
    raw = copy.deepcopy(model.config.raw)
    raw["dflash_config"].pop("draft_temperatures", None)  # they were fitted to the weights that change now
    model.config = DFlashConfig.from_dict(raw)
    return model


def block_mask(anchors: Tensor, length: int, size: int, window: int | None = None) -> Tensor:
    """What blocks of `size` slots see: [k * size, length + k * size] bool, context columns before the blocks'.

    Every slot sees the context before its anchor [k] (the anchor has no features yet when it is drafted from) and its
    own block. In a sliding layer of `window` positions it sees that many back, itself included, and nothing ahead.
    """
    slots = torch.arange(size, device=anchors.device)
    starts = anchors.repeat_interleave(size)
    positions = (anchors[:, None] + slots).flatten()
    context = torch.arange(length, device=anchors.device)
    seen = context < starts[:, None]
    own = starts[:, None] == starts
    if window is not None:
        seen &= context > positions[:, None] - window
        distance = positions[:, None] - positions
        own &= (distance >= 0) & (distance < window)
    return torch.cat((seen, own), 1)


class DFlashRecipe(FeatureRecipe):
    """A DFlash drafter in training, as `training.trainer.Trainer` takes it."""

    def __init__(
        self,
        model: DFlashModel,
        target: Target,
        conversations: Sequence[Conversation],
        features: Features,
        settings: DFlashSettings,
        device: torch.device,
    ):
        """Join what is needed; `features` are those of the model's target layers for all conversations."""
        check_target(model.config, target)
        super().__init__(model, target, conversations, features, settings, device)
        self._head, self._bias = head_weights(target, model.token_ids(), device)
        size = self.config.block_size
        self.gamma = settings.gamma or {8: 4.0, 10: 5.0, 16: 7.0}.get(size, size / 2)

    def save(self, folder: Path) -> None:
        """Export the drafter in bfloat16, as z-lab's checkpoints are."""
        save_model(self.exported().to(torch.bfloat16), folder)

    def run(self, module: nn.Module, indices: Sequence[int], generator: torch.Generator) -> Outcome:
        """Loss and hits of random blocks of some conversations. `module` is the model, as wrapped for training."""
        drafts = self.draw(indices, self.config.block_size - 1, generator)
        return self.outcome(drafts, self.slots(module(*self.inputs(drafts))))

    def inputs(self, drafts: Drafts) -> tuple[Any, ...]:
        """What `DFlashModel.forward` takes: a block for each draft, its root and masks."""
        size, window = self.config.block_size, self.config.window
        blocks = torch.full((len(drafts.tokens), size), self.config.mask_token)
        blocks[:, 0] = drafts.tokens[:, 0]
        anchors = torch.cat(drafts.anchors)
        masks = [block_mask(own, int(own[-1]), size).to(self.device) for own in drafts.anchors]
        sliding = None
        if window is not None:
            sliding = [block_mask(own, int(own[-1]), size, window).to(self.device) for own in drafts.anchors]
        return (
            self.embed(blocks).flatten(0, 1),
            (anchors[:, None] + torch.arange(size)).flatten().to(self.device),
            drafts.features,
            drafts.positions,
            masks,
            sliding,
        )

    def slots(self, hidden: Tensor) -> Tensor:
        """The model's rows [k * block_size, hidden] without the anchors', [k, slots, hidden]."""
        return hidden.view(-1, self.config.block_size, hidden.shape[-1])[:, 1:]

    def outcome(self, drafts: Drafts, hidden: Tensor) -> Outcome:
        """Loss and hits of final hidden states [k, slots, hidden]."""

        def loss(objective: Tensor, valid: Tensor, of_labels: Tensor) -> Tensor:
            if self.settings.loss == "dpace":
                return dpace_loss(objective, valid, of_labels)
            return decay_loss(objective, valid, self.gamma)

        logits = partial(nn.functional.linear, weight=self._head, bias=self._bias)
        return block_outcome(logits, hidden, drafts, loss, self.settings.distill)
