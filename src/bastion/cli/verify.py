"""`bastion verify`: show that speculative decoding writes what plain decoding writes."""

from __future__ import annotations

import json
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from bastion.cli import options
from bastion.errors import BastionError

PROMPTS = {
    "chat": "Why is the sky blue?",
    "list": "Name ten rivers of Europe, with the country in which each of them ends.",
    "story": "Write a short story about a lighthouse keeper who finds a letter in a bottle.",
    "reasoning": "A train leaves at 9:40 and arrives at 13:15. It stands still for 25 minutes. How long does it run?",
    "code": "Write a Python function that merges two sorted lists into one, and explain how it works.",
    "copy": "Repeat this text twice, word for word: The quick brown fox jumps over the lazy dog near the river bank.",
    "edit": "Rewrite with every 'cat' replaced by 'dog': The cat saw another cat, and both cats ran to the old barn.",
    "data": "Give a JSON list of five planets with their names, radii in kilometres and number of moons.",
}


def command(
    target: options.Target = options.DEFAULT_TARGET,
    drafter: options.Drafter = "auto",
    policy: options.Policy = "fixed:8",
    prompts: Annotated[
        list[str] | None,
        typer.Option(
            help="A file of JSON lines with turns or prompt, or a data set such as gsm8k; may be given several times. "
            "Default: a few of our own. The first turns are used."
        ),
    ] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Folder with data sets as NAME.jsonl.")] = None,
    max_samples: Annotated[int | None, typer.Option(help="Most prompts of each file or data set.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens of a text.")] = 48,
    temperature: Annotated[float, typer.Option(help="0: always the most probable token.")] = 0.0,
    top_p: Annotated[float | None, typer.Option(help="Draw from the smallest set with this mass.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Draw from the k most probable tokens; 0: off.")] = None,
    seed: Annotated[int, typer.Option(help="Of the choice of samples and of the draws.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the table.")] = False,
    enable_thinking: options.EnableThinking = False,
    device: options.Device = None,
    dtype: options.Dtype = None,
) -> None:
    """Write texts speculatively and plainly, and judge each difference: a near-tie, or a violation (exit status 1)."""
    from rich.console import Console
    from rich.progress import Progress

    from bastion.broken_acceptance import broken_acceptance
    from bastion.policies import describe
    from bastion.verification import verify
    from bastion.verification_report import as_dict, differences_table, faults, summary

    texts = _texts(prompts, data_dir, max_samples, seed)
    template_options = {"enable_thinking": enable_thinking}
    model = options.load(target, drafter, policy, None, device, dtype, template_options)
    errors = Console(stderr=True, soft_wrap=True, markup=False, highlight=False)
    broken = os.environ.get("BASTION_BREAK_ACCEPTANCE", "0") not in ("", "0")
    if broken:
        errors.print("bastion: BASTION_BREAK_ACCEPTANCE is set: the acceptance rule is wrong on purpose")
    settings: dict[str, Any] = {"max_new_tokens": max_new_tokens, "seed": seed, "temperature": temperature}
    settings |= {name: value for name, value in {"top_p": top_p, "top_k": top_k}.items() if value is not None}
    errors.print(f"bastion: {model.drafter.name}, {describe(model.policy)}, against plain decoding")
    with Progress(console=errors, transient=True) as bar, broken_acceptance(temperature) if broken else nullcontext():
        task = bar.add_task("verifying", total=1.0)
        found = verify(model, texts, progress=lambda share: bar.update(task, completed=share), **settings)
    if as_json:
        print(json.dumps(as_dict(found, model) | settings, ensure_ascii=False))
    else:
        console = Console(markup=False, highlight=False, soft_wrap=True)
        if found.count("identical") < len(found.comparisons):
            console.print(differences_table(found, model.tokenizer), *faults(found), sep="\n")
        console.print(summary(found))
    raise typer.Exit(0 if found.passed else 1)


def _texts(names: list[str] | None, data_dir: Path | None, most: int | None, seed: int) -> list[tuple[str, str]]:
    """Name and text of the prompts asked for."""
    from bastion.benchmarks.datasets import gather

    files = [Path(name) for name in names or () if Path(name).is_file()]
    sets = [name for name in names or () if not Path(name).is_file()]
    if names is None and data_dir is None:
        if most is not None and most < 1:
            raise BastionError(f"--max-samples must be 1 or more, not {most}")
        return list(PROMPTS.items())[:most]
    samples = gather(sets, files, data_dir, most, seed)
    return [(sample.name, sample.turns[0]) for several in samples.values() for sample in several]
