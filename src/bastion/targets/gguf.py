"""GGUF files, read through transformers and written as ordinary model folders."""

from __future__ import annotations

import mmap
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

from bastion.errors import BastionError

PRE_TOKENIZER = b"tokenizer.ggml.pre"


def load_gguf(path: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    """A transformers model on the CPU, its weights dequantised to `dtype`, and the tokenizer.

    The config has no `quantization_config`. Raises BastionError if transformers cannot read the file.
    """
    try:
        model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=dtype)
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    except Exception as error:  # whatever a damaged file or an unknown architecture makes transformers raise
        raise BastionError(f"transformers cannot load {path}: {first_line(error)}") from error
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    if _pre_tokenizer(path) == "smollm":
        # transformers 5.24 ignores the file's pre-tokenizer; SmolLM takes digits one by one, apart from the
        # spaces before them.
        backend = tokenizer.backend_tokenizer
        digits = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, backend.pre_tokenizer])
    return model, tokenizer


def convert(path: Path, folder: Path) -> None:
    """Write the model of a GGUF file into `folder`, as `from_pretrained` wants it: float32 safetensors.

    The shards are small (100 MB), so that reading them one after the other needs little memory.
    """
    with redirect_stderr(StringIO()):  # transformers' own progress bars would spoil the caller's display
        model, tokenizer = load_gguf(path, torch.float32)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    weights = model.state_dict()
    if model.config.tie_word_embeddings:
        del weights["lm_head.weight"]  # else the embedding would be saved under this name only
    save_torch_state_dict(weights, folder, max_shard_size="100MB")
    tokenizer.save_pretrained(folder)


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its type if it has none."""
    return next(iter(str(error).strip().splitlines()), "") or type(error).__name__


def _pre_tokenizer(path: Path) -> str | None:
    """The name after `tokenizer.ggml.pre` in the metadata: key, uint32 type, uint64 length, text."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        start = data.find(PRE_TOKENIZER)
        if start < 0:
            return None
        start += len(PRE_TOKENIZER) + 4
        length = int.from_bytes(data[start : start + 8], "little")
        return data[start + 8 : start + 8 + length].decode(errors="replace")
