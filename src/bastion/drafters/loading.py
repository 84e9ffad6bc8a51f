"""From what a user calls a drafter to a drafter."""

from __future__ import annotations

from pathlib import Path

from bastion.drafters.base import Drafter
from bastion.drafters.dflash.checkpoint import USE
from bastion.drafters.dflash.drafter import DFlashDrafter
from bastion.drafters.ngram.drafter import NgramDrafter
from bastion.errors import BastionError
from bastion.targets.base import Target


def load_drafter(source: str | Path, target: Target) -> Drafter:
    """A drafter for `target`: "ngram", or the folder or hub id of a DFlash checkpoint.

    Raises BastionError if there is no such drafter or it was made for another target.
    """
    if source == "ngram":
        return NgramDrafter()
    if isinstance(source, str) and "/" not in source and not Path(source).is_dir():  # hub ids are owner/name
        raise BastionError(f"unknown drafter {source!r}: {USE}")
    return DFlashDrafter.load(source, target)
