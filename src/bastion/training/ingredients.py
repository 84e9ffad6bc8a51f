"""What drafters in training are made of, whatever their family."""

from __future__ import annotations

import collections
from collections.abc import Sequence

import torch
from torch import Tensor

from bastion.errors import BastionError
from bastion.targets.base import Target
from bastion.training.data import Conversation
from bastion.training.losses import IGNORED


def target_layers(layers: int, count: int = 5) -> tuple[int, ...]:
    """The layers a drafter reads by DFlash's rule: `count` evenly spaced ones from the second to the last but two.

    Never the last one, which not every target gives, unless it is the only one.
    """
    if count == 1:
        return (layers // 2,)
    last = max(layers - 3, 1)
    evenly = {round(1 + i * (last - 1) / (count - 1)) for i in range(count)}
    return tuple(sorted(evenly & set(range(layers - 1)))) or (0,)


def check_sizes(target: Target, draft_vocab: int | None) -> None:
    """Raise BastionError for a target that verifies no drafts, and for a draft vocabulary that it cannot have."""
    if target.tree_support == "none":
        raise BastionError(f"{target.name} decodes plainly: it verifies no drafts, so a drafter is of no use to it")
    if draft_vocab is not None and not 1 <= draft_vocab <= target.shape.vocab:
        raise BastionError(f"the draft vocabulary must have 1 to {target.shape.vocab} tokens, those of {target.name}")


def frequent_tokens(conversations: Sequence[Conversation], size: int) -> Tensor:
    """The `size` tokens most frequent in the answers, ascending: a reduced draft vocabulary."""
    counts = collections.Counter(token for one in conversations for token in one.answer)
    if len(counts) < size:
        raise BastionError(f"the answers hold {len(counts)} different tokens: ask for a smaller draft vocabulary")
    return torch.tensor(sorted(token for token, _ in counts.most_common(size)))


def draft_columns(token_ids: Tensor | None, vocab: int) -> Tensor:
    """The draft id of each token [vocab], `IGNORED` for those that a draft vocabulary `token_ids` [v] lacks."""
    ids = torch.arange(vocab) if token_ids is None else token_ids.cpu()
    return torch.full((vocab,), IGNORED).scatter_(0, ids, torch.arange(len(ids)))


def sample_anchors(first: int, last: int, count: int, generator: torch.Generator) -> Tensor:
    """Up to `count` different positions from first .. last - 1, ascending."""
    return first + torch.randperm(last - first, generator=generator)[:count].sort().values


def head_weights(target: Target, token_ids: Tensor | None, device: torch.device) -> tuple[Tensor, Tensor | None]:
    """The target's head as a float32 matrix [v, hidden] and bias [v] (None if it has none), to train through."""
    width = target.shape.hidden
    probe = torch.zeros(width + 1, width, device=target.device, dtype=target.dtype)
    probe[:width] = torch.eye(width)
    answers = target.head(probe, token_ids)
    answers = answers.to(device, torch.float32, copy=True)
    bias = answers[width].clone()
    return (answers[:width] - bias).t().contiguous(), bias if bool(bias.any()) else None


def block_labels(ids: Tensor, prompt_length: int, anchors: Tensor, size: int) -> Tensor:
    """Labels [k, size - 1]: slot j of the block at anchor a is to guess token a + j of `ids` [n].

    `IGNORED` beyond the end and inside the prompt.
    """
    positions = anchors[:, None] + torch.arange(1, size, device=anchors.device)
    inside = (positions < len(ids)) & (positions >= prompt_length)
    return ids[positions.clamp(max=len(ids) - 1)].masked_fill(~inside, IGNORED)
