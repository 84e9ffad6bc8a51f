"""`bastion bench`: the methods side by side on prompt sets."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bastion.cli import options
from bastion.errors import BastionError

if TYPE_CHECKING:
    import torch

    from bastion.benchmarks.methods import Method
    from bastion.benchmarks.records import ResultFolder, Settings
    from bastion.benchmarks.runner import Conversation


DEFAULT_METHODS = "ar,dflash,ddtree,caddtree,bastion"


def command(
    out: Annotated[Path, typer.Option(help="Folder for the results.")],
    target: options.Target = options.DEFAULT_TARGET,
    drafter: options.Drafter = "auto",
    methods: Annotated[
        str | None,
        typer.Option(
            help="Separated by commas, the first is the baseline: ar, dflash[:n], ddtree[:n], caddtree[:n], "
            "bastion[:n], auto[:n], ngram[:n], treeflash[:n], eagle3[:n], specblock[:n], with another drafter as in "
            "ddtree:8@FOLDER, and hf, hf-lookup, hf-assisted:MODEL, llama.cpp. n in nodes. "
            f"Default: {DEFAULT_METHODS}."
        ),
    ] = None,
    datasets: Annotated[str, typer.Option(help="Separated by commas: gsm8k, mt-bench, ..., paper-short.")] = "",
    prompts: Annotated[
        list[Path] | None, typer.Option(help="A file of JSON lines with turns or prompt; repeatable.")
    ] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Folder with NAME.jsonl for data sets not to download.")] = None,
    temperatures: Annotated[str, typer.Option(help="Separated by commas.")] = "0",
    max_samples: Annotated[int | None, typer.Option(help="Most conversations of each data set.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens of each text.")] = 256,
    seed: Annotated[int, typer.Option(help="Of the choice of samples, and of the texts above temperature 0.")] = 0,
    repeats: Annotated[int, typer.Option(help="How often each text is written.")] = 1,
    forced_acceptance: Annotated[
        str | None,
        typer.Option(help="Measure the machine instead: trees of 1 to 64 nodes with these acceptances, as in 0,0.5,1."),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the benchmark in the folder.")] = False,
    enable_thinking: options.EnableThinking = False,
    device: options.Device = None,
    dtype: options.Dtype = None,
) -> None:
    """Compare methods on prompt sets: all in one run, in turn on every prompt."""
    from bastion.benchmarks.datasets import gather
    from bastion.benchmarks.forced import check_acceptances, forced_methods
    from bastion.benchmarks.methods import PolicyMethod, expand_methods, load_drafters, make_methods
    from bastion.benchmarks.provenance import provenance
    from bastion.benchmarks.records import ResultFolder, Run, Settings, refuse_results
    from bastion.benchmarks.runner import check_prompts, plan, warm_up
    from bastion.drafters.mixed import alone
    from bastion.files import locked
    from bastion.plots import check_matplotlib

    check_matplotlib()
    acceptances = None
    if forced_acceptance is not None:
        acceptances = options.numbers(forced_acceptance, "--forced-acceptance")
        check_acceptances(acceptances)
        if methods is not None:
            raise BastionError("--forced-acceptance has methods of its own: leave out --methods")
        if options.numbers(temperatures, "--temperatures") != (0.0,):
            raise BastionError("acceptance is forced at temperature 0 only: leave out --temperatures")
    names = expand_methods(options.split(DEFAULT_METHODS if methods is None else methods))
    samples = gather(options.split(datasets), prompts or [], data_dir, max_samples, seed)
    settings = Settings(
        datasets=tuple(samples),
        prompts_sha256="",
        methods=tuple(names),
        temperatures=options.numbers(temperatures, "--temperatures"),
        max_samples=max_samples,
        max_new_tokens=max_new_tokens,
        seed=seed,
        repeats=repeats,
    )
    refuse_results(out, resume)
    model = options.load(target, drafter, "plain", None, device, dtype, {"enable_thinking": enable_thinking})
    drafters = load_drafters(names, model) if acceptances is None else {}
    prompts_sha256 = check_prompts(model, samples, max_new_tokens)
    with locked(out):
        if acceptances is None:
            ways = make_methods(names, model, target, drafters)
        else:
            model.drafter = alone(model.drafter)  # whatever it costs is measured, not what it would guess
            ways = forced_methods(model, acceptances)
        warm_up(ways)
        changes = {"prompts_sha256": prompts_sha256, "methods": tuple(way.name for way in ways)}
        settings = settings.model_copy(update=changes)
        ours = [model, *(way.model for way in ways if isinstance(way, PolicyMethod))]
        used = {one.drafter.digest: one.drafter for one in ours}
        calibrations = {one.calibration.key: one.calibration for one in ours if one.calibration is not None}
        origin = provenance(model.target, list(used.values()), list(calibrations.values()))
        results = ResultFolder(out, Run(settings=settings, provenance=origin), resume)
        try:
            _run(plan(samples, settings), ways, settings, results)
        finally:  # an interrupted run leaves the figures so far
            if results.lines:
                _finish(results, model.target.device, acceptances is not None)


def _run(conversations: list[Conversation], ways: list[Method], settings: Settings, results: ResultFolder) -> None:
    """Write the texts, with a progress bar and the table so far on standard error."""
    from rich.console import Console, Group
    from rich.live import Live
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from bastion.benchmarks.runner import run
    from bastion.benchmarks.statistics import summarize
    from bastion.benchmarks.tables import figures_table

    bar = Progress(TextColumn("texts"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    task = bar.add_task("texts", total=sum(len(one.sample.turns) for one in conversations) * len(ways))
    with Live(bar, console=Console(stderr=True), transient=True, auto_refresh=False) as live:
        known = list(results.lines)
        for line in run(conversations, ways, settings, known, lambda texts: bar.advance(task, texts)):
            results.add(line)
            if live.console.is_terminal and not len(results.lines) % len(
                ways
            ):  # nothing is drawn while a text is timed
                table = figures_table(summarize(results.lines, settings, intervals=False), settings.methods[0])
                live.update(Group(table, bar), refresh=True)


def _finish(results: ResultFolder, device: torch.device, forced: bool) -> None:
    """Write and show the figures."""
    from rich.console import Console

    console = Console()
    if forced:
        from bastion.benchmarks.forced_report import forced_table, summarize_forced, write_forced

        break_even = summarize_forced(results.lines, results.run)
        write_forced(break_even, results.path)
        console.print(forced_table(break_even))
    else:
        from bastion.benchmarks.provenance import peak_memory
        from bastion.benchmarks.report import write_report
        from bastion.benchmarks.statistics import summarize
        from bastion.benchmarks.tables import Summary, figures_table, write_summary

        settings = results.run.settings
        figures = summarize(results.lines, settings)
        summary = Summary(run=results.run, peak_memory=peak_memory(device), figures=figures)
        write_summary(summary, results.path)
        write_report(summary, results.lines, results.path / "report.html")
        console.print(figures_table(figures, settings.methods[0]))
    files = "forced.json, forced.png" if forced else "report.html, summary.json, summary.csv"
    console.print(f"written to {results.path}: {files}, generations.jsonl", soft_wrap=True)
