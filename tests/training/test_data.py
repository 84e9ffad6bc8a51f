"""Conversations on disk, and the features that are computed for them once."""

import gzip
import json
from dataclasses import replace

import pytest
import torch
from filelock import FileLock

from bastion.errors import BastionError
from bastion.targets.base import Rows
from bastion.training.data import Conversation, cut, data_files, read_conversations
from bastion.training.features import RANKED, compute_features
from tiny import make_target

ONE = Conversation((5, 6, 7, 8), 2, "a", 0.0)
TWO = Conversation((5, 6, 9), 2, "b", 0.7)
LAYERS = (0, 2)


def test_conversations_are_read_from_files_and_folders_once_each(tmp_path):
    (tmp_path / "part-0.jsonl").write_text(ONE.line() + TWO.line())
    with gzip.open(tmp_path / "more.jsonl.gz", "wt") as file:
        file.write(TWO.line() + json.dumps({"ids": [1, 2], "prompt_length": 1}) + "\n")
    (tmp_path / "manifest.json").write_text("{}")
    found = read_conversations([tmp_path / "part-0.jsonl", tmp_path], 96)
    assert found == [ONE, TWO, Conversation((1, 2), 1, "", 0.0)]
    assert found[0].answer == (7, 8)
    assert len(data_files([tmp_path])) == 2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", ":1 is no conversation"),
        ("[]", ":1 is no conversation"),
        ("[" * 100_000, ":1 is no conversation"),
        ('{"ids": [1, "x"], "prompt_length": 1}', "list of whole numbers"),
        ('{"ids": [1, 2], "prompt_length": 0}', "prompt_length must be"),
        ('{"ids": [1, 2], "prompt_length": 3}', "prompt_length must be"),
        ('{"ids": [[1, 2]], "prompt_length": 1}', "list of whole numbers"),
        ('{"ids": 5, "prompt_length": 1}', "list of whole numbers"),
        ('{"ids": [1.7, 2.2], "prompt_length": 1}', "list of whole numbers"),
        ('{"ids": [1, 96], "prompt_length": 1}', "vocabulary of 96"),
        ('{"ids": [1, -1], "prompt_length": 1}', "vocabulary of 96"),
    ],
)
def test_what_is_no_conversation_is_named(tmp_path, line, message):
    (tmp_path / "data.jsonl").write_text(line + "\n")
    with pytest.raises(BastionError, match=message):
        read_conversations([tmp_path / "data.jsonl"], 96)


def test_missing_empty_and_damaged_files_are_named(tmp_path):
    with pytest.raises(BastionError, match="no data at"):
        read_conversations([tmp_path], 96)
    (tmp_path / "data.jsonl").write_text("")
    with pytest.raises(BastionError, match="no conversations in"):
        read_conversations([tmp_path], 96)
    (tmp_path / "data.jsonl.gz").write_bytes(gzip.compress(ONE.line().encode())[:-9])
    with pytest.raises(BastionError, match="cannot read"):
        read_conversations([tmp_path], 96)


def test_a_line_that_is_still_being_written_is_left_out(tmp_path):
    (tmp_path / "data.jsonl").write_text(ONE.line() + TWO.line()[:20])
    assert read_conversations([tmp_path], 96) == [ONE]
    (tmp_path / "data.jsonl").write_text(TWO.line()[:20] + "\n" + ONE.line())
    with pytest.raises(BastionError, match="no conversation"):
        read_conversations([tmp_path], 96)


def test_cutting_keeps_what_has_an_answer():
    three = Conversation((1, 2, 3, 4), 3, "", 0.0)
    assert cut([ONE, TWO, three], 9) == [ONE]
    assert cut([replace(ONE, prompt_length=1), ONE], 3) == [Conversation((5, 6, 7), 1, "a", 0.0)]
    with pytest.raises(BastionError, match="within 2 tokens"):
        cut([ONE], 2)


@pytest.fixture(scope="module")
def target():
    torch.manual_seed(0)
    return make_target()


@pytest.fixture(scope="module")
def texts():
    return [
        Conversation(tuple(torch.randint(2, 96, (length,)).tolist()), 3, "", 0.0) for length in (9, 400, 700, 5, 30)
    ]


