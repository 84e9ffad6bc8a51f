"""Best-first growth of a draft tree, one depth at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from bastion.decoding.tree import DraftTree
from bastion.drafters.base import Frontier, Proposal


def grow(
    proposal: Proposal, root: int, max_nodes: int, max_depth: int | None = None, width: int | None = None
) -> DraftTree:
    """The `max_nodes` most probable nodes of a proposal, as a tree in descending path probability.

    A child never scores above its parent, so the best nodes of all depths are closed under "parent of", and are what
    the papers' best-first heap pops (BASTION section 3.2, DDTree algorithm 1). Instead of popping nodes one by one,
    each depth is expanded at once and merged into the pool of the best `max_nodes` so far; nodes that fell out of the
    pool are not expanded, since whatever is below them would fall out too.

    `width` limits the children of a node; 1 gives the most probable chain.
    """
    width = min(width or max_nodes, max_nodes)
    depths = min(proposal.depth, proposal.depth if max_depth is None else max_depth)
    if max_nodes < 1 or depths < 1:
        return DraftTree.root_only(root)
    frontier = Frontier(0, torch.tensor([root]), torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
    scores = torch.zeros(1)  # of the frontier's nodes
    numbers = torch.zeros(1, dtype=torch.int64)  # of the frontier's nodes, in the order they were found; the root is 0
    found = 1
    pool: tuple[Tensor, ...] | None = None  # scores, tokens, parents' numbers, depths, own numbers: best first
    for depth in range(depths):
        candidates = proposal.expand(frontier, width)
        if candidates.tokens.shape[1] == 0:
            break
        if pool is None:
            device = candidates.tokens.device
            scores, numbers = scores.to(device), numbers.to(device)
        paths = (scores[:, None] + candidates.log_probs).flatten()
        best, chosen = paths.topk(min(max_nodes, len(paths)))
        reachable = best > -torch.inf
        best, chosen = best[reachable], chosen[reachable]
        if not len(best):
            break
        rows, ranks = chosen // candidates.tokens.shape[1], chosen % candidates.tokens.shape[1]
        tokens = candidates.tokens.flatten()[chosen]
        own = torch.arange(found, found + len(best), device=best.device)
        level = (best, tokens, numbers[rows], torch.full_like(own, depth + 1), own)
        found += len(best)
        # Stable, with earlier depths first: a child as probable as its parent must stay behind it.
        pool = level if pool is None else tuple(map(torch.cat, zip(pool, level, strict=True)))
        order = pool[0].sort(descending=True, stable=True).indices[:max_nodes]
        pool = tuple(column[order] for column in pool)
        alive = torch.isin(own, pool[4])
        frontier = Frontier(depth + 1, tokens[alive], rows[alive], ranks[alive])
        scores, numbers = best[alive], own[alive]
        if not len(numbers):
            break
    if pool is None:
        return DraftTree.root_only(root)
    return _assemble(root, pool, found)


def _assemble(root: int, pool: tuple[Tensor, ...], found: int) -> DraftTree:
    """Put the root in front and translate parents' numbers into node indices."""
    log_probs, tokens, parents, depths, numbers = pool
    index = numbers.new_zeros(found)
    index[numbers] = torch.arange(1, len(numbers) + 1, device=numbers.device)
    base = DraftTree.root_only(root, numbers.device)
    return DraftTree(
        torch.cat((base.tokens, tokens)),
        torch.cat((base.parents, index[parents])),
        torch.cat((base.depths, depths)),
        torch.cat((base.log_probs, log_probs)),
    )
