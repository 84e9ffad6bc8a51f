"""Best-first growth of a draft tree, one depth at a time."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from bastion.decoding.tree import DraftTree
from bastion.drafters.base import Frontier, Ids, LogProbs, Outlook, Proposal


def grow(
    proposal: Proposal,
    root: int,
    max_nodes: int,
    max_depth: int | None = None,
    width: int | None = None,
    deepens: Callable[[Outlook], bool] = lambda outlook: True,
) -> DraftTree:
    """The `max_nodes` most probable nodes of a proposal, as a tree in descending path probability.

    A child never scores above its parent, so the best nodes of all depths are closed under "parent of", and are what
    the papers' best-first heap pops (BASTION section 3.2, DDTree algorithm 1). Instead of popping nodes one by one,
    each depth is expanded at once and merged into the pool of the best `max_nodes` so far; nodes that fell out of the
    pool are not expanded, since whatever is below them would fall out too.

    `width` limits the children of a node; 1 gives the most probable chain. `deepens` is asked before each further pass
    of the drafter, and ends the growth with False.

    A proposal's `beam` limits the nodes of a depth that are expanded, the best first. With it, and drafters that name
    k children a node, a fixed budget gives EAGLE-2's dynamic tree (arXiv 2406.16858, section 4).
    """
    width = min(width or max_nodes, max_nodes)
    depths = proposal.depth if max_depth is None else min(proposal.depth, max_depth)
    nothing = np.zeros(0, np.int64)
    pool = Pool(np.zeros(0, np.float32), nothing, nothing, nothing, nothing)
    zero = np.zeros(1, np.int64)
    frontier, scores, numbers = Frontier(0, zero + root, zero), np.zeros(1, np.float32), zero
    found, survival = 1, 1.0  # nodes are numbered in the order they are found; the root is 0
    for depth in range(depths if max_nodes > 0 else 0):
        if depth == proposal.ready:
            outlook = Outlook(
                np.exp(pool.scores), np.exp(scores), survival, proposal.passes, proposal.ready // proposal.passes
            )
            if not deepens(outlook):
                break
        candidates = proposal.expand(frontier, width)
        if candidates.tokens.shape[1] == 0:
            break
        # What is not above the pool's last node could only push out nodes that are at least as probable. Candidates are
        # sorted, so that rules out most rows by their first one, and most ranks by the best row's score.
        floor = pool.scores[-1] if len(pool.scores) == max_nodes else -np.inf
        promising = np.flatnonzero(scores + candidates.log_probs[:, 0] > floor)
        if not len(promising):
            break
        log_probs = candidates.log_probs[promising]
        ranked = np.count_nonzero(scores.max() + log_probs.max(0) > floor)
        paths = (scores[promising, None] + log_probs[:, :ranked]).ravel()
        chosen = np.flatnonzero(paths > floor)
        chosen = chosen[np.argsort(-paths[chosen], kind="stable")][:max_nodes]
        rows, ranks = promising[chosen // ranked], chosen % ranked
        tokens, best = candidates.tokens[rows, ranks], paths[chosen]
        own = np.arange(found, found + len(best))
        found += len(best)
        level = Pool(best, tokens, numbers[rows], np.full_like(own, depth + 1), own)
        pool, alive = pool.merge(level, max_nodes)
        alive = alive[: proposal.beam]
        survival = float(np.exp(best[alive]).sum() / np.exp(scores).sum())
        frontier = Frontier(depth + 1, tokens[alive], rows[alive])
        scores, numbers = best[alive], own[alive]
    return pool.tree(root, found)


class Pool:
    """The best nodes found so far, best first."""

    __slots__ = ("depths", "numbers", "parents", "scores", "tokens")

    def __init__(self, scores: LogProbs, tokens: Ids, parents: Ids, depths: Ids, numbers: Ids):
        self.scores, self.tokens, self.parents, self.depths, self.numbers = scores, tokens, parents, depths, numbers

    def merge(self, level: Pool, most: int) -> tuple[Pool, Ids]:
        """The best `most` nodes of both, and which of the level's are among them (ascending indices).

        The order is stable, earlier depths first: a child as probable as its parent stays behind it.
        """
        scores = np.concatenate((self.scores, level.scores))
        order = np.argsort(-scores, kind="stable")[:most]
        columns = (
            np.concatenate((getattr(self, name), getattr(level, name)))[order]
            for name in ("tokens", "parents", "depths", "numbers")
        )
        alive = np.sort(order[order >= len(self.scores)]) - len(self.scores)
        return Pool(scores[order], *columns), alive

    def tree(self, root: int, found: int) -> DraftTree:
        """Put the root in front, and translate the numbers of parents into node indices."""
        index = np.zeros(found, np.int64)
        index[self.numbers] = np.arange(1, len(self.numbers) + 1)
        return DraftTree(
            np.concatenate(([root], self.tokens)),
            np.concatenate(([-1], index[self.parents])),
            np.concatenate(([0], self.depths)),
            np.concatenate((np.zeros(1, np.float32), self.scores)),
        )
