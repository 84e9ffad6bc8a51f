"""Rotary position embedding with every scaling that Llama-3.1 and Qwen checkpoints use."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from bastion.errors import BastionError

SUPPORTED = ("default", "linear", "dynamic", "yarn", "llama3")


class RotaryEmbedding:
    """Cosine and sine of each position, from a table that grows by doubling.

    `dynamic` scaling has frequencies that depend on the length of the text. transformers uses, for each token it
    writes, the length up to that token, and for a prompt the whole prompt's length. So do we: a row of the table
    belongs to a token written at that position, and `for_prompt` serves prompts. Neither depends on how many
    tokens a forward pass happens to hold, which is what makes speculative and plain decoding agree.
    """

    def __init__(self, config: Any, device: torch.device, dtype: torch.dtype):
        """Read `rope_parameters` of a transformers config. Raises BastionError for an unsupported scaling."""
        parameters = config.rope_parameters
        self.kind = parameters.get("rope_type", "default")
        if self.kind not in SUPPORTED:
            raise BastionError(f"RoPE scaling {self.kind!r} is not supported; supported: {', '.join(SUPPORTED)}")
        if parameters.get("partial_rotary_factor", 1.0) != 1.0:
            raise BastionError("partial rotary embeddings are not supported by the lean decoder")
        self.config, self.device, self.dtype = config, device, dtype
        self.inverse_frequencies, self.attention_scaling = self._frequencies(None)  # [head_dim / 2], float
        self._table = self._rows(torch.arange(256, device=device))

    def _frequencies(self, length: int | None) -> tuple[Tensor, float]:
        if self.kind == "default":
            dim = getattr(self.config, "head_dim", None)
            dim = dim or self.config.hidden_size // self.config.num_attention_heads
            exponents = torch.arange(0, dim, 2, dtype=torch.float32, device=self.device) / dim
            return 1.0 / self.config.rope_parameters["rope_theta"] ** exponents, 1.0
        frequencies, scaling = ROPE_INIT_FUNCTIONS[self.kind](self.config, self.device, seq_len=length)
        return frequencies.float(), float(scaling)

    def _rows(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Table rows for tokens written at `positions`."""
        limit = self.config.max_position_embeddings
        if self.kind != "dynamic" or not len(positions) or int(positions.max()) < limit:
            return self._rotate(positions, self.inverse_frequencies)
        frequencies = torch.stack([self._frequencies(max(limit, int(p) + 1))[0] for p in positions])
        return self._rotate(positions, frequencies)

    def _rotate(self, positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions[:, None].float() * frequencies  # [n, head_dim / 2], float32 as in transformers
        cos, sin = angles.cos() * self.attention_scaling, angles.sin() * self.attention_scaling
        # The sign of rotate_half is folded into the sine, so that a rotation is two products and a roll.
        rows = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
        return rows[0].to(self.dtype)[:, None], rows[1].to(self.dtype)[:, None]

    @property
    def max_context(self) -> int:
        """Positions that the scaling was made for."""
        longest: int = self.config.max_position_embeddings
        if self.kind in ("dynamic", "yarn"):  # their configs tend to state the length before scaling
            parameters = self.config.rope_parameters
            original = parameters.get("original_max_position_embeddings") or longest
            longest = max(longest, int(original * parameters["factor"]))
        return longest

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and signed sine, each [n, 1, head_dim], of `positions` [n]."""
        needed = int(positions.max()) + 1 if len(positions) else 0
        have = len(self._table[0])
        if needed > have:
            more = self._rows(torch.arange(have, max(needed, 2 * have), device=self.device))
            self._table = torch.cat((self._table[0], more[0])), torch.cat((self._table[1], more[1]))
        return self._table[0][positions], self._table[1][positions]

    def for_prompt(self, positions: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """The same, for tokens of a prompt of `length` tokens."""
        if self.kind == "dynamic" and length > self.config.max_position_embeddings:
            return self._rotate(positions, self._frequencies(length)[0])
        return self.at(positions)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor | None = None) -> Tensor:
    """Rotate the heads `x` [n, heads, head_dim] by `RotaryEmbedding.at`'s cosine and signed sine.

    `out` may be `x` itself.
    """
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin, out=out)
