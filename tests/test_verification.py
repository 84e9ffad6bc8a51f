"""`bastion verify`: what is identical, what rounding explains, and what is wrong."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import bastion
from bastion.broken_acceptance import broken_acceptance
from bastion.decoding import loop
from bastion.decoding.budget import BudgetPolicy, Plain
from bastion.decoding.sampling import Sampler, SamplingParameters, distribution
from bastion.decoding.tree import DraftTree
from bastion.rescoring import ROUNDING, Referee, reach, replay, transform
from bastion.verification import verify
from targets.loading_support import VOCAB, write_chat_llama
from tiny import FixedDrafter, TableTarget, generation, make_target

PROMPTS = [("copy", "abc abc abc abc"), ("count", "one two one two one two"), ("short", "x")]
GREEDY = SamplingParameters()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_chat_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture
def model(folder):
    """A tiny Llama, with a drafter whose first guesses are often wrong and sometimes right."""
    loaded = bastion.load(folder, policy="fixed:12", dtype="float32")
    loaded.drafter = FixedDrafter((torch.randn(4, loaded.target.shape.vocab) * 2).log_softmax(-1))
    return loaded


@pytest.fixture
def files(folder, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"id": name, "prompt": text}) + "\n" for name, text in PROMPTS))
    return ["--target", folder, "--dtype", "float32", "--prompts", path, "--max-new-tokens", 12]


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "top_p": 0.9}, {"temperature": 0.7, "top_k": 20}])
@pytest.mark.parametrize("policy", ["chain", "fixed:12"])
def test_texts_are_identical_and_have_the_targets_distribution(model, policy, sampling):
    model.set_policy(policy)
    shares = []
    found = verify(model, PROMPTS, max_new_tokens=12, draws=24, progress=shares.append, **sampling)
    assert found.passed
    assert found.count("identical") == len(PROMPTS)
    assert found.nodes > found.rounds
    assert shares == sorted(shares)
    assert shares[-1] == 1
    if sampling:
        assert found.distribution.draws == 24
        assert found.distribution.p_value > 1e-3
        assert 100 < found.distribution.tokens <= 24 * 11
    else:
        assert found.distribution is None


def test_a_rule_that_accepts_by_rank_is_a_violation(model):
    with broken_acceptance(0.0):
        found = verify(model, PROMPTS, max_new_tokens=12)
    assert not found.passed
    assert found.count("violation") == len(PROMPTS)
    assert "below the largest logit" in found.comparisons[0].difference.fault
    assert verify(model, PROMPTS, max_new_tokens=12).passed, "the rule is right again afterwards"


def test_a_rule_that_accepts_the_argmax_has_the_wrong_distribution(folder):
    """With a target that is sure enough for its argmax to be drafted often, and by a drafter that knows it."""
    model = bastion.load(folder, policy="fixed:12", dtype="float32")
    model.drafter = Knowing(model.target)
    settings = {"draws": 36, "temperature": 0.5, "max_new_tokens": 12}
    right = verify(model, PROMPTS, **settings)
    with broken_acceptance(0.5):
        wrong = verify(model, PROMPTS, **settings)
    assert right.passed
    assert wrong.distribution.violation
    assert wrong.count("violation")
    assert "drawn with the uniform number" in next(one.difference.fault for one in wrong.comparisons if one.difference)


class Knowing:
    """Drafts the target's own two most probable next tokens, by a pass of it, and nothing deeper."""

    name, digest, depth, feature_layers = "knowing", "knowing", 1, ()

    def __init__(self, target):
        self.target = target

    def propose(self, contexts):
        logits = [next(replay(self.target, context.tokens, [[0]])) for context in contexts]
        return [FixedDrafter(one.log_softmax(-1)).propose([None])[0] for one in logits]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_what_rounding_changes_is_a_near_tie(model, folder, monkeypatch, temperature):
    """Logits of passes over trees are moved by as much as rounding explains, at most."""
    forward = type(model.target).forward

    def rounded(self, rows):
        results = forward(self, rows)
        for row, result in zip(rows, results, strict=True):
            if row.visible is not None:
                noise = torch.rand(result.logits.shape) - 0.5
                result.logits += noise * ROUNDING[torch.bfloat16] * result.logits.abs().amax(-1, keepdim=True)
        return results

    half = bastion.load(folder, policy="fixed:12", dtype="bfloat16")
    half.drafter = model.drafter
    monkeypatch.setattr(type(model.target), "forward", rounded)
    prompts = [(str(number), f"{number} {number}") for number in range(8)]
    sampling = {"temperature": temperature, "draws": 8, "max_new_tokens": 16}
    found = verify(half, prompts, **sampling)
    assert found.passed
    assert found.count("near-tie")
    for difference in filter(None, (one.difference for one in found.comparisons)):
        assert difference.plain != difference.speculative
        assert difference.gap != difference.gap_float32
    exact = verify(model, prompts, **sampling)
    assert not exact.passed, "in float32 rounding explains no such differences"


