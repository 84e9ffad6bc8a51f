"""How far the n-gram index is followed where a drafter has an opinion too."""

from __future__ import annotations

from dataclasses import dataclass, field

from bastion.drafters.ngram.index import MAX_MATCH

PRIOR_REACH = 0.9  # of a drafter that has not been tried: it is, unless it is dear
REMEMBERED = 24  # tokens over which a reach is averaged
FORGOTTEN = 96  # rounds without the drafter after which its reach is mostly the prior again


def _prior() -> list[float]:
    """Tokens that the index is taken to have explained, to one of the drafter, by the length of the match.

    Tuned on replayed answers of SmolLM2-135M, with its own drafter and with made-up ones that are right far more often.
    """
    return [1.0 + length for length in range(MAX_MATCH + 1)]


@dataclass(slots=True)
class Trust:
    """Weights of a mixture of two experts, learned from one text as it is written.

    One expert is the index with the drafter behind it: where it escapes, the drafter decides, as the last resort of
    PPM, so a token has probability `q = p_index + escape * p_drafter`. The other is the drafter alone, `p_drafter`. The
    mixture `w * q + (1 - w) * p_drafter` has one weight for each length of the longest match: short matches say little
    in one text and much in another. A weight is the share of tokens that the first expert explained, each counted by
    its posterior probability: the online EM estimate of a mixture's weights (Titterington 1984), from a prior.
    """

    index: list[float] = field(default_factory=_prior)
    drafter: list[float] = field(default_factory=lambda: [1.0] * (MAX_MATCH + 1))

    def weight(self, match: int) -> float:
        """The weight of the index after a match of so many tokens."""
        return self.index[match] / (self.index[match] + self.drafter[match])

    def learn(self, match: int, ratio: float) -> None:
        """Count a token that came; `ratio` is `q / p_drafter` of it."""
        weight = self.weight(match)
        explained = weight * ratio / (weight * ratio + 1 - weight)
        self.index[match] += explained
        self.drafter[match] += 1 - explained


@dataclass(slots=True)
class Reach:
    """How often the drafter's best guess was the token that came: its share of recent tokens, from a prior.

    What is not asked for is forgotten, so a drafter that was of no use in one passage is tried again in the next.
    """

    share: float = PRIOR_REACH

    def learn(self, right: bool) -> None:
        """Count a token that came."""
        self.share += (right - self.share) / REMEMBERED

    def forget(self) -> None:
        """Count a round without the drafter."""
        self.share += (PRIOR_REACH - self.share) / FORGOTTEN
