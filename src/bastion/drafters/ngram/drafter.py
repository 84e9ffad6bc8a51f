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
NO_PREDICTION = Prediction([], 0, 1.0)


@dataclass(slots=True)
class Row:
    """A node whose children are wanted: the end of its text, the probability of its path, and what may follow."""

    suffix: tuple[int, ...]
    path_probability: float
    prediction: Prediction

    @classmethod
    def look_up(cls, index: SuffixIndex, suffix: tuple[int, ...], path_probability: float) -> Row:
        """Ask the index for children whose paths are probable enough, MAX_CHILDREN at most."""
        if path_probability < MIN_PATH_PROBABILITY:
            return cls(suffix, path_probability, NO_PREDICTION)
        least = MIN_PATH_PROBABILITY / path_probability
        return cls(suffix, path_probability, index.predict(suffix, MAX_CHILDREN, least))


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
            nodes = [(self.index.suffix, 1.0)]
        else:
            nodes = []
            for place, token in zip(frontier.rows.tolist(), frontier.tokens.tolist(), strict=True):
                parent = self._rows[place]
                probability = dict(parent.prediction.likeliest)[token]
                nodes.append((follow(parent.suffix, token), parent.path_probability * probability))
        self._rows = [Row.look_up(self.index, *node) for node in nodes]
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
