"""Calibrations on disk: what one holds, what it is valid for, and when it is stale."""

from __future__ import annotations

import hashlib
import importlib.metadata
from datetime import datetime
from pathlib import Path
from typing import Annotated, Self, get_args

import torch
from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, ValidationError, model_validator

from bastion.cost.base import Measurement
from bastion.cost.ceilings import device_name
from bastion.cost.fit import MeasuredProfile, ModelName
from bastion.cost.roofline import CalibratedRoofline
from bastion.drafters.base import Drafter
from bastion.errors import BastionError
from bastion.files import write_text
from bastion.paths import cache_root
from bastion.targets.base import Target


class CalibrationKey(BaseModel):
    """What the measured times depend on. A calibration holds for this and nothing else."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    device: str
    threads: int  # of torch, on the CPU
    dtype: str
    attention: str  # the attention implementation's name
    target_digest: str
    drafter_digest: str
    depth: int  # the drafter's: its block size
    torch: str
    transformers: str
    bastion: str

    @classmethod
    def here(cls, target: Target, drafter: Drafter) -> CalibrationKey:
        """The key of `target` and `drafter` on this machine, as it is set up now."""
        return cls(
            device=device_name(target.device),
            threads=torch.get_num_threads(),
            dtype=str(target.dtype).removeprefix("torch."),
            attention=target.attention,
            target_digest=target.digest,
            drafter_digest=drafter.digest,
            depth=drafter.depth,
            torch=torch.__version__,
            transformers=importlib.metadata.version("transformers"),
            bastion=importlib.metadata.version("bastion"),
        )

    def same_models(self, other: CalibrationKey) -> bool:
        """Whether both are of the same target and drafter."""
        return (self.target_digest, self.drafter_digest) == (other.target_digest, other.drafter_digest)

    def same_passes(self, other: CalibrationKey) -> bool:
        """Whether both are of the same target in the same setting, whatever the drafter."""
        drafter = {"drafter_digest", "depth"}
        return self.model_dump(exclude=drafter) == other.model_dump(exclude=drafter)

    def differences(self, wanted: CalibrationKey) -> list[str]:
        """The fields that are not as wanted, such as "dtype float32 != bfloat16"."""
        mine, theirs = self.model_dump(), wanted.model_dump()
        return [f"{name} {mine[name]} != {theirs[name]}" for name in mine if mine[name] != theirs[name]]


class Passes(BaseModel):
    """What one machine measured of a target's verify passes, and the cost models fitted to it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    measurements: Annotated[tuple[Measurement, ...], Field(min_length=1)]
    roofline: CalibratedRoofline  # holds the measured ceilings too
    profile: MeasuredProfile
    errors: dict[ModelName, float]  # cross-validated, relative

    @model_validator(mode="after")
    def _usable(self) -> Self:
        ceilings = self.roofline.ceilings
        if set(self.errors) != set(get_args(ModelName)) or min(ceilings.flops, ceilings.bandwidth) <= 0:
            raise ValueError("both models' errors and positive ceilings are needed")
        return self


class Calibration(Passes):
    """What one machine measured for one target and drafter."""

    key: CalibrationKey
    date: datetime
    draft_seconds: NonNegativeFloat  # T_draft: the drafter's first pass
    deepen_seconds: NonNegativeFloat  # each further pass, of drafters that make several a round
    aux_seconds: NonNegativeFloat  # T_aux: growth, acceptance and commit


def save(calibration: Calibration) -> Path:
    """Write a calibration to the cache folder, all or nothing; the path it has there.

    Raises BastionError if the folder cannot be written.
    """
    path = _path(calibration.key)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, calibration.model_dump_json(indent=1))
    except OSError as error:
        raise BastionError(
            f"cannot write to {path.parent} ({error.strerror}); set BASTION_CACHE to another folder"
        ) from error
    return path


def load(key: CalibrationKey) -> tuple[Calibration | None, str]:
    """The stored calibration of exactly this key and "", or else None and one line that says why not.

    A file that cannot be read, or holds something else, counts as absent. When there is none of this key but
    one of the same target and drafter, the reason is what differs from the nearest such.
    """
    path = _path(key)
    if path.exists():
        found = _read(path)
        if isinstance(found, str):
            return None, found
        differences = found.key.differences(key)
        return (None, f"stale: {', '.join(differences)}") if differences else (found, "")
    stale: list[list[str]] = []
    for other in _files():
        match _read(other):
            case Calibration(key=theirs) if theirs.same_models(key):
                stale.append(theirs.differences(key))
    if stale:
        nearest = min(stale, key=lambda differences: len(differences))
        return None, f"stale: {', '.join(nearest)}"
    return None, "absent: this target and drafter have not been calibrated on this machine"


def of_target(key: CalibrationKey) -> Calibration | None:
    """The newest calibration that was made in the setting of `key`, whatever its drafter."""
    same = [found for found in stored() if found.key.same_passes(key)]
    return max(same, key=lambda found: found.date, default=None)


def forget_others(key: CalibrationKey) -> None:
    """Delete the calibrations of other drafters that were made in the setting of `key`.

    Raises BastionError if that is not allowed.
    """
    for file in _files():
        if isinstance(found := _read(file), Calibration) and found.key.same_passes(key) and found.key != key:
            try:
                file.unlink(missing_ok=True)
            except OSError as error:
                raise BastionError(f"cannot delete {file} ({error.strerror}), which is outdated") from error


def stored() -> list[Calibration]:
    """All calibrations that are stored and readable, whatever they are for."""
    return [found for file in _files() if isinstance(found := _read(file), Calibration)]


def unusable() -> list[str]:
    """One line for each stored file that is not a calibration."""
    return [found for file in _files() if isinstance(found := _read(file), str)]


def _files() -> list[Path]:
    return sorted((cache_root() / "calibrations").glob("*.json"))


def _path(key: CalibrationKey) -> Path:
    digest = hashlib.sha256(key.model_dump_json().encode()).hexdigest()
    return cache_root() / "calibrations" / f"{digest[:20]}.json"


def _read(path: Path) -> Calibration | str:
    """The file's calibration, or one line that says why it has none."""
    try:
        return Calibration.model_validate_json(path.read_bytes())
    except OSError as error:
        return f"unreadable: {path}: {error.strerror}"
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        return f"corrupt: {path} is not a calibration: {place + ': ' if place else ''}{first['msg']}"
