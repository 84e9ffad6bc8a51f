"""What a drafter in training makes of some blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(slots=True)
class Outcome:
    """What a drafter made of some blocks."""

    loss: Tensor  # scalar
    hits: Tensor  # [blocks, slots] bool: its best guess is the answer's token
    present: Tensor  # [blocks, slots] bool: the answer reaches that far


class Measures:
    """Sums over outcomes."""

    def __init__(self) -> None:
        self.losses: list[Tensor] = []
        self.hits: Tensor | float = 0.0  # [slots]
        self.present: Tensor | float = 0.0  # [slots]
        self.accepted: Tensor | float = 0.0  # guesses, of the blocks that lie in the answer whole
        self.whole: Tensor | float = 0.0  # such blocks

    def add(self, outcome: Outcome) -> None:
        """Count one outcome."""
        hits = outcome.hits & outcome.present
        self.losses.append(outcome.loss.detach())
        self.hits = self.hits + hits.sum(0)
        self.present = self.present + outcome.present.sum(0)
        whole = outcome.present.all(1)
        self.accepted = self.accepted + hits[whole].cumprod(1).sum()
        self.whole = self.whole + whole.sum()

    def summary(self) -> dict[str, Any]:
        """Mean loss, accuracy by position, and the accepted length of a chain from a random anchor, bonus included."""
        accuracy = torch.as_tensor(self.hits) / torch.as_tensor(self.present).clamp(min=1)
        return {
            "loss": round(float(torch.stack(self.losses).mean()), 4),
            "accuracy": [round(share, 4) for share in accuracy.tolist()],
            "accepted_length": round(1 + float(self.accepted) / max(float(self.whole), 1.0), 4),
        }
