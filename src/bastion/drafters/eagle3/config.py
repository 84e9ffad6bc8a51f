"""`config.json` of an EAGLE-3 checkpoint."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import LlamaConfig

from bastion.drafters.checkpoint import read_config
from bastion.errors import BastionError
from bastion.layers.rotary import SUPPORTED

ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
UNSUPPORTED = ("norm_before_residual", "norm_before_fc", "parallel_drafting", "attention_bias", "mlp_bias")
# Variants of the network that change what it computes.


@dataclass(frozen=True, slots=True)
class Eagle3Config:
    """Sizes of an EAGLE-3 drafter: a Llama body of one layer, a draft vocabulary, and the target layers it reads.

    The layout is that of SafeAILab's checkpoints (github.com/SafeAILab/EAGLE), which AngelSlim's share. Make one with
    `from_dict` or `read`.
    """

    raw: dict[str, Any]  # the file's content, written back as it is
    body: Any  # the same as a transformers LlamaConfig
    layers: int  # one
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int  # the target's vocabulary
    draft_vocab: int | None  # size of a reduced draft vocabulary; None: the target's own
    target_layers: tuple[int, ...]  # as in `Target.feature_layers`; none: the file does not say (see `for_target`)
    num_target_layers: int | None  # layers of the target it was made for, where the file says so

    @classmethod
    def read(cls, folder: Path) -> Eagle3Config:
        """Read `folder/config.json`. Raises BastionError if it is missing or cannot be used."""
        return cls.from_dict(read_config(folder))

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> Eagle3Config:
        """Check the content of a config.json. Raises BastionError with the key that cannot be used."""
        for key in UNSUPPORTED:
            if raw.get(key):
                raise BastionError(f"config.json sets {key}: such EAGLE-3 drafters are not supported")
        try:
            body = LlamaConfig.from_dict(copy.deepcopy(raw))  # from_dict writes into nested dictionaries
        except (StrictDataclassError, KeyError, TypeError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise BastionError(f"config.json does not describe a Llama body: {reason}") from None
        if body.num_hidden_layers != 1 or body.hidden_act != "silu":
            raise BastionError("config.json: an EAGLE-3 drafter has num_hidden_layers 1 and hidden_act 'silu'")
        if (kind := body.rope_parameters["rope_type"]) not in SUPPORTED:
            raise BastionError(f"RoPE scaling {kind!r} is not supported; supported: {', '.join(SUPPORTED)}")
        if body.num_attention_heads % body.num_key_value_heads:
            raise BastionError("config.json: num_attention_heads must be a multiple of num_key_value_heads")
        if raw.get("target_hidden_size") not in (None, body.hidden_size):
            raise BastionError("config.json: a target_hidden_size other than hidden_size is not supported")
        draft_vocab = raw.get("draft_vocab_size")
        if draft_vocab is not None and not (type(draft_vocab) is int and 1 <= draft_vocab <= body.vocab_size):
            raise BastionError(f"config.json: draft_vocab_size must be 1 to {body.vocab_size}, not {draft_vocab!r}")
        return cls(
            raw=raw,
            body=body,
            layers=body.num_hidden_layers,
            hidden=body.hidden_size,
            heads=body.num_attention_heads,
            kv_heads=body.num_key_value_heads,
            head_dim=body.head_dim,
            intermediate=body.intermediate_size,
            vocab=body.vocab_size,
            draft_vocab=None if draft_vocab in (None, body.vocab_size) else draft_vocab,
            target_layers=_layer_ids(raw),
            num_target_layers=raw.get("num_target_layers"),
        )

    def for_target(self, layers: int) -> Eagle3Config:
        """This config with the layers that are read of a target of so many layers.

        Where the file does not say, those of the reference code: the inputs of layers 2, layers // 2 and layers - 3.
        """
        return replace(self, target_layers=self.target_layers or tuple(i - 1 for i in (2, layers // 2, layers - 3)))


def _layer_ids(raw: dict[str, Any]) -> tuple[int, ...]:
    """The target layers, as far as the file names them.

    `target_layer_ids` is ours. Others write `eagle_aux_hidden_state_layer_ids`, at the top or in `eagle_config`, in one
    of two ways: ids that begin with 1 name layers whose output is read, others name layers whose input is read.
    """
    nested = raw.get("eagle_config") or {}
    ids, shift = nested.get("target_layer_ids"), 0
    if ids is None:
        ids = nested.get("eagle_aux_hidden_state_layer_ids", raw.get("eagle_aux_hidden_state_layer_ids"))
        shift = 0 if ids and ids[0] == 1 else 1
    if ids is None:
        return ()
    if not (isinstance(ids, list) and ids and all(type(i) is int for i in ids)):
        raise BastionError("config.json: the layer ids of eagle_config must list the target layers to read")
    return tuple(i - shift for i in ids)
