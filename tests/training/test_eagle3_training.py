"""Training of EAGLE-3 drafters."""

import numpy as np
import pytest
import torch
from accelerate import Accelerator

from bastion.drafters.base import DraftContext, Frontier
from bastion.drafters.eagle3 import Eagle3Drafter
from bastion.drafters.eagle3.training import Eagle3Recipe, Eagle3Settings, new_model
from bastion.errors import BastionError
from bastion.training.trainer import Trainer, TrainerSettings
from dflash_support import CPU


def make_recipe(toy, draft_vocab=None, **settings):
    target, conversations, features = toy
    torch.manual_seed(0)
    model = new_model(target, conversations, draft_vocab)
    return Eagle3Recipe(model, target, conversations, features, Eagle3Settings(**({"anchors": 8} | settings)), CPU)


def train(recipe, folder, steps=100):
    settings = TrainerSettings(
        batch=4, learning_rate=3e-3, max_steps=steps, held_back=0.1, evaluate_every=steps, checkpoint_every=steps
    )
    Trainer(recipe, settings, folder, Accelerator(cpu=True)).train()


def test_chains_are_unrolled_as_in_drafting(toy):
    """The hidden states of training are those of decoding, along the answer's own tokens."""
    recipe = make_recipe(toy, draft_vocab=20, anchors=100, steps=4)
    seen = {}

    def module(*inputs):
        seen["hidden"] = recipe.model(*inputs)
        return seen["hidden"]

    recipe.run(module, [3, 5], torch.Generator().manual_seed(0))
    target, conversations, features = toy
    drafter = Eagle3Drafter(recipe.exported(), target, depth=4)
    chains = iter(seen["hidden"])
    for index in (3, 5):
        ids = conversations[index].ids
        for anchor in range(conversations[index].prompt_length, len(ids) - 1):
            expected = next(chains)
            context = DraftContext(list(ids[: anchor + 1]), features=[features.of(index)[:anchor].float()])
            proposal = drafter.propose([context])[0]
            for depth, token in enumerate(ids[anchor : anchor + 4]):
                proposal.expand(Frontier(depth, np.array([token]), np.array([0])), 1)
                hidden = drafter.model.norm(proposal._hidden)[0]
                torch.testing.assert_close(hidden, expected[depth].detach(), atol=1e-4, rtol=1e-4)


def test_learns_and_drafts(toy, tmp_path):
    """After some steps the drafter continues held-back texts, and the export is what was trained."""
    recipe = make_recipe(toy)
    train(recipe, tmp_path)
    target, conversations, features = toy
    drafter = Eagle3Drafter.load(tmp_path, target)
    right = 0
    for index in range(20):
        ids = conversations[index].ids
        context = DraftContext(list(ids[:11]), features=[features.of(index)[:10].float()])
        proposal, tokens, zero = drafter.propose([context])[0], [ids[10]], np.zeros(1, np.int64)
        for depth in range(4):
            tokens.append(int(proposal.expand(Frontier(depth, np.array(tokens[-1:]), zero), 1).tokens[0, 0]))
        right += tuple(tokens) == ids[10:15]
    assert right >= 16


def test_distillation_alone_learns_the_targets_distribution(toy):
    recipe = make_recipe(toy, distill=1.0)
    outcome = recipe.run(recipe.model, [0, 1], torch.Generator().manual_seed(1))
    assert outcome.loss > 0
    outcome.loss.backward()
    assert recipe.model.lm_head.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("bad", [{"anchors": 0}, {"steps": 0}, {"distill": 1.5}])
def test_settings_that_make_no_sense(bad):
    with pytest.raises(BastionError):
        Eagle3Settings(**bad)
