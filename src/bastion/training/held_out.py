"""Prompts of public test sets, which no drafter may be trained on: known by their hashes alone.

The file beside this one is made from the files of prompts (JSON lines with `turns` or `prompt`) of gsm8k, math500,
humaneval, mbpp and mt-bench by

    python -m bastion.training.held_out gsm8k.jsonl math500.jsonl humaneval.jsonl mbpp.jsonl mt-bench.jsonl

It finds a prompt again whatever its case, spacing, punctuation and instruction wording, but not a paraphrase, nor a
prompt that is part of a longer one.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from bastion.errors import BastionError
from bastion.files import replacing
from bastion.training.prompts import STEP_BY_STEP, read_turns

HASHES = Path(__file__).with_suffix(".bin")
WIDTH = 8  # bytes of a SHA-256 that are kept
FENCE = "```python"
SOLVE = "Write a solution to the following problem and make sure that it passes the tests:"


def is_held_out(text: str) -> bool:
    """Whether a prompt occurs in a public test set."""
    return fingerprint(text) in _hashes()


def fingerprint(text: str) -> bytes:
    """The first bytes of the SHA-256 of a prompt's letters and digits, in lower case, instructions left out."""
    content = _letters(text)
    for instruction in (STEP_BY_STEP, SOLVE):
        content = content.replace(_letters(instruction), "")
    return hashlib.sha256(content.encode(errors="surrogatepass")).digest()[:WIDTH]


def make(files: Iterable[Path], out: Path = HASHES) -> int:
    """Write the hashes of all turns in `files`, sorted, to `out`; how many there are. BastionError: as `read_turns`."""
    hashes = sorted({fingerprint(turn) for path in files for _, turns in read_turns(path) for turn in turns})
    with replacing(out) as beside:
        beside.write_bytes(b"".join(hashes))
    return len(hashes)


def _letters(text: str) -> str:
    return "".join(filter(str.isalnum, text.lower().replace(FENCE, "")))


@cache
def _hashes() -> frozenset[bytes]:
    content = HASHES.read_bytes()
    return frozenset(content[start : start + WIDTH] for start in range(0, len(content), WIDTH))


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: python -m bastion.training.held_out FILES...")
    try:
        print(f"{make(map(Path, sys.argv[1:]))} prompts in {HASHES}")
    except BastionError as error:
        sys.exit(f"bastion: {error}")
