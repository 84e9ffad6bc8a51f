"""Reading and writing z-lab's DFlash checkpoints: a folder with `config.json` and `model.safetensors`.

Large weights may be split into several files with an index, as transformers does.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import torch
from huggingface_hub import save_torch_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from bastion.drafters.dflash.config import DFlashConfig
from bastion.drafters.dflash.model import DFlashModel
from bastion.errors import BastionError
from bastion.targets.loading import find_local, from_hub

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
FILES = ("config.json", "model*.safetensors", INDEX)
USE = 'use "auto", "ngram", or the folder or hub id of a DFlash checkpoint'


def save_model(model: DFlashModel, folder: Path, max_shard_size: str = "5GB") -> None:
    """Write config and weights; each file is written beside its place, then renamed: none is ever half there.

    Weights above `max_shard_size` are split. The model must not have been through `for_inference`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / ".part"
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    key = "torch_dtype" if "torch_dtype" in model.config.raw else "dtype"
    raw = model.config.raw | {key: str(model.dtype).removeprefix("torch.")}
    save_torch_state_dict(model.state_dict(), part, max_shard_size=max_shard_size)
    (part / "config.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
    written = sorted(part.iterdir(), key=lambda path: path.suffix == ".json")  # weights, then what refers to them
    new = {folder / path.name for path in written}
    if folder / WEIGHTS not in new:  # several files cannot be replaced in one step: without an index nothing is loaded
        (folder / INDEX).unlink(missing_ok=True)
    for old in {*folder.glob(FILES[1]), folder / INDEX} - new:
        old.unlink(missing_ok=True)
    for path in written:
        path.chmod(0o644)  # safetensors makes files that nobody else can read
        os.replace(path, folder / path.name)
    part.rmdir()


def load_model(source: str | Path, device: torch.device, dtype: torch.dtype) -> DFlashModel:
    """Load a checkpoint from a folder or a Hugging Face hub id; the model can be trained and saved.

    Raises BastionError if there is none, or its config and tensors do not fit together.
    """
    folder = _fetch(source)
    config = DFlashConfig.read(folder)
    tensors: dict[str, Tensor] = {}
    for path in _weight_files(folder):
        try:
            tensors |= load_file(path, device=str(device))
        except (SafetensorError, OSError) as error:
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


def _weight_files(folder: Path) -> list[Path]:
    """The file of the weights, or those that the index names."""
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    index = folder / INDEX
    try:
        return [folder / name for name in sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))]
    except FileNotFoundError:
        raise BastionError(f"{folder} holds no {WEIGHTS}: give the folder of a DFlash checkpoint") from None
    except (ValueError, LookupError, AttributeError, TypeError) as error:
        raise BastionError(f"{index} is no index of weights ({error}): fetch the checkpoint again") from None


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
            f"{folder}: the weights do not fit config.json: {', '.join(problems[:3])}{more}; "
            "fetch the checkpoint again, or correct the config"
        )
