"""What the config of a transformers model says about its sizes and its context."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bastion.targets.base import ModelShape

NO_LIMIT = 1 << 30  # positions: recurrent models have no maximum


def model_shape(config: Any) -> ModelShape:
    """Sizes from a decoder's config. Models without attention have no heads."""
    hidden = config.hidden_size
    widths = ("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner")
    heads = _size(config, ("num_attention_heads",), 0)
    return ModelShape(
        layers=config.num_hidden_layers,
        hidden=hidden,
        heads=heads,
        kv_heads=_size(config, ("num_key_value_heads",), heads),
        head_dim=_size(config, ("head_dim",), hidden // max(heads, 1)),
        intermediate=_size(config, widths, 4 * hidden),
        vocab=config.vocab_size,
    )


def max_context(config: Any) -> int:
    """Positions up to which a decoder writes the same text however many tokens a forward pass holds.

    YaRN configs tend to state the length before scaling, so it is scaled here. LongRoPE and dynamic scaling end
    at their original length: behind it, transformers turns all rows of a pass by frequencies that depend on the
    pass's largest position, so that rows of a draft, or of another text, would change what is written.
    """
    limit = _size(config, ("max_position_embeddings", "max_seq_len", "seq_length"), NO_LIMIT)
    parameters = getattr(config, "rope_parameters", None) or {}
    by_layer_type = [one for one in parameters.values() if isinstance(one, dict)]
    for rope in by_layer_type or [parameters]:
        original = rope.get("original_max_position_embeddings")
        original = original or getattr(config, "original_max_position_embeddings", None) or limit
        if rope.get("rope_type") == "yarn":
            limit = max(limit, int(original * rope["factor"]))
        elif rope.get("rope_type") == "longrope":
            limit = min(limit, original)
    return limit  # dynamic scaling starts at max_position_embeddings


def _size(config: Any, names: Sequence[str], default: int) -> int:
    """The first of the config's `names` that is set; where layers differ (Gemma-3n, Gemma-4), the largest."""
    layers = getattr(config, "per_layer_config", None) or [config]
    for name in names:
        values = [value for layer in layers if (value := getattr(layer, name, None)) is not None]
        if values:
            return int(max(max(value) if isinstance(value, list) else value for value in values))
    return default
