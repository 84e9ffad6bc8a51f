"""From what a user calls a drafter to a drafter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bastion.drafters import checkpoint
from bastion.drafters.base import Drafter
from bastion.drafters.checkpoint import USE
from bastion.drafters.dflash.drafter import DFlashDrafter
from bastion.drafters.eagle3.config import ARCHITECTURES as EAGLE3
from bastion.drafters.eagle3.drafter import Eagle3Drafter
from bastion.drafters.mixed import MixedDrafter
from bastion.drafters.ngram.drafter import NgramDrafter
from bastion.drafters.pretrained import Pretrained
from bastion.drafters.specblock.config import ARCHITECTURE as SPECBLOCK
from bastion.drafters.specblock.drafter import SpecBlockDrafter
from bastion.drafters.treeflash.drafter import TreeFlashDrafter
from bastion.errors import BastionError
from bastion.targets.base import Target

SHIPPED = {"smollm2-135m-dflash": ("smollm2-135m", "HuggingFaceTB/SmolLM2-135M-Instruct")}
# Drafters that come with the package, as checkpoints in `shipped/`, and what their targets are called.

MIXED = "+ngram"  # behind a drafter's name: with continuations from the text itself in the same tree

FAMILIES: dict[str, type[Pretrained]] = {
    "dflash": DFlashDrafter,
    "treeflash": TreeFlashDrafter,
    "eagle3": Eagle3Drafter,
    "specblock": SpecBlockDrafter,
}


def check_drafter(drafter: str | Path | Drafter) -> None:
    """Raise BastionError for what can neither name a drafter nor be one."""
    if not isinstance(drafter, str | Path) and not hasattr(drafter, "propose"):
        raise BastionError(f"{drafter!r} is no drafter: use a name, a folder, a hub id, or an object with propose()")


def load_drafter(source: str | Path, target: Target) -> Drafter:
    """A drafter for `target`.

    `source` is "ngram", a name of `SHIPPED`, or the folder or hub id of a checkpoint of any family; "+ngram" behind it
    mixes in the text's own continuations. "auto" is the drafter that comes with the package for this target with
    "+ngram", else "ngram". Raises BastionError if there is no such drafter or it was made for another target.
    """
    if source == "auto":
        source = next((name + MIXED for name, targets in SHIPPED.items() if target.name in targets), "ngram")
    if isinstance(source, str) and source.endswith(MIXED):
        return MixedDrafter(load_drafter(source.removesuffix(MIXED), target))
    if source == "ngram":
        return NgramDrafter()
    folder = checkpoint.fetch(checkpoint_source(source))
    drafter = FAMILIES[family(checkpoint.read_config(folder))].load(folder, target)
    drafter.name = str(source)
    return drafter


def family(raw: dict[str, Any]) -> str:
    """Which of `FAMILIES` a checkpoint with this config.json belongs to."""
    architectures = raw.get("architectures") or []
    if any(name in EAGLE3 for name in architectures):
        return "eagle3"
    if SPECBLOCK in architectures:
        return "specblock"
    return "treeflash" if "treeflash_config" in raw or "ar_approximation" in raw else "dflash"


def checkpoint_source(source: str | Path) -> str | Path:
    """The folder or hub id of a checkpoint, also of one that comes with the package.

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
