"""Draft temperatures: fitted, stored, applied, and not written when they do not help."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_evaluation import MarkovDrafter, markov, random_dflash
from typer.testing import CliRunner

from bastion.cli import app
from bastion.decoding.budget import FixedBudget, Plain
from bastion.decoding.loop import decode
from bastion.drafters.base import DraftContext
from bastion.drafters.dflash import DFlashConfig, DFlashDrafter, DFlashModel, save_model
from bastion.drafters.marginal import MarginalProposal
from bastion.drafters.ngram.drafter import NgramDrafter
from bastion.errors import BastionError
from bastion.training.confidence import Calibrated, calibrate_confidence, fit_temperatures, write_temperatures
from bastion.training.data import Conversation
from bastion.training.evaluation import evaluate
from bastion.training.simulation import simulate
from tiny import FixedDrafter, TableTarget, generation, make_target

TRUE = np.array([0.5, 0.25, 0.1, 0.07, 0.05, 0.03])
NOWHERE = TableTarget(torch.zeros(6, 6))


def independent(texts=40, length=60):
    """Texts whose tokens are drawn independently, so that products of marginals are right."""
    random = np.random.default_rng(9)
    return [Conversation((0, *random.choice(6, length, p=TRUE).tolist()), 1, "", 0.0) for _ in range(texts)]


def sharpened(factors):
    return torch.stack([(factor * torch.from_numpy(TRUE).float().log()).log_softmax(-1) for factor in factors])


def test_the_fit_finds_how_overconfident_each_depth_is():
    factors = [3.0, 1.0, 0.5]
    conversations = independent()
    fit = fit_temperatures(
        simulate(NOWHERE, FixedDrafter(sharpened(factors)), FixedBudget(12), conversations, None), len(factors)
    )
    assert fit.temperatures == pytest.approx(factors, rel=0.1)
    assert fit.tokens[0] > fit.tokens[1] > fit.tokens[2] > 0
    assert fit.outside == 0
    mended = FixedDrafter((sharpened(factors) / torch.tensor(fit.temperatures)[:, None]).log_softmax(-1))
    errors = [
        evaluate(NOWHERE, drafter, conversations, None, (12,)).reliability.error
        for drafter in (FixedDrafter(sharpened(factors)), mended)
    ]
    assert errors[1] < 0.01 < errors[0]


class ReducedDrafter(FixedDrafter):
    """Drafts tokens 3, 1 and 0 alone."""

    def propose(self, contexts):
        return [MarginalProposal(self.log_probs, torch.tensor([3, 1, 0])) for _ in contexts]


def test_tokens_outside_the_draft_vocabulary_are_skipped():
    inside = torch.from_numpy(TRUE[[3, 1, 0]]).float().log()
    drafter = ReducedDrafter((2.0 * inside).log_softmax(-1)[None])
    conversations = independent()
    fit = fit_temperatures(simulate(NOWHERE, drafter, FixedBudget(3), conversations, None), 1)
    assert fit.temperatures == pytest.approx([2.0], rel=0.1)
    assert fit.outside / (fit.outside + fit.tokens[0]) == pytest.approx(TRUE[[2, 4, 5]].sum(), abs=0.03)


def test_a_depth_that_is_hardly_reached_takes_the_temperature_before():
    factors = [2.0, 2.0, 2.0]
    conversations = independent(2, 50)
    fit = fit_temperatures(simulate(NOWHERE, FixedDrafter(sharpened(factors)), FixedBudget(1), conversations, None), 3)
    assert fit.tokens[0] >= 30 > fit.tokens[2]  # a tree of one node shows no third token
    assert fit.temperatures[2] == fit.temperatures[1]
    with pytest.raises(BastionError, match="too few"):
        fit_temperatures(
            simulate(NOWHERE, FixedDrafter(sharpened(factors)), FixedBudget(1), conversations[:0], None), 3
        )


def test_a_drafter_without_marginals_is_refused():
    transitions, conversations = markov(texts=1)
    with pytest.raises(BastionError, match="DFlash"):
        fit_temperatures(simulate(NOWHERE, MarkovDrafter(transitions), FixedBudget(4), conversations, None), 4)


@pytest.fixture(scope="module")
def target():
    torch.manual_seed(3)
    return make_target()


@pytest.fixture
def drafter(target):
    """Random, and much too sure of its guesses."""
    return random_dflash(target)


@pytest.fixture(scope="module")
def conversations(target):
    texts = [generation(target, [place, 5], 30) for place in range(4, 10)]
    for _ in decode(target, None, Plain(), texts):
        pass
    return [Conversation((*one.draft.tokens,), 2, "", 0.0) for one in texts]


def context(target, temperature):
    features = torch.randn(2, 2 * target.shape.hidden, generator=torch.Generator().manual_seed(1))
    return DraftContext([5, 6, 7], temperature, [features])


def test_draft_temperatures_apply_at_temperature_0_alone(target, drafter):
    (plain,) = drafter.propose([context(target, 0.0)])
    temperatures = [1.0, 2.0, 0.5, 4.0, 1.5]
    raw = drafter.model.config.raw
    raw = raw | {"dflash_config": raw["dflash_config"] | {"draft_temperatures": temperatures}}
    model = DFlashModel(DFlashConfig.from_dict(raw)).eval().requires_grad_(False)
    model.load_state_dict(drafter.model.state_dict())
    stored = DFlashDrafter(model, target)
    assert stored.digest != drafter.digest
    expected = (plain.log_probs / torch.tensor(temperatures)[:, None]).log_softmax(-1)
    for one in (stored, drafter.with_draft_temperatures(temperatures)):
        assert one.draft_temperatures == tuple(temperatures)
        torch.testing.assert_close(one.propose([context(target, 0.0)])[0].log_probs, expected)
        warm, same = (d.propose([context(target, 0.7)])[0].log_probs for d in (one, drafter))
        assert torch.equal(warm, same)
    assert drafter.draft_temperatures == (1.0,) * 5
    assert drafter.with_draft_temperatures(temperatures).digest == drafter.digest


@pytest.mark.parametrize(
    "value", [[1.0] * 4, [1.0] * 6, 2.0, [1, 1, 1, 1, 0], [1, 1, 1, 1, "1"], [1, 1, 1, 1, True], None]
)
def test_unusable_draft_temperatures_are_refused(drafter, value):
    raw = drafter.model.config.raw
    raw = raw | {"dflash_config": raw["dflash_config"] | {"draft_temperatures": value}}
    with pytest.raises(BastionError, match="draft_temperatures"):
        DFlashConfig.from_dict(raw)


def test_written_temperatures_are_read_again_and_nothing_else_changes(drafter, tmp_path):
    save_model(drafter.model, tmp_path)
    before = json.loads((tmp_path / "config.json").read_text())
    write_temperatures(tmp_path, (1.0, 1.5, 2, 2.5, 3))
    after = json.loads((tmp_path / "config.json").read_text())
    assert DFlashConfig.read(tmp_path).draft_temperatures == (1.0, 1.5, 2.0, 2.5, 3.0)
    del after["dflash_config"]["draft_temperatures"]
    assert after == before
    with pytest.raises(BastionError, match="draft_temperatures"):
        write_temperatures(tmp_path, (1.0, 1.5))
    assert DFlashConfig.read(tmp_path).draft_temperatures == (1.0, 1.5, 2.0, 2.5, 3.0)


class TemperedDrafter(FixedDrafter):
    """A FixedDrafter with the draft temperatures of a DFlash drafter."""

    draft_temperatures = (1.0, 1.0)

    def with_draft_temperatures(self, temperatures):
        other = TemperedDrafter(self.log_probs)
        other.draft_temperatures = tuple(temperatures)
        return other

    def propose(self, contexts):
        tempered = (self.log_probs / torch.tensor(self.draft_temperatures)[:, None]).log_softmax(-1)
        return [MarginalProposal(tempered) for _ in contexts]


def test_fitted_temperatures_build_on_those_there_are():
    drafter, conversations = TemperedDrafter(sharpened([3.0, 0.5])), independent()
    first = calibrate_confidence(NOWHERE, drafter, conversations, None, (12,))
    assert first.better
    assert first.before.conversations == first.after.conversations == 20
    assert first.temperatures == pytest.approx([3.0, 0.5], rel=0.15)
    again = calibrate_confidence(NOWHERE, drafter.with_draft_temperatures([2.0, 2.0]), conversations, None, (12,))
    assert again.temperatures == pytest.approx([3.0, 0.5], rel=0.15)
    assert again.fit.temperatures == pytest.approx([1.5, 0.25], rel=0.15)
    with pytest.raises(BastionError, match="more than one"):
        calibrate_confidence(NOWHERE, drafter, conversations[:1], None)


@pytest.fixture
def command(target, drafter, conversations, tmp_path, monkeypatch):
    """Runs evaluate-drafter on the tiny models; its drafter lies in tmp_path/drafter."""
    monkeypatch.setenv("BASTION_CACHE", str(tmp_path / "cache"))
    save_model(drafter.model, tmp_path / "drafter")
    (tmp_path / "data.jsonl").write_text("".join(one.line() for one in conversations))

    def load(target_name, name, *settings):
        guesses = NgramDrafter() if name == "ngram" else DFlashDrafter.load(name, target)
        return SimpleNamespace(target=target, drafter=guesses)

    monkeypatch.setattr("bastion.cli.options.load", load)

    def run(*arguments, drafter=tmp_path / "drafter"):
        common = ["evaluate-drafter", "--data", str(tmp_path / "data.jsonl"), "--trees", "8"]
        return CliRunner().invoke(app, [*common, "--drafter", str(drafter), *map(str, arguments)])

    return run


def refused(result):
    assert isinstance(result.exception, BastionError), result
    return str(result.exception)


def test_the_command_measures_fits_and_writes(command, tmp_path):
    pytest.importorskip("matplotlib")
    config = tmp_path / "drafter" / "config.json"
    before, out = config.read_text(), tmp_path / "out"
    result = command("--out", out)
    assert result.exit_code == 0, result
    assert "not been calibrated" in result.output
    record = json.loads((out / "evaluation.json").read_text())
    assert record["evaluations"]["measured"]["conversations"] == 6
    assert (out / "evaluation.png").is_file()

    result = command("--fit-confidence", "--out", out, "--max-samples", 4)
    assert result.exit_code == 0, result
    record = json.loads((out / "evaluation.json").read_text())
    assert [one["conversations"] for one in record["evaluations"].values()] == [2, 2]
    assert record["left_out"] == {"not sampled": 2}
    assert config.read_text() == before

    result = command("--fit-confidence", "--write")
    assert result.exit_code == 0, result
    assert DFlashConfig.read(tmp_path / "drafter").draft_temperatures[0] > 1.5


def test_the_command_does_not_write_what_does_not_help(command, tmp_path, monkeypatch):
    monkeypatch.setattr(Calibrated, "better", property(lambda self: False))
    before = (tmp_path / "drafter" / "config.json").read_text()
    result = command("--fit-confidence", "--write")
    assert "not written" in refused(result)
    assert "do not lower" in result.output
    assert (tmp_path / "drafter" / "config.json").read_text() == before


def test_the_command_refuses_what_it_cannot_honour(command, tmp_path):
    assert "DFlash" in refused(command("--fit-confidence", drafter="ngram"))
    assert "--features" in refused(command("--features", tmp_path / "features", drafter="ngram"))
    assert "--fit-confidence" in refused(command("--write"))
    assert "own folder" in refused(command("--write", "--fit-confidence", drafter="owner/name"))
    assert "--max-samples" in refused(command("--max-samples", 0))
    for trees in ("", "8,", "0", "a", "8,-1", "99999"):
        assert "--trees" in refused(command("--trees", trees))
