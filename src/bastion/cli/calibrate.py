"""`bastion calibrate`: measure what a round costs on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bastion.cli import options


def command(
    target: options.Target = options.DEFAULT_TARGET,
    drafter: options.Drafter = "auto",
    device: options.Device = None,
    dtype: options.Dtype = None,
    force: Annotated[
        bool,
        typer.Option("--force", help="Measure all anew; calibrations of other drafters are dropped."),
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Say what is stored and what would be measured; measure nothing."),
    ] = False,
    plot: Annotated[Path | None, typer.Option(help="Write a PNG of measurements, fits and budget here.")] = None,
) -> None:
    """Measure the costs of drafting and verifying, fit both cost models, and keep them."""
    from rich.console import Console

    from bastion.cost import probe, store
    from bastion.cost.report import fit_table, write_plot
    from bastion.plots import check_plot

    if plot is not None:
        check_plot(plot)
    model = options.load(target, drafter, "plain", None, device, dtype)
    console = Console(markup=False, highlight=False, soft_wrap=True)
    key = store.CalibrationKey.here(model.target, model.drafter)
    if dry_run:
        stored, reason = store.load(key)
        state = f"stored on {stored.date:%Y-%m-%d %H:%M} UTC, valid" if stored else reason
        console.print(f"calibration: {state}")
        for name, value in key.model_dump().items():
            console.print(f"  {name}: {value}")
        if store.of_target(key) is not None:
            console.print("the target's passes are known; --force would measure them again")
        console.print(
            f"a measurement takes verify passes of {probe.ROWS[0]} to {probe.ROWS[-1]} rows, until they cost "
            f"{probe.WORTHWHILE:.0f} passes of one row, at contexts {', '.join(map(str, probe.CONTEXTS))}, "
            "as far as the model has room"
        )
        return
    calibration = model.calibrate(force)
    console.print(fit_table(calibration))
    if plot is not None:
        write_plot(calibration, plot)
        console.print(f"plot: {plot}")
