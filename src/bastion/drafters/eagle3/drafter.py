"""EAGLE-3 as a `Drafter`: every pass makes the tree one level deeper (arXiv 2503.01840)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bastion.drafters.base import Candidates, DraftContext, Frontier, Ids, Proposal
from bastion.drafters.checkpoint import weights_digest
from bastion.drafters.eagle3.checkpoint import load_model
from bastion.drafters.eagle3.model import Eagle3Model
from bastion.drafters.pairing import check_target, try_target
from bastion.drafters.pretrained import Pretrained
from bastion.errors import BastionError
from bastion.targets.attention import attend
from bastion.targets.base import Target
from bastion.targets.cache import KeyValueCache

DEPTH = 8  # levels: the first pass and 7 expansions, as in the reference code
BEAM = 10  # nodes of a level that are expanded, and children of each, as there


class Eagle3Drafter(Pretrained):
    """Drafts level by level with an EAGLE-3 model and its target's embeddings.

    `fixed:59` is then EAGLE-3's own dynamic tree of 60 nodes, root included.
    """

    load_model = staticmethod(load_model)

    def __init__(self, model: Eagle3Model, target: Target, name: str = "eagle3", depth: int = DEPTH, beam: int = BEAM):
        """Join a model and its target. Raises BastionError if they were not made for each other."""
        if depth < 1 or beam < 1:
            raise BastionError(f"an EAGLE-3 drafter needs depth and beam of 1 or more, not {depth} and {beam}")
        config = model.config.for_target(target.shape.layers)
        check_target(config, target)
        try_target(config, target)
        if len(config.target_layers) * config.hidden != model.fc.in_features:
            raise BastionError("config.json does not name the target layers that fc.weight reads: add them to it")
        self.feature_layers = config.target_layers
        self.model, self.target, self.name, self.depth, self.beam = model, target, name, depth, beam
        self.digest = weights_digest(model.config.raw | {"depth": depth, "beam": beam}, model.state_dict())
        token_ids = model.token_ids()
        self.token_ids: Ids | None = None if token_ids is None else token_ids.cpu().numpy()

    @torch.no_grad()
    def propose(self, contexts: list[DraftContext]) -> list[Proposal]:
        """Read each sequence's new features, and draft the first level."""
        return [Eagle3Proposal(self, self._read(context), context.temperature or 1.0) for context in contexts]

    def _read(self, context: DraftContext) -> Memory:
        """Run the rows that are new: each joins a feature with the token behind it, the last one with the root."""
        if context.memory is None:
            context.memory = Memory(self.model.new_cache())
        memory: Memory = context.memory
        cache = memory.cache
        if (features := context.take_features(self.model.device, self.model.dtype)) is not None:
            rows = range(cache.length, cache.length + len(features))
            cache.reserve(len(rows))
            mask = cache.mask.view(None, len(rows), rows.stop)

            def mix(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
                return attend(queries, *cache.write(0, torch.cat((keys, values), 1)), mask)

            embedded = self.embed(np.array(context.tokens[rows.start + 1 : rows.stop + 1]))
            hidden = self.model.step(embedded, self.model.fc(features), torch.tensor(rows), mix)
            cache.commit(range(len(rows)))
            memory.hidden = hidden[-1:]
        context.check_read(cache.length)
        return memory

    def embed(self, tokens: Ids) -> Tensor:
        """The target's embeddings [n, hidden] of tokens [n], for the model."""
        embedded = self.target.embed(torch.from_numpy(tokens).to(self.target.device))
        return embedded.to(self.model.device, self.model.dtype)


@dataclass(slots=True)
class Memory:
    """What an EAGLE-3 drafter keeps about a sequence."""

    cache: KeyValueCache  # of the rows whose features the target gave
    hidden: Tensor | None = None  # [1, hidden]: of the last of them


class Eagle3Proposal:
    """A draft that a pass over the nodes of a level makes one level deeper.

    A node's row reads the context, its ancestors and itself. Rows of drafted nodes lie behind the cache's end, where
    the next round's overwrite them: the target's features are better than what was guessed in their place.
    """

    def __init__(self, drafter: Eagle3Drafter, memory: Memory, temperature: float):
        assert memory.hidden is not None
        self.depth, self.beam = drafter.depth, drafter.beam
        self.passes = 1
        self._drafter, self._cache, self._temperature = drafter, memory.cache, temperature
        self._hidden = memory.hidden  # [m, hidden]: of the rows of the last frontier
        self._seen = torch.zeros(1, 0, dtype=torch.bool, device=memory.hidden.device)
        # [m, p]: which of the drafted rows those of the last frontier see
        self._drafted: list[Tensor] = []  # keys and values of the drafted rows

    @property
    def ready(self) -> int:
        """Every pass gives one level."""
        return self.passes

    @torch.no_grad()
    def expand(self, frontier: Frontier, width: int) -> Candidates:
        """The best `width` (and `beam`) tokens behind each node."""
        if frontier.depth:
            self._pass(frontier)
        model = self._drafter.model
        logits = model.lm_head(model.norm(self._hidden)).float() / self._temperature
        values, columns = logits.log_softmax(-1).topk(min(width, self.beam, logits.shape[-1]), -1)
        ids = columns.cpu().numpy()
        tokens = ids if self._drafter.token_ids is None else self._drafter.token_ids[ids]
        return Candidates(tokens, values.cpu().numpy())

    def _pass(self, frontier: Frontier) -> None:
        """Run the frontier's nodes through the model."""
        model, cache = self._drafter.model, self._cache
        rows = torch.from_numpy(frontier.rows).to(model.device)
        count = len(rows)
        own = torch.eye(count, dtype=torch.bool, device=model.device)
        self._seen = torch.cat((self._seen[rows], own), 1)
        mask = torch.zeros(count, cache.length + self._seen.shape[1], device=model.device, dtype=model.dtype)
        mask[:, cache.length :].masked_fill_(~self._seen, float("-inf"))
        mask = mask.repeat_interleave(cache.mask.groups, 0)

        def mix(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            self._drafted.append(torch.cat((keys, values), 1))
            drafted = torch.cat(self._drafted)
            cache.reserve(len(drafted))
            return attend(queries, *cache.write(0, drafted), mask)

        positions = torch.full((count,), cache.length - 1 + frontier.depth)
        embedded = self._drafter.embed(frontier.tokens)
        self._hidden = model.step(embedded, self._hidden[rows], positions, mix)
        self.passes += 1
