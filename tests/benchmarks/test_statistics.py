"""Figures from lines that are known."""

import csv
import io

import pytest
from rich.console import Console

from bastion.benchmarks.statistics import ALL, summarize
from bastion.benchmarks.tables import Summary, figures_table, write_summary
from benchmarks.support import SETTINGS, make_line


def by_method(lines, settings=SETTINGS, dataset="chat"):
    return {row.method: row for row in summarize(lines, settings) if row.dataset == dataset}


def test_the_speedup_is_the_median_of_ratios_on_the_same_prompt():
    lines = []
    for sample, seconds in (("1", 2.0), ("2", 3.0), ("3", 6.0)):  # after the prefill: 1, 2, 5 seconds
        lines += [make_line("ar", sample, seconds=6.0), make_line("dflash", sample, seconds=seconds)]
    rows = by_method(lines)
    assert rows["ar"].speedup.median == 1
    assert rows["dflash"].speedup.median == pytest.approx(5 / 2)  # not that of the sums, 15 / 8
    assert rows["dflash"].speedup_with_prefill.median == pytest.approx(6 / 3)
    assert rows["dflash"].speedup.low == pytest.approx(1)
    assert rows["dflash"].speedup.high == pytest.approx(5)
    assert rows["dflash"].tokens_per_second == pytest.approx(30 / 8)
    assert rows["dflash"].tokens_per_second_with_prefill == pytest.approx(33 / 11)
    assert rows["dflash"].prompts == 3


def test_repeats_are_reduced_before_the_ratio():
    lines = [make_line("ar", repeat=repeat, seconds=3.0) for repeat in range(3)]
    lines += [make_line("dflash", repeat=repeat, seconds=seconds) for repeat, seconds in enumerate((2.0, 2.0, 21.0))]
    ratio = by_method(lines)["dflash"].speedup
    assert (ratio.median, ratio.low) == (pytest.approx(2), None)  # one prompt: no interval
    assert by_method(lines)["dflash"].prompts == 1


def test_accepted_length_is_over_all_rounds_and_not_over_prompts():
    lines = [make_line("ar", sample) for sample in "12"]
    lines += [
        make_line("dflash", "1", accepted_lengths=[4, 4, 4, 4], tree_sizes=[8] * 4),
        make_line("dflash", "2", accepted_lengths=[1], tree_sizes=[3]),
    ]
    row = by_method(lines)["dflash"]
    assert (row.accepted_length, row.tree_size) == (17 / 5, 35 / 5)
    assert by_method(lines)["ar"].accepted_length is None  # these lines do not tell


def test_a_text_is_compared_with_its_counterpart_alone():
    other = make_line("dflash", "2", tokens=9)
    lines = [make_line("ar", "1"), make_line("dflash", "1"), make_line("ar", "2"), other]
    assert by_method(lines)["dflash"].same_text == 0.5
    assert by_method([*lines, make_line("dflash", "3", seconds=100.0)])["dflash"].prompts == 2  # 3 has no counterpart


def test_a_method_that_does_not_tell_its_prefill_has_the_ratio_with_it():
    lines = [make_line("ar", seconds=4.0), make_line("dflash", seconds=2.0, prefill=None)]
    row = by_method(lines)["dflash"]
    assert row.speedup is None
    assert row.tokens_per_second is None
    assert row.speedup_with_prefill.median == 2


def test_several_data_sets_have_a_row_for_all():
    settings = SETTINGS.model_copy(update={"datasets": ("chat", "code")})
    lines = [make_line(method, dataset=name) for name in settings.datasets for method in settings.methods]
    assert by_method(lines, settings, ALL)["dflash"].prompts == 2
    assert by_method(lines, settings, "code")["dflash"].prompts == 1
    assert not by_method(lines, dataset=ALL)


def test_the_csv_has_a_column_for_each_part_of_a_ratio(tmp_path):
    figures = summarize([make_line("ar"), make_line("dflash", seconds=1.5)], SETTINGS)
    write_summary(Summary.model_construct(run=None, peak_memory=1, figures=figures), tmp_path)
    with (tmp_path / "summary.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["method"] for row in rows] == ["ar", "dflash"]
    assert float(rows[1]["speedup_median"]) == 2
    assert rows[1]["speedup_low"] == ""


def test_the_table_fits_a_terminal():
    lines = [make_line(method, sample, dataset="mt-bench") for method in ("ar", "caddtree:128") for sample in "123"]
    settings = SETTINGS.model_copy(update={"datasets": ("mt-bench",), "methods": ("ar", "caddtree:128")})
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(figures_table(summarize(lines, settings), "ar"))
    rows = [line.split() for line in console.export_text().splitlines() if "caddtree" in line]
    assert rows == [["caddtree:128", "1.00x", "(1.00-1.00)", "1.00x", "10.0", "-", "-", "3", "100%"]]
