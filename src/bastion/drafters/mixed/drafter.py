"""A drafter and the n-gram index in one tree: both name children, and a mixture that learns gives their probability."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from bastion.drafters.base import Candidates, DraftContext, Drafter, Frontier, Ids, LogProbs, Outlook, Proposal
from bastion.drafters.mixed.trust import Reach, Trust
from bastion.drafters.ngram.drafter import MAX_CHILDREN, NgramDrafter, NgramProposal, Row, candidates
from bastion.drafters.ngram.index import Prediction, SuffixIndex
from bastion.errors import BastionError

LEAST = 1e-6  # a drafter's probability for a token that it all but excludes; keeps ratios finite


class MixedDrafter:
    """Drafts the most probable continuations of a drafter and of the n-gram index, in one tree.

    Text that repeats itself gets long paths out of the index, whatever the drafter's depth; other text the drafter's.
    The index costs next to nothing, so it is asked first: where what it leaves open is not worth a pass of the drafter
    (`DraftContext.pays`), it drafts alone.
    """

    def __init__(self, drafter: Drafter, ngram: NgramDrafter | None = None):
        """Join a drafter and an index; the trees are as deep as the deeper of the two.

        Raises BastionError for a drafter that has the index already.
        """
        if isinstance(drafter, NgramDrafter | MixedDrafter):
            raise BastionError(f"{drafter.name} has the n-gram index already: leave out the second")
        self.drafter, self.ngram = drafter, ngram or NgramDrafter()
        self.name: str = f"{drafter.name}+{self.ngram.name}"
        self.digest = f"{drafter.digest}+{self.ngram.digest}"
        self.depth = max(drafter.depth, self.ngram.depth)
        self.feature_layers = drafter.feature_layers

    def propose(self, contexts: list[DraftContext]) -> list[Proposal]:
        """Learn from what came of the last proposals, and propose from both sources, or from the index alone."""
        memories = [_memory(context) for context in contexts]
        drafted = [memory for memory, context in zip(memories, contexts, strict=True) if self._pays(memory, context)]
        passed = self.drafter.propose([memory.context for memory in drafted]) if drafted else []
        for memory in memories:
            memory.last = None
        for memory, proposal in zip(drafted, passed, strict=True):
            memory.last = MixedProposal(proposal, memory.index, self.depth, memory.trust, memory.reach)
            memory.read = memory.index.length
        return [memory.last or IndexProposal(memory.index, self.depth) for memory in memories]

    def _pays(self, memory: Memory, context: DraftContext) -> bool:
        """Whether a pass of the drafter is worth its cost, by what the index leaves open along its best path."""
        gains, left = foresee(memory.index, self.depth, context.width)
        levels = np.arange(self.drafter.depth, 0, -1)[: len(left)]
        pays = context.pays(Outlook(gains, left[: len(levels)], memory.reach.share, 0, levels))
        if not pays:
            memory.reach.forget()
        return pays


def foresee(index: SuffixIndex, depth: int, width: int | None = None) -> tuple[LogProbs, LogProbs]:
    """What the index would draft without a drafter: its most probable path, with `width` - 1 siblings of its nodes.

    Their path probabilities, descending, and what the index leaves to other tokens behind each node of the path, from
    the root on.
    """
    row = Row.of_root(index)
    gains: list[float] = []
    left: list[float] = []
    while True:
        likeliest, path = row.prediction.likeliest[:width], row.path_probability
        gains += [path * probability for _, probability in likeliest]
        left.append(path * (1.0 - sum(probability for _, probability in likeliest)))
        if not likeliest or len(left) == depth:
            return -np.sort(-np.array(gains, np.float32)), np.array(left, np.float32)
        row = row.child(index, *likeliest[0])


def alone(drafter: Drafter) -> Drafter:
    """The drafter without the n-gram index, if it was joined with it."""
    return drafter.drafter if isinstance(drafter, MixedDrafter) else drafter


class IndexProposal(NgramProposal):
    """The index's draft, made without a pass of the drafter."""

    passes = 0


@dataclass(slots=True)
class Memory:
    """What is kept about a sequence."""

    context: DraftContext  # as the drafter sees it, with the drafter's own memory
    index: SuffixIndex = field(default_factory=SuffixIndex)
    trust: Trust = field(default_factory=Trust)
    reach: Reach = field(default_factory=Reach)
    last: MixedProposal | None = None  # None too if the drafter was left out
    read: int = 0  # how many tokens there were when it was made


def _memory(context: DraftContext) -> Memory:
    """A sequence's memory, with what is new in its context."""
    if context.memory is None:
        context.memory = Memory(DraftContext(context.tokens, context.temperature))
    memory: Memory = context.memory
    memory.context.tokens = context.tokens
    memory.context.features += context.features
    context.features = []
    if memory.last is not None:
        memory.last.learn(context.tokens[memory.read :])
    memory.index.extend(context.tokens)
    return memory


@dataclass(slots=True)
class Level:
    """The nodes of one depth that were expanded, and what was said of their children."""

    frontier: Frontier
    rows: list[Row]  # the index, of each node
    drafted: Candidates | None  # the drafter; None beyond its depth
    mixed: Candidates


