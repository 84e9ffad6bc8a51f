"""What transformers hangs into `generate`, around one text of a batch: processors, criteria, columns of tokens.

Texts of a batch are written side by side but not in step, so each is shown to processors and criteria as transformers
would show it at that token: left padding included, and as a batch of equal rows, of which the text's own is read. So
what keeps something for each row (prompts, padding lengths) finds it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    StoppingCriteriaList,
    SynthIDTextWatermarkLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

from bastion.decoding.stopping import StopRules, TextStream
from bastion.errors import BastionError

# They know nothing of rows, and some sort the vocabulary: too slow to do for a whole batch at each token.
WARPERS = (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper, TypicalLogitsWarper)
# They remember their last call: right for one text, wrong where the calls of several texts alternate.
FOR_ONE_TEXT = (UnbatchedClassifierFreeGuidanceLogitsProcessor, SynthIDTextWatermarkLogitsProcessor)


class RowProcessors(LogitsProcessor):  # type: ignore[misc]  # transformers is untyped
    """The logits processors of a batch, for the text in one of its rows.

    `acceptance.walk` chooses each token once, in the order of the text, so a processor sees the calls that it would see
    in `generate`, and `logits` and `scores` [1, vocab] of each token are kept, if asked for.
    """

    def __init__(
        self,
        processors: LogitsProcessorList,
        padding: Tensor,
        row: int,
        batch: int,
        keep_logits: bool = False,
        keep_scores: bool = False,
    ):
        """Take the processors, the row's left padding [p], its index, and what to keep.

        Raises BastionError for processors that serve one text only.
        """
        for processor in processors:
            if batch > 1 and isinstance(processor, FOR_ONE_TEXT):
                raise BastionError(f"{type(processor).__name__} is honoured for one text at a time: pass one prompt")
        self.processors, self.padding, self.row, self.batch = processors, padding[None], row, batch
        self.keep_logits, self.keep_scores = keep_logits, keep_scores
        self.logits: list[Tensor] = []
        self.scores: list[Tensor] = []

    @property
    def needed(self) -> bool:
        """Whether there is anything to do."""
        return bool(self.processors) or self.keep_logits or self.keep_scores

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Processed scores [1, vocab] of the token after `input_ids` [1, n]."""
        if self.keep_logits:
            self.logits.append(scores.clone())  # a view would keep the logits of all nodes
        ids = torch.cat((self.padding.to(input_ids.device), input_ids), 1)
        for processor in self.processors:
            if type(processor) in WARPERS:
                scores = processor(ids, scores)
            else:
                scores = processor(ids.repeat(self.batch, 1), scores.repeat(self.batch, 1))[self.row, None]
        if self.keep_scores:
            self.scores.append(scores.clone())
        return scores


class RowStream(TextStream):
    """A text that ends where transformers' stopping criteria end it."""

    def __init__(self, criteria: StoppingCriteriaList, prompt: Tensor, max_new_tokens: int, processors: RowProcessors):
        """Take the criteria, the row's prompt [n] with its padding, and the processors, which know the batch.

        Raises BastionError if `max_new_tokens` is below 1.
        """
        super().__init__(None, StopRules(max_new_tokens))
        self._criteria, self._prompt, self._processors = criteria, prompt, processors

    def push(self, tokens: Sequence[int]) -> str:
        """Take the tokens of a round, up to the one that ends the text; there is no text to return."""
        device = self._prompt.device
        for token in tokens:
            if self.finish_reason:
                break
            self.tokens.append(token)
            ids = torch.cat((self._prompt, torch.tensor(self.tokens, device=device)))
            batch = self._processors.batch
            scores = [one.expand(batch, -1) for one in self._processors.scores[: len(self.tokens)]]
            if self._criteria(ids.expand(batch, -1), tuple(scores) if scores else None)[self._processors.row]:
                self.finish_reason = "stop"
        return ""


def column(streams: Sequence[TextStream], step: int, padding: int) -> list[int] | None:
    """The tokens [batch] of a step, padding for texts that have ended; None if not all are known, or all ended before.

    transformers writes a batch, and feeds its streamers, column by column.
    """
    unwritten = [stream for stream in streams if len(stream.tokens) <= step]
    if len(unwritten) == len(streams) or any(stream.finish_reason is None for stream in unwritten):
        return None
    return [stream.tokens[step] if step < len(stream.tokens) else padding for stream in streams]


def stacked(kept: Sequence[Sequence[Tensor]], lengths: Sequence[int]) -> tuple[Tensor, ...]:
    """Of each step, what the texts kept [1, vocab] as one tensor [batch, vocab]; NaN for texts that had ended."""
    nothing = torch.full_like(kept[0][0], float("nan"))
    return tuple(
        torch.cat([rows[step] if step < length else nothing for rows, length in zip(kept, lengths, strict=True)])
        for step in range(max(lengths))
    )
