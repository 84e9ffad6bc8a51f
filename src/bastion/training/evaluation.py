"""How good a drafter is: accepted lengths, accuracy by position, and whether its probabilities can be trusted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bastion.decoding.budget import BudgetPolicy, Chain, FixedBudget, RoundCost, Throughput
from bastion.decoding.stats import GenerationStats, RoundRecord
from bastion.drafters.base import Drafter
from bastion.errors import BastionError
from bastion.policies import describe
from bastion.targets.base import Target
from bastion.training.data import Conversation
from bastion.training.simulation import FeatureSource, SimulatedRound, simulate

TREES = (8, 16, 32, 64)  # nodes
EDGES = np.array([0, 0.01, 0.02, 0.05, *np.arange(1, 11) / 10])  # of the bins; finer where most nodes are

Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Figures:
    """Means over rounds."""

    rounds: int
    accepted_length: float  # as in `GenerationStats`: tokens a round, bonus token included
    tree_size: float  # nodes, root not counted
    tokens_per_second: float | None  # by the stored calibration's cost model; None without one


@dataclass(frozen=True, slots=True)
class Configuration:
    """One way of drafting: the chain, a tree of a fixed budget, or a policy."""

    name: str
    overall: Figures
    by_source: dict[str, Figures]


@dataclass(frozen=True, slots=True)
class Position:
    """How often the chain's token is the answer's at one depth, over the rounds of the chain.

    A chain that ends before the depth counts as wrong; rounds too near to the answer's end do not count.
    """

    depth: int
    rounds: int
    accuracy: float
    reached: int  # rounds in which all tokens before were right
    accuracy_when_reached: float | None  # None: never reached


@dataclass(frozen=True, slots=True)
class Bin:
    """The nodes whose predicted path probability is from `low` to below `high`."""

    low: float
    high: float
    nodes: int
    predicted: float  # mean path probability
    actual: float  # share of nodes that lay on the answer


@dataclass(frozen=True, slots=True)
class Reliability:
    """Predicted path probabilities against what happened."""

    nodes: int
    predicted: float  # mean path probability
    actual: float  # share of nodes that lay on the answer
    error: float  # expected calibration error: mean over the nodes of |predicted - actual| of their bin
    bins: list[Bin]  # those with nodes

    @classmethod
    def of(cls, predicted: Floats, hits: Bools) -> Reliability:
        """Compare path probabilities [n] with whether the nodes lay on the answer [n]; all 0 without nodes.

        Binned as in Guo et al. 2017 (arXiv 1706.04599, section 2), but with narrower bins near 0.
        """
        owners = (np.searchsorted(EDGES, predicted, side="right") - 1).clip(max=len(EDGES) - 2)
        bins = []
        for place in np.unique(owners).tolist():
            mine = owners == place
            means = float(predicted[mine].mean()), float(hits[mine].mean())
            bins.append(Bin(float(EDGES[place]), float(EDGES[place + 1]), int(mine.sum()), *means))
        nodes = max(len(predicted), 1)
        error = sum(one.nodes * abs(one.predicted - one.actual) for one in bins) / nodes
        return cls(len(predicted), float(predicted.sum()) / nodes, float(hits.sum()) / nodes, error, bins)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What was found about a drafter."""

    target: str
    drafter: str
    conversations: int
    configurations: list[Configuration]  # the chain, the trees in ascending budget, the policy if there is one
    positions: list[Position]  # depth 1, 2, ...
    reliability: Reliability  # of all nodes of the largest tree
    reliability_by_depth: list[Reliability]  # depth 1, 2, ...
    tree_rounds: int  # rounds of the largest tree
    expected_gain: float  # nodes of the largest tree expected to be accepted, a round
    actual_gain: float  # nodes of it that were


