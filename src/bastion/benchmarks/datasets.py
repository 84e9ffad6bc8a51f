"""The prompt sets of the BASTION paper, by its names, and a user's own.

Repositories, splits and wording are those of the public BASTION release (bastion/benchmark.py, which has them from
DFlash's), so that accepted lengths can be compared with the paper's. Where its code runs a loading script of the
repository, which datasets has refused since version 4, the files that the script reads are read here.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import sep
from pathlib import Path
from typing import Any

from bastion.errors import BastionError
from bastion.files import write_text
from bastion.paths import cache_root
from bastion.training.held_out import FENCE, SOLVE
from bastion.training.prompts import STEP_BY_STEP, Dataset, column, load_turns, read_turns

BOXED = "\n" + STEP_BY_STEP
COMPLETE = "Write a complete solution to the following programming problem.\nReturn only the solution code."
LONGBENCH = (
    "qasper", "multifieldqa_en", "gov_report", "multi_news", "triviaqa", "samsum", "passage_retrieval_en",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Sample:
    """One conversation of a prompt set: the user's messages, each of which the target answers in turn."""

    name: str  # unique in its set, such as "gsm8k/3"
    turns: tuple[str, ...]


def _solve(row: Mapping[str, Any]) -> list[str]:
    return [f"{SOLVE}\n{FENCE}\n{row['prompt']}\n```"]


def _complete(row: Mapping[str, Any]) -> list[str]:
    return [f"{COMPLETE}\n\n{row['question_content']}"]


def _instruction(row: Mapping[str, Any]) -> list[str]:
    return [f"{row['instruction']}\n\n{row['input']}" if row["input"] else row["instruction"]]


def _document(row: Mapping[str, Any]) -> list[str]:
    return [f"{row['context']}\n\n{row['input']}"]


def _longbench(subset: str) -> Dataset:
    file = f"zip://data/{subset}.jsonl::hf://datasets/THUDM/LongBench/data.zip"
    return Dataset("THUDM/LongBench", subset, "test", _document, (file,))


SHORT = {
    "gsm8k": Dataset("openai/gsm8k", "main", "test", column("question", BOXED)),
    "math500": Dataset("HuggingFaceH4/MATH-500", None, "test", column("problem", BOXED)),
    "aime25": Dataset("math-ai/aime25", None, "test", column("problem", BOXED)),
    "humaneval": Dataset("openai/openai_humaneval", None, "test", _solve),
    "mbpp": Dataset("google-research-datasets/mbpp", "sanitized", "test", column("prompt")),
    "lcb": Dataset(
        "livecodebench/code_generation_lite",
        "release_v2",
        "test",
        _complete,
        tuple(f"hf://datasets/livecodebench/code_generation_lite/{file}.jsonl" for file in ("test", "test2")),
    ),
    "mt-bench": Dataset("HuggingFaceH4/mt_bench_prompts", None, "train", lambda row: list(row["prompt"])),
    "alpaca": Dataset("tatsu-lab/alpaca", None, "train", _instruction),
}
LONG = {f"longbench-{subset}": _longbench(subset) for subset in LONGBENCH}
DATASETS = SHORT | LONG
GROUPS = {"paper-short": tuple(SHORT), "longbench": tuple(LONG)}
ALIASES = {  # the public release knows them too
    "aime2025": "aime25",
    "human_eval": "humaneval",
    "livecodebench": "lcb",
    **{subset: f"longbench-{subset}" for subset in LONGBENCH},
}


def expand(names: Sequence[str]) -> list[str]:
    """The data sets meant by names, aliases and groups, in order.

    Raises BastionError for an unknown name, and for a data set named twice, be it through a group.
    """
    found: list[str] = []
    for name in names:
        for one in GROUPS.get(name) or (_canonical(name),):
            if one in found:
                raise BastionError(f"data set {one} is asked for twice: name it once, and not beside its group")
            found.append(one)
    return found


