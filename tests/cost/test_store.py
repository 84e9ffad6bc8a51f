import json
import os
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from bastion.cost.base import Measurement
from bastion.cost.ceilings import Ceilings
from bastion.cost.fit import fit_profile, fit_roofline
from bastion.cost.store import Calibration, CalibrationKey, load, save
from bastion.errors import BastionError
from bastion.paths import cache_root
from bastion.targets.base import ModelShape

KEY = CalibrationKey(
    device="AMD EPYC",
    threads=2,
    dtype="float32",
    attention="eager",
    target_digest="target",
    drafter_digest="drafter",
    depth=8,
    torch="2.13.0",
    transformers="5.24.0",
    bastion="0.1.0",
)


SHAPE = ModelShape(layers=2, hidden=8, heads=4, kv_heads=2, head_dim=2, intermediate=16, vocab=32)
PASSES = tuple(Measurement(n, c, 0.1 + n / 30 + c / 700) for n in (1, 2, 5) for c in (3, 90))
ROOFLINE = fit_roofline(PASSES, SHAPE, 4, Ceilings(1e11, 1e10))
PROFILE = fit_profile(PASSES)


def calibration(key: CalibrationKey = KEY) -> Calibration:
    return Calibration(
        key=key,
        date=datetime.now(UTC),
        measurements=PASSES,
        draft_seconds=1 / 3,
        deepen_seconds=0.004,
        aux_seconds=1e-4,
        roofline=ROOFLINE,
        profile=PROFILE,
        errors={"roofline": 0.1, "profile": 0.2},
    )


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BASTION_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_calibration_comes_back_as_it_was(root: Path) -> None:
    saved = calibration()
    path = save(saved)
    assert path.parent == root / "calibrations"
    loaded, reason = load(KEY)
    assert reason == ""
    assert loaded == saved
    rows = np.arange(1, 9)
    assert loaded is not None
    assert (loaded.roofline.seconds(rows, 40) == saved.roofline.seconds(rows, 40)).all()
    assert (loaded.profile.seconds(rows, 40) == saved.profile.seconds(rows, 40)).all()


OTHER_VALUES = {
    "device": "NVIDIA H200",
    "threads": 1,
    "dtype": "bfloat16",
    "attention": "sdpa",
    "depth": 16,
    "torch": "2.14.0",
    "transformers": "5.25.0",
    "bastion": "0.2.0",
}


@pytest.mark.parametrize("field", OTHER_VALUES)
def test_any_other_condition_is_stale_and_says_which(field: str) -> None:
    save(calibration())
    found, reason = load(KEY.model_copy(update={field: OTHER_VALUES[field]}))
    assert found is None
    assert reason == f"stale: {field} {getattr(KEY, field)} != {OTHER_VALUES[field]}"


def test_the_nearest_stale_calibration_is_named() -> None:
    for depth in range(10, 20):  # enough for the nearest to be neither the first file nor the last
        save(calibration(KEY.model_copy(update={"threads": 1, "depth": depth})))
    nearest = save(calibration(KEY.model_copy(update={"threads": 1})))
    assert nearest in sorted(nearest.parent.iterdir())[1:-1]
    assert load(KEY) == (None, "stale: threads 1 != 2")


@pytest.mark.parametrize("field", ["target_digest", "drafter_digest"])
def test_calibrations_of_other_models_do_not_matter(field: str) -> None:
    save(calibration())
    found, reason = load(KEY.model_copy(update={field: "another"}))
    assert found is None
    assert reason.startswith("absent: ")


def test_an_empty_cache_has_nothing() -> None:
    assert load(KEY)[0] is None
    assert load(KEY)[1].startswith("absent: ")


def test_two_keys_do_not_overwrite_each_other() -> None:
    other = KEY.model_copy(update={"threads": 1})
    save(calibration())
    save(calibration(other))
    for key in (KEY, other):
        found, _ = load(key)
        assert found is not None
        assert found.key == key


def test_a_foreign_file_under_the_right_name_is_not_used() -> None:
    path = save(calibration())
    path.write_text(calibration(KEY.model_copy(update={"device": "elsewhere"})).model_dump_json())
    assert load(KEY) == (None, "stale: device elsewhere != AMD EPYC")


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe\x00", b"[]", b"null", b'{"key": {}}'])
def test_a_file_that_is_no_calibration_is_explained_in_one_line(content: bytes) -> None:
    path = save(calibration())
    path.write_bytes(content)
    found, reason = load(KEY)
    assert found is None
    assert reason.startswith(f"corrupt: {path} is not a calibration: ")
    assert "\n" not in reason


def set_item(where: str, value: object):
    def change(document) -> None:
        *folders, last = where.split(".")
        for name in folders:
            document = document[int(name)] if isinstance(document, list) else document[name]
        document[last] = value

    return change


@pytest.mark.parametrize(
    "change",
    [
        set_item("roofline.alpha_m", -1.0),
        set_item("measurements.0.seconds", 0.0),
        set_item("profile.curves", []),
        set_item("profile.curves.0.seconds", [1.0]),
        set_item("draft_seconds", None),
        set_item("aux_seconds", -0.1),
        set_item("errors", {"guess": 0.1}),
        set_item("unknown", 1),
        lambda document: document.pop("key"),
    ],
)
def test_a_file_with_impossible_contents_is_corrupt(change) -> None:
    path = save(calibration())
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))
    found, reason = load(KEY)
    assert found is None
    assert reason.startswith("corrupt: ")
    assert "\n" not in reason


def test_corrupt_neighbours_do_not_hide_a_stale_calibration() -> None:
    path = save(calibration(KEY.model_copy(update={"threads": 1})))
    (path.parent / "0.json").write_text("{")
    assert load(KEY) == (None, "stale: threads 1 != 2")


def test_a_failed_write_keeps_the_old_file_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(calibration())
    before = path.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(BastionError, match=r"No space left on device.*BASTION_CACHE"):
        save(calibration())
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def test_a_cache_that_is_no_folder_is_explained(root: Path) -> None:
    root.write_text("a file")
    with pytest.raises(BastionError, match="set BASTION_CACHE to another folder"):
        save(calibration())


def test_the_key_describes_this_machine() -> None:
    target = SimpleNamespace(device=torch.device("cpu"), dtype=torch.bfloat16, digest="t", attention="sdpa")
    drafter = SimpleNamespace(digest="d", depth=7)
    key = CalibrationKey.here(target, drafter)  # type: ignore[arg-type]
    assert (key.dtype, key.target_digest, key.drafter_digest, key.depth) == ("bfloat16", "t", "d", 7)
    assert (key.threads, key.torch) == (torch.get_num_threads(), torch.__version__)


def test_without_the_variable_the_cache_is_the_user_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BASTION_CACHE", "")
    assert "bastion" in cache_root().parts[-1].lower() or "bastion" in cache_root().parts[-2].lower()
    assert cache_root().is_absolute()
    monkeypatch.setenv("BASTION_CACHE", "~/elsewhere")
    assert cache_root() == Path.home() / "elsewhere"
