"""Synthesis of training data with a tiny target."""

import json
from types import SimpleNamespace

import pytest
from filelock import FileLock

import bastion
from bastion import BastionError
from bastion.training import synthesis
from bastion.training.answers import MANIFEST, SELF_PROMPTS, SynthesisSettings
from bastion.training.data import read_conversations
from bastion.training.prompts import Prompt
from bastion.training.synthesis import SELF, synthesize
from targets.loading_support import CHAT_TEMPLATE, write_chat_llama

HELD_OUT = "Write a function to sort a given matrix in ascending order according to the sum of its rows."
PROMPTS = [Prompt(f"question {number}", "file", str(number)) for number in range(11)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_chat_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def loaded(folder):
    return bastion.load(folder, policy="plain", dtype="float32")


@pytest.fixture
def model(loaded, monkeypatch):
    """Texts end at any of many tokens, so that they have all lengths."""
    monkeypatch.setattr(loaded, "end_ids", frozenset({2, *range(3, 15)}))
    monkeypatch.setattr(synthesis, "LEAST_CHARACTERS", 2)
    return loaded


def settings(**changes):
    return SynthesisSettings(**({"max_new_tokens": 12, "greedy_share": 0.5, "batch": 4} | changes))


def lines(out):
    return sorted(line for part in sorted(out.glob("part-*.jsonl")) for line in part.read_text().splitlines())


def test_answers_are_what_the_target_writes(model, tmp_path):
    manifest = synthesize(model, PROMPTS, tmp_path, settings(greedy_share=1.0))
    found = {one.ids[: one.prompt_length]: one for one in read_conversations([tmp_path], model.target.shape.vocab)}
    assert len(found) == len(PROMPTS)
    for prompt in PROMPTS:
        one = found[tuple(model.encode(prompt.text))]
        assert list(one.answer) == model.generate(prompt.text, max_new_tokens=12).token_ids
        assert (one.source, one.temperature) == ("file", 0.0)
    assert len({len(one.answer) for one in found.values()}) > 1  # places were refilled at different times
    assert manifest.answer_tokens == sum(len(one.answer) for one in found.values())
    assert manifest.answers == {"file": {"0": 11}}
    assert json.loads((tmp_path / MANIFEST).read_text()) == manifest.model_dump(mode="json")


def test_drawn_answers_are_drawn_as_asked(model, tmp_path):
    synthesize(model, PROMPTS, tmp_path, settings(greedy_share=0.0, temperature=0.9, top_k=2))
    drawn = read_conversations([tmp_path], model.target.shape.vocab)
    assert {one.temperature for one in drawn} == {0.9}
    differ = 0
    for one in drawn:
        allowed = model.target.forward([rows(model.target, one)])[0].logits.topk(2).indices.tolist()
        assert all(token in pair for token, pair in zip(one.answer, allowed, strict=False))
        differ += any(token != pair[0] for token, pair in zip(one.answer, allowed, strict=False))
    assert differ > 0


def rows(target, one):
    import torch

    from bastion.targets.base import Rows

    return Rows(torch.tensor(one.ids), torch.arange(len(one.ids)), target.new_cache(), None, one.prompt_length - 1)


def test_results_depend_on_seed_and_prompt_alone(model, tmp_path):
    reference = None
    for batch, prompts in ((1, PROMPTS), (5, PROMPTS[::-1]), (64, PROMPTS)):
        manifest = synthesize(model, prompts, tmp_path / str(batch), settings(batch=batch, self_prompted=9))
        reference = reference or (lines(tmp_path / "1"), manifest.answers, manifest.prompts)
        assert (lines(tmp_path / str(batch)), manifest.answers, manifest.prompts) == reference
    assert set(reference[1]["file"]) == {"0", "0.7"}
    assert reference[1][SELF].total() > 3
    synthesize(model, PROMPTS, tmp_path / "other", settings(seed=1, self_prompted=9))
    assert lines(tmp_path / "other") != reference[0]


def test_prompts_that_begin_together_are_read_together(model, tmp_path, monkeypatch):
    passes, forward = [], model.target.forward

    def counted(rows):
        passes.append([len(row.tokens) for row in rows])
        return forward(rows)

    monkeypatch.setattr(model.target, "forward", counted)
    synthesize(model, PROMPTS, tmp_path, settings(batch=8))
    assert passes[0] == [len(model.encode(prompt.text)) for prompt in PROMPTS[:8]]
    assert all(size == 1 for size in passes[1])


class PowerFailureError(Exception):
    """What ends a run."""


@pytest.mark.parametrize("after", [0, 1, 6, 13])
def test_an_interrupted_run_continues(model, tmp_path, monkeypatch, after):
    monkeypatch.setattr("bastion.training.answers.SHARD", 4)
    wanted = settings(self_prompted=9)
    whole = synthesize(model, PROMPTS, tmp_path / "whole", wanted)
    parts = sorted((tmp_path / "whole").glob("part-*.jsonl"))
    assert [len(part.read_text().splitlines()) for part in parts[:-1]] == [4] * (len(parts) - 1)
    out = tmp_path / "parts"

    def stop(state):
        if state.answers >= after:
            raise PowerFailureError

    with pytest.raises(PowerFailureError):
        synthesize(model, PROMPTS, out, wanted, progress=stop)
    stored = lines(out)
    assert after <= len(stored) < len(lines(tmp_path / "whole"))
    last = max(out.glob("part-*.jsonl"), default=out / "part-00000.jsonl")
    for file, half in ((last, '{"ids":[1,2'), (out / SELF_PROMPTS, '{"index":1')):
        with file.open("a") as opened:
            opened.write(half)
    again = synthesize(model, PROMPTS, out, wanted)
    assert lines(out) == lines(tmp_path / "whole")
    assert set(stored) <= set(lines(out))
    assert again == whole
    before = {file: file.stat().st_mtime_ns for file in out.glob("part-*")}
    more = synthesize(model, PROMPTS, out, wanted)  # nothing is left to do
    assert more == whole
    assert {file: file.stat().st_mtime_ns for file in out.glob("part-*")} == before


def test_prompts_may_be_added_and_none_is_answered_twice(model, tmp_path):
    synthesize(model, PROMPTS[:5], tmp_path, settings(), {"file": "MIT"})
    other = [Prompt(one.text, "other", one.name) for one in PROMPTS[4:7]]
    manifest = synthesize(model, [*PROMPTS[:2], *other, *other], tmp_path, settings(batch=2))
    assert manifest.answers["file"].total() == 5
    assert manifest.answers["other"].total() == 2
    assert manifest.prompts["other"] == {"given": 6, "duplicate": 4}
    assert manifest.licences == {"file": "MIT"}
    assert len(lines(tmp_path)) == 7
    manifest = synthesize(model, [], tmp_path, settings(self_prompted=2))
    manifest = synthesize(model, [], tmp_path, settings(self_prompted=6))
    assert manifest.prompts[SELF]["given"] == 6
    assert manifest.prompts["file"] == {"given": 2}  # of the last run that had it


def test_what_becomes_of_self_prompts(model, tmp_path, monkeypatch):
    monkeypatch.setattr(synthesis, "LEAST_CHARACTERS", 8)
    synthesize(model, PROMPTS[:1], tmp_path, settings())
    texts = ["Tell me a story", "Tell me a story", "1234567", "", PROMPTS[0].text, HELD_OUT, "12345678"]
    written = [{"index": i, "text": text, "finished": True} for i, text in enumerate(texts)]
    written.append({"index": 7, "text": "a long text without an end", "finished": False})
    (tmp_path / SELF_PROMPTS).write_text("".join(json.dumps(one) + "\n" for one in written))
    manifest = synthesize(model, [], tmp_path, settings(self_prompted=8))
    assert manifest.prompts[SELF] == {"given": 8, "duplicate": 2, "short": 2, "unfinished": 1, "refused": 1}
    found = {one.ids[: one.prompt_length] for one in read_conversations([tmp_path], 260) if one.source == SELF}
    assert found == {tuple(model.encode(text)) for text in ("Tell me a story", "12345678")}
    (tmp_path / SELF_PROMPTS).write_text("{}\n")
    with pytest.raises(BastionError, match="damaged"):
        synthesize(model, [], tmp_path, settings(self_prompted=8))


def test_self_prompts_follow_the_opening_and_may_be_cut_off(model, tmp_path, monkeypatch):
    monkeypatch.setattr(model, "end_ids", frozenset({2}))
    monkeypatch.setattr(synthesis, "SELF_PROMPT_TOKENS", 5)
    manifest = synthesize(model, [], tmp_path, settings(self_prompted=4, seed=3))
    written = [json.loads(line) for line in (tmp_path / SELF_PROMPTS).read_text().splitlines()]
    assert sorted(one["index"] for one in written) == [0, 1, 2, 3]
    assert manifest.prompts[SELF]["unfinished"] == sum(not one["finished"] for one in written) > 0
    seed = synthesis._draw(3, f"{SELF}/0".encode())[1]
    plain = model.generate("user: ", raw=True, max_new_tokens=5, temperature=1.0, top_k=64, seed=seed)
    assert next(one["text"] for one in written if one["index"] == 0) == plain.text.strip()


def test_test_prompts_are_refused(model, tmp_path, capsys):
    held = [Prompt(HELD_OUT.upper(), "file", f"name {number}") for number in range(5)]
    manifest = synthesize(model, [*held, *PROMPTS[:2]], tmp_path, settings())
    assert manifest.prompts["file"] == {"given": 7, "refused": 5}
    assert len(lines(tmp_path)) == 2
    warning = capsys.readouterr().err
    assert "5 of 7 prompts occur in public test sets" in warning
    assert "name 0, name 1, name 2, ..." in warning
    with pytest.raises(BastionError, match="no prompt can be used: 5 occur"):
        synthesize(model, held, tmp_path / "new", settings(self_prompted=3))


def test_prompts_that_leave_no_room_are_dropped(model, tmp_path, monkeypatch):
    fitting, long = Prompt("a" * 20, "file", "fits"), Prompt("a" * 21, "file", "long")
    monkeypatch.setattr(model.target, "max_context", len(model.encode(fitting.text)) + 12)
    manifest = synthesize(model, [fitting, long], tmp_path, settings())
    assert manifest.prompts["file"] == {"given": 2, "too long": 1}
    with pytest.raises(BastionError, match="1 leave no room"):
        synthesize(model, [long], tmp_path / "new", settings())
    with pytest.raises(BastionError, match="nothing to answer"):
        synthesize(model, [], tmp_path / "new", settings())


@pytest.mark.parametrize("batch", [1, 3, 64])
def test_max_answers_is_the_beginning_of_an_even_mixture(model, tmp_path, batch):
    prompts = [*PROMPTS[:9], *(Prompt(f"other {number}", "other", str(number)) for number in range(3))]
    manifest = synthesize(model, prompts, tmp_path, settings(batch=batch, max_answers=4))
    assert {source: counts.total() for source, counts in manifest.answers.items()} == {"file": 3, "other": 1}
    prompted = {one.ids[: one.prompt_length] for one in read_conversations([tmp_path], 260)}
    assert prompted == {tuple(model.encode(text)) for text in ("question 0", "question 1", "question 2", "other 0")}
    manifest = synthesize(model, prompts, tmp_path, settings(batch=batch, max_answers=8))
    assert {source: counts.total() for source, counts in manifest.answers.items()} == {"file": 6, "other": 2}


def test_max_answers_counts_no_dropped_self_prompts(model, tmp_path):
    one = synthesize(model, [], tmp_path / "1", settings(batch=1, self_prompted=40, max_answers=7))
    assert one.answers[SELF].total() == 7
    assert one.prompts[SELF]["given"] > 7
    synthesize(model, [], tmp_path / "9", settings(batch=9, self_prompted=40, max_answers=7))
    assert lines(tmp_path / "9") == lines(tmp_path / "1")


def test_after_the_time_budget_nothing_is_begun(model, tmp_path, monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(synthesis, "time", SimpleNamespace(monotonic=lambda: clock.now))
    states = []

    def tick(state):
        clock.now = 61.0
        states.append(state)

    manifest = synthesize(model, PROMPTS, tmp_path, settings(time_budget=60.0), progress=tick)
    assert manifest.answers["file"].total() == 4  # those begun at once
    assert states[-1].answers == 4
    assert states[-1].new_tokens == manifest.answer_tokens
    assert len(states) > 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 5}, "seed 0 != 5"),
        ({"max_new_tokens": 13}, "max_new_tokens 12 != 13"),
        ({"greedy_share": 0.4, "top_k": 3}, "greedy_share 0.5 != 0.4, top_k 64 != 3"),
    ],
)
def test_other_settings_are_refused(model, tmp_path, change, message):
    synthesize(model, PROMPTS[:2], tmp_path, settings())
    before = lines(tmp_path)
    with pytest.raises(BastionError, match=message):
        synthesize(model, PROMPTS, tmp_path, settings(**change))
    assert lines(tmp_path) == before


