"""Checkpoints of drafters: a folder with `config.json` and `model.safetensors`.

Large weights may be split into several files with an index, as transformers does. SafeAILab's first checkpoints hold
pickled tensors instead, which are read too.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from huggingface_hub import save_torch_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from bastion.errors import BastionError
from bastion.targets.gguf import first_line
from bastion.targets.loading import find_local, from_hub

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLED = "pytorch_model.bin"
FILES = ("config.json", "model*.safetensors", INDEX)
Model = TypeVar("Model", bound=nn.Module)
USE = 'use "auto", "ngram", or the folder or hub id of a drafter\'s checkpoint'


def save_checkpoint(tensors: dict[str, Tensor], raw: dict[str, Any], folder: Path, max_shard_size: str = "5GB") -> None:
    """Write config and weights; each file is written beside its place, then renamed: none is ever half there.

    Weights above `max_shard_size` are split. `raw` is the config's content; it is told the dtype of the weights.
    """
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / ".part"
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    key = "torch_dtype" if "torch_dtype" in raw else "dtype"
    dtype = next(tensor.dtype for tensor in tensors.values() if tensor.is_floating_point())
    named = {public_name(name): tensor for name, tensor in tensors.items()}
    save_torch_state_dict(named, part, max_shard_size=max_shard_size)
    content = raw | {key: str(dtype).removeprefix("torch.")}
    (part / "config.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    written = sorted(part.iterdir(), key=lambda path: path.suffix == ".json")  # weights, then what refers to them
    new = {folder / path.name for path in written}
    (folder / PICKLED).unlink(missing_ok=True)  # first of all, or it would be read where the others are not there yet
    if folder / WEIGHTS not in new:  # several files cannot be replaced in one step: without an index nothing is loaded
        (folder / INDEX).unlink(missing_ok=True)
    for old in {*folder.glob(FILES[1]), folder / INDEX} - new:
        old.unlink(missing_ok=True)
    for path in written:
        path.chmod(0o644)  # safetensors makes files that nobody else can read
        os.replace(path, folder / path.name)
    part.rmdir()


def fetch(source: str | Path) -> Path:
    """The folder of a checkpoint: one that is here, or the copy of a hub id's. Raises BastionError if there is none."""
    path = find_local(source, "drafter", USE)
    if path is None:
        path = from_hub(str(source), USE, FILES)
        if not any(path.glob(FILES[1])):
            path = from_hub(str(source), USE, ("config.json", PICKLED))
    if not path.is_dir():
        raise BastionError(f"{source} is no folder: {USE}")
    return path


def read_config(folder: Path) -> dict[str, Any]:
    """The content of `folder/config.json`. Raises BastionError if it is missing or no JSON object."""
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BastionError(f"{folder} holds no config.json: give the folder of a drafter's checkpoint") from None
    except ValueError as error:
        raise BastionError(f"{path} is not JSON ({error}): fetch the checkpoint again") from None
    if not isinstance(raw, dict):
        raise BastionError(f"{path} does not hold a JSON object: fetch the checkpoint again")
    return raw


def read_tensors(folder: Path, device: torch.device) -> dict[str, Tensor]:
    """All tensors of a checkpoint. Raises BastionError if a file is missing or damaged."""
    tensors: dict[str, Tensor] = {}
    for path in _weight_files(folder):
        try:
            if path.name == PICKLED:
                tensors |= _unpickle(path, device)
            else:
                tensors |= load_file(path, device=str(device))
        except (SafetensorError, OSError, pickle.UnpicklingError) as error:
            raise BastionError(f"{path} cannot be read ({first_line(error)}): fetch the checkpoint again") from None
    return tensors


def _unpickle(path: Path, device: torch.device) -> dict[str, Tensor]:
    """The tensors of a file of torch.save; what is more than tensors is not executed, but an UnpicklingError."""
    try:
        found = torch.load(path, map_location=device, weights_only=True)
    except Exception as error:  # what a damaged file raises is chance
        raise pickle.UnpicklingError(first_line(error)) from error
    if not isinstance(found, dict) or not all(isinstance(k, str) and isinstance(v, Tensor) for k, v in found.items()):
        raise pickle.UnpicklingError("it holds something else than named tensors")
    return found


def _weight_files(folder: Path) -> list[Path]:
    """The file of the weights, or those that the index names."""
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    index = folder / INDEX
    if not index.is_file() and (folder / PICKLED).is_file():
        return [folder / PICKLED]
    try:
        return [folder / name for name in sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))]
    except FileNotFoundError:
        raise BastionError(f"{folder} holds no {WEIGHTS}: give the folder of a drafter's checkpoint") from None
    except (ValueError, LookupError, AttributeError, TypeError) as error:
        raise BastionError(f"{index} is no index of weights ({error}): fetch the checkpoint again") from None


def assemble(
    folder: Path, tensors: dict[str, Tensor], make: Callable[[], Model], vocab: int, dtype: torch.dtype
) -> Model:
    """The model that `make` makes, with the tensors of a checkpoint, the floating-point ones in `dtype`.

    Raises BastionError if they do not fit; see `check_tensors`.
    """
    with torch.device("meta"):
        model = make()
    wanted = model.state_dict()
    names = {public_name(name): name for name in wanted}
    check_tensors(folder, tensors, {public: wanted[name] for public, name in names.items()}, vocab)
    model.load_state_dict(
        {names[public]: one.to(dtype) if one.is_floating_point() else one for public, one in tensors.items()},
        assign=True,
    )
    return model


def public_name(name: str) -> str:
    """What a checkpoint calls a tensor: `d2t` stands at the top, whichever part of the model has it."""
    return "d2t" if name.endswith(".d2t") else name


def check_tensors(folder: Path, found: dict[str, Tensor], wanted: dict[str, Tensor], vocab: int) -> None:
    """Raise BastionError, with what differs, if tensors are missing, unknown or of another shape.

    `d2t`, where it is wanted, must name different tokens of a vocabulary of `vocab`.
    """
    problems = [f"{name} is missing" for name in sorted(wanted.keys() - found.keys())]
    problems += [f"{name} is unexpected" for name in sorted(found.keys() - wanted.keys())]
    problems += [
        f"{name} has shape {list(found[name].shape)} instead of {list(wanted[name].shape)}"
        for name in sorted(wanted.keys() & found.keys())
        if found[name].shape != wanted[name].shape
    ]
    if not problems and "d2t" in wanted:
        ids = draft_token_ids(found["d2t"]).cpu()
        if ids.min() < 0 or ids.max() >= vocab or len(set(ids.tolist())) < len(ids):
            problems = [f"d2t does not name {len(ids)} different tokens of a vocabulary of {vocab}"]
    if problems:
        more = f", and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise BastionError(
            f"{folder}: the weights do not fit config.json: {', '.join(problems[:3])}{more}; "
            "fetch the checkpoint again, or correct the config"
        )


def draft_token_ids(d2t: Tensor) -> Tensor:
    """Target ids [v] of a reduced draft vocabulary, from its offsets d2t [v]: draft id c is target id c + d2t[c]."""
    return d2t + torch.arange(len(d2t), device=d2t.device)


def weights_digest(settings: dict[str, Any], tensors: dict[str, Tensor]) -> str:
    """SHA-256 of settings and weights."""
    content = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        content.update(name.encode())
        content.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return content.hexdigest()
