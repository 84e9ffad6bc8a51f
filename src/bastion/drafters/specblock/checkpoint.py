"""Reading and writing SpecBlock checkpoints."""

from __future__ import annotations

from pathlib import Path

import torch

from bastion.drafters.checkpoint import check_tensors, fetch, read_tensors, save_checkpoint, with_dtype
from bastion.drafters.specblock.config import SpecBlockConfig
from bastion.drafters.specblock.model import VOCABULARY, SpecBlockModel


def save_model(model: SpecBlockModel, folder: Path, max_shard_size: str = "5GB") -> None:
    """Write config and weights, as `save_checkpoint` does. The model must not have been through `for_inference`."""
    save_checkpoint(model.named_tensors(), model.config.raw, folder, max_shard_size)


def load_model(source: str | Path, device: torch.device, dtype: torch.dtype) -> SpecBlockModel:
    """Load a checkpoint from a folder or a Hugging Face hub id; the model can be trained and saved.

    Raises BastionError if there is none, or its config and tensors do not fit together.
    """
    folder = fetch(source)
    config = SpecBlockConfig.read(folder)
    tensors = read_tensors(folder, device)
    with torch.device("meta"):
        model = SpecBlockModel(config)
    check_tensors(folder, tensors, model.named_tensors(), config.body.vocab)
    if VOCABULARY in tensors:
        tensors[f"body.{VOCABULARY}"] = tensors.pop(VOCABULARY)
    model.load_state_dict(with_dtype(tensors, dtype), assign=True)
    return model
