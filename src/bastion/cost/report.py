"""A calibration as a table and as a picture."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from rich.console import Group
from rich.table import Table

from bastion.cost.base import FloatArray
from bastion.cost.fit import choose
from bastion.cost.store import Calibration
from bastion.decoding.budget import RoundCost, Throughput
from bastion.decoding.growth import grow
from bastion.drafters.base import LogProbs
from bastion.drafters.marginal import MarginalProposal
from bastion.plots import new_figure, save_figure

REFERENCE = (0.6, 0.15, 0.08, 0.05)  # a reference draft: probabilities of the best tokens at each of 7 depths


def fit_table(calibration: Calibration) -> Group:
    """Measured milliseconds of verify passes, and what both models say of them."""
    table = Table("rows", "context", "measured ms", "roofline ms", "profile ms", title=calibration.key.device)
    for m in sorted(calibration.measurements, key=lambda m: (m.context, m.rows)):
        rows = np.array([m.rows])
        predictions = [model.seconds(rows, m.context)[0] for model in (calibration.roofline, calibration.profile)]
        table.add_row(str(m.rows), str(m.context), *(f"{1e3 * s:.1f}" for s in (m.seconds, *predictions)))
    ceilings, errors = calibration.roofline.ceilings, calibration.errors
    lines = [
        f"ceilings: {ceilings.flops / 1e9:.0f} GFLOP/s, {ceilings.bandwidth / 1e9:.1f} GB/s ({calibration.key.dtype})",
        f"draft {1e3 * calibration.draft_seconds:.2f} ms, a further pass {1e3 * calibration.deepen_seconds:.2f} ms, "
        f"bookkeeping {1e3 * calibration.aux_seconds:.2f} ms a round",
        f"cross-validated error: roofline {errors['roofline']:.1%}, profile {errors['profile']:.1%}; "
        f"policy auto takes the {choose(errors)}",
    ]
    return Group(table, *lines)


def reference_gains(max_nodes: int) -> LogProbs:
    """Path probabilities of a reference draft, to show what budget a cost leads to."""
    marginals = torch.tensor(REFERENCE).log().expand(7, -1)
    return grow(MarginalProposal(marginals), 0, max_nodes).gains


def write_plot(calibration: Calibration, path: Path) -> None:
    """A PNG: measured points, both fits, and the budget that each of them leads to for a reference draft."""
    contexts = sorted({m.context for m in calibration.measurements})
    largest = max(m.rows for m in calibration.measurements)
    rows = np.arange(1, largest + 1)
    gains = reference_gains(largest - 1)
    figure, axes = new_figure(len(contexts), sharey=True)
    for axis, context in zip(axes, contexts, strict=True):
        here = [m for m in calibration.measurements if m.context == context]
        axis.plot([m.rows for m in here], [1e3 * m.seconds for m in here], "ko", label="measured")
        for name, model in (("roofline", calibration.roofline), ("profile", calibration.profile)):
            seconds: FloatArray = model.seconds(rows, context)
            (line,) = axis.plot(rows, 1e3 * seconds, label=name)
            cost = RoundCost(model, calibration.draft_seconds, calibration.aux_seconds)
            budget = Throughput(cost, largest - 1).choose(gains, [context], [1])
            axis.axvline(
                1 + budget,
                color=line.get_color(),
                linestyle=":",
                label=f"{name}: {budget} nodes for a reference draft",
            )
        axis.set(xlabel="rows of the verify pass", title=f"context {context}")
        axis.legend(fontsize=7)
    axes[0].set_ylabel("milliseconds")
    key = calibration.key
    figure.suptitle(f"{key.device}, {key.threads} threads, {key.dtype}")
    save_figure(figure, path)
