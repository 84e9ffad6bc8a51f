"""Drafts from what the text itself has said before. Nothing to train, nothing to load."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bastion.drafters.base import Candidates, DraftContext, Frontier, Proposal
from bastion.drafters.ngram.index import MAX_MATCH, Prediction, SuffixIndex, follow
from bastion.errors import BastionError

MAX_CHILDREN = 4  # of one node; further ones are right too seldom to pay for their row
MIN_PATH_PROBABILITY = 0.02  # below it a node adds less than its row costs; keeps the frontier small


@dataclass(slots=True)
class Row:
    """A node whose children are wanted: the end of its text, the probability of its path, and what may follow."""

    suffix: tuple[int, ...]
    path_probability: float
    prediction: Prediction

    @classmethod
    def of_root(cls, index: SuffixIndex) -> Row:
        """Ask the index what may follow the text."""
        return cls(index.suffix, 1.0, index.predict(index.suffix, MAX_CHILDREN, MIN_PATH_PROBABILITY))

    def child(self, index: SuffixIndex, token: int, probability: float) -> Row:
        """Ask the index for children of a child whose paths are probable enough, MAX_CHILDREN at most."""
        path_probability = self.path_probability * probability
        if path_probability < MIN_PATH_PROBABILITY:
            return UNLIKELY
        suffix, least = follow(self.suffix, token), MIN_PATH_PROBABILITY / path_probability
        return Row(suffix, path_probability, index.predict(suffix, MAX_CHILDREN, least))


UNLIKELY = Row((), 0.0, Prediction([], 0, 1.0))  # a node whose children, and theirs, are too improbable to look up


class NgramProposal:
    """Continuations of the text by what followed its longest known suffixes, path tokens included."""

    passes = 1
    beam = None

    def __init__(self, index: SuffixIndex, depth: int):
        self.depth = self.ready = depth
        self.index = index
        self._rows: list[Row] = []  # of the last frontier

    def expand(self, frontier: Frontier, width: int) -> Candidates:
        """Up to `width` (and MAX_CHILDREN) children a node, on the CPU; k is 0 where the text knows none."""
        if frontier.depth == 0:
            self._rows = [Row.of_root(self.index)]
        else:
            parents = [self._rows[place] for place in frontier.rows.tolist()]
            self._rows = [
                parent.child(self.index, token, dict(parent.prediction.likeliest)[token])
                for parent, token in zip(parents, frontier.tokens.tolist(), strict=True)
            ]
        return candidates(self._rows, width)


def candidates(rows: Sequence[Row], width: int) -> Candidates:
    """Up to `width` tokens that the index says may follow each row; k is 0 where it says nothing about any."""
    k = min(width, max(len(row.prediction.likeliest) for row in rows))
    tokens = np.zeros((len(rows), k), np.int64)
    log_probs = np.full((len(rows), k), -math.inf, np.float32)
    for place, row in enumerate(rows):
        for rank, (token, probability) in enumerate(row.prediction.likeliest[:k]):
            tokens[place, rank], log_probs[place, rank] = token, math.log(probability)
    return Candidates(tokens, log_probs)


class NgramDrafter:
    """Proposes trees of continuations copied from the prompt and the output.

    It gains on text that repeats itself: code, edits, answers that quote their prompt. Elsewhere its
    probabilities are low, and a budget policy drafts little. At a temperature it proposes the same: the text
    was written at it. The index takes about 2 kB of memory for each token of text.
    """

    name = "ngram"
    feature_layers: tuple[int, ...] = ()

    def __init__(self, depth: int = 16):
        if depth < 1:
            raise BastionError(f"the n-gram drafter needs a depth of at least 1, not {depth}")
        self.depth = depth
        self.digest = f"ngram-{MAX_MATCH}-{MAX_CHILDREN}-{depth}"

    def propose(self, contexts: list[DraftContext]) -> list[Proposal]:
        """Read the new tokens of every sequence; one proposal each, good until the next call."""
        proposals: list[Proposal] = []
        for context in contexts:
            if context.memory is None:
                context.memory = SuffixIndex()
            context.memory.extend(context.tokens)
            proposals.append(NgramProposal(context.memory, self.depth))
        return proposals
