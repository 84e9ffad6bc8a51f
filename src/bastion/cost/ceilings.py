"""How fast a device can compute and read at best: the two ceilings of the roofline."""

from __future__ import annotations

import platform
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from bastion.clock import synchronize

MATMUL_SIZES = (128, 256, 512, 1024, 2048, 4096, 8192)
MATMUL_SECONDS = 0.15  # larger products are tried until this much time is spent
CPU_BUFFER_BYTES = 2**27  # more than processors' caches hold
ACCELERATOR_BUFFER_BYTES = 2**30  # more yet, so that the time to launch does not show
REPEATS = 3
REPEAT_SECONDS = 0.1  # slow runs are repeated less


@dataclass(frozen=True, slots=True)
class Ceilings:
    """The limits of a device for one dtype."""

    flops: float  # floating-point operations a second
    bandwidth: float  # bytes a second


# Dense bfloat16 peak and memory bandwidth as vendors state them, of one variant where there are several (H100:
# SXM; A100: 80 GB PCIe). Only to be shown beside what was measured.
DATASHEETS = {
    "A5000": Ceilings(111e12, 768e9),
    "A6000": Ceilings(155e12, 768e9),
    "A100": Ceilings(312e12, 1935e9),
    "H100": Ceilings(989e12, 3350e9),
    "H200": Ceilings(989e12, 4800e9),
    "RTX PRO 6000": Ceilings(504e12, 1792e9),
}


def datasheet(name: str) -> Ceilings | None:
    """The datasheet's ceilings of the device called `name` (as by `device_name`); None for one not listed."""
    for model, ceilings in DATASHEETS.items():
        if re.search(rf"\b{model}\b", name, re.IGNORECASE):  # whole words: a GH200 is no H200
            return ceilings
    return None


def device_name(device: torch.device) -> str:
    """The hardware's own name, such as "NVIDIA H200" or "AMD EPYC 9B14"."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return f"{device.type} {platform.machine()}"
    info = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*:\s*(.+)$", info.read_text(), re.MULTILINE) if info.exists() else None
    return found[1].strip() if found else platform.processor() or platform.machine()


def measure_ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """Measure peak FLOP/s (square matrix products) and bytes/s (reading and copying a large buffer).

    Takes about a second on a slow CPU and needs about 2 GiB of memory on an accelerator.
    """
    with torch.inference_mode():
        return Ceilings(_peak_flops(device, dtype), _peak_bandwidth(device))


def _peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    best, spent = 0.0, 0.0
    for size in MATMUL_SIZES:
        left, right = (torch.ones(size, size, device=device, dtype=dtype) for _ in range(2))
        times = _times(partial(torch.matmul, left, right), device)
        best = max(best, 2 * size**3 / min(times))
        spent += sum(times)
        if spent > MATMUL_SECONDS:
            break
    return best


def _peak_bandwidth(device: torch.device) -> float:
    size = CPU_BUFFER_BYTES if device.type == "cpu" else ACCELERATOR_BUFFER_BYTES
    source = torch.ones(size // 4, device=device)
    destination = torch.empty_like(source)
    # Reading is what decoding does, but a CPU may add up more slowly than its memory delivers.
    read = size / min(_times(source.sum, device))
    copy = 2 * size / min(_times(partial(destination.copy_, source), device))
    return max(read, copy)


def _times(work: Callable[[], object], device: torch.device) -> list[float]:
    """Seconds of one or a few runs, after one that warms up."""
    work()
    times: list[float] = []
    while len(times) < REPEATS and sum(times) < REPEAT_SECONDS:
        synchronize(device)
        start = time.perf_counter()
        work()
        synchronize(device)
        times.append(time.perf_counter() - start)
    return times
