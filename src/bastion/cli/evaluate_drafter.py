"""`bastion evaluate-drafter`: measure a drafter without decoding, and calibrate its confidence."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bastion.cli import options
from bastion.errors import BastionError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

    from bastion.decoding.budget import Throughput
    from bastion.model import Model
    from bastion.training.confidence import Calibrated


def command(
    data: Annotated[list[Path], typer.Option(help="A .jsonl or .jsonl.gz file of answers, or a folder; repeatable.")],
    target: options.Target = options.DEFAULT_TARGET,
    drafter: options.Drafter = "auto",
    max_samples: Annotated[int | None, typer.Option(help="Most conversations, spread evenly over the data.")] = None,
    trees: Annotated[str, typer.Option(help="Tree budgets in nodes, separated by commas.")] = "8,16,32,64",
    fit_confidence: Annotated[
        bool,
        typer.Option("--fit-confidence", help="Fit a temperature to each depth on one half, measure on the other."),
    ] = False,
    write: Annotated[
        bool, typer.Option("--write", help="Store the fitted temperatures in the drafter's config.json, if better.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Write evaluation.json and evaluation.png to this folder.")] = None,
    features: Annotated[
        Path | None, typer.Option(help="Keep the target's features in this folder. Default: a temporary one.")
    ] = None,
    feature_budget: Annotated[float, typer.Option(help="Most gigabytes that the features may take.")] = 32.0,
    device: options.Device = None,
    dtype: options.Dtype = None,
) -> None:
    """Measure accepted lengths, accuracy and confidence of a drafter on answers that the target wrote."""
    from rich.console import Console
    from rich.progress import Progress

    from bastion.drafters.dflash import DFlashDrafter
    from bastion.files import writing
    from bastion.plots import check_plot
    from bastion.training.confidence import calibrate_confidence, write_temperatures
    from bastion.training.data import check_origin, cut, read_conversations
    from bastion.training.evaluation import evaluate
    from bastion.training.evaluation_report import comparison_table, evaluation_tables, write_json, write_plot
    from bastion.training.features import compute_features
    from bastion.training.simulation import select

    budgets = _budgets(trees)
    if max_samples is not None and max_samples < 1:
        raise BastionError(f"--max-samples must be 1 or more, not {max_samples}")
    if write and not (fit_confidence and Path(drafter).is_dir()):
        raise BastionError("--write stores what --fit-confidence finds in a drafter's own folder: give both")
    if out is not None:
        with writing(out):
            out.mkdir(parents=True, exist_ok=True)
        check_plot(out / "evaluation.png")
    model = options.load(target, drafter, "plain", None, device, dtype)
    guesses = model.drafter
    if fit_confidence and type(guesses) is not DFlashDrafter:
        raise BastionError(f"--fit-confidence is for DFlash checkpoints: {guesses.name} cannot store temperatures")
    if features is not None and not guesses.feature_layers:
        raise BastionError(f"{guesses.name} reads no features of the target: leave out --features")
    check_origin(data, model.target)
    known = cut(read_conversations(data, model.target.shape.vocab), model.target.max_context)
    conversations, left_out = select(known, max_samples)
    console = Console(markup=False, highlight=False, soft_wrap=True)
    for reason, count in left_out.items():
        console.print(f"left out: {count} of the conversations, {reason}")
    policy = _policy(model, console)
    folder = features
    with ExitStack() as stack:
        if folder is None:
            folder = Path(stack.enter_context(TemporaryDirectory(prefix="bastion-features-")))
        bar = stack.enter_context(Progress(console=Console(stderr=True), transient=True))
        update = _task(bar, "features of the target")
        layers, budget = guesses.feature_layers, 1e9 * feature_budget
        read = (
            compute_features(model.target, conversations, layers, folder, budget=budget, progress=update)
            if layers
            else None
        )
        update = _task(bar, "rounds")
        calibrated = None
        if isinstance(guesses, DFlashDrafter) and fit_confidence and read is not None:
            calibrated = calibrate_confidence(model.target, guesses, conversations, read, budgets, update, policy)
            evaluations = {"as it is": calibrated.before, "with the fitted temperatures": calibrated.after}
        else:
            evaluations = {"measured": evaluate(model.target, guesses, conversations, read, budgets, update, policy)}
    record: dict[str, Any] = {"left_out": left_out}
    if calibrated is None:
        console.print(evaluation_tables(evaluations["measured"]))
    else:
        record |= {"draft_temperatures": calibrated.temperatures, "fit": asdict(calibrated.fit)}
        console.print(comparison_table(evaluations))
        _describe(calibrated, console)
    if out is not None:
        write_json(record, evaluations, out / "evaluation.json")
        write_plot(evaluations, out / "evaluation.png")
        console.print(f"written: {out / 'evaluation.json'} and {out / 'evaluation.png'}")
    if write and calibrated is not None:
        if not calibrated.better:
            raise BastionError(
                f"the temperatures were not written to {drafter}: they do not lower the calibration error"
            )
        write_temperatures(Path(drafter), calibrated.temperatures)
        console.print(f"written: {Path(drafter) / 'config.json'}; calibrations of the old drafter no longer apply")


def _describe(calibrated: Calibrated, console: Console) -> None:
    fit = calibrated.fit
    pairs = zip(calibrated.temperatures, fit.tokens, strict=True)
    console.print("temperatures by depth (tokens fitted to):", ", ".join(f"{t:.3f} ({count})" for t, count in pairs))
    if fit.outside:
        console.print(f"skipped in the fit: {fit.outside} tokens that the draft vocabulary lacks")
    if not calibrated.better:
        console.print("the fitted temperatures do not lower the calibration error on the other half: do not use them")


def _policy(model: Model, console: Console) -> Throughput | None:
    """The policy `auto` of a calibration that is stored for this machine; without one, say so."""
    from bastion.cost import store
    from bastion.decoding.budget import Throughput

    calibration, reason = store.load(store.CalibrationKey.here(model.target, model.drafter))
    if calibration is not None:
        model.set_policy("auto")
        if isinstance(model.policy, Throughput):
            return model.policy
        reason = f"{model.target.name} decodes plainly"
    console.print(f"no predicted tokens/s, which need a calibration of this machine: {reason}")
    return None


def _task(bar: Progress, name: str) -> Callable[[float], None]:
    task = bar.add_task(name, total=1.0)
    return lambda share: bar.update(task, completed=share)


def _budgets(trees: str) -> list[int]:
    from bastion.policies import LARGEST

    budgets = [int(part) for part in trees.split(",") if part.strip().isdecimal() and len(part) < 9]
    if len(budgets) != trees.count(",") + 1 or not all(1 <= budget <= LARGEST for budget in budgets):
        raise BastionError(f"--trees must be numbers of nodes from 1 to {LARGEST}, as in 8,16,32,64; not {trees!r}")
    return sorted(set(budgets))
