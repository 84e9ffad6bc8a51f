"""The folder that a synthesis writes: conversations in shards, the prompts the target wrote, and a manifest."""

from __future__ import annotations

import hashlib
import importlib.metadata
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, ValidationError

from bastion.decoding.sampling import SamplingParameters
from bastion.decoding.stopping import StopRules
from bastion.errors import BastionError
from bastion.files import append, cut_half_line, write_text, writing
from bastion.model import Model
from bastion.training.data import MANIFEST, Conversation, prompt_key, read_conversations

SHARD = 1000  # conversations in a file
SELF_PROMPTS = "self-prompts.ndjson"  # not *.jsonl, which are conversations
DECISIVE = ("max_new_tokens", "greedy_share", "temperature", "top_k", "seed")  # what an answer depends on


@dataclass(frozen=True, slots=True)
class SynthesisSettings:
    """What is to be written, and how. Raises BastionError for values outside their range."""

    max_new_tokens: int = 256  # of an answer
    greedy_share: float = 0.67  # of the answers; the others are drawn
    temperature: float = 0.7  # of the answers that are drawn
    top_k: int = 64  # they are drawn from so many candidates, self-prompts too; 0: from all
    seed: int = 0
    batch: int = 64  # texts written side by side
    self_prompted: int = 0  # prompts that the target writes itself
    max_answers: int | None = None  # in the folder, those of earlier runs included
    time_budget: float | None = None  # seconds after which no further text is begun

    def __post_init__(self) -> None:
        SamplingParameters(self.temperature, self.top_k, seed=self.seed)  # they check themselves
        StopRules(self.max_new_tokens)
        checks = {
            "greedy_share": (0 <= self.greedy_share <= 1, "between 0 and 1"),
            "temperature": (self.temperature > 0, "above 0 (for greedy answers alone, set greedy_share to 1)"),
            "batch": (self.batch >= 1, "1 or more"),
            "self_prompted": (self.self_prompted >= 0, "0 or more"),
            "max_answers": (self.max_answers is None or self.max_answers >= 1, "1 or more"),
            "time_budget": (self.time_budget is None or self.time_budget > 0, "above 0"),
        }
        for name, (valid, wanted) in checks.items():
            if not valid:
                raise BastionError(f"{name} must be {wanted}, not {getattr(self, name)}")


class Manifest(BaseModel):
    """Where the conversations of a folder come from."""

    model_config = ConfigDict(extra="forbid")

    bastion: str  # version
    target: str
    target_digest: str
    template_sha256: str  # of the chat template
    dtype: str
    device: str
    settings: SynthesisSettings  # of the last run
    prompts: dict[str, Counter[str]] = {}  # by source: how many were given, refused, duplicate, too long, ...
    answers: dict[str, Counter[str]] = {}  # by source and temperature
    answer_tokens: int = 0
    licences: dict[str, str] = {}  # of the prompts, by source, as far as they were stated

    @classmethod
    def of(cls, model: Model, settings: SynthesisSettings) -> Self:
        """The manifest of an empty folder."""
        target = model.target
        return cls(
            bastion=importlib.metadata.version("bastion"),
            target=target.name,
            target_digest=target.digest,
            template_sha256=hashlib.sha256(str(model.tokenizer.chat_template or "").encode()).hexdigest(),
            dtype=str(target.dtype).removeprefix("torch."),
            device=str(target.device),
            settings=settings,
        )

    def differences(self, wanted: Manifest) -> list[str]:
        """What makes the answers of this one not those wanted, such as "seed 0 != 1"."""
        pairs = [(name, getattr(self, name), getattr(wanted, name)) for name in ("target_digest", "dtype")]
        pairs.append(("chat template", self.template_sha256, wanted.template_sha256))
        pairs += [(name, getattr(self.settings, name), getattr(wanted.settings, name)) for name in DECISIVE]
        return [f"{name} {mine} != {theirs}" for name, mine, theirs in pairs if mine != theirs]


class SelfPrompt(BaseModel):
    """A user turn that the target wrote."""

    index: int
    text: str  # stripped
    finished: bool  # whether it came to an end


class AnswerFolder:
    """What is stored in a folder, and what is added to it. To be used while it is `locked`."""

    def __init__(self, path: Path, manifest: Manifest, vocab: int):
        """Read the folder. Raises BastionError if it holds what does not go with `manifest`."""
        self.path, self.manifest = path, manifest
        self.sources: dict[bytes, str] = {}  # of the answered prompts, by `prompt_key`
        self.self_prompts: dict[int, SelfPrompt] = {}
        parts = sorted(path.glob("part-*.jsonl"))
        if (path / MANIFEST).exists():
            self._inherit(_read_manifest(path / MANIFEST))
        elif parts:
            raise BastionError(f"{path} holds data without a {MANIFEST}: give another folder")
        for part in parts:
            cut_half_line(part)
            if part.stat().st_size:
                for conversation in read_conversations([part], vocab):
                    self._count(conversation)
        if (path / SELF_PROMPTS).exists():
            cut_half_line(path / SELF_PROMPTS)
            for line in (path / SELF_PROMPTS).read_text(encoding="utf-8", errors="replace").splitlines():
                try:
                    written = SelfPrompt.model_validate_json(line)
                except ValidationError as error:
                    raise BastionError(
                        f"{path / SELF_PROMPTS} is damaged: delete it, or give another folder"
                    ) from error
                self.self_prompts[written.index] = written

    def _inherit(self, earlier: Manifest) -> None:
        if differences := earlier.differences(self.manifest):
            raise BastionError(
                f"{self.path} holds answers of another run ({', '.join(differences)}): "
                "set the same, or give another folder"
            )
        self.manifest.prompts |= earlier.prompts
        self.manifest.licences |= earlier.licences

    @property
    def answers(self) -> int:
        """How many conversations are stored."""
        return len(self.sources)

    def add(self, conversation: Conversation) -> None:
        """Store a conversation."""
        part = self.path / f"part-{self.answers // SHARD:05d}.jsonl"
        append(part, conversation.line())
        self._count(conversation)

    def add_self_prompt(self, written: SelfPrompt) -> None:
        """Store a prompt that the target wrote."""
        append(self.path / SELF_PROMPTS, written.model_dump_json() + "\n")
        self.self_prompts[written.index] = written

    def note(self) -> None:
        """Write the manifest, with what is stored now."""
        with writing(self.path):
            write_text(self.path / MANIFEST, self.manifest.model_dump_json(indent=1) + "\n")

    def _count(self, conversation: Conversation) -> None:
        self.sources[prompt_key(conversation.ids[: conversation.prompt_length])] = conversation.source
        of_source = self.manifest.answers.setdefault(conversation.source, Counter())
        of_source[f"{conversation.temperature:g}"] += 1
        self.manifest.answer_tokens += len(conversation.answer)


def _read_manifest(path: Path) -> Manifest:
    try:
        return Manifest.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise BastionError(f"{path} is no manifest of bastion synthesize: give another folder") from error
