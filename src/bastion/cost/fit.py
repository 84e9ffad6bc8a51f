"""Fits of the two cost models to measured passes, and the choice between them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from scipy.optimize import isotonic_regression, least_squares, nnls

from bastion.cost.base import FloatArray, Measurement, VerifyCost
from bastion.cost.ceilings import Ceilings
from bastion.cost.roofline import CalibratedRoofline, pass_work
from bastion.errors import BastionError
from bastion.targets.base import ModelShape

ModelName = Literal["roofline", "profile"]


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds over rows at one context length: non-decreasing, linear between the grid points."""

    context: int
    rows: tuple[int, ...]  # ascending
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.rows) != len(self.seconds) or len(self.rows) < 2:
            raise ValueError("a curve needs two or more row counts and as many times")
        if list(self.rows) != sorted(set(self.rows)):
            raise ValueError("the row counts of a curve must ascend")
        if not all(0 <= seconds < float("inf") for seconds in self.seconds):
            raise ValueError("the times of a curve are finite and not negative")

    def at(self, rows: npt.NDArray[Any]) -> FloatArray:
        """Seconds [n] at `rows` [n]: the first point's below the grid, the last slope continued beyond it."""
        slope = (self.seconds[-1] - self.seconds[-2]) / (self.rows[-1] - self.rows[-2])
        seconds: FloatArray = np.interp(rows, self.rows, self.seconds)
        seconds += slope * np.maximum(rows - self.rows[-1], 0)
        return seconds


@dataclass(frozen=True, slots=True)
class MeasuredProfile:
    """A VerifyCost: curves at some context lengths, linear between these, clamped outside (CaDDTree)."""

    curves: tuple[Curve, ...]  # ascending in context

    def __post_init__(self) -> None:
        contexts = [curve.context for curve in self.curves]
        if not contexts or contexts != sorted(set(contexts)):
            raise ValueError("a profile needs one or more curves of ascending context lengths")

    def seconds(self, rows: npt.NDArray[Any], context: float) -> FloatArray:
        """Seconds [n] of passes of `rows` [n] rows (root included) behind `context` cached tokens."""
        after = bisect_right(self.curves, context, key=lambda curve: curve.context)
        lower, upper = self.curves[max(after - 1, 0)], self.curves[min(after, len(self.curves) - 1)]
        if lower is upper:
            return lower.at(rows)
        share = (context - lower.context) / (upper.context - lower.context)
        return (1 - share) * lower.at(rows) + share * upper.at(rows)


def fit_profile(measurements: Sequence[Measurement], convex: bool = False) -> MeasuredProfile:
    """The measured profile: at each context length the least-squares curve that never falls.

    `convex` gives CaDDTree's fit, which is convex too. Measured costs often are not: where the first rows cost more
    than the next, a convex curve must run above plain decoding and too flat behind it, and speculation looks better
    than it is. Since the policy takes the maximum over all sizes, it needs no convexity. The curve that is only
    monotone is fitted to relative errors, so that short passes count as much as long ones.

    Raises BastionError if some context length was measured with fewer than two row counts.
    """
    curves = []
    for context in sorted({m.context for m in measurements}):
        here = [m for m in measurements if m.context == context]
        grid = sorted({m.rows for m in here})
        if len(grid) < 2:
            raise BastionError(f"only passes of {grid[0]} rows were measured at context {context}; add others")
        curves.append((_convex_curve if convex else _monotone_curve)(context, grid, here))
    if not curves:
        raise BastionError("there are no measurements to fit a cost to; run the calibration again")
    return MeasuredProfile(tuple(curves))


def _monotone_curve(context: int, grid: list[int], measurements: list[Measurement]) -> Curve:
    seconds = np.array([np.median([m.seconds for m in measurements if m.rows == rows]) for rows in grid])
    return Curve(context, tuple(grid), tuple(isotonic_regression(seconds, weights=seconds**-2.0).x.tolist()))


def _convex_curve(context: int, grid: list[int], measurements: list[Measurement]) -> Curve:
    """Least squares over non-negative, non-decreasing, convex functions, linear between the points of `grid`.

    Each of them is a constant plus hinges max(0, rows - grid[j]) with weights that are not negative, whatever
    the spacing of the grid, so non-negative least squares over the hinges is exact.
    """

    def basis(rows: npt.ArrayLike) -> FloatArray:
        points = np.asarray(rows, np.float64)[:, None]
        hinges = np.maximum(points - np.array(grid[:-1]), 0) / (grid[-1] - np.array(grid[:-1]))  # at most 1
        return np.concatenate((np.ones_like(points), hinges), axis=1)

    design = basis([m.rows for m in measurements])
    weights, _ = nnls(design, np.array([m.seconds for m in measurements]), maxiter=100 * len(grid))
    return Curve(context, tuple(grid), tuple((basis(grid) @ weights).tolist()))


