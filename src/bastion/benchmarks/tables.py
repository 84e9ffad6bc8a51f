"""The figures of a benchmark as a table on the terminal, as JSON and as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from pydantic import BaseModel
from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from bastion.benchmarks.records import Run
from bastion.benchmarks.statistics import Figures, Ratio
from bastion.files import write_text, writing

FOOTNOTE = (
    "speed-up: median over prompts of tokens/s after the prefill, against {baseline} on the same prompt, with its 95% "
    "bootstrap interval. length: mean accepted length, tokens a verify pass, bonus token included. nodes: mean tree "
    "size, root not counted. texts: of different prompts. same: share of texts that are {baseline}'s token by token."
)


class Summary(BaseModel):
    """Everything that is kept of a benchmark beside its lines."""

    run: Run
    peak_memory: int | None  # bytes, see `provenance.peak_memory`
    figures: list[Figures]


def figures_table(figures: Sequence[Figures], baseline: str) -> Group:
    """The figures in at most 80 columns: a table for each data set and temperature."""
    parts: list[Table | Text] = []
    for (dataset, temperature), rows in groupby(figures, key=lambda row: (row.dataset, row.temperature)):
        table = Table(
            box=box.SIMPLE_HEAD,
            padding=(0, 1, 0, 0),
            title=f"{dataset}, temperature {temperature:g}",
            title_justify="left",
        )
        table.add_column("method", min_width=11)
        for title in ("speed-up", "+prefill", "tok/s", "length", "nodes", "texts", "same"):
            table.add_column(title, no_wrap=True, min_width=17 if title == "speed-up" else None)
        for row in rows:
            table.add_row(
                row.method,
                format_ratio(row.speedup),
                format_ratio(row.speedup_with_prefill, interval=False),
                format_number(row.tokens_per_second, 1),
                format_number(row.accepted_length, 2),
                format_number(row.tree_size, 1),
                str(row.prompts),
                f"{row.same_text:.0%}",
            )
        parts.append(table)
    return Group(*parts, Text(FOOTNOTE.format(baseline=baseline), style="italic"))


def format_ratio(ratio: Ratio | None, interval: bool = True) -> str:
    """Such as "1.52x (1.41-1.60)"."""
    if ratio is None:
        return "-"
    between = f" ({ratio.low:.2f}-{ratio.high:.2f})" if interval and ratio.low is not None else ""
    return f"{ratio.median:.2f}x{between}"


def format_number(value: float | None, digits: int) -> str:
    """A number, or "-" for one that is not known."""
    return "-" if value is None else f"{value:.{digits}f}"


def write_summary(summary: Summary, folder: Path) -> None:
    """Write summary.json and summary.csv, each all or nothing."""
    flat = [_flat(row) for row in summary.figures]
    text = io.StringIO()
    if flat:
        writer = csv.DictWriter(text, list(flat[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(flat)
    with writing(folder):
        write_text(folder / "summary.json", summary.model_dump_json(indent=1) + "\n")
        write_text(folder / "summary.csv", text.getvalue())


def _flat(row: Figures) -> dict[str, object]:
    """One line of the CSV: the parts of ratios become columns of their own."""
    columns: dict[str, object] = {}
    for name, value in row:
        if name in ("speedup", "speedup_with_prefill"):
            columns |= {f"{name}_{part}": getattr(value, part, None) for part in Ratio.model_fields}
        else:
            columns[name] = value
    return columns
