"""Reading and writing SpecBlock checkpoints."""

from __future__ import annotations

from pathlib import Path

import torch

from bastion.drafters.checkpoint import assemble, fetch, read_tensors, save_checkpoint
from bastion.drafters.specblock.config import SpecBlockConfig
from bastion.drafters.specblock.model import SpecBlockModel


def save_model(model: SpecBlockModel, folder: Path, max_shard_size: str = "5GB") -> None:
    """Write config and weights, as `save_checkpoint` does. The model must not have been through `for_inference`."""
    save_checkpoint(model.state_dict(), model.config.raw, folder, max_shard_size)


def load_model(source: str | Path, device: torch.device, dtype: torch.dtype) -> SpecBlockModel:
    """Load a checkpoint from a folder or a Hugging Face hub id; the model can be trained and saved.

    Raises BastionError if there is none, or its config and tensors do not fit together.
    """
    folder = fetch(source)
    config = SpecBlockConfig.read(folder)
    return assemble(folder, read_tensors(folder, device), lambda: SpecBlockModel(config), config.body.vocab, dtype)
