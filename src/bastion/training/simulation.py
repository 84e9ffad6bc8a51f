"""The rounds of decoding, replayed on answers that are known already: no target is run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from bastion.decoding.acceptance import walk
from bastion.decoding.budget import BudgetPolicy
from bastion.decoding.loop import cut, grow_under, propose
from bastion.decoding.pace import Pace
from bastion.decoding.stats import RoundRecord
from bastion.decoding.tree import DraftTree
from bastion.drafters.base import DraftContext, Drafter, Proposal
from bastion.errors import BastionError
from bastion.targets.base import Target
from bastion.training.data import Conversation

BATCH = 16  # conversations that are drafted for side by side


class FeatureSource(Protocol):
    """Where the target's features of each conversation are; `training.features.Features` is one."""

    def of(self, index: int) -> Tensor:
        """Features [n, F] of the tokens of conversation `index`."""


@dataclass(frozen=True, slots=True)
class Subset:
    """The features of some of the conversations."""

    features: FeatureSource
    indices: Sequence[int]

    def of(self, index: int) -> Tensor:
        """Features [n, F] of the tokens of conversation `index` of the subset."""
        return self.features.of(self.indices[index])


@dataclass(slots=True)
class SimulatedRound:
    """One round of one conversation."""

    index: int  # of the conversation
    limit: int  # how deep the tree could become before the answer's end; its last token is never drafted
    record: RoundRecord  # without times
    proposal: Proposal | None  # None: nothing was drafted


def select(conversations: Sequence[Conversation], most: int | None = None) -> tuple[list[Conversation], dict[str, int]]:
    """The conversations that can be replayed, at most `most` of them, and how many were left out for which reason.

    Those are the ones with an answer written at temperature 0, for which the accepted length is defined by the text
    alone, and of two tokens or more, since the prefill writes the first. A sample is spread evenly over the data.
    Raises BastionError if there is none.
    """
    greedy = [one for one in conversations if one.temperature == 0]
    kept = [one for one in greedy if len(one.answer) > 1]
    left_out = {"written above temperature 0": len(conversations) - len(greedy), "too short": len(greedy) - len(kept)}
    if not kept:
        raise BastionError(
            "the data holds no answer of two tokens or more that was written at temperature 0: give other"
        )
    if most is not None and most < len(kept):
        left_out["not sampled"] = len(kept) - most
        kept = [kept[place * len(kept) // most] for place in range(most)]
    return kept, {reason: count for reason, count in left_out.items() if count}


@torch.inference_mode()
def simulate(
    target: Target,
    drafter: Drafter,
    policy: BudgetPolicy,
    conversations: Sequence[Conversation],
    features: FeatureSource | None,
) -> Iterator[SimulatedRound]:
    """Every round that `decoding.loop` would take to write each answer, with its length as `max_new_tokens`.

    Each conversation is decoded as if alone: a budget is not shared. An answer that ended by itself is treated as cut
    there, so the trees of its last rounds do not reach beyond it. `features` are those of the drafter's
    `feature_layers`, and may be None if it reads none.
    """
    for start in range(0, len(conversations), BATCH):
        batch = enumerate(conversations[start : start + BATCH], start)
        read = features if drafter.feature_layers else None
        texts = [_Text(target, index, one, read, Pace.of(policy)) for index, one in batch]
        while active := [text for text in texts if text.remaining]:
            yield from _round(drafter, policy, active)


class _Text:
    """An answer that is being replayed."""

    def __init__(
        self, target: Target, index: int, conversation: Conversation, features: FeatureSource | None, pace: Pace
    ):
        self.index, self.ids, self.pace = index, conversation.ids, pace
        self.features = None if features is None else features.of(index).to(target.device, target.dtype)
        self.draft = DraftContext([self.ids[0]])
        self.extend(self.ids[1 : conversation.prompt_length + 1])  # the prefill writes the answer's first token

    @property
    def remaining(self) -> int:
        """How many tokens are still to be written."""
        return len(self.ids) - len(self.draft.tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Write tokens, and hand the features of all but the last to the drafter."""
        first = len(self.draft.tokens) - 1
        self.draft.tokens.extend(tokens)
        if self.features is not None:
            self.draft.features.append(self.features[first : len(self.draft.tokens) - 1])


def _round(drafter: Drafter, policy: BudgetPolicy, texts: Sequence[_Text]) -> Iterator[SimulatedRound]:
    drafted = [text for text in texts if text.remaining > 1 and policy.max_nodes and text.pace.drafts()]
    proposals = propose(drafter, policy, [text.draft for text in drafted]) if drafted else []
    found: dict[int, Proposal] = {text.index: one for text, one in zip(drafted, proposals, strict=True)}
    for text in texts:
        root, context, limit = text.draft.tokens[-1], len(text.draft.tokens) - 1, text.remaining - 1
        proposal = found.get(text.index)
        tree = DraftTree.root_only(root)
        passes = 0
        if proposal is not None:
            tree = grow_under(policy, proposal, text.draft, text.pace, limit)
            passes = proposal.passes
            tree = cut([tree], policy, [context], [passes])[0]
        answer = text.ids[context + 1 :]
        accepted = walk(tree, lambda _, path, answer=answer: answer[len(path)])  # type: ignore[misc]
        record = RoundRecord(context, tree, accepted.nodes, accepted.tokens, {}, passes)
        yield SimulatedRound(text.index, limit, record, proposal)
        text.pace.add(record)
        text.extend(accepted.tokens)
