"""`bastion bench` and `python -m bastion.benchmark` as a user runs them, on a tiny model folder."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from bastion.benchmarks.datasets import Sample
from bastion.benchmarks.forced_report import ForcedSummary, write_forced
from bastion.benchmarks.methods import expand_methods, load_drafters, policy_of
from bastion.benchmarks.records import LINES, read_results
from bastion.benchmarks.runner import plan
from bastion.drafters.loading import load_drafter
from bastion.drafters.mixed import MixedDrafter
from bastion.targets.loading import load_target
from benchmarks.support import SETTINGS
from targets.loading_support import write_chat_llama
from tiny import FixedDrafter

METHODS = "ar,dflash,ddtree:4,ngram"
TALK = {"id": "talk", "turns": ["Say abc abc abc.", "And once more?"]}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A target, and prompt sets of one and of two turns."""
    folder = tmp_path_factory.mktemp("bench")
    (folder / "target").mkdir()
    write_chat_llama(folder / "target")
    (folder / "data").mkdir()
    write(folder / "data" / "gsm8k.jsonl", *({"id": f"q{i}", "turns": [f"What is {i} + {i}?"]} for i in range(4)))
    write(folder / "two.jsonl", TALK)
    return folder


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(autouse=True)
def _cache(monkeypatch, tmp_path_factory):
    """One cache folder for all tests of the file: a calibration of the tiny model takes seconds."""
    folder = tmp_path_factory.getbasetemp() / "bench-cache"
    monkeypatch.setenv("BASTION_CACHE", str(folder))


def arguments(files, out, *more):
    common = ["--target", files / "target", "--drafter", "ngram", "--dtype", "float32", "--max-new-tokens", 12]
    sets = ["--datasets", "gsm8k", "--data-dir", files / "data", "--prompts", files / "two.jsonl", "--max-samples", 2]
    return ["bench", "--out", out, *common, *sets, "--methods", METHODS, *more]


def test_a_run_leaves_lines_summary_and_report(files, tmp_path, run_command):
    out = tmp_path / "results"
    status, said, error = run_command(*arguments(files, out, "--temperatures", "0,1", "--repeats", 2))
    assert status == 0, error
    assert "accepted length" in said
    run, lines = read_results(out)
    methods = METHODS.split(",")
    assert run.settings.methods == tuple(methods)
    turns = 2 + 2  # two samples of one turn, one of two
    assert len({line.text for line in lines}) == len(lines) == turns * 2 * 2 * len(methods)
    texts = {}
    for line in lines:
        key = (*line.text.model_dump(exclude={"method"}).values(),)
        texts.setdefault(key, set()).add(line.tokens_sha256)
        assert line.new_tokens == 12 or line.answer
        assert sum(line.accepted_lengths) == line.new_tokens - 1
        assert 0 < line.prefill_seconds < line.seconds
    assert all(len(several) == 1 for several in texts.values())  # all methods write the same, at both temperatures
    trees = {method: [line.tree_sizes for line in lines if line.text.method == method] for method in methods}
    assert {size for sizes in trees["ar"] for size in sizes} == {0}
    assert max(size for sizes in trees["ddtree:4"] for size in sizes) == 4
    second = [line for line in lines if line.text.turn == 1]
    first = [line for line in lines if line.text.sample == "talk" and line.text.turn == 0]
    assert min(line.prompt_tokens for line in second) > max(line.prompt_tokens for line in first)
    summary = json.loads((out / "summary.json").read_text())
    assert {row["dataset"] for row in summary["figures"]} == {"gsm8k", "two", "all"}
    assert summary["peak_memory"] > 0
    assert "<html" in (out / "report.html").read_text()


def test_methods_take_turns_and_another_one_begins_each_time(files, tmp_path, run_command):
    status, _, _ = run_command(*arguments(files, tmp_path / "out"))
    assert status == 0
    order = [line.text.method for line in read_results(tmp_path / "out")[1]]
    groups = [order[start : start + 4] for start in range(0, len(order), 4)]
    assert all(set(group) == set(METHODS.split(",")) for group in groups)
    assert len({group[0] for group in groups}) > 1


def test_data_sets_of_unequal_size_are_gone_through_side_by_side():
    samples = {"chat": [Sample("a", ("",)), Sample("b", ("",)), Sample("c", ("",))], "code": [Sample("x", ("",))]}
    settings = SETTINGS.model_copy(update={"datasets": ("chat", "code"), "temperatures": (0.0, 1.0), "repeats": 2})
    names = [(one.sample.name, one.temperature) for one in plan(samples, settings) if one.repeat == 0]
    assert names == [(name, temperature) for name in "axbc" for temperature in (0.0, 1.0)]
    assert [one.repeat for one in plan(samples, settings)] == [0] * 8 + [1] * 8


