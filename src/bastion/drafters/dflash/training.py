"""Training a DFlash drafter: anchored blocks, their mask and labels, and the loss (arXiv 2602.06036, section 4)."""

from __future__ import annotations

import collections
import copy
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
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
from bastion.training.data import Conversation, digest
from bastion.training.features import Features
from bastion.training.ingredients import (
    block_labels,
    block_outcome,
    draft_columns,
    frequent_tokens,
    head_weights,
    sample_anchors,
    target_layers,
)
from bastion.training.losses import IGNORED, decay_loss, dpace_loss
from bastion.training.measures import Outcome

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
    if target.tree_support == "none":
        raise BastionError(f"{target.name} decodes plainly: it verifies no drafts, so a drafter is of no use to it")
    if layers < 1 or not 2 <= block_size <= min(target.max_context, LARGEST_BLOCK):
        raise BastionError(f"a drafter has 1 layer or more, and a block 2 to {LARGEST_BLOCK} positions")
    if draft_vocab is not None and not 1 <= draft_vocab <= target.shape.vocab:
        raise BastionError(f"the draft vocabulary must have 1 to {target.shape.vocab} tokens, those of {target.name}")
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


@dataclass(slots=True)
class Blocks:
    """Random blocks of some conversations, k in all; slots are the masks behind their anchors."""

    size: int  # positions of a block, its anchor included
    inputs: tuple[Any, ...]  # what `DFlashModel.forward` takes
    previous: Tensor  # [k, slots] the text's token before each slot; the anchor's own before the first
    columns: Tensor  # [k, slots] labels as draft ids
    present: Tensor  # [k, slots] bool: the answer reaches that far
    candidates: tuple[Tensor, Tensor] | None  # [k, slots, RANKED] draft ids and logits of the target, to distil

    def slots(self, hidden: Tensor) -> Tensor:
        """The model's rows [k * size, hidden] without the anchors', [k, slots, hidden]."""
        return hidden.view(-1, self.size, hidden.shape[-1])[:, 1:]


class DFlashRecipe:
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
        """Join what is needed; `features` are those of the model's target layers for all conversations.

        Some channels of a transformer's hidden states are hundreds of times larger than the others, and would be all
        that a projection of raw features learns from. The model is trained on features of which each channel is
        divided by its typical size, and exported with that division inside the weights that read them.
        """
        check_target(model.config, target)
        self._scale = features.scale()
        with torch.no_grad():
            model.fc.weight *= self._scale
        self.model: nn.Module = model
        self.body = model
        self.config, self.settings, self.device = model.config, settings, device
        self.conversations, self.features, self.target = conversations, features, target
        token_ids = model.token_ids()
        self._columns = draft_columns(token_ids, target.shape.vocab)
        self._head, self._bias = head_weights(target, token_ids, device)
        size = self.config.block_size
        self.gamma = settings.gamma or {8: 4.0, 10: 5.0, 16: 7.0}.get(size, size / 2)

    def save(self, folder: Path) -> None:
        """Export the drafter in bfloat16, as z-lab's checkpoints are."""
        save_model(self.exported().to(torch.bfloat16), folder)

    def exported(self) -> DFlashModel:
        """A copy of the DFlash model that reads features as they are."""
        exported = DFlashModel(self.config)
        exported.load_state_dict(self.body.state_dict())
        with torch.no_grad():
            exported.fc.weight /= self._scale
        return exported

    def identity(self) -> dict[str, Any]:
        """What a run that is resumed must have in common with the one that it continues."""
        return asdict(self.settings) | {
            "target": self.target.digest,
            "data": digest(self.conversations),
            "sizes": self.config.raw,
            "draft vocabulary": self._columns.tolist(),
        }

    def run(self, module: nn.Module, indices: Sequence[int], generator: torch.Generator) -> Outcome:
        """Loss and hits of random blocks of some conversations. `module` is the model, as wrapped for training."""
        blocks = self.sample(indices, generator)
        return self.outcome(blocks, blocks.slots(module(*blocks.inputs)))

    def sample(self, indices: Sequence[int], generator: torch.Generator) -> Blocks:
        """Random blocks of some conversations, on the training device."""
        size, window = self.config.block_size, self.config.window
        blocks, previous, labels, ranked, positions, features, masks, sliding = [], [], [], [], [], [], [], []
        for index in indices:
            one = self.conversations[index]
            anchors = sample_anchors(one.prompt_length, len(one.ids) - 1, self.settings.anchors, generator)
            ids = torch.tensor(one.ids)
            length = int(anchors[-1])  # no block sees features behind the last anchor
            before = (anchors[:, None] + torch.arange(size - 1)).clamp(max=len(ids) - 1)
            block = torch.full((len(anchors), size), self.config.mask_token)
            block[:, 0] = ids[anchors]
            blocks.append(block)
            previous.append(ids[before])
            labels.append(block_labels(ids, one.prompt_length, anchors, size))
            positions.append((anchors[:, None] + torch.arange(size)).flatten())
            features.append(self.features.of(index)[:length] / self._scale)
            masks.append(block_mask(anchors, length, size).to(self.device))
            if window is not None:
                sliding.append(block_mask(anchors, length, size, window).to(self.device))
            if self.settings.distill:
                ranked.append(self._ranked(index, before))
        inputs = (
            self.embed(torch.cat(blocks)).flatten(0, 1),
            torch.cat(positions).to(self.device),
            torch.cat(features).to(self.device),
            torch.cat([torch.arange(len(one)) for one in features]).to(self.device),
            masks,
            sliding if window is not None else None,
        )
        wanted = torch.cat(labels)
        present = wanted != IGNORED
        columns = self._columns[wanted.clamp(min=0)].masked_fill(~present, IGNORED)
        candidates = None
        if ranked:
            draft_ids, logits = (torch.cat(parts).to(self.device) for parts in zip(*ranked, strict=True))
            candidates = draft_ids, logits
        return Blocks(size, inputs, torch.cat(previous), columns.to(self.device), present.to(self.device), candidates)

    def embed(self, ids: Tensor) -> Tensor:
        """The target's embeddings [..., hidden] of tokens [...], to train on."""
        embedded = self.target.embed(ids.to(self.target.device))
        return embedded.to(self.device, torch.float32, copy=True)  # no inference tensor, which autograd refuses

    def _ranked(self, index: int, before: Tensor) -> tuple[Tensor, Tensor]:
        """The target's candidates behind the positions `before` [k, slots]. Draft columns, logits."""
        ids, logits = self.features.ranked(index)
        return self._columns[ids[before].long()], logits[before]

    def outcome(self, blocks: Blocks, hidden: Tensor) -> Outcome:
        """Loss and hits of final hidden states [k, slots, hidden]."""

        def loss(objective: Tensor, valid: Tensor, of_labels: Tensor) -> Tensor:
            if self.settings.loss == "dpace":
                return dpace_loss(objective, valid, of_labels)
            return decay_loss(objective, valid, self.gamma)

        logits = partial(nn.functional.linear, weight=self._head, bias=self._bias)
        return block_outcome(
            logits, hidden, blocks.columns, blocks.present, loss, blocks.candidates, self.settings.distill
        )
