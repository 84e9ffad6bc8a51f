"""What a benchmark writes down: one line a text, and the run that the lines belong to."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from bastion.benchmarks.methods import Outcome
from bastion.benchmarks.provenance import Provenance
from bastion.decoding.sampling import SamplingParameters
from bastion.decoding.stopping import StopRules
from bastion.errors import BastionError
from bastion.files import append, cut_half_line, write_text, writing

RUN, LINES = "run.json", "generations.jsonl"
DECISIVE = (
    "device",
    "threads",
    "dtype",
    "attention",
    "target",
    "drafters",
    "calibrations",
    "versions",
)  # of the provenance


class Text(BaseModel):
    """Which text: one turn of a conversation under one method."""

    model_config = ConfigDict(frozen=True)

    dataset: str
    sample: str
    turn: int
    temperature: float
    repeat: int
    method: str


class Line(BaseModel):
    """One generated text. Times are wall-clock seconds."""

    model_config = ConfigDict(extra="forbid")

    text: Text
    seed: int
    prompt_tokens: int
    new_tokens: int
    answer: str
    tokens_sha256: str  # of the new tokens' ids: equal for equal texts
    prefill_seconds: float | None  # of the target's pass over the prompt; None: the method does not tell
    seconds: float  # prefill included
    accepted_lengths: list[int]  # of each round, bonus token included
    tree_sizes: list[int]  # of each round, root not counted
    stages: dict[str, float]  # seconds after the prefill, by stage
    verify_seconds: list[float]  # of each round
    predicted_seconds: list[float]  # the same by the policy's cost, if it has one

    @classmethod
    def of(cls, text: Text, seed: int, outcome: Outcome) -> Self:
        """The line of a text that was just written."""
        return cls(
            text=text,
            seed=seed,
            prompt_tokens=outcome.prompt_tokens,
            new_tokens=len(outcome.token_ids),
            answer=outcome.text,
            tokens_sha256=hashlib.sha256(repr(outcome.token_ids).encode()).hexdigest(),
            prefill_seconds=outcome.prefill_seconds,
            seconds=outcome.seconds,
            accepted_lengths=outcome.accepted_lengths,
            tree_sizes=outcome.tree_sizes,
            stages=outcome.stages,
            verify_seconds=[round(seconds, 7) for seconds in outcome.verify_seconds],
            predicted_seconds=[round(seconds, 7) for seconds in outcome.predicted_seconds],
        )

    @property
    def decode_rate(self) -> float | None:
        """Tokens after the first a second after the prefill; None if unknown, or if there is only one token."""
        if self.prefill_seconds is None or self.new_tokens < 2:
            return None
        return (self.new_tokens - 1) / (self.seconds - self.prefill_seconds)

    @property
    def rate(self) -> float:
        """Tokens a second, prefill included."""
        return self.new_tokens / self.seconds


class Settings(BaseModel):
    """What is measured, and how. Two runs with the same settings write comparable lines."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    datasets: tuple[str, ...]
    prompts_sha256: str  # of all prompts as the target reads them, see `runner.check_prompts`
    methods: tuple[str, ...]  # the first is the baseline
    temperatures: tuple[float, ...]
    max_samples: int | None
    max_new_tokens: int
    seed: int
    repeats: int

    @model_validator(mode="after")
    def _possible(self) -> Self:
        """Raises BastionError for what cannot be measured."""
        StopRules(self.max_new_tokens)
        for temperature in self.temperatures:
            SamplingParameters(temperature, seed=self.seed)
        SamplingParameters(seed=self.seed + 2**32)  # a text's seed is up to so much larger
        if self.repeats < 1:
            raise BastionError(f"repeats must be 1 or more, not {self.repeats}")
        return self


class Run(BaseModel):
    """The run that a folder of results belongs to."""

    model_config = ConfigDict(extra="forbid")

    settings: Settings
    provenance: Provenance


class ResultFolder:
    """`run.json` and `generations.jsonl` in a folder. To be used while it is `locked`."""

    def __init__(self, path: Path, run: Run, resume: bool):
        """Begin the run in an empty folder, or go on with the one in it.

        Raises BastionError if there is a run and `resume` is not set, or it is another one.
        """
        self.path, self.run = path, run
        self.lines: list[Line] = []
        if not (path / RUN).exists() and not (path / LINES).exists():
            with writing(path):
                write_text(path / RUN, run.model_dump_json(indent=1) + "\n")
            return
        refuse_results(path, resume)
        self.run, self.lines = read_results(path)
        differences = _differences(self.run, run)
        if differences:
            raise BastionError(f"{path} holds another benchmark ({'; '.join(differences)}): give another folder")

    def add(self, line: Line) -> None:
        """Store a line."""
        append(self.path / LINES, line.model_dump_json() + "\n")
        self.lines.append(line)


def refuse_results(path: Path, resume: bool) -> None:
    """Raise BastionError if the folder holds a benchmark and `resume` is not set."""
    if not resume and any((path / name).exists() for name in (RUN, LINES)):
        raise BastionError(f"{path} holds a benchmark: go on with it by --resume, or give another folder")


def read_results(path: Path) -> tuple[Run, list[Line]]:
    """The run and the lines of a folder; a half-written last line is cut away. Raises BastionError if damaged."""
    try:
        run = Run.model_validate_json((path / RUN).read_bytes())
    except (OSError, ValidationError) as error:
        raise BastionError(f"{path / RUN} is missing or damaged: give another folder") from error
    if not (path / LINES).exists():
        return run, []
    cut_half_line(path / LINES)
    return run, list(_parse(path / LINES))


def _parse(path: Path) -> Iterable[Line]:
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, text in enumerate(file, 1):
            try:
                yield Line.model_validate_json(text)
            except ValidationError as error:
                raise BastionError(f"{path}, line {number}, is damaged: delete the line, and --resume") from error


def _differences(mine: Run, wanted: Run) -> list[str]:
    """What makes the lines of one run not comparable with the other's."""
    pairs = [
        *((name, getattr(mine.settings, name), getattr(wanted.settings, name)) for name in Settings.model_fields),
        *((name, getattr(mine.provenance, name), getattr(wanted.provenance, name)) for name in DECISIVE),
    ]
    return [f"{name} {one} != {other}" for name, one, other in pairs if one != other]
