"""What followed each suffix of a text, and how far to trust it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from operator import itemgetter

MAX_MATCH = 8  # longest suffix that is indexed; longer ones cost memory and predict hardly better
MAX_SUCCESSORS = 16  # the most recent ones of a suffix that are proposed: bounds the work on frequent tokens

# The odds of a novel token after a suffix of one token with one known successor, seen once; a suffix of n tokens
# has 1 / n**1.5 of them. Tuned, with the weight, on replayed answers of SmolLM2-135M.
NOVELTY = 4.0
PRIOR_WEIGHT = 2.0  # how many observed hits, and misses, the prior is worth


@dataclass(slots=True)
class Level:
    """The successors of one suffix that no longer suffix of the same text has."""

    length: int  # of the suffix, in tokens
    total: int  # how often one of them followed
    distinct: int  # how many there are
    counts: dict[int, int]  # the most recent of them, at most MAX_SUCCESSORS: how often each followed


@dataclass(slots=True)
class Prediction:
    """What may come after a suffix."""

    likeliest: list[tuple[int, float]]  # tokens and their probabilities, in descending order
    match: int  # length of the longest known suffix, in tokens; 0 if there is none
    escape: float  # the probability of all tokens that were never seen after a suffix of this one


@dataclass(slots=True)
class SuffixIndex:
    """Successor counts of every suffix of up to MAX_MATCH tokens in one text, extended as the text grows.

    Estimates are those of PPM with exclusion (Moffat 1990): the longest known suffix shares out
    the probability that its successors include the next token, and leaves the rest to shorter ones. That
    probability starts from the form of Witten and Bell (1991, method C), `total / (total + novelty *
    distinct)`, with a novelty that falls with the length of the suffix. Its odds are corrected by how often
    suffixes of that length have hit (their successors included the token that came) and missed in this text.
    """

    length: int = 0  # tokens of the text that are indexed
    suffix: tuple[int, ...] = ()  # the last of them
    successors: dict[tuple[int, ...], dict[int, int]] = field(default_factory=dict)  # latest successor last
    hits: list[float] = field(default_factory=lambda: [PRIOR_WEIGHT] * (MAX_MATCH + 1))  # by suffix length
    misses: list[float] = field(default_factory=lambda: [PRIOR_WEIGHT] * (MAX_MATCH + 1))
    expected_misses: list[float] = field(default_factory=lambda: [PRIOR_WEIGHT] * (MAX_MATCH + 1))

    def extend(self, tokens: list[int]) -> None:
        """Read what is new in `tokens`, the whole text, which begins with the text read before."""
        for token in islice(tokens, self.length, None):
            self._score(token)
            for length in range(1, len(self.suffix) + 1):
                counts = self.successors.setdefault(self.suffix[-length:], {})
                counts[token] = counts.pop(token, 0) + 1  # taken out and put back: dicts keep the order
            self.suffix = follow(self.suffix, token)
        self.length = len(tokens)

    def predict(self, suffix: tuple[int, ...], count: int, least: float) -> Prediction:
        """The `count` likeliest next tokens after `suffix`.

        Those below `least` are left out. Among equally likely tokens the longer match comes first, then the
        more recent one. The probabilities of all known successors sum to less than 1; the rest, the escape, is that of
        tokens never seen after the last one. It is not followed below `least`.
        """
        mass, match = 1.0, 0
        likely: list[tuple[int, float]] = []
        for level in self._levels(suffix):
            match = match or level.length
            miss = _miss(level, self._correction(level.length))
            share = mass * (1.0 - miss) / level.total
            likely += [(token, share * times) for token, times in level.counts.items() if share * times >= least]
            mass *= miss
            if mass < least:
                break  # shorter suffixes can add nothing that is likely enough
        return Prediction(sorted(likely, key=itemgetter(1), reverse=True)[:count], match, mass)

    def _levels(self, suffix: tuple[int, ...]) -> Iterator[Level]:
        """The known suffixes of `suffix` that add a successor, longest first."""
        matches = []
        for length in range(1, len(suffix) + 1):
            found = self.successors.get(suffix[-length:])
            if found is None:
                break  # no longer suffix can be known
            matches.append(found)
        seen: set[int] = set()
        for length in range(len(matches), 0, -1):
            found = matches[length - 1]
            repeated = [found[token] for token in seen if token in found]
            distinct = len(found) - len(repeated)
            if distinct == 0:
                continue
            recent = islice(reversed(found.items()), MAX_SUCCESSORS)
            counts = {token: times for token, times in recent if token not in seen}
            yield Level(length, sum(found.values()) - sum(repeated), distinct, counts)
            seen.update(counts)

    def _score(self, token: int) -> None:
        """Compare with `token`, which comes next, what the index would have said."""
        for level in self._levels(self.suffix):
            self.expected_misses[level.length] += _miss(level, 1.0)
            if token in level.counts:
                self.hits[level.length] += 1.0
                return
            self.misses[level.length] += 1.0

    def _correction(self, length: int) -> float:
        """Odds of a miss after suffixes of `length` tokens in this text, over those that were expected."""
        hits, misses, expected_misses = self.hits[length], self.misses[length], self.expected_misses[length]
        expected_hits = hits + misses - expected_misses
        return misses / hits * expected_hits / expected_misses


def _miss(level: Level, correction: float) -> float:
    """The probability that none of the level's successors comes next."""
    novel = correction * NOVELTY / (level.length * math.sqrt(level.length)) * level.distinct
    return novel / (level.total + novel)


def follow(suffix: tuple[int, ...], token: int) -> tuple[int, ...]:
    """The last MAX_MATCH tokens after `token` is appended to `suffix`."""
    return (*suffix, token)[-MAX_MATCH:]
