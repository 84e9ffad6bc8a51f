"""The decode loop: draft, grow, verify, accept, commit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from bastion.decoding.acceptance import walk
from bastion.decoding.budget import BudgetPolicy
from bastion.decoding.growth import grow
from bastion.decoding.pace import Pace
from bastion.decoding.sampling import Sampler
from bastion.decoding.stats import GenerationStats, RoundRecord, Stopwatch
from bastion.decoding.stopping import TextStream
from bastion.decoding.tree import DraftTree
from bastion.drafters.base import DraftContext, Drafter, Proposal
from bastion.targets.base import Cache, Rows, Target, Verification

PREFILL_ROWS = 512  # prompt tokens in one pass; bounds the memory of activations and mask


@dataclass(slots=True)
class Generation:
    """One text on its way."""

    draft: DraftContext  # the text so far, and what the drafter keeps about it
    cache: Cache
    sampler: Sampler
    stream: TextStream
    pace: Pace = field(default_factory=Pace)
    stats: GenerationStats = field(default_factory=GenerationStats)

    @property
    def finished(self) -> bool:
        """Whether the text has ended."""
        return self.stream.finish_reason is not None

    @property
    def remaining(self) -> int:
        """How many tokens may still be written."""
        return self.stream.rules.max_new_tokens - len(self.stream.tokens)


@torch.inference_mode()
def prefill(target: Target, *batch: Generation, feature_layers: Sequence[int] = ()) -> list[str]:
    """Run prompts through the target and write the first token of each text; what that makes certain of each.

    Prompts that are read in one pass share its time.
    """
    target.set_feature_layers(feature_layers)
    texts: list[str] = []
    while waiting := batch[len(texts) :]:
        watch = Stopwatch(target.device)
        with watch.stage("prefill"):
            rows = prompt_rows(target, waiting)
            reading = list(zip(waiting, rows, target.forward(rows), strict=False))
            for generation, row, result in reading:
                target.commit(row.cache, range(len(row.tokens)))
                if result.features is not None:
                    generation.draft.features.append(result.features)
                if generation.cache.length == row.prompt_length:
                    first = generation.sampler.chooser(result.logits, generation.draft.tokens)(0, [])
                    texts.append(_write(generation, [first]))
        for generation, row, _ in reading:
            generation.stats.prompt_tokens = row.prompt_length
            generation.stats.prefill_seconds += watch.seconds["prefill"]
    return texts


@torch.inference_mode()
def decode_round(
    target: Target, drafter: Drafter | None, policy: BudgetPolicy, batch: Sequence[Generation]
) -> list[tuple[str, RoundRecord]]:
    """One round for unfinished generations that share a forward pass; the new text and the record of each."""
    watch = Stopwatch(target.device)
    target.set_feature_layers(features_read(drafter, policy))  # other texts may use the target in between
    contexts = [generation.cache.length for generation in batch]
    roots = [generation.draft.tokens[-1] for generation in batch]
    # The bonus token ends the round, so a tree deeper than the rest of the text less one is never used up.
    depths = [generation.remaining - 1 for generation in batch]
    trees = [DraftTree.root_only(root) for root in roots]
    passes = [0] * len(batch)
    drafted = [place for place, depth in enumerate(depths) if depth and batch[place].pace.drafts()]
    if drafter is not None and policy.max_nodes and drafted:
        with watch.stage("draft"):
            proposals = propose(drafter, policy, [batch[place].draft for place in drafted])
        with watch.stage("grow"):
            for place, proposal in zip(drafted, proposals, strict=True):
                trees[place] = grow_under(policy, proposal, batch[place].draft, batch[place].pace, depths[place])
                passes[place] = proposal.passes
            trees = cut(trees, policy, contexts, passes)
    with watch.stage("verify"):
        rows = [tree_rows(target, tree, generation.cache) for tree, generation in zip(trees, batch, strict=True)]
        verified = target.forward(rows)
    with watch.stage("accept"):
        accepted = [
            walk(tree, generation.sampler.chooser(result.logits, generation.draft.tokens))
            for tree, result, generation in zip(trees, verified, batch, strict=True)
        ]
    with watch.stage("commit"):
        texts = []
        for generation, result, outcome in zip(batch, verified, accepted, strict=True):
            target.commit(generation.cache, outcome.nodes)
            _keep_features(generation.draft, result, outcome.nodes)
            texts.append(_write(generation, outcome.tokens))
    records = []
    for generation, context, tree, outcome, count in zip(batch, contexts, trees, accepted, passes, strict=True):
        record = RoundRecord(context, tree, outcome.nodes, outcome.tokens, watch.seconds, count)
        generation.stats.add(record)
        generation.pace.add(record)
        records.append(record)
    return list(zip(texts, records, strict=True))


def decode(
    target: Target, drafter: Drafter | None, policy: BudgetPolicy, batch: Sequence[Generation]
) -> Iterator[tuple[Generation, str, RoundRecord | None]]:
    """Write the texts of a batch to their ends. Yields each generation's new text as it comes (no record: prefill)."""
    texts = prefill(target, *batch, feature_layers=features_read(drafter, policy))
    for generation, text in zip(batch, texts, strict=True):
        yield generation, text, None
    while active := [generation for generation in batch if not generation.finished]:
        for generation, (text, record) in zip(active, decode_round(target, drafter, policy, active), strict=True):
            yield generation, text, record