def test_another_target_or_template_is_refused(model, tmp_path, monkeypatch):
    synthesize(model, PROMPTS[:2], tmp_path, settings())
    with monkeypatch.context() as patch:
        patch.setattr(model.target, "digest", "other")
        with pytest.raises(BastionError, match=r"target_digest .* != other"):
            synthesize(model, PROMPTS, tmp_path, settings())
    monkeypatch.setattr(model.tokenizer, "chat_template", CHAT_TEMPLATE + " ")
    with pytest.raises(BastionError, match="chat template"):
        synthesize(model, PROMPTS, tmp_path, settings())


def test_folders_that_cannot_be_used_are_refused(model, tmp_path):
    out = tmp_path / "out"
    synthesize(model, PROMPTS[:2], out, settings())
    with FileLock(out / ".lock"), pytest.raises(BastionError, match="another process"):
        synthesize(model, PROMPTS, out, settings())
    (out / MANIFEST).write_text("{}")
    with pytest.raises(BastionError, match="no manifest"):
        synthesize(model, PROMPTS, out, settings())
    (out / MANIFEST).unlink()
    with pytest.raises(BastionError, match=f"without a {MANIFEST}"):
        synthesize(model, PROMPTS, out, settings())
    (tmp_path / "file").write_text("")
    with pytest.raises(BastionError, match="cannot write to"):
        synthesize(model, PROMPTS, tmp_path / "file", settings())


