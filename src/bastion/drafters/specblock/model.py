"""The SpecBlock network: blocks of positions that depend on each other, drafted in one pass (arXiv 2605.07243).

There is no public code; where the paper leaves room, this is how it is read here:

* A *path row* stands for a token whose successors are drafted: a projection of its embedding and of the hidden state
  that drafted it. For the root that state is the target's fused features of the token before it.
* A block starts at a path row, its *prefix*. All its positions begin as the prefix (the broadcast) plus a vector that
  tells them apart.
* Layer-wise shift: before every layer, each position is given the hidden state that the position before it has there,
  and the first one the prefix, through a projection; and all of them the prefix again. So one pass computes all
  positions at once, and what a position says depends on those before it, one further back with each layer.
* Positions attend to the context (the target's features, as in DFlash), to the path rows from the root to their
  prefix, and to their own block up to themselves. The tokens of a block are never fed back into it; the next block
  reads them as path rows.

Embeddings and language-model head are the target's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from bastion.drafters.checkpoint import weights_digest
from bastion.drafters.dflash.model import DFlashLayer, DFlashModel
from bastion.drafters.specblock.config import SpecBlockConfig
from bastion.targets.attention import attend
from bastion.targets.cache import KeyValueCache

Mix = Callable[[int, Tensor, Tensor, Tensor], Tensor]
# The attention of layer i: i, the positions' queries [n, heads, head_dim], keys and values [n, kv_heads, head_dim] to
# what they read, [n, heads * head_dim].


class Shift(nn.Module):
    """Gives each position of a block the state of the one before it, and the prefix."""

    def __init__(self, config: SpecBlockConfig):
        super().__init__()
        hidden, epsilon = config.body.hidden, config.body.body.rms_norm_eps
        self.norm = nn.RMSNorm(hidden, eps=epsilon)
        self.previous = nn.Linear(hidden, hidden, bias=False)
        self.prefix = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: Tensor, prefix: Tensor) -> Tensor:
        """Blocks x [b, K, hidden] and their prefixes [b, 1, hidden] to [b, K, hidden]."""
        before = torch.cat((prefix, x[:, :-1]), 1)
        shifted: Tensor = x + self.previous(self.norm(before)) + self.prefix(prefix)
        return shifted


class SpecBlockModel(nn.Module):
    """A SpecBlock drafter without embeddings and head."""

    def __init__(self, config: SpecBlockConfig):
        """Make a drafter with random weights (normal, `initializer_range`)."""
        super().__init__()
        self.config = config
        hidden, epsilon = config.body.hidden, config.body.body.rms_norm_eps
        self.body = DFlashModel(config.body)  # fusion of the features, layers, final norm; how it drafts is not used
        self.embedding_norm = nn.RMSNorm(hidden, eps=epsilon)
        self.join = nn.Linear(2 * hidden, hidden, bias=False)
        self.path_norm = nn.RMSNorm(hidden, eps=epsilon)
        self.places = nn.Parameter(torch.empty(config.positions, hidden))
        self.shifts = nn.ModuleList(Shift(config) for _ in range(config.body.layers))
        self.rank_head = nn.Linear(hidden, len(config.rank_widths))
        for module in (self.join, self.rank_head, *self.shifts.modules()):
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=config.body.body.initializer_range)
        nn.init.zeros_(self.rank_head.bias)
        nn.init.normal_(self.places, std=0.5)  # prefixes are of size 1: smaller, and the positions would be all alike

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.body.device

    @property
    def dtype(self) -> torch.dtype:
        """The weights' dtype."""
        return self.body.dtype

    def digest(self) -> str:
        """SHA-256 of configuration and weights. Take it before `for_inference`, which hides the weights."""
        return weights_digest(self.config.raw, self.state_dict())

    def fuse(self, features: Tensor) -> Tensor:
        """The target's features [n, F] as states [n, hidden]: what the context's keys and values are made from."""
        fused: Tensor = self.body.hidden_norm(self.body.fc(features))
        return fused

    def path_rows(self, embedded: Tensor, states: Tensor) -> Tensor:
        """Path rows [..., hidden] of tokens: embeddings and the states that drafted them, both [..., hidden]."""
        rows: Tensor = self.path_norm(self.join(torch.cat((self.embedding_norm(embedded), states), -1)))
        return rows

    def blocks(self, prefixes: Tensor, starts: Tensor, mix: Mix) -> Tensor:
        """Final hidden states [b, K, hidden] of blocks whose prefixes [b, 1, hidden] stand at `starts` [b]."""
        count, size = len(prefixes), self.config.positions
        positions = starts[:, None] + torch.arange(1, size + 1, device=starts.device)
        angles = self.body.rotary.at(positions.flatten())
        x = prefixes + self.places
        for index, (shift, layer) in enumerate(zip(self.shifts, self._layers, strict=True)):
            x = layer(shift(x, prefixes).flatten(0, 1), *angles, partial(mix, index)).view(count, size, -1)
        hidden: Tensor = self.body.norm(x)
        return hidden

    def draft(self, cache: KeyValueCache, path: Tensor) -> Tensor:
        """Final hidden states [b, K, hidden] of blocks of one sequence, behind its cached context.

        path [b, P, hidden]: the path rows from the root, which stands behind the context, to each block's prefix. Keys
        and values of path and blocks lie behind the context, and are overwritten by the next call.
        """
        count, length = path.shape[:2]
        size, start = self.config.positions, cache.length
        rows, angles = self._path_angles(path, torch.full((count,), start))
        seen = torch.ones(count * size, start, dtype=torch.bool, device=self.device)
        own = block_mask(count, length, size, self.device)
        visible = torch.cat((seen, own), 1).repeat_interleave(cache.mask.groups, 0)
        cache.reserve(own.shape[1])

        def mix(index: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            before = torch.cat(self._layers[index].self_attn.keys_values(rows, *angles), 1)
            held = cache.write(index, torch.cat((before, torch.cat((keys, values), 1))))
            return attend(queries, *held, visible)

        return self.blocks(path[:, -1:], torch.full((count,), start + length - 1), mix)

    def forward(
        self,
        embedded: Tensor,
        anchors: Tensor,
        features: Tensor,
        feature_positions: Tensor,
        previous: Tensor,
        masks: Sequence[Tensor],
    ) -> tuple[Tensor, Tensor]:
        """Drafts along given paths, all blocks of several sequences at once; for training.

        embedded [b, (M - 1) * K + 1, hidden]: the paths' tokens, from the root at `anchors` [b] to the last block's
        prefix. features [k, F] at `feature_positions` [k], with the sequences one behind the other, as the drafts are;
        previous [b]: rows of `features` that come before the roots. `masks`, one a sequence: bool [b_i, k_i], which
        features its drafts see. Returns final hidden states [b, M * K, hidden], each block behind its prefix's own
        hidden state as in drafting, and the rank head's logits [b, M * K, buckets].
        """
        size = self.config.positions
        context = self.fuse(features)
        angles = self.body.rotary.at(feature_positions)
        contexts = [layer.self_attn.keys_values(context, *angles) for layer in self._layers]
        path = self.path_rows(embedded[:, :1], context[previous][:, None])
        found: list[Tensor] = []
        for number in range(self.config.passes):
            if number:
                tokens = embedded[:, (number - 1) * size + 1 : number * size + 1]
                path = torch.cat((path, self.path_rows(tokens, found[-1])), 1)
            mix = partial(
                self._mix_apart,
                contexts,
                *self._path_angles(path, anchors),
                masks,
                self._visible(masks, path.shape[1]),
            )
            found.append(self.blocks(path[:, -1:], anchors + number * size, mix))
        hidden = torch.cat(found, 1)
        return hidden, self.rank_head(hidden)

    @property
    def _layers(self) -> list[DFlashLayer]:
        return cast("list[DFlashLayer]", list(self.body.layers))

    def _path_angles(self, path: Tensor, roots: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Paths [b, P, hidden] behind roots at `roots` [b] as rows [b * P, hidden], and their angles."""
        positions = roots[:, None] + torch.arange(path.shape[1], device=roots.device)
        return path.flatten(0, 1), self.body.rotary.at(positions.flatten())

    def _mix_apart(
        self,
        contexts: Sequence[tuple[Tensor, Tensor]],
        rows: Tensor,
        angles: tuple[Tensor, Tensor],
        masks: Sequence[Tensor],
        visible: Sequence[Tensor],
        index: int,
        queries: Tensor,
        *block: Tensor,
    ) -> Tensor:
        """Attention of each sequence's blocks to its own context, paths and blocks; see `forward` and `Mix`.

        contexts: keys and values of all layers. rows, angles: see `_path_angles`. visible: see `_visible`.
        """
        paths = self._layers[index].self_attn.keys_values(rows, *angles)
        drafts = sum(map(len, masks))
        of_paths, of_blocks = ([len(mask) * len(all_) // drafts for mask in masks] for all_ in (rows, queries))
        features = [mask.shape[1] for mask in masks]
        keys, values = (
            list(
                zip(torch.split(seen, features), torch.split(path, of_paths), torch.split(own, of_blocks), strict=True)
            )
            for seen, path, own in zip(contexts[index], paths, block, strict=True)
        )
        return torch.cat(
            [
                attend(q, torch.cat(k).transpose(0, 1)[None], torch.cat(v).transpose(0, 1)[None], mask)
                for q, k, v, mask in zip(torch.split(queries, of_blocks), keys, values, visible, strict=True)
            ]
        )

    def _visible(self, masks: Sequence[Tensor], length: int) -> list[Tensor]:
        """What the queries of each sequence's blocks see: context, paths of `length` rows, blocks."""
        size, groups = self.config.positions, self.config.body.heads // self.config.body.kv_heads
        parts = ((mask.repeat_interleave(size, 0), block_mask(len(mask), length, size, mask.device)) for mask in masks)
        return [torch.cat(part, 1).repeat_interleave(groups, 0) for part in parts]


def block_mask(blocks: int, path: int, size: int, device: torch.device) -> Tensor:
    """What blocks of `size` positions see: bool [blocks * size, blocks * path + blocks * size].

    Its own path's rows, which come first, and its own block up to itself.
    """
    own = torch.eye(blocks, dtype=torch.bool, device=device)
    paths = own.repeat_interleave(size, 0).repeat_interleave(path, 1)
    causal = torch.ones(size, size, dtype=torch.bool, device=device).tril()
    return torch.cat((paths, torch.kron(own, causal)), 1)
