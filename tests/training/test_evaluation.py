"""Replayed rounds are those of decoding, and the figures say what happened in them."""

import json

import numpy as np
import pytest
import torch

from bastion.decoding.budget import Chain, FixedBudget, RoundCost, Throughput
from bastion.decoding.loop import decode
from bastion.decoding.pace import Pace
from bastion.decoding.stats import GenerationStats
from bastion.drafters.base import Candidates
from bastion.drafters.dflash import DFlashConfig, DFlashDrafter, DFlashModel
from bastion.drafters.marginal import MarginalProposal
from bastion.drafters.ngram.drafter import NgramDrafter
from bastion.errors import BastionError
from bastion.training.data import Conversation
from bastion.training.evaluation import Reliability, evaluate
from bastion.training.evaluation_report import comparison_table, evaluation_tables, write_json, write_plot
from bastion.training.features import compute_features
from bastion.training.simulation import Subset, select, simulate
from tiny import FixedDrafter, LinearCost, TableTarget, generation, make_target

COST = RoundCost(LinearCost(1.0, 0.02), 0.1, 0.2)
POLICIES = [Chain(), FixedBudget(5), FixedBudget(64), Throughput(COST, 32, rests=True)]
LENGTHS = (1, 2, 9, 40, 41)  # new tokens of each text


def rounded(target):
    """A target whose features have the precision that they are stored in."""
    forward = target.forward

    def forward_rounded(rows):
        results = forward(rows)
        for result in results:
            if result.features is not None:
                result.features = result.features.bfloat16().float()
        return results

    target.forward = forward_rounded
    return target


def random_dflash(target):
    config = {
        "model_type": "qwen3", "block_size": 6, "hidden_act": "silu", "hidden_size": target.shape.hidden,
        "dflash_config": {"mask_token_id": 3, "target_layer_ids": [0, 2]}, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96,
        "vocab_size": target.shape.vocab, "rms_norm_eps": 1e-6, "rope_theta": 1e4, "initializer_range": 0.15,
        "max_position_embeddings": 512, "attention_bias": False,
    }  # fmt: skip
    return DFlashDrafter(DFlashModel(DFlashConfig.from_dict(config)).eval().requires_grad_(False), target)


@pytest.fixture(scope="module")
def target():
    torch.manual_seed(3)
    return rounded(make_target(vocab_size=24))  # few tokens: more of them are guessed right


@pytest.fixture(scope="module")
def drafters(target):
    torch.manual_seed(4)
    return {"ngram": NgramDrafter(), "dflash": random_dflash(target)}


def written(target, drafter, policy, prompts):
    """Conversations as decoding writes them, and the statistics and tree sizes of each."""
    conversations, stats = [], []
    for place, (prompt, length) in enumerate(zip(prompts, LENGTHS, strict=True)):
        one = generation(target, prompt, length)
        one.pace = Pace.of(policy)
        for _ in decode(target, drafter, policy, [one]):
            pass
        conversations.append(Conversation((*prompt, *one.stream.tokens), len(prompt), "ab"[place % 2], 0.0))
        stats.append(one.stats)
    return conversations, stats


def prompts():
    random = np.random.default_rng(5)
    return [random.integers(4, 24, size).tolist() for size in (1, 12, 5, 8, 7)]


def stored_features(target, drafter, conversations, folder):
    return compute_features(target, conversations, drafter.feature_layers, folder) if drafter.feature_layers else None


@pytest.mark.parametrize("policy", POLICIES, ids=["chain", "fixed:5", "fixed:64", "throughput"])
@pytest.mark.parametrize("name", ["ngram", "dflash"])
def test_every_round_is_that_of_decoding(target, drafters, tmp_path, monkeypatch, name, policy):
    monkeypatch.setattr("bastion.training.simulation.BATCH", 2)
    drafter = drafters[name]
    conversations, decoded = written(target, drafter, policy, prompts())
    features = stored_features(target, drafter, conversations, tmp_path)
    replayed = [GenerationStats() for _ in conversations]
    for one in simulate(target, drafter, policy, conversations, features):
        replayed[one.index].add(one.record)
    assert [one.accepted_lengths for one in replayed] == [one.accepted_lengths for one in decoded]
    assert [one.tree_sizes for one in replayed] == [one.tree_sizes for one in decoded]
    if policy is POLICIES[2]:
        assert max(max(one.accepted_lengths, default=0) for one in decoded) > 2  # there was something to get wrong


