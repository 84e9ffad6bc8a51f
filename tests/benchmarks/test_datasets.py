"""Names, sources, wording and draws of prompt sets."""

import json
import sys
from types import SimpleNamespace

import pytest

from bastion import BastionError
from bastion.benchmarks import datasets
from bastion.benchmarks.datasets import LONGBENCH, Sample, expand, load_samples, read_samples
from bastion.paths import cache_root

SHORT = ["gsm8k", "math500", "aime25", "humaneval", "mbpp", "lcb", "mt-bench", "alpaca"]


@pytest.fixture(autouse=True)
def hub(monkeypatch, tmp_path):
    """A stand-in for the package datasets, and an empty cache; what it was asked for, and the rows to give."""
    asked = SimpleNamespace(calls=[], rows=[{"question": "How many?"}])

    def load_dataset(path, name=None, split=None, data_files=None):
        asked.calls.append((path, name, split, data_files))
        if isinstance(asked.rows, Exception):
            raise asked.rows
        return asked.rows

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    monkeypatch.setenv("BASTION_CACHE", str(tmp_path / "cache"))
    return asked


def write(path, *lines):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_names_aliases_and_groups_become_data_sets():
    assert expand(["mt-bench", "qasper", "longbench-samsum", "aime2025"]) == [
        "mt-bench",
        "longbench-qasper",
        "longbench-samsum",
        "aime25",
    ]
    assert expand(["paper-short"]) == SHORT
    assert expand(["longbench"]) == [f"longbench-{subset}" for subset in LONGBENCH]
    assert len(LONGBENCH) == 7


@pytest.mark.parametrize(
    ("names", "complaint"),
    [
        (["gsm8k", "gms8k"], r"unknown data set 'gms8k': use gsm8k, .*longbench-qasper, .*paper-short.*--prompts"),
        (["gsm8k", "gsm8k"], "gsm8k is asked for twice"),
        (["mbpp", "paper-short"], "mbpp is asked for twice"),
        (["longbench-qasper", "qasper"], "longbench-qasper is asked for twice"),
    ],
)
def test_names_that_are_unknown_or_given_twice_are_refused(names, complaint):
    with pytest.raises(BastionError, match=complaint) as error:
        expand(names)
    assert "\n" not in str(error.value)


def test_a_group_is_not_loaded_as_one():
    with pytest.raises(BastionError, match="unknown data set 'paper-short'"):
        load_samples("paper-short")


def test_prompts_have_the_wording_of_the_files(shared, hub):
    def known(name):
        return read_samples(shared / "data" / f"{name}.jsonl")

    def body(sample, before="", after=""):
        """What a column of the hub holds, if the wording is as it should be."""
        text = sample.turns[0]
        assert text.startswith(before)
        assert text.endswith(after)
        return text[len(before) : len(text) - len(after)]

    boxed = "\nPlease reason step by step, and put your final answer within \\boxed{}."
    solve = "Write a solution to the following problem and make sure that it passes the tests:\n```python\n"
    rows = {
        "gsm8k": lambda one, _: {"question": body(one, after=boxed), "answer": "#### 1"},
        "math500": lambda one, _: {"problem": body(one, after=boxed), "answer": "1", "unique_id": "test/1.json"},
        "humaneval": lambda one, number: {
            "task_id": f"HumanEval/{number}",
            "prompt": body(one, solve, "\n```"),
            "entry_point": "f",
        },
        "mbpp": lambda one, number: {"task_id": 11 + number, "prompt": body(one), "code": "pass"},
        "mt-bench": lambda one, _: {"prompt": list(one.turns), "prompt_id": 2**20, "category": "writing"},
    }
    for name, make in rows.items():
        samples = known(name)
        hub.rows = [make(sample, number) for number, sample in enumerate(samples)]
        loaded = load_samples(name)
        assert [one.turns for one in loaded] == [one.turns for one in samples], name
        if name != "mt-bench":  # the hub numbers it anew
            assert [one.name for one in loaded] == [one.name for one in samples], name
    assert hub.calls == [
        ("openai/gsm8k", "main", "test", None),
        ("HuggingFaceH4/MATH-500", None, "test", None),
        ("openai/openai_humaneval", None, "test", None),
        ("google-research-datasets/mbpp", "sanitized", "test", None),
        ("HuggingFaceH4/mt_bench_prompts", None, "train", None),
    ]


@pytest.mark.parametrize(
    ("name", "row", "turns", "call"),
    [
        (
            "aime25",
            {"problem": "Find $x$.", "answer": "1"},
            ("Find $x$.\nPlease reason step by step, and put your final answer within \\boxed{}.",),
            ("math-ai/aime25", None, "test", None),
        ),
        (
            "lcb",
            {"question_content": "Add.", "starter_code": ""},
            (
                "Write a complete solution to the following programming problem.\n"
                "Return only the solution code.\n\nAdd.",
            ),
            (
                "json",
                None,
                "train",
                [
                    "hf://datasets/livecodebench/code_generation_lite/test.jsonl",
                    "hf://datasets/livecodebench/code_generation_lite/test2.jsonl",
                ],
            ),
        ),
        (
            "alpaca",
            {"instruction": "Sum.", "input": "1, 2"},
            ("Sum.\n\n1, 2",),
            ("tatsu-lab/alpaca", None, "train", None),
        ),
        ("alpaca", {"instruction": "Sing.", "input": ""}, ("Sing.",), ("tatsu-lab/alpaca", None, "train", None)),
        (
            "qasper",
            {"context": "A paper.", "input": "Why?", "length": 2},
            ("A paper.\n\nWhy?",),
            ("json", None, "train", ["zip://data/qasper.jsonl::hf://datasets/THUDM/LongBench/data.zip"]),
        ),
    ],
)
def test_prompts_have_the_wording_of_the_public_release(hub, name, row, turns, call):
    hub.rows = [row]
    assert [one.turns for one in load_samples(name)] == [turns]
    assert hub.calls == [call]


