"""Prompts to be answered: from files, from named data sets, and the opening from which a target writes its own."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2

from bastion.errors import BastionError

if TYPE_CHECKING:
    from bastion.model import Model

STEP_BY_STEP = "Please reason step by step, and put your final answer within \\boxed{}."
SELF = "self-prompted"  # the source of prompts that the target wrote
SENTINEL = "USER-CONTENT-GOES-HERE"

Wording = Callable[[Mapping[str, Any]], list[str]]  # the user messages, in order, of a row of a data set


@dataclass(frozen=True, slots=True)
class Prompt:
    """A user message, and where it comes from."""

    text: str
    source: str  # the file's name without its ending, or the data set's name
    name: str  # which one of the source, for messages


@dataclass(frozen=True, slots=True)
class Dataset:
    """A data set of the Hugging Face hub, and how its rows are worded as prompts."""

    repository: str
    config: str | None
    split: str
    turns: Wording
    files: tuple[str, ...] = ()  # JSON lines, read instead of config and split of the repository
    licence: str = ""  # as far as it is known


def column(name: str, instruction: str = "") -> Wording:
    """The wording that is a column's text and an instruction after it."""
    return lambda row: [row[name] + instruction]


DATASETS = {
    "gsm8k_train": Dataset("openai/gsm8k", "main", "train", column("question", "\n" + STEP_BY_STEP), licence="MIT"),
    "mbpp_train": Dataset(
        "google-research-datasets/mbpp", "full", "train+validation+prompt", column("text"), licence="CC BY 4.0"
    ),
}


@dataclass(frozen=True, slots=True)
class Opening:
    """What stands before the user's content in the chat template, and what ends the user's turn."""

    ids: tuple[int, ...]
    end_ids: frozenset[int]


def read_prompts(names: Sequence[str], licence: str | None = None) -> tuple[list[Prompt], dict[str, str]]:
    """The prompts of files and named data sets, and the licence of each source as far as it is known.

    A file has JSON lines with `turns`, of which the first is used, or `prompt`, and optionally `id`. `licence` is that
    of the files. Raises BastionError for what is neither file nor data set, for a line that holds no prompt, and for a
    licence without a file.
    """
    prompts: list[Prompt] = []
    licences: dict[str, str] = {}
    for name in names:
        path = Path(name)
        if path.stem in {one.source for one in prompts} | {SELF}:
            raise BastionError(f"{path.stem} names another source of prompts already: rename {name}")
        if path.is_file():
            prompts += [Prompt(turns[0], path.stem, one) for one, turns in read_turns(path)]
            if licence is not None:
                licences[path.stem] = licence
        elif name in DATASETS:
            rows = load_turns(name, DATASETS[name], "train", "give its prompts as a file")
            prompts += [Prompt(turns[0], name, one) for one, turns in rows]
            licences[name] = DATASETS[name].licence
        else:
            raise BastionError(f"no prompts at {name}: give a file of JSON lines, or {' or '.join(DATASETS)}")
    if licence is not None and not any(Path(name).is_file() for name in names):
        raise BastionError("--licence is that of a file of prompts, and none is given: leave it out")
    return prompts, licences


def read_turns(path: Path) -> Iterator[tuple[str, list[str]]]:
    """Name and user messages of each line of a file of prompts. Raises BastionError, with file and line."""
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                place = f"{path}:{number}"
                if not line.strip():
                    continue
                try:
                    value = json.loads(line)
                    turns = value["turns"] if "turns" in value else [value["prompt"]]
                except (ValueError, TypeError, KeyError, RecursionError) as error:
                    raise BastionError(f"{place} is no object with turns or prompt: {error}") from error
                if not isinstance(turns, list) or not turns or not all(isinstance(t, str) and t.strip() for t in turns):
                    raise BastionError(f"{place}: turns must be a list of texts, and prompt a text, none of them empty")
                yield str(value.get("id", place)), turns
    except (OSError, UnicodeDecodeError) as error:
        raise BastionError(f"cannot read {path}: {error}") from error


def load_turns(name: str, dataset: Dataset, extra: str, instead: str) -> list[tuple[str, list[str]]]:
    """Name and user messages of each row of a data set, read through the package datasets.

    A row is named by its `task_id`, or else by its number. `extra` is the extra of this package that brings datasets,
    and `instead` says what to do where it, or the network, is missing: both are for the BastionError raised then.
    """
    try:
        import datasets
    except ImportError as error:
        raise BastionError(
            f"{name} is read with the package datasets: pip install 'bastion[{extra}]', or {instead}"
        ) from error
    try:
        if dataset.files:
            rows: Any = datasets.load_dataset("json", data_files=list(dataset.files), split="train")
        else:
            rows = datasets.load_dataset(dataset.repository, dataset.config, split=dataset.split)
    except Exception as error:  # of datasets, of the hub's client or of its HTTP library: they have no common class
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise BastionError(f"cannot load {dataset.repository} ({reason}): {instead}") from error
    try:
        return [(_row_name(name, row, number), dataset.turns(row)) for number, row in enumerate(rows)]
    except KeyError as error:
        raise BastionError(f"{dataset.repository} has changed, its rows have no {error}: {instead}") from error


def _row_name(name: str, row: Mapping[str, Any], number: int) -> str:
    own = str(row.get("task_id", number))
    return own if "/" in own else f"{name}/{own}"  # HumanEval's are whole names: HumanEval/0


def user_turn(model: Model) -> Opening:
    """The opening after which the target writes the user's message itself (the first step of Magpie).

    The user's turn ends with one of the target's end tokens, or the added token that the template puts behind the
    content. Raises BastionError if the chat template, where there is one, has no text before the content.
    """
    tokenizer = model.tokenizer
    if not tokenizer.chat_template:
        raise BastionError(f"{model.target.name} has no chat template, so it cannot write prompts: give --prompts")
    try:
        text = tokenizer.apply_chat_template([{"role": "user", "content": SENTINEL}], tokenize=False)
    except (TypeError, ValueError, jinja2.TemplateError) as error:
        raise BastionError(f"the chat template of {model.target.name} cannot be used: {error}") from error
    before, found, after = text.partition(SENTINEL)
    ids = tokenizer(before, add_special_tokens=False)["input_ids"]
    if not found or not ids:
        raise BastionError(
            f"the chat template of {model.target.name} puts nothing before the user's words, so it cannot write "
            "prompts: give --prompts"
        )
    following = tokenizer(after, add_special_tokens=False)["input_ids"][:1]
    added = {token for token in following if token in tokenizer.added_tokens_decoder}
    return Opening(tuple(ids), model.end_ids | added)
