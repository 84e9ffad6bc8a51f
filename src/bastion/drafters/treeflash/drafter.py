"""TreeFlash as a `Drafter`: one pass of its DFlash body, then all guesses for all tokens before them at once.

Stage 1 takes the body's most probable tokens of each slot; stage 2 corrects every slot's guesses for each of those of
the slot before (arXiv 2606.03819).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from bastion.drafters.base import Candidates, DraftContext, Frontier, Proposal
from bastion.drafters.dflash.drafter import DFlashDrafter
from bastion.drafters.marginal import Ranking
from bastion.drafters.treeflash.checkpoint import load_model
from bastion.drafters.treeflash.model import TreeFlashModel
from bastion.targets.base import Target


class TransitionProposal:
    """A distribution for each depth and token before it; none below a token that is not among those of its depth."""

    passes = 1
    beam = None

    def __init__(self, log_probs: Tensor, parents: Tensor, token_ids: Tensor | None = None):
        """Take the transition table.

        parents [depth - 1, M]: the tokens of each depth but the last that can have children. log_probs [rows, v] in
        float32: row 0 is what follows the root, row 1 + (d - 1) * M + r what follows token r of depth d. Column c is
        token c, or `token_ids[c]` if given.
        """
        self.log_probs, self.parents = log_probs, parents.cpu().numpy()
        self.depth: int = len(parents) + 1
        self.ready = self.depth
        self._ranking = Ranking(log_probs, token_ids)

    def expand(self, frontier: Frontier, width: int) -> Candidates:
        """The best `width` tokens (or all there are) behind each node's token at the frontier's depth."""
        log_probs, ids = self._ranking.best(width)
        if frontier.depth == 0:
            rows = np.zeros_like(frontier.tokens)
            return Candidates(ids[rows], log_probs[rows])
        same = frontier.tokens[:, None] == self.parents[frontier.depth - 1]
        rows = 1 + (frontier.depth - 1) * same.shape[1] + same.argmax(1)
        known = same.any(1)[:, None]
        return Candidates(ids[rows], np.where(known, log_probs[rows], np.float32(-np.inf)))


class TreeFlashDrafter(DFlashDrafter):
    """Drafts `block_size - 1` tokens, each in the light of the one before it."""

    load_model = staticmethod(load_model)

    def __init__(self, model: TreeFlashModel, target: Target, name: str = "treeflash"):
        """Join a model and its target. Raises BastionError if they were not made for each other."""
        super().__init__(model.model, target, name)
        self.digest = model.digest()
        self.correction, self.top_m = model.ar_approximation, model.config.top_m

    @torch.no_grad()
    def propose(self, contexts: list[DraftContext]) -> list[Proposal]:
        """Draft for every sequence; embeddings, correction and head run over all sequences together.

        The temperature does not change which tokens are the most probable, so stage 1 needs none.
        """
        norm, body = self.model.norm, self.model
        hidden = self._hidden(contexts, body.draft_states)
        normed = norm(hidden)
        best = self._logits(normed[:, :-1]).topk(self.top_m).indices
        parents = best if self._token_ids is None else self._token_ids[best]
        roots = parents.new_tensor([context.tokens[-1] for context in contexts])
        previous = self.target.embed(torch.cat((roots[:, None], parents.flatten(1)), 1)).to(body.device, body.dtype)
        slots = torch.arange(1, self.depth, device=body.device).repeat_interleave(self.top_m)
        slots = torch.cat((slots.new_zeros(1), slots))  # [rows], as in TransitionProposal
        corrected = norm(self.correction(hidden[:, slots], normed[:, slots], previous))
        logits = self._logits(corrected) / self._divisors(contexts)[:, slots.to(self.target.device)]
        return [
            TransitionProposal(rows, tokens, self._token_ids)
            for rows, tokens in zip(logits.log_softmax(-1), parents, strict=True)
        ]