def test_the_folder_goes_before_the_cache_and_the_cache_before_the_hub(hub, tmp_path):
    hub.rows = [{"question": "Where “is”\u2028it?"}]
    question = ("Where “is”\u2028it?\nPlease reason step by step, and put your final answer within \\boxed{}.",)
    expected = [Sample("gsm8k/0", question)]
    assert load_samples("gsm8k") == expected
    assert load_samples("gsm8k", data_dir=tmp_path) == expected  # not in that folder
    assert len(hub.calls) == 1
    assert [file.name for file in (cache_root() / "prompts").iterdir()] == ["gsm8k.jsonl"]
    write(tmp_path / "gsm8k.jsonl", {"id": "mine", "prompt": "My own."})
    assert load_samples("gsm8k", data_dir=tmp_path) == [Sample("mine", ("My own.",))]
    write(tmp_path / "qasper.jsonl", {"id": "mine", "prompt": "My own."})
    assert load_samples("longbench-qasper", data_dir=tmp_path) == [Sample("mine", ("My own.",))]
    assert len(hub.calls) == 1
    with pytest.raises(BastionError, match=r"is no folder: give one with files such as gsm8k\.jsonl"):
        load_samples("gsm8k", data_dir=tmp_path / "gsm8k.jsonl")


@pytest.mark.parametrize("content", ["", '{"turns": ["whole"]}\n{"turns": ["ha'])
def test_a_damaged_file_of_the_cache_is_to_be_deleted(hub, content):
    file = write(cache_root() / "prompts" / "gsm8k.jsonl")
    file.write_text(content)
    with pytest.raises(BastionError, match=r"prompts/gsm8k\.jsonl.*; delete the file, and it is fetched again"):
        load_samples("gsm8k")
    assert hub.calls == []


def test_a_failed_download_leaves_nothing_behind(hub, monkeypatch):
    hub.rows = ConnectionError("no network\nand more")
    instead = r"give a folder with gsm8k\.jsonl as --data-dir, or prompts of your own as --prompts"
    with pytest.raises(BastionError, match=rf"cannot load openai/gsm8k \(no network\): {instead}") as error:
        load_samples("gsm8k")
    assert "\n" not in str(error.value)
    hub.rows = [{"question": "first"}, {"problem": "second"}]
    with pytest.raises(BastionError, match=rf"openai/gsm8k has changed, its rows have no 'question': {instead}"):
        load_samples("gsm8k")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(BastionError, match=rf"pip install 'bastion\[bench\]', or {instead}"):
        load_samples("gsm8k")
    assert not (cache_root() / "prompts").exists()


def test_a_cache_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "cache").write_text("a file where the folder should be")
    with pytest.raises(BastionError, match=r"cannot write to .*set BASTION_CACHE to another folder"):
        load_samples("gsm8k")


def test_two_processes_may_fetch_at_once(hub, monkeypatch):
    """The file of one that is faster is replaced whole, never mixed with the other's."""
    hub.rows = [{"question": f"question {number}"} for number in range(3)]
    load_turns = datasets.load_turns

    def slow(*arguments):
        write(cache_root() / "prompts" / "gsm8k.jsonl", *({"prompt": f"faster {number}"} for number in range(99)))
        return load_turns(*arguments)

    monkeypatch.setattr(datasets, "load_turns", slow)
    assert [one.name for one in load_samples("gsm8k")] == ["gsm8k/0", "gsm8k/1", "gsm8k/2"]


def test_max_samples_draws_the_same_ones_everywhere(hub):
    hub.rows = [{"question": str(number)} for number in range(10)]
    names = [one.name for one in load_samples("gsm8k", max_samples=4)]
    # random.seed(0); random.shuffle(list(range(10))), as the public release does it
    assert names == ["gsm8k/7", "gsm8k/8", "gsm8k/1", "gsm8k/5"]
    assert [one.name for one in load_samples("gsm8k", max_samples=2)] == names[:2]
    assert [one.name for one in load_samples("gsm8k", max_samples=4, seed=1)] != names
    assert [one.name for one in load_samples("gsm8k", max_samples=10)] == [f"gsm8k/{number}" for number in range(10)]


@pytest.mark.parametrize("max_samples", [0, -1])
def test_no_samples_are_refused_before_anything_is_read(hub, tmp_path, max_samples):
    for load in (lambda **limit: load_samples("gsm8k", **limit), lambda **limit: read_samples(tmp_path, **limit)):
        with pytest.raises(BastionError, match=f"max_samples must be at least 1, not {max_samples}"):
            load(max_samples=max_samples)
    assert hub.calls == []


def test_files_of_ones_own(tmp_path):
    file = write(tmp_path / "mine.jsonl", {"id": "a/b", "turns": ["first", "second"]}, {"prompt": "third"})
    assert read_samples(file) == [Sample("a/b", ("first", "second")), Sample("mine.jsonl:2", ("third",))]
    for lines, complaint in [
        ([], "mine.jsonl holds no prompts"),
        ([{"id": 1, "prompt": "x"}, {"id": 1, "prompt": "y"}], "2 prompts with the id 1: give each its own"),
        ([{"id": 1}], "mine.jsonl:1 is no object with turns or prompt"),
    ]:
        write(file, *lines)
        with pytest.raises(BastionError, match=complaint):
            read_samples(file)
    with pytest.raises(BastionError, match="cannot read"):
        read_samples(tmp_path / "absent.jsonl")
