"""Whether speculative decoding writes what plain decoding writes, on given prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Literal

from scipy.stats import kstest

from bastion.decoding.sampling import SamplingParameters
from bastion.errors import BastionError
from bastion.model import Model
from bastion.policies import describe
from bastion.rescoring import Difference, Referee, transform

DRAWS = 48  # texts of the distribution test: with 1,500 tokens it sees a distance of 0.06
DRAWN_TOKENS = 32  # of each, besides the first, which the prefill writes: it speculates nothing
BATCH = 16  # of these texts, written side by side
LEVEL = 1e-4  # p-values below it are violations: one false alarm in ten thousand runs

Outcome = Literal["identical", "near-tie", "violation"]


@dataclass(frozen=True, slots=True)
class Comparison:
    """One prompt, written plainly and speculatively."""

    prompt: str  # its name
    new_tokens: int  # of the speculative text
    difference: Difference | None

    @property
    def outcome(self) -> Outcome:
        """What the difference amounts to."""
        if self.difference is None:
            return "identical"
        return "violation" if self.difference.fault else "near-tie"


@dataclass(frozen=True, slots=True)
class DistributionTest:
    """A Kolmogorov-Smirnov test of the tokens of drawn texts, by `rescoring.transform`, against the uniform law."""

    draws: int  # texts
    tokens: int
    statistic: float  # largest distance of the distribution functions
    p_value: float

    @property
    def violation(self) -> bool:
        """Whether the tokens do not have the target's distribution."""
        return self.p_value < LEVEL


@dataclass(slots=True)
class Verification:
    """What `verify` found."""

    comparisons: list[Comparison] = field(default_factory=list)
    distribution: DistributionTest | None = None  # None at temperature 0
    rounds: int = 0  # of the speculative texts that were compared
    nodes: int = 0  # drafted in them
    tokens: int = 0  # accepted in them, bonus tokens included

    def count(self, outcome: Outcome) -> int:
        """How many prompts ended so."""
        return sum(one.outcome == outcome for one in self.comparisons)

    @property
    def passed(self) -> bool:
        """Whether there is no violation."""
        return not self.count("violation") and not (self.distribution and self.distribution.violation)


def verify(
    model: Model,
    prompts: Sequence[tuple[str, str]],
    *,
    max_new_tokens: int = 48,
    seed: int = 0,
    draws: int = DRAWS,
    progress: Callable[[float], None] = lambda share: None,
    **sampling: Any,
) -> Verification:
    """Write a text for each prompt (name, text) plainly and under the model's policy, and judge the differences.

    Each text has a seed of its own, with which both ways must lead to the same text above temperature 0, too. There a
    test of the first tokens' distribution follows: `draws` texts, spread evenly over the prompts. `sampling` as in
    `Model.stream`; `progress` is called with the share that is done. Raises BastionError for what cannot be used, and
    if nothing was drafted, so that nothing was verified.
    """
    settings = sampling | {"max_new_tokens": max_new_tokens}
    parameters = SamplingParameters(**(model.sampling_defaults | sampling), seed=seed)
    SamplingParameters(seed=seed + len(prompts) + draws)  # beyond the last one that is used
    _check(model, prompts, max_new_tokens, draws)
    plainly = model.with_policy("plain")
    referee, found = Referee(model.target, parameters), Verification()
    batches = _batches([text for _, text in prompts], draws if parameters.temperature > 0 else 0)
    steps = len(prompts) + len(batches)
    for place, (name, text) in enumerate(prompts):
        plain = plainly.generate(text, seed=seed + place, **settings).token_ids
        result = model.generate(text, seed=seed + place, **settings)
        difference = referee.judge(model.encode(text), plain, result.token_ids, seed + place)
        found.comparisons.append(Comparison(name, len(result.token_ids), difference))
        found.rounds += result.stats.rounds
        found.nodes += sum(result.stats.tree_sizes)
        found.tokens += sum(result.stats.accepted_lengths)
        progress((place + 1) / steps)
    if not found.nodes:
        raise BastionError(
            f"policy {describe(model.policy)} drafted nothing on these prompts, so nothing was verified: "
            "use one that always drafts, such as fixed:16, or other prompts"
        )
    if batches:
        settings["max_new_tokens"] = min(max_new_tokens, DRAWN_TOKENS + 1)
        values: list[float] = []
        noise, next_seed = Random(seed), seed + len(prompts)
        for number, (text, size) in enumerate(batches):
            values += _draw(model, referee, text, size, next_seed, settings, noise)
            next_seed += size
            progress((len(prompts) + number + 1) / steps)
        if not values:
            raise BastionError("all drawn texts ended with their first token, so nothing was tested: use other prompts")
        test = kstest(values, "uniform")
        found.distribution = DistributionTest(draws, len(values), float(test.statistic), float(test.pvalue))
    return found


def _check(model: Model, prompts: Sequence[tuple[str, str]], max_new_tokens: int, draws: int) -> None:
    if draws < 1:
        raise BastionError(f"draws must be 1 or more, not {draws}")
    if max_new_tokens < 2:
        raise BastionError(f"max_new_tokens must be 2 or more, not {max_new_tokens}: the prefill writes the first")
    if not prompts:
        raise BastionError("there are no prompts, so nothing to verify: give some")
    if model.target.tree_support == "none":
        raise BastionError(f"{model.target.name} decodes plainly, so there is nothing to verify")
    if not model.policy.max_nodes:
        raise BastionError("policy plain drafts nothing, so there is nothing to verify: use another, such as fixed:16")


def _batches(texts: Sequence[str], draws: int) -> list[tuple[str, int]]:
    """Prompts, and how many texts are drawn for each of them at once; `draws` in all, spread evenly over `texts`."""
    counts = [(place + 1) * draws // len(texts) - place * draws // len(texts) for place in range(len(texts))]
    return [
        (text, min(BATCH, count - start))
        for text, count in zip(texts, counts, strict=True)
        for start in range(0, count, BATCH)
    ]


def _draw(
    model: Model, referee: Referee, text: str, size: int, seed: int, settings: dict[str, Any], noise: Random
) -> list[float]:
    """Draw texts for a prompt; the transforms of those tokens that rounds wrote.

    A token's transform is uniform and independent of those of the tokens before it exactly if the token has the
    target's distribution given the text before it. Tokens are put in descending order of probability, so that a rule
    which favours probable ones shows; `noise` places each within its token's own mass.
    """
    answers = [one.token_ids for one in model.generate_batch([text] * size, seed=seed, **settings)]
    return [
        transform(row, token, referee.parameters, noise.random())
        for answer, rows in zip(answers, referee.scores(model.target, model.encode(text), answers), strict=True)
        for row, token in zip(rows[1:], answer[1:], strict=True)
    ]
