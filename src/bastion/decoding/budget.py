"""Budget policies: how many nodes a draft tree is worth having."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from bastion.cost.base import VerifyCost
from bastion.drafters.base import LogProbs, Outlook


class BudgetPolicy(Protocol):
    """Chooses the size of the trees of one round."""

    max_nodes: int  # no tree is grown beyond this; 0 turns drafting off
    width: int | None  # most children of a node; None: as many as fit

    def choose(self, gains: LogProbs, contexts: Sequence[int], passes: Sequence[int]) -> int:
        """How many nodes to verify.

        gains [n]: path probabilities of the nodes of all sequences' trees together, descending.
        contexts: committed tokens of each sequence. passes: the drafter's for each; 0 where nothing was drafted.
        """

    def deepens(self, outlook: Outlook, context: int) -> bool:
        """Whether a pass of the drafter is worth its cost, for a tree that cannot grow further without it.

        context: committed tokens of the sequence.
        """
        return True


@dataclass(slots=True)
class Plain(BudgetPolicy):
    """Autoregressive decoding: no drafter, one token a pass."""

    max_nodes: int = 0
    width: int | None = None

    def choose(self, gains: LogProbs, contexts: Sequence[int], passes: Sequence[int]) -> int:
        """Nothing."""
        return 0


@dataclass(slots=True)
class Chain(BudgetPolicy):
    """DFlash: the most probable token at each depth, up to `max_nodes` of them."""

    max_nodes: int = 64
    width: int | None = 1

    def choose(self, gains: LogProbs, contexts: Sequence[int], passes: Sequence[int]) -> int:
        """The whole chain."""
        return len(gains)


@dataclass(slots=True)
class FixedBudget(BudgetPolicy):
    """DDTree: the `max_nodes` most probable nodes, whatever they cost."""

    max_nodes: int
    width: int | None = None

    def choose(self, gains: LogProbs, contexts: Sequence[int], passes: Sequence[int]) -> int:
        """All that were grown: `max_nodes` for each sequence."""
        return len(gains)


@dataclass(slots=True)
class RoundCost:
    """What a round of this target and drafter costs on this machine, in seconds."""

    verify: VerifyCost
    draft: float  # the drafter's first pass, for one sequence
    auxiliary: float  # growth, acceptance, commit and bookkeeping, for one sequence
    deepen: float = 0.0  # each further pass of the drafter, for one sequence

    def drafting(self, passes: int) -> float:
        """What so many passes of the drafter cost."""
        return self.draft + (passes - 1) * self.deepen if passes else 0.0


@dataclass(slots=True)
class Throughput(BudgetPolicy):
    """BASTION with a roofline, CaDDTree with a measured profile: the most expected tokens per second.

    With path probabilities rho in descending order, a round that verifies n nodes for b sequences is expected to
    write `b + rho_1 + ... + rho_n` tokens and takes `T_draft + T_aux + T_verify(b + n)` (BASTION section 3.3, CaDDTree
    equation 4). The papers stop at the first n that gains nothing, which is the optimum where the cost is convex.
    Measured costs need not be, so the maximum over all n is taken.

    The costs are measured for one sequence. Of a batch, each further one adds its drafter's passes, bookkeeping, and
    the reading of its own cache, which is taken to cost what the context adds to a pass of one row.
    """

    cost: RoundCost
    max_nodes: int = 256
    width: int | None = None
    indifference: float = 0.0  # of trees whose throughput is within this share of the best, the smallest is taken
    model: str = "cost"  # the cost model's name, to show
    rests: bool = False  # whether texts rest from drafts that do not pay (see `pace`); the papers' methods never do

    def choose(self, gains: LogProbs, contexts: Sequence[int], passes: Sequence[int]) -> int:
        """The number of nodes with the highest expected throughput."""
        throughput = self._throughput(gains, contexts, passes)
        return int(np.argmax(throughput >= (1 - self.indifference) * throughput.max()))

    def deepens(self, outlook: Outlook, context: int) -> bool:
        """Whether the best expected throughput is higher with another pass, its cost included.

        What a pass would find is not known before it. Each level that it gives is taken to keep the share of path
        probability that the last level kept, in one child of each node.
        """
        level = np.arange(1, np.max(outlook.levels, initial=0) + 1)[:, None]
        below = np.where(level <= outlook.levels, outlook.survival**level * outlook.frontier, 0.0)
        found = np.concatenate((outlook.gains, below.ravel()))
        found = -np.sort(-found)[: self.max_nodes]
        now = self._throughput(outlook.gains[: self.max_nodes], [context], [outlook.passes]).max()
        return bool(self._throughput(found, [context], [outlook.passes + 1]).max() > now)

    def _throughput(self, gains: LogProbs, contexts: Sequence[int], passes: Sequence[int]) -> npt.NDArray[np.float64]:
        """Expected tokens per second [n + 1] of a round that verifies 0, 1, ..., n nodes."""
        batch = len(contexts)
        expected = np.empty(len(gains) + 1)
        expected[0] = batch
        expected[1:] = batch + np.cumsum(gains, dtype=np.float64)
        fixed = sum(map(self.cost.drafting, passes)) + batch * self.cost.auxiliary
        context = sum(contexts) / batch
        verify = self.cost.verify.seconds(np.arange(batch, batch + len(expected)), context)
        if batch > 1:
            one = np.ones(1, np.int64)
            own_cache = self.cost.verify.seconds(one, context)[0] - self.cost.verify.seconds(one, 0)[0]
            fixed += (batch - 1) * float(own_cache)
        return np.asarray(expected / (fixed + verify), dtype=np.float64)
