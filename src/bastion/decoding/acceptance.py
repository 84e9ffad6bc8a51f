"""Acceptance: which guesses are the target's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bastion.decoding.tree import DraftTree


@dataclass(slots=True)
class Accepted:
    """The outcome of verifying a tree."""

    nodes: list[int]  # the root and the accepted nodes, from the top down
    tokens: list[int]  # the new tokens: those of the accepted nodes, then the bonus token


def walk(tree: DraftTree, choose: Callable[[int, list[int]], int]) -> Accepted:
    """Sample-and-walk: let the target choose its token at a node, and follow the child that carries it.

    `choose(node, path)` draws from the target's distribution after `path`, the tokens of the accepted nodes so far. The
    first token that no child carries is the bonus token. The tree only decides how far one pass reaches, never
    which token is written, so the text has the target's distribution for any tree that was fixed before the
    draws (DDTree section 3.3); with `choose` the argmax it is greedy decoding.
    """
    parents, tokens = tree.parents.tolist(), tree.tokens.tolist()
    children = {(parents[node], tokens[node]): node for node in range(len(tokens) - 1, 0, -1)}
    nodes, path = [0], [choose(0, [])]
    while (child := children.get((nodes[-1], path[-1]))) is not None:
        nodes.append(child)
        path.append(choose(child, path))
    return Accepted(nodes, path)
