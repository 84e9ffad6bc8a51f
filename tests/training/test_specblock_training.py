"""Training of SpecBlock drafters."""

import numpy as np
import pytest
import torch
from accelerate import Accelerator

from bastion.decoding.growth import grow
from bastion.drafters.base import DraftContext, Frontier
from bastion.drafters.marginal import MarginalProposal
from bastion.drafters.specblock import SpecBlockDrafter, load_model
from bastion.drafters.specblock.training import (
    SpecBlockRecipe,
    SpecBlockSettings,
    label_ranks,
    new_model,
    valid_prefix,
)
from bastion.errors import BastionError
from bastion.training.data import Conversation
from bastion.training.features import compute_features
from bastion.training.losses import IGNORED
from bastion.training.recipe import Drafts
from bastion.training.trainer import Trainer, TrainerSettings
from dflash_support import CPU, close
from tiny import make_target


def make_recipe(toy, draft_vocab=None, positions=2, passes=2, **settings):
    target, conversations, features = toy
    torch.manual_seed(0)
    model = new_model(target, conversations, positions=positions, passes=passes, draft_vocab=draft_vocab)
    return SpecBlockRecipe(
        model, target, conversations, features, SpecBlockSettings(**({"anchors": 8} | settings)), CPU
    )


def train(recipe, folder, steps):
    settings = TrainerSettings(
        batch=4, learning_rate=3e-3, max_steps=steps, held_back=0.1, evaluate_every=steps, checkpoint_every=steps
    )
    Trainer(recipe, settings, folder, Accelerator(cpu=True)).train()


def test_the_valid_prefix_mask_by_hand() -> None:
    """Two blocks of three slots; what is beyond rank 8 is never in a tree."""
    ranks = torch.tensor(
        [
            [1, 1, 1, 1, 1, 5],  # all right but the last
            [2, 1, 1, 1, 3, 1],  # wrong at once, but the tree holds the path, so the next block counts
            [1, 4, 1, 9, 1, 1],
            [1, 1, 9, 1, 1, 1],  # no tree holds the next block's prefix
            [9, 1, 1, 1, 1, 1],
        ]
    )
    expected = [[1, 1, 1, 1, 1, 1], [1, 0, 0, 1, 1, 0], [1, 1, 0, 1, 0, 0], [1, 1, 1, 0, 0, 0], [1, 0, 0, 0, 0, 0]]
    assert valid_prefix(ranks, 3, 8).int().tolist() == expected
    three = torch.tensor([[1, 9, 1, 1, 1, 1], [1, 1, 1, 2, 1, 1]])
    assert valid_prefix(three, 2, 8).int().tolist() == [[1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1]]


def test_ranks_of_labels_by_hand() -> None:
    columns = torch.tensor([[2, IGNORED], [0, 1]])
    logits = torch.tensor([[0.0, 1.0, 2.0], [0.5, 1.0, 2.0], [3.0, 1.0, 2.0]])
    assert label_ranks(logits, columns).tolist() == [[1, 4], [3, 3]]


def test_the_loss_leaves_out_what_the_mask_leaves_out(toy) -> None:
    """The logits that the mask hides get no gradient; those that it shows do, also of the rank head."""
    recipe = make_recipe(toy, positions=2, passes=2)
    labels = torch.tensor([[5, 6, 7, 8], [5, 6, 7, IGNORED], [5, 6, 7, 8]])
    hidden = torch.zeros(3, 4, 72)
    weight = recipe._head
    for row, slot, label in ((0, 0, 5), (0, 1, 6), (0, 2, 7), (1, 0, 9), (2, 0, 5), (2, 1, 6), (2, 2, 9)):
        hidden[row, slot] = 9 * weight[label] / weight[label].norm()
    ranks = label_ranks((hidden @ weight.T).flatten(0, 1), labels.masked_fill(labels == IGNORED, 0))
    assert (ranks[0, :3] == 1).all()
    assert ranks[1, 0] > 1
    hidden.requires_grad_()
    rank_logits = torch.zeros(3, 4, 4, requires_grad=True)
    none = torch.empty(0)
    drafts = Drafts([], none, labels, labels != IGNORED, None, none, none, none, none)  # the labels are draft ids
    outcome = recipe.outcome(drafts, hidden, rank_logits)
    outcome.loss.backward()
    expected = valid_prefix(ranks, 2, 8) & (labels != IGNORED)
    assert not expected.all()
    assert torch.equal(hidden.grad.abs().sum(-1) > 0, expected)
    assert torch.equal(rank_logits.grad.abs().sum(-1) > 0, expected)
    assert torch.equal(outcome.present, labels != IGNORED)
    assert outcome.hits[0].tolist() == [True, True, True, False]


