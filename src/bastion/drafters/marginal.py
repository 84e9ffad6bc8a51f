"""Drafts whose positions are guessed independently of each other."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from bastion.drafters.base import Candidates, Frontier, Ids, LogProbs


class Ranking:
    """The best tokens of each row of log-probabilities, found by one top-k for all rows and fetched in one go."""

    def __init__(self, log_probs: Tensor, token_ids: Tensor | None = None):
        """Take log-probabilities [rows, v] in float32; column c is token c or `token_ids[c]`, if given."""
        self._log_probs, self._token_ids = log_probs, token_ids
        self._best: tuple[LogProbs, Ids] | None = None

    def best(self, width: int) -> tuple[LogProbs, Ids]:
        """Log-probabilities and tokens [rows, width] of each row, best first; fewer if there are fewer."""
        width = min(width, self._log_probs.shape[1])
        if self._best is None or self._best[0].shape[1] < width:
            values, columns = self._log_probs.topk(width, dim=1)
            tokens = columns if self._token_ids is None else self._token_ids[columns]
            self._best = values.cpu().numpy(), tokens.cpu().numpy()
        log_probs, ids = self._best
        return log_probs[:, :width], ids[:, :width]


class MarginalProposal:
    """One distribution a depth, whatever the parent: what block-diffusion drafters produce.

    The children of every node of a depth are the same.
    """

    passes = 1
    beam = None

    def __init__(self, log_probs: Tensor, token_ids: Tensor | None = None):
        """Take log-probabilities [depth, v] in float32; column c is token c or `token_ids[c]`, if given."""
        self.log_probs = log_probs
        self.depth: int = log_probs.shape[0]
        self.ready = self.depth
        self._token_ids = token_ids
        self._ranking = Ranking(log_probs, token_ids)

    def column(self, token: int) -> int | None:
        """The column of a token; None if it cannot be drafted."""
        if self._token_ids is None:
            return token
        found = (self._token_ids == token).nonzero()
        return int(found) if len(found) else None

    def expand(self, frontier: Frontier, width: int) -> Candidates:
        """The best `width` tokens (or all there are) of the frontier's depth, for each of its nodes."""
        log_probs, ids = self._ranking.best(width)
        shape = (len(frontier.tokens), ids.shape[1])
        return Candidates(
            tokens=np.broadcast_to(ids[frontier.depth], shape),
            log_probs=np.broadcast_to(log_probs[frontier.depth], shape),
        )
