"""`python -m bastion.benchmark`: the benchmark of the public BASTION release, with its flags.

Under torchrun every process takes every n-th prompt, one text at a time, on a GPU of its own; on a CPU they share the
cores, which makes all slower. The first one measures the machine while the others wait, and gathers the results.
`bastion bench` compares more, and keeps it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import Progress
from torch import distributed

from bastion.benchmarks.datasets import expand, gather
from bastion.benchmarks.methods import load_drafters, make_methods
from bastion.benchmarks.records import Line, Settings
from bastion.benchmarks.runner import check_prompts, plan, run, warm_up
from bastion.benchmarks.statistics import summarize
from bastion.benchmarks.tables import figures_table
from bastion.cli import options
from bastion.drafters.dflash import DFlashDrafter
from bastion.drafters.mixed import alone
from bastion.errors import BastionError
from bastion.targets.loading import resolve_device

METHODS = ("ar", "dflash", "bastion")
PATIENCE = timedelta(days=1)  # how long a process waits for the others


def command(
    dataset: Annotated[str, typer.Option(help="Such as gsm8k, mt-bench, qasper, paper-short or longbench.")],
    model: Annotated[str, typer.Option(help="The target: hub id, folder, .gguf file or name of the zoo.")] = (
        options.DEFAULT_TARGET
    ),
    draft_model: Annotated[str, typer.Option(help="The drafter: hub id, folder or name; auto: the target's.")] = "auto",
    max_samples: Annotated[int | None, typer.Option(help="Most conversations of each data set.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens of each text.")] = 2048,
    temperature: Annotated[float, typer.Option(help="0: always the most probable token.")] = 0.0,
    block_size: Annotated[int | None, typer.Option(help="Of the drafter, root included. Default: its own.")] = None,
    enable_thinking: options.EnableThinking = False,
    data_dir: Annotated[Path | None, typer.Option(help="Folder with NAME.jsonl for data sets not to download.")] = None,
) -> None:
    """Compare plain decoding, the DFlash chain and BASTION on prompt sets."""
    rank, processes = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    expand([dataset])
    with _group(processes) as device:
        with _first_process_first(rank, processes):  # it downloads prompts and calibrates; the others find both
            loaded = options.load(model, draft_model, "plain", None, device, None, {"enable_thinking": enable_thinking})
            loaded.drafter = alone(loaded.drafter)
            if block_size is not None:
                if not isinstance(loaded.drafter, DFlashDrafter):
                    raise BastionError(f"{loaded.drafter.name} has no blocks: leave out --block-size")
                loaded.drafter = loaded.drafter.with_block_size(block_size)
            samples = gather([dataset], [], data_dir, max_samples)
            settings = Settings(
                datasets=tuple(samples),
                prompts_sha256=check_prompts(loaded, samples, max_new_tokens),
                methods=METHODS,
                temperatures=(temperature,),
                max_samples=max_samples,
                max_new_tokens=max_new_tokens,
                seed=0,
                repeats=1,
            )
            ways = make_methods(METHODS, loaded, model, load_drafters(METHODS, loaded))
        warm_up(ways)
        mine = plan(samples, settings)[rank::processes]
        with Progress(console=Console(stderr=True), transient=True, disable=rank > 0) as bar:
            task = bar.add_task("texts", total=sum(len(one.sample.turns) for one in mine) * len(ways))
            lines = list(run(mine, ways, settings, progress=lambda texts: bar.advance(task, texts)))
        gathered = _gather(lines, rank, processes)
    if rank == 0:
        Console().print(figures_table(summarize(gathered, settings), METHODS[0]))


@contextmanager
def _group(processes: int) -> Iterator[str | None]:
    """Join the processes that torchrun has started; the device of this one, None for the default."""
    if processes == 1:
        yield None
        return
    cuda = resolve_device().type == "cuda"
    device = f"cuda:{os.environ['LOCAL_RANK']}" if cuda else None
    if device is not None:
        torch.cuda.set_device(resolve_device(device))
    distributed.init_process_group("nccl" if cuda else "gloo", timeout=PATIENCE)
    try:
        yield device
    finally:
        distributed.destroy_process_group()


@contextmanager
def _first_process_first(rank: int, processes: int) -> Iterator[None]:
    """Let the others wait until the first process has run the body. If it fails, they end without a word."""
    if processes == 1:
        yield
        return
    failed = [False]
    if rank > 0:
        distributed.broadcast_object_list(failed)
        if failed[0]:
            sys.exit(2)
    try:
        yield
    except BaseException:
        failed = [True]
        raise
    finally:
        if rank == 0:
            distributed.broadcast_object_list(failed)


def _gather(lines: list[Line], rank: int, processes: int) -> list[Line]:
    """The lines of all processes, for the first one."""
    if processes == 1:
        return lines
    gathered: list[list[Line]] | None = [[] for _ in range(processes)] if rank == 0 else None
    distributed.gather_object(lines, gathered)
    return [line for several in gathered or [] for line in several]
