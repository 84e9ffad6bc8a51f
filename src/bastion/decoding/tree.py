"""The draft tree: which tokens are guessed after which."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(slots=True)
class DraftTree:
    """A root, the last known token, and `size` guessed nodes below it in descending path probability.

    Node 0 is the root. A node stands behind its parent, so the first k nodes are a tree for every k.
    """

    tokens: Tensor  # [1 + size] int64
    parents: Tensor  # [1 + size] int64 indices of nodes; -1 for the root
    depths: Tensor  # [1 + size] int64; 0 for the root
    log_probs: Tensor  # [1 + size] float32: log-probability of the path under the drafter; 0 for the root

    @classmethod
    def root_only(cls, token: int, device: torch.device | str = "cpu") -> DraftTree:
        """The tree of plain decoding: nothing is guessed."""
        zero = torch.zeros(1, dtype=torch.int64, device=device)
        return cls(zero + token, zero - 1, zero, torch.zeros(1, device=device))

    @property
    def size(self) -> int:
        """Number of guessed nodes, the root not counted."""
        return len(self.tokens) - 1

    @property
    def gains(self) -> Tensor:
        """Path probabilities [size] of the guessed nodes, descending: the tokens each is expected to add."""
        return self.log_probs[1:].exp()

    def first(self, nodes: int) -> DraftTree:
        """The tree of the `nodes` best guesses."""
        if nodes >= self.size:
            return self
        end = nodes + 1
        return DraftTree(self.tokens[:end], self.parents[:end], self.depths[:end], self.log_probs[:end])

    def visible(self) -> Tensor:
        """Tree mask [1 + size, 1 + size]: True where the row's node is the column's descendant or itself.

        Pointers to ancestors are doubled, so the work is logarithmic in the depth.
        """
        visible = torch.eye(len(self.tokens), dtype=torch.bool, device=self.tokens.device)
        ancestor = self.parents.clamp(min=0)  # the root points at itself, which changes nothing
        steps = int(self.depths.max()).bit_length()
        for _ in range(steps):
            visible |= visible[ancestor]
            ancestor = ancestor[ancestor]
        return visible

    def path(self, node: int) -> list[int]:
        """Nodes from the root to `node`, both included."""
        parents = self.parents.tolist()
        path = [node]
        while path[-1] > 0:
            path.append(parents[path[-1]])
        return path[::-1]
