"""Texts rest from drafts that do not pay, and stay what they are."""

import pytest
import torch

from bastion.decoding.budget import Chain, Plain, RoundCost, Throughput
from bastion.decoding.loop import decode
from bastion.decoding.pace import LONGEST, Pace
from tiny import FixedDrafter, LinearCost, TableTarget, generation

COST = RoundCost(LinearCost(1.0, 0.0), draft=0.3, auxiliary=0.0)
VOCAB, LENGTH = 8, 400


class Turning:
    """A text that counts round and round; a drafter that is wrong, from the text's `turn`-th token on right."""

    name, digest, feature_layers, depth = "turning", "turning", (), 3

    def __init__(self, turn):
        self.turn, self.calls = turn, []

    def propose(self, contexts):
        (context,) = contexts
        self.calls.append(len(context.tokens))
        step = 1 if len(context.tokens) >= self.turn else 2
        log_probs = torch.full((3, VOCAB), -9.0)
        for depth in range(3):
            log_probs[depth, (context.tokens[-1] + step * (depth + 1)) % VOCAB] = -0.01
        return FixedDrafter(log_probs).propose(contexts)


def target():
    return TableTarget(10 * torch.eye(VOCAB).roll(1, 1))


def write(drafter, policy, length=LENGTH):
    one = generation(target(), [0], length)
    one.pace = Pace.of(policy)
    for _ in decode(target(), drafter, policy, [one]):
        pass
    assert one.stream.tokens == [place % VOCAB for place in range(1, length + 1)]
    return one.stats


def test_a_drafter_that_is_never_right_is_seldom_asked():
    drafter = Turning(LENGTH + 1)
    stats = write(drafter, Throughput(COST, 3, rests=True))
    assert stats.rounds == LENGTH - 1
    pauses = LENGTH / LONGEST  # about one try of a few rounds after each
    assert len(drafter.calls) < 6 * pauses
    assert drafter.calls[-1] > LENGTH - 2 * LONGEST  # it is tried again and again


def test_a_drafter_that_pays_is_asked_in_every_round():
    drafter = Turning(0)
    stats = write(drafter, Throughput(COST, 3, rests=True))
    assert len(drafter.calls) >= stats.rounds - 1  # the last round may have nothing to draft
    assert stats.mean_accepted_length > 3.9


def test_a_drafter_that_becomes_good_is_found_out():
    drafter = Turning(LENGTH // 2)
    stats = write(drafter, Throughput(COST, 3, rests=True))
    late = [length for length in stats.accepted_lengths if length > 1]
    assert len(late) > 0.8 * (LENGTH // 2 - LONGEST) / 4
    assert stats.accepted_lengths[-20:-1] == [4] * 19


def test_policies_that_weigh_no_costs_never_rest():
    drafter = Turning(LENGTH + 1)
    stats = write(drafter, Chain())
    assert len(drafter.calls) == stats.rounds - 1
    assert Pace.of(Plain()).cost is None
    assert Pace.of(Throughput(COST, 3)).cost is None  # the papers' own


@pytest.mark.parametrize("draft", [0.0, 0.04])
def test_a_draft_that_costs_next_to_nothing_is_no_reason_to_rest(draft):
    drafter = Turning(LENGTH + 1)
    stats = write(drafter, Throughput(RoundCost(LinearCost(1.0, 0.0), draft, 0.0), 3, rests=True))
    assert len(drafter.calls) == stats.rounds - 1


def test_batches_draft_for_those_alone_that_do_not_rest():
    policy, drafter = Throughput(COST, 3, rests=True), Turning(0)
    texts = [generation(target(), [0], 40) for _ in range(2)]
    texts[0].pace, texts[1].pace = Pace(COST, rest=30), Pace(COST)
    for _ in decode(target(), drafter, policy, texts):
        pass
    assert texts[0].stream.tokens == texts[1].stream.tokens
    assert texts[0].stats.accepted_lengths[:10] == [1] * 10
    assert texts[1].stats.accepted_lengths == [4] * 9 + [3]
