"""Measures what a round costs, on the real decode path."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch

from bastion.cost.base import Measurement, VerifyCost
from bastion.decoding.budget import BudgetPolicy
from bastion.decoding.loop import Generation, decode, prefill, tree_rows
from bastion.decoding.pace import ROOM
from bastion.decoding.sampling import Sampler, SamplingParameters
from bastion.decoding.stats import RoundRecord, Stopwatch
from bastion.decoding.stopping import StopRules, TextStream
from bastion.decoding.tree import DraftTree
from bastion.drafters.base import DraftContext, Drafter, LogProbs, Outlook
from bastion.targets.base import Target

CONTEXTS = (64, 256, 1024)  # committed tokens
ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
WORTHWHILE = 4.0  # a pass that costs this many passes of one row is beyond any sensible budget: the grid ends there
REPEATS = 3
FEW = 4  # passes up to here are timed three times a repeat: whether to speculate at all hangs on them
ROUNDS = 24  # decode rounds that are timed for the drafter and the bookkeeping
VERIFIED = 12  # nodes of these rounds


@dataclass(slots=True)
class RoundTimes:
    """What a round costs beside its verify pass: medians, in seconds."""

    draft: float  # the drafter's first pass
    auxiliary: float  # growth, acceptance and commit
    deepen: float  # each further pass of the drafter; 0 if it makes none


@torch.inference_mode()
def probe_passes(target: Target, advance: Callable[[float], None] = lambda share: None) -> list[Measurement]:
    """Time verify passes over a grid of rows and contexts.

    The passes carry a tree mask, as in decoding (a chain where the target takes no trees). A shared machine may run at
    half its speed for seconds at a time, so each pass is timed between two reference passes, of one row behind the
    shortest context, and counts in units of these; `advance` is told the share done, 0 to 1.
    """
    generator = torch.Generator().manual_seed(0)
    vocabulary = target.shape.vocab
    contexts = [c for c in CONTEXTS if 2 * c <= target.max_context] or [target.max_context // 4]
    target.set_feature_layers(())  # other texts may have used the target before
    generations = []
    for context in contexts:
        prompt = torch.randint(vocabulary, (context,), generator=generator).tolist()
        generations.append(_generation(target, prompt, 1))
        prefill(target, generations[-1])
    advance(0.2)
    limit = target.max_context - contexts[-1] if target.tree_support == "chain" else ROWS[-1]
    grid = _grid(target, generations[0], [rows for rows in ROWS if rows <= limit], generator)
    references = [_time_pass(target, generations[0], 1, generator)]
    ratios: dict[tuple[int, int], list[float]] = {}
    for repeat in range(REPEATS):
        for place, rows in enumerate(grid):
            for generation in generations:
                for _ in range(3 if rows <= FEW else 1):
                    seconds = _time_pass(target, generation, rows, generator)
                    references.append(_time_pass(target, generations[0], 1, generator))
                    ratio = seconds / statistics.mean(references[-2:])
                    ratios.setdefault((rows, generation.cache.length), []).append(ratio)
            advance(0.2 + 0.8 * (repeat + (place + 1) / len(grid)) / REPEATS)
    typical = statistics.median(references)
    return [Measurement(*size, typical * statistics.median(found)) for size, found in ratios.items()]


def _generation(target: Target, prompt: list[int], max_new_tokens: int) -> Generation:
    stream = TextStream(None, StopRules(max_new_tokens))
    return Generation(DraftContext(prompt), target.new_cache(), Sampler(SamplingParameters()), stream)


def _grid(target: Target, generation: Generation, rows: list[int], generator: torch.Generator) -> list[int]:
    """Row counts worth measuring: up to the second in a row whose pass is no longer worthwhile (four at least)."""
    single = min(_time_pass(target, generation, 1, generator) for _ in range(3))
    beyond = 0
    for place, count in enumerate(rows):
        seconds = min(_time_pass(target, generation, count, generator) for _ in range(3))
        beyond = beyond + 1 if seconds > WORTHWHILE * single else 0
        if place >= 3 and beyond == 2:
            return rows[: place + 1]
    return rows


def _time_pass(target: Target, generation: Generation, rows: int, generator: torch.Generator) -> float:
    """Seconds of one pass over a random tree (or chain) of `rows` rows, which stays uncommitted."""
    tokens = torch.randint(target.shape.vocab, (rows,), generator=generator).numpy()
    depths = np.arange(rows)
    parents = depths - 1
    if target.tree_support == "tree":
        parents = parents // 2  # a binary tree
        depths = np.log2(depths + 1).astype(np.int64)
    tree = DraftTree(tokens, parents, depths, np.zeros(rows, np.float32))
    watch = Stopwatch(target.device)
    with watch.stage("verify"):
        target.forward([tree_rows(target, tree, generation.cache)])
    return watch.seconds["verify"]


@dataclass(slots=True)
class GrowMuchVerifyLittle(BudgetPolicy):
    """What a throughput policy tends to do: it grows a tree, and verifies its best nodes."""

    max_nodes: int
    width: int | None
    deep: bool = False  # whether the drafter is run again for deeper levels
    asked: bool = False  # whether there were any

    def choose(self, gains: LogProbs, contexts: Sequence[int], passes: Sequence[int]) -> int:
        """VERIFIED, if there are as many."""
        return min(VERIFIED, len(gains))

    def deepens(self, outlook: Outlook, context: int) -> bool:
        """The first always; of the others all, or none."""
        if outlook.passes == 0:
            return True
        self.asked = True
        return self.deep


@torch.inference_mode()
def probe_rounds(target: Target, drafter: Drafter, verify: VerifyCost, max_nodes: int) -> RoundTimes:
    """Time drafting and bookkeeping in real rounds, on a text that repeats itself.

    Trees have up to `max_nodes` nodes, and no more than `auto` would grow. The times count in units of the verify pass
    of the same round, which is taken to last as long as `verify` says.
    """
    generator = torch.Generator().manual_seed(0)
    repeats = max(1, min(4, target.max_context // 64))
    phrase = torch.randint(target.shape.vocab, (24,), generator=generator).tolist()
    prompt = phrase * repeats
    policy = GrowMuchVerifyLittle(min(max_nodes, ROOM * VERIFIED), None if target.tree_support == "tree" else 1)
    length = min(ROUNDS * (drafter.depth + 1), target.max_context - len(prompt))

    def rounds() -> list[RoundRecord]:
        found = decode(target, drafter, policy, [_generation(target, prompt, length)])
        return list(islice((record for _, _, record in found if record is not None and record.passes), ROUNDS))

    def seconds(record: RoundRecord, *stages: str) -> float:
        expected = float(verify.seconds(np.array([1 + record.tree.size]), record.context)[0])
        return sum(record.seconds[stage] for stage in stages) / record.seconds["verify"] * expected

    rest = "grow", "accept", "commit"
    shallow = rounds()
    draft = statistics.median(seconds(record, "draft") for record in shallow)
    auxiliary = statistics.median(seconds(record, *rest) for record in shallow)
    if not policy.asked:
        return RoundTimes(draft, auxiliary, 0.0)
    policy.deep = True
    further = [(seconds(record, *rest) - auxiliary) / (record.passes - 1) for record in rounds() if record.passes > 1]
    return RoundTimes(draft, auxiliary, max(statistics.median(further), 0.0) if further else 0.0)
