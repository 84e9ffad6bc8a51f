"""Waiting for a device, so that times mean something."""

from __future__ import annotations

import torch


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all that it was asked to; nothing to wait for on a CPU."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
