"""Drafts whose positions are guessed independently of each other."""

from __future__ import annotations

from torch import Tensor

from bastion.drafters.base import Candidates, Frontier


class MarginalProposal:
    """One distribution a depth, whatever the parent: what block-diffusion drafters produce.

    The children of every node of a depth are the same, so they are ranked once for all depths, by one top-k.
    """

    def __init__(self, log_probs: Tensor, token_ids: Tensor | None = None):
        """Take log-probabilities [depth, v] in float32; column c is token c or `token_ids[c]`, if given."""
        self.log_probs = log_probs
        self.depth: int = log_probs.shape[0]
        self._token_ids = token_ids
        self._ranked: tuple[Tensor, Tensor] | None = None  # log-probs and tokens [depth, width], best first

    def expand(self, frontier: Frontier, width: int) -> Candidates:
        """The best `width` tokens (or all there are) of the frontier's depth, for each of its nodes."""
        width = min(width, self.log_probs.shape[1])
        if self._ranked is None or self._ranked[0].shape[1] < width:
            values, columns = self.log_probs.topk(width, dim=1)
            self._ranked = values, columns if self._token_ids is None else self._token_ids[columns]
        values, tokens = self._ranked
        shape = (len(frontier.tokens), width)
        return Candidates(
            tokens=tokens[frontier.depth, :width].expand(shape),
            log_probs=values[frontier.depth, :width].expand(shape),
        )