def test_drafts_are_unrolled_as_in_drafting(toy) -> None:
    """Along the answer's own tokens, what training computes is what the exported drafter drafts."""
    recipe = make_recipe(toy, draft_vocab=20, anchors=100, positions=2, passes=3)
    seen = {}

    def module(*inputs):
        seen["hidden"], ranks = recipe.model(*inputs)
        return seen["hidden"], ranks

    recipe.run(module, [3, 5], torch.Generator().manual_seed(0))
    target, conversations, features = toy
    exported = new_model(target, conversations, positions=2, passes=3, draft_vocab=20)
    exported.load_state_dict(recipe.model.state_dict())
    exported.body.load_state_dict(recipe.exported().state_dict())
    drafter = SpecBlockDrafter(exported.eval(), target)
    drafts = iter(seen["hidden"].detach())
    for index in (3, 5):
        ids = conversations[index].ids
        for anchor in range(conversations[index].prompt_length, len(ids) - 1):
            expected = next(drafts)
            context = DraftContext(list(ids[: anchor + 1]), features=[features.of(index)[:anchor].float()])
            proposal = drafter.propose([context])[0]
            for depth, token in enumerate(ids[anchor : anchor + 6]):
                proposal.expand(Frontier(depth, np.array([token]), np.array([0])), 1)
                hidden = proposal._ranked.hidden[0, depth % 2]
                torch.testing.assert_close(hidden, expected[depth], atol=1e-4, rtol=1e-4)
    assert next(drafts, None) is None


def test_the_exported_drafter_reads_features_as_they_are(toy, tmp_path) -> None:
    target, conversations, features = toy
    model = new_model(target, conversations, positions=2)
    raw = model.body.fc.weight.clone()
    scale = torch.linspace(0.01, 100, len(features.scale()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(features), "scale", lambda self: scale)
        recipe = SpecBlockRecipe(model, target, conversations, features, SpecBlockSettings(), CPU)
    close(model.body.fc.weight / scale, raw)
    recipe.save(tmp_path)
    saved = load_model(tmp_path, CPU, torch.float32)
    torch.testing.assert_close(saved.body.fc.weight, raw, rtol=1e-2, atol=0)
    torch.testing.assert_close(saved.join.weight, model.join.weight, rtol=1e-2, atol=0)
    assert recipe.identity()["sizes"]["specblock_config"]["positions"] == 2


def test_every_weight_learns_and_distillation_too(toy) -> None:
    recipe = make_recipe(toy, distill=0.5)
    outcome = recipe.run(recipe.model, range(4), torch.Generator().manual_seed(0))
    outcome.loss.backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in recipe.model.parameters())
    assert outcome.hits.shape == outcome.present.shape == (32, 4)


def test_steps_are_repeatable_and_distillation_changes_the_loss(toy) -> None:
    recipes = [make_recipe(toy, distill=share) for share in (0.0, 0.0, 1.0)]
    losses = [float(one.run(one.model, range(2), torch.Generator().manual_seed(1)).loss.detach()) for one in recipes]
    assert losses[0] == losses[1] != losses[2]


FORKS = (40, 50, 60)  # tokens that a text may go on with at a fork, all equally often; each has its own sequel


def forking(number):
    """Rounds of three fixed tokens, one of FORKS, and four tokens that tell which."""
    generator = torch.Generator().manual_seed(number)
    ids = [2 + number % 7, 70 + number // 7]
    for fork in torch.randint(3, (4,), generator=generator).tolist():
        ids += [10, 11, 12, FORKS[fork], *(FORKS[fork] + i for i in range(1, 5))]
    return Conversation(tuple(ids), 2, "", 0.0)


def test_the_second_block_follows_the_token_that_the_first_one_forked_to(tmp_path) -> None:
    """Drafts from before a fork at depth 4: no marginals, not even the true ones, know how a branch goes on."""
    torch.manual_seed(0)
    target = make_target()
    texts = [forking(number) for number in range(60)]
    features = compute_features(target, texts, (1,), tmp_path / "features")
    recipe = make_recipe((target, texts, features), positions=4, passes=2, anchors=16)
    train(recipe, tmp_path / "run", 100)
    drafter = SpecBlockDrafter.load(tmp_path / "run", target)
    marginals = torch.full((8, 96), 1e-6)
    for depth in range(8):
        if depth < 3:
            marginals[depth, 10 + depth] = 1
        else:
            marginals[depth, torch.tensor(FORKS) + depth - 3] = 1 / 3
    ideal = MarginalProposal((marginals / marginals.sum(1, keepdim=True)).log())
    ours, theirs = [], []
    for index in range(24):
        ids = texts[index].ids
        for anchor in (9, 17):  # the token before a round
            context = DraftContext(list(ids[: anchor + 1]), features=[features.of(index)[:anchor].float()])
            drafts = drafter.propose([context])[0], ideal
            for accepted, proposal in zip((ours, theirs), drafts, strict=True):
                tree = grow(proposal, ids[anchor], 24)
                accepted.append(1 + longest(tree, ids[anchor + 1 : anchor + 9]))
    assert np.mean(theirs) < 6.5
    assert np.mean(ours) > 8


def longest(tree, answer):
    """How many tokens of an answer are a path of the tree."""
    children = {
        (parent, token): node for node, (parent, token) in enumerate(zip(tree.parents, tree.tokens, strict=True))
    }
    node = length = 0
    for token in answer:
        node = children.get((node, token))
        if node is None:
            break
        length += 1
    return length


@pytest.mark.parametrize("bad", [{"anchors": 0}, {"distill": 1.5}])
def test_settings_that_make_no_sense(bad) -> None:
    with pytest.raises(BastionError, match="anchors must be"):
        SpecBlockSettings(**bad)


@pytest.mark.parametrize("sizes", [{"layers": 0}, {"positions": 0}, {"passes": 0}, {"draft_vocab": 97}])
def test_sizes_that_make_no_sense(toy, sizes) -> None:
    with pytest.raises(BastionError, match=r"a drafter has|passes is 0|draft vocabulary must"):
        new_model(toy[0], toy[1], **sizes)
