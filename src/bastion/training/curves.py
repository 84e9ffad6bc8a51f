"""The log of a training run as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bastion.plots import new_figure, save_figure


def write_curves(log: Sequence[dict[str, Any]], path: Path) -> None:
    """A PNG of loss, accuracy by position and accepted length over the steps, on trained and held-back data."""
    figure, axes = new_figure(3)
    steps = [record["step"] for record in log]
    for name, style in (("train", "--"), ("held_back", "-")):
        axes[0].plot(steps, [record[name]["loss"] for record in log], style, label=name.replace("_", " "))
        axes[2].plot(steps, [record[name]["accepted_length"] for record in log], style, label=name.replace("_", " "))
    for slot in range(len(log[0]["held_back"]["accuracy"])):
        accuracy = [record["held_back"]["accuracy"][slot] for record in log]
        axes[1].plot(steps, accuracy, label=f"position {slot + 1}")
    axes[0].set(title="loss", xlabel="steps")
    axes[1].set(title="accuracy, held back", xlabel="steps")
    axes[2].set(title="accepted length of a chain, bonus included", xlabel="steps")
    for axis in axes:
        axis.legend(fontsize=7)
    save_figure(figure, path)
