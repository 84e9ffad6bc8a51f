"""Files that are whole or not there, and folders that one process writes at a time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from bastion.errors import BastionError


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path beside `path` to write to. It takes the place of `path` at the end, or is removed if writing fails."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield beside
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    """Write a text, all or nothing."""
    with replacing(path) as beside:
        beside.write_text(text, encoding="utf-8")


def append(path: Path, line: str) -> None:
    """Add a line to a file of lines."""
    with writing(path.parent), path.open("a", encoding="utf-8") as file:
        file.write(line)


def cut_half_line(path: Path) -> None:
    """Cut away a last line without an end, which a killed process leaves."""
    content = path.read_bytes()
    if not content.endswith(b"\n"):
        with writing(path.parent):
            os.truncate(path, content.rfind(b"\n") + 1)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Make the folder, and keep other processes from writing to it. Raises BastionError if one does already."""
    with writing(path):
        path.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path / ".lock", blocking=False)
        try:
            lock.acquire()
        except Timeout as error:
            raise BastionError(
                f"{path} is being written by another process: wait for it, or give another folder"
            ) from error
    try:
        yield
    finally:
        lock.release()


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn what the system says about a place that cannot be written into a BastionError."""
    try:
        yield
    except OSError as error:
        raise BastionError(f"cannot write to {path} ({error.strerror}): make room, or give another folder") from error
