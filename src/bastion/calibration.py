"""Calibrates a target and drafter on this machine, once."""

from __future__ import annotations

from datetime import UTC, datetime

import torch
from rich.console import Console
from rich.progress import Progress

from bastion.cost import store
from bastion.cost.ceilings import measure_ceilings
from bastion.cost.fit import cross_validate, fit_profile, fit_roofline
from bastion.cost.probe import probe
from bastion.cost.store import Calibration, CalibrationKey
from bastion.drafters.base import Drafter
from bastion.targets.base import Target


def calibrate(target: Target, drafter: Drafter, force: bool = False, keep: bool = True) -> Calibration:
    """The calibration of this target and drafter on this machine: the stored one, or a new one.

    A stored one is used only if it was made for exactly this machine, setting and pair of models; else, or with
    `force`, the costs are measured, which is said on standard error, and kept unless `keep` is false.
    """
    key = CalibrationKey.here(target, drafter, attention_name(target))
    if not force:
        stored, reason = store.load(key)
        if stored is not None:
            return stored
        Console(stderr=True, soft_wrap=True).print(f"bastion: measuring this machine, once ({reason})", highlight=False)
    calibration = measure(target, drafter, key)
    if keep:
        store.save(calibration)
    return calibration


def measure(target: Target, drafter: Drafter, key: CalibrationKey) -> Calibration:
    """Measure and fit, with a progress bar on standard error."""
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(f"calibrating {target.name}", total=1.0)
        ceilings = measure_ceilings(target.device, target.dtype)
        taps = target.feature_layers
        target.set_feature_layers(drafter.feature_layers)
        found = probe(target, drafter, lambda share: progress.update(task, completed=share))
        target.set_feature_layers(taps)
    width = torch.finfo(target.dtype).bits // 8
    return Calibration(
        key=key,
        date=datetime.now(UTC),
        measurements=tuple(found.verify),
        draft_seconds=found.draft,
        aux_seconds=found.auxiliary,
        roofline=fit_roofline(found.verify, target.shape, width, ceilings),
        profile=fit_profile(found.verify),
        errors=cross_validate(found.verify, target.shape, width, ceilings),
    )


def attention_name(target: Target) -> str:
    """What computes the attention, for the calibration's key."""
    return type(target).__name__
