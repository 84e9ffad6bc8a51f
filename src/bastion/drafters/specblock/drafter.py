"""SpecBlock as a `Drafter`: every pass makes the tree a block of positions deeper (arXiv 2605.07243)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bastion.drafters.base import Candidates, DraftContext, Frontier, Ids, LogProbs, Proposal
from bastion.drafters.pairing import check_target, try_target
from bastion.drafters.pretrained import Pretrained
from bastion.drafters.specblock.checkpoint import load_model
from bastion.drafters.specblock.model import SpecBlockModel
from bastion.targets.base import Target
from bastion.targets.cache import KeyValueCache


@dataclass(slots=True)
class Memory:
    """What a SpecBlock drafter keeps about a sequence."""

    cache: KeyValueCache  # of the context
    feature: Tensor | None = None  # [1, F]: the target's, of the last committed token


@dataclass(slots=True)
class Ranked:
    """The best tokens of each position of some blocks, best first, within the widths that the rank head allows."""

    hidden: Tensor  # [b, K, hidden]: the blocks' final hidden states
    tokens: Ids  # [b, K, w]
    log_probs: LogProbs  # [b, K, w]; -inf beyond a position's width


class SpecBlockDrafter(Pretrained):
    """Drafts `passes` blocks of `positions` tokens with a SpecBlock model and its target's embeddings and head."""

    load_model = staticmethod(load_model)

    def __init__(self, model: SpecBlockModel, target: Target, name: str = "specblock"):
        """Join a model and its target. Raises BastionError if they were not made for each other."""
        config = model.config
        check_target(config.body, target)
        try_target(config.body, target)
        self.model, self.target, self.name = model, target, name
        self.digest = model.digest()
        self.depth = config.depth
        self.feature_layers = config.body.target_layers
        token_ids = model.body.token_ids()
        self._token_ids = None if token_ids is None else token_ids.to(target.device)
        self._widths = torch.tensor(config.rank_widths, device=target.device)
        self._most = min(max(config.rank_widths), config.body.draft_vocab or config.body.vocab)

    @torch.no_grad()
    def propose(self, contexts: list[DraftContext]) -> list[Proposal]:
        """Draft the first block of every sequence; embeddings and head run over all sequences together."""
        caches, states = zip(*map(self._read, contexts), strict=True)
        roots = self.path_rows(np.array([[context.tokens[-1]] for context in contexts]), torch.stack(states))
        paths = torch.split(roots, 1)
        hidden = torch.cat([self.model.draft(cache, path) for cache, path in zip(caches, paths, strict=True)])
        temperatures = [context.temperature or 1.0 for context in contexts]
        ranked = self.rank(hidden, torch.tensor(temperatures, device=self.target.device))
        return [SpecBlockProposal(self, caches[i], temperatures[i], paths[i], ranked[i]) for i in range(len(contexts))]

    def _read(self, context: DraftContext) -> tuple[KeyValueCache, Tensor]:
        """Read one sequence's new features; its cache up to the root, and the state [1, hidden] before the root."""
        if context.memory is None:
            context.memory = Memory(self.model.body.new_cache())
        memory: Memory = context.memory
        cache = memory.cache
        if (features := context.take_features(self.model.device, self.model.dtype)) is not None:
            self.model.body.read(cache, features)
            memory.feature = features[-1:].clone()  # a view would keep all of them
        context.check_read(cache.length)
        if memory.feature is None:  # a root without a context
            return cache, torch.zeros(
                1, self.model.config.body.hidden, device=self.model.device, dtype=self.model.dtype
            )
        return cache, self.model.fuse(memory.feature)

    def path_rows(self, tokens: Ids, states: Tensor) -> Tensor:
        """Path rows [n, k, hidden] of tokens [n, k] that were drafted from states [n, k, hidden]."""
        embedded = self.target.embed(torch.from_numpy(tokens).to(self.target.device))
        return self.model.path_rows(embedded.to(self.model.device, self.model.dtype), states)

    def rank(self, hidden: Tensor, temperatures: Tensor) -> list[Ranked]:
        """The best tokens of blocks of n sequences, hidden [n * b, K, hidden], drafted at `temperatures` [n]."""
        count, size = len(temperatures), hidden.shape[1]
        rows = hidden.flatten(0, 1)
        logits = self.target.head(rows.to(self.target.device, self.target.dtype), self._token_ids).float()
        logits = logits / temperatures.repeat_interleave(len(rows) // count)[:, None]
        values, columns = logits.topk(self._most)
        values -= logits.logsumexp(-1, keepdim=True)
        reached = self.model.rank_head(rows).float().softmax(-1).cumsum(-1).to(self.target.device)
        buckets = (reached < self.model.config.coverage).sum(-1).clamp(max=len(self._widths) - 1)
        places = torch.arange(self._most, device=self.target.device)
        values.masked_fill_(places >= self._widths[buckets][:, None], float("-inf"))
        # Rounding may bring the sum of a certain token's probabilities below its own.
        log_probs = values.clamp(max=0).view(-1, size, self._most).cpu().numpy()
        tokens = columns if self._token_ids is None else self._token_ids[columns]
        ids = tokens.view(-1, size, self._most).cpu().numpy()
        each = len(ids) // count
        parts = (slice(i * each, (i + 1) * each) for i in range(count))
        return [Ranked(hidden[part], ids[part], log_probs[part]) for part in parts]


class SpecBlockProposal:
    """A draft of blocks: the first starts at the root, further ones at nodes where an earlier one ends.

    Within a block the distribution of a depth is the same for all nodes.
    """

    def __init__(
        self, drafter: SpecBlockDrafter, cache: KeyValueCache, temperature: float, path: Tensor, ranked: Ranked
    ):
        """Take the root's path row [1, 1, hidden] and its block."""
        self.depth, self.beam = drafter.depth, drafter.model.config.beam
        self.passes = 1
        self._drafter, self._cache, self._ranked, self._paths = drafter, cache, ranked, path
        self._temperature = torch.tensor([temperature], device=drafter.target.device)
        self._blocks = np.zeros(1, np.int64)  # [m]: the block that drafts the children of each node of the frontier
        self._tokens = np.zeros((1, 0), np.int64)  # [m, k]: each node's path behind its block's prefix

    @property
    def ready(self) -> int:
        """Every pass gives as many levels as a block has positions."""
        return self.passes * self._drafter.model.config.positions

    @torch.no_grad()
    def expand(self, frontier: Frontier, width: int) -> Candidates:
        """The best `width` tokens behind each node, as far as the rank head allows."""
        if frontier.depth:
            self._blocks = self._blocks[frontier.rows]
            self._tokens = np.concatenate((self._tokens[frontier.rows], frontier.tokens[:, None]), 1)
        if frontier.depth == self.ready:
            self._pass()
        place = self._tokens.shape[1]
        ranked = self._ranked
        return Candidates(ranked.tokens[self._blocks, place, :width], ranked.log_probs[self._blocks, place, :width])

    def _pass(self) -> None:
        """Start a block at each node of the frontier."""
        drafter = self._drafter
        blocks = torch.from_numpy(self._blocks).to(drafter.model.device)
        rows = drafter.path_rows(self._tokens, self._ranked.hidden[blocks])
        self._paths = torch.cat((self._paths[blocks], rows), 1)
        (self._ranked,) = drafter.rank(drafter.model.draft(self._cache, self._paths), self._temperature)
        self._blocks, self._tokens = np.arange(len(blocks)), self._tokens[:, :0]
        self.passes += 1
