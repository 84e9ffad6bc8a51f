"""The training loop: it learns, it resumes, it ends, it says what is wrong."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bastion.drafters.dflash import DFlashDrafter
from bastion.errors import BastionError
from bastion.training.data import Conversation
from bastion.training.trainer import STATE, TrainerSettings, read_log, split
from training_support import make_trainer


def test_a_drafter_learns_what_an_untrained_one_does_not_know(toy, tmp_path: Path) -> None:
    learner = make_trainer(toy, tmp_path, 120)
    before = learner.evaluate().summary()
    learner.train()
    after = read_log(tmp_path)[-1]["held_back"]
    assert before["accepted_length"] < 1.3
    assert after["accepted_length"] > 2.5
    assert after["loss"] < before["loss"] / 2
    exported = DFlashDrafter.load(tmp_path, toy[0])
    assert exported.depth == 3
    assert exported.model.config.draft_vocab == 20


@pytest.mark.parametrize("settings", [{"loss": "dpace"}, {"distill": 0.5}])
def test_the_other_losses_train_too(toy, tmp_path: Path, settings: dict) -> None:
    learner = make_trainer(toy, tmp_path, 30, draft_vocab=None, **settings)
    before = learner.evaluate().summary()["loss"]
    learner.train()
    assert learner.evaluate().summary()["loss"] < before


def test_a_resumed_run_ends_with_the_same_weights_and_log(toy, tmp_path: Path) -> None:
    whole = make_trainer(toy, tmp_path / "whole", 25)
    whole.train()

    class KilledError(Exception):
        pass

    def kill(state) -> None:
        if killed.step == 17:
            raise KilledError

    killed = make_trainer(toy, tmp_path / "killed", 25)
    with pytest.raises(KilledError):
        killed.train(kill)
    log = tmp_path / "killed" / "log.jsonl"
    log.write_text(log.read_text() + '{"step": 15, "lo')  # and its log half written
    torch.rand(100)
    again = make_trainer(toy, tmp_path / "killed", 25, seed=0)
    again.resume()
    assert again.step == 10
    again.train()
    for name, tensor in whole.recipe.model.state_dict().items():
        assert torch.equal(tensor, again.recipe.model.state_dict()[name]), name
    logs = [
        [{k: v for k, v in line.items() if k != "seconds"} for line in read_log(tmp_path / run)]
        for run in ("whole", "killed")
    ]
    assert logs[0] == logs[1]
    assert [line["step"] for line in logs[0]] == [10, 20, 25]


def test_what_a_killed_run_left_of_its_log_does_not_spoil_the_next(toy, tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text('{"step": 10}\n{"step": 20, "tr')
    make_trainer(toy, tmp_path, 10).train()
    assert [line["step"] for line in read_log(tmp_path)] == [10]
    assert "train" in read_log(tmp_path)[0]


def test_a_time_budget_ends_the_run_and_its_schedule(toy, tmp_path: Path) -> None:
    learner = make_trainer(toy, tmp_path, 10**6)
    learner.settings = replace(learner.settings, time_budget=0.2)
    learner.train()
    assert learner.done == 1
    assert read_log(tmp_path)[-1]["learning_rate"] < 1e-6


@pytest.mark.parametrize(
    "changes",
    [
        {"max_steps": 0},
        {"max_steps": None},
        {"time_budget": 0.0},
        {"time_budget": math.nan},
        {"time_budget": math.inf},
        {"learning_rate": math.nan},
        {"held_back": 1.0},
        {"seed": 2**80},
        {"batch": 0},
        {"warmup": 1.0},
    ],
)
def test_settings_that_make_no_sense_are_refused(changes: dict) -> None:
    with pytest.raises(BastionError):
        TrainerSettings(**({"max_steps": 5} | changes))


def test_held_back_prompts_stay_so_when_data_is_added() -> None:
    first = [Conversation((number, 5, 6, 7), 2, "", 0.0) for number in range(300)]
    more = [Conversation((number, 5, 9, 9, answer), 2, "", 0.7) for number in range(900) for answer in (1, 2)]
    held, trained = ({(first + more)[i].ids[:2] for i in side} for side in split(first + more, 0.1))
    assert not held & trained
    before, _ = split(first, 0.1)
    assert before
    assert {first[i].ids[:2] for i in before} == {ids for ids in held if ids[0] < 300}
    for share in (1e-9, 1 - 1e-9):
        with pytest.raises(BastionError, match="make more of them"):
            split(first, share)


def test_a_checkpoint_of_another_run_is_refused(toy, tmp_path: Path) -> None:
    with pytest.raises(BastionError, match="no checkpoint"):
        make_trainer(toy, tmp_path, 10).resume()
    make_trainer(toy, tmp_path, 10).train()
    with pytest.raises(BastionError, match="other settings \\(seed\\)"):
        make_trainer(toy, tmp_path, 10, seed=1).resume()
    for other in ({"draft_vocab": 19}, {"loss": "dpace"}, {"distill": 0.5}, {"anchors": 7}):
        with pytest.raises(BastionError, match="other settings"):
            make_trainer(toy, tmp_path, 10, **other).resume()
    for content in (b"half", b"", b"{}"):
        (tmp_path / STATE).write_bytes(content)
        with pytest.raises(BastionError, match="cannot be read"):
            make_trainer(toy, tmp_path, 10).resume()