def test_an_interrupted_run_is_resumed(files, tmp_path, run_command):
    out = tmp_path / "out"
    assert run_command(*arguments(files, out))[0] == 0
    complete = (out / LINES).read_bytes()
    kept = complete.splitlines(keepends=True)[:7]
    (out / LINES).write_bytes(b"".join(kept) + complete.splitlines()[7][:40])  # killed while it wrote the eighth
    assert run_command(*arguments(files, out))[0] == 2
    status, _, error = run_command(*arguments(files, out, "--resume"))
    assert status == 0, error
    lines = (out / LINES).read_bytes().splitlines(keepends=True)
    assert lines[:7] == kept
    assert len(lines) == len(complete.splitlines())
    _, read = read_results(out)
    assert {line.text for line in read} == {json_line(one) for one in complete.splitlines()}
    status, _, error = run_command(*arguments(files, out, "--resume", "--repeats", 3))
    assert status == 2
    assert "another benchmark (repeats 1 != 3)" in error
    status, _, error = run_command(*arguments(files, out, "--resume", "--enable-thinking"))
    assert status == 0, error  # this template does not know it: the prompts are the same
    write(files / "two.jsonl", {"id": "talk", "turns": ["Say abc abc abc.", "And for the third time?"]})
    status, _, error = run_command(*arguments(files, out, "--resume"))
    write(files / "two.jsonl", TALK)
    assert status == 2
    assert "another benchmark (prompts_sha256" in error


def json_line(content):
    from bastion.benchmarks.records import Line

    return Line.model_validate_json(content).text


def test_forced_acceptance_measures_the_machine(files, tmp_path, run_command):
    out = tmp_path / "out"
    common = ["--target", files / "target", "--drafter", "ngram", "--prompts", files / "two.jsonl", "--out", out]
    status, said, error = run_command("bench", *common, "--max-new-tokens", 8, "--forced-acceptance", "0,1")
    assert status == 0, error
    assert "break-even" in said
    points = json.loads((out / "forced.json").read_text())["points"]
    assert {point["acceptance"]: point["accepted_length"] > 1 for point in points} == {0.0: False, 1.0: True}
    assert (out / "forced.png").read_bytes().startswith(b"\x89PNG")
    summary = ForcedSummary.model_validate_json((out / "forced.json").read_text())
    never = [one.model_copy(update={"acceptance": None, "accepted_length": None}) for one in summary.break_even]
    (out / "forced.png").unlink()
    write_forced(summary.model_copy(update={"break_even": never}), out)
    assert (out / "forced.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--forced-acceptance", "0,2"], "different numbers from 0 to 1"),
        (["--forced-acceptance", "0.5"], "leave out --methods"),
        (["--datasets", "gsm9k"], "unknown data set 'gsm9k'"),
        (["--datasets", "gsm8k,gsm8k"], "asked for twice"),
        (["--max-samples", 0], "max_samples must be at least 1"),
        (["--methods", "ar,ar"], "method ar is asked for twice"),
        (["--methods", "ar,eagle9"], "unknown method 'eagle9'"),
        (["--methods", "ar@here"], "takes no drafter of its own"),
        (["--methods", "hf@here"], "takes nothing behind"),
        (["--methods", "ar,ddtree:8@"], "takes no drafter of its own"),
        (["--methods", "ar,eagle3"], "give its checkpoint, as in eagle3@FOLDER"),
        (["--methods", "ar,ddtree:8@nothing"], "unknown drafter 'nothing'"),
        (["--methods", "ddtree:x"], "must be a number of nodes"),
        (["--methods", "ar:4"], "takes no budget"),
        (["--temperatures", "-1"], "temperature must be 0 or more"),
        (["--temperatures", "hot"], "--temperatures must be different numbers"),
        (["--max-new-tokens", 0], "max_new_tokens must be 1 or more"),
        (["--max-new-tokens", 3000], "more than the 2048"),
        (["--repeats", 0], "repeats must be 1 or more"),
        (["--drafter", "smollm2-135m-dflash"], "the drafter has a vocabulary of 49152 tokens"),
        (["--data-dir", "nowhere"], "nowhere is no folder"),
        (["--datasets", ""], "--data-dir holds data sets"),
        (["--seed", 2**64 - 1], "seed must be a 64-bit number"),
        (["--max-new-tokens", 1100], "prompt talk of two takes up to"),  # by its second turn
        (["--prompts", "nowhere.jsonl"], "nowhere.jsonl"),
    ],
)
def test_bad_input_is_one_clear_line(files, tmp_path, run_command, more, message):
    status, _, error = run_command(*arguments(files, tmp_path / "out", *more))
    assert status == 2
    assert message in error
    assert len(error.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_written_is_said(files, tmp_path, run_command):
    (tmp_path / "file").write_text("")
    status, _, error = run_command(*arguments(files, tmp_path / "file" / "out"))
    assert status == 2
    assert "cannot write to" in error


def test_a_damaged_line_in_the_middle_is_said(files, tmp_path, run_command):
    out = tmp_path / "out"
    assert run_command(*arguments(files, out))[0] == 0
    with (out / LINES).open("a") as file:
        file.write("{}\n")
    status, _, error = run_command(*arguments(files, out, "--resume"))
    assert status == 2
    assert f"{LINES}, line 17, is damaged" in error


def test_ddtree_alone_stands_for_several_budgets():
    assert expand_methods(["ar", "ddtree"]) == ["ar", "ddtree:8", "ddtree:16", "ddtree:32", "ddtree:64"]
    assert expand_methods(["ddtree@a:b"]) == ["ddtree:8@a:b", "ddtree:16@a:b", "ddtree:32@a:b", "ddtree:64@a:b"]
    assert [policy_of(name) for name in ("eagle3@x", "eagle3:20@x", "treeflash", "auto@x")] == [
        "fixed:59", "fixed:20", "fixed:63", "auto"
    ]  # fmt: skip


@pytest.mark.parametrize("processes", [1, 2])
def test_the_release_s_benchmark_prints_its_three_rows(files, tmp_path, monkeypatch, processes):
    monkeypatch.setenv("BASTION_CACHE", str(tmp_path))
    start = ["torch.distributed.run", "--standalone", f"--nproc_per_node={processes}", "-m"] if processes > 1 else []
    command = [sys.executable, "-m", *start, "bastion.benchmark", "--model", files / "target", "--draft-model", "ngram"]
    command += ["--dataset", "gsm8k", "--data-dir", files / "data", "--max-samples", 3, "--max-new-tokens", 8]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "200"}
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [line.split() for line in done.stdout.splitlines() if "100%" in line]
    assert [row[0] for row in rows] == ["ar", "dflash", "bastion"]
    assert {row[-2] for row in rows} == {"3"}  # prompts, of all processes, each once
    assert done.stderr.count("measuring this machine") == 1


