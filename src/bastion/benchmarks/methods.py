"""What is compared: bastion's own methods by the papers' names, all over one target."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from bastion.clock import synchronize
from bastion.decoding.budget import Throughput
from bastion.decoding.stats import RoundRecord
from bastion.drafters.base import Drafter
from bastion.drafters.loading import FAMILIES, load_drafter
from bastion.drafters.mixed import alone
from bastion.drafters.ngram import NgramDrafter
from bastion.errors import BastionError
from bastion.model import Model
from bastion.policies import parse

Messages = Sequence[dict[str, str]]

POLICIES = {
    "ar": "plain",
    "dflash": "chain",
    "ddtree": "fixed",
    "caddtree": "profile",
    "bastion": "roofline",
    "auto": "auto",
    "ngram": "auto",
    "treeflash": "fixed:63",
    "eagle3": "fixed:59",
    "specblock": "fixed:59",
}
NEEDS_ITS_OWN = ("treeflash", "eagle3", "specblock")  # families with trees of their own
BUDGETS = (8, 16, 32, 64)  # of `ddtree` without a budget
REFERENCES = ("hf", "hf-lookup", "hf-assisted", "llama.cpp")  # see `references`


@dataclass(frozen=True, slots=True)
class TextSettings:
    """What a text is written with."""

    max_new_tokens: int
    temperature: float
    seed: int


@dataclass(slots=True)
class Outcome:
    """A text and what is known about how it was written. Times are wall-clock seconds."""

    text: str
    token_ids: list[int]  # the new ones
    prompt_tokens: int
    prefill_seconds: float | None  # of the target's pass over the prompt; None: the method does not tell
    seconds: float  # all of it, prefill included
    accepted_lengths: list[int] = field(default_factory=list)  # of each round, bonus token included
    tree_sizes: list[int] = field(default_factory=list)  # of each round, root not counted
    stages: dict[str, float] = field(default_factory=dict)  # seconds after the prefill, by stage
    verify_seconds: list[float] = field(default_factory=list)  # of each round
    predicted_seconds: list[float] = field(default_factory=list)  # the same by the policy's cost, if it has one


class Method(Protocol):
    """One way to write a text."""

    name: str

    def write(self, messages: Messages, settings: TextSettings) -> Outcome:
        """Answer a conversation. Raises BastionError if it cannot."""


class PolicyMethod:
    """A drafter and a budget policy of bastion."""

    def __init__(self, name: str, model: Model):
        self.name, self.model = name, model

    def write(self, messages: Messages, settings: TextSettings) -> Outcome:
        """Answer a conversation. All that `Model.generate` does is counted, what is not the prefill as decoding."""
        records: list[RoundRecord] = []
        device = self.model.target.device
        synchronize(device)
        start = time.perf_counter()
        result = self.model.generate(
            messages,
            max_new_tokens=settings.max_new_tokens,
            temperature=settings.temperature,
            seed=settings.seed,
            on_round=records.append,
        )
        synchronize(device)
        seconds, stats = time.perf_counter() - start, result.stats
        accepted = list(stats.accepted_lengths)
        if accepted:  # what a pass accepted behind the text's end is no part of the text
            accepted[-1] -= sum(accepted) - (len(result.token_ids) - 1)
        return Outcome(
            text=result.text,
            token_ids=result.token_ids,
            prompt_tokens=stats.prompt_tokens,
            prefill_seconds=stats.prefill_seconds,
            seconds=seconds,
            accepted_lengths=accepted,
            tree_sizes=stats.tree_sizes,
            stages=stats.seconds,
            verify_seconds=[record.seconds["verify"] for record in records],
            predicted_seconds=self._predicted(records),
        )

    def _predicted(self, records: Sequence[RoundRecord]) -> list[float]:
        if not isinstance(self.model.policy, Throughput):
            return []
        verify = self.model.policy.cost.verify
        return [float(verify.seconds(np.array([1 + one.tree.size]), one.context)[0]) for one in records]


def split_method(name: str) -> tuple[str, str, str]:
    """A method's base, what is behind it (":8", or ""), and the drafter of one of bastion's ("@FOLDER", or "")."""
    base = re.split("[:@]", name, maxsplit=1)[0]
    shape, at, drafter = name[len(base) :], "", ""
    if base not in REFERENCES:
        shape, at, drafter = shape.partition("@")
    return base, shape, at + drafter


def expand_methods(names: Sequence[str]) -> list[str]:
    """Methods in order, each with its budget and drafter; `ddtree` alone stands for several of them.

    Raises BastionError for an unknown method, an argument that it does not take or lacks, and a method named twice.
    """
    found: list[str] = []
    for name in names:
        base, shape, drafter = split_method(name)
        if base not in POLICIES and base not in REFERENCES:
            known = ", ".join([*POLICIES, *REFERENCES])
            raise BastionError(f"unknown method {name!r}: use {known}; budgets as in ddtree:32")
        if base == "hf-assisted" and not shape.removeprefix(":"):
            raise BastionError("hf-assisted needs a model that drafts: name it as in hf-assisted:MODEL")
        if base in REFERENCES and base != "hf-assisted" and shape:
            raise BastionError(f"method {base} takes nothing behind a colon: leave {shape} out")
        if drafter and (base in ("ar", "ngram") or drafter == "@"):
            raise BastionError(f"method {base} takes no drafter of its own: leave {drafter} out")
        shapes = [f":{size}" for size in BUDGETS] if (base, shape) == ("ddtree", "") else [shape]
        expanded = [base + one + drafter for one in shapes]
        for one in expanded:
            if base in POLICIES:
                policy_of(one)
            if one in found:
                raise BastionError(f"method {one} is asked for twice: name it once")
            found.append(one)
    if not found:
        raise BastionError("there is no method to run: name at least one")
    return found


def policy_of(name: str) -> str:
    """The policy of one of bastion's methods. Raises BastionError for a budget that it does not take."""
    base, shape, _ = split_method(name)
    policy = POLICIES[base].partition(":")[0] + shape if shape else POLICIES[base]
    try:
        parse(policy)
    except BastionError as error:
        raise BastionError(f"method {name!r} cannot be: {error}") from error
    return policy


