"""The lean decoder: Llama, Mistral, Qwen2, Qwen3 and SmolLM2 weights, few and large operations a layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from bastion.errors import BastionError
from bastion.layers.linear import Linear
from bastion.layers.norm import RMSNorm
from bastion.layers.rotary import SUPPORTED, RotaryEmbedding, rotate
from bastion.targets.attention import Part, TreeMask, plan
from bastion.targets.base import ModelShape, Rows, TreeSupport, Verification
from bastion.targets.cache import Slabs, SlotCache

Weights = Callable[[str], Tensor | None]  # a parameter by its transformers name; None if the model has none

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


def unsupported(config: Any) -> str | None:
    """Why the lean decoder cannot run a model with this transformers config; None if it can."""
    if config.model_type not in FAMILIES:
        return f"model type {config.model_type!r}"
    if config.hidden_act != "silu":
        return f"activation {config.hidden_act!r}"
    layer_types = getattr(config, "layer_types", None) or []
    if "sliding_attention" in layer_types or (config.model_type == "mistral" and config.sliding_window):
        return "sliding-window attention"
    if config.rope_parameters.get("rope_type", "default") not in SUPPORTED:
        return f"RoPE scaling {config.rope_parameters['rope_type']!r}"
    return None


@dataclass(slots=True)
class Layer:
    """Weights of one decoder layer; projections that read the same input are fused."""

    input_norm: RMSNorm
    qkv: Linear
    query_norm: RMSNorm | None  # of each head, Qwen3
    key_norm: RMSNorm | None
    output: Linear
    mlp_norm: RMSNorm
    gate_up: Linear
    down: Linear


class DecoderTarget:
    """A decoder-only transformer behind the `Target` protocol."""

    tree_support: TreeSupport = "tree"
    attention = "sdpa"

    def __init__(self, config: Any, weights: Weights, device: torch.device, dtype: torch.dtype, name: str, digest: str):
        """Load the weights. Raises BastionError if the architecture is unsupported, or the weights do not fit it."""
        if reason := unsupported(config):
            raise BastionError(f"{name}: the lean decoder does not support {reason}")
        self.device, self.dtype, self.name, self.digest = device, dtype, name, digest
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.shape = ModelShape(
            layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=head_dim,
            intermediate=config.intermediate_size,
            vocab=config.vocab_size,
        )
        self.epsilon: float = config.rms_norm_eps
        self.rotary = RotaryEmbedding(config, device, dtype)
        self.max_context = self.rotary.max_context
        self._weights = weights
        table = self.shape.vocab, self.shape.hidden
        self.embedding = self._tensor("model.embed_tokens.weight", *table)
        self.layers = [self._layer(i) for i in range(self.shape.layers)]
        if weights(f"model.layers.{self.shape.layers}.input_layernorm.weight") is not None:
            raise BastionError(f"{name}: the weights have more than the config's {self.shape.layers} layers; fix one")
        self.final_norm = self._norm("model.norm", self.shape.hidden)
        self._head = Linear(self.embedding if config.tie_word_embeddings else self._tensor("lm_head.weight", *table))
        self._reduced_head: tuple[Tensor, Linear] | None = None
        self._feature_layers: tuple[int, ...] = ()
        self._slabs = Slabs(self.shape.layers, self.shape.kv_heads, head_dim, device, dtype)
        del self._weights  # the reader may hold files open

    def _optional(self, name: str, *shape: int) -> Tensor | None:
        tensor = self._weights(name)
        if tensor is None:
            return None
        if tensor.shape != shape:
            found = f"parameter {name!r} has shape {list(tensor.shape)}, by the config {list(shape)}"
            raise BastionError(f"{self.name}: {found}; fetch config and weights again")
        return tensor.to(self.device, self.dtype, copy=True)

    def _tensor(self, name: str, *shape: int) -> Tensor:
        tensor = self._optional(name, *shape)
        if tensor is None:
            raise BastionError(f"{self.name}: the checkpoint has no parameter {name!r}; is it complete?")
        return tensor

    def _norm(self, name: str, size: int) -> RMSNorm:
        return RMSNorm(self._tensor(f"{name}.weight", size), self.epsilon)

    def _linear(self, prefix: str, inputs: int, **outputs: int) -> Linear:
        """The projections named in `outputs`, each with its number of rows, as one."""
        weight = torch.cat([self._tensor(f"{prefix}.{name}.weight", rows, inputs) for name, rows in outputs.items()])
        biases = [self._optional(f"{prefix}.{name}.bias", rows) for name, rows in outputs.items()]
        present = [bias for bias in biases if bias is not None]
        if present and len(present) < len(outputs):
            raise BastionError(f"{self.name}: only some of {prefix}.({'|'.join(outputs)}) have a bias")
        return Linear(weight, torch.cat(present) if present else None)

    def _layer(self, index: int) -> Layer:
        prefix, shape = f"model.layers.{index}", self.shape
        hidden, wide, size = shape.hidden, shape.intermediate, shape.head_dim
        heads, kv = shape.heads * size, shape.kv_heads * size
        normed = self._weights(f"{prefix}.self_attn.q_norm.weight") is not None
        return Layer(
            input_norm=self._norm(f"{prefix}.input_layernorm", hidden),
            qkv=self._linear(f"{prefix}.self_attn", hidden, q_proj=heads, k_proj=kv, v_proj=kv),
            query_norm=self._norm(f"{prefix}.self_attn.q_norm", size) if normed else None,
            key_norm=self._norm(f"{prefix}.self_attn.k_norm", size) if normed else None,
            output=self._linear(f"{prefix}.self_attn", heads, o_proj=hidden),
            mlp_norm=self._norm(f"{prefix}.post_attention_layernorm", hidden),
            gate_up=self._linear(f"{prefix}.mlp", hidden, gate_proj=wide, up_proj=wide),
            down=self._linear(f"{prefix}.mlp", wide, down_proj=hidden),
        )

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """Ids of the layers whose outputs are the features."""
        return self._feature_layers

    def set_feature_layers(self, layers: Sequence[int]) -> None:
        """Choose the feature layers. Raises BastionError for an id that the model does not have."""
        for layer in layers:
            if not 0 <= layer < self.shape.layers:
                raise BastionError(f"{self.name} has layers 0 to {self.shape.layers - 1}, not {layer}")
        self._feature_layers = tuple(layers)

    def new_cache(self, capacity: int = 0) -> SlotCache:
        """An empty cache with room for `capacity` tokens."""
        groups = self.shape.heads // self.shape.kv_heads
        return SlotCache(self._slabs, capacity, TreeMask(groups, self.device, self.dtype))

    @torch.inference_mode()
    def forward(self, rows: list[Rows]) -> list[Verification]:
        """Linear layers over the rows of all sequences together, attention for those that `plan` puts together."""
        parts = plan(rows)
        order = [place for part in parts for place in part.places]
        sizes = [sum(len(rows[place].tokens) for place in part.places) for part in parts]
        rows = [rows[place] for place in order]
        counts = [len(row.tokens) for row in rows]
        hidden = functional.embedding(_cat([row.tokens for row in rows]), self.embedding)
        cos, sin = self._rotation(rows)
        taps: dict[int, Tensor] = {}
        for index, layer in enumerate(self.layers):
            hidden = self._run_layer(index, layer, hidden, cos, sin, parts, sizes)
            if index in self._feature_layers:
                taps[index] = hidden
        wanted = _cat([part[row.first_logit :] for row, part in zip(rows, _split(hidden, counts), strict=True)])
        logits = self._head(self.final_norm(wanted))
        logits_of = torch.split(logits, [count - row.first_logit for row, count in zip(rows, counts, strict=True)])
        features_of: Sequence[Tensor | None] = [None] * len(rows)
        if taps:
            features_of = torch.split(torch.cat([taps[layer] for layer in self._feature_layers], -1), counts)
        found = dict(zip(order, zip(logits_of, features_of, strict=True), strict=True))
        return [Verification(*found[place]) for place in range(len(rows))]

    def _rotation(self, rows: list[Rows]) -> tuple[Tensor, Tensor]:
        parts = []
        for prompt_length, same in groupby(rows, lambda row: row.prompt_length):
            positions = _cat([row.positions for row in same])
            parts.append(
                self.rotary.for_prompt(positions, prompt_length) if prompt_length else self.rotary.at(positions)
            )
        return _cat([cos for cos, _ in parts]), _cat([sin for _, sin in parts])

    def _run_layer(
        self,
        index: int,
        layer: Layer,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        parts: list[Part],
        sizes: list[int],
    ) -> Tensor:
        shape = self.shape
        fused = layer.qkv(layer.input_norm(hidden)).view(len(hidden), -1, shape.head_dim)
        rotated = fused[:, : shape.heads + shape.kv_heads]
        if layer.query_norm is not None and layer.key_norm is not None:
            queries, keys = fused[:, : shape.heads], rotated[:, shape.heads :]
            normed = torch.cat((layer.query_norm(queries), layer.key_norm(keys)), 1)
            rotate(normed, cos, sin, out=rotated)
        else:
            rotate(rotated, cos, sin, out=rotated)
        mixed = [part.mix(index, own) for part, own in zip(parts, _split(fused, sizes), strict=True)]
        hidden = layer.output(_cat(mixed)).add_(hidden)
        gate, up = layer.gate_up(layer.mlp_norm(hidden)).chunk(2, -1)
        return layer.down(functional.silu(gate).mul_(up)).add_(hidden)

    def commit(self, cache: SlotCache, nodes: Sequence[int]) -> None:
        """Keep the pending rows `nodes`, in place."""
        cache.commit(nodes)

    @torch.inference_mode()
    def embed(self, tokens: Tensor) -> Tensor:
        """Input embeddings [..., hidden]."""
        return functional.embedding(tokens, self.embedding)

    @torch.inference_mode()
    def head(self, hidden: Tensor, token_ids: Tensor | None = None) -> Tensor:
        """Logits [..., vocab] of hidden [..., hidden] that already went through a final norm."""
        linear = self._head
        if token_ids is not None:
            if self._reduced_head is None or self._reduced_head[0] is not token_ids:
                self._reduced_head = token_ids, Linear(self._head.plain()[token_ids])
            linear = self._reduced_head[1]
        return linear(hidden.reshape(-1, hidden.shape[-1])).view(*hidden.shape[:-1], -1)


def _cat(parts: list[Tensor]) -> Tensor:
    """Concatenate; a single part is passed on without a copy."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _split(rows: Tensor, counts: list[int]) -> Sequence[Tensor]:
    """The rows of each sequence; those of a single one are passed on."""
    return (rows,) if len(counts) == 1 else torch.split(rows, counts)