class MixedProposal:
    """The union of a proposal's candidates and the index's, in a draft for one sequence.

    Both are asked about every node, also about those that only the other one named. Beyond the depth of the proposal
    the index is alone.
    """

    def __init__(self, proposal: Proposal, index: SuffixIndex, depth: int, trust: Trust, reach: Reach):
        self.depth, self.beam = depth, proposal.beam
        self._proposal, self._index, self._trust, self._reach = proposal, index, trust, reach
        self._levels: list[Level] = []

    @property
    def ready(self) -> int:
        """The proposal's, until it needs no further pass."""
        return self._proposal.ready if self._proposal.ready < self._proposal.depth else self.depth

    @property
    def passes(self) -> int:
        """The proposal's; the index makes none."""
        return self._proposal.passes

    def expand(self, frontier: Frontier, width: int) -> Candidates:
        """The best `width` of the children that either source names, for each node."""
        rows = self._look_up(frontier)
        if frontier.depth < self._proposal.depth:
            drafted = self._proposal.expand(frontier, width)
            mixed = mix(rows, drafted, self._trust, width)
        else:
            drafted, mixed = None, candidates(rows, width)
        self._levels[frontier.depth :] = [Level(frontier, rows, drafted, mixed)]
        return mixed

    def _look_up(self, frontier: Frontier) -> list[Row]:
        """What the index says, for each node of the frontier."""
        if frontier.depth == 0:
            return [Row.of_root(self._index)]
        above = self._levels[frontier.depth - 1]
        ranks = (above.mixed.tokens[frontier.rows] == frontier.tokens[:, None]).argmax(1)
        probabilities = np.exp(above.mixed.log_probs[frontier.rows, ranks]).tolist()
        parents = [above.rows[place] for place in frontier.rows.tolist()]
        return [
            parent.child(self._index, token, probability)
            for parent, token, probability in zip(parents, frontier.tokens.tolist(), probabilities, strict=True)
        ]

    def learn(self, tokens: Sequence[int]) -> None:
        """Compare what the sources said with the tokens that came after the root, as far as both were asked."""
        place, before = 0, None
        for level, token in zip(self._levels, tokens, strict=False):
            if before is not None:
                found = np.flatnonzero((level.frontier.rows == place) & (level.frontier.tokens == before))
                if not len(found):
                    break
                place = int(found[0])
            if level.drafted is None:
                break
            self._score(level.rows[place].prediction, level.drafted, place, token)
            before = token

    def _score(self, prediction: Prediction, drafted: Candidates, place: int, token: int) -> None:
        indexed = dict(prediction.likeliest).get(token, 0.0)
        named = np.exp(drafted.log_probs[place])
        if len(found := np.flatnonzero((drafted.tokens[place] == token) & (named > 0))):
            probability = float(named[found[0]])
        else:  # at most that of the last one named, and what all of them leave
            probability = min(1.0 - float(named.sum()), float(named[named > 0].min(initial=1.0)))
        best = np.flatnonzero(named[:1] > 0)  # nothing, where it named nobody
        self._reach.learn(token in drafted.tokens[place, best])
        self._trust.learn(prediction.match, prediction.escape + indexed / max(probability, LEAST))


def mix(rows: Sequence[Row], drafted: Candidates, trust: Trust, width: int) -> Candidates:
    """The best `width` children of each node that the index or the drafter names, with the mixture's probabilities.

    Where the index says nothing, they are the drafter's. The children of a node never have more than 1 together.
    """
    known = [place for place, row in enumerate(rows) if row.prediction.match]
    if not known:
        return drafted
    both = _both([rows[place] for place in known], drafted.tokens[known], drafted.log_probs[known], trust, width)
    shape = len(rows), both.tokens.shape[1]
    tokens, log_probs = np.zeros(shape, np.int64), np.full(shape, -np.inf, np.float32)
    columns = min(drafted.tokens.shape[1], shape[1])
    tokens[:, :columns], log_probs[:, :columns] = drafted.tokens[:, :columns], drafted.log_probs[:, :columns]
    tokens[known], log_probs[known] = both.tokens, both.log_probs
    return Candidates(tokens, log_probs)


def _both(rows: Sequence[Row], tokens: Ids, log_probs: LogProbs, trust: Trust, width: int) -> Candidates:
    """`mix` for nodes of which the index knows; tokens and log_probs [m, k] are the drafter's."""
    weights = np.array([trust.weight(row.prediction.match) for row in rows], np.float32)[:, None]
    escapes = np.array([row.prediction.escape for row in rows], np.float32)[:, None]
    log_probs = log_probs + np.log1p(weights * (escapes - 1))
    indexed = candidates(rows, MAX_CHILDREN)
    more = weights * np.exp(indexed.log_probs)
    named = np.where(np.isneginf(log_probs), -1, tokens)  # padding is no token
    same = named[:, :, None] == indexed.tokens[:, None, :]
    with np.errstate(divide="ignore"):  # the logarithm of 0 is right for what is missing
        old = np.logaddexp(log_probs, np.log((same * more[:, None]).sum(2)))
        new = np.log(np.where(same.any(1), 0, more))
    log_probs = np.minimum(np.concatenate((old, new), 1), 0)
    order = np.argsort(-log_probs, 1, kind="stable")[:, :width]
    places = np.arange(len(rows))[:, None]
    return Candidates(np.concatenate((tokens, indexed.tokens), 1)[places, order], log_probs[places, order])
