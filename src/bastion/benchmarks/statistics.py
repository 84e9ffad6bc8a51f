"""From the lines of a benchmark to its figures."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from typing import Annotated

import numpy as np
from pydantic import BaseModel, Field
from scipy.stats import bootstrap

from bastion.benchmarks.records import Line, Settings

ALL = "all"  # the row over all data sets
RESAMPLES = 2000
CONFIDENCE = 0.95

Rate = Callable[[Line], float | None]


class Ratio(BaseModel):
    """The median over prompts of the ratio of a method's tokens/s to the baseline's, and its confidence interval.

    A prompt's rate is its median over repeats. The interval is the percentile bootstrap's over prompts; None for fewer
    than three of them.
    """

    median: float
    low: float | None = None
    high: float | None = None


class Figures(BaseModel):
    """One method on one data set at one temperature."""

    dataset: str
    temperature: float
    method: str
    prompts: Annotated[int, Field(description="turns of conversations")]
    speedup: Ratio | None  # after the prefill; None: the method or the baseline does not tell the prefill's time
    speedup_with_prefill: Ratio | None
    tokens_per_second: float | None  # all new tokens after the first of each text over all time after the prefills
    tokens_per_second_with_prefill: float
    accepted_length: float | None  # tokens a round, bonus token included, over all rounds; None: not known
    tree_size: float | None  # nodes a round, root not counted
    same_text: float  # share of texts that are the baseline's, token by token


def summarize(lines: Sequence[Line], settings: Settings, intervals: bool = True) -> list[Figures]:
    """Figures of every method by data set and temperature, and over all data sets if there are several.

    The baseline is the first method. Texts of which the baseline's counterpart is missing are left out. `intervals` can
    be left out, since they take time.
    """
    baseline = {_counterpart(line): line for line in lines if line.text.method == settings.methods[0]}
    pairs: dict[tuple[str, float, str], list[tuple[Line, Line]]] = {}
    for line in lines:
        if (other := baseline.get(_counterpart(line))) is not None:
            for dataset in (line.text.dataset, ALL):
                key = dataset, line.text.temperature, line.text.method
                pairs.setdefault(key, []).append((line, other))
    datasets = [*settings.datasets, *([ALL] if len(settings.datasets) > 1 else [])]
    rows = []
    for key in itertools.product(datasets, settings.temperatures, settings.methods):
        if key in pairs:
            mine, theirs = zip(*pairs[key], strict=True)
            rows.append(_figures(*key, list(mine), list(theirs), intervals))
    return rows


def _counterpart(line: Line) -> tuple[object, ...]:
    """What lines of the same text under different methods have in common."""
    return *_prompt(line), line.text.repeat


def _prompt(line: Line) -> tuple[str, str, int, float]:
    return line.text.dataset, line.text.sample, line.text.turn, line.text.temperature


def _figures(
    dataset: str, temperature: float, method: str, mine: list[Line], theirs: list[Line], intervals: bool
) -> Figures:
    rounds = sum(len(line.accepted_lengths) for line in mine)
    timed = [line for line in mine if line.prefill_seconds is not None]
    decoding = sum(line.seconds - (line.prefill_seconds or 0.0) for line in timed)
    return Figures(
        dataset=dataset,
        temperature=temperature,
        method=method,
        prompts=len({_prompt(line) for line in mine}),
        speedup=_ratio(mine, theirs, lambda line: line.decode_rate, intervals),
        speedup_with_prefill=_ratio(mine, theirs, lambda line: line.rate, intervals),
        tokens_per_second=sum(line.new_tokens - 1 for line in timed) / decoding if decoding else None,
        tokens_per_second_with_prefill=sum(line.new_tokens for line in mine) / sum(line.seconds for line in mine),
        accepted_length=sum(sum(line.accepted_lengths) for line in mine) / rounds if rounds else None,
        tree_size=sum(sum(line.tree_sizes) for line in mine) / rounds if rounds else None,
        same_text=statistics.mean(a.tokens_sha256 == b.tokens_sha256 for a, b in zip(mine, theirs, strict=True)),
    )


def _ratio(mine: Sequence[Line], theirs: Sequence[Line], rate: Rate, interval_wanted: bool) -> Ratio | None:
    rates: dict[object, tuple[list[float], list[float]]] = {}
    for pair in zip(mine, theirs, strict=True):
        for line, several in zip(pair, rates.setdefault(_prompt(pair[0]), ([], [])), strict=True):
            if (found := rate(line)) is not None:
                several.append(found)
    ratios = [statistics.median(one) / statistics.median(other) for one, other in rates.values() if one and other]
    if not ratios:
        return None
    if len(ratios) < 3 or not interval_wanted:
        return Ratio(median=statistics.median(ratios))
    interval = bootstrap(
        (np.array(ratios),),
        np.median,
        n_resamples=RESAMPLES,
        confidence_level=CONFIDENCE,
        method="percentile",
        rng=np.random.default_rng(0),
    ).confidence_interval
    return Ratio(median=statistics.median(ratios), low=float(interval.low), high=float(interval.high))
