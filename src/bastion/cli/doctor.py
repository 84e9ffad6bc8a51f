"""`bastion doctor`: what is here, and what would be slow or wrong."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from typing import TYPE_CHECKING

import typer

from bastion.cli import options

if TYPE_CHECKING:
    import torch

    from bastion.cost.store import CalibrationKey


def command(device: options.Device = None, dtype: options.Dtype = None) -> None:
    """Print versions, the device and its measured ceilings, stored calibrations, and what to mend."""
    import torch
    from rich.console import Console

    from bastion.cost import ceilings, store
    from bastion.paths import cache_root
    from bastion.targets import zoo
    from bastion.targets.loading import resolve_device, resolve_dtype

    console = Console(highlight=False, markup=False, soft_wrap=True)
    on = resolve_device(device)
    default, chosen = resolve_dtype(None, on), resolve_dtype(dtype, on)
    packages = ("bastion", "torch", "transformers", "tokenizers", "safetensors", "numpy", "scipy")
    console.print("versions: python", platform.python_version(), end="")
    for package in packages:
        console.print(f", {package} {importlib.metadata.version(package)}", end="")
    name = ceilings.device_name(on)
    console.print(f"\ndevice: {on} ({name}), {torch.get_num_threads()} threads of {os.cpu_count()} processors")
    console.print(f"dtype: {_short(chosen)} (default here: {_short(default)})")
    found = ceilings.measure_ceilings(on, chosen)
    console.print(f"ceilings: {found.flops / 1e9:.0f} GFLOP/s, {found.bandwidth / 1e9:.1f} GB/s, measured now")
    if sheet := ceilings.datasheet(name):
        console.print(f"datasheet: {sheet.flops / 1e9:.0f} GFLOP/s, {sheet.bandwidth / 1e9:.1f} GB/s")
    console.print(f"cache: {cache_root()}")
    for model in zoo.list_models():
        console.print(f"model {model.name}: {model.folder or 'not fetched'}")
    calibrations = store.stored()
    for calibration in calibrations:
        key = calibration.key
        console.print(
            f"calibration of {calibration.date:%Y-%m-%d}: {key.device}, {key.threads} threads, {key.dtype}, "
            f"target {key.target_digest[:12]}, drafter {key.drafter_digest[:12]}: {_validity(key, on)}"
        )
    if not calibrations:
        console.print("calibration: none yet; the first generation measures, or run: bastion calibrate")
    problems = [*_slow(on, chosen, default), *(f"wrong: {line}; delete it" for line in store.unusable())]
    for problem in problems:
        console.print(f"! {problem}")
    if not problems:
        console.print("nothing wrong was found")
    if any(problem.startswith("wrong") for problem in problems):
        raise typer.Exit(1)


def _validity(key: CalibrationKey, device: torch.device) -> str:
    """Whether a calibration is of this machine as it is set up now, whatever its models."""
    import torch

    from bastion.cost.ceilings import device_name

    here = {
        "device": device_name(device),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        **{package: importlib.metadata.version(package) for package in ("transformers", "bastion")},
    }
    stale = [f"{name} {getattr(key, name)} != {value}" for name, value in here.items() if getattr(key, name) != value]
    return f"stale: {', '.join(stale)}" if stale else "valid here"


def _slow(device: torch.device, chosen: torch.dtype, default: torch.dtype) -> list[str]:
    """What would be slow here."""
    import torch

    problems = []
    if device.type == "cpu":
        if torch.cuda.is_available():
            problems.append("slow: a GPU is here but not used; leave out --device cpu")
        if chosen != default and _short(default) == "float32":
            problems.append(f"slow: this CPU emulates {_short(chosen)}; verifying many rows costs several times more")
        processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        if torch.get_num_threads() > processors:
            problems.append(f"slow: more threads than processors; set OMP_NUM_THREADS={processors}")
        load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
        if load > 0.5 * processors:
            problems.append(f"slow: other programs use this machine (load {load:.1f}); timings will be off")
        if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
            problems.append("slow: this torch was built without oneDNN")
    return problems


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
