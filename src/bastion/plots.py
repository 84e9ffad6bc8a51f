"""Pictures: matplotlib without a display, and files that are whole or not there."""

from __future__ import annotations

import base64
import importlib.util
import io
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


def new_figure(
    panels: int, width: float = 4.5, height: float = 4.0, columns: int | None = None, **options: Any
) -> tuple[Any, list[Any]]:
    """A figure with panels in a row, or in rows of `columns`, and its axes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    across = min(panels, columns or panels)
    down = -(-panels // across)
    size = width * across, height * down
    figure, axes = pyplot.subplots(down, across, figsize=size, squeeze=False, **options)
    for unused in axes.flat[panels:]:
        unused.set_axis_off()
    return figure, list(axes.flat[:panels])


def save_figure(figure: Any, path: Path) -> None:
    """Write a PNG beside its place, then rename it; closes the figure."""
    with writing(path.parent), replacing(path) as beside:
        _write_png(figure, beside)


def encode_figure(figure: Any) -> str:
    """A PNG in base64, to embed in a page; closes the figure."""
    buffer = io.BytesIO()
    _write_png(figure, buffer)
    return base64.b64encode(buffer.getvalue()).decode("ascii")


def _write_png(figure: Any, file: Path | io.BytesIO) -> None:
    from matplotlib import pyplot

    figure.tight_layout()
    try:
        figure.savefig(file, format="png", dpi=120)
    finally:
        pyplot.close(figure)
