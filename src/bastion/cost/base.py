"""What the budget asks of a cost model, and what a cost model is fitted to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Measurement:
    """The time of one verify pass. Repeated measurements of the same pass are welcome.

    Raises ValueError for sizes or times that no pass can have.
    """

    rows: int  # rows of the forward pass: the root and the nodes below it
    context: int  # tokens in the cache
    seconds: float

    def __post_init__(self) -> None:
        if self.rows < 1 or self.context < 0 or not 0 < self.seconds < float("inf"):
            raise ValueError(f"not a verify pass: {self}")


class VerifyCost(Protocol):
    """Predicts what a verify pass costs. Called each round, so it takes well under 100 microseconds."""

    def seconds(self, rows: npt.NDArray[Any], context: float) -> FloatArray:
        """Seconds [n] of passes of `rows` [n] rows (root included) behind `context` cached tokens."""
