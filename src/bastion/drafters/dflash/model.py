"""The DFlash network: a few Qwen3 layers that turn a block of masks into guesses (arXiv 2602.06036).

Each layer's keys and values come from two sources through the same projections: the fused features of the
target (the context) and the block itself. The block sees all of the context and all of itself. Embeddings and
language-model head are the target's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from bastion.drafters.dflash.config import DFlashConfig
from bastion.drafters.network import DrafterNetwork
from bastion.layers.rotary import rotate
from bastion.layers.swiglu import SwiGLU
from bastion.targets.attention import attend
from bastion.targets.cache import KeyValueCache

Mix = Callable[[Tensor, Tensor, Tensor], Tensor]
# A layer's attention: the block's queries [n, heads, head_dim], keys and values [n, kv_heads, head_dim] to what they
# read of context and block, [n, heads * head_dim].


class DFlashAttention(nn.Module):
    """Attention of the block to the context and to itself."""

    def __init__(self, config: DFlashConfig):
        super().__init__()
        self.head_dim = config.head_dim
        bias: bool = config.body.attention_bias
        queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden, queries, bias=bias)
        self.k_proj = nn.Linear(config.hidden, keys, bias=bias)
        self.v_proj = nn.Linear(config.hidden, keys, bias=bias)
        self.o_proj = nn.Linear(queries, config.hidden, bias=bias)
        self.q_norm = nn.RMSNorm(config.head_dim, eps=config.body.rms_norm_eps)
        self.k_norm = nn.RMSNorm(config.head_dim, eps=config.body.rms_norm_eps)

    def keys_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values, each [n, kv_heads, head_dim], of context or block rows x [n, hidden]."""
        shape = (len(x), -1, self.head_dim)
        return rotate(self.k_norm(self.k_proj(x).view(shape)), cos, sin), self.v_proj(x).view(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mix: Mix) -> Tensor:
        """Block rows x [n, hidden] to [n, hidden]."""
        queries = rotate(self.q_norm(self.q_proj(x).view(len(x), -1, self.head_dim)), cos, sin)
        out: Tensor = self.o_proj(mix(queries, *self.keys_values(x, cos, sin)))
        return out


