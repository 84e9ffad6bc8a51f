"""What the networks of drafters have in common."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from bastion.drafters.checkpoint import draft_token_ids, weights_digest
from bastion.layers.rotary import RotaryEmbedding
from bastion.targets.attention import TreeMask
from bastion.targets.cache import KeyValueCache


class DrafterNetwork(nn.Module):
    """Layers that attend to the target's features, without the target's embeddings; `norm` is the final one.

    A config has `raw`, `body` (transformers' view of it), `layers`, `heads`, `kv_heads`, `head_dim` and `draft_vocab`.
    """

    d2t: Tensor  # [draft_vocab] int64, only with a reduced vocabulary: draft id c is target id c + d2t[c]
    norm: nn.RMSNorm

    def __init__(self, config: Any):
        super().__init__()
        self.config = config
        self._rotary: RotaryEmbedding | None = None

    def complete(self) -> None:
        """Add the draft vocabulary, and make all linear weights random (normal, `initializer_range`)."""
        if self.config.draft_vocab is not None:
            self.register_buffer("d2t", torch.zeros(self.config.draft_vocab, dtype=torch.int64))
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=self.config.body.initializer_range)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.norm.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The weights' dtype."""
        return self.norm.weight.dtype

    @property
    def rotary(self) -> RotaryEmbedding:
        """Cosines and sines, on the weights' device and in their dtype."""
        held = self._rotary
        if held is None or (held.device, held.dtype) != (self.device, self.dtype):
            held = self._rotary = RotaryEmbedding(self.config.body, self.device, self.dtype)
        return held

    def token_ids(self) -> Tensor | None:
        """Target ids [draft_vocab] of a reduced draft vocabulary; None where it is the target's own."""
        return None if self.config.draft_vocab is None else draft_token_ids(self.d2t)

    def digest(self) -> str:
        """SHA-256 of configuration and weights. Take it before `for_inference`, which hides the weights."""
        return weights_digest(self.config.raw, self.state_dict())

    def new_cache(self) -> KeyValueCache:
        """An empty cache for the context of one sequence."""
        config = self.config
        shape = (config.layers, 2, config.kv_heads, 256, config.head_dim)
        mask = TreeMask(config.heads // config.kv_heads, self.device, self.dtype)
        return KeyValueCache(torch.empty(shape, device=self.device, dtype=self.dtype), mask)
