"""Training a DFlash drafter: anchored blocks, their mask and labels, and the loss (arXiv 2602.06036, section 4)."""

from __future__ import annotations

import collections
import copy
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bastion.drafters.dflash.checkpoint import load_model, save_model
from bastion.drafters.dflash.config import DFlashConfig
from bastion.drafters.dflash.drafter import check_target
from bastion.drafters.dflash.model import DFlashModel
from bastion.drafters.loading import checkpoint_source
from bastion.errors import BastionError
from bastion.targets.base import Target
from bastion.training.data import Conversation, digest
from bastion.training.features import Features
from bastion.training.losses import IGNORED, decay_loss, distillation, dpace_loss, label_log_probs
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


def target_layers(layers: int, count: int = 5) -> tuple[int, ...]:
    """The layers a drafter reads by DFlash's rule: `count` evenly spaced ones from the second to the last but two.

    Never the last one, which not every target gives, unless it is the only one.
    """
    if count == 1:
        return (layers // 2,)
    last = max(layers - 3, 1)
    evenly = {round(1 + i * (last - 1) / (count - 1)) for i in range(count)}
    return tuple(sorted(evenly & set(range(layers - 1)))) or (0,)


def frequent_tokens(conversations: Sequence[Conversation], size: int) -> Tensor:
    """The `size` tokens most frequent in the answers, ascending: a reduced draft vocabulary."""
    counts = collections.Counter(token for one in conversations for token in one.answer)
    if len(counts) < size:
        raise BastionError(f"the answers hold {len(counts)} different tokens: ask for a smaller draft vocabulary")
    return torch.tensor(sorted(token for token, _ in counts.most_common(size)))


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


def sample_anchors(first: int, last: int, count: int, generator: torch.Generator) -> Tensor:
    """Up to `count` different positions from first .. last - 1, ascending."""
    return first + torch.randperm(last - first, generator=generator)[:count].sort().values


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


def block_labels(ids: Tensor, prompt_length: int, anchors: Tensor, size: int) -> Tensor:
    """Labels [k, size - 1]: slot j of the block at anchor a is to guess token a + j of `ids` [n].

    `IGNORED` beyond the end and inside the prompt.
    """
    positions = anchors[:, None] + torch.arange(1, size, device=anchors.device)
    inside = (positions < len(ids)) & (positions >= prompt_length)
    return ids[positions.clamp(max=len(ids) - 1)].masked_fill(~inside, IGNORED)


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
        self.config, self.settings, self.device = model.config, settings, device
        self.conversations, self.features, self.target = conversations, features, target
        token_ids = model.token_ids()
        ids = torch.arange(target.shape.vocab) if token_ids is None else token_ids.cpu()
        self._columns = torch.full((target.shape.vocab,), IGNORED).scatter_(0, ids, torch.arange(len(ids)))
        self._head, self._bias = head_weights(target, token_ids, device)
        size = self.config.block_size
        self.gamma = settings.gamma or {8: 4.0, 10: 5.0, 16: 7.0}.get(size, size / 2)

    def save(self, folder: Path) -> None:
        """Export the drafter in bfloat16, as z-lab's checkpoints are."""
        assert isinstance(self.model, DFlashModel)
        exported = DFlashModel(self.config)
        exported.load_state_dict(self.model.state_dict())
        with torch.no_grad():
            exported.fc.weight /= self._scale
        save_model(exported.to(torch.bfloat16), folder)

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
        size, window = self.config.block_size, self.config.window
        blocks, labels, ranked, positions, features, masks, sliding = [], [], [], [], [], [], []
        for index in indices:
            one = self.conversations[index]
            anchors = sample_anchors(one.prompt_length, len(one.ids) - 1, self.settings.anchors, generator)
            ids = torch.tensor(one.ids)
            length = int(anchors[-1])  # no block sees features behind the last anchor
            block = torch.full((len(anchors), size), self.config.mask_token)
            block[:, 0] = ids[anchors]
            blocks.append(block)
            labels.append(block_labels(ids, one.prompt_length, anchors, size))
            positions.append((anchors[:, None] + torch.arange(size)).flatten())
            features.append(self.features.of(index)[:length] / self._scale)
            masks.append(block_mask(anchors, length, size).to(self.device))
            if window is not None:
                sliding.append(block_mask(anchors, length, size, window).to(self.device))
            if self.settings.distill:
                ranked.append(self._ranked(index, anchors, size))
        block_ids = torch.cat(blocks)
        embedded = self.target.embed(block_ids.flatten().to(self.target.device))
        embedded = embedded.to(self.device, torch.float32, copy=True)  # no inference tensor, which autograd refuses
        hidden = module(
            embedded,
            torch.cat(positions).to(self.device),
            torch.cat(features).to(self.device),
            torch.cat([torch.arange(len(one)) for one in features]).to(self.device),
            masks,
            sliding if window is not None else None,
        )
        hidden = hidden.view(len(block_ids), size, -1)[:, 1:]
        wanted = torch.cat(labels)
        present = wanted != IGNORED
        columns = self._columns[wanted.clamp(min=0)].masked_fill(~present, IGNORED).to(self.device)
        candidates = None
        if ranked:
            ids, logits = (torch.cat(parts).to(self.device) for parts in zip(*ranked, strict=True))
            candidates = ids, logits
        return self._outcome(hidden, columns, present.to(self.device), candidates)

    def _ranked(self, index: int, anchors: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """The target's candidates for each slot: what it said after the token before. Draft columns, logits."""
        ids, logits = self.features.ranked(index)
        before = (anchors[:, None] + torch.arange(size - 1)).clamp(max=len(ids) - 1)
        return self._columns[ids[before].long()], logits[before]

    def _outcome(
        self, hidden: Tensor, columns: Tensor, present: Tensor, candidates: tuple[Tensor, Tensor] | None
    ) -> Outcome:
        """hidden [k, slots, hidden]; columns [k, slots] labels as draft ids; present: the text reaches that far."""
        valid = columns != IGNORED
        logits = torch.nn.functional.linear(hidden[valid], self._head, self._bias).float()
        log_probs = logits.log_softmax(-1)
        labels = columns[valid]
        hits = torch.zeros_like(valid).masked_scatter_(valid, logits.detach().argmax(-1) == labels)
        of_labels = _scatter(label_log_probs(log_probs, labels), valid)
        objective = of_labels
        if candidates is not None:
            share = self.settings.distill
            soft = _scatter(distillation(log_probs, candidates[0][valid], candidates[1][valid]), valid)
            objective = (1 - share) * of_labels + share * soft
        if self.settings.loss == "dpace":
            loss = dpace_loss(objective, valid, of_labels)
        else:
            loss = decay_loss(objective, valid, self.gamma)
        return Outcome(loss, hits, present)


def head_weights(target: Target, token_ids: Tensor | None, device: torch.device) -> tuple[Tensor, Tensor | None]:
    """The target's head as a float32 matrix [v, hidden] and bias [v] (None if it has none), to train through."""
    width = target.shape.hidden
    probe = torch.zeros(width + 1, width, device=target.device, dtype=target.dtype)
    probe[:width] = torch.eye(width)
    answers = target.head(probe, token_ids)
    answers = answers.to(device, torch.float32, copy=True)
    bias = answers[width].clone()
    return (answers[:width] - bias).t().contiguous(), bias if bool(bias.any()) else None


def _scatter(values: Tensor, valid: Tensor) -> Tensor:
    """Values of the valid slots in their places, [k, slots], zeros elsewhere."""
    return torch.zeros(valid.shape, device=values.device, dtype=values.dtype).masked_scatter(valid, values)
