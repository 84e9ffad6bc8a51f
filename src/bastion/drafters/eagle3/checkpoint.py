"""Reading and writing EAGLE-3 checkpoints, as SafeAILab and AngelSlim write them."""

from __future__ import annotations

from pathlib import Path

import torch

from bastion.drafters.checkpoint import assemble, fetch, read_tensors, save_checkpoint
from bastion.drafters.eagle3.config import Eagle3Config
from bastion.drafters.eagle3.model import Eagle3Model
from bastion.errors import BastionError


def save_model(model: Eagle3Model, folder: Path, max_shard_size: str = "5GB") -> None:
    """Write config and weights, with the mask `t2d` of the draft vocabulary that other readers expect."""
    tensors = model.state_dict()
    ids = model.token_ids()
    if ids is not None:
        tensors["t2d"] = torch.zeros(model.config.vocab, dtype=torch.bool).index_fill_(0, ids.cpu(), True)
    save_checkpoint(tensors, model.config.raw, folder, max_shard_size)


def load_model(source: str | Path, device: torch.device, dtype: torch.dtype) -> Eagle3Model:
    """Load a checkpoint from a folder or a Hugging Face hub id; the model can be trained and saved.

    Raises BastionError if there is none, or its config and tensors do not fit together.
    """
    folder = fetch(source)
    config = Eagle3Config.read(folder)
    tensors = read_tensors(folder, device)
    for unused in ("t2d", "embed_tokens.weight"):  # the tokens that d2t lists; the target's own embeddings
        tensors.pop(unused, None)
    if "fc.weight" not in tensors or tensors["fc.weight"].ndim != 2:
        raise BastionError(f"{folder} holds no fc.weight: this is not an EAGLE-3 drafter")
    taps = tensors["fc.weight"].shape[1] // config.hidden
    if config.target_layers and len(config.target_layers) != taps:
        raise BastionError(
            f"{folder}: config.json names {len(config.target_layers)} target layers, fc.weight reads {taps}: correct it"
        )
    return assemble(folder, tensors, lambda: Eagle3Model(config, taps), config.vocab, dtype)
