"""Reading and writing z-lab's DFlash checkpoints: a folder with `config.json` and `model.safetensors`."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from bastion.drafters.dflash.config import DFlashConfig
from bastion.drafters.dflash.model import DFlashModel
from bastion.errors import BastionError
from bastion.targets.loading import find_local, from_hub

FILES = ("config.json", "model.safetensors")
USE = 'use "ngram", or the folder or hub id of a DFlash checkpoint'


def save_model(model: DFlashModel, folder: Path) -> None:
    """Write config and weights; each file is written beside its place, then renamed: none is ever half there.

    The model must not have been through `for_inference`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    key = "torch_dtype" if "torch_dtype" in model.config.raw else "dtype"
    raw = model.config.raw | {key: str(model.dtype).removeprefix("torch.")}
    config, weights = (folder / f".{name}.part" for name in FILES)
    config.write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    save_file(tensors, weights, metadata={"format": "pt"})
    os.replace(weights, folder / FILES[1])
    os.replace(config, folder / FILES[0])


def load_model(source: str | Path, device: torch.device, dtype: torch.dtype) -> DFlashModel:
    """Load a checkpoint from a folder or a Hugging Face hub id; the model can be trained and saved.

    Raises BastionError if there is none, or its config and tensors do not fit together.
    """
    folder = _fetch(source)
    config = DFlashConfig.read(folder)
    path = folder / "model.safetensors"
    if not path.is_file():
        raise BastionError(f"{folder} holds no model.safetensors: give the folder of a DFlash checkpoint")
    try:
        tensors = load_file(path, device=str(device))
    except SafetensorError as error:
        raise BastionError(f"{path} cannot be read ({error}): fetch the checkpoint again") from None
    tensors.pop("t2d", None)  # EAGLE-3's mask of the same tokens that d2t lists
    if "d2t" in tensors and config.draft_vocab is None:
        size = len(tensors["d2t"])
        config = replace(config, draft_vocab=size, raw=config.raw | {"draft_vocab_size": size})
    with torch.device("meta"):
        model = DFlashModel(config)
    _check(folder, tensors, model.state_dict(), config)
    fitted = {name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}
    model.load_state_dict(fitted, assign=True)
    return model


def _fetch(source: str | Path) -> Path:
    path = find_local(source, "drafter", USE)
    if path is None:
        return from_hub(str(source), USE, FILES)
    if not path.is_dir():
        raise BastionError(f"{source} is no folder: {USE}")
    return path


def _check(folder: Path, found: dict[str, Tensor], wanted: dict[str, Tensor], config: DFlashConfig) -> None:
    problems = [f"{name} is missing" for name in sorted(wanted.keys() - found.keys())]
    problems += [f"{name} is unexpected" for name in sorted(found.keys() - wanted.keys())]
    problems += [
        f"{name} has shape {list(found[name].shape)} instead of {list(wanted[name].shape)}"
        for name in sorted(wanted.keys() & found.keys())
        if found[name].shape != wanted[name].shape
    ]
    if not problems and config.draft_vocab is not None:
        ids = found["d2t"].cpu() + torch.arange(config.draft_vocab)
        if ids.min() < 0 or ids.max() >= config.vocab or len(set(ids.tolist())) < len(ids):
            problems = [f"d2t does not name {len(ids)} different tokens of a vocabulary of {config.vocab}"]
    if problems:
        more = f", and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise BastionError(
            f"{folder}: model.safetensors does not fit its config.json: {', '.join(problems[:3])}{more}; "
            "fetch the checkpoint again, or correct the config"
        )
