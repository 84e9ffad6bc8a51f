"""From what a user calls a drafter to a drafter."""

from __future__ import annotations

from pathlib import Path

from bastion.drafters.base import Drafter
from bastion.drafters.dflash.checkpoint import USE
from bastion.drafters.dflash.drafter import DFlashDrafter
from bastion.drafters.ngram.drafter import NgramDrafter
from bastion.errors import BastionError
from bastion.targets.base import Target

SHIPPED = {"smollm2-135m-dflash": ("smollm2-135m", "HuggingFaceTB/SmolLM2-135M-Instruct")}
# Drafters that come with the package, as DFlash checkpoints in `shipped/`, and what their targets are called.


def check_drafter(drafter: str | Path | Drafter) -> None:
    """Raise BastionError for what can neither name a drafter nor be one."""
    if not isinstance(drafter, str | Path) and not hasattr(drafter, "propose"):
        raise BastionError(f"{drafter!r} is no drafter: use a name, a folder, a hub id, or an object with propose()")


def load_drafter(source: str | Path, target: Target) -> Drafter:
    """A drafter for `target`.

    `source` is "auto" (the drafter that comes with the package for this target, else "ngram"), "ngram", a name of
    `SHIPPED`, or the folder or hub id of a DFlash checkpoint. Raises BastionError if there is no such drafter or it was
    made for another target.
    """
    if source == "auto":
        source = next((name for name, targets in SHIPPED.items() if target.name in targets), "ngram")
    if source == "ngram":
        return NgramDrafter()
    drafter = DFlashDrafter.load(checkpoint_source(source), target)
    drafter.name = str(source)
    return drafter


def checkpoint_source(source: str | Path) -> str | Path:
    """The folder or hub id of a DFlash checkpoint, also of one that comes with the package.

    Raises BastionError for a name that is neither.
    """
    if source in SHIPPED:
        return shipped_folder(str(source))
    if isinstance(source, str) and "/" not in source and not Path(source).is_dir():  # hub ids are owner/name
        raise BastionError(f"unknown drafter {source!r}: {USE}")
    return source


def shipped_folder(name: str) -> Path:
    """The folder of a drafter of `SHIPPED`."""
    return Path(__file__).parent / "shipped" / name
