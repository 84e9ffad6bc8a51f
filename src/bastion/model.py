"""The public face: a target, its tokenizer, a drafter and a budget policy, ready to write."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import torch

from bastion.calibration import calibrate
from bastion.cost.store import Calibration
from bastion.decoding.budget import BudgetPolicy
from bastion.decoding.loop import Generation, decode
from bastion.decoding.pace import Pace
from bastion.decoding.sampling import Sampler, SamplingParameters
from bastion.decoding.stats import GenerationStats, RoundRecord
from bastion.decoding.stopping import FinishReason, StopRules, TextStream
from bastion.drafters.base import DraftContext, Drafter
from bastion.drafters.loading import check_drafter, load_drafter
from bastion.errors import BastionError
from bastion.policies import make_policy, parse
from bastion.targets.base import Target
from bastion.targets.loading import eos_ids, load_target

Prompt = str | Sequence[dict[str, Any]]
OnRound = Callable[[RoundRecord], None]


@dataclass(slots=True)
class GenerationResult:
    """A text and how it came about."""

    text: str  # without special tokens, trimmed before a stop string
    token_ids: list[int]  # the new ones, the end-of-text token or the token that completed a stop string included
    finish_reason: FinishReason
    stats: GenerationStats


class Model:
    """Writes text. Made by `load`."""

    def __init__(
        self,
        target: Target,
        tokenizer: Any,
        drafter: Drafter,
        policy: str | BudgetPolicy = "auto",
        end_ids: frozenset[int] = frozenset(),
        sampling_defaults: dict[str, Any] | None = None,
        template_options: dict[str, Any] | None = None,
    ):
        """Join the parts.

        `sampling_defaults` hold for every sampling parameter that a call leaves out. `template_options` are handed to
        the chat template, such as enable_thinking of Qwen3's.
        """
        self.target, self.tokenizer, self.drafter = target, tokenizer, drafter
        self.end_ids = end_ids
        self.sampling_defaults = sampling_defaults or {}
        self.template_options = template_options or {}
        self.calibration: Calibration | None = None  # the last one asked for
        self.notices: list[str] = []  # what a user should know about how this model runs
        self._policy_spec: str | BudgetPolicy
        self._policy: BudgetPolicy | None
        self.set_policy(policy)

    def set_policy(self, policy: str | BudgetPolicy) -> None:
        """Choose the budget policy, by name (see `policies.parse`) or as an object of one's own.

        A policy that needs a calibration asks for it when it is first used.
        """
        if isinstance(policy, str):
            parse(policy)
        self._policy_spec, self._policy = policy, None

    def with_policy(self, policy: str | BudgetPolicy, drafter: Drafter | None = None) -> Model:
        """The same model, sharing all but the policy and, if given, the drafter."""
        other = copy.copy(self)
        other.drafter = drafter or self.drafter
        other.set_policy(policy)
        return other

    @property
    def policy(self) -> BudgetPolicy:
        """The budget policy in use: the one chosen, as far as the target can verify it."""
        if self._policy is None:
            spec = self._policy_spec if self.target.tree_support != "none" else "plain"
            self._policy = make_policy(spec, self.calibrate) if isinstance(spec, str) else spec
            if self.target.tree_support == "chain" and self._policy.width != 1:
                self._policy = copy.copy(self._policy)  # it may be the caller's
                self._policy.width = 1
        return self._policy

    def calibrate(self, force: bool = False) -> Calibration:
        """What a round costs on this machine as it is set up now: measured on first use, and then kept."""
        self.calibration = calibrate(self.target, self.drafter, force)
        if force and isinstance(self._policy_spec, str):
            self._policy = None  # it was made from the old one
        return self.calibration

    def encode(self, prompt: Prompt, raw: bool = False) -> list[int]:
        """Token ids of a prompt: messages, or text as one user message, in the chat template; `raw` text as it is.

        Raises BastionError for an empty or malformed prompt, or for messages without a chat template.
        """
        template = self.tokenizer.chat_template
        if not isinstance(prompt, str):
            _check_messages(prompt)
            if raw or not template:
                why = "raw takes" if raw else f"{self.target.name} has no chat template: pass"
                raise BastionError(f"{why} the prompt as one text, not as messages")
        try:
            if isinstance(prompt, str) and (raw or not template):
                ids = self.tokenizer(prompt)["input_ids"]
            else:
                messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
                text = self.tokenizer.apply_chat_template(
                    messages, tokenize=False, add_generation_prompt=True, **self.template_options
                )
                ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        except (TypeError, ValueError, jinja2.TemplateError) as error:
            raise BastionError(f"the prompt cannot be encoded: {error}") from error
        if not ids:
            raise BastionError("the prompt is empty")
        return list(ids)

    def stream(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int = 256,
        stop: str | Sequence[str] = (),
        raw: bool = False,
        on_round: OnRound | None = None,
        **sampling: Any,
    ) -> Iterator[str]:
        """The text in pieces as it is written: whole characters, nothing of a stop string.

        `sampling`: temperature, top_k, top_p, min_p, repetition_penalty, seed, processors, as in `SamplingParameters`.
        `on_round` is called with the record of each round.
        """
        generation = self._start(self.encode(prompt, raw), max_new_tokens, stop, sampling)
        for _, piece, record in decode(self.target, self.drafter, self.policy, [generation]):
            if record is not None and on_round is not None:
                on_round(record)
            if piece:
                yield piece

    def generate(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int = 256,
        stop: str | Sequence[str] = (),
        raw: bool = False,
        on_text: Callable[[str], None] | None = None,
        on_round: OnRound | None = None,
        **sampling: Any,
    ) -> GenerationResult:
        """The whole text and its statistics. Parameters as in `stream`; `on_text` is called with each piece."""
        generation = self._start(self.encode(prompt, raw), max_new_tokens, stop, sampling)
        return self._run([generation], on_text, on_round)[0]

    def generate_batch(
        self,
        prompts: Sequence[Prompt],
        *,
        max_new_tokens: int = 256,
        stop: str | Sequence[str] = (),
        raw: bool = False,
        **sampling: Any,
    ) -> list[GenerationResult]:
        """Texts for several prompts, written side by side under one budget. The i-th text's seed is `seed + i`."""
        if isinstance(prompts, str):
            raise BastionError("generate_batch takes a list of prompts; for one prompt use generate")
        seed = sampling.pop("seed", None)
        generations = [
            self._start(
                self.encode(prompt, raw),
                max_new_tokens,
                stop,
                sampling | {"seed": None if seed is None else seed + place},
            )
            for place, prompt in enumerate(prompts)
        ]
        return self._run(generations)

    def _start(
        self, ids: list[int], max_new_tokens: int, stop: str | Sequence[str], sampling: dict[str, Any]
    ) -> Generation:
        room = self.room(ids)
        strings = (stop,) if isinstance(stop, str) else tuple(stop or ())
        rules = StopRules(max_new_tokens, self.end_ids | self._special(strings), strings)
        rules = dataclasses.replace(rules, max_new_tokens=min(max_new_tokens, room))
        parameters = SamplingParameters(**(self.sampling_defaults | sampling))
        return self.begin(ids, parameters, TextStream(self.tokenizer, rules))

    def room(self, ids: Sequence[int]) -> int:
        """How many tokens may be written behind the prompt `ids`. Raises BastionError if none."""
        room = self.target.max_context - len(ids)
        if room < 1:
            raise BastionError(
                f"the prompt has {len(ids)} tokens, but {self.target.name} has a context of {self.target.max_context}: "
                "shorten it"
            )
        return room

    def begin(self, ids: Sequence[int], parameters: SamplingParameters, stream: TextStream) -> Generation:
        """A text behind the prompt `ids`, for `decoding.loop.decode` to write."""
        slack = min(self.policy.max_nodes + 1, 512)  # rows that are pending while a tree is verified
        return Generation(
            draft=DraftContext(list(ids), parameters.temperature),
            cache=self.target.new_cache(len(ids) + stream.rules.max_new_tokens + slack),
            sampler=Sampler(parameters),
            stream=stream,
            pace=Pace.of(self.policy),
        )

    def _special(self, strings: Sequence[str]) -> set[int]:
        """Ids of stop strings that are special tokens, which leave no text to be found."""
        ids = {string: self.tokenizer.convert_tokens_to_ids(string) for string in strings}
        return {ids[string] for string in strings if string in self.tokenizer.all_special_tokens}

    def _run(
        self,
        generations: list[Generation],
        on_text: Callable[[str], None] | None = None,
        on_round: OnRound | None = None,
    ) -> list[GenerationResult]:
        texts = {id(generation): "" for generation in generations}
        for generation, piece, record in decode(self.target, self.drafter, self.policy, generations):
            texts[id(generation)] += piece
            if piece and on_text is not None:
                on_text(piece)
            if record is not None and on_round is not None:
                on_round(record)
        return [
            GenerationResult(texts[id(one)], list(one.stream.tokens), one.stream.finish_reason or "length", one.stats)
            for one in generations
        ]


