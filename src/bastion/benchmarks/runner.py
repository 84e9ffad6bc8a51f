"""Runs every method on every prompt, in turn, so that a machine's drift hits all alike."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from bastion.benchmarks.datasets import Sample
from bastion.benchmarks.methods import Messages, Method, TextSettings
from bastion.benchmarks.records import Line, Settings, Text
from bastion.errors import BastionError
from bastion.model import Model

WARM_UP = "Count from one to ten."


@dataclass(frozen=True, slots=True)
class Conversation:
    """One sample at one temperature in one repeat: written by all methods before the next one begins."""

    dataset: str
    sample: Sample
    temperature: float
    repeat: int

    def text(self, turn: int, method: str) -> Text:
        """What identifies one of its texts."""
        return Text(
            dataset=self.dataset,
            sample=self.sample.name,
            turn=turn,
            temperature=self.temperature,
            repeat=self.repeat,
            method=method,
        )


def plan(samples: Mapping[str, Sequence[Sample]], settings: Settings) -> list[Conversation]:
    """All conversations of a run: the first sample of every data set, then the second ones, and so on, then repeats.

    So an interrupted run has seen about as much of each data set.
    """
    return [
        Conversation(dataset, sample, temperature, repeat)
        for repeat in range(settings.repeats)
        for row in zip_longest(*(samples[dataset] for dataset in settings.datasets))
        for dataset, sample in zip(settings.datasets, row, strict=True)
        if sample is not None
        for temperature in settings.temperatures
    ]


def check_prompts(model: Model, samples: Mapping[str, Sequence[Sample]], max_new_tokens: int) -> str:
    """The SHA-256 of all prompts as the target reads them, chat template included.

    Raises BastionError if a conversation, with an answer of `max_new_tokens` to every turn, may outgrow the context.
    """
    digest = hashlib.sha256()
    for dataset, several in samples.items():
        for sample in several:
            turns = [model.encode(turn) for turn in sample.turns]
            digest.update(repr((dataset, sample.name, turns)).encode())
            length = sum(map(len, turns)) + len(turns) * max_new_tokens
            if length > model.target.max_context:
                raise BastionError(
                    f"prompt {sample.name} of {dataset} takes up to {length} tokens, its answers included, more than "
                    f"the {model.target.max_context} of {model.target.name}: leave it out, or ask for fewer new tokens"
                )
    return digest.hexdigest()


def warm_up(methods: Sequence[Method]) -> None:
    """Write a short text with every method, which loads and compiles what the first text needs."""
    for method in methods:
        method.write([{"role": "user", "content": WARM_UP}], TextSettings(8, 0.0, 0))


def run(
    conversations: Sequence[Conversation],
    methods: Sequence[Method],
    settings: Settings,
    known: Sequence[Line] = (),
    progress: Callable[[int], None] = lambda texts: None,
) -> Iterator[Line]:
    """Write the texts that are not `known` yet, and yield their lines.

    All methods answer a turn before the next one, and each turn and conversation begins with another method. Later
    turns go on from the first method's answer, so that all methods have the same prompts. A text's seed depends on
    `settings.seed`, sample, turn and repeat, so at every temperature exact methods write the same text.
    `progress` is called with the number of texts that are done.
    """
    lines = {line.text: line for line in known}
    for number, conversation in enumerate(conversations):
        messages: list[dict[str, str]] = []
        for turn, words in enumerate(conversation.sample.turns):
            messages.append({"role": "user", "content": words})
            start = (number + turn) % len(methods)
            for method in [*methods[start:], *methods[:start]]:
                text = conversation.text(turn, method.name)
                if text not in lines:
                    lines[text] = _write(method, messages, text, settings)
                    yield lines[text]
                progress(1)
            answer = lines[conversation.text(turn, methods[0].name)].answer
            messages.append({"role": "assistant", "content": answer})


def _write(method: Method, messages: Messages, text: Text, settings: Settings) -> Line:
    about = f"{text.dataset}/{text.sample}/{text.turn}/{text.repeat}"
    seed = settings.seed + zlib.crc32(about.encode())
    outcome = method.write(messages, TextSettings(settings.max_new_tokens, text.temperature, seed))
    return Line.of(text, seed, outcome)
