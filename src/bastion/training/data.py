"""Conversations: what a drafter is trained on and measured with."""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from bastion.errors import BastionError
from bastion.targets.base import Target

MANIFEST = "manifest.json"  # of a folder of answers


@dataclass(frozen=True, slots=True)
class Conversation:
    """A prompt and the answer that a target wrote to it, as token ids."""

    ids: tuple[int, ...]  # prompt in the chat template, then the answer; its end token too, where it has one
    prompt_length: int
    source: str  # where the prompt came from
    temperature: float  # at which the answer was written

    @property
    def answer(self) -> tuple[int, ...]:
        """The tokens that the target wrote."""
        return self.ids[self.prompt_length :]

    def line(self) -> str:
        """The conversation as a line of a data file."""
        return json.dumps(asdict(self), separators=(",", ":")) + "\n"


def read_conversations(paths: Sequence[Path], vocab: int) -> list[Conversation]:
    """All conversations of .jsonl or .jsonl.gz files, and of folders of such files, without repeated ones.

    Each line is an object with `ids` and `prompt_length`, and optionally `source` and `temperature`. Raises
    BastionError, with file and line, for what is no such object, or has ids outside a vocabulary of `vocab` tokens.
    """
    found: dict[tuple[int, ...], Conversation] = {}
    for path in data_files(paths):
        opened = gzip.open if path.suffix == ".gz" else open
        try:
            with opened(path, "rt", encoding="utf-8") as lines:
                for number, line in enumerate(lines, 1):
                    if not line.endswith("\n") and not _is_json(line):
                        continue  # being written, or left so by a killed process
                    conversation = _parse(line, f"{path}:{number}", vocab)
                    found.setdefault(conversation.ids, conversation)
        except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
            raise BastionError(f"cannot read {path}: {error}") from error
    if not found:
        raise BastionError(f"no conversations in {', '.join(map(str, paths))}: make some with bastion synthesize")
    return list(found.values())


def data_files(paths: Iterable[Path]) -> list[Path]:
    """The data files that `paths` name. Raises BastionError if one is not there."""
    files = []
    for path in paths:
        inside = (
            sorted(p for p in path.glob("*.jsonl*") if p.suffixes[-1] in (".jsonl", ".gz")) if path.is_dir() else []
        )
        if not inside and not path.is_file():
            raise BastionError(f"no data at {path}: give a .jsonl or .jsonl.gz file, or a folder of them")
        files += inside or [path]
    return files


def _parse(line: str, place: str, vocab: int) -> Conversation:
    try:
        value: dict[str, Any] = json.loads(line)
        ids, prompt_length = np.array(value["ids"]), value["prompt_length"]
        source, temperature = str(value.get("source", "")), float(value.get("temperature", 0.0))
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise BastionError(f"{place} is no conversation (an object with ids and prompt_length): {error}") from error
    if ids.ndim != 1 or ids.dtype.kind != "i":
        raise BastionError(f"{place} is no conversation: ids must be a list of whole numbers")
    if type(prompt_length) is not int or not 1 <= prompt_length <= len(ids):
        raise BastionError(f"{place}: prompt_length must be a whole number from 1 to the number of ids")
    if ids.min() < 0 or ids.max() >= vocab:
        raise BastionError(
            f"{place} has ids outside the target's vocabulary of {vocab}: was it written by this target?"
        )
    return Conversation(tuple(ids.tolist()), prompt_length, source, temperature)


def _is_json(line: str) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def prompt_key(ids: Sequence[int]) -> bytes:
    """Identifies a prompt by its token ids."""
    return hashlib.sha256(np.array(ids, np.int64).tobytes()).digest()[:16]


def cut(conversations: Iterable[Conversation], length: int) -> list[Conversation]:
    """Conversations cut to `length` tokens, as far as two tokens of the answer or more are left: an anchor and a label.

    Raises BastionError if there is none.
    """
    shortened = (replace(one, ids=one.ids[:length]) for one in conversations)
    kept = [one for one in shortened if len(one.ids) >= one.prompt_length + 2]
    if not kept:
        raise BastionError(f"within {length} tokens no conversation has two tokens of an answer: give others")
    return kept


def check_origin(paths: Iterable[Path], target: Target) -> None:
    """Raise BastionError for a folder whose manifest says that another target wrote it."""
    for path in paths:
        try:
            manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
            name, wrote = str(manifest["target"]), str(manifest["target_digest"])
        except (OSError, ValueError, LookupError, TypeError):
            continue  # no folder of `bastion synthesize`
        if wrote != target.digest:
            raise BastionError(f"{path} was written by {name}, which is not {target.name}: make answers with this one")


def digest(conversations: Iterable[Conversation]) -> str:
    """SHA-256 of what is said, in order."""
    content = hashlib.sha256()
    feed(content, conversations)
    return content.hexdigest()


def feed(content: hashlib._Hash, conversations: Iterable[Conversation]) -> None:
    """Let a hash that has seen the conversations before these see these."""
    for one in conversations:
        content.update(np.array((len(one.ids), one.prompt_length, *one.ids), np.int64).tobytes())
