"""The report: every figure, no plot without data, nothing that a name could break, and whole or not there."""

import base64
import re
from html.parser import HTMLParser

import pytest
from matplotlib import pyplot
from matplotlib.colors import to_hex

from bastion.benchmarks import report, report_plots
from bastion.benchmarks.report import write_report
from bastion.benchmarks.report_plots import pictures
from bastion.benchmarks.tables import format_number, format_ratio
from bastion.errors import BastionError
from benchmarks.run_support import make_run, make_summary
from benchmarks.support import make_line

STAGES = {"draft": 0.1, "grow": 0.02, "verify": 0.7, "accept": 0.03, "commit": 0.05}
METHODS = ("ar", "dflash", "ddtree:8", "ddtree:32", "caddtree", "bastion")
TITLES = {
    "Speed-up by data set",
    "Accepted lengths",
    "Tree size against context",
    "Verify time, predicted and measured",
    "Time by stage",
    "Throughput against budget",
}


@pytest.fixture
def full():
    """Two data sets, two temperatures, all kinds of methods."""
    return made(("gsm8k", "mt-bench"), (0.0, 1.0))


@pytest.fixture
def small():
    """One data set, one temperature."""
    return made(("gsm8k",), (0.0,))


def made(datasets, temperatures):
    """A summary and its lines; a verify pass takes 10 ms."""
    run = make_run(METHODS, datasets, temperatures)
    rounds = {
        "ar": ([1] * 10, [0] * 10, []),
        "dflash": ([2] * 5, [7] * 5, []),
        "ddtree:8": ([1, 2, 3, 2, 2], [8] * 5, []),
        "ddtree:32": ([5] * 2, [32] * 2, []),
        "caddtree": ([2] * 5, [6, 9, 12, 9, 5], [0.012] * 5),
        "bastion": ([2] * 5, [3, 5, 8, 10, 4], [0.009] * 5),
    }
    lines = [
        make_line(
            method,
            f"s{sample}",
            dataset=dataset,
            temperature=temperature,
            seconds=2 - place / 6 - sample / 50,
            accepted_lengths=accepted,
            tree_sizes=sizes,
            stages=STAGES,
            verify_seconds=[0.01] * len(accepted),
            predicted_seconds=predicted,
        )
        for dataset in run.settings.datasets
        for temperature in run.settings.temperatures
        for sample in range(4)
        for place, (method, (accepted, sizes, predicted)) in enumerate(rounds.items())
    ]
    return make_summary(run, lines), lines


