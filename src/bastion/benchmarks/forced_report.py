"""Break-even: from the lines of a run with forced acceptance to a table, a picture and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from pydantic import BaseModel
from rich.table import Table

from bastion.benchmarks.forced import BASELINE, parse_name
from bastion.benchmarks.records import Line, Run, Text
from bastion.benchmarks.statistics import ALL, Ratio, summarize
from bastion.benchmarks.tables import format_ratio
from bastion.errors import BastionError
from bastion.files import write_text, writing
from bastion.plots import new_figure, save_figure

FOOTNOTE = (
    "speed-up: median over prompts of tokens/s after the prefill, against plain decoding of the same prompt; in "
    "parentheses the accepted length, bonus token included. break-even: where the speed-up is 1, by linear "
    "interpolation; -: at none of these acceptances."
)


class Point(BaseModel):
    """Trees of one size with one forced acceptance."""

    nodes: int  # asked for, root not counted
    acceptance: float  # probability that the first candidate of a depth is the text's true token
    prompts: int
    speedup: Ratio  # after the prefill, against plain decoding
    tokens_per_second: float
    accepted_length: float  # bonus token included
    tree_size: float  # grown on average: a drafter may have less to propose, and the last rounds need less


class BreakEven(BaseModel):
    """Where trees of one size are as fast as plain decoding.

    None: nowhere in what was measured. The lowest acceptance measured: there or below.
    """

    nodes: int
    acceptance: float | None
    accepted_length: float | None


class ForcedSummary(BaseModel):
    """What `forced.json` holds."""

    run: Run
    left_out: int  # texts that rounding made another one than plain decoding's: their acceptance was not the forced one
    points: list[Point]
    break_even: list[BreakEven]


def summarize_forced(lines: Sequence[Line], run: Run) -> ForcedSummary:
    """Points and break-even over all data sets. Raises BastionError if no text is long enough to be timed."""
    plain = {line.text: line.tokens_sha256 for line in lines if line.text.method == BASELINE}
    paired = [line for line in lines if _plain_text(line) in plain]
    kept = [line for line in paired if line.tokens_sha256 == plain[_plain_text(line)]]
    datasets = run.settings.datasets
    points = []
    for row in summarize(kept, run.settings):
        if row.method == BASELINE or row.dataset != (ALL if len(datasets) > 1 else datasets[0]):
            continue
        if row.speedup is None or row.tokens_per_second is None or row.accepted_length is None or row.tree_size is None:
            continue
        nodes, acceptance = parse_name(row.method)
        point = Point(
            nodes=nodes,
            acceptance=acceptance,
            prompts=row.prompts,
            speedup=row.speedup,
            tokens_per_second=row.tokens_per_second,
            accepted_length=row.accepted_length,
            tree_size=row.tree_size,
        )
        points.append(point)
    if not points:
        raise BastionError(
            "no text has a second token, so none can be timed: ask for more new tokens, or other prompts"
        )
    points.sort(key=lambda point: (point.nodes, point.acceptance))
    sizes = dict.fromkeys(point.nodes for point in points)
    break_even = [_break_even([point for point in points if point.nodes == nodes]) for nodes in sizes]
    return ForcedSummary(run=run, left_out=len(paired) - len(kept), points=points, break_even=break_even)


def forced_table(summary: ForcedSummary) -> Table:
    """A row for each size of trees, a column for each acceptance, and break-even."""
    acceptances = sorted({point.acceptance for point in summary.points})
    columns = [f"acceptance {acceptance:g}" for acceptance in acceptances]
    left_out = f" left out: {summary.left_out} texts that are not plain decoding's." if summary.left_out else ""
    table = Table("nodes", *columns, "break-even", "at length", caption=FOOTNOTE + left_out)
    points = {(point.nodes, point.acceptance): point for point in summary.points}
    for one in summary.break_even:
        cells = [_cell(points.get((one.nodes, acceptance))) for acceptance in acceptances]
        below = "<= " if one.acceptance == acceptances[0] else ""
        ends = ["-" if value is None else f"{below}{value:.2f}" for value in (one.acceptance, one.accepted_length)]
        table.add_row(str(one.nodes), *cells, *ends)
    return table


def write_forced(summary: ForcedSummary, folder: Path) -> None:
    """Write forced.json and forced.png, each all or nothing. Raises BastionError if they cannot be written."""
    with writing(folder):
        write_text(folder / "forced.json", summary.model_dump_json(indent=1) + "\n")
    _write_plot(summary, folder / "forced.png")


def _plain_text(line: Line) -> Text:
    return line.text.model_copy(update={"method": BASELINE})


def _break_even(points: Sequence[Point]) -> BreakEven:
    """The acceptance from which on trees pay. `points` are of one size, by acceptance."""
    nodes = points[0].nodes
    slow = [place for place, point in enumerate(points) if point.speedup.median < 1]
    if not slow:
        return BreakEven(nodes=nodes, acceptance=points[0].acceptance, accepted_length=points[0].accepted_length)
    ends = points[slow[-1] : slow[-1] + 2]
    if len(ends) < 2:
        return BreakEven(nodes=nodes, acceptance=None, accepted_length=None)
    speedups = [point.speedup.median for point in ends]
    return BreakEven(
        nodes=nodes,
        acceptance=float(np.interp(1, speedups, [point.acceptance for point in ends])),
        accepted_length=float(np.interp(1, speedups, [point.accepted_length for point in ends])),
    )


def _cell(point: Point | None) -> str:
    return "-" if point is None else f"{format_ratio(point.speedup, interval=False)} ({point.accepted_length:.2f})"


def _write_plot(summary: ForcedSummary, path: Path) -> None:
    import matplotlib

    figure, (speed, needed) = new_figure(2)
    acceptances = sorted({point.acceptance for point in summary.points})
    colours = matplotlib.colormaps["viridis"](np.linspace(0, 0.9, len(acceptances)))
    for acceptance, colour in zip(acceptances, colours, strict=True):
        own = [point for point in summary.points if point.acceptance == acceptance]
        sizes = [point.nodes for point in own]
        speed.plot(
            sizes, [point.speedup.median for point in own], "o-", color=colour, label=f"acceptance {acceptance:g}"
        )
        for point in own:
            if point.speedup.low is not None and point.speedup.high is not None:
                speed.vlines(point.nodes, point.speedup.low, point.speedup.high, color=colour, linewidth=1)
    speed.axhline(1, color="black", linestyle="--", linewidth=1, label="plain decoding")
    speed.set(xlabel="nodes, root not counted", ylabel="speed-up", title="forced acceptance")
    speed.legend(fontsize=7)
    reached = [(one.nodes, one.acceptance) for one in summary.break_even if one.acceptance is not None]
    needed.plot([nodes for nodes, _ in reached], [acceptance for _, acceptance in reached], "ko-")
    needed.set(xlabel="nodes, root not counted", ylabel="acceptance", title="break-even", ylim=(-0.05, 1.05))
    sizes = [one.nodes for one in summary.break_even]
    for axis in (speed, needed):
        axis.set_xscale("log", base=2)
        axis.set_xlim(sizes[0] / 2, sizes[-1] * 2)  # also where nothing is drawn: no size may pay
        axis.set_xticks(sizes, [str(nodes) for nodes in sizes])
    origin = summary.run.provenance
    figure.suptitle(f"{origin.device}, {origin.threads} threads, {origin.dtype}", fontsize=9)
    save_figure(figure, path)
