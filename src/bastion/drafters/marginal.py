"""Drafts whose positions are guessed independently of each other."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from bastion.drafters.base import Candidates, Frontier, Ids, LogProbs


class MarginalProposal:
    """One distribution a depth, whatever the parent: what block-diffusion drafters produce.

    The children of every node of a depth are the same, so they are ranked once for all depths, by one top-k, and
    fetched from the device in one go.
    """

    passes = 1
    beam = None

    def __init__(self, log_probs: Tensor, token_ids: Tensor | None = None):
        """Take log-probabilities [depth, v] in float32; column c is token c or `token_ids[c]`, if given."""
        self.log_probs = log_probs
        self.depth: int = log_probs.shape[0]
        self.ready = self.depth
        self._token_ids = token_ids
        self._ranked: tuple[LogProbs, Ids] | None = None  # log-probs and tokens [depth, width], best first

    def column(self, token: int) -> int | None:
        """The column of a token; None if it cannot be drafted."""
        if self._token_ids is None:
            return token
        found = (self._token_ids == token).nonzero()
        return int(found) if len(found) else None

    def expand(self, frontier: Frontier, width: int) -> Candidates:
        """The best `width` tokens (or all there are) of the frontier's depth, for each of its nodes."""
        width = min(width, self.log_probs.shape[1])
        if self._ranked is None or self._ranked[0].shape[1] < width:
            values, columns = self.log_probs.topk(width, dim=1)
            tokens = columns if self._token_ids is None else self._token_ids[columns]
            self._ranked = values.cpu().numpy(), tokens.cpu().numpy()
        log_probs, ids = self._ranked
        shape = (len(frontier.tokens), width)
        return Candidates(
            tokens=np.broadcast_to(ids[frontier.depth, :width], shape),
            log_probs=np.broadcast_to(log_probs[frontier.depth, :width], shape),
        )
