"""The draft tree: which tokens are guessed after which."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bastion.drafters.base import Ids, LogProbs


@dataclass(slots=True)
class DraftTree:
    """A root, the last known token, and `size` guessed nodes below it in descending path probability.

    Node 0 is the root. A node stands behind its parent, so the first k nodes are a tree for every k. Trees are
    small and live on the host, as numpy arrays (docs/decisions/0004-trees-on-the-host.md).
    """

    tokens: Ids  # [1 + size]
    parents: Ids  # [1 + size] indices of nodes; -1 for the root
    depths: Ids  # [1 + size]; 0 for the root
    log_probs: LogProbs  # [1 + size]: log-probability of the path under the drafter; 0 for the root

    @classmethod
    def root_only(cls, token: int) -> DraftTree:
        """The tree of plain decoding: nothing is guessed."""
        ids = np.array([[token], [-1], [0]])
        return cls(ids[0], ids[1], ids[2], np.zeros(1, np.float32))

    @property
    def size(self) -> int:
        """Number of guessed nodes, the root not counted."""
        return len(self.tokens) - 1

    @property
    def gains(self) -> LogProbs:
        """Path probabilities [size] of the guessed nodes, descending: the tokens each is expected to add."""
        return np.exp(self.log_probs[1:])

    @property
    def is_chain(self) -> bool:
        """Whether no node has a sibling."""
        return bool((self.parents == np.arange(-1, self.size)).all())

    def first(self, nodes: int) -> DraftTree:
        """The tree of the `nodes` best guesses."""
        end = nodes + 1
        return DraftTree(self.tokens[:end], self.parents[:end], self.depths[:end], self.log_probs[:end])

    def visible(self) -> npt.NDArray[np.bool_]:
        """Tree mask [1 + size, 1 + size]: True where the row's node is the column's descendant or itself.

        Pointers to ancestors are doubled, so the work is logarithmic in the depth.
        """
        visible = np.eye(len(self.tokens), dtype=np.bool_)
        ancestor = self.parents.clip(0)  # the root points at itself, which changes nothing
        for _ in range(int(self.depths.max()).bit_length()):
            visible |= visible[ancestor]
            ancestor = ancestor[ancestor]
        return visible

    def path(self, node: int) -> list[int]:
        """Nodes from the root to `node`, both included."""
        path = [node]
        while path[-1] > 0:
            path.append(int(self.parents[path[-1]]))
        return path[::-1]
