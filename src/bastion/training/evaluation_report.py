"""Evaluations as tables, as JSON and as a picture."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.table import Table

from bastion.files import write_text, writing
from bastion.plots import new_figure, save_figure
from bastion.training.evaluation import Evaluation


def evaluation_tables(evaluation: Evaluation) -> Group:
    """Accepted lengths by source, then accuracy and reliability by depth."""
    columns = evaluation.configurations
    title = f"accepted length: {evaluation.drafter} for {evaluation.target}, {evaluation.conversations} conversations"
    lengths = Table("source", *(one.name for one in columns), title=title)
    for source in columns[0].by_source:
        row = [one.by_source[source] for one in columns]
        lengths.add_row(source or "unnamed", *(f"{f.accepted_length:.2f}" for f in row))
    lengths.add_section()
    lengths.add_row("all", *(f"{one.overall.accepted_length:.2f}" for one in columns))
    lengths.add_row("nodes a tree", *(f"{one.overall.tree_size:.1f}" for one in columns))
    if columns[0].overall.tokens_per_second is not None:
        lengths.add_row("predicted tokens/s", *(f"{one.overall.tokens_per_second:.1f}" for one in columns))
    depths = Table(
        "depth", "right", "right when reached", "nodes", "predicted", "on the answer", "calibration error",
        title="by depth: the chain's tokens, and the nodes of the largest tree",
    )  # fmt: skip
    for position in evaluation.positions:
        cells = [str(position.depth), f"{position.accuracy:.1%}", _share(position.accuracy_when_reached)]
        if position.depth <= len(evaluation.reliability_by_depth):
            nodes = evaluation.reliability_by_depth[position.depth - 1]
            cells += [f"{nodes.nodes}", f"{nodes.predicted:.2%}", f"{nodes.actual:.2%}", f"{nodes.error:.4f}"]
        depths.add_row(*cells)
    summary = (
        f"largest tree: expected calibration error {evaluation.reliability.error:.4f}; a round, "
        f"{evaluation.expected_gain:.2f} nodes were expected on the answer and {evaluation.actual_gain:.2f} were"
    )
    return Group(lengths, depths, summary)


def comparison_table(evaluations: Mapping[str, Evaluation]) -> Table:
    """The figures that confidence changes, a column for each evaluation of the same conversations."""
    some = list(evaluations.values())
    conversations = some[0].conversations
    table = Table("", *evaluations, title=f"confidence, on {conversations} conversations that nothing was fitted to")
    table.add_row("expected calibration error", *(f"{one.reliability.error:.4f}" for one in some))
    table.add_row("nodes expected on the answer", *(f"{one.expected_gain:.3f}" for one in some))
    table.add_row("nodes on the answer", *(f"{one.actual_gain:.3f}" for one in some))
    table.add_section()
    for same in zip(*(one.configurations for one in some), strict=True):
        lengths = (f"{one.overall.accepted_length:.3f}" for one in same)
        table.add_row(f"accepted length, {same[0].name}", *lengths)
    last = [one.configurations[-1] for one in some]
    if last[0].overall.tokens_per_second is not None:
        table.add_section()
        table.add_row(f"nodes a tree, {last[0].name}", *(f"{one.overall.tree_size:.1f}" for one in last))
        speeds = (f"{one.overall.tokens_per_second:.2f}" for one in last)
        table.add_row(f"predicted tokens/s, {last[0].name}", *speeds)
    return table


def write_json(record: dict[str, Any], evaluations: Mapping[str, Evaluation], path: Path) -> None:
    """The evaluations under their labels, beside the rest of the record."""
    record = record | {"evaluations": {label: asdict(one) for label, one in evaluations.items()}}
    with writing(path.parent):
        write_text(path, json.dumps(record, indent=1) + "\n")


def write_plot(evaluations: Mapping[str, Evaluation], path: Path) -> None:
    """A PNG: reliability of the largest tree, its nodes on the answer by depth, the chain's accuracy by position."""
    figure, (bins, depths, accuracy) = new_figure(3)
    bins.plot([0, 1], [0, 1], color="0.7", linestyle=":")
    for label, one in evaluations.items():
        found = one.reliability.bins
        name = f"{label}: error {one.reliability.error:.4f}"
        (line,) = bins.plot([b.predicted for b in found], [b.actual for b in found], "o-", label=name)
        for share, style in (("predicted", "--"), ("actual", "-")):
            gains = [getattr(nodes, share) * nodes.nodes / one.tree_rounds for nodes in one.reliability_by_depth]
            depths.plot(range(1, len(gains) + 1), gains, style, color=line.get_color(), label=f"{label}: {share}")
    first = next(iter(evaluations.values()))  # the most probable token does not depend on confidence
    for label, field in (("right", "accuracy"), ("right when all before are", "accuracy_when_reached")):
        points = [(p.depth, value) for p in first.positions if (value := getattr(p, field)) is not None]
        accuracy.plot([depth for depth, _ in points], [value for _, value in points], "o-", label=label)
    bins.set(xlabel="predicted path probability", ylabel="share on the answer", title="reliability, largest tree")
    depths.set(xlabel="depth", ylabel="nodes on the answer, a round", title="gain, largest tree")
    accuracy.set(xlabel="depth", ylim=(0, 1), title="accuracy, chain")
    for axis in (bins, depths, accuracy):
        axis.legend(fontsize=7)
    figure.suptitle(f"{first.drafter} for {first.target}")
    save_figure(figure, path)


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"
