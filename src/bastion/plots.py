"""Pictures: matplotlib without a display, and files that are whole or not there."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

from bastion.errors import BastionError
from bastion.files import replacing, writing


def check_plot(path: Path) -> None:
    """Raise BastionError if a plot could not be written there."""
    check_matplotlib()
    if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise BastionError(f"cannot write the plot to {path}: it is a folder, or its folder is missing or not writable")


def check_matplotlib() -> None:
    """Raise BastionError if matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise BastionError("plots need matplotlib; run: pip install 'bastion[plot]'")


def new_figure(panels: int, width: float = 4.5, height: float = 4.0, **options: Any) -> tuple[Any, list[Any]]:
    """A figure with panels in a row, and its axes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, panels, figsize=(width * panels, height), squeeze=False, **options)
    return figure, list(axes[0])


def save_figure(figure: Any, path: Path) -> None:
    """Write a PNG beside its place, then rename it; closes the figure."""
    from matplotlib import pyplot

    figure.tight_layout()
    with writing(path.parent), replacing(path) as beside:
        figure.savefig(beside, format="png", dpi=120)
    pyplot.close(figure)
