"""Whether a drafter and a target were made for each other."""

from __future__ import annotations

from typing import Protocol

import torch

from bastion.errors import BastionError
from bastion.targets.base import Target


class Pairing(Protocol):
    """What a drafter's config says about its target."""

    @property
    def hidden(self) -> int:
        """The target's hidden size."""

    @property
    def vocab(self) -> int:
        """The target's vocabulary."""

    @property
    def target_layers(self) -> tuple[int, ...]:
        """The layers that are read, as in `Target.feature_layers`."""

    @property
    def num_target_layers(self) -> int | None:
        """Layers of the target, where the config says so."""


def check_target(config: Pairing, target: Target) -> None:
    """Raise BastionError, with what differs, if a drafter with this config was made for another target."""
    shape = target.shape
    outside = [i for i in config.target_layers if not 0 <= i < shape.layers]
    if config.vocab != shape.vocab:
        difference = f"has a vocabulary of {config.vocab} tokens, {target.name} of {shape.vocab}"
    elif config.hidden != shape.hidden:
        difference = f"has hidden size {config.hidden}, {target.name} {shape.hidden}"
    elif config.num_target_layers not in (None, shape.layers):
        difference = f"was made for {config.num_target_layers} layers, {target.name} has {shape.layers}"
    elif outside:
        difference = f"reads layers {outside}, {target.name} has layers 0 to {shape.layers - 1}"
    else:
        return
    raise BastionError(f"the drafter {difference}: use the drafter that was trained for this target")


def try_target(config: Pairing, target: Target) -> None:
    """Raise what the target raises if it does not give the drafter its layers or its head (both see `Target`)."""
    before = target.feature_layers
    target.set_feature_layers(config.target_layers)
    target.set_feature_layers(before)
    target.head(torch.zeros(1, config.hidden, device=target.device, dtype=target.dtype))
