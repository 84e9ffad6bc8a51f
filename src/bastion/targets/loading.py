"""From what a user calls a model to a target and its tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from bastion.errors import BastionError
from bastion.layers.linear import cpu_has_bfloat16
from bastion.targets import zoo
from bastion.targets.base import Target
from bastion.targets.checkpoint import SafetensorsFolder
from bastion.targets.decoder import DecoderTarget, unsupported
from bastion.targets.download import sha256
from bastion.targets.gguf import check_complete, first_line, load_gguf, one_line_errors
from bastion.targets.huggingface import HuggingFaceTarget

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
FROM_HUB = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken")
NOT_FROM_HUB = ("*/*", "consolidated*")  # other formats of the same weights
_USE = f"use a model folder, a .gguf file, an id of the hub, or a name of the zoo ({', '.join(zoo.ZOO)})"


@dataclass(frozen=True, slots=True)
class LoadedTarget:
    """A target and what its checkpoint says about writing text with it; the last three are transformers'."""

    target: Target
    tokenizer: Any
    config: Any
    generation_config: Any | None


def load_target(
    source: str | Path,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    revision: str | None = None,
) -> LoadedTarget:
    """The target, its tokenizer and its configs.

    `source` is a name of the zoo, a model folder, a .gguf file, or an id of the Hugging Face hub (and only
    then may have a `revision`). Defaults: the first GPU if there is one, else the CPU; bfloat16 where the
    hardware multiplies it natively, else float32. Architectures that the lean decoder does not run go through
    transformers. Raises BastionError if anything is unknown, unreachable or unusable.
    """
    on = resolve_device(device)
    as_dtype = resolve_dtype(dtype, on)
    path, name = resolve_source(source, revision), str(source)
    if path.suffix == ".gguf":
        model, tokenizer = load_gguf(path, as_dtype)
        digest, configs = sha256(path), (model.config, model.generation_config)
        if unsupported(model.config) is None:
            lean = DecoderTarget(model.config, model.state_dict().get, on, as_dtype, name, digest)
            return LoadedTarget(lean, tokenizer, *configs)
        with one_line_errors(f"run {name}"):
            return LoadedTarget(HuggingFaceTarget(model.to(on).eval(), name, digest), tokenizer, *configs)
    configs = config, _ = load_configs(path)
    with one_line_errors(f"load the tokenizer of {path}"):
        tokenizer = AutoTokenizer.from_pretrained(path)
    weights = SafetensorsFolder(path)
    digest = weights.digest()
    if unsupported(config) is None and getattr(config, "quantization_config", None) is None:
        return LoadedTarget(DecoderTarget(config, weights, on, as_dtype, name, digest), tokenizer, *configs)
    with one_line_errors(f"load {name}"):  # missing packages, remote code, quantisation
        model, report = AutoModelForCausalLM.from_pretrained(path, dtype=as_dtype, output_loading_info=True)
        check_complete(report, name)
        return LoadedTarget(HuggingFaceTarget(model.to(on).eval(), name, digest), tokenizer, *configs)


def resolve_source(source: str | Path, revision: str | None = None) -> Path:
    """The local folder or .gguf file of a source; fetched if it is not on this machine yet.

    Raises BastionError if there is no such model, or no network to fetch it.
    """
    path, in_zoo = find_local(source, "model", _USE), str(source) in zoo.ZOO
    if revision is not None and (in_zoo or path):
        raise BastionError(f"{source} has no revisions: leave the revision out, it is for hub ids")
    if in_zoo:
        with zoo.progress_bar() as progress:
            return zoo.fetch(str(source), progress)
    if path is None:
        return from_hub(str(source), _USE, FROM_HUB, NOT_FROM_HUB, revision)
    if path.suffix == ".gguf" or (path / "config.json").is_file():
        return path
    raise BastionError(f"{source} is neither a .gguf file nor a model folder with a config.json")


