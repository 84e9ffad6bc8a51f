"""What happened in each round, and in a generation."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from bastion.clock import synchronize
from bastion.decoding.tree import DraftTree

STAGES = ("draft", "grow", "verify", "accept", "commit")


@dataclass(slots=True)
class RoundRecord:
    """One round of one sequence."""

    context: int  # committed tokens before the round
    tree: DraftTree
    accepted: list[int]  # the root and the accepted nodes
    tokens: list[int]  # the tokens that were written, the bonus token last
    seconds: dict[str, float]  # by stage; a batch's sequences share the times of their round
    passes: int  # of the drafter, for this sequence; 0 if nothing was drafted

    @property
    def accepted_length(self) -> int:
        """Tokens written, bonus token included."""
        return len(self.tokens)


@dataclass(slots=True)
class GenerationStats:
    """Figures of one generated text. Times are wall-clock seconds."""

    prompt_tokens: int = 0
    new_tokens: int = 0
    prefill_seconds: float = 0.0
    accepted_lengths: list[int] = field(default_factory=list)  # of each round, bonus token included
    tree_sizes: list[int] = field(default_factory=list)  # of each round, root not counted
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))

    def add(self, record: RoundRecord) -> None:
        """Count a round."""
        self.accepted_lengths.append(record.accepted_length)
        self.tree_sizes.append(record.tree.size)
        for stage, seconds in record.seconds.items():
            self.seconds[stage] += seconds

    @property
    def rounds(self) -> int:
        """Verify passes of the target, prefill not counted."""
        return len(self.accepted_lengths)

    @property
    def mean_accepted_length(self) -> float:
        """Tokens a round, bonus token included, before the text's end is cut off; 0 without rounds."""
        return sum(self.accepted_lengths) / self.rounds if self.rounds else 0.0

    @property
    def mean_tree_size(self) -> float:
        """Nodes a round, root not counted; 0 without rounds."""
        return sum(self.tree_sizes) / self.rounds if self.rounds else 0.0

    @property
    def decode_seconds(self) -> float:
        """Time after the prefill."""
        return sum(self.seconds.values())

    @property
    def tokens_per_second(self) -> float:
        """New tokens over all of the time, prefill included."""
        total = self.prefill_seconds + self.decode_seconds
        return self.new_tokens / total if total else 0.0

    @property
    def decode_tokens_per_second(self) -> float:
        """New tokens after the first over the time after the prefill, which wrote the first."""
        return (self.new_tokens - 1) / self.decode_seconds if self.decode_seconds else 0.0


class Stopwatch:
    """Times the stages of a round. On an accelerator a stage ends when its kernels have ended."""

    def __init__(self, device: torch.device):
        self._device = device
        self.seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the time of the body to the stage."""
        start = time.perf_counter()
        yield
        synchronize(self._device)
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
