"""`bastion train` as a user runs it, on a tiny model folder."""

import os
import subprocess
import sys

import pytest
import torch
from accelerate.state import AcceleratorState
from filelock import FileLock

from bastion.cli.train import _accelerator
from bastion.drafters.dflash import DFlashDrafter, load_model
from bastion.drafters.loading import FAMILIES as DRAFTERS
from bastion.drafters.loading import load_drafter
from bastion.targets.loading import load_target
from bastion.training.data import Conversation
from bastion.training.families import FAMILIES
from bastion.training.trainer import read_log
from targets.loading_support import write_llama


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("train")
    (folder / "target").mkdir()
    write_llama(folder / "target")
    texts = [Conversation(tuple(range(start, start + 40)), 5, "", 0.0) for start in range(3, 60)]
    (folder / "data.jsonl").write_text("".join(one.line() for one in texts))
    return folder


SIZES = ("--layers", 1, "--block-size", 4)


def arguments(files, out, *more, family="dflash", sizes=SIZES):
    common = ["--target", files / "target", "--data", files / "data.jsonl", "--out", out, "--dtype", "float32"]
    run = ["--batch", 2, "--held-back", 0.1, "--anchors", 4, "--evaluate-every", 3]
    return [str(argument) for argument in ("train", family, *common, *sizes, *run, *more)]


def test_training_leaves_a_drafter_a_log_and_curves(files, tmp_path, run_command):
    out = tmp_path / "drafter"
    status, said, _ = run_command(*arguments(files, out, "--max-steps", "6", "--draft-vocab", "30"))
    assert status == 0
    assert "accepted length" in said
    drafter = DFlashDrafter.load(out, load_target(files / "target", dtype="float32").target)
    assert (drafter.depth, drafter.model.config.draft_vocab) == (3, 30)
    assert [record["step"] for record in read_log(out)] == [3, 6]
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")
    status, _, error = run_command(*arguments(files, out, "--max-steps", "6", "--draft-vocab", "30"))
    assert status == 2
    assert "continue it with --resume" in error
    status, _, _ = run_command(*arguments(files, out, "--max-steps", "9", "--draft-vocab", "30", "--resume"))
    assert status == 0
    assert [record["step"] for record in read_log(out)] == [3, 6, 9]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ([], "say how long to train"),
        (["--max-steps", "3", "--loss", "mse"], "unknown loss"),
        (["--max-steps", "3", "--draft-vocab", "200"], "smaller draft vocabulary"),
        (["--time-budget", "nan"], "time_budget must be"),
        (["--max-steps", "3", "--seed", "99999999999999999999999"], "seed must be"),
        (["--max-steps", "3", "--init", "ngram"], "--init brings its own sizes"),
        (["--max-steps", "3", "--max-length", "6"], "within 6 tokens"),
        (["--max-steps", "3", "--feature-budget", "0.0000001"], "raise --feature-budget"),
        (["--max-steps", "3", "--block-size", "1"], "a block 2 to"),
        (["--max-steps", "3", "--device", "cpu:1"], "not available"),
        (["--max-steps", "3", "--resume"], "no checkpoint"),
        (["--max-steps", "3", "--data", "nowhere.jsonl"], "no data at nowhere.jsonl"),
    ],
)
def test_bad_input_is_one_line(files, tmp_path, run_command, more, message):
    status, _, error = run_command(*arguments(files, tmp_path / "out", *more))
    assert status == 2
    last = error.strip().splitlines()[-1]
    assert last.startswith("bastion: ")
    assert message in last


def test_a_folder_with_a_model_or_another_run_in_it_is_left_alone(files, tmp_path, run_command):
    before = sorted((path.name, path.stat().st_size) for path in (files / "target").iterdir())
    status, _, error = run_command(*arguments(files, files / "target", "--max-steps", "3"))
    assert status == 2
    assert "holds a model" in error
    after = sorted((path.name, path.stat().st_size) for path in (files / "target").iterdir() if path.name != ".lock")
    assert after == before
    with FileLock(tmp_path / ".lock"):
        status, _, error = run_command(*arguments(files, tmp_path, "--max-steps", "3"))
    assert status == 2
    assert "by another process" in error


