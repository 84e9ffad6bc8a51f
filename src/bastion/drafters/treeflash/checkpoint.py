"""Reading and writing TreeFlash checkpoints."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from bastion.drafters.checkpoint import check_tensors, fetch, read_tensors, save_checkpoint, with_dtype
from bastion.drafters.treeflash.config import TreeFlashConfig
from bastion.drafters.treeflash.model import TreeFlashModel

VOCABULARY = "d2t"  # in a checkpoint; the public project has no reduced draft vocabulary, so it is named as DFlash's


def save_model(model: TreeFlashModel, folder: Path, max_shard_size: str = "5GB") -> None:
    """Write config and weights, as `save_checkpoint` does. The model must not have been through `for_inference`."""
    save_checkpoint(_named(model), model.config.raw, folder, max_shard_size)


def load_model(source: str | Path, device: torch.device, dtype: torch.dtype) -> TreeFlashModel:
    """Load a checkpoint from a folder or a Hugging Face hub id; the model can be trained and saved.

    Raises BastionError if there is none, or its config and tensors do not fit together.
    """
    folder = fetch(source)
    config = TreeFlashConfig.read(folder)
    tensors = read_tensors(folder, device)
    with torch.device("meta"):
        model = TreeFlashModel(config)
    check_tensors(folder, tensors, _named(model), config.body.vocab)
    if VOCABULARY in tensors:
        tensors[f"model.{VOCABULARY}"] = tensors.pop(VOCABULARY)
    model.load_state_dict(with_dtype(tensors, dtype), assign=True)
    return model


def _named(model: TreeFlashModel) -> dict[str, Tensor]:
    """The model's tensors, as a checkpoint names them."""
    tensors: dict[str, Tensor] = model.state_dict()
    if model.config.body.draft_vocab is not None:
        tensors[VOCABULARY] = tensors.pop(f"model.{VOCABULARY}")
    return tensors