def test_figures_are_those_of_decoding(target, drafters, tmp_path):
    drafter = drafters["dflash"]
    conversations, chain = written(target, drafter, Chain(), prompts())
    _, tree = written(target, drafter, FixedBudget(20), prompts())
    shuffled = [3, 0, 4, 2, 1]
    features = Subset(
        stored_features(target, drafter, [conversations[i] for i in shuffled], tmp_path), np.argsort(shuffled).tolist()
    )
    shares = []
    found = evaluate(target, drafter, conversations, features, (20, 4, 20), shares.append, Throughput(COST, 8))
    assert [one.name for one in found.configurations] == ["chain", "tree 4", "tree 20", "cost:8"]
    for one, stats in ((found.configurations[0], chain), (found.configurations[2], tree)):
        lengths = {"a": stats[::2], "b": stats[1::2]}
        for source, mine in lengths.items():
            every = [length for s in mine for length in s.accepted_lengths]
            assert one.by_source[source].accepted_length == pytest.approx(np.mean(every))
            assert one.by_source[source].rounds == len(every)
        sizes = [size for s in stats for size in s.tree_sizes]
        assert one.overall.tree_size == pytest.approx(np.mean(sizes))
        tokens = sum(len(conversation.answer) - 1 for conversation in conversations)
        seconds = sum(0.1 * (size > 0) + 0.2 + 1.0 + 0.02 * (1 + size) for size in sizes)
        assert one.overall.tokens_per_second == pytest.approx(tokens / seconds)
        assert one.overall.accepted_length == pytest.approx(tokens / len(sizes))
    assert found.actual_gain == pytest.approx(found.configurations[2].overall.accepted_length - 1)
    assert shares == sorted(shares)
    assert shares[-1] == 1


def test_accuracy_by_position():
    guesses = torch.full((3, 8), -20.0)
    guesses[[0, 1, 2], [5, 6, 7]] = 0.0  # always 5, 6, 7
    answer = (1, 5, 6, 0, 5, 0, 7, 5, 6)
    # Rounds: root 1 accepts 5 6, bonus 0; root 0 accepts 5, bonus 0; root 0 accepts none, bonus 7; root 7 accepts 5,
    # bonus 6. The trees of the last two are at most 2 and 1 deep.
    found = evaluate(
        TableTarget(torch.zeros(8, 8)),
        FixedDrafter(guesses.log_softmax(-1)),
        [Conversation((2, *answer), 1, "", 0.0)],
        None,
        trees=(3,),
    )
    assert [one.rounds for one in found.positions] == [4, 3, 2]
    assert [one.accuracy for one in found.positions] == pytest.approx([3 / 4, 1 / 3, 1 / 2])
    assert [one.reached for one in found.positions] == [4, 2, 1]
    assert [one.accuracy_when_reached for one in found.positions] == pytest.approx([3 / 4, 1 / 2, 0])
    assert found.reliability.nodes == 4 * 3
    assert found.actual_gain == (2 + 1 + 0 + 1) / 4


class MarkovDrafter:
    """Knows what follows each token, and may be too sure of it."""

    name, digest, feature_layers, depth = "markov", "markov", (), 4
    ready, passes, beam = 4, 1, None

    def __init__(self, transitions, sharpness=1.0):
        self.log_probs = (sharpness * torch.from_numpy(transitions).float().log()).log_softmax(-1)

    def propose(self, contexts):
        return [self for _ in contexts]

    def expand(self, frontier, width):
        values, tokens = self.log_probs[torch.from_numpy(frontier.tokens)].topk(min(width, len(self.log_probs)))
        return Candidates(tokens.numpy(), values.numpy())