class Page(HTMLParser):
    """Tags with their attributes, and the text of each table cell."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.cells, self._open = [], [], False
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self._open = tag in ("td", "th")
        if self._open:
            self.cells.append("")

    def handle_data(self, data):
        if self._open:
            self.cells[-1] += data

    def handle_endtag(self, tag):
        self._open = False


@pytest.fixture
def axes(monkeypatch):
    """The axes of each picture, in order; none is rendered, which takes seconds."""
    drawn = []

    def keep(figure):
        pyplot.close(figure)
        drawn.append(figure.axes)
        return "UE5H"

    monkeypatch.setattr(report_plots, "encode_figure", keep)
    return drawn


@pytest.fixture
def no_pictures(monkeypatch):
    monkeypatch.setattr(report, "pictures", lambda summary, lines: [])


def test_holds_every_figure_and_all_provenance(full, no_pictures, tmp_path):
    summary, lines = full
    write_report(summary, lines, tmp_path / "report.html")
    page = Page((tmp_path / "report.html").read_text())
    assert len(summary.figures) == 3 * 2 * len(METHODS)
    for row in summary.figures:
        start = next(i for i in range(len(page.cells)) if page.cells[i : i + 3] == _row(row)[:3])
        assert page.cells[start : start + 9] == _row(row)
    facts = dict(zip(page.cells[:-1], page.cells[1:], strict=True))
    assert facts["command"] == "bastion bench --prompts 'a<b>.jsonl'"
    assert facts["date"] == "2025-01-02 03:04:05 UTC"
    assert facts["target"] == "tiny-target (digest feed)"
    assert facts["drafter"] == "tiny-drafter (digest beef)"
    assert facts["calibration"].startswith("of tiny-drafter, 2025-01-01")
    assert facts["peak memory of the process"] == "3 MiB"
    assert facts["versions"] == "python 3.11.7, torch 2.13.0"
    assert facts["device"] == "Some GPU"
    assert facts["max samples"] == "not set"
    assert facts["temperatures"] == "0.0, 1.0"


def _row(row):
    return [
        row.method,
        str(row.prompts),
        format_ratio(row.speedup),
        format_ratio(row.speedup_with_prefill),
        format_number(row.tokens_per_second, 1),
        format_number(row.tokens_per_second_with_prefill, 1),
        format_number(row.accepted_length, 2),
        format_number(row.tree_size, 1),
        "100%",
    ]


def test_needs_no_script_and_no_other_file(tmp_path):
    run = make_run(("ar", "ddtree:8", "$x^$"))
    rounds = {"accepted_lengths": [3, 2], "tree_sizes": [4, 4], "stages": STAGES}
    lines = [make_line(method, dataset="gsm8k", **rounds) for method in run.settings.methods]
    write_report(make_summary(run, lines), lines, tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    page = Page(text)
    assert not {"script", "link", "iframe", "object"} & {tag for tag, _ in page.tags}
    sources = [attributes["src"] for tag, attributes in page.tags if tag == "img"]
    assert len(sources) == 4
    for source in sources:
        assert base64.b64decode(source.removeprefix("data:image/png;base64,")).startswith(b"\x89PNG")
    assert not re.search(r"https?://|url\(|@import", text)
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


@pytest.mark.parametrize(
    ("change", "missing"),
    [
        ({"speedup": None}, "Speed-up by data set"),
        ({"accepted_lengths": [1] * 5}, "Accepted lengths"),
        ({"predicted_seconds": []}, "Verify time, predicted and measured"),
        ({"stages": {}}, "Time by stage"),
    ],
)
def test_a_plot_without_data_is_left_out(small, axes, change, missing):
    summary, lines = small
    if "speedup" in change:
        for row in summary.figures:
            row.speedup = None
    else:
        lines = [line.model_copy(update=change) for line in lines]
    assert {missing, *(picture.title for picture in pictures(summary, lines))} == TITLES
    assert len(axes) == len(TITLES) - 1


def test_each_temperature_and_data_set_has_its_panel(full, axes):
    assert {picture.title for picture in pictures(*full)} == TITLES
    titles = [[axis.get_title() for axis in panels] for panels in axes]
    temperatures = ["temperature 0", "temperature 1"]
    budgets = [f"{name}, {temperature}" for name in ("gsm8k", "mt-bench", "all") for temperature in temperatures]
    assert [titles[0], titles[1], titles[2], titles[4], titles[5]] == [*[temperatures] * 4, budgets]
    assert [label.get_text() for label in axes[0][0].get_xticklabels()] == ["gsm8k", "mt-bench", "all"]


def test_plots_of_trees_need_methods_that_choose_or_are_given_their_size(axes):
    run = make_run(("ar", "dflash"))
    rounds = {"accepted_lengths": [2, 2], "tree_sizes": [7, 6], "stages": STAGES}
    lines = [make_line(method, dataset="gsm8k", **rounds) for method in run.settings.methods]
    titles = [picture.title for picture in pictures(make_summary(run, lines), lines)]
    assert titles == ["Speed-up by data set", "Accepted lengths", "Time by stage"]


def test_methods_over_other_drafters_have_no_place_among_the_budgets(axes):
    run = make_run(("ar", "ddtree:8", "ddtree:16@auto+ngram", "auto@a:b", "ngram"))
    rounds = {"accepted_lengths": [2, 2], "tree_sizes": [7, 6], "stages": STAGES}
    lines = [make_line(method, dataset="gsm8k", **rounds) for method in run.settings.methods]
    shown = dict(zip((one.title for one in pictures(make_summary(run, lines), lines)), axes, strict=True))
    budgets = shown["Throughput against budget"][0]
    assert _curve(budgets, "fixed budget")[0] == [8]
    assert [found.get_label() for found in budgets.collections] == ["ddtree:8"]


def test_a_run_of_the_baseline_alone_or_of_nothing_has_no_plots_to_show(tmp_path):
    run = make_run(("ar",))
    for lines in ([], [make_line("ar", dataset="gsm8k", accepted_lengths=[1], tree_sizes=[0])]):
        summary = make_summary(run, lines)
        assert pictures(summary, lines) == []
        write_report(summary, lines, tmp_path / "report.html")
        assert "<img" not in (tmp_path / "report.html").read_text()


def test_names_are_escaped_in_the_page_and_in_plots(tmp_path):
    evil = "hf-assisted:<script>alert('$x^$')</script>"
    run = make_run(("ar", evil), ("<b>$\\frac$",))
    rounds = {"accepted_lengths": [3, 2], "tree_sizes": [4, 4], "stages": STAGES}
    lines = [make_line(method, dataset="<b>$\\frac$", **rounds) for method in ("ar", evil)]
    write_report(make_summary(run, lines), lines, tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    assert evil in Page(text).cells
    assert not {"script", "b"} & {tag for tag, _ in Page(text).tags}
    assert "&lt;b&gt;$\\frac$, temperature 0" in text


def test_a_report_that_cannot_be_written_leaves_the_old_one(small, no_pictures, tmp_path, monkeypatch):
    path = tmp_path / "report.html"
    path.write_text("old")
    with pytest.raises(BastionError, match="cannot write to"):
        write_report(*small, tmp_path / "missing" / "report.html")
    monkeypatch.setattr("bastion.files.os.replace", _full_disk)
    with pytest.raises(BastionError, match="No space left"):
        write_report(*small, path)
    assert path.read_text() == "old"
    assert [one.name for one in tmp_path.iterdir()] == ["report.html"]


def _full_disk(*_):
    raise OSError(28, "No space left on device")


def test_methods_keep_their_colours(small, axes):
    pictures(*small)
    colours = {}
    for panels in axes:
        for axis in panels:
            handles, labels = axis.get_legend_handles_labels()
            for handle, label in zip(handles, labels, strict=True):
                if label in METHODS and label != "ar":  # whose line at 1 is black
                    colours.setdefault(label, set()).add(_colour(handle))
    assert set(colours) == set(METHODS[1:])
    assert all(len(found) == 1 for found in colours.values())
    assert len(set.union(*colours.values())) == len(METHODS) - 1


def _colour(handle):
    if hasattr(handle, "patches"):  # bars
        return to_hex(handle.patches[0].get_facecolor())
    return to_hex(handle.get_facecolors()[0] if hasattr(handle, "get_facecolors") else handle.get_color())


def test_what_plots_show_is_what_the_lines_say(small, axes):
    summary, lines = small
    shown = {picture.title: panels for picture, panels in zip(pictures(summary, lines), axes, strict=True)}
    _, shares = _curve(shown["Accepted lengths"][0], "ddtree:8")
    assert shares == [0.2, 0.6, 0.2]
    points = zip(*_curve(shown["Tree size against context"][0], "bastion"), strict=True)
    assert set(points) == {(5, 3), (7, 5), (9, 8), (11, 10), (13, 4)}
    titles = [axis.get_title() for axis in shown["Verify time, predicted and measured"]]
    assert titles == ["caddtree: median relative error 20.0%", "bastion: median relative error 10.0%"]
    widths = [patch.get_width() for patch in shown["Time by stage"][0].patches]
    assert sum(widths) == pytest.approx(len(METHODS) * 1e3 * sum(STAGES.values()) / 10)
    rates = {row.method: row.tokens_per_second for row in summary.figures[: len(METHODS)]}
    budgets = shown["Throughput against budget"][0]
    assert _curve(budgets, "fixed budget") == ([8, 32], [rates["ddtree:8"], rates["ddtree:32"]])
    chosen = next(found for found in budgets.collections if found.get_label() == "bastion")
    assert chosen.get_offsets().tolist() == [[6, rates["bastion"]]]


def _curve(axis, label):
    found = next(line for line in axis.lines if line.get_label() == label)
    return tuple([float(value) for value in values] for values in found.get_data())
