"""Texts written with drafters of all families are the target's own, however the drafters guess."""

import itertools
from collections import Counter

import pytest
import torch

from bastion.decoding.budget import Chain, FixedBudget, Plain, RoundCost, Throughput
from bastion.decoding.loop import decode
from bastion.drafters.dflash import DFlashDrafter
from bastion.drafters.dflash.training import new_model as new_dflash
from bastion.drafters.eagle3 import Eagle3Drafter
from bastion.drafters.eagle3.training import new_model as new_eagle3
from bastion.drafters.loading import FAMILIES as DRAFTERS
from bastion.drafters.mixed import MixedDrafter
from bastion.drafters.specblock import SpecBlockDrafter
from bastion.drafters.specblock.training import new_model as new_specblock
from bastion.drafters.treeflash import TreeFlashDrafter
from bastion.drafters.treeflash.training import new_model as new_treeflash
from bastion.targets.base import Rows
from bastion.training.data import Conversation
from goodness import p_value
from tiny import LinearCost, generation, make_target
from training_support import counting

POLICIES = {
    "chain": Chain(),
    "fixed": FixedBudget(12),
    "throughput": Throughput(RoundCost(LinearCost(1.0, 0.02), 0.1, 0.0, deepen=0.05), 24),
}
FAMILIES = (*DRAFTERS, "mixed")
VOCABULARY, SAMPLES = 6, 1500


def random_drafter(family, target, texts):
    """A drafter with random weights; its correction, if it has one, is no longer zero."""
    if family == "eagle3":
        return Eagle3Drafter(new_eagle3(target, texts).eval(), target, depth=4)
    if family == "specblock":
        return SpecBlockDrafter(new_specblock(target, texts, layers=1).eval(), target)
    body = new_dflash(target, texts, layers=1, block_size=5).eval()
    if family == "treeflash":
        model = new_treeflash(body, top_m=4).eval()
        with torch.no_grad():
            model.ar_approximation.d.weight.normal_(0, 0.1)
        return TreeFlashDrafter(model, target)
    drafter = DFlashDrafter(body, target)
    return MixedDrafter(drafter) if family == "mixed" else drafter


@pytest.fixture(scope="module", params=FAMILIES)
def models(request):
    torch.manual_seed(0)
    target = make_target()
    return target, random_drafter(request.param, target, [counting(30, start) for start in range(8)])


def write(target, drafter, policy, prompts, length, **sampling):
    batch = [generation(target, prompt, length, **sampling | {"seed": seed}) for seed, prompt in enumerate(prompts)]
    for _ in decode(target, drafter, policy, batch):
        pass
    return batch


@pytest.mark.parametrize("policy", POLICIES)
def test_greedy_texts_are_those_of_plain_decoding(models, policy):
    target, drafter = models
    prompts = [[5, 6, 7, 5, 6, 7, 5, 6], [80, 3], list(range(40, 75))]
    plain = write(target, None, Plain(), prompts, 40)
    drafted = write(target, drafter, POLICIES[policy], prompts, 40)
    assert [one.stream.tokens for one in drafted] == [one.stream.tokens for one in plain]
    assert any(max(one.stats.tree_sizes) > 0 for one in drafted)


@pytest.mark.parametrize("family", FAMILIES)
def test_sampled_texts_have_the_targets_distribution(family):
    """The joint distribution of three tokens, the second and third of which may be drafted."""
    torch.manual_seed(1)
    target = make_target(vocab_size=VOCABULARY, num_hidden_layers=2)
    drafter = random_drafter(family, target, [Conversation(tuple(range(VOCABULARY)) * 4, 2, "", 0.0)])
    prompt = [2, 3, 2, 3]
    joint = {}
    for first, second in itertools.product(range(VOCABULARY), repeat=2):
        tokens = torch.tensor([*prompt, first, second])
        (found,) = target.forward([Rows(tokens, torch.arange(6), target.new_cache())])
        steps = found.logits[3:].double().softmax(-1)
        for third in range(VOCABULARY):
            joint[first, second, third] = float(steps[0, first] * steps[1, second] * steps[2, third])
    counts: Counter[tuple[int, ...]] = Counter()
    for start in range(0, SAMPLES, 250):
        batch = [generation(target, prompt, 3, temperature=1.0, seed=seed) for seed in range(start, start + 250)]
        for _ in decode(target, drafter, FixedBudget(6), batch):
            pass
        counts.update(tuple(one.stream.tokens) for one in batch)
    assert p_value(counts, joint) > 1e-3
