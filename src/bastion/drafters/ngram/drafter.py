"""Drafts from what the text itself has said before. Nothing to train, nothing to load."""

from __future__ import annotations

import math

import numpy as np

from bastion.drafters.base import Candidates, DraftContext, Frontier, Proposal
from bastion.drafters.ngram.index import MAX_MATCH, SuffixIndex, follow
from bastion.errors import BastionError

MAX_CHILDREN = 4  # of one node; further ones are right too seldom to pay for their row
MIN_PATH_PROBABILITY = 0.02  # below it a node adds less than its row costs; keeps the frontier small


class NgramProposal:
    """Continuations of the text by what followed its longest known suffixes, path tokens included."""

    def __init__(self, index: SuffixIndex, depth: int):
        self.depth = depth
        self.index = index
        # Of each row of the last frontier: its suffix, its children and the probabilities of their paths.
        self.rows: list[tuple[tuple[int, ...], list[tuple[int, float]]]] = []

    def expand(self, frontier: Frontier, width: int) -> Candidates:
        """Up to `width` (and MAX_CHILDREN) children a node, on the CPU; k is 0 where the text knows none."""
        if frontier.depth == 0:
            states = [(self.index.suffix, 1.0)]
        else:
            states = []
            for row, rank in zip(frontier.rows.tolist(), frontier.ranks.tolist(), strict=True):
                suffix, children = self.rows[row]
                token, path_probability = children[rank]
                states.append((follow(suffix, token), path_probability))
        self.rows = []
        log_probs = []
        for suffix, path_probability in states:
            least = MIN_PATH_PROBABILITY / path_probability
            likeliest = self.index.predict(suffix, min(width, MAX_CHILDREN), least)
            self.rows.append((suffix, [(t, path_probability * p) for t, p in likeliest]))
            log_probs.append([math.log(p) for _, p in likeliest])
        k = max(len(row) for row in log_probs)
        padded = [row + [-math.inf] * (k - len(row)) for row in log_probs]
        tokens = [[t for t, _ in children] + [0] * (k - len(children)) for _, children in self.rows]
        return Candidates(np.array(tokens, np.int64), np.array(padded, np.float32))


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