def _check_messages(prompt: Any) -> None:
    if not isinstance(prompt, Sequence) or not prompt:
        raise BastionError("a prompt is a text, or a list of messages with a role and a content each")
    for message in prompt:
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            raise BastionError(f"a message needs a role and a content, not {message!r}")


def load(
    target: str | Path,
    drafter: str | Path | Drafter = "auto",
    policy: str | BudgetPolicy = "auto",
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    revision: str | None = None,
    template_options: dict[str, Any] | None = None,
) -> Model:
    """Load a target (hub id, folder, GGUF file, zoo name), its drafter, and a budget policy.

    drafter: "auto" (the one that comes with the package for this target, with "+ngram"; else "ngram") or another
    name that `drafters.loading.load_drafter` knows, the folder or hub id of a checkpoint, or an object of one's own.
    device and dtype default to what is fastest here.
    template_options: what the chat template takes beside the messages, such as {"enable_thinking": False}.
    Raises BastionError, with what to do, for anything that cannot be used.
    """
    if isinstance(policy, str):
        parse(policy)
    check_drafter(drafter)
    loaded = load_target(target, device, dtype, revision)
    guesses = load_drafter(drafter, loaded.target) if isinstance(drafter, str | Path) else drafter
    defaults, notices = _from_generation_config(loaded.generation_config)
    end_ids = eos_ids(loaded.config, loaded.generation_config, loaded.tokenizer)
    model = Model(loaded.target, loaded.tokenizer, guesses, policy, end_ids, defaults, template_options)
    support, reason = loaded.target.tree_support, getattr(loaded.target, "tree_support_reason", "")
    if support != "tree":
        fallback = {"chain": "drafts are chains, not trees", "none": "decoding is plain"}[support]
        notices.append(f"{loaded.target.name}: {fallback}: {reason}")
    model.notices.extend(notices)
    return model


def _from_generation_config(config: Any) -> tuple[dict[str, Any], list[str]]:
    """Sampling defaults that a checkpoint sets, and notices of those settings that are not applied here."""
    if config is None:
        return {}, []
    set_here = config.to_diff_dict()
    applied = {field.name for field in dataclasses.fields(SamplingParameters)} - {
        "temperature",
        "seed",
        "processors",
    }
    defaults = {name: set_here[name] for name in applied if set_here.get(name) is not None}
    if defaults.get("top_k", 0) < 0:  # some checkpoints say "off" in this way
        del defaults["top_k"]
    changing = (
        "no_repeat_ngram_size", "encoder_repetition_penalty", "bad_words_ids", "suppress_tokens", "typical_p",
        "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id", "min_length", "min_new_tokens",
        "sequence_bias", "exponential_decay_length_penalty", "epsilon_cutoff", "eta_cutoff", "guidance_scale",
    )  # fmt: skip
    notices = [
        f"generation_config sets {name}, which is not applied; pass it as a LogitsProcessor in `processors`"
        for name in changing
        if set_here.get(name)
    ]
    return defaults, notices
