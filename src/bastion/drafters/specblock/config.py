"""`config.json` of a SpecBlock checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bastion.drafters.checkpoint import read_config
from bastion.drafters.dflash.config import DFlashConfig
from bastion.errors import BastionError

ARCHITECTURE = "SpecBlockDraftModel"
DEFAULTS: dict[str, Any] = {
    "positions": 4,  # of a block, as in the paper
    "passes": 2,  # as there
    "beam": 8,
    "rank_bounds": [1, 3, 8],
    "rank_widths": [1, 3, 8, 8],
    "coverage": 0.9,
}


@dataclass(frozen=True, slots=True)
class SpecBlockConfig:
    """Sizes and settings of a SpecBlock drafter: Qwen3's keys for its layers, and `specblock_config`.

    The layout is ours, for there is no public code: `specblock_config` has the names of the fields below, and
    `target_layer_ids`; what it leaves out is as in `DEFAULTS`. Make one with `from_dict` or `read`.

    The rank head sorts the rank of the target's token among the drafter's into buckets: up to the first of
    `rank_bounds`, from there up to the second, and so on; the last bucket is what lies beyond them all. A position's
    children are as many as `rank_widths` says of the first bucket by which the buckets' predicted probabilities sum to
    `coverage`. With 0 the path ends there, and no further block starts from it.
    """

    raw: dict[str, Any]  # the file's content, written back as it is
    body: DFlashConfig  # of the layers, and what ties them to a target
    positions: int  # that a block drafts, K
    passes: int  # most blocks of a path, M
    beam: int  # most nodes of a depth whose children are drafted
    rank_bounds: tuple[int, ...]  # highest rank of each bucket but the last
    rank_widths: tuple[int, ...]  # children of a position in each bucket
    coverage: float  # in (0, 1]

    @property
    def depth(self) -> int:
        """How deep a draft can be."""
        return self.positions * self.passes

    @classmethod
    def read(cls, folder: Path) -> SpecBlockConfig:
        """Read `folder/config.json`. Raises BastionError if it is missing or cannot be used."""
        return cls.from_dict(read_config(folder))

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> SpecBlockConfig:
        """Check the content of a config.json. Raises BastionError with the key that cannot be used."""
        given = raw.get("specblock_config")
        if not isinstance(given, dict):
            raise BastionError("config.json has no specblock_config: this is not a SpecBlock drafter")
        layers = given.get("target_layer_ids")
        if not (_whole(layers, 0) and layers):
            raise BastionError("specblock_config.target_layer_ids must list the target layers to read")
        if unknown := sorted(given.keys() - DEFAULTS.keys() - {"target_layer_ids"}):
            raise BastionError(f"specblock_config.{unknown[0]} is not known: remove it, or update bastion")
        settings = DEFAULTS | given
        for key in ("positions", "passes", "beam"):
            if not _whole([settings[key]], 1):
                raise BastionError(f"specblock_config.{key} is {settings[key]!r}, but must be a whole number above 0")
        bounds, widths, coverage = (settings[key] for key in ("rank_bounds", "rank_widths", "coverage"))
        if not (_whole(bounds, 1) and bounds and bounds == sorted(set(bounds))):
            raise BastionError("specblock_config.rank_bounds must list ranks from 1 on, ascending")
        if not (_whole(widths, 0) and len(widths) == len(bounds) + 1 and any(widths)):
            raise BastionError(
                f"specblock_config.rank_widths must list {len(bounds) + 1} numbers of children, one for each bucket"
            )
        if type(coverage) not in (int, float) or not 0 < coverage <= 1:
            raise BastionError(f"specblock_config.coverage is {coverage!r}, but must be above 0 and at most 1")
        tied = {
            "block_size": settings["positions"] + 1,
            "dflash_config": {"mask_token_id": 0, "target_layer_ids": layers},  # there are no masks
        }
        body = DFlashConfig.from_dict(raw | tied)
        if any(body.sliding):
            raise BastionError("config.json: a SpecBlock drafter has no sliding layers; correct layer_types")
        return cls(
            raw=raw,
            body=body,
            positions=settings["positions"],
            passes=settings["passes"],
            beam=settings["beam"],
            rank_bounds=tuple(bounds),
            rank_widths=tuple(widths),
            coverage=float(coverage),
        )


def _whole(values: Any, least: int) -> bool:
    """Whether this is a list of whole numbers of at least `least`."""
    return isinstance(values, list) and all(type(value) is int and value >= least for value in values)
