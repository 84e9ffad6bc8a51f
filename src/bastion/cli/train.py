"""`bastion train`: train a drafter for a target on what the target wrote."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bastion.cli import options
from bastion.errors import BastionError

if TYPE_CHECKING:
    from accelerate import Accelerator
    from rich.progress import Progress

    from bastion.training.trainer import Trainer


class Family(StrEnum):
    """What can be trained; see `training.families`."""

    dflash = "dflash"
    treeflash = "treeflash"
    eagle3 = "eagle3"
    specblock = "specblock"


def command(
    family: Annotated[Family, typer.Argument(help="Which kind of drafter; see docs/drafters.md.")],
    data: Annotated[
        list[Path], typer.Option(help="File or folder of `bastion synthesize`; may be given several times.")
    ],
    out: Annotated[Path, typer.Option(help="Folder for the drafter, its log, curves and checkpoint.")],
    target: options.Target = options.DEFAULT_TARGET,
    init: Annotated[
        str | None,
        typer.Option(
            help="Start from this checkpoint; its sizes stay. Default: random weights; treeflash needs a drafter."
        ),
    ] = None,
    layers: Annotated[
        int | None, typer.Option(help="Layers of the drafter. Default: 3 (dflash), 2 (specblock).")
    ] = None,
    block_size: Annotated[
        int | None, typer.Option(help="Positions of a block; one less is drafted. Default: 8.")
    ] = None,
    draft_vocab: Annotated[
        int | None, typer.Option(help="Draft only the tokens most frequent in the answers. Default: all.")
    ] = None,
    intermediate: Annotated[
        int | None, typer.Option(help="Width of treeflash's correction. Default: that of the drafter's own layers.")
    ] = None,
    anchors: Annotated[
        int | None, typer.Option(help="Blocks drawn from each conversation in a step. Default: 16.")
    ] = None,
    loss: Annotated[
        str | None, typer.Option(help="decay (DFlash, the default) or dpace (weights by what a position is worth).")
    ] = None,
    gamma: Annotated[float | None, typer.Option(help="Decay over positions. Default: by the block size.")] = None,
    distill: Annotated[
        float | None, typer.Option(help="Share of the target's distribution in the labels, 0 to 1. Default: 0.")
    ] = None,
    batch: Annotated[int, typer.Option(help="Conversations of a step, for each process.")] = 8,
    learning_rate: Annotated[float, typer.Option(help="Highest learning rate of AdamW.")] = 1e-3,
    max_steps: Annotated[int | None, typer.Option(help="Steps of the run.")] = None,
    time_budget: Annotated[float | None, typer.Option(help="Minutes of training steps; features come on top.")] = None,
    held_back: Annotated[float, typer.Option(help="Share of the prompts to measure on, never trained on.")] = 0.04,
    evaluate_every: Annotated[int, typer.Option(help="Steps between measurements.")] = 200,
    checkpoint_every: Annotated[int, typer.Option(help="Steps between checkpoints.")] = 200,
    max_length: Annotated[int, typer.Option(help="Longer conversations are cut to this many tokens.")] = 3072,
    features: Annotated[
        Path | None, typer.Option(help="Folder of the target's features, for several runs on the same data.")
    ] = None,
    feature_budget: Annotated[float, typer.Option(help="Most GB of disk for the target's features.")] = 32.0,
    seed: Annotated[int, typer.Option(help="Of weights, order and blocks.")] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the checkpoint in the folder.")] = False,
    device: options.Device = None,
    dtype: options.Dtype = None,
) -> None:
    """Train a drafter for a target. Under `accelerate launch` or `torchrun`, all processes share the work.

    An option that the kind of drafter does not take is refused.
    """
    import torch

    from bastion.files import locked
    from bastion.targets.loading import load_target
    from bastion.training.data import check_origin, cut, read_conversations
    from bastion.training.families import Options, plan
    from bastion.training.features import compute_features
    from bastion.training.trainer import Trainer, TrainerSettings, split

    settings = TrainerSettings(
        batch=batch,
        learning_rate=learning_rate,
        max_steps=max_steps,
        time_budget=None if time_budget is None else 60 * time_budget,
        held_back=held_back,
        evaluate_every=evaluate_every,
        checkpoint_every=checkpoint_every,
        seed=seed,
    )
    made_from = Options(init, layers, block_size, draft_vocab, intermediate, anchors, loss, gamma, distill)
    accelerator = _accelerator(device, dtype)
    with ExitStack() as stack:
        if accelerator.is_main_process:
            stack.enter_context(locked(out))
            _check_folder(out, resume)
        on = load_target(target, accelerator.device, dtype).target
        check_origin(data, on)
        conversations = cut(read_conversations(data, on.shape.vocab), min(max_length, on.max_context))
        split(conversations, held_back)  # what cannot be trained on should not cost a pass of the target first
        torch.manual_seed(seed)
        planned = plan(family.value, on, conversations, made_from)
        folder = features or out / "features"
        with _bar(accelerator) as bar, accelerator.main_process_first():
            task = bar.add_task("features of the target", total=1.0)
            computed = compute_features(
                on, conversations, planned.layers, folder, bool(distill), feature_budget * 1e9,
                lambda share: bar.update(task, completed=share),
            )  # fmt: skip
        trainer = Trainer(planned.build(computed, accelerator.device), settings, out, accelerator)
        if resume:
            trainer.resume()
        _run(trainer)


def _check_folder(out: Path, resume: bool) -> None:
    """Raise BastionError if a run that begins in `out` would write over something."""
    from bastion.training.trainer import STATE

    if resume:
        return
    if (out / STATE).exists():
        raise BastionError(f"{out} holds a run already: continue it with --resume, or give another folder")
    if (out / "config.json").exists() or list(out.glob("model*.safetensors")):
        raise BastionError(f"{out} holds a model: give another folder")


def _accelerator(device: str | None, dtype: str | None) -> Accelerator:
    """What accelerate makes of the processes and devices here; half precision where native and not refused."""
    from datetime import timedelta

    import torch
    from accelerate import Accelerator, InitProcessGroupKwargs

    from bastion.targets.loading import resolve_device, resolve_dtype

    on = resolve_device(device)
    if on.index is not None:
        raise BastionError("training takes cpu or cuda: choose among several GPUs with CUDA_VISIBLE_DEVICES")
    half = torch.float32 not in (resolve_dtype(None, on), resolve_dtype(dtype, on))
    waiting = InitProcessGroupKwargs(timeout=timedelta(days=1))  # for the process that computes the features
    return Accelerator(mixed_precision="bf16" if half else "no", cpu=on.type == "cpu", kwargs_handlers=[waiting])


def _bar(accelerator: Accelerator) -> Progress:
    """A progress bar on the main process's standard error."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = BarColumn(), TextColumn("{task.percentage:.0f}%"), TimeElapsedColumn(), TextColumn("{task.description}")
    console = Console(stderr=True)
    return Progress(*columns, console=console, disable=not (accelerator.is_main_process and console.is_terminal))


