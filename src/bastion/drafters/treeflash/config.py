"""`config.json` of a TreeFlash checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bastion.drafters.checkpoint import read_config
from bastion.drafters.dflash.config import DFlashConfig
from bastion.errors import BastionError

TOP_M = 16  # of the paper; the public project's checkpoints do not say


@dataclass(frozen=True, slots=True)
class TreeFlashConfig:
    """Sizes and settings of a TreeFlash drafter: those of its DFlash body, and `treeflash_config`.

    The layout is the public project's (github.com/ETH-DISCO/TreeFlash). Its `treeflash_config.ar_approximation` names
    the correction, of which there is one, "swiglu"; its `candidate_tokens` is a tree size, which is the budget
    policy's to choose, and not read. Ours may add `treeflash_config.top_m` and `treeflash_config.intermediate_size`.
    Without `treeflash_config` its keys may stand by themselves.
    """

    raw: dict[str, Any]  # the file's content, written back as it is
    body: DFlashConfig
    intermediate: int  # width of the correction; the body's if nothing else is said
    top_m: int  # tokens of each slot that can have children: the most probable of the uncorrected draft

    @classmethod
    def read(cls, folder: Path) -> TreeFlashConfig:
        """Read `folder/config.json`. Raises BastionError if it is missing or cannot be used."""
        return cls.from_dict(read_config(folder))

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> TreeFlashConfig:
        """Check the content of a config.json. Raises BastionError with the key that cannot be used."""
        settings = raw.get("treeflash_config", raw if "ar_approximation" in raw else None)
        if not isinstance(settings, dict):
            raise BastionError("config.json has no treeflash_config: this is not a TreeFlash drafter")
        if (kind := settings.get("ar_approximation")) != "swiglu":
            raise BastionError(f"treeflash_config.ar_approximation {kind!r} is not supported: it must be 'swiglu'")
        body = DFlashConfig.from_dict(raw)
        names = body.draft_vocab or body.vocab
        top_m = settings.get("top_m", min(TOP_M, names))
        if type(top_m) is not int or not 1 <= top_m <= names:
            raise BastionError(f"treeflash_config.top_m is {top_m!r}, but must be a whole number from 1 to {names}")
        intermediate = settings.get("intermediate_size", body.intermediate)
        if type(intermediate) is not int or intermediate < 1:
            raise BastionError(
                f"treeflash_config.intermediate_size is {intermediate!r}, but must be a whole number above 0"
            )
        return cls(body.raw, body, intermediate, top_m)
