"""From what a user calls a model to a target and its tokenizer."""

from __future__ import annotations

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
from bastion.targets import zoo
from bastion.targets.base import Target
from bastion.targets.checkpoint import SafetensorsFolder
from bastion.targets.decoder import DecoderTarget, unsupported
from bastion.targets.download import sha256
from bastion.targets.gguf import first_line, load_gguf
from bastion.targets.huggingface import HuggingFaceTarget

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
FROM_HUB = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken"]
NOT_FROM_HUB = ["*/*", "consolidated*"]  # other formats of the same weights
_USE = f"use a model folder, a .gguf file, an id of the hub, or a name of the zoo ({', '.join(zoo.ZOO)})"


def load_target(
    source: str | Path,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    revision: str | None = None,
) -> tuple[Target, Any]:
    """The target and its transformers tokenizer.

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
        digest = sha256(path)
        if unsupported(model.config) is None:
            return DecoderTarget(model.config, model.state_dict().get, on, as_dtype, name, digest), tokenizer
        return HuggingFaceTarget(model.to(on).eval(), name, digest), tokenizer
    config, _ = load_configs(path)
    tokenizer = _load_tokenizer(path)
    weights = SafetensorsFolder(path)
    digest = weights.digest()
    if unsupported(config) is None and getattr(config, "quantization_config", None) is None:
        return DecoderTarget(config, weights, on, as_dtype, name, digest), tokenizer
    try:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=as_dtype).to(on).eval()
    except Exception as error:  # missing packages, remote code, quantisation: transformers raises all kinds
        raise BastionError(f"transformers cannot load {name}: {first_line(error)}") from error
    return HuggingFaceTarget(model, name, digest), tokenizer


def resolve_source(source: str | Path, revision: str | None = None) -> Path:
    """The local folder or .gguf file of a source; fetched if it is not on this machine yet.

    Raises BastionError if there is no such model, or no network to fetch it.
    """
    path = Path(source).expanduser()
    in_zoo, here = str(source) in zoo.ZOO, path.exists()
    if revision is not None and (in_zoo or here):
        raise BastionError(f"{source} has no revisions: leave the revision out, it is for hub ids")
    if in_zoo:
        with zoo.progress_bar() as progress:
            return zoo.fetch(str(source), progress)
    if here:
        if path.suffix == ".gguf" or (path / "config.json").is_file():
            return path
        raise BastionError(f"{source} is neither a .gguf file nor a model folder with a config.json")
    if isinstance(source, Path) or source.startswith((".", "/", "~")) or path.suffix == ".gguf":
        raise BastionError(f"there is no model at {source}")
    return _from_hub(source, revision)


def load_configs(path: Path) -> tuple[Any, Any | None]:
    """The transformers config and generation config (None if there is none) of a resolved source."""
    folder, extra = (path.parent, {"gguf_file": path.name}) if path.suffix == ".gguf" else (path, {})
    try:
        config = AutoConfig.from_pretrained(folder, **extra)
        if extra or not (folder / "generation_config.json").is_file():
            return config, None
        return config, GenerationConfig.from_pretrained(folder)
    except Exception as error:  # damaged JSON, unknown architectures
        raise BastionError(f"transformers cannot read the config of {path}: {first_line(error)}") from error


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
    except RuntimeError as error:
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
        native = device.type == "cpu" and _cpu_has_bfloat16()
    return torch.bfloat16 if native else torch.float32


def _cpu_has_bfloat16() -> bool:
    """Whether the CPU multiplies bfloat16. PyTorch's own answer counts emulation on AVX2, which is slow."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:  # not Linux
        return False
    return not {"avx512_bf16", "amx_bf16"}.isdisjoint(text.split())


def _load_tokenizer(folder: Path) -> Any:
    try:
        return AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # no tokenizer files, or packages that one kind of tokenizer needs
        raise BastionError(f"cannot load the tokenizer of {folder}: {first_line(error)}") from error


def _from_hub(source: str, revision: str | None) -> Path:
    at = f" at revision {revision}" if revision else ""
    try:
        folder = snapshot_download(source, revision=revision, allow_patterns=FROM_HUB, ignore_patterns=NOT_FROM_HUB)
    except HFValidationError as error:
        raise BastionError(f"{source} is no model: {_USE}") from error
    except GatedRepoError as error:
        raise BastionError(f"{source} is gated: accept its terms there and run: hf auth login") from error
    except RevisionNotFoundError as error:
        raise BastionError(f"{source} has no revision {revision}") from error
    except RepositoryNotFoundError as error:
        raise BastionError(f"the hub has no model {source} that you may read: {_USE}") from error
    except LocalEntryNotFoundError as error:
        raise BastionError(
            f"{source}{at} is not in the cache and the hub cannot be reached; when online, run: hf download {source}"
        ) from error
    except Exception as error:  # the hub's HTTP client is httpx or httpx2, whichever version is installed
        raise BastionError(f"cannot download {source}{at}: {first_line(error)}; try again") from error
    return Path(folder)
