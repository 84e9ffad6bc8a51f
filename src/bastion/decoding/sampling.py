"""From the target's logits to its next token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, RepetitionPenaltyLogitsProcessor

from bastion.errors import BastionError

HEAD_CANDIDATES = 1024  # enough to hold the nucleus nearly always; sorting a whole vocabulary costs more than a layer


@dataclass(slots=True)
class SamplingParameters:
    """How the target's token is drawn, with the meaning and the order that transformers gives these names.

    Raises BastionError for values outside their range.
    """

    temperature: float = 0.0  # 0: the most probable token
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None  # None: a different text each time
    processors: list[LogitsProcessor] = field(default_factory=list)  # applied after the repetition penalty

    def __post_init__(self) -> None:
        kinds = {"temperature": float, "top_p": float, "min_p": float, "repetition_penalty": float, "top_k": int}
        for name, kind in kinds.items() if self.seed is None else (kinds | {"seed": int}).items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | kind):
                raise BastionError(f"{name} must be a {'whole ' if kind is int else ''}number, not {value!r}")
        checks = {
            "temperature": (self.temperature >= 0 and self.temperature < float("inf"), "0 or more"),
            "top_k": (self.top_k >= 0, "0 (off) or more"),
            "top_p": (0 < self.top_p <= 1, "above 0 and at most 1"),
            "min_p": (0 <= self.min_p <= 1, "between 0 and 1"),
            "repetition_penalty": (0 < self.repetition_penalty < float("inf"), "above 0"),
            "seed": (self.seed is None or -(2**63) <= self.seed < 2**64, "a 64-bit number"),
        }
        for name, (valid, wanted) in checks.items():
            if not valid:
                raise BastionError(f"{name} must be {wanted}, not {getattr(self, name)}")


class Sampler:
    """Draws the tokens of one sequence.

    One uniform number is used per token written, and turned into a token by inverting the distribution function.
    So the n-th token depends on the seed and the text before it alone, not on how many tokens a pass verified: with
    the same seed, tree decoding writes what plain decoding writes, at every temperature.
    """

    def __init__(self, parameters: SamplingParameters):
        self.parameters = parameters
        self.processors = LogitsProcessorList()
        if parameters.repetition_penalty != 1.0:
            self.processors.append(RepetitionPenaltyLogitsProcessor(penalty=parameters.repetition_penalty))
        self.processors.extend(parameters.processors)
        self.generator = torch.Generator()
        if parameters.seed is None:
            self.generator.seed()
        else:
            self.generator.manual_seed(parameters.seed)

    def chooser(self, logits: Tensor, text: list[int]) -> Callable[[int, list[int]], int]:
        """A function for `acceptance.walk`: from node and path to the token that follows `text` and the path.

        logits [nodes, vocab].
        """
        if self.parameters.temperature == 0 and not self.processors:
            # numpy's argmax takes a tenth of the time that torch's takes on a CPU
            rows = logits.float().numpy() if logits.device.type == "cpu" else logits
            best = rows.argmax(-1).tolist()
            return lambda node, path: int(best[node])
        return lambda node, path: self._token(logits[node].float(), text, path)

    def _token(self, scores: Tensor, text: list[int], path: list[int]) -> int:
        if self.processors:
            ids = torch.tensor([text + path], device=scores.device)
            scores = self.processors(ids, scores[None])[0]
        if self.parameters.temperature == 0:
            return int(scores.argmax())
        tokens, probabilities = distribution(scores, self.parameters)
        cumulative = probabilities.double().cumsum(0)
        if not cumulative[-1] > 0:
            raise BastionError("the target's logits are not finite: use dtype float32 or bfloat16")
        uniform = torch.rand((), generator=self.generator, dtype=torch.float64).item()
        position = int(torch.searchsorted(cumulative, uniform * float(cumulative[-1]), right=True))
        return int(tokens[min(position, len(tokens) - 1)])


def distribution(scores: Tensor, parameters: SamplingParameters) -> tuple[Tensor, Tensor]:
    """The processed distribution over the next token: ascending ids [k] and their probabilities [k], which sum to 1.

    scores [vocab]: float32 logits, all other processors applied. Temperature, top-k, top-p and min-p follow in the
    order of transformers, on the head of the distribution where that suffices.
    """
    # At most 0, so no temperature is too low, as long as it is a number in float32.
    scaled = (scores - scores.max()) / max(parameters.temperature, 1e-30)
    vocabulary = len(scaled)
    cut = parameters.top_k or (HEAD_CANDIDATES if parameters.top_p < 1 or parameters.min_p > 0 else vocabulary)
    if cut >= vocabulary:
        head, tokens = scaled.sort(descending=True) if parameters.top_p < 1 else (scaled, None)
    else:
        head, tokens = scaled.topk(cut)
    total = head.logsumexp(0) if parameters.top_k else scaled.logsumexp(0)
    probabilities = (head - total).exp()
    keep = torch.ones_like(head, dtype=torch.bool)
    if parameters.top_p < 1:
        before = probabilities.cumsum(0) - probabilities  # a token stays while those before it have less than top_p
        keep &= before < parameters.top_p
    if parameters.min_p > 0:
        keep &= probabilities >= parameters.min_p * probabilities.max()
    if not parameters.top_k and tokens is not None and cut < vocabulary and bool(keep[-1]):
        # The nucleus reaches beyond the head: look at the whole vocabulary after all.
        wide = SamplingParameters(parameters.temperature, vocabulary, parameters.top_p, parameters.min_p)
        return distribution(scores, wide)
    if tokens is None:
        tokens = torch.arange(vocabulary, device=scores.device)
    kept, order = tokens[keep].sort()
    probabilities = probabilities[keep][order]
    return kept, probabilities / probabilities.sum()
