"""The report of a benchmark: one HTML file that needs no other, no script and no network."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from bastion.benchmarks.provenance import Part
from bastion.benchmarks.records import Line
from bastion.benchmarks.report_plots import pictures
from bastion.benchmarks.statistics import CONFIDENCE, RESAMPLES
from bastion.benchmarks.tables import Summary, format_number, format_ratio
from bastion.files import write_text, writing


def write_report(summary: Summary, lines: Sequence[Line], path: Path) -> None:
    """Write the figures, plots and provenance of a benchmark, all or nothing.

    Plots for which the lines hold no data are left out. Raises BastionError if the file cannot be written.
    """
    loader = PackageLoader("bastion", "benchmarks")
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined)
    environment.filters |= {"ratio": format_ratio, "number": format_number}
    by_section = itertools.groupby(summary.figures, key=lambda row: (row.dataset, row.temperature))
    text = environment.get_template("report.html.jinja").render(
        title=f"bastion bench: {summary.run.provenance.target.name}",
        baseline=summary.run.settings.methods[0],
        sections=[list(rows) for _, rows in by_section],
        confidence=CONFIDENCE,
        resamples=RESAMPLES,
        pictures=pictures(summary, lines),
        facts=list(_facts(summary)),
    )
    with writing(path.parent):
        write_text(path, text)


def _facts(summary: Summary) -> Iterator[tuple[str, str]]:
    """Name and value of all that is known about where the numbers come from."""
    origin, settings = summary.run.provenance, summary.run.settings
    yield "command", origin.command
    yield "date", f"{origin.date:%Y-%m-%d %H:%M:%S %Z}"
    yield "versions", ", ".join(f"{name} {version}" for name, version in origin.versions.items())
    yield "commit", origin.commit or "not known"
    for name in ("platform", "processor", "device", "threads", "dtype", "attention"):
        yield name, str(getattr(origin, name))
    yield "target", _part(origin.target)
    for drafter in origin.drafters:
        yield "drafter", _part(drafter)
    for one in origin.calibrations:
        errors = ", ".join(f"{model} {error:.1%}" for model, error in one.errors.items())
        of = next((part.name for part in origin.drafters if part.digest == one.drafter_digest), one.drafter_digest)
        yield "calibration", f"of {of}, {one.date:%Y-%m-%d %H:%M:%S %Z}; cross-validated errors: {errors}"
    memory = summary.peak_memory
    yield "peak memory of the process", "not known" if memory is None else f"{memory / 2**20:.0f} MiB"
    for name, value in settings:
        words = ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
        yield name.replace("_", " "), "not set" if value is None else words


def _part(part: Part) -> str:
    return f"{part.name} (digest {part.digest})"
