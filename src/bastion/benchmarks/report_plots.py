"""The pictures of a benchmark's report. Each method has one colour and one marker in all of them."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from bastion.benchmarks.methods import POLICIES, split_method
from bastion.benchmarks.records import Line
from bastion.benchmarks.statistics import Figures
from bastion.benchmarks.tables import Summary
from bastion.decoding.stats import STAGES
from bastion.plots import encode_figure, new_figure

MARKERS = "osD^vP<>Xp"
BINS = 12  # of the contexts, each with as many rounds
POINTS = 2000  # of a method in a scatter plot; more only make it black
CONTROLLERS = ("roofline", "profile", "auto")  # policies that choose the size of each tree

Styles = dict[str, dict[str, Any]]  # colour and marker of each method, in the order of the run
Floats = npt.NDArray[np.float64]
Data = TypeVar("Data")


@dataclass(slots=True)
class Picture:
    """A plot and what it shows."""

    title: str
    caption: str
    png: str  # in base64


def pictures(summary: Summary, lines: Sequence[Line]) -> list[Picture]:
    """All plots for which there is data."""
    settings = summary.run.settings
    styles = _styles(settings.methods)
    drawn = (
        _speedups(summary, styles),
        _accepted_lengths(lines, settings.temperatures, styles),
        _tree_sizes(lines, settings.temperatures, styles),
        _verify_times(lines, styles),
        _stages(lines, settings.temperatures, styles),
        _budgets(summary.figures, styles),
    )
    return [picture for picture in drawn if picture is not None]


def _styles(methods: Sequence[str]) -> Styles:
    import matplotlib

    colours = matplotlib.colormaps["tab10" if len(methods) <= 10 else "tab20"]
    return {
        method: {"color": colours(place % colours.N), "marker": MARKERS[place % len(MARKERS)]}
        for place, method in enumerate(methods)
    }


def _speedups(summary: Summary, styles: Styles) -> Picture | None:
    baseline = summary.run.settings.methods[0]
    known = [row for row in summary.figures if row.speedup is not None and row.method != baseline]
    panels = {f"temperature {t:g}": [row for row in known if row.temperature == t] for t in _temperatures(known)}

    def draw(axis: Any, rows: list[Figures]) -> None:
        sets = list(dict.fromkeys(row.dataset for row in rows))
        methods = [method for method in styles if any(row.method == method for row in rows)]
        width = 0.85 / len(methods)
        for place, method in enumerate(methods):
            for row in rows:
                if row.method == method and (ratio := row.speedup) is not None:
                    x = sets.index(row.dataset) + (place - (len(methods) - 1) / 2) * width
                    axis.bar(x, ratio.median, width, color=styles[method]["color"])
                    if ratio.low is not None and ratio.high is not None:
                        axis.vlines(x, ratio.low, ratio.high, color="black", linewidth=1)
            axis.bar(0, 0, color=styles[method]["color"], label=_text(method))
        axis.axhline(1, color="black", linestyle="--", linewidth=1, label=_text(baseline))
        axis.set_xticks(range(len(sets)), [_text(name) for name in sets])
        axis.set_ylabel("speed-up")

    caption = (
        f"Median over prompts of tokens/s after the prefill, against {baseline} on the same prompt. "
        "Lines: 95% bootstrap intervals."
    )
    return _picture("Speed-up by data set", caption, panels, draw, width=9.0, height=3.6, columns=1)


def _accepted_lengths(lines: Sequence[Line], temperatures: Sequence[float], styles: Styles) -> Picture | None:
    known = [line for line in lines if max(line.accepted_lengths, default=0) > 1]
    drafting = {line.text.method for line in known}
    panels = _by_temperature([line for line in lines if line.text.method in drafting], temperatures)

    def draw(axis: Any, here: list[Line]) -> None:
        for method, own in _by_method(here, styles):
            counts = Counter(length for line in own for length in line.accepted_lengths)
            lengths = range(1, max(counts, default=0) + 1)
            shares = [counts[length] / counts.total() for length in lengths]
            axis.plot(lengths, shares, label=_text(method), markersize=4, **styles[method])
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.set(xlabel="accepted length, bonus token included", ylabel="share of rounds", ylim=(0, None))

    caption = "How many tokens a verify pass wrote, over the rounds of all data sets."
    return _picture("Accepted lengths", caption, panels, draw, columns=2)


def _tree_sizes(lines: Sequence[Line], temperatures: Sequence[float], styles: Styles) -> Picture | None:
    known = [line for line in lines if _policy(line.text.method) in CONTROLLERS and line.tree_sizes]
    panels = _by_temperature(known, temperatures)

    def draw(axis: Any, here: list[Line]) -> None:
        for method, own in _by_method(here, styles):
            contexts = np.concatenate([_contexts(line) for line in own])
            sizes = np.concatenate([line.tree_sizes for line in own])
            bins = np.array_split(np.argsort(contexts, kind="stable"), min(BINS, len(contexts)))
            low, middle, high = np.array([np.quantile(sizes[one], (0.25, 0.5, 0.75)) for one in bins]).T
            places = [np.median(contexts[one]) for one in bins]
            axis.fill_between(places, low, high, color=styles[method]["color"], alpha=0.15, linewidth=0)
            axis.plot(places, middle, label=_text(method), markersize=4, **styles[method])
        axis.set(xlabel="tokens in the cache before the round", ylabel="nodes, root not counted", ylim=(0, None))

    caption = (
        f"Rounds in up to {BINS} groups of equal size by context: median, and the middle half of the rounds shaded. "
        "Methods that choose the size of each tree."
    )
    return _picture("Tree size against context", caption, panels, draw, columns=2)


def _verify_times(lines: Sequence[Line], styles: Styles) -> Picture | None:
    panels = {}
    for method, own in _by_method([line for line in lines if line.predicted_seconds], styles):
        predicted, measured = (
            np.concatenate([getattr(line, name) for line in own]) for name in ("predicted_seconds", "verify_seconds")
        )
        error = np.median(np.abs(predicted - measured) / measured)
        panels[f"{method}: median relative error {error:.1%}"] = method, predicted, measured

    def draw(axis: Any, here: tuple[str, Floats, Floats]) -> None:
        from matplotlib.ticker import LogLocator, NullFormatter

        method, predicted, measured = here
        step = -(-len(predicted) // POINTS)
        style = {"color": styles[method]["color"], "alpha": 0.3, "linewidths": 0}
        axis.scatter(1e3 * predicted[::step], 1e3 * measured[::step], s=8, **style)
        ends = 1e3 * np.array([min(predicted.min(), measured.min()), max(predicted.max(), measured.max())])
        axis.plot(ends, ends, color="black", linewidth=1)
        axis.set(xlabel="predicted ms", ylabel="measured ms", xscale="log", yscale="log")
        for side in (axis.xaxis, axis.yaxis):
            side.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            side.set_major_formatter("{x:g}")
            side.set_minor_formatter(NullFormatter())

    caption = (
        "Each verify pass by the cost model that chose its tree, and by the clock; on the line both are equal. "
        f"At most {POINTS} passes of a method are drawn; the errors are those of all passes."
    )
    return _picture("Verify time, predicted and measured", caption, panels, draw, columns=2)


def _stages(lines: Sequence[Line], temperatures: Sequence[float], styles: Styles) -> Picture | None:
    panels = _by_temperature([line for line in lines if line.stages and line.new_tokens > 1], temperatures)
    names = list(dict.fromkeys([*STAGES, *(stage for line in lines for stage in line.stages)]))

    def draw(axis: Any, here: list[Line]) -> None:
        import matplotlib

        colours = matplotlib.colormaps["Set2"]
        groups = list(_by_method(here, styles))
        left = np.zeros(len(groups))
        for place, stage in enumerate(names):
            widths = np.array(
                [
                    1e3 * sum(line.stages.get(stage, 0.0) for line in own) / sum(line.new_tokens - 1 for line in own)
                    for _, own in groups
                ]
            )
            axis.barh(range(len(groups)), widths, left=left, color=colours(place), edgecolor="black", linewidth=0.3)
            axis.barh(0, 0, color=colours(place), label=stage)
            left += widths
        axis.set_yticks(range(len(groups)), [_text(method) for method, _ in groups])
        axis.invert_yaxis()
        axis.set_xlabel("ms a new token")

    caption = "Time after the prefill over new tokens after the first, over all data sets."
    return _picture("Time by stage", caption, panels, draw, width=5.5, columns=2)


def _budgets(figures: Sequence[Figures], styles: Styles) -> Picture | None:
    known = [
        row
        for row in figures
        if row.tokens_per_second is not None and row.tree_size is not None and _shares_the_drafter(row.method)
    ]
    sections = dict.fromkeys((row.dataset, row.temperature) for row in known if _policy(row.method) == "fixed")
    panels = {
        f"{dataset}, temperature {t:g}": [row for row in known if (row.dataset, row.temperature) == (dataset, t)]
        for dataset, t in sections
    }

    def draw(axis: Any, here: list[Figures]) -> None:
        fixed = [row for row in here if _policy(row.method) == "fixed"]
        budgets = {row.method: int(split_method(row.method)[1].removeprefix(":")) for row in fixed}
        fixed.sort(key=lambda row: budgets[row.method])
        rates = [row.tokens_per_second for row in fixed]
        axis.plot(sorted(budgets.values()), rates, color="grey", zorder=1, label="fixed budget")
        for row in here:
            if _policy(row.method) == "plain":
                axis.axhline(row.tokens_per_second, color="black", linestyle="--", linewidth=1, label=_text(row.method))
            elif _policy(row.method) is not None:
                size = budgets.get(row.method, row.tree_size)
                axis.scatter(size, row.tokens_per_second, label=_text(row.method), zorder=2, **styles[row.method])
        ticks = [0, *(2**power for power in range(13) if 2**power <= 2 * max(budgets.values()))]
        axis.set_xscale("symlog", base=2, linthresh=1)  # a controller may choose no nodes at all
        axis.set_xticks(ticks, [str(tick) for tick in ticks])
        axis.set(xlabel="nodes, root not counted", ylabel="tokens/s after the prefill")

    caption = "Fixed budgets stand at their budget, the other methods at the mean size of their trees."
    return _picture("Throughput against budget", caption, panels, draw, columns=2)


def _picture(
    title: str,
    caption: str,
    panels: dict[str, Data],
    draw: Callable[[Any, Data], None],
    columns: int,
    width: float = 4.5,
    height: float = 3.6,
) -> Picture | None:
    """A panel for each entry, under its name, with one legend on the right; None if there is none."""
    if not panels:
        return None
    figure, axes = new_figure(len(panels), width, height, columns)
    entries: dict[str, Any] = {}
    for axis, (name, data) in zip(axes, panels.items(), strict=True):
        draw(axis, data)
        axis.set_title(_text(name), fontsize=9)
        handles, labels = axis.get_legend_handles_labels()
        entries = dict(zip(labels, handles, strict=True)) | entries
    if entries:
        corner = axes[min(columns, len(axes)) - 1]
        corner.legend(entries.values(), entries, loc="upper left", bbox_to_anchor=(1.01, 1), fontsize=8)
    return Picture(title, caption, encode_figure(figure))


def _policy(method: str) -> str | None:
    return POLICIES.get(split_method(method)[0])


def _shares_the_drafter(method: str) -> bool:
    """Whether it is one of bastion's methods over the drafter that the run is about."""
    base, _, drafter = split_method(method)
    return base != "ngram" and not drafter


def _temperatures(figures: Sequence[Figures]) -> list[float]:
    return list(dict.fromkeys(row.temperature for row in figures))


def _by_temperature(lines: Sequence[Line], temperatures: Sequence[float]) -> dict[str, list[Line]]:
    groups = {f"temperature {t:g}": [line for line in lines if line.text.temperature == t] for t in temperatures}
    return {name: group for name, group in groups.items() if group}


def _by_method(lines: Sequence[Line], styles: Styles) -> Iterator[tuple[str, list[Line]]]:
    """The methods that there are lines of, in the order of the run."""
    for method in styles:
        if own := [line for line in lines if line.text.method == method]:
            yield method, own


def _contexts(line: Line) -> Floats:
    """Tokens in the cache before each round: the prompt, and what the rounds before it have written."""
    written = itertools.accumulate(line.accepted_lengths[:-1], initial=line.prompt_tokens)
    return np.fromiter(written, np.float64)


def _text(name: str) -> str:
    """A name as it stands: between two dollar signs matplotlib would read a formula."""
    return name.replace("$", r"\$")
