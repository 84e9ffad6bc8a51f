"""Drafters whose weights are a checkpoint."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar, Self

import torch

from bastion.drafters.base import DraftContext, Proposal
from bastion.layers.linear import for_inference
from bastion.targets.base import Target


class Pretrained(ABC):
    """A `Drafter` made of a model and its target."""

    load_model: ClassVar[Any]  # static: from a folder or hub id, device and dtype to a model
    name: str
    digest: str
    depth: int
    feature_layers: tuple[int, ...]

    @abstractmethod
    def __init__(self, model: Any, target: Target, name: str):
        """Join a model and its target. Raises BastionError if they were not made for each other."""

    @classmethod
    def load(
        cls,
        source: str | Path,
        target: Target,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> Self:
        """Load a checkpoint (a folder or a hub id) for inference, on the target's device and in its dtype.

        Raises BastionError if there is none, it is damaged, or it was made for another target.
        """
        model = cls.load_model(source, device or target.device, dtype or target.dtype)
        drafter = cls(model.eval().requires_grad_(False), target, str(source))
        for_inference(model)
        return drafter

    @abstractmethod
    def propose(self, contexts: list[DraftContext]) -> list[Proposal]:
        """As `Drafter.propose`."""
