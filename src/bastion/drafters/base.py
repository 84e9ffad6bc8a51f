"""What the decode loop asks of a model that guesses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Ids = npt.NDArray[np.int64]
LogProbs = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Outlook:
    """What is known when a tree can only grow further by a pass of the drafter."""

    gains: LogProbs  # [n]: path probabilities of the nodes so far, descending
    frontier: LogProbs  # [m]: those of the nodes whose children the pass would give, as far as they have none yet
    survival: float  # share of path probability that a level of the drafter is taken to keep
    passes: int  # of the drafter, so far
    levels: int | Ids  # that a pass gives below the frontier, or [m] below each of its nodes


@dataclass(slots=True)
class DraftContext:
    """What a drafter may know about one sequence, and what it keeps about it between rounds."""

    tokens: list[int]  # prompt and output; the last is the root: known, but not yet in the target's cache
    temperature: float = 0.0  # the target's; the draft distribution is taken at it too (1.0 when it is 0)
    features: list[Tensor] = field(default_factory=list)
    # [k, F] blocks of target features, in text order, of committed tokens the drafter has not read yet.
    # `propose` takes them out. Before a call they cover tokens[read : len(tokens) - 1].
    memory: Any = None  # the drafter's own: key/value cache, index, ...
    pays: Callable[[Outlook], bool] = lambda outlook: True  # whether a pass of the drafter is worth its cost this round
    width: int | None = None  # most children of a node in this round's tree; None: any number

    def take_features(self, device: torch.device, dtype: torch.dtype) -> Tensor | None:
        """The features that the drafter has not read yet, [k, F]; None if there are none."""
        if not self.features:
            return None
        features = torch.cat(self.features).to(device, dtype)
        self.features.clear()
        return features

    def check_read(self, tokens: int) -> None:
        """Raise ValueError unless features of so many tokens are all that there can be: those before the root."""
        if tokens != len(self.tokens) - 1:
            raise ValueError(f"{len(self.tokens) - 1} tokens precede the root, but features came for {tokens}")


@dataclass(slots=True)
class Frontier:
    """The nodes of one depth whose children are wanted. Depth 0 is the root alone."""

    depth: int
    tokens: Ids  # [m]: the nodes' own tokens
    rows: Ids  # [m]: which row of the previous frontier is the node's parent


@dataclass(slots=True)
class Candidates:
    """Children of each frontier node, best first. A missing candidate has log-probability -inf."""

    tokens: Ids  # [m, k]
    log_probs: LogProbs  # [m, k], of the token given the node's path; never above 0


class Proposal(Protocol):
    """One round's draft for one sequence."""

    @property
    def depth(self) -> int:
        """How deep the tree may become."""

    @property
    def ready(self) -> int:
        """How deep it may become without another pass of the drafter; each pass gives as many levels."""

    @property
    def passes(self) -> int:
        """Passes of the drafter that were made so far; 0 if it was left out."""

    @property
    def beam(self) -> int | None:
        """Most nodes of a depth whose children can be asked for; None: any number."""

    def expand(self, frontier: Frontier, width: int) -> Candidates:
        """Up to `width` children for each node of the frontier. Called for depth 0, 1, ... in turn.

        Where the frontier's depth is `ready`, this runs the drafter again.
        """


class Drafter(Protocol):
    """A cheap model that proposes continuations for the target to check."""

    name: str
    digest: str  # identifies weights and settings, for calibrations
    depth: int  # largest depth a proposal may have
    feature_layers: tuple[int, ...]  # target layers whose output it reads; empty if it reads tokens only

    def propose(self, contexts: list[DraftContext]) -> Sequence[Proposal]:
        """Draft for every sequence; one Proposal each, in order."""