class DFlashLayer(nn.Module):
    """One decoder layer."""

    def __init__(self, config: DFlashConfig):
        super().__init__()
        self.self_attn = DFlashAttention(config)
        self.mlp = SwiGLU(config.hidden, config.intermediate)
        self.input_layernorm = nn.RMSNorm(config.hidden, eps=config.body.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden, eps=config.body.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mix: Mix) -> Tensor:
        """Block rows x [n, hidden] to [n, hidden]; see `DFlashAttention.forward`."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mix)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class DFlashModel(DrafterNetwork):
    """A DFlash drafter without embeddings and head; parameter names are those of z-lab's checkpoints."""

    def __init__(self, config: DFlashConfig):
        """Make a drafter with random weights (normal, `initializer_range`)."""
        super().__init__(config)
        self.fc = nn.Linear(len(config.target_layers) * config.hidden, config.hidden, bias=False)
        self.hidden_norm = nn.RMSNorm(config.hidden, eps=config.body.rms_norm_eps)
        self.layers = nn.ModuleList(DFlashLayer(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden, eps=config.body.rms_norm_eps)
        self.complete()

    @property
    def _stack(self) -> list[DFlashLayer]:
        return cast("list[DFlashLayer]", list(self.layers))

    def forward(
        self,
        block: Tensor,
        positions: Tensor,
        features: Tensor,
        feature_positions: Tensor,
        masks: Sequence[Tensor],
        sliding_masks: Sequence[Tensor] | None = None,
    ) -> Tensor:
        """Final hidden states [n, hidden] of all blocks of several sequences at once; no cache, for training.

        block [n, hidden]: embeddings of the blocks' tokens, at `positions` [n]; features [k, F], at
        `feature_positions` [k]; both with the sequences one behind the other. `masks` has one mask a sequence, bool
        [n_i, k_i + n_i], True where a row sees one of its sequence's features or rows; every row must see something.
        `sliding_masks` are the same for sliding layers.
        """
        hidden: Tensor = self.norm(
            self.block_states(block, positions, features, feature_positions, masks, sliding_masks)
        )
        return hidden

    def block_states(
        self,
        block: Tensor,
        positions: Tensor,
        features: Tensor,
        feature_positions: Tensor,
        masks: Sequence[Tensor],
        sliding_masks: Sequence[Tensor] | None = None,
    ) -> Tensor:
        """What `forward` gives, [n, hidden], before the final norm."""
        if sliding_masks is None and self.config.window is not None:
            raise ValueError("this drafter has sliding layers: give their sliding_masks too")
        groups = self.config.heads // self.config.kv_heads
        kinds = [[mask.repeat_interleave(groups, 0) for mask in kind] for kind in (masks, sliding_masks or [])]
        rows = [len(mask) for mask in masks]
        context = self.hidden_norm(self.fc(features))
        context_angles = self.rotary.at(feature_positions)
        x, angles = block, self.rotary.at(positions)
        for layer, sliding in zip(self._stack, self.config.sliding, strict=True):
            seen = layer.self_attn.keys_values(context, *context_angles)
            x = layer(x, *angles, partial(_mix, *seen, rows, kinds[sliding]))
        return x

    def read(self, cache: KeyValueCache, features: Tensor) -> None:
        """Append the keys and values of new context, features [k, F], to the cache."""
        count = len(features)
        context = self.hidden_norm(self.fc(features))
        cos, sin = self.rotary.at(torch.arange(cache.length, cache.length + count))
        cache.reserve(count)
        for index, layer in enumerate(self._stack):
            cache.write(index, torch.cat(layer.self_attn.keys_values(context, cos, sin), 1))
        cache.commit(range(count))

    def draft(self, cache: KeyValueCache, block: Tensor) -> Tensor:
        """Final hidden states [B, hidden] of one block, embeddings [B, hidden], behind the cached context.

        The block's keys and values lie behind the context and are overwritten by the next call: they were
        made from masks, and the tokens that come to stand there bring their own features.
        """
        hidden: Tensor = self.norm(self.draft_states(cache, block))
        return hidden

    def draft_states(self, cache: KeyValueCache, block: Tensor) -> Tensor:
        """What `draft` gives, [B, hidden], before the final norm."""
        start, size = cache.length, len(block)
        sliding_mask = None
        if self.config.window is not None:
            visible = sliding_visible(start, size, self.config.window).to(self.device)
            sliding_mask = visible.repeat_interleave(self.config.heads // self.config.kv_heads, 0)
        x, angles = block, self.rotary.at(torch.arange(start, start + size))
        cache.reserve(size)

        def mix(index: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            keys, values = cache.write(index, torch.cat((keys, values), 1))
            if sliding_mask is None or not self.config.sliding[index]:
                return attend(queries, keys, values, None)
            columns = sliding_mask.shape[1]
            return attend(queries, keys[:, :, -columns:], values[:, :, -columns:], sliding_mask)

        for index, layer in enumerate(self._stack):
            x = layer(x, *angles, partial(mix, index))
        return x


def _mix(
    context_keys: Tensor,
    context_values: Tensor,
    rows: Sequence[int],
    masks: Sequence[Tensor],
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
) -> Tensor:
    """Attention of each sequence's rows to its own context and rows; see `DFlashModel.forward`."""
    contexts = [mask.shape[1] - count for mask, count in zip(masks, rows, strict=True)]
    parts = (queries, rows), (context_keys, contexts), (context_values, contexts), (keys, rows), (values, rows)
    split = [torch.split(tensor, list(counts)) for tensor, counts in parts]
    out = []
    for q, past_k, past_v, k, v, mask in zip(*split, masks, strict=True):
        k, v = torch.cat((past_k, k)), torch.cat((past_v, v))
        out.append(attend(q, k.transpose(0, 1)[None], v.transpose(0, 1)[None], mask))
    return torch.cat(out)


def sliding_visible(start: int, size: int, window: int) -> Tensor:
    """What a block at positions start .. start + size - 1 sees in a sliding layer: itself, `window - 1` back.

    Bool [size, columns]; the columns are the positions from max(0, start - window + 1), the first to be seen.
    """
    keys = torch.arange(max(0, start - window + 1), start + size)
    distance = torch.arange(start, start + size)[:, None] - keys
    return (distance >= 0) & (distance < window)