def test_a_text_is_judged_to_its_end(model):
    """A near-tie excuses one token, not the rest of the text."""
    table = TableTarget(torch.tensor([[0.0, 5.0, 5.0 + 1e-5, 0], [0, 0, 0, 5], [0, 0, 0, 5], [5, 0, 0, 0]]))
    referee = Referee(table, GREEDY)
    near = referee.judge([0], [2, 3, 0], [1, 3, 0], 0)
    assert (near.position, near.plain, near.speculative, near.fault) == (0, 2, 1, "")
    assert near.gap_float32 == pytest.approx(1e-5, abs=1e-6)
    assert "later, at 1: 5 below" in referee.judge([0], [2, 3, 0], [1, 0, 2], 0).fault
    assert "plain decoding's own token" in referee.judge([0], [3, 3, 0], [1, 3, 0], 0).fault
    assert "one text ends" in referee.judge([0], [2, 3], [2, 3, 0], 0).fault
    assert referee.judge([0], [2, 3, 0], [2, 3, 0], 0) is None


def test_above_temperature_zero_a_token_must_be_near_its_uniform_number():
    table = TableTarget(torch.tensor([[0.0, 0.0, 0.0, -50.0]] * 4))
    seed = 1
    uniform = torch.rand((), generator=torch.Generator().manual_seed(seed), dtype=torch.float64).item()
    drawn = int(uniform * 3)
    referee = Referee(table, SamplingParameters(temperature=1.0))
    wrong = (drawn + 1) % 3
    assert "drawn with the uniform number" in referee.judge([0], [drawn], [wrong], seed).fault
    # Here the uniform number is the border between tokens 0 and 1.
    logits = torch.tensor([math.log(uniform), math.log(1 - uniform), -50.0, -50.0])
    edge = Referee(TableTarget(logits.expand(4, 4)), SamplingParameters(temperature=1.0))
    assert edge.judge([0], [0], [1], seed).fault == edge.judge([0], [1], [0], seed).fault == ""
    assert edge.judge([0], [0], [2], seed).fault


@pytest.mark.parametrize("settings", [{}, {"top_p": 0.8}, {"top_k": 7}, {"top_p": 0.9, "top_k": 12}, {"min_p": 0.1}])
def test_reach_covers_what_rounding_does_and_little_more(settings):
    parameters = SamplingParameters(temperature=0.8, **settings)
    generator, tolerance = torch.Generator().manual_seed(3), 0.2
    for _ in range(200):
        scores = torch.randn(40, generator=generator) * 2
        tokens, masses = distribution(scores, parameters)
        place = int(torch.randint(len(tokens), (), generator=generator))
        exact = reach(scores, int(tokens[place]), parameters, 0.0)
        cumulative = masses.double().cumsum(0)
        assert exact == pytest.approx(((cumulative[place] - masses[place]).item(), cumulative[place].item()), abs=1e-5)
        moved = scores + (torch.rand(40, generator=generator) - 0.5) * tolerance
        uniform = torch.rand((), generator=generator, dtype=torch.float64)
        tokens, masses = distribution(moved, parameters)
        cumulative = masses.double().cumsum(0)
        token = int(tokens[min(int((cumulative < uniform * cumulative[-1]).sum()), len(tokens) - 1)])
        low, high = reach(scores, token, parameters, tolerance)
        assert low <= uniform <= high
        if not settings:  # each end moves by a quarter of the log-odds' change at most
            low_exactly, high_exactly = reach(scores, token, parameters, 0.0)
            assert 0 < low_exactly - low + high - high_exactly < 2 * tolerance / (4 * parameters.temperature)
    assert reach(torch.tensor([0.0, 9.0, -9.0]), 2, replace(parameters, top_k=1), 0.1) == (1.0, 0.0)
    low, high = reach(torch.tensor([0.0, 9.0, -9.0]), 1, replace(parameters, temperature=1e-45), 0.1)
    assert (low, high) == pytest.approx((0.0, 1.0))


def test_transforms_follow_descending_probability():
    scores = torch.tensor([0.1, 0.6, 0.3]).log()
    parameters = SamplingParameters(temperature=1.0)
    assert transform(scores, 1, parameters, 0.5) == pytest.approx(0.3)
    assert transform(scores, 2, parameters, 0.5) == pytest.approx(0.75)
    assert transform(scores, 0, parameters, 1.0) == pytest.approx(1.0)
    equal = torch.zeros(4)
    assert [transform(equal, token, parameters, 0.0) for token in range(4)] == [0, 0.25, 0.5, 0.75]
    assert transform(scores, 0, SamplingParameters(temperature=1.0, top_k=2), 0.5) == 1.0


