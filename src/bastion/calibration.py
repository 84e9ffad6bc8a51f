"""Calibrates a target and drafter on this machine, once."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime

from rich.console import Console
from rich.progress import Progress

from bastion.cost import store
from bastion.cost.ceilings import measure_ceilings
from bastion.cost.fit import cross_validate, fit_profile, fit_roofline
from bastion.cost.probe import probe_passes, probe_rounds
from bastion.cost.store import Calibration, CalibrationKey, Passes
from bastion.drafters.base import Drafter
from bastion.errors import BastionError
from bastion.targets.base import Target

DOUBTFUL = 0.25  # relative error of the better cost model, above which the measurements were disturbed


def calibrate(target: Target, drafter: Drafter, force: bool = False) -> Calibration:
    """The calibration of this target and drafter on this machine: the stored one, or a new one.

    A stored one is used only if it was made for exactly this machine, setting and pair of models; else, or with
    `force`, the costs are measured, which is said on standard error, and kept. The target's passes are measured once
    for all drafters, so that these are compared by the same costs: `force` measures them too, and drops the target's
    other calibrations. Raises BastionError for a target that cannot verify drafts.
    """
    if target.tree_support == "none":
        raise BastionError(f"{target.name} decodes plainly: it verifies no drafts, so there is nothing to calibrate")
    key = CalibrationKey.here(target, drafter)
    stored, reason = store.load(key)
    if stored is not None and not force:
        return stored
    say(f"measuring this machine, once ({'asked for' if force else reason})")
    calibration = measure(target, drafter, key, None if force else store.of_target(key))
    error = min(calibration.errors.values())
    if error > DOUBTFUL:
        say(f"the measurements scatter by {error:.0%}: is the machine busy? Then later run: bastion calibrate --force")
    try:
        store.save(calibration)
        if force:
            store.forget_others(key)  # their passes were measured at another time
    except BastionError as problem:  # of no use next time, but of use now
        say(str(problem))
    return calibration


def say(text: str) -> None:
    """A line on standard error."""
    Console(stderr=True, soft_wrap=True, markup=False, highlight=False).print(f"bastion: {text}")


def measure(target: Target, drafter: Drafter, key: CalibrationKey, known: Calibration | None = None) -> Calibration:
    """Measure and fit, with a progress bar on standard error; the passes only if they are not `known` already."""
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("calibrating", total=1.0)
        passes = known or _passes(target, lambda share: progress.update(task, completed=0.9 * share))
        largest = max(m.rows for m in passes.measurements)
        rounds = probe_rounds(target, drafter, passes.profile, largest - 1)
    return Calibration(
        key=key,
        date=datetime.now(UTC),
        draft_seconds=rounds.draft,
        aux_seconds=rounds.auxiliary,
        deepen_seconds=rounds.deepen,
        **{name: getattr(passes, name) for name in Passes.model_fields},
    )


def _passes(target: Target, advance: Callable[[float], None]) -> Passes:
    ceilings = measure_ceilings(target.device, target.dtype)
    found, width = probe_passes(target, advance), target.dtype.itemsize
    return Passes(
        measurements=tuple(found),
        roofline=fit_roofline(found, target.shape, width, ceilings),
        profile=fit_profile(found),
        errors=cross_validate(found, target.shape, width, ceilings),
    )