def find_local(source: str | Path, what: str, use: str) -> Path | None:
    """The path of a `what` (model or drafter) on this machine; None if `source` may be the name of one elsewhere.

    Raises BastionError, with what to `use`, if it can only be a path and nothing is there.
    """
    if not isinstance(source, str | Path):
        raise BastionError(f"{source!r} is no {what}: {use}")
    try:
        path = Path(source).expanduser()
        if path.exists():
            return path
    except (OSError, RuntimeError, ValueError) as error:  # too long, no such user, a zero byte
        raise BastionError(f"{str(source)[:80]!r} is no {what}: {use}") from error
    if isinstance(source, Path) or source.startswith((".", "/", "~")) or path.suffix == ".gguf":
        raise BastionError(f"there is no {what} at {source}: {use}")
    return None


def load_configs(folder: Path) -> tuple[Any, Any | None]:
    """The transformers config and generation config (None if there is none) of a model folder."""
    with one_line_errors(f"read the config of {folder}"):  # damaged JSON, unknown architectures
        config = AutoConfig.from_pretrained(folder)
        if not (folder / "generation_config.json").is_file():
            return config, None
        return config, GenerationConfig.from_pretrained(folder)


def eos_ids(config: Any, generation_config: Any | None, tokenizer: Any) -> frozenset[int]:
    """Ids that end a text: the generation config's, else the config's, else the tokenizer's. May be empty."""
    for holder in (generation_config, config.get_text_config(), tokenizer):
        ids = getattr(holder, "eos_token_id", None)
        if ids is not None:
            return frozenset([ids] if isinstance(ids, int) else ids)
    return frozenset()


def resolve_device(device: str | torch.device | None = None) -> torch.device:
    """The device asked for, or the best one here. Raises BastionError if this machine does not have it."""
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        asked = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise BastionError(f"unknown device {device!r}: use cpu, cuda or cuda:N") from error
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    here = {accelerator.type: torch.accelerator.device_count()} if accelerator else {}
    here["cpu"] = 1
    if (asked.index or 0) >= here.get(asked.type, 0):
        names = ", ".join(f"{kind}:{i}" for kind, count in here.items() for i in range(count))
        raise BastionError(f"device {asked} is not available; this machine has: {names}")
    return asked


def resolve_dtype(dtype: str | torch.dtype | None, device: torch.device) -> torch.dtype:
    """The dtype asked for, or bfloat16 if the device multiplies it natively, else float32.

    Raises BastionError for a dtype that is not one of `DTYPES`.
    """
    if dtype is not None:
        asked = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
        if asked is None or asked not in DTYPES.values():
            raise BastionError(f"unknown dtype {dtype!r}: use {', '.join(DTYPES)}")
        return asked
    if device.type == "cuda":
        native = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        native = device.type == "cpu" and cpu_has_bfloat16()
    return torch.bfloat16 if native else torch.float32


def from_hub(
    source: str, use: str, allow: Sequence[str], ignore: Sequence[str] = (), revision: str | None = None
) -> Path:
    """The folder of a hub id in the cache, downloaded if need be: files that match `allow` and not `ignore`.

    Raises BastionError, with what to `use` instead or what to do, if there is no such id or no network.
    """
    at = f" at revision {revision}" if revision else ""
    try:
        folder = snapshot_download(source, revision=revision, allow_patterns=list(allow), ignore_patterns=list(ignore))
    except HFValidationError as error:
        raise BastionError(f"{source} is no model: {use}") from error
    except GatedRepoError as error:
        raise BastionError(f"{source} is gated: accept its terms there and run: hf auth login") from error
    except RevisionNotFoundError as error:
        raise BastionError(f"{source} has no revision {revision}") from error
    except RepositoryNotFoundError as error:
        raise BastionError(f"the hub has no model {source} that you may read: {use}") from error
    except LocalEntryNotFoundError as error:
        raise BastionError(
            f"{source}{at} is not in the cache and the hub cannot be reached; when online, run: hf download {source}"
        ) from error
    except Exception as error:  # the hub's HTTP client is httpx or httpx2, whichever version is installed
        raise BastionError(f"cannot download {source}{at}: {first_line(error)}; try again") from error
    return Path(folder)
