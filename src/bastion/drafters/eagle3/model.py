"""The EAGLE-3 network: one decoder layer over a token's embedding and the hidden state before it (arXiv 2503.01840).

Where the target has read the text, the hidden state is a projection of its features; behind it, the network's own
output of the row before.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from bastion.drafters.eagle3.config import Eagle3Config
from bastion.drafters.network import DrafterNetwork
from bastion.layers.rotary import rotate
from bastion.layers.swiglu import SwiGLU
from bastion.targets.attention import attend

Mix = Callable[[Tensor, Tensor, Tensor], Tensor]
# Queries [n, heads, head_dim], keys and values [n, kv_heads, head_dim] of rows to what they read,
# [n, heads * head_dim].


class Eagle3Attention(nn.Module):
    """Attention whose input is as wide as two hidden states."""

    def __init__(self, config: Eagle3Config):
        super().__init__()
        self.head_dim = config.head_dim
        keys = config.kv_heads * config.head_dim
        self.q_proj = nn.Linear(2 * config.hidden, config.heads * config.head_dim, bias=False)
        self.k_proj = nn.Linear(2 * config.hidden, keys, bias=False)
        self.v_proj = nn.Linear(2 * config.hidden, keys, bias=False)
        self.o_proj = nn.Linear(config.heads * config.head_dim, config.hidden, bias=False)

    def keys_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values, each [n, kv_heads, head_dim], of x [n, 2 * hidden]."""
        shape = (len(x), -1, self.head_dim)
        return rotate(self.k_proj(x).view(shape), cos, sin), self.v_proj(x).view(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mix: Mix) -> Tensor:
        """Rows x [n, 2 * hidden] to [n, hidden]."""
        queries = rotate(self.q_proj(x).view(len(x), -1, self.head_dim), cos, sin)
        out: Tensor = self.o_proj(mix(queries, *self.keys_values(x, cos, sin)))
        return out


class Eagle3Layer(nn.Module):
    """The decoder layer."""

    def __init__(self, config: Eagle3Config):
        super().__init__()
        epsilon = config.body.rms_norm_eps
        self.self_attn = Eagle3Attention(config)
        self.mlp = SwiGLU(config.hidden, config.intermediate)
        self.input_layernorm = nn.RMSNorm(config.hidden, eps=epsilon)  # of the embedding
        self.hidden_norm = nn.RMSNorm(config.hidden, eps=epsilon)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden, eps=epsilon)

    def joined(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """What attention reads, [n, 2 * hidden], of rows' embeddings and hidden states, each [n, hidden]."""
        return torch.cat((self.input_layernorm(embedded), self.hidden_norm(hidden)), -1)

    def forward(self, embedded: Tensor, hidden: Tensor, cos: Tensor, sin: Tensor, mix: Mix) -> Tensor:
        """Rows' embeddings and hidden states, each [n, hidden], to their new hidden states [n, hidden]."""
        hidden = hidden + self.self_attn(self.joined(embedded, hidden), cos, sin, mix)
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


class Eagle3Model(DrafterNetwork):
    """An EAGLE-3 drafter without embeddings; parameter names are those of SafeAILab's checkpoints."""

    def __init__(self, config: Eagle3Config, taps: int):
        """Make a drafter with random weights (normal, `initializer_range`) that reads `taps` target layers."""
        super().__init__(config)
        self.fc = nn.Linear(taps * config.hidden, config.hidden, bias=False)
        self.midlayer = Eagle3Layer(config)
        self.norm = nn.RMSNorm(config.hidden, eps=config.body.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden, config.draft_vocab or config.vocab, bias=False)
        self.complete()

    def step(self, embedded: Tensor, hidden: Tensor, positions: Tensor, mix: Mix) -> Tensor:
        """One pass of rows [n, hidden] at `positions` [n]: their new hidden states [n, hidden], not normed."""
        out: Tensor = self.midlayer(embedded, hidden, *self.rotary.at(positions), mix)
        return out

    def forward(
        self,
        anchors: Tensor,
        embedded: Tensor,
        features: Tensor,
        feature_positions: Tensor,
        feature_embedded: Tensor,
        masks: list[Tensor],
    ) -> Tensor:
        """Normed hidden states [n, steps, hidden] of chains that are unrolled as in drafting; for training.

        The "training-time test" of section 3.2: a chain's first row reads the target, each further one the row before.

        anchors [n]: where in `features` the chain's first row is, the feature before its root; embedded
        [n, steps, hidden]: the chain's tokens, root first. features [k, F] at `feature_positions` [k], each with the
        embedding [k, hidden] of the token behind it; all with the sequences one behind the other. `masks`, one a
        sequence: bool [n_i, k_i], which features its chains see.
        """
        layer, heads = self.midlayer, self.config.heads // self.config.kv_heads
        fused = self.fc(features)
        context = layer.self_attn.keys_values(layer.joined(feature_embedded, fused), *self.rotary.at(feature_positions))
        counts = [len(mask) for mask in masks]
        contexts = [torch.split(tensor, [mask.shape[1] for mask in masks]) for tensor in context]
        chain: list[list[Tensor]] = [[], []]  # keys and values of the rows behind the first, by step
        hidden, positions, found = fused[anchors], feature_positions[anchors], []
        for step in range(embedded.shape[1]):

            def mix(queries: Tensor, keys: Tensor, values: Tensor, step: int = step) -> Tensor:
                if step:  # the first row's are among the context's
                    chain[0].append(keys)
                    chain[1].append(values)
                out, start = [], 0
                for place, (mask, count) in enumerate(zip(masks, counts, strict=True)):
                    rows = slice(start, start + count)
                    start += count
                    k, v = (
                        torch.cat([past[place], *(one[rows] for one in drafted)]).transpose(0, 1)[None]
                        for past, drafted in zip(contexts, chain, strict=True)
                    )
                    own = torch.eye(count, dtype=torch.bool, device=mask.device).repeat(1, step)
                    visible = torch.cat((mask, own), 1).repeat_interleave(heads, 0)
                    out.append(attend(queries[rows], k, v, visible))
                return torch.cat(out)

            hidden = self.step(embedded[:, step], hidden, positions + step, mix)
            found.append(self.norm(hidden))
        return torch.stack(found, 1)