def test_answers_of_another_target_are_refused(files, tmp_path, run_command):
    (tmp_path / "answers").mkdir()
    (tmp_path / "answers" / "part-0.jsonl").write_bytes((files / "data.jsonl").read_bytes())
    (tmp_path / "answers" / "manifest.json").write_text('{"target": "another", "target_digest": "abc"}')
    common = ("--target", files / "target", "--data", tmp_path / "answers", "--dtype", "float32")
    for command in (("train", "dflash", "--out", tmp_path / "x", "--max-steps", 3), ("evaluate-drafter",)):
        status, _, error = run_command(*command, *common)
        assert status == 2
        assert "was written by another" in error


@pytest.mark.parametrize(
    ("native", "dtype", "precision"),
    [(True, None, "bf16"), (True, "float32", "no"), (True, "bfloat16", "bf16"), (False, None, "no")],
)
def test_the_precision_is_what_is_native_or_asked_for(monkeypatch, native, dtype, precision):
    monkeypatch.setattr("bastion.targets.loading.cpu_has_bfloat16", lambda: native)
    AcceleratorState._reset_state()
    try:
        assert _accelerator("cpu", dtype).mixed_precision == precision
    finally:
        AcceleratorState._reset_state()


def test_two_processes_share_the_work(files, tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    command += ["--no-python", sys.executable, "-c", "from bastion.cli import main; main()"]
    out = tmp_path / "two"
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, *arguments(files, out, "--max-steps", "3", "--device", "cpu", "--anchors", "64")],
        env=environment, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert [record["step"] for record in read_log(out)] == [3]
    alone = tmp_path / "one"
    subprocess.run(
        [sys.executable, "-c", "from bastion.cli import main; main()",
         *arguments(files, alone, "--max-steps", "3", "--device", "cpu", "--anchors", "64", "--batch", "4")],
        env=environment, check=True, capture_output=True, timeout=240,
    )  # fmt: skip
    # The same conversations and, with more anchors than positions, the same blocks: the same steps.
    first, second = (load_model(folder, torch.device("cpu"), torch.float32) for folder in (out, alone))
    for name, weight in first.named_parameters():
        torch.testing.assert_close(weight, second.get_parameter(name), rtol=0.02, atol=2e-3)


def test_every_family_can_be_trained_and_loaded(files, tmp_path, run_command):
    target = load_target(files / "target", dtype="float32").target
    first = tmp_path / "dflash"
    steps = ("--max-steps", "3")
    more = {
        "dflash": SIZES,
        "treeflash": ("--init", first),
        "eagle3": ("--draft-vocab", 30),
        "specblock": ("--layers", 1),
    }
    assert more.keys() == set(DRAFTERS) == set(FAMILIES)
    for family, sizes in more.items():
        out = tmp_path / family
        status, _, error = run_command(*arguments(files, out, *steps, family=family, sizes=sizes))
        assert status == 0, error
        assert type(load_drafter(out, target)) is DRAFTERS[family]


@pytest.mark.parametrize(
    ("family", "sizes", "message"),
    [
        ("eagle3", SIZES, "eagle3 takes no --layers"),
        ("eagle3", ("--gamma", 3), "eagle3 takes no --gamma"),
        ("treeflash", (), "name it with --init"),
        ("treeflash", ("--draft-vocab", 30), "treeflash takes no --draft-vocab"),
    ],
)
def test_options_of_other_families_are_refused(files, tmp_path, run_command, family, sizes, message):
    status, _, error = run_command(*arguments(files, tmp_path / "out", "--max-steps", 3, family=family, sizes=sizes))
    assert status == 2
    assert message in error.strip().splitlines()[-1]
