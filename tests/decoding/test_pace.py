"""Texts rest from drafts that do not pay, and stay what they are."""

from types import SimpleNamespace

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


class Knowing:
    """A text of one token; a drafter that is sure of it, and names others besides. It keeps how much was grown."""

    name, digest, feature_layers, depth = "knowing", "knowing", (), 8

    def __init__(self):
        self.expanded = []

    def propose(self, contexts):
        (proposal,) = FixedDrafter(torch.tensor([0.9] + [0.1 / 7] * 7).log().repeat(8, 1)).propose(contexts)
        expand, count = proposal.expand, []
        self.expanded.append(count)
        proposal.expand = lambda frontier, width: count.append(len(frontier.tokens)) or expand(frontier, width)
        return [proposal]


@pytest.mark.parametrize("slope", [0.1, 0.0])
def test_trees_are_grown_to_a_few_times_what_was_chosen(slope):
    """Where rows are dear small trees are chosen, and few nodes grown; where they are free, ever more."""
    sizes = {}
    for rests in (True, False):
        drafter, same = Knowing(), TableTarget(10 * torch.eye(VOCAB)[[0] * VOCAB])
        policy = Throughput(RoundCost(LinearCost(1.0, slope), 0.0, 0.0), 240, rests=rests)
        one = generation(same, [0], LENGTH)
        one.pace = Pace.of(policy)
        for _ in decode(same, drafter, policy, [one]):
            pass
        assert one.stream.tokens == [0] * LENGTH
        grown = [sum(count) for count in drafter.expanded[:-2]]  # the last trees end with the text
        sizes[rests] = one.stats.tree_sizes[2:-3], grown[2:]
    assert sizes[True][0] == sizes[False][0]  # after two rounds the same trees
    if slope:
        assert 2 * max(sizes[True][1]) < min(sizes[False][1])
    else:
        assert sizes[True][1] == sizes[False][1]


def test_how_many_nodes_are_grown():
    pace, record = Pace(COST), SimpleNamespace(tree=SimpleNamespace(size=3), context=5, accepted_length=2, passes=1)
    assert (pace.nodes(255), pace.nodes(20)) == (64, 20)
    pace.add(record)
    assert pace.nodes(255) == 32
    record.tree.size = 40
    pace.add(record)
    assert (pace.nodes(255), pace.nodes(100)) == (160, 100)
    papers = Pace()
    papers.add(record)
    assert papers.nodes(255) == 255