def _run(trainer: Trainer) -> None:
    """Train with a progress bar, draw the curves, and say what came out."""
    import importlib.util

    from bastion.training.curves import write_curves
    from bastion.training.trainer import State, read_log

    with _bar(trainer.accelerator) as bar:
        task = bar.add_task("training", total=1.0)

        def show(state: State) -> None:
            bar.update(task, completed=state.share)
            if state.record is not None:
                measured = state.record["held_back"]
                accuracy = " ".join(f"{share:.2f}" for share in measured["accuracy"])
                line = f"step {state.record['step']}: loss {state.record['train']['loss']:.3f}; held back: loss "
                line += (
                    f"{measured['loss']:.3f}, accuracy {accuracy}, accepted length {measured['accepted_length']:.2f}"
                )
                bar.update(task, description=line)
                if trainer.accelerator.is_main_process and not bar.console.is_terminal:
                    bar.console.print(line, highlight=False, soft_wrap=True)

        trainer.train(show)
    if not trainer.accelerator.is_main_process:
        return
    log = read_log(trainer.folder)
    if not log:
        print(f"{trainer.folder}: the run was over already")
        return
    if importlib.util.find_spec("matplotlib") is None:
        print("no curves: they need matplotlib (pip install 'bastion[plot]')", file=sys.stderr)
    else:
        write_curves(log, trainer.folder / "curves.png")
    print(f"{trainer.folder}: accepted length {log[-1]['held_back']['accepted_length']:.2f} on held-back answers")