def evaluate(
    target: Target,
    drafter: Drafter,
    conversations: Sequence[Conversation],
    features: FeatureSource | None,
    trees: Sequence[int] = TREES,
    progress: Callable[[float], None] = lambda share: None,
    policy: Throughput | None = None,
) -> Evaluation:
    """Measure a drafter on answers that the target wrote at temperature 0 (see `simulation.select`).

    `trees`: budgets, in nodes. `features`: those of the drafter's `feature_layers`; None if it reads none. With a
    `policy`, made from a calibration, its trees are measured too, and all throughput is predicted by its cost. Raises
    BastionError for answers from above temperature 0, or if there is no round to measure.
    """
    if any(one.temperature for one in conversations):
        raise BastionError("accepted lengths are measured on answers written at temperature 0: leave out the others")
    work = sum(max(len(one.answer) - 1, 0) for one in conversations)  # tokens of all rounds
    if not work:
        raise BastionError("there is no answer of two tokens or more to measure with: give more data")
    largest = max(trees)
    ways: dict[str, BudgetPolicy] = {"chain": Chain()}
    ways |= {f"tree {budget}": FixedBudget(budget) for budget in sorted(set(trees))}
    if policy is not None:
        ways[describe(policy)] = policy
    positions, nodes = _Positions(drafter.depth), _Nodes()
    configurations, done = [], 0
    for name, way in ways.items():
        tally = _Tally(None if policy is None else policy.cost)
        for one in simulate(target, drafter, way, conversations, features):
            conversation = conversations[one.index]
            tally.add(conversation.source, one)
            if name == "chain":
                positions.add(one, conversation)
            elif name == f"tree {largest}":
                nodes.add(one.record)
            done += one.record.accepted_length
            progress(done / (work * len(ways)))
        configurations.append(tally.configuration(name))
    predicted, hits, depths = nodes.columns()
    return Evaluation(
        target=target.name,
        drafter=drafter.name,
        conversations=len(conversations),
        configurations=configurations,
        positions=positions.found(),
        reliability=Reliability.of(predicted, hits),
        reliability_by_depth=[
            Reliability.of(predicted[depths == depth], hits[depths == depth])
            for depth in range(1, int(depths.max(initial=0)) + 1)
        ],
        tree_rounds=nodes.rounds,
        expected_gain=float(predicted.sum()) / nodes.rounds,
        actual_gain=float(hits.sum()) / nodes.rounds,
    )


class _Tally:
    """Accepted lengths, sizes and predicted seconds, by source and overall."""

    def __init__(self, cost: RoundCost | None):
        self.cost = cost
        self.overall, self.by_source = _Sum(), dict[str, _Sum]()

    def add(self, source: str, replayed: SimulatedRound) -> None:
        seconds = 0.0 if self.cost is None else predicted_seconds(self.cost, replayed)
        for one in (self.overall, self.by_source.setdefault(source, _Sum())):
            one.stats.add(replayed.record)
            one.seconds += seconds

    def configuration(self, name: str) -> Configuration:
        by_source = {source: self._figures(one) for source, one in sorted(self.by_source.items())}
        return Configuration(name, self._figures(self.overall), by_source)

    def _figures(self, one: _Sum) -> Figures:
        stats = one.stats
        speed = None if self.cost is None else sum(stats.accepted_lengths) / one.seconds
        return Figures(stats.rounds, stats.mean_accepted_length, stats.mean_tree_size, speed)


class _Sum:
    def __init__(self) -> None:
        self.stats, self.seconds = GenerationStats(), 0.0


def predicted_seconds(cost: RoundCost, replayed: SimulatedRound) -> float:
    """What the round would take: drafting if it was, bookkeeping, and verifying its root and nodes."""
    record = replayed.record
    verify = cost.verify.seconds(np.array([1 + record.tree.size]), record.context)
    return cost.drafting(record.passes) + cost.auxiliary + float(verify[0])


class _Positions:
    """Counts for `Position`, by depth."""

    def __init__(self, depth: int):
        self.counts = np.zeros((4, depth), np.int64)  # rounds, right, reached, right when reached

    def add(self, one: SimulatedRound, conversation: Conversation) -> None:
        limit = min(one.limit, self.counts.shape[1])
        answer = np.array(conversation.ids[one.record.context + 1 :][:limit])
        guessed = one.record.tree.tokens[1:]
        right = np.zeros(limit, np.bool_)
        right[: len(guessed)] = guessed == answer[: len(guessed)]
        reached = np.concatenate(([True], np.logical_and.accumulate(right)))[:limit]
        self.counts[:, :limit] += np.stack((np.ones(limit, np.bool_), right, reached, right & reached))

    def found(self) -> list[Position]:
        return [
            Position(depth, rounds, right / rounds, reached, both / reached if reached else None)
            for depth, (rounds, right, reached, both) in enumerate(self.counts.T.tolist(), 1)
            if rounds
        ]


class _Nodes:
    """Path probabilities of nodes, whether they lay on the answer, and their depths."""

    def __init__(self) -> None:
        self.rounds = 0
        self.predicted, self.hits, self.depths = [np.zeros(0)], [np.zeros(0, np.bool_)], [np.zeros(0, np.int64)]

    def add(self, record: RoundRecord) -> None:
        hits = np.zeros(record.tree.size + 1, np.bool_)
        hits[record.accepted] = True
        self.rounds += 1
        self.predicted.append(record.tree.gains.astype(np.float64))
        self.hits.append(hits[1:])
        self.depths.append(record.tree.depths[1:])

    def columns(self) -> tuple[Floats, Bools, npt.NDArray[np.int64]]:
        return np.concatenate(self.predicted), np.concatenate(self.hits), np.concatenate(self.depths)
