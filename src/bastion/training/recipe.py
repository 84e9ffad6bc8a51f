"""What the recipes of all drafters that read the target's features have in common."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bastion.targets.base import Target
from bastion.training.data import Conversation, digest
from bastion.training.features import Features
from bastion.training.ingredients import block_labels, draft_columns, sample_anchors
from bastion.training.losses import IGNORED, distillation, label_log_probs
from bastion.training.measures import Outcome


@dataclass(slots=True)
class Drafts:
    """Drafts at random anchors of some conversations, k in all, of as many tokens as there are slots.

    Features are those before each conversation's last anchor, n in all, one conversation behind the other.
    """

    anchors: list[Tensor]  # [k_i] of each conversation: where its drafts' roots stand
    tokens: Tensor  # [k, slots]: the text's token before each slot, the root's first
    columns: Tensor  # [k, slots]: labels as draft ids, `IGNORED` where there is none
    present: Tensor  # [k, slots] bool: the answer reaches that far
    candidates: tuple[Tensor, Tensor] | None  # [k, slots, RANKED] draft ids and logits of the target, to distil
    features: Tensor  # [n, F], scaled
    positions: Tensor  # [n]: where the features stand
    behind: Tensor  # [n]: the token behind each feature's
    before: Tensor  # [k]: which feature comes before the root

    def sees(self) -> list[Tensor]:
        """Which features the drafts of each conversation may see, bool [k_i, n_i]: those before the root."""
        return [
            torch.arange(int(own[-1]), device=self.positions.device) < own[:, None].to(self.positions.device)
            for own in self.anchors
        ]


class FeatureRecipe:
    """The data's side of a recipe, as `training.trainer.Trainer` takes them."""

    def __init__(
        self,
        body: Any,
        target: Target,
        conversations: Sequence[Conversation],
        features: Features,
        settings: Any,
        device: torch.device,
    ):
        """Join what is needed; `features` are those of the target layers that `body` reads for all conversations.

        body: a `DrafterNetwork` whose `fc` reads them. settings: a family's dataclass, with `anchors` and `distill`.

        Some channels of a transformer's hidden states are hundreds of times larger than the others, and would be all
        that a projection of raw features learns from. The model is trained on features of which each channel is
        divided by its typical size, and exported with that division inside the weights that read them.
        """
        self._scale = features.scale()
        with torch.no_grad():
            body.fc.weight *= self._scale
        self.model: nn.Module = body
        self.body, self.config, self.settings, self.device = body, body.config, settings, device
        self.conversations, self.features, self.target = conversations, features, target
        self._columns = draft_columns(body.token_ids(), target.shape.vocab)

    def exported(self) -> Any:
        """A copy of the body that reads features as they are, on the CPU."""
        exported = copy.deepcopy(self.body).cpu()
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

    def draw(self, indices: Sequence[int], slots: int, generator: torch.Generator) -> Drafts:
        """Drafts of `slots` tokens at random anchors of some conversations, on the training device."""
        anchors, tokens, labels, features, behind, before, ranked = [], [], [], [], [], [], []
        read = 0  # features of the conversations before
        for index in indices:
            one = self.conversations[index]
            own = sample_anchors(one.prompt_length, len(one.ids) - 1, self.settings.anchors, generator)
            ids, length = torch.tensor(one.ids), int(own[-1])  # no draft sees features behind the last anchor
            places = (own[:, None] + torch.arange(slots)).clamp(max=len(ids) - 1)
            anchors.append(own)
            tokens.append(ids[places])
            labels.append(block_labels(ids, one.prompt_length, own, slots + 1))
            features.append(self.features.of(index)[:length] / self._scale)
            behind.append(ids[1 : length + 1])
            before.append(read + own - 1)
            if self.settings.distill:
                named, logits = self.features.ranked(index)
                ranked.append((self._columns[named[places].long()], logits[places]))
            read += length
        wanted = torch.cat(labels)
        present = wanted != IGNORED
        columns = self._columns[wanted.clamp(min=0)].masked_fill(~present, IGNORED)
        candidates = None
        if ranked:
            draft_ids, logits = (torch.cat(parts).to(self.device) for parts in zip(*ranked, strict=True))
            candidates = draft_ids, logits
        return Drafts(
            anchors=anchors,
            tokens=torch.cat(tokens),
            columns=columns.to(self.device),
            present=present.to(self.device),
            candidates=candidates,
            features=torch.cat(features).to(self.device),
            positions=torch.cat([torch.arange(len(one)) for one in features]).to(self.device),
            behind=torch.cat(behind),
            before=torch.cat(before).to(self.device),
        )

    def embed(self, ids: Tensor) -> Tensor:
        """The target's embeddings [..., hidden] of tokens [...], to train on."""
        embedded = self.target.embed(ids.to(self.target.device))
        return embedded.to(self.device, torch.float32, copy=True)  # no inference tensor, which autograd refuses


def block_outcome(
    logits: Callable[[Tensor], Tensor],
    hidden: Tensor,
    drafts: Drafts,
    loss: Callable[[Tensor, Tensor, Tensor], Tensor],
    distill: float,
) -> Outcome:
    """Loss and hits of drafts whose final hidden states are `hidden` [k, slots, hidden].

    logits: from [n, hidden] to [n, v]. loss: of the objective [k, slots], which slots count, and the labels'
    log-probabilities. distill: the share of the objective that is a cross-entropy with the target's candidates.
    """
    columns, candidates = drafts.columns, drafts.candidates
    valid = columns != IGNORED
    log_probs = logits(hidden[valid]).float().log_softmax(-1)
    labels = columns[valid]
    hits = torch.zeros_like(valid).masked_scatter_(valid, log_probs.detach().argmax(-1) == labels)
    of_labels = _scatter(label_log_probs(log_probs, labels), valid)
    objective = of_labels
    if candidates is not None:
        soft = _scatter(distillation(log_probs, candidates[0][valid], candidates[1][valid]), valid)
        objective = (1 - distill) * of_labels + distill * soft
    return Outcome(loss(objective, valid, of_labels), hits, drafts.present)


def _scatter(values: Tensor, valid: Tensor) -> Tensor:
    """Values of the valid slots in their places, [k, slots], zeros elsewhere."""
    return torch.zeros(valid.shape, device=values.device, dtype=values.dtype).masked_scatter(valid, values)
