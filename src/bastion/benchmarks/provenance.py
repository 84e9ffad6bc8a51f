"""Where numbers come from: command, versions, machine, models and calibrations of a run."""

from __future__ import annotations

import importlib.metadata
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict

import bastion
from bastion.cost.ceilings import device_name
from bastion.cost.fit import ModelName
from bastion.cost.store import Calibration
from bastion.drafters.base import Drafter
from bastion.targets.base import Target

PACKAGES = ("bastion", "transformers", "numpy", "llama-cpp-python")
GIT_SECONDS = 10.0  # before an answer is given up


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Part(_Record):
    """A target or a drafter."""

    name: str  # without the folders of an absolute path
    digest: str  # of weights and settings


class CalibrationRecord(_Record):
    """Which calibration a run has used."""

    drafter_digest: str
    date: datetime
    errors: dict[ModelName, float]  # of each cost model: cross-validated, relative


class Provenance(_Record):
    """All that one needs in order to repeat a run, or to see why another one differs."""

    command: str
    date: datetime
    versions: dict[str, str]  # of packages, Python, and CUDA if it is used
    commit: str | None  # of the checkout that the package is run from, with "-dirty" if files were changed
    platform: str
    processor: str
    device: str  # what computes: the GPU, or again the processor
    threads: int  # of torch, on the CPU
    dtype: str
    attention: str
    target: Part
    drafters: tuple[Part, ...]
    calibrations: tuple[CalibrationRecord, ...]


def provenance(target: Target, drafters: Sequence[Drafter], calibrations: Sequence[Calibration] = ()) -> Provenance:
    """The provenance of a run that begins now in this process. `calibrations` are those in use."""
    return Provenance(
        command=_command(),
        date=datetime.now(UTC),
        versions=_versions(target.device),
        commit=_commit(Path(bastion.__file__).resolve().parents[2]),
        platform=platform.platform(),
        processor=device_name(torch.device("cpu")),
        device=device_name(target.device),
        threads=torch.get_num_threads(),
        dtype=str(target.dtype).removeprefix("torch."),
        attention=target.attention,
        target=_part(target),
        drafters=tuple(_part(drafter) for drafter in drafters),
        calibrations=tuple(
            CalibrationRecord(drafter_digest=one.key.drafter_digest, date=one.date, errors=one.errors)
            for one in calibrations
        ),
    )


def peak_memory(device: torch.device) -> int | None:
    """Most memory used so far, in bytes.

    On CUDA what torch had allocated on the device, since its statistics were last reset; elsewhere the resident size
    of the process since its start, loading included, which never falls again. None where the system does not say.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def _command() -> str:
    """What to type to have this run again: the program's name is without the folder where it is installed."""
    program, *arguments = sys.argv
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is not None and spec.origin == program:  # started as python -m MODULE
        return shlex.join(["python", "-m", spec.name.removesuffix(".__main__"), *arguments])
    return shlex.join([Path(program).name, *arguments])


def _versions(device: torch.device) -> dict[str, str]:
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    if device.type == "cuda" and torch.version.cuda is not None:
        versions["cuda"] = torch.version.cuda
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:  # only of llama-cpp-python, which is a matter of choice
            continue
    return versions


def _commit(root: Path) -> str | None:
    """The commit checked out at `root`; None if no checkout lies there, or git does not tell."""
    if not (root / ".git").exists():
        return None
    command = ["git", "--no-optional-locks", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        told = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=GIT_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return told.stdout.strip() or None


def _part(model: Target | Drafter) -> Part:
    path = Path(model.name)
    return Part(name=path.name if path.is_absolute() else model.name, digest=model.digest)
