"""What a verify pass computes and moves, and BASTION's calibrated roofline (arXiv 2605.29727) over it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from bastion.cost.base import FloatArray
from bastion.cost.ceilings import Ceilings
from bastion.targets.base import ModelShape


@dataclass(frozen=True, slots=True)
class PassWork:
    """Operations and memory traffic of verify passes, each [n]. Whole numbers, exact below 2**53."""

    flops: FloatArray
    parameter_bytes: FloatArray
    cache_bytes: FloatArray
    activation_bytes: FloatArray

    @property
    def total_bytes(self) -> FloatArray:
        """All memory traffic [n]."""
        return self.parameter_bytes + self.cache_bytes + self.activation_bytes


def pass_work(shape: ModelShape, rows: npt.ArrayLike, context: npt.ArrayLike, bytes_per_value: int) -> PassWork:
    """The work of passes of `rows` [n] rows behind `context` [n] (or one number) cached tokens.

    The conventions are BASTION's: attention covers the full rectangle of rows and all tokens, without saving
    for the mask; the embedding and the output matrix both count, even when tied; norms do not. Activations
    are what each matrix product reads and writes, and the attention scores, written and read.
    """
    rows = np.asarray(rows, np.float64)  # floats, for a rectangle overflows int32
    seen = rows + np.asarray(context, np.float64)
    query, key_value = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    layer_parameters = shape.hidden * (2 * query + 2 * key_value + 3 * shape.intermediate)
    output_parameters = shape.vocab * shape.hidden
    row_activations = shape.layers * (4 * shape.hidden + 4 * query + 2 * key_value + 4 * shape.intermediate) + (
        shape.hidden + shape.vocab
    )
    weights = shape.layers * layer_parameters
    return PassWork(
        flops=rows * (2 * (weights + output_parameters) + 4 * shape.layers * query * seen),
        parameter_bytes=np.full_like(seen, bytes_per_value * (weights + 2 * output_parameters)),
        cache_bytes=bytes_per_value * 2 * shape.layers * key_value * seen,
        activation_bytes=bytes_per_value * rows * (row_activations + 2 * shape.layers * shape.heads * seen),
    )


@dataclass(frozen=True, slots=True)
class CalibratedRoofline:
    """A VerifyCost: max(alpha_m * bytes / bandwidth + beta_m, alpha_c * FLOPs / peak + beta_c).

    The alphas say how many times slower than the ceilings the device runs, the betas (seconds) what a pass
    costs whatever its size. Raises ValueError when one of them is negative or not a number.
    """

    shape: ModelShape
    bytes_per_value: int
    ceilings: Ceilings
    alpha_m: float = 1.0
    beta_m: float = 0.0
    alpha_c: float = 1.0
    beta_c: float = 0.0

    def __post_init__(self) -> None:
        if not all(0 <= x < float("inf") for x in (self.alpha_m, self.beta_m, self.alpha_c, self.beta_c)):
            raise ValueError("the parameters of a calibrated roofline are finite and not negative")

    def seconds(self, rows: npt.NDArray[Any], context: npt.ArrayLike) -> FloatArray:
        """Seconds [n] of passes of `rows` [n] rows (root included) behind `context` cached tokens."""
        work = pass_work(self.shape, rows, context, self.bytes_per_value)
        memory = self.alpha_m * work.total_bytes / self.ceilings.bandwidth + self.beta_m
        compute = self.alpha_c * work.flops / self.ceilings.flops + self.beta_c
        return np.maximum(memory, compute)