def fit_roofline(
    measurements: Sequence[Measurement],
    shape: ModelShape,
    bytes_per_value: int,
    ceilings: Ceilings,
    sigma_scale: float = 30.0,
) -> CalibratedRoofline:
    """The four parameters of the calibrated roofline, by least squares from several starts.

    A residual's standard deviation is taken to grow with the rows, from 1 to 1 + `sigma_scale` times the
    smallest pass's, so that small passes, the frequent ones, weigh more; 30 is BASTION's. One start is not
    enough: from BASTION's (1, 0, 1, 0) the memory branch can end above all measurements, and then nothing
    moves the compute branch. Ours come from the measurements: those of the lowest intensity (operations a
    byte) are taken to be bound by memory, the rest by compute, for several shares of each.

    Raises BastionError if there are no measurements.
    """
    if not measurements:
        raise BastionError("there are no measurements to fit a cost to; run the calibration again")
    rows = np.array([m.rows for m in measurements], np.float64)
    work = pass_work(shape, rows, [m.context for m in measurements], bytes_per_value)
    sigma = 1 + sigma_scale * (rows - rows.min()) / max(float(np.ptp(rows)), 1.0)
    sigma /= sigma.mean()
    seconds = np.array([m.seconds for m in measurements])
    unit = float(seconds.mean())  # the solver's tolerances suit numbers around 1
    weight = 1 / (unit * sigma)
    memory = np.stack((work.total_bytes / ceilings.bandwidth * weight, 1 / sigma), axis=1)  # [m, 2]
    compute = np.stack((work.flops / ceilings.flops * weight, 1 / sigma), axis=1)
    wanted = seconds * weight

    def residuals(x: FloatArray) -> FloatArray:
        difference: FloatArray = np.maximum(memory @ x[:2], compute @ x[2:]) - wanted
        return difference

    def jacobian(x: FloatArray) -> FloatArray:
        by_memory = (memory @ x[:2] >= compute @ x[2:])[:, None]
        return np.concatenate((memory * by_memory, compute * ~by_memory), axis=1)

    by_intensity = np.argsort(work.flops / work.total_bytes, kind="stable")
    best, least = np.zeros(4), float("inf")
    for share in np.linspace(0, 1, 9):
        low, high = np.split(by_intensity, [round(share * len(rows))])
        branches = ((memory, low), (compute, high))
        start = np.concatenate([nnls(a[i], wanted[i])[0] if len(i) else np.zeros(2) for a, i in branches])
        found = least_squares(residuals, start, jacobian, bounds=(0, np.inf), x_scale="jac")
        if found.cost < least:
            best, least = found.x, found.cost
    parameters = (best * [1, unit, 1, unit]).tolist()
    return CalibratedRoofline(shape, bytes_per_value, ceilings, *parameters)


def cross_validate(
    measurements: Sequence[Measurement], shape: ModelShape, bytes_per_value: int, ceilings: Ceilings
) -> dict[ModelName, float]:
    """Root mean square relative error of both models on measurements that they were not fitted to.

    Held out in turn: all passes of one row count, then all at one context length, each but the smallest and
    the largest, so that the models interpolate, as they do in use.

    Raises BastionError if that leaves nothing to hold out.
    """
    errors: dict[ModelName, list[FloatArray]] = {"roofline": [], "profile": []}
    for size in ("rows", "context"):
        for value in sorted({getattr(m, size) for m in measurements})[1:-1]:
            kept = [m for m in measurements if getattr(m, size) != value]
            held_out = [m for m in measurements if getattr(m, size) == value]
            errors["roofline"].append(_errors(fit_roofline(kept, shape, bytes_per_value, ceilings), held_out))
            errors["profile"].append(_errors(fit_profile(kept), held_out))
    if not errors["profile"]:
        raise BastionError("cross-validation needs passes of three or more row counts; measure more of them")
    return {name: float(np.sqrt(np.mean(np.concatenate(parts) ** 2))) for name, parts in errors.items()}


def choose(errors: dict[ModelName, float]) -> ModelName:
    """The model with the smaller cross-validated error; if equal, the profile, which assumes less."""
    return "roofline" if errors["roofline"] < errors["profile"] else "profile"


def _errors(model: VerifyCost, measurements: list[Measurement]) -> FloatArray:
    """Relative errors [m] of the model's predictions."""
    return np.array([model.seconds(np.array([m.rows]), m.context)[0] / m.seconds - 1 for m in measurements])