def features_read(drafter: Drafter | None, policy: BudgetPolicy) -> tuple[int, ...]:
    """The target layers whose output is wanted; none when nothing is drafted."""
    return drafter.feature_layers if drafter is not None and policy.max_nodes else ()


def propose(drafter: Drafter, policy: BudgetPolicy, drafts: Sequence[DraftContext]) -> Sequence[Proposal]:
    """One proposal for each sequence; the policy says what a pass of the drafter is worth, and how wide trees are."""
    for draft in drafts:
        draft.pays, draft.width = partial(policy.deepens, context=len(draft.tokens) - 1), policy.width
    return drafter.propose(list(drafts))


def grow_under(policy: BudgetPolicy, proposal: Proposal, draft: DraftContext, pace: Pace, depth: int) -> DraftTree:
    """The tree of one sequence, as far as policy and pace want it, before a budget is spent."""
    return grow(proposal, draft.tokens[-1], pace.nodes(policy.max_nodes), depth, policy.width, draft.pays)


def cut(
    trees: list[DraftTree], policy: BudgetPolicy, contexts: Sequence[int], passes: Sequence[int]
) -> list[DraftTree]:
    """Spend one budget on the best nodes of all trees. contexts and passes: as in `BudgetPolicy.choose`."""
    gains = np.concatenate([tree.gains for tree in trees])
    owners = np.repeat(np.arange(len(trees)), [tree.size for tree in trees])
    order = np.argsort(-gains, kind="stable")
    budget = policy.choose(gains[order], contexts, passes)
    counts = np.bincount(owners[order[:budget]], minlength=len(trees))
    return [tree.first(count) for tree, count in zip(trees, counts.tolist(), strict=True)]


def prompt_rows(target: Target, batch: Sequence[Generation]) -> list[Rows]:
    """The rows of one pass over prompts: as many whole ones as fit in PREFILL_ROWS, or a piece of the first."""
    rows: list[Rows] = []
    room = PREFILL_ROWS
    for generation in batch:
        prompt, start = generation.draft.tokens, generation.cache.length
        piece = torch.tensor(prompt[start : start + PREFILL_ROWS], device=target.device)
        if len(piece) > room:
            break
        positions = torch.arange(start, start + len(piece), device=target.device)
        rows.append(Rows(piece, positions, generation.cache, None, len(piece) - 1, len(prompt)))
        room -= len(piece)
    return rows


def tree_rows(target: Target, tree: DraftTree, cache: Cache) -> Rows:
    """The rows that verify a tree. A tree that is a chain needs no mask of its own."""
    tokens, depths = torch.from_numpy(tree.tokens), torch.from_numpy(tree.depths)
    visible = None if tree.is_chain else torch.from_numpy(tree.visible()).to(target.device)
    return Rows(tokens.to(target.device), (cache.length + depths).to(target.device), cache, visible)


def _keep_features(draft: DraftContext, result: Verification, nodes: list[int]) -> None:
    if result.features is not None:
        draft.features.append(result.features[torch.tensor(nodes, device=result.features.device)])


def _write(generation: Generation, tokens: list[int]) -> str:
    text = generation.stream.push(tokens)
    generation.draft.tokens.extend(tokens)
    generation.stats.new_tokens = len(generation.stream.tokens)
    return text
