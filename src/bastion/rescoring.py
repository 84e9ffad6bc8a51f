"""Plain passes over texts that are written already: what the target would have chosen, and what rounding may change."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from bastion.decoding.loop import PREFILL_ROWS
from bastion.decoding.sampling import Sampler, SamplingParameters, distribution
from bastion.errors import BastionError
from bastion.targets.base import Rows, Target
from bastion.targets.loading import load_target

ROUNDING = {torch.float32: 2e-5, torch.float16: 6e-3, torch.bfloat16: 3e-2}
# How far rounding may move the difference of two logits, as a share of the largest one: errors are relative to what is
# added up. On texts of SmolLM2-135M the differences between the eight best logits moved by at most 3e-6, 3e-3 and
# 1.8e-2 of it against a float32 pass of another shape; the rest is room for deeper models. A wrong token is mostly
# further off.


@dataclass(frozen=True, slots=True)
class Difference:
    """The first token in which a speculative text differs from the plain one."""

    position: int  # of the new token, from 0
    plain: int | None  # tokens; None: the text had ended
    speculative: int | None
    gap: float | None = None  # plain's logit less the other's, penalties applied, in the run's dtype
    gap_float32: float | None = None  # the same by a pass in float32
    fault: str = ""  # why rounding does not explain it; empty: a near-tie


class Referee:
    """Judges differences between two texts that a target wrote with the same sampling parameters."""

    def __init__(self, target: Target, parameters: SamplingParameters):
        self.target, self.parameters = target, parameters
        self._processors = Sampler(parameters).processors
        self._float32: Target | None = target if target.dtype == torch.float32 else None

    @property
    def float32(self) -> Target:
        """The target in float32: itself, or a copy that is loaded when it is first needed."""
        if self._float32 is None:
            try:
                copy = load_target(self.target.name, self.target.device, torch.float32).target
            except torch.OutOfMemoryError as error:
                raise BastionError(
                    f"there is no memory for {self.target.name} in float32, which judges differences: verify with "
                    "--device cpu, or --dtype float32"
                ) from error
            if copy.digest != self.target.digest:
                raise BastionError(f"{self.target.name} has changed since it was loaded, or has several revisions")
            self._float32 = copy
        return self._float32

    def judge(self, prompt: list[int], plain: list[int], speculative: list[int], seed: int) -> Difference | None:
        """The first difference of two texts after a prompt, and whether rounding explains it; None without one.

        Both tokens must be ones that the target may choose if rounding moves its float32 logits. After a near-tie the
        speculative text is a text of its own, so that goes for all of its later tokens, too.
        """
        pairs = enumerate(zip_longest(plain, speculative))
        differing = next((at for at, (one, other) in pairs if one != other), None)
        if differing is None:
            return None
        if differing >= min(len(plain), len(speculative)):
            one, other = (text[differing] if differing < len(text) else None for text in (plain, speculative))
            return Difference(differing, one, other, fault="one text ends where the other goes on")
        ours, theirs = plain[differing], speculative[differing]
        own = next(self.scores(self.target, prompt, [speculative[: differing + 1]]))[-1]
        exact = next(self.scores(self.float32, prompt, [speculative]))
        uniforms = self._uniforms(seed, len(speculative))
        gap, gap_float32 = (float(scores[ours] - scores[theirs]) for scores in (own, exact[differing]))
        fault = self._fault(exact[differing], ours, uniforms[differing])
        if fault:
            fault = f"plain decoding's own token: {fault}"
        for at in range(differing, len(speculative)):
            if not fault and (fault := self._fault(exact[at], speculative[at], uniforms[at])) and at > differing:
                fault = f"later, at {at}: {fault}"
        return Difference(differing, ours, theirs, gap, gap_float32, fault)

    def scores(self, target: Target, prompt: list[int], texts: Sequence[list[int]]) -> Iterator[list[Tensor]]:
        """For each text, the float32 scores [vocab] from which each token is chosen, penalties applied."""
        for text, logits in zip(texts, replay(target, prompt, texts), strict=True):
            yield [self._process(row, prompt + text[:at]) for at, row in enumerate(logits)]

    def _process(self, logits: Tensor, text: list[int]) -> Tensor:
        scores: Tensor = self._processors(torch.tensor([text], device=logits.device), logits.float()[None])[0]
        return scores

    def _uniforms(self, seed: int, count: int) -> list[float]:
        """The uniform numbers of a text's tokens: `Sampler` uses one for each, in turn."""
        generator = Sampler(replace(self.parameters, seed=seed)).generator
        return [torch.rand((), generator=generator, dtype=torch.float64).item() for _ in range(count)]

    def _fault(self, scores: Tensor, token: int, uniform: float) -> str:
        """Why rounding cannot have led to a token, given the float32 scores; empty if it can."""
        tolerance = ROUNDING[self.target.dtype] * float(scores[scores.isfinite()].abs().max())
        if self.parameters.temperature == 0:
            below = float(scores.max() - scores[token])
            return (
                "" if below <= tolerance else f"{below:.3g} below the largest logit; rounding explains {tolerance:.2g}"
            )
        low, high = reach(scores, token, self.parameters, tolerance)
        if low <= uniform <= high:
            return ""
        due = f"due between {low:.6f} and {high:.6f}" if low <= high else "not in the distribution"
        return f"{due}, drawn with the uniform number {uniform:.6f}"


