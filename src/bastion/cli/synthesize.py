"""`bastion synthesize`: write training data for drafters."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bastion.cli import options

if TYPE_CHECKING:
    from bastion.training.answers import Manifest


def command(
    out: Annotated[Path, typer.Option(help="Folder for the conversations; one with the same settings is continued.")],
    target: options.Target = options.DEFAULT_TARGET,
    prompts: Annotated[
        list[str] | None,
        typer.Option(
            help="A file of JSON lines with turns or prompt, or gsm8k_train or mbpp_train; may be given several times."
        ),
    ] = None,
    self_prompted: Annotated[int, typer.Option(help="Prompts that the target writes itself.")] = 0,
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 256,
    greedy_share: Annotated[
        float, typer.Option(help="Share of the answers written greedily; others are drawn.")
    ] = 0.67,
    temperature: Annotated[float, typer.Option(help="At which the other answers are drawn.")] = 0.7,
    top_k: Annotated[int, typer.Option(help="Draw from the k most probable tokens; 0: from all.")] = 64,
    batch: Annotated[int, typer.Option(help="Texts written side by side.")] = 64,
    max_answers: Annotated[int | None, typer.Option(help="Most answers in the folder.")] = None,
    time_budget: Annotated[
        float | None, typer.Option(help="Minutes after which no further text is begun; those begun are finished.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Decides which answers are greedy, and all draws.")] = 0,
    licence: Annotated[str | None, typer.Option(help="Licence of the prompts in files, for the manifest.")] = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
) -> None:
    """Let the target answer prompts, of files, data sets or its own: what a drafter is trained on."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    from bastion.training.answers import SynthesisSettings
    from bastion.training.prompts import read_prompts
    from bastion.training.synthesis import Progress, synthesize

    settings = SynthesisSettings(
        max_new_tokens=max_new_tokens,
        greedy_share=greedy_share,
        temperature=temperature,
        top_k=top_k,
        seed=seed,
        batch=batch,
        self_prompted=self_prompted,
        max_answers=max_answers,
        time_budget=None if time_budget is None else 60 * time_budget,
    )
    asked, licences = read_prompts(prompts or [], licence)
    model = options.load(target, "ngram", "plain", None, device, dtype)
    console = Console(stderr=True)
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("answers, {task.fields[speed]:.0f} tokens/s"))
    with Bar(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None, speed=0.0)
        start, speed = time.perf_counter(), 0.0

        def show(state: Progress) -> None:
            nonlocal speed
            speed = state.new_tokens / (time.perf_counter() - start)
            bar.update(task, completed=state.answers, total=state.expected, speed=speed)

        manifest = synthesize(model, asked, out, settings, licences, show)
    print(_summary(manifest, out, speed))


def _summary(manifest: Manifest, out: Path, speed: float) -> str:
    lines = [
        f"{source}: {', '.join(f'{number} answers at temperature {at}' for at, number in sorted(counts.items()))}"
        for source, counts in manifest.answers.items()
    ]
    lines += [
        f"{source}: {', '.join(f'{number} {fate}' for fate, number in fates.items())}"
        for source, fates in manifest.prompts.items()
    ]
    answers = sum(counts.total() for counts in manifest.answers.values())
    lines.append(f"{answers} answers of {manifest.answer_tokens} tokens in {out}; {speed:.0f} tokens/s in this run")
    return "\n".join(lines)
