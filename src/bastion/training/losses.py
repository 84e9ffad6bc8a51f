"""Losses of a drafted block. Rows are blocks, columns the slots behind their anchor: [blocks, block_size - 1]."""

from __future__ import annotations

import torch
from torch import Tensor

IGNORED = -100  # the label of a slot that is not trained: beyond the answer, or outside the draft vocabulary


def label_log_probs(log_probs: Tensor, labels: Tensor) -> Tensor:
    """The drafter's log-probability [...] of each label [...]; 0 where it is `IGNORED`. log_probs [..., v]."""
    picked = log_probs.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return picked.masked_fill(labels == IGNORED, 0.0)


def decay_loss(log_probs: Tensor, valid: Tensor, gamma: float | None) -> Tensor:
    """DFlash's cross-entropy: slot k counts exp(-(k - 1) / gamma), and the weights' sum is divided out.

    log_probs [blocks, slots] of the labels, or minus a cross-entropy; valid [blocks, slots] bool. Without gamma all
    slots count the same. arXiv 2602.06036, equation 4.
    """
    weights = valid.float()
    if gamma is not None:
        weights = weights * torch.exp(-torch.arange(valid.shape[1], device=valid.device) / gamma)
    return -(weights * log_probs).sum() / weights.sum().clamp(min=1e-8)


def dpace_loss(log_probs: Tensor, valid: Tensor, label_log_probs: Tensor, alpha: float = 0.5) -> Tensor:
    """D-PACE: slot k counts what its acceptance is worth, the expected length of the path through it.

    With q_k the drafter's probability of the label, s_k = (1 - alpha) q_k + alpha and P_k = s_1 ... s_k, slot k counts
    the sum of P_m for m >= k; the sum over slots is averaged over the blocks. arXiv 2605.18810.
    """
    survival = ((1 - alpha) * label_log_probs.detach().exp() + alpha).where(valid, 1.0).cumprod(1) * valid
    weights = survival.flip(1).cumsum(1).flip(1)
    return -(weights * valid * log_probs).sum() / len(valid)


def distillation(log_probs: Tensor, ids: Tensor, logits: Tensor) -> Tensor:
    """Minus the cross-entropy [...] of the drafter under the target's distribution over its top candidates.

    log_probs [..., v]; ids [..., k] columns of log_probs, negative for candidates the drafter cannot name, which are
    left out; logits [..., k] the target's.
    """
    known = ids >= 0
    shares = logits.masked_fill(~known, -1e9).softmax(-1) * known
    return (shares * log_probs.gather(-1, ids.clamp(min=0))).sum(-1)