def markov(tokens=12, texts=40, length=50):
    random = np.random.default_rng(7)
    transitions = random.dirichlet(np.full(tokens, 0.4), tokens) * 0.98 + 0.02 / tokens
    conversations = []
    for _ in range(texts):
        text = [0]
        while len(text) < length:
            text.append(int(random.choice(tokens, p=transitions[text[-1]])))
        conversations.append(Conversation(tuple(text), 1, "", 0.0))
    return transitions, conversations


def test_reliability_of_right_and_of_overconfident_probabilities():
    transitions, conversations = markov()
    target = TableTarget(torch.zeros(12, 12))
    right = evaluate(target, MarkovDrafter(transitions), conversations, None, (16,))
    sure = evaluate(target, MarkovDrafter(transitions, 3.0), conversations, None, (16,))
    assert right.reliability.error < 0.01
    assert right.expected_gain == pytest.approx(right.actual_gain, rel=0.05)
    assert len(right.reliability_by_depth) == 3  # no node of depth 4 is among the best 16
    assert all(one.error < 0.02 for one in right.reliability_by_depth)
    assert sure.reliability.error > 0.02
    assert sure.expected_gain > 1.2 * sure.actual_gain
    assert all(one.actual < one.predicted for one in sure.reliability.bins if one.low >= 0.5)


def test_calibration_error_by_hand():
    predicted = np.array([0.005, 0.005, 0.25, 0.95, 1.0])
    found = Reliability.of(predicted, np.array([False, False, True, True, False]))
    assert [one.low for one in found.bins] == pytest.approx([0.0, 0.2, 0.9])
    assert [one.nodes for one in found.bins] == [2, 1, 2]
    assert found.error == pytest.approx((2 * 0.005 + 1 * 0.75 + 2 * (0.975 - 0.5)) / 5)
    assert found.predicted == pytest.approx(predicted.mean())
    assert found.actual == pytest.approx(0.4)
    assert Reliability.of(np.zeros(0), np.zeros(0, bool)).error == 0


def test_what_cannot_be_replayed_is_left_out():
    def conversation(length, temperature=0.0):
        return Conversation(tuple(range(length)), 2, "", temperature)

    data = [conversation(length) for length in range(2, 10)] + [conversation(9, 0.7)]
    kept, left_out = select(data, 3)
    assert [len(one.ids) for one in kept] == [4, 6, 8]
    assert left_out == {"written above temperature 0": 1, "too short": 2, "not sampled": 3}
    assert select(data[2:5]) == (data[2:5], {})
    with pytest.raises(BastionError, match="temperature 0"):
        select(data[8:])
    for unusable in (data[8:], data[:2]):
        with pytest.raises(BastionError):
            evaluate(TableTarget(torch.zeros(9, 9)), NgramDrafter(), unusable, None)


def test_nothing_drafted_is_reported_too(tmp_path):
    """Answers of two tokens leave nothing to draft."""
    target, drafter = TableTarget(torch.zeros(9, 9)), FixedDrafter(torch.zeros(2, 9).log_softmax(-1))
    found = evaluate(target, drafter, [Conversation((1, 2, 3), 1, "x", 0.0)], None)
    assert found.configurations[-1].overall.accepted_length == 1
    assert (found.expected_gain, found.positions, found.reliability_by_depth) == (0, [], [])
    evaluation_tables(found)
    comparison_table({"one": found, "other": found})
    write_json({"left_out": {"too short": 2}}, {"measured": found}, tmp_path / "evaluation.json")
    record = json.loads((tmp_path / "evaluation.json").read_text())
    assert record["left_out"] == {"too short": 2}
    assert record["evaluations"]["measured"]["configurations"][0]["by_source"]["x"]["rounds"] == 1
    pytest.importorskip("matplotlib")
    write_plot({"measured": found}, tmp_path / "evaluation.png")
    assert (tmp_path / "evaluation.png").read_bytes().startswith(b"\x89PNG")


def test_column_of_a_token():
    log_probs = torch.zeros(1, 3)
    assert MarginalProposal(log_probs).column(2) == 2
    reduced = MarginalProposal(log_probs, torch.tensor([4, 9, 0]))
    assert [reduced.column(token) for token in (9, 0, 1)] == [1, 2, None]