def test_replayed_logits_are_those_of_decoding():
    target = make_target()
    one = generation(target, range(5, 30), 8)
    for _ in loop.decode(target, None, Plain(), [one]):
        pass
    text = list(one.stream.tokens)
    again = list(replay(target, list(range(5, 30)), [text, text[:1], text]))
    assert again[0].argmax(-1).tolist() == again[2].argmax(-1).tolist() == text
    assert again[1].argmax(-1).tolist() == text[:1]
    torch.testing.assert_close(again[0], again[2])


def test_broken_rules_accept_what_they_say():
    tree = DraftTree(
        np.array([9, 4, 5, 6]), np.array([-1, 0, 0, 1]), np.array([0, 1, 1, 2]), np.array([0, -0.1, -1, -2], np.float32)
    )
    logits = torch.zeros(4, 10)
    logits[0, 5], logits[2, 7], logits[1, 1], logits[3, 2] = 5, 1, 5, 5
    with broken_acceptance(0.0):
        rank = loop.walk(tree, Sampler(GREEDY).chooser(logits, []))
    assert (rank.nodes, rank.tokens) == ([0, 1, 3], [4, 6, 2])
    with broken_acceptance(1.0):
        draws = [
            loop.walk(tree, Sampler(SamplingParameters(temperature=5.0, seed=seed)).chooser(logits, []))
            for seed in range(30)
        ]
    assert {tuple(one.nodes) for one in draws} == {(0, 2)}
    assert {one.tokens[0] for one in draws} == {5}
    assert len({one.tokens[1] for one in draws}) > 3
    right = loop.walk(tree, Sampler(GREEDY).chooser(logits, []))
    assert (right.nodes, right.tokens) == ([0, 2], [5, 7])


def test_the_command_reports_and_sets_the_exit_status(files, run_command, monkeypatch):
    status, said, _ = run_command("verify", *files, "--policy", "fixed:8", "--drafter", "ngram")
    assert status == 0
    assert said.startswith("3 of 3 identical (")
    guesses = FixedDrafter(torch.randn(4, len(VOCAB)).log_softmax(-1))
    monkeypatch.setattr("bastion.model.load_drafter", lambda source, target: guesses)
    monkeypatch.setenv("BASTION_BREAK_ACCEPTANCE", "1")
    status, said, complaint = run_command("verify", *files, "--policy", "fixed:8")
    assert status == 1
    assert "VIOLATION" in said
    assert "below the largest logit; rounding explains" in said
    assert "wrong on purpose" in complaint
    status, said, _ = run_command("verify", *files, "--json", "--max-samples", 2)
    report = json.loads(said)
    assert status == 1
    assert report["passed"] is False
    assert len(report["prompts"]) == 2
    assert any("below the largest" in one["difference"]["fault"] for one in report["prompts"] if one["difference"])
    assert report["violations"] == sum(one["outcome"] == "violation" for one in report["prompts"])
    monkeypatch.setenv("BASTION_BREAK_ACCEPTANCE", "0")
    status, said, _ = run_command("verify", *files, "--json", "--temperature", 1, "--seed", 3)
    report = json.loads(said)
    assert status == 0
    assert report["distribution"]["draws"] == 48
    assert (report["temperature"], report["seed"], report["policy"]) == (1.0, 3, "fixed:8")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--policy", "plain"], "drafts nothing"),
        (["--max-new-tokens", 1], "must be 2 or more"),
        (["--temperature", -1], "temperature must be"),
        (["--top-p", 2], "top_p must be"),
        (["--seed", 2**64 - 1, "--temperature", 1], "seed must be"),
        (["--prompts", "nowhere.jsonl"], "unknown data set"),
        (["--max-samples", 0], "max_samples must be"),
        (["--data-dir", "."], "--data-dir holds data sets"),
    ],
)
def test_bad_input_is_one_line_and_status_two(files, run_command, more, message):
    status, said, complaint = run_command("verify", *files, "--drafter", "ngram", *more)
    assert (status, said) == (2, "")
    assert message in complaint.strip().splitlines()[-1]


def test_a_policy_that_never_drafts_verifies_nothing(model):
    class Idle(BudgetPolicy):
        max_nodes, width = 4, None

        def choose(self, gains, contexts, passes):
            return 0

    model.set_policy(Idle())
    with pytest.raises(bastion.BastionError, match="drafted nothing"):
        verify(model, PROMPTS, max_new_tokens=8)


@pytest.mark.model
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_shipped_drafter_passes_and_a_broken_rule_does_not(embedded, temperature):
    model = bastion.load("smollm2-135m", dtype="float32", policy="fixed:8")
    prompts = [("sky", "Why is the sky blue?")]
    settings = {"max_new_tokens": 16, "temperature": temperature, "draws": 2}
    assert verify(model, prompts, **settings).passed
    with broken_acceptance(temperature):
        assert not verify(model, prompts, **settings).passed
