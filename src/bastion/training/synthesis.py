"""Training data for drafters: the target's own answers to prompts, also to prompts that it writes itself."""

from __future__ import annotations

import hashlib
import heapq
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bastion.calibration import say
from bastion.decoding.budget import Plain
from bastion.decoding.loop import Generation, decode_round, prefill
from bastion.decoding.sampling import Sampler, SamplingParameters
from bastion.decoding.stopping import StopRules, TextStream
from bastion.drafters.base import DraftContext
from bastion.errors import BastionError
from bastion.files import locked
from bastion.model import Model
from bastion.training.answers import AnswerFolder, Manifest, SelfPrompt, SynthesisSettings
from bastion.training.data import Conversation, prompt_key
from bastion.training.held_out import is_held_out
from bastion.training.prompts import SELF, Opening, Prompt, user_turn

SELF_PROMPT_TOKENS = 256  # a user turn that has not ended by then is dropped
LEAST_CHARACTERS = 8  # a user turn shorter than this is dropped
NAMED = 3  # refused prompts that a warning names


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a synthesis has come."""

    answers: int  # in the folder, those of earlier runs included
    expected: int  # that there will be, as far as it is known
    new_tokens: int  # written by this run, those of self-prompts included


@dataclass(frozen=True, slots=True)
class Text:
    """A text for the target to write: an answer, or the prompt of a conversation."""

    ids: tuple[int, ...]  # that it follows
    source: str
    temperature: float
    seed: int
    index: int | None = None  # of a self-prompt; None: it is an answer


def synthesize(
    model: Model,
    prompts: Iterable[Prompt],
    out: Path,
    settings: SynthesisSettings,
    licences: Mapping[str, str] | None = None,
    progress: Callable[[Progress], None] = lambda state: None,
) -> Manifest:
    """Let the target answer prompts, and write the conversations to the folder `out`.

    Whether an answer is greedy, and its random numbers, depend on `settings.seed` and the prompt alone. It is drawn
    from the target's distribution after temperature and top-k; a checkpoint's generation config is not applied.
    A folder with answers of the same target and settings is continued; prompts may be added. `licences` are those of
    the prompts, by source. `progress` is called after every pass.

    Raises BastionError if there is nothing to answer, all prompts are refused or too long, the folder cannot be used,
    holds something else, or is in use.
    """
    with locked(out):
        folder = AnswerFolder(out, Manifest.of(model, settings), model.target.shape.vocab)
        folder.manifest.licences |= licences or {}
        run = Synthesis(model, folder, settings)
        run.plan(prompts)
        folder.note()
        try:
            run.run(progress)
        finally:
            folder.note()
        return folder.manifest


class Synthesis:
    """One run: what is to be written, and what is being written side by side."""

    def __init__(self, model: Model, folder: AnswerFolder, settings: SynthesisSettings):
        self.model, self.folder, self.settings = model, folder, settings
        self.deadline = time.monotonic() + (settings.time_budget or float("inf"))
        self.opening = user_turn(model) if settings.self_prompted else Opening((), frozenset())
        self.fates = folder.manifest.prompts
        self.refused: list[str] = []
        self.seen: set[bytes] = set()  # keys of prompts that need no second answer
        self.planned: deque[Text] = deque()
        self.ready: deque[Text] = deque()  # answers to self-prompts just written; they come first
        self.active: list[tuple[Text, Generation]] = []
        self.new_tokens = 0

    def plan(self, prompts: Iterable[Prompt]) -> None:
        """Put what is to be written in order: a fixed mixture of all sources, so that any beginning has them all."""
        by_source: dict[str, list[list[Text]]] = {}
        for prompt in prompts:
            if prompt.source not in by_source:
                self.fates[prompt.source] = Counter()  # in place of an earlier run's
            by_source.setdefault(prompt.source, []).append(self._admit(prompt))
        self._check(sum((self.fates[source] for source in by_source), Counter()))
        if self.settings.self_prompted:
            self.fates[SELF] = Counter()
            self.folder.manifest.licences[SELF] = "written by the target"
            by_source[SELF] = [self._self_text(index) for index in range(self.settings.self_prompted)]
        self.planned.extend(_mixed(list(by_source.values())))

    def _check(self, total: Counter[str]) -> None:
        """Say which prompts are refused. Raises BastionError if no prompt is left."""
        if self.refused:
            say(
                f"{len(self.refused)} of {total['given']} prompts occur in public test sets and are left out: "
                f"{', '.join(self.refused[:NAMED])}{', ...' if len(self.refused) > NAMED else ''}"
            )
        if not total["given"] and not self.settings.self_prompted:
            raise BastionError("there is nothing to answer: give --prompts or --self-prompted")
        if total["given"] and total["given"] == total["refused"] + total["too long"]:
            raise BastionError(
                f"no prompt can be used: {total['refused']} occur in public test sets, {total['too long']} leave no "
                f"room for an answer of {self.settings.max_new_tokens} tokens: give others, or a smaller max_new_tokens"
            )

    def run(self, progress: Callable[[Progress], None]) -> None:
        """Write until nothing is left, or no more is wanted. What was begun is finished."""
        target = self.model.target
        while True:
            begun = len(self.active)
            while len(self.active) < self.settings.batch and (text := self._next()):
                self.active.append((text, self._begin(text)))
            prefill(target, *(generation for _, generation in self.active[begun:]))
            self.new_tokens += len(self.active) - begun
            if not self.active:
                return
            running = [generation for _, generation in self.active if not generation.finished]
            if running:
                decode_round(target, None, Plain(), running)
                self.new_tokens += len(running)
            ended = [(text, generation) for text, generation in self.active if generation.finished]
            self.active = [(text, generation) for text, generation in self.active if not generation.finished]
            for text, generation in ended:
                self._finish(text, generation)
            progress(Progress(self.folder.answers, self._expected(), self.new_tokens))

    def _admit(self, prompt: Prompt) -> list[Text]:
        """The answer to write to a prompt, or nothing; what became of the prompt is counted."""
        fates = self.fates[prompt.source]
        fates["given"] += 1
        if is_held_out(prompt.text):
            fates["refused"] += 1
            self.refused.append(prompt.name)
            return []
        ids = tuple(self.model.encode(prompt.text))
        if len(ids) + self.settings.max_new_tokens > self.model.target.max_context:
            fates["too long"] += 1
            return []
        key = prompt_key(ids)
        source = self.folder.sources.get(key)
        if key in self.seen or source not in (None, prompt.source):
            fates["duplicate"] += 1
            return []
        self.seen.add(key)
        if source is not None:
            return []  # answered by an earlier run
        uniform, seed = _draw(self.settings.seed, key)
        temperature = 0.0 if uniform < self.settings.greedy_share else self.settings.temperature
        return [Text(ids, prompt.source, temperature, seed)]

    def _self_text(self, index: int) -> list[Text]:
        """What to write for a self-prompt: it, or the answer if an earlier run has written it, or nothing."""
        if written := self.folder.self_prompts.get(index):
            return self._judge(written)
        _, seed = _draw(self.settings.seed, f"{SELF}/{index}".encode())
        return [Text(self.opening.ids, SELF, 1.0, seed, index)]

    def _judge(self, written: SelfPrompt) -> list[Text]:
        """The answer to write to a self-prompt, or nothing."""
        if not written.finished or len(written.text) < LEAST_CHARACTERS:
            self.fates[SELF].update(("given", "short" if written.finished else "unfinished"))
            return []
        return self._admit(Prompt(written.text, SELF, f"{SELF}/{written.index}"))

    def _next(self) -> Text | None:
        if time.monotonic() >= self.deadline:
            return None
        if self.ready:
            return self.ready.popleft()
        most = self.settings.max_answers
        if not self.planned or (most is not None and self.folder.answers + len(self.active) >= most):
            return None
        return self.planned.popleft()

    def _begin(self, text: Text) -> Generation:
        if text.index is None:
            rules = StopRules(self.settings.max_new_tokens, self.model.end_ids)
        else:
            rules = StopRules(SELF_PROMPT_TOKENS, self.opening.end_ids)
        parameters = SamplingParameters(text.temperature, self.settings.top_k, seed=text.seed)
        return Generation(
            DraftContext(list(text.ids), text.temperature),
            self.model.target.new_cache(len(text.ids) + rules.max_new_tokens),
            Sampler(parameters),
            TextStream(None, rules),  # nobody reads along
        )

    def _finish(self, text: Text, generation: Generation) -> None:
        tokens = generation.stream.tokens
        if text.index is None:
            ids = text.ids + tuple(tokens)
            self.folder.add(Conversation(ids, len(text.ids), text.source, text.temperature))
            return
        words = self.model.tokenizer.decode(tokens, skip_special_tokens=True).strip()
        written = SelfPrompt(index=text.index, text=words, finished=generation.stream.finish_reason == "eos")
        self.folder.add_self_prompt(written)
        self.ready.extend(self._judge(written))

    def _expected(self) -> int:
        expected = self.folder.answers + len(self.active) + len(self.ready) + len(self.planned)
        return min(expected, self.settings.max_answers or expected)


def _draw(seed: int, about: bytes) -> tuple[float, int]:
    """A number in [0, 1) and a 64-bit seed that depend on the arguments alone."""
    bits = hashlib.sha256(f"{seed}:".encode() + about).digest()
    return (int.from_bytes(bits[:8]) >> 11) / 2**53, int.from_bytes(bits[8:16])


def _mixed(sources: Sequence[Sequence[list[Text]]]) -> Iterator[Text]:
    """The texts of all places of all sources, those of a source in order and spread evenly over the whole."""
    placed = [
        [((place + 0.5) / len(source), number, place) for place in range(len(source))]
        for number, source in enumerate(sources)
    ]
    for _, number, place in heapq.merge(*placed):
        yield from sources[number][place]