@pytest.mark.parametrize(
    "bad",
    [
        {"greedy_share": 1.1}, {"greedy_share": float("nan")}, {"temperature": 0.0}, {"top_k": -1}, {"batch": 0},
        {"max_new_tokens": 0}, {"self_prompted": -1}, {"max_answers": 0}, {"time_budget": 0.0}, {"seed": 2**64},
    ],
)  # fmt: skip
def test_settings_out_of_range_are_refused(bad):
    with pytest.raises(BastionError, match=next(iter(bad))):
        SynthesisSettings(**bad)


def test_command(folder, tmp_path, run_command):
    file = tmp_path / "mine.jsonl"
    file.write_text("".join(json.dumps({"prompt": one.text}) + "\n" for one in PROMPTS[:3]))
    common = ("--target", folder, "--dtype", "float32", "--out", tmp_path / "out", "--prompts", file)
    options = ("--max-new-tokens", 9, "--licence", "CC0", "--batch", 2, "--time-budget", 5, "--greedy-share", 1)
    status, out, error = run_command("synthesize", *common, *options, "--self-prompted", 1)
    assert (status, error) == (0, "")
    assert "mine: 3 answers at temperature 0" in out
    manifest = json.loads((tmp_path / "out" / MANIFEST).read_text())
    assert manifest["licences"] == {"mine": "CC0", SELF: "written by the target"}
    assert (manifest["dtype"], manifest["settings"]["time_budget"]) == ("float32", 300.0)
    status, out, error = run_command("synthesize", *common, *options, "--top-k", 3)
    assert (status, out) == (2, "")
    assert error.count("\n") == 1
    assert "top_k 64 != 3" in error
    status, _, error = run_command("synthesize", "--out", tmp_path / "x", "--prompts", "nowhere")
    assert status == 2
    assert error.startswith("bastion: no prompts at nowhere")
