"""Calibrated confidence: one softmax temperature a depth, so that path probabilities say what will be accepted."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.interpolate import CubicSpline
from scipy.optimize import minimize_scalar

from bastion.cost.base import FloatArray
from bastion.decoding.budget import FixedBudget, Throughput
from bastion.drafters.dflash.config import DFlashConfig
from bastion.drafters.dflash.drafter import DFlashDrafter
from bastion.drafters.marginal import MarginalProposal
from bastion.errors import BastionError
from bastion.files import write_text
from bastion.targets.base import Target
from bastion.training.data import Conversation
from bastion.training.evaluation import TREES, Evaluation, evaluate
from bastion.training.simulation import FeatureSource, SimulatedRound, Subset, simulate

LARGEST = 8.0  # temperature; the smallest is its inverse
GRID = np.linspace(-np.log(LARGEST), np.log(LARGEST), 41)  # logarithms of the temperatures that are tried out
LEAST_TOKENS = 30  # fewer say too little about a depth


@dataclass(frozen=True, slots=True)
class Fit:
    """Temperatures that a drafter's distributions should be taken at, and what they were fitted to."""

    temperatures: tuple[float, ...]  # of depth 1, 2, ...; on top of those the drafter has already
    tokens: tuple[int, ...]  # of the answers, at each depth
    outside: int  # further tokens, which the draft vocabulary lacks


def fit_temperatures(rounds: Iterable[SimulatedRound], depth: int) -> Fit:
    """Fit temperature scaling (Guo et al. 2017, arXiv 1706.04599, section 4.2) to each of `depth` depths.

    tau_d minimises the negative log-likelihood of the answer's token at depth d under softmax(logits_d / tau_d), over
    the rounds in which the answer's tokens before d were in the grown tree: those are the paths whose children's
    probabilities decide the tree. A token outside the draft vocabulary has no logit and is skipped, so what is fitted
    is the distribution among the tokens that can be drafted. A depth with too few tokens takes the temperature of the
    depth before. Raises BastionError if depth 1 has too few, or the drafter has no marginal distributions.

    The likelihood is summed up at a grid of temperatures while rounds come in, so that no row of logits is kept;
    between them it is a spline, whose minimum is sought.
    """
    losses, tokens, outside = np.zeros((depth, len(GRID))), np.zeros(depth, np.int64), 0
    for one in rounds:
        if one.proposal is None:
            continue
        if not isinstance(one.proposal, MarginalProposal):
            raise BastionError(
                "this drafter has no distribution a depth: confidence is fitted for DFlash drafters only"
            )
        # A round writes the tokens that were in the tree and the one behind them: exactly the depths that were reached.
        for place, token in enumerate(one.record.tokens[: one.proposal.depth]):
            column = one.proposal.column(token)
            if column is None:
                outside += 1
                continue
            row = one.proposal.log_probs[place]
            inverse = row.new_tensor(np.exp(-GRID))
            loss = (row * inverse[:, None]).logsumexp(-1) - row[column] * inverse
            losses[place] += loss.double().cpu().numpy()
            tokens[place] += 1
    if tokens[0] < LEAST_TOKENS:
        raise BastionError(f"{tokens[0]} rounds are too few to fit temperatures, of {LEAST_TOKENS}: give more data")
    temperatures: list[float] = []
    for curve, count in zip(losses, tokens.tolist(), strict=True):
        temperatures.append(_best(curve / count) if count >= LEAST_TOKENS else temperatures[-1])
    return Fit(tuple(temperatures), tuple(tokens.tolist()), outside)


def _best(losses: FloatArray) -> float:
    """The temperature of the least loss, between those of the grid."""
    spline = CubicSpline(GRID, losses)
    found = minimize_scalar(lambda place: float(spline(place)), bounds=(GRID[0], GRID[-1]), method="bounded")
    return float(np.exp(found.x))


@dataclass(frozen=True, slots=True)
class Calibrated:
    """A drafter's confidence before and after the fit, on conversations that it was not fitted to."""

    fit: Fit
    temperatures: tuple[float, ...]  # to store: the drafter's own times the fitted ones
    before: Evaluation
    after: Evaluation

    @property
    def better(self) -> bool:
        """Whether the calibration error fell."""
        return self.after.reliability.error < self.before.reliability.error


def calibrate_confidence(
    target: Target,
    drafter: DFlashDrafter,
    conversations: Sequence[Conversation],
    features: FeatureSource,
    trees: Sequence[int] = TREES,
    progress: Callable[[float], None] = lambda share: None,
    policy: Throughput | None = None,
) -> Calibrated:
    """Fit draft temperatures to every second conversation, and measure on the others. Parameters as in `evaluate`.

    Raises BastionError for too little data.
    """
    halves = [range(start, len(conversations), 2) for start in (0, 1)]
    if not halves[1]:
        raise BastionError("one half of the conversations is fitted to, the other measured on: give more than one")
    fitted, held = ([conversations[index] for index in half] for half in halves)
    rounds = simulate(target, drafter, FixedBudget(max(trees)), fitted, Subset(features, halves[0]))
    fit = fit_temperatures(rounds, drafter.depth)
    temperatures = tuple(
        round(own * factor, 4) for own, factor in zip(drafter.draft_temperatures, fit.temperatures, strict=True)
    )
    corrected = drafter.with_draft_temperatures(temperatures)
    rest = Subset(features, halves[1])
    before = evaluate(target, drafter, held, rest, trees, lambda share: progress(0.1 + 0.45 * share), policy)
    after = evaluate(target, corrected, held, rest, trees, lambda share: progress(0.55 + 0.45 * share), policy)
    return Calibrated(fit, temperatures, before, after)


def write_temperatures(folder: Path, temperatures: Iterable[float]) -> None:
    """Store a DFlash checkpoint's draft temperatures in its config.json, all or nothing.

    Raises BastionError if there is no such checkpoint, they do not fit it, or the folder cannot be written.
    """
    raw = DFlashConfig.read(folder).raw
    raw["dflash_config"]["draft_temperatures"] = list(temperatures)
    DFlashConfig.from_dict(raw)
    try:
        write_text(folder / "config.json", json.dumps(raw, indent=2) + "\n")
    except OSError as error:
        raise BastionError(
            f"cannot write to {folder} ({error.strerror}): copy the drafter to a folder of yours"
        ) from error
