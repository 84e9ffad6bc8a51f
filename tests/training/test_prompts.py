"""Prompts of files and data sets, the opening of self-prompts, and the prompts held back."""

import json
import sys
from types import ModuleType, SimpleNamespace

import pytest

from bastion import BastionError
from bastion.training import held_out
from bastion.training.prompts import read_prompts, read_turns, user_turn
from targets.loading_support import write_tokenizer

TEST_SETS = ("gsm8k", "math500", "humaneval", "mbpp", "mt-bench")


def test_a_file_of_turns_and_prompts(tmp_path):
    file = tmp_path / "mine.jsonl"
    file.write_text('{"id": 7, "turns": ["first", "second"]}\n\n{"prompt": "third"}\n')
    prompts, licences = read_prompts([str(file)], "MIT")
    assert [(one.text, one.source, one.name) for one in prompts] == [
        ("first", "mine", "7"),
        ("third", "mine", f"{file}:3"),
    ]
    assert licences == {"mine": "MIT"}
    assert read_prompts([str(file)])[1] == {}


@pytest.mark.parametrize(
    "line",
    ['{"turns"', "[]", "3", "{}", '{"turns": []}', '{"turns": "text"}', '{"prompt": " "}', '{"prompt": 3}', "\xff"],
)  # fmt: skip
def test_a_line_without_a_prompt_is_named(tmp_path, line):
    file = tmp_path / "mine.jsonl"
    file.write_bytes(b'{"prompt": "good"}\n' + line.encode("latin-1") + b"\n")
    with pytest.raises(BastionError, match=r"mine.jsonl:2 |mine.jsonl:2: |cannot read") as error:
        read_prompts([str(file)])
    assert "\n" not in str(error.value)


def test_names_and_licences_that_mean_nothing_are_refused():
    with pytest.raises(BastionError, match=r"no prompts at nowhere: .*gsm8k_train or mbpp_train"):
        read_prompts(["nowhere"])
    with pytest.raises(BastionError, match="none is given"):
        read_prompts([], "MIT")


def fake_datasets(monkeypatch, load):
    module = ModuleType("datasets")
    module.load_dataset = load
    module.exceptions = SimpleNamespace(DatasetsError=KeyError)
    monkeypatch.setitem(sys.modules, "datasets", module)


def test_data_sets_have_the_wording_of_the_files(shared, monkeypatch):
    calls = []

    def load(repository, config, split):
        calls.append((repository, config, split))
        if config == "main":
            return [{"question": question, "answer": ""} for question in questions]
        return [{"text": text, "task_id": number} for number, text in tasks]

    fake_datasets(monkeypatch, load)
    gsm8k, _ = read_prompts([str(shared / "data" / "gsm8k_train.jsonl")])
    mbpp, _ = read_prompts([str(shared / "data" / "mbpp_train.jsonl")])
    questions = [one.text.partition("\nPlease reason")[0] for one in gsm8k[:3]]
    tasks = [(int(one.name.partition("/")[2]), one.text) for one in mbpp[:3]]
    prompts, licences = read_prompts(["gsm8k_train", "mbpp_train"])
    assert [one.text for one in prompts] == [one.text for one in gsm8k[:3] + mbpp[:3]]
    assert [one.name for one in prompts[2:4]] == ["gsm8k_train/2", f"mbpp_train/{tasks[0][0]}"]
    assert licences == {"gsm8k_train": "MIT", "mbpp_train": "CC BY 4.0"}
    assert calls == [
        ("openai/gsm8k", "main", "train"),
        ("google-research-datasets/mbpp", "full", "train+validation+prompt"),
    ]


def test_a_data_set_that_cannot_be_had_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(BastionError, match=r"pip install 'bastion\[train\]'"):
        read_prompts(["mbpp_train"])

    def load(*_, split):
        raise ConnectionError("no network\nand more")

    fake_datasets(monkeypatch, load)
    with pytest.raises(BastionError, match=r"cannot load openai/gsm8k \(no network\): give its prompts as a file"):
        read_prompts(["gsm8k_train"])


@pytest.fixture
def templated(tmp_path):
    """A stand-in for a model: a tokenizer to be given a template."""
    from transformers import AutoTokenizer

    write_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    tokenizer.add_special_tokens({"additional_special_tokens": ["[/INST]"]})
    return SimpleNamespace(tokenizer=tokenizer, end_ids=frozenset({2}), target=SimpleNamespace(name="tiny"))


@pytest.mark.parametrize(
    ("template", "opening", "ends"),
    [
        ("{{ messages[0]['content'] ~ 'x' }}", None, None),
        ("", None, None),
        ("no content", None, None),
        ("{{ raise_exception('no') }}", None, None),
        ("sys {{ messages[0]['content'] }} over", "sys ", {2}),
        ("in {{ messages[0]['content'] }}[/INST]out", "in ", {2, "[/INST]"}),
    ],
)
def test_the_opening_ends_where_the_content_begins(templated, template, opening, ends):
    templated.tokenizer.chat_template = template
    if opening is None:
        with pytest.raises(BastionError, match="chat template"):
            user_turn(templated)
        return
    found = user_turn(templated)
    assert templated.tokenizer.decode(found.ids) == opening
    to_id = templated.tokenizer.convert_tokens_to_ids
    assert found.end_ids == {to_id(end) if isinstance(end, str) else end for end in ends}


def test_a_held_back_prompt_is_known_in_another_guise():
    problem = "Write a function to sort a given matrix in ascending order according to the sum of its rows."
    for guise in (
        problem,
        problem.upper().replace(" ", "  \n") + "!",
        f"Write a solution to the following problem and make sure that it passes the tests:\n```python\n{problem}```",
        f"{problem}\nPlease reason step by step, and put your final answer within $\\boxed{{}}$.",
    ):
        assert held_out.is_held_out(guise), guise
    assert not held_out.is_held_out(problem.replace("ascending", "descending"))
    assert not held_out.is_held_out("...")


def test_the_shipped_hashes_are_those_of_the_test_sets(shared, tmp_path):
    files = [shared / "data" / f"{name}.jsonl" for name in TEST_SETS]
    assert held_out.make(files, tmp_path / "hashes") == 2641
    assert (tmp_path / "hashes").read_bytes() == held_out.HASHES.read_bytes()
    missed = [name for file in files for name, turns in read_turns(file) if not all(map(held_out.is_held_out, turns))]
    assert missed == []


def test_training_prompts_are_not_held_back_but_for_repeated_ones(shared):
    prompts, _ = read_prompts([str(shared / "data" / f"{name}.jsonl") for name in ("gsm8k_train", "mbpp_train")])
    held = {one.name: one.text for one in prompts if held_out.is_held_out(one.text)}
    assert set(held) == {"mbpp/602", "mbpp/704", "mbpp/872"}
    lines = (shared / "data" / "mbpp.jsonl").read_text().splitlines()
    assert set(held.values()) <= {json.loads(line)["turns"][0] for line in lines}  # MBPP has them twice