def load_drafters(names: Sequence[str], model: Model) -> dict[str, Drafter]:
    """The drafter of each of bastion's methods among `names`: the model's, or the one behind the method's @.

    The papers' methods take the model's drafter without the n-gram index, `auto` as it is.
    Raises BastionError for one that cannot be loaded, or is not of the family that the method is about.
    """
    by_default = {"auto": model.drafter, "ngram": NgramDrafter()}
    loaded: dict[str, Drafter] = {}  # by what is behind the @
    found: dict[str, Drafter] = {}
    for name in names:
        base, _, drafter = split_method(name)
        if base in REFERENCES:
            continue
        if not drafter:
            found[name] = by_default.get(base, alone(model.drafter))
        else:
            source = drafter.removeprefix("@")
            loaded[source] = loaded.get(source) or load_drafter(source, model.target)
            found[name] = loaded[source]
        if base in NEEDS_ITS_OWN and type(found[name]) is not FAMILIES[base]:
            raise BastionError(f"method {base} needs such a drafter: give its checkpoint, as in {base}@FOLDER")
    return found


def make_methods(names: Sequence[str], model: Model, source: str, drafters: Mapping[str, Drafter]) -> list[Method]:
    """The methods of `expand_methods`, over the target of `model` and the drafters of `load_drafters`.

    `source` is what the target was loaded from; references load it again, with the same dtype and device. What needs
    a calibration is calibrated here. Raises BastionError for what this machine cannot run.
    """
    methods: list[Method] = []
    for name in names:
        if name in drafters:
            own = model.with_policy(policy_of(name), drafters[name])
            own.policy  # noqa: B018  a calibration is asked for now, not within the first measured text
            methods.append(PolicyMethod(name, own))
        else:
            from bastion.benchmarks.references import make_reference

            methods.append(make_reference(name, model, source))
    return methods