def test_a_process_that_fails_ends_the_others_in_one_line(files, tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m"]
    command += ["bastion.benchmark", "--model", files / "nowhere", "--draft-model", "ngram", "--dataset", "gsm8k"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode
    assert done.stderr.count("there is no model at") == 1
    assert "RuntimeError" not in done.stderr


@pytest.mark.parametrize("damage", ["", "{"])
def test_prompts_that_cannot_be_had_are_said_in_one_line(files, tmp_path, monkeypatch, run_command, damage):
    monkeypatch.setenv("BASTION_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    if damage:
        (tmp_path / "prompts").mkdir()
        (tmp_path / "prompts" / "gsm8k.jsonl").write_text(damage)
    status, _, error = run_command(
        "bench", "--target", files / "target", "--datasets", "gsm8k", "--out", tmp_path / "out"
    )
    assert status == 2
    assert ("delete the file" if damage else "--data-dir") in error
    assert len(error.strip().splitlines()) == 1


def test_smaller_blocks_draft_less(shared):
    folder = shared / "fixtures" / "dflash_drafter" / "qwen3"
    drafter = load_drafter(folder / "drafter", load_target(folder / "target", dtype="float32").target)
    assert drafter.with_block_size(3).depth == 2
    for size in (1, drafter.depth + 2):
        with pytest.raises(Exception, match="block size"):
            drafter.with_block_size(size)


def test_a_drafter_behind_a_method_is_the_one_that_is_loaded(monkeypatch) -> None:
    """Also where it is called as a method is."""
    monkeypatch.setattr("bastion.benchmarks.methods.load_drafter", lambda source, target: [source])
    inner = FixedDrafter(torch.zeros(2, 96))
    model = SimpleNamespace(drafter=MixedDrafter(inner), target=None)
    found = load_drafters(["dflash@auto", "bastion@auto", "auto@ngram", "ddtree:8", "auto"], model)
    assert found["dflash@auto"] == found["bastion@auto"] == ["auto"]
    assert found["auto@ngram"] == ["ngram"]
    assert (found["ddtree:8"], found["auto"]) == (inner, model.drafter)


def test_the_papers_methods_take_the_drafter_without_the_index() -> None:
    inner = FixedDrafter(torch.zeros(2, 96))
    model = SimpleNamespace(drafter=MixedDrafter(inner), target=None)
    found = load_drafters(["ar", "dflash", "ddtree:8", "caddtree", "bastion", "auto", "ngram", "hf"], model)
    assert all(found[name] is inner for name in ("dflash", "ddtree:8", "caddtree", "bastion"))
    assert found["auto"] is model.drafter
    assert found["ngram"].name == "ngram"
    assert "hf" not in found
