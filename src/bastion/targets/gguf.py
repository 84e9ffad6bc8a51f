"""GGUF files, read through transformers and written as ordinary model folders."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any, BinaryIO

import torch
from huggingface_hub import save_torch_state_dict
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

from bastion.errors import BastionError

try:
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS as APPLIED
except ImportError:  # older transformers split as GPT-2 does, whatever the file says
    APPLIED = {}

PRE_TOKENIZERS = {"smollm", "gpt-2", "default", *APPLIED}
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9  # the other types of metadata values
ROPE_FACTORS = {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"}


def load_gguf(path: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    """A transformers model on the CPU, its weights dequantised to `dtype`, and the tokenizer.

    The config has no `quantization_config`, and the generation config all the ids that the file ends texts
    with. Raises BastionError if transformers cannot read the file, or would read it wrongly.
    """
    with one_line_errors(f"load {path}"):
        metadata, tensors = read_header(path)
        _check_pre_tokenizer(path, metadata)
        model, report = AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=dtype, output_loading_info=True
        )
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    check_complete(report, path)
    _check_rope(path, metadata, tensors, model.config)
    _set_end_ids(model, metadata)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    if metadata.get("tokenizer.ggml.pre") == "smollm":
        # Not one that transformers applies; SmolLM takes digits one by one, apart from the spaces before them.
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


@contextmanager
def one_line_errors(task: str) -> Iterator[None]:
    """Raise whatever transformers raises inside, and that can be anything, as a BastionError of one line."""
    try:
        yield
    except BastionError:
        raise
    except Exception as error:
        raise BastionError(f"transformers cannot {task}: {first_line(error)}") from error


def check_complete(report: dict[str, Any], source: str | Path) -> None:
    """Raise BastionError if transformers' loading report has weights that it made up, for want of the file's."""
    absent = sorted(map(str, [*report["missing_keys"], *report["mismatched_keys"]]))
    if absent:
        raise BastionError(
            f"{source} is incomplete: {len(absent)} weights do not fit or are missing, first {absent[0]}"
        )


def read_header(path: Path) -> tuple[dict[str, Any], set[str]]:
    """Metadata, arrays left out, and names of the tensors of a GGUF file (version 2 or 3, little-endian).

    The gguf package takes seconds for the same. Raises struct.error, KeyError or ValueError if it is damaged.
    """
    with path.open("rb") as file:
        magic, version, tensors, entries = _scalars(file, "4sIQQ")
        if magic != b"GGUF" or version not in (2, 3):
            raise ValueError("not a GGUF file of version 2 or 3")
        metadata = {}
        for _ in range(entries):
            key = _string(file)
            (kind,) = _scalars(file, "I")
            value = _value(file, kind)
            if value is not None:
                metadata[key] = value
        names = set()
        for _ in range(tensors):
            names.add(_string(file))
            (dimensions,) = _scalars(file, "I")
            _scalars(file, f"{dimensions}QIQ")  # sizes, type, offset
        return metadata, names


def _scalars(file: BinaryIO, form: str) -> tuple[Any, ...]:
    form = f"<{form}"
    return struct.unpack(form, file.read(struct.calcsize(form)))


def _string(file: BinaryIO) -> str:
    return file.read(*_scalars(file, "Q")).decode(errors="replace")


def _value(file: BinaryIO, kind: int) -> Any:
    """The next metadata value of this type; None for an array, which is skipped."""
    if kind == STRING:
        return _string(file)
    if kind != ARRAY:
        return _scalars(file, SCALARS[kind])[0]
    element, count = _scalars(file, "IQ")
    if element in SCALARS:
        file.seek(count * struct.calcsize(SCALARS[element]), 1)
    else:
        for _ in range(count):
            _value(file, element)
    return None


def _check_pre_tokenizer(path: Path, metadata: dict[str, Any]) -> None:
    name = metadata.get("tokenizer.ggml.pre", "default")
    if metadata.get("tokenizer.ggml.model") == "gpt2" and name not in PRE_TOKENIZERS:
        raise BastionError(f"{path}: transformers does not know the pre-tokenizer {name!r}; use the model's folder")


def _check_rope(path: Path, metadata: dict[str, Any], tensors: set[str], config: Any) -> None:
    """Refuse a file with scaled RoPE (llama.cpp keeps Llama-3.1's as a tensor) that transformers read as plain."""
    factor = metadata.get(f"{metadata.get('general.architecture')}.rope.scaling.factor", 1.0)
    parameters = getattr(config, "rope_parameters", None) or {}  # of all layers, or of each type of layer
    kinds = {p.get("rope_type", "default") for p in (parameters, *parameters.values()) if isinstance(p, dict)}
    if kinds == {"default"} and (factor != 1.0 or tensors & ROPE_FACTORS):
        raise BastionError(f"{path}: transformers does not read this file's RoPE scaling; use the model's folder")


def _set_end_ids(model: Any, metadata: dict[str, Any]) -> None:
    """All of the file's ends: of text, turn and message. Without one, a config has its class's, which is no token."""
    ids = {metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")} - {None}
    if "tokenizer.ggml.eos_token_id" in metadata:
        known = model.config.eos_token_id  # of Gemma-4, transformers knows more
        ids.update(known if isinstance(known, list) else [known])
    else:
        model.config.eos_token_id = None
    model.generation_config.eos_token_id = sorted(ids) or None