def gather(
    names: Sequence[str],
    files: Sequence[Path],
    data_dir: Path | None = None,
    max_samples: int | None = None,
    seed: int = 0,
) -> dict[str, list[Sample]]:
    """The samples of data sets (names as in `expand`) and of files, by the data set's name or the file's stem.

    The rest as in `load_samples`. Raises BastionError as they do, if there is nothing, for two of one name, and for a
    folder of which no file would be read.
    """
    if data_dir is not None and not names:
        raise BastionError("--data-dir holds data sets: name some, or leave it out")
    found = {name: load_samples(name, data_dir=data_dir, max_samples=max_samples, seed=seed) for name in expand(names)}
    for path in files:
        if path.stem in found:
            raise BastionError(f"{path.stem} names another prompt set already: rename {path}")
        found[path.stem] = read_samples(path, max_samples=max_samples, seed=seed)
    if not found:
        raise BastionError("there are no prompts: name data sets, or give a file as --prompts")
    return found


def load_samples(
    name: str, *, data_dir: Path | None = None, max_samples: int | None = None, seed: int = 0
) -> list[Sample]:
    """The samples of a data set: of `data_dir`/NAME.jsonl if that is there, else of the cache, else of the hub.

    What comes from the hub is kept in the cache. `max_samples` and `seed` as in `read_samples`. Raises BastionError for
    an unknown name, a folder or file that cannot be used, and a data set that cannot be had.
    """
    _check(max_samples)
    name = _canonical(name)
    if (own := _own_file(name, data_dir)) is not None:
        return read_samples(own, max_samples=max_samples, seed=seed)
    cached = cache_root() / "prompts" / f"{name}.jsonl"
    if not cached.is_file():
        _fetch(name, cached)
    try:
        return read_samples(cached, max_samples=max_samples, seed=seed)
    except BastionError as error:
        raise BastionError(f"{error}; delete the file, and it is fetched again") from error


def read_samples(path: Path, *, max_samples: int | None = None, seed: int = 0) -> list[Sample]:
    """The samples of a file of JSON lines with `turns`, or `prompt` for a single turn, and optionally `id`.

    If there are more than `max_samples`, so many are drawn: all are shuffled with `seed` and the first kept, whatever
    the method and machine. With seed 0 that is the public release's own draw; DDTree's and CaDDTree's code draws
    others, by the shuffle of datasets. Raises BastionError for a file without prompts, a line that is none, or one
    id given to two.
    """
    _check(max_samples)
    folder = f"{path.parent}{sep}"  # a line without id is named by its place, which is to say no more than the file
    samples = [Sample(name.removeprefix(folder), tuple(turns)) for name, turns in read_turns(path)]
    if not samples:
        raise BastionError(f"{path} holds no prompts")
    name, count = Counter(sample.name for sample in samples).most_common(1)[0]
    if count > 1:
        raise BastionError(f"{path} has {count} prompts with the id {name}: give each its own")
    if max_samples is not None and max_samples < len(samples):
        random.Random(seed).shuffle(samples)
        del samples[max_samples:]
    return samples


def _check(max_samples: int | None) -> None:
    if max_samples is not None and max_samples < 1:
        raise BastionError(f"max_samples must be at least 1, not {max_samples}")


def _canonical(name: str) -> str:
    one = ALIASES.get(name, name)
    if one not in DATASETS:
        known = ", ".join((*DATASETS, *GROUPS))
        raise BastionError(f"unknown data set {name!r}: use {known}; prompts of your own are given with --prompts")
    return one


def _own_file(name: str, folder: Path | None) -> Path | None:
    if folder is None:
        return None
    if not folder.is_dir():
        raise BastionError(f"{folder} is no folder: give one with files such as {name}.jsonl")
    stems = (name, *(alias for alias, meant in ALIASES.items() if meant == name))
    return next((path for stem in stems if (path := folder / f"{stem}.jsonl").is_file()), None)


def _fetch(name: str, path: Path) -> None:
    """Download a data set to a file of JSON lines. Of processes that do so at once, the last one's file stays."""
    instead = f"give a folder with {name}.jsonl as --data-dir, or prompts of your own as --prompts"
    rows = load_turns(name, DATASETS[name], "bench", instead)
    lines = (json.dumps({"id": one, "turns": turns}) + "\n" for one, turns in rows)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, "".join(lines))
    except OSError as error:
        raise BastionError(
            f"cannot write to {path.parent} ({error.strerror}); set BASTION_CACHE to another folder"
        ) from error
