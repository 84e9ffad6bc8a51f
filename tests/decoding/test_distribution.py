"""Above temperature 0 the text has the target's distribution, whatever the tree."""

import itertools
from collections import Counter

import pytest
import torch

from bastion.decoding.budget import Chain, FixedBudget, Plain, RoundCost, Throughput
from bastion.decoding.loop import decode
from bastion.decoding.sampling import Sampler, SamplingParameters, distribution
from goodness import p_value
from tiny import FixedDrafter, LinearCost, TableTarget, generation

VOCABULARY, TOKENS, SAMPLES, BATCH = 5, 3, 20_000, 500
SAMPLING = {"temperature": 1.0, "top_p": 0.9}
POLICIES = {
    "plain": Plain(),
    "chain": Chain(),
    "fixed": FixedBudget(6),
    "throughput": Throughput(RoundCost(LinearCost(1.0, 0.08), 0.1, 0.0), 12),
}


@pytest.fixture(scope="module")
def models():
    generator = torch.Generator().manual_seed(5)
    target = TableTarget(torch.randn(VOCABULARY, VOCABULARY, generator=generator) * 1.2)
    return target, FixedDrafter(torch.randn(4, VOCABULARY, generator=generator).log_softmax(-1))


def expected_joint(target):
    """Probability of every continuation of token 0 of the wanted length."""
    step = torch.zeros(VOCABULARY, VOCABULARY, dtype=torch.float64)
    for token in range(VOCABULARY):
        ids, probabilities = distribution(target.logits[token], SamplingParameters(**SAMPLING))
        step[token, ids] = probabilities.double()
    joint = {}
    for path in itertools.product(range(VOCABULARY), repeat=TOKENS):
        pairs = itertools.pairwise((0, *path))
        joint[path] = float(torch.tensor([step[a, b] for a, b in pairs], dtype=torch.float64).prod())
    return joint


def sample(models, policy):
    target, drafter = models
    counts: Counter[tuple[int, ...]] = Counter()
    for start in range(0, SAMPLES, BATCH):
        batch = [generation(target, [0], TOKENS, **SAMPLING, seed=seed) for seed in range(start, start + BATCH)]
        for _ in decode(target, drafter, policy, batch):
            pass
        counts.update(tuple(one.stream.tokens) for one in batch)
    return counts


@pytest.mark.parametrize("name", POLICIES)
def test_joint_distribution_is_that_of_the_target(models, name):
    assert p_value(sample(models, POLICIES[name]), expected_joint(models[0])) > 1e-3


def test_a_wrong_acceptance_rule_is_rejected(models, monkeypatch):
    """Follow the argmax and sample the bonus token only: what the public BASTION code does."""
    right = Sampler.chooser

    def argmax_walk(self, logits, text):
        drafted = {int(token) for token in models[1].log_probs.topk(3).indices[0]}
        draw, best = right(self, logits, text), logits.argmax(-1).tolist()
        return lambda node, path: best[node] if best[node] in drafted else draw(node, path)

    monkeypatch.setattr(Sampler, "chooser", argmax_walk)
    assert p_value(sample(models, POLICIES["fixed"]), expected_joint(models[0])) < 1e-6