def test_features_are_what_the_target_gives_each_text_alone(target, texts, tmp_path):
    found = compute_features(target, texts, LAYERS, tmp_path, ranked=True)
    target.set_feature_layers(LAYERS)
    for index, text in enumerate(texts):
        tokens = torch.tensor(text.ids)
        (alone,) = target.forward([Rows(tokens, torch.arange(len(tokens)), target.new_cache(), None, 3)])
        torch.testing.assert_close(found.of(index).float(), alone.features, rtol=1e-2, atol=1e-2)
        ids, logits = found.ranked(index)
        assert (ids[:3] == 0).all()
        expected, order = alone.logits.topk(RANKED, -1)
        torch.testing.assert_close(logits[3:], expected, rtol=1e-4, atol=1e-4)
        assert torch.equal(ids[3:, 0].long(), order[:, 0])


def test_an_interrupted_computation_continues(target, texts, tmp_path):
    whole = compute_features(target, texts, LAYERS, tmp_path / "whole")

    def interrupt(share):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compute_features(target, texts, LAYERS, tmp_path / "parts", progress=interrupt)
    part = tmp_path / "parts" / "features.bin"
    part.write_bytes(part.read_bytes() + b"half a row")
    shares = []
    again = compute_features(target, texts, LAYERS, tmp_path / "parts", progress=shares.append)
    assert shares
    assert min(shares) > 0.4  # what was there was not computed again
    for index in range(len(texts)):
        assert torch.equal(again.of(index), whole.of(index))
    with pytest.raises(ValueError, match="not kept"):
        again.ranked(0)


def test_added_conversations_are_computed_behind_the_others(target, texts, tmp_path):
    whole = compute_features(target, texts, LAYERS, tmp_path / "whole")
    compute_features(target, texts[:2], LAYERS, tmp_path / "added")
    shares = []
    added = compute_features(target, texts, LAYERS, tmp_path / "added", progress=shares.append)
    assert len(shares) == 1  # one pass for the three that are new
    for index in range(len(texts)):
        torch.testing.assert_close(added.of(index), whole.of(index), rtol=1e-2, atol=1e-2)
    with pytest.raises(BastionError, match="differ in data"):
        compute_features(target, [texts[1], texts[0], *texts[2:]], LAYERS, tmp_path / "added")


def test_files_that_are_gone_are_computed_again_and_two_writers_are_refused(target, texts, tmp_path):
    first = compute_features(target, texts, LAYERS, tmp_path).of(1).clone()
    (tmp_path / "features.json").write_text('{"key": 5}')
    with pytest.raises(BastionError, match="is damaged: delete"):
        compute_features(target, texts, LAYERS, tmp_path)
    (tmp_path / "features.json").unlink()
    (tmp_path / "features.bin").unlink()
    assert torch.equal(compute_features(target, texts, LAYERS, tmp_path).of(1), first)
    with FileLock(tmp_path / ".lock"), pytest.raises(BastionError, match="by another process"):
        compute_features(target, texts, LAYERS, tmp_path)


def test_features_of_something_else_or_too_many_are_refused(target, texts, tmp_path):
    compute_features(target, texts, LAYERS, tmp_path)
    for other in ((texts[:2], LAYERS, False), (texts, (1,), False), (texts, LAYERS, True)):
        with pytest.raises(BastionError, match=r"differ in (data|layers|ranked)"):
            compute_features(target, other[0], other[1], tmp_path, other[2])
    with pytest.raises(BastionError, match=r"1,144 tokens take 0\.0 GB, above"):
        compute_features(target, texts, LAYERS, tmp_path / "new", budget=1000)
    assert not (tmp_path / "new").exists()


def test_features_with_the_distribution_serve_a_run_without(target, texts, tmp_path):
    compute_features(target, texts, LAYERS, tmp_path, ranked=True)
    shares = []
    plain = compute_features(target, texts, LAYERS, tmp_path, progress=shares.append)
    assert not shares
    assert plain.of(0).shape == (9, 2 * target.shape.hidden)
    assert compute_features(target, texts, LAYERS, tmp_path, ranked=True, progress=shares.append).ranked(0)
    assert not shares
    compute_features(target, [*texts, texts[0]], LAYERS, tmp_path)  # the run without adds a text
    found = compute_features(target, [*texts, texts[0]], LAYERS, tmp_path, ranked=True)
    for first, last in zip(found.ranked(0), found.ranked(len(texts)), strict=True):
        torch.testing.assert_close(first, last, rtol=1e-4, atol=1e-4)


def test_the_scale_is_the_typical_size_of_each_channel(target, texts, tmp_path):
    found = compute_features(target, texts, LAYERS, tmp_path)
    whole = torch.cat([found.of(i) for i in range(len(texts))]).float()
    torch.testing.assert_close(found.scale(), whole.abs().median(0).values)
