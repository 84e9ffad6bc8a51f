"""What guessing is worth in one text: whether to stop for a while, and how large trees are grown."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bastion.decoding.budget import BudgetPolicy, RoundCost, Throughput
from bastion.decoding.stats import RoundRecord

MEMORY = 16  # drafted rounds over which the saving is averaged
TOLERATED = 0.05  # mean loss of a drafted round, in plain rounds, that is no reason to rest
SHORTEST, LONGEST = 4, 32  # rounds of a rest; each that follows a trial in vain is twice as long as the one before
ROOM, SMALLEST_ROOM = 4, 32  # nodes that are grown, for each that was chosen in the last draft, and at least


@dataclass(slots=True)
class Pace:
    """Whether drafting pays in one text, by what its rounds wrote and what they cost by the calibration.

    A throughput policy chooses the best tree of a draft, but the draft is paid for by then, and path probabilities are
    a drafter's own opinion of itself. What decides here are the tokens that rounds with a draft really wrote. A round
    of n nodes that wrote a tokens saved `a - T_round(n) / T_round(0)` plain rounds, the drafter's pass being part of
    `T_round(n)` only. While the recent mean is negative, rounds go without a draft; a draft is tried after each rest.
    Growth takes time too, for nodes that are not chosen. Sizes that are chosen change slowly within a text, so a few
    times the last one is grown, and more in the next round if that was too little.

    The rules look at the text's past alone and decide the shape of the next tree only, so texts stay exact; they use
    predicted times, so runs can be repeated.
    """

    cost: RoundCost | None = None  # None: always draft, and grow all that the policy may choose
    saved: float = 0.0  # recent mean saving of a drafted round, in plain rounds
    rest: int = 0  # rounds still to go without a draft
    pause: int = SHORTEST  # length of the next rest
    room: int = 2 * SMALLEST_ROOM  # nodes to grow in the next draft

    @classmethod
    def of(cls, policy: BudgetPolicy) -> Pace:
        """The pace of a new text under a policy."""
        return cls(policy.cost if isinstance(policy, Throughput) and policy.rests else None)

    def drafts(self) -> bool:
        """Whether the next round is worth a draft."""
        return self.rest == 0

    def nodes(self, most: int) -> int:
        """How many nodes to grow for the next round, of which a policy may choose `most`."""
        return most if self.cost is None else min(most, self.room)

    def add(self, record: RoundRecord) -> None:
        """Learn from the round that `drafts` was asked about."""
        if self.cost is None:
            return
        if self.rest:
            self.rest -= 1
            return
        self.room = max(SMALLEST_ROOM, ROOM * record.tree.size)
        rows = np.array([1, 1 + record.tree.size])
        plain, verify = self.cost.verify.seconds(rows, record.context) + self.cost.auxiliary
        saved = record.accepted_length - (self.cost.drafting(record.passes) + verify) / plain
        self.saved += (saved - self.saved) / MEMORY
        if self.saved < -TOLERATED:
            self.rest, self.pause = self.pause, min(2 * self.pause, LONGEST)
            self.saved = 0.0  # the trial is judged by itself
        elif self.saved > 0:
            self.pause = SHORTEST
