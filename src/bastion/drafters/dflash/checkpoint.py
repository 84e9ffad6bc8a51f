"""Reading and writing z-lab's DFlash checkpoints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from bastion.drafters.checkpoint import assemble, fetch, read_tensors, save_checkpoint
from bastion.drafters.dflash.config import DFlashConfig
from bastion.drafters.dflash.model import DFlashModel


def save_model(model: DFlashModel, folder: Path, max_shard_size: str = "5GB") -> None:
    """Write config and weights, as `save_checkpoint` does. The model must not have been through `for_inference`."""
    save_checkpoint(model.state_dict(), model.config.raw, folder, max_shard_size)


def load_model(source: str | Path, device: torch.device, dtype: torch.dtype) -> DFlashModel:
    """Load a checkpoint from a folder or a Hugging Face hub id; the model can be trained and saved.

    Raises BastionError if there is none, or its config and tensors do not fit together.
    """
    folder = fetch(source)
    config = DFlashConfig.read(folder)
    tensors = read_tensors(folder, device)
    tensors.pop("t2d", None)  # EAGLE-3's mask of the same tokens that d2t lists
    if "d2t" in tensors and config.draft_vocab is None:
        size = len(tensors["d2t"])
        config = replace(config, draft_vocab=size, raw=config.raw | {"draft_vocab_size": size})
    return assemble(folder, tensors, lambda: DFlashModel(config), config.vocab, dtype)