@torch.inference_mode()
def replay(target: Target, prompt: list[int], texts: Sequence[list[int]]) -> Iterator[Tensor]:
    """Logits [tokens, vocab] from which the target chooses each token of each text after a prompt, by plain passes."""
    cache = target.new_cache(len(prompt) + max(map(len, texts)))
    target.set_feature_layers(())
    for start in range(0, len(prompt), PREFILL_ROWS):
        piece = prompt[start : start + PREFILL_ROWS]
        first = target.forward([_rows(target, piece, cache, len(piece) - 1, len(prompt))])[0].logits
        target.commit(cache, range(len(piece)))
    for text in texts:  # each overwrites the rows of the one before, which are never committed
        rest = [target.forward([_rows(target, text[:-1], cache)])[0].logits] if len(text) > 1 else []
        yield torch.cat([first, *rest])


def _rows(target: Target, tokens: list[int], cache: Any, first_logit: int = 0, prompt_length: int = 0) -> Rows:
    positions = torch.arange(cache.length, cache.length + len(tokens), device=target.device)
    return Rows(torch.tensor(tokens, device=target.device), positions, cache, None, first_logit, prompt_length)


def transform(scores: Tensor, token: int, parameters: SamplingParameters, within: float) -> float:
    """The mass of the tokens more probable than `token`, and the share `within` of its own; 1 if it has none.

    The probability-integral transform of the token's rank in the processed distribution. scores [vocab], float32.
    """
    tokens, masses = distribution(scores, parameters)
    masses = masses.double()
    own = masses[tokens == token].sum()
    before = masses[(masses > own) | ((masses == own) & (tokens < token))].sum()
    return min(float(before + within * own), 1.0)


def reach(scores: Tensor, token: int, parameters: SamplingParameters, tolerance: float) -> tuple[float, float]:
    """The least and the largest uniform number with which `Sampler` may choose a token; (1, 0) if with none.

    scores [vocab] in float32, of which the difference of any two may be off by `tolerance`. Then the log-odds of a set
    of tokens are off by x = `tolerance / temperature` at most, and a probability by x / 4. Top-k, top-p and min-p each
    keep a number of the best scores: moving top-p by x / 4 and min-p by a factor of exp(x) bounds that number, and the
    last score kept is off by `tolerance`. What lies in between may be kept or not.
    """
    shift, whole = tolerance / parameters.temperature, parameters.top_p == 1
    strict = replace(
        parameters,
        top_p=1.0 if whole else max(parameters.top_p - shift / 4, 1e-9),
        min_p=min(parameters.min_p * math.exp(min(shift, 50)), 1.0),
    )
    loose = replace(parameters, top_p=min(parameters.top_p + shift / 4, 1.0), min_p=parameters.min_p * math.exp(-shift))
    fewest, most = distribution(scores, strict)[0], distribution(scores, loose)[0]
    sure = scores >= scores[fewest].min() + (tolerance if len(fewest) < len(scores) else 0.0)
    maybe = scores >= scores[most].min() - tolerance
    if not maybe[token]:
        return 1.0, 0.0
    weights = ((scores - scores.max()) / max(parameters.temperature, 1e-30)).double().exp()
    surely, possibly = weights * sure, weights * maybe
    least = math.exp(-shift) * float(surely[:token].sum())
    above = math.exp(-shift) * float(surely[token + 1 :].sum())
    rest, up_to = float(possibly[token:].sum()), float(possibly[: token + 1].sum())
    tiny = 1e-300  # at very low temperatures all of them may be 0
    return least / (least + rest + tiny), (up_to + tiny) / (up_to + above + tiny)
