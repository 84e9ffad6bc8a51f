"""Budget policies: how many nodes a draft tree is worth having."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from bastion.cost.base import VerifyCost
from bastion.drafters.base import LogProbs


class BudgetPolicy(Protocol):
    """Chooses the size of the trees of one round."""

    max_nodes: int  # no tree is grown beyond this; 0 turns drafting off
    width: int | None  # most children of a node; None: as many as fit

    def choose(self, gains: LogProbs, contexts: Sequence[int]) -> int:
        """How many nodes to verify.

        gains [n]: path probabilities of the nodes of all sequences' trees together, descending.
        contexts: committed tokens of each sequence.
        """


@dataclass(slots=True)
class Plain:
    """Autoregressive decoding: no drafter, one token a pass."""

    max_nodes: int = 0
    width: int | None = None

    def choose(self, gains: LogProbs, contexts: Sequence[int]) -> int:
        """Nothing."""
        return 0


@dataclass(slots=True)
class Chain:
    """DFlash: the most probable token at each depth, up to `max_nodes` of them."""

    max_nodes: int = 64
    width: int | None = 1

    def choose(self, gains: LogProbs, contexts: Sequence[int]) -> int:
        """The whole chain."""
        return len(gains)


@dataclass(slots=True)
class FixedBudget:
    """DDTree: the `max_nodes` most probable nodes, whatever they cost."""

    max_nodes: int
    width: int | None = None

    def choose(self, gains: LogProbs, contexts: Sequence[int]) -> int:
        """All that were grown: `max_nodes` for each sequence."""
        return len(gains)


@dataclass(slots=True)
class RoundCost:
    """What a round of this target and drafter costs on this machine, in seconds."""

    verify: VerifyCost
    draft: float  # the drafter's pass, for one sequence
    auxiliary: float  # growth, acceptance, commit and bookkeeping, for one sequence


@dataclass(slots=True)
class Throughput:
    """BASTION with a roofline, CaDDTree with a measured profile: the most expected tokens per second.

    With path probabilities rho in descending order, a round that verifies n nodes for b sequences is expected to
    write `b + rho_1 + ... + rho_n` tokens and takes `T_draft + T_aux + T_verify(b + n)` (BASTION section 3.3, CaDDTree
    equation 4). The papers stop at the first n that gains nothing, which is the optimum where the cost is convex.
    Measured costs need not be, so the maximum over all n is taken.

    The costs are measured for one sequence. Of a batch, each further one adds a drafter's pass, bookkeeping, and the
    reading of its own cache, which is taken to cost what the context adds to a pass of one row.
    """

    cost: RoundCost
    max_nodes: int = 256
    width: int | None = None
    indifference: float = 0.0  # of trees whose throughput is within this share of the best, the smallest is taken
    model: str = "cost"  # the cost model's name, to show
    rests: bool = False  # whether texts rest from drafts that do not pay (see `pace`); the papers' methods never do

    def choose(self, gains: LogProbs, contexts: Sequence[int]) -> int:
        """The number of nodes with the highest expected throughput."""
        batch = len(contexts)
        expected = np.empty(len(gains) + 1)
        expected[0] = batch
        expected[1:] = batch + np.cumsum(gains, dtype=np.float64)
        fixed = batch * (self.cost.draft + self.cost.auxiliary)
        context = sum(contexts) / batch
        verify = self.cost.verify.seconds(np.arange(batch, batch + len(expected)), context)
        if batch > 1:
            one = np.ones(1, np.int64)
            own_cache = self.cost.verify.seconds(one, context)[0] - self.cost.verify.seconds(one, 0)[0]
            fixed += (batch - 1) * float(own_cache)
        throughput = expected / (fixed + verify)
        return int(np.argmax(throughput >= (1 - self.indifference) * throughput.max()))
