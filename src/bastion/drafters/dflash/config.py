"""`config.json` of a DFlash checkpoint."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import Qwen3Config

from bastion.drafters.checkpoint import read_config
from bastion.errors import BastionError
from bastion.layers.rotary import SUPPORTED

SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")


@dataclass(frozen=True, slots=True)
class DFlashConfig:
    """Sizes and settings of a DFlash drafter: a Qwen3 body plus the keys that tie it to a target.

    The layout is that of z-lab's checkpoints (github.com/z-lab/dflash): Qwen3's keys, `block_size`, and
    `dflash_config` with `mask_token_id` and `target_layer_ids`; ours may add `draft_temperatures`. Make one with
    `from_dict` or `read`.
    """

    raw: dict[str, Any]  # the file's content, written back as it is
    body: Any  # the same as a transformers Qwen3Config, whose spelling of RoPE is one for all versions
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int  # the target's vocabulary
    block_size: int  # the root and the masks behind it
    mask_token: int
    target_layers: tuple[int, ...]  # id i reads the output of the target's layer i, hidden_states[i + 1]
    num_target_layers: int | None  # layers of the target it was made for, where the file says so
    window: int | None  # positions that a sliding layer sees, its own included
    sliding: tuple[bool, ...]  # which layers are sliding (and causal inside the block)
    draft_vocab: int | None  # size of a reduced draft vocabulary; None: the target's own
    draft_temperatures: tuple[float, ...]  # of each drafted position, at the target's temperature 0; 1 unless fitted

    @classmethod
    def read(cls, folder: Path) -> DFlashConfig:
        """Read `folder/config.json`. Raises BastionError if it is missing or cannot be used."""
        return cls.from_dict(read_config(folder))

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> DFlashConfig:
        """Check the content of a config.json. Raises BastionError with the key that cannot be used."""
        raw = copy.deepcopy(raw)
        for key in SIZES:
            _integer(raw, key, 1)
        dflash = raw.get("dflash_config")
        if not isinstance(dflash, dict):
            raise BastionError("config.json has no dflash_config: this is not a DFlash drafter")
        ids = dflash.get("target_layer_ids")
        if not (isinstance(ids, list) and ids and all(type(i) is int for i in ids)):
            raise BastionError("dflash_config.target_layer_ids must list the target layers to read")
        body = _body(raw)
        sliding = tuple(kind == "sliding_attention" for kind in body.layer_types)
        vocab = body.vocab_size
        mask_token = _integer(dflash, "mask_token_id", 0)
        if mask_token >= vocab:
            raise BastionError(f"mask_token_id {mask_token} is outside the vocabulary of {vocab} tokens")
        draft_vocab = raw.get("draft_vocab_size")
        block_size = _integer(raw, "block_size", 2)
        return cls(
            raw=raw,
            body=body,
            layers=body.num_hidden_layers,
            hidden=body.hidden_size,
            heads=body.num_attention_heads,
            kv_heads=body.num_key_value_heads,
            head_dim=body.head_dim,
            intermediate=body.intermediate_size,
            vocab=vocab,
            block_size=block_size,
            mask_token=mask_token,
            target_layers=tuple(ids),
            num_target_layers=None if raw.get("num_target_layers") is None else _integer(raw, "num_target_layers", 1),
            window=_integer(raw, "sliding_window", 1) if any(sliding) else None,
            sliding=sliding,
            draft_vocab=None if draft_vocab in (None, vocab) else _integer(raw, "draft_vocab_size", 1),
            draft_temperatures=_temperatures(dflash, block_size - 1),
        )


def _body(raw: dict[str, Any]) -> Any:
    """The transformers view of the body; it reads every spelling that RoPE settings have had."""
    try:
        body = Qwen3Config.from_dict(copy.deepcopy(raw))  # from_dict writes into nested dictionaries
    except (StrictDataclassError, KeyError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise BastionError(f"config.json does not describe a Qwen3 body: {reason}") from None
    if body.hidden_act != "silu":
        raise BastionError(f"hidden_act {body.hidden_act!r} is not supported: DFlash drafters use 'silu'")
    if body.rope_parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise BastionError("config.json: DFlash drafters rotate whole heads; partial_rotary_factor must be 1")
    if (kind := body.rope_parameters["rope_type"]) not in SUPPORTED:
        raise BastionError(f"RoPE scaling {kind!r} is not supported; supported: {', '.join(SUPPORTED)}")
    if body.num_attention_heads % body.num_key_value_heads:
        raise BastionError(
            f"num_attention_heads {body.num_attention_heads} is not a multiple of "
            f"num_key_value_heads {body.num_key_value_heads}: correct config.json"
        )
    return body


def _temperatures(dflash: dict[str, Any], depth: int) -> tuple[float, ...]:
    if "draft_temperatures" not in dflash:
        return (1.0,) * depth
    values = dflash["draft_temperatures"]
    if not (
        isinstance(values, list)
        and len(values) == depth
        and all(type(value) in (int, float) and 0.01 <= value <= 100 for value in values)
    ):
        raise BastionError(
            f"dflash_config.draft_temperatures must list {depth} numbers (block_size less 1) from 0.01 to 100"
        )
    return tuple(map(float, values))


def _integer(values: dict[str, Any], key: str, least: int) -> int:
    value = values.get(key)
    if type(value) is not int or value < least:
        raise BastionError(f"config.json: {key} is {value!r}, but must be a whole number of at least {least}")
    return value
