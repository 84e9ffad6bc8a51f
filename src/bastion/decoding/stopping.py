"""When a text ends, and what of it may be shown already."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from bastion.errors import BastionError

FinishReason = Literal["eos", "stop", "length"]


@dataclass(frozen=True, slots=True)
class StopRules:
    """What ends a text. Raises BastionError for a rule that cannot be followed."""

    max_new_tokens: int = 256
    eos_ids: frozenset[int] = frozenset()
    strings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.max_new_tokens, int) or self.max_new_tokens < 1:
            raise BastionError(f"max_new_tokens must be 1 or more, not {self.max_new_tokens}")
        if any(not string for string in self.strings):
            raise BastionError("a stop string must not be empty")


@dataclass(slots=True)
class TextStream:
    """Turns tokens into text piece by piece: whole characters only, and nothing of a stop string.

    `push` returns what is certain. The pieces joined are the text, trimmed before the first stop string.
    """

    tokenizer: Any
    rules: StopRules
    finish_reason: FinishReason | None = None
    tokens: list[int] = field(default_factory=list)  # all that count, the one that ended the text included
    _start: int = 0  # tokens before this are shown, and no longer needed to decode the rest
    _shown: int = 0  # tokens before this are decoded
    _held: str = ""  # decoded, but maybe the beginning of a stop string

    def push(self, tokens: Sequence[int]) -> str:
        """Take the tokens of a round, up to the one that ends the text; the text that is now certain."""
        text = ""
        for token in tokens:
            if self.finish_reason:
                break
            self.tokens.append(token)
            if token in self.rules.eos_ids:
                self.finish_reason = "eos"
            text += self._check(self._decode())
            if not self.finish_reason and len(self.tokens) >= self.rules.max_new_tokens:
                self.finish_reason = "length"
        if self.finish_reason in ("eos", "length"):
            text += self._check(self._decode(final=True)) + self._held
            self._held = ""
        return text

    def _decode(self, final: bool = False) -> str:
        """Text of the tokens not decoded yet; waits for the rest of a character unless `final`.

        A few tokens before are decoded along, since a tokenizer may join or space a token by its neighbours.
        """
        if self.tokenizer is None:
            return ""
        before = self.tokenizer.decode(self.tokens[self._start : self._shown], skip_special_tokens=True)
        text: str = self.tokenizer.decode(self.tokens[self._start :], skip_special_tokens=True)
        if len(text) <= len(before) or (text.endswith("\ufffd") and not final):
            return ""
        self._start, self._shown = self._shown, len(self.tokens)
        return text[len(before) :]

    def _check(self, new: str) -> str:
        """Look for a stop string in what is held back and new; return what cannot belong to one."""
        text = self._held + new
        ends = [place for string in self.rules.strings if (place := text.find(string)) >= 0]
        if ends:
            self.finish_reason, self._held = "stop", ""
            return text[: min(ends)]
        longest = max((len(string) for string in self.rules.strings), default=1) - 1
        hold = next(
            (
                size
                for size in range(min(longest, len(text)), 0, -1)
                if any(string.startswith(text[-size:]) for string in self.rules.strings)
            ),
            0,
        )
        self._held = text[len(text) - hold :]
        return text[: len(text) - hold]
