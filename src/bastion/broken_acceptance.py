"""Acceptance rules that are wrong on purpose: `bastion verify` must reject them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from torch import Tensor

from bastion.decoding import loop
from bastion.decoding.acceptance import Accepted, walk
from bastion.decoding.sampling import Sampler
from bastion.decoding.tree import DraftTree


@contextmanager
def broken_acceptance(temperature: float) -> Iterator[None]:
    """Within the body, decoding accepts what it should not: by rank at temperature 0, by argmax above."""
    with ExitStack() as stack:
        stack.enter_context(patch.object(loop, "walk", _by_argmax if temperature > 0 else _by_rank))
        if temperature > 0:
            stack.enter_context(patch.object(Sampler, "chooser", _chooser_with_argmax(Sampler.chooser)))
        yield


def _by_rank(tree: DraftTree, choose: Callable[[int, list[int]], int]) -> Accepted:
    """Follow the most probable guess, whatever the target says, and let the target choose the bonus token."""
    nodes, parents = [0], tree.parents.tolist()
    while nodes[-1] in parents:
        nodes.append(parents.index(nodes[-1]))
    path = tree.tokens[nodes[1:]].tolist()
    return Accepted(nodes, [*path, choose(nodes[-1], path)])


def _by_argmax(tree: DraftTree, choose: Any) -> Accepted:
    """Follow the target's most probable tokens, and draw the bonus token only, as BASTION's public code does."""
    accepted = walk(tree, choose.argmax)
    path = accepted.tokens[:-1]
    return Accepted(accepted.nodes, [*path, choose(accepted.nodes[-1], path)])


def _chooser_with_argmax(right: Callable[..., Any]) -> Callable[..., Any]:
    def chooser(sampler: Sampler, logits: Tensor, text: list[int]) -> Any:
        choose, best = right(sampler, logits, text), logits.argmax(-1).tolist()
        choose.argmax = lambda node, path: best[node]
        return choose

    return chooser
