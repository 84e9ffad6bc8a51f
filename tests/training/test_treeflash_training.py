"""TreeFlash's correction learns what no guess for a position alone can know, and the body stays as it is."""

from pathlib import Path

import pytest
import torch
from accelerate import Accelerator

from bastion.decoding.budget import FixedBudget
from bastion.drafters.dflash import load_model as load_body
from bastion.drafters.dflash import save_model as save_body
from bastion.drafters.dflash.training import DFlashRecipe, DFlashSettings, existing_model
from bastion.drafters.dflash.training import new_model as new_body
from bastion.drafters.treeflash import TreeFlashDrafter
from bastion.drafters.treeflash.checkpoint import load_model
from bastion.drafters.treeflash.training import TreeFlashRecipe, new_model
from bastion.errors import BastionError
from bastion.training.data import Conversation
from bastion.training.features import compute_features
from bastion.training.losses import IGNORED
from bastion.training.simulation import simulate
from bastion.training.trainer import Trainer, TrainerSettings
from dflash_support import CPU
from tiny import make_target

PAIRS = 10  # firsts are tokens 2 .. 11, their seconds 20 .. 29


def couples(seed: int) -> Conversation:
    """A text of random firsts, each followed by the second that belongs to it."""
    firsts = torch.randint(PAIRS, (15,), generator=torch.Generator().manual_seed(seed)).tolist()
    text = [token for first in firsts for token in (2 + first, 20 + first * 3 % PAIRS)]
    return Conversation((90, 40 + seed % 50, *text), 2, "", 0.0)


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory):
    """A random target, texts of couples with their features, and the checkpoint of a random DFlash drafter."""
    torch.manual_seed(0)
    target, conversations = make_target(), [couples(seed) for seed in range(80)]
    body = new_body(target, conversations, layers=1, block_size=4, draft_vocab=20, taps=1)
    folder = tmp_path_factory.mktemp("material")
    features = compute_features(target, conversations, body.config.target_layers, folder / "features", ranked=True)
    save_body(body.to(torch.bfloat16), folder / "body")
    return target, conversations, features, folder / "body"


def make_recipe(material, **settings) -> TreeFlashRecipe:
    target, conversations, features, folder = material
    torch.manual_seed(0)
    model = new_model(existing_model(str(folder)), top_m=10)
    return TreeFlashRecipe(model, target, conversations, features, DFlashSettings(**({"anchors": 8} | settings)), CPU)


def make_trainer(recipe: TreeFlashRecipe, folder: Path, max_steps: int) -> Trainer:
    run = TrainerSettings(
        batch=4, learning_rate=1e-2, max_steps=max_steps, held_back=0.1, evaluate_every=10, checkpoint_every=10
    )
    return Trainer(recipe, run, folder, Accelerator(cpu=True))


@pytest.mark.parametrize("settings", [{}, {"distill": 1.0}, {"loss": "dpace"}])
def test_training_starts_at_the_bodys_own_guesses(material, settings: dict) -> None:
    target, conversations, features, folder = material
    recipe = make_recipe(material, **settings)
    body = DFlashRecipe(existing_model(str(folder)), target, conversations, features, recipe.settings, CPU)
    ours, theirs = (one.run(one.model, range(6), torch.Generator().manual_seed(3)) for one in (recipe, body))
    assert float(ours.loss.detach()) == pytest.approx(float(theirs.loss.detach()), rel=1e-5)
    assert torch.equal(ours.hits, theirs.hits)
    ours.loss.backward()
    assert recipe.model.d.weight.grad.abs().max() > 0
    assert all(parameter.grad is None for parameter in recipe.body.parameters())


def test_a_narrower_correction_is_kept_as_it_is(material, tmp_path) -> None:
    body = existing_model(str(material[3]))
    model = new_model(body, intermediate=12, top_m=10)
    assert model.ar_approximation.d.weight.shape == (body.config.hidden, 12)
    recipe = TreeFlashRecipe(model, *material[:3], DFlashSettings(anchors=8), CPU)
    recipe.save(tmp_path)
    assert load_model(tmp_path, CPU, torch.float32).ar_approximation.d.weight.shape[1] == 12


def test_each_slot_is_corrected_for_the_texts_own_token_before_it(material) -> None:
    recipe = make_recipe(material)
    drafts, seen = recipe.draw(range(6), 3, torch.Generator().manual_seed(1)), []
    blocks = recipe.inputs(drafts)[0].view(len(drafts.tokens), 4, -1)
    assert torch.equal(recipe.embed(drafts.tokens[:, 0]), blocks[:, 0])
    columns = recipe._columns[drafts.tokens[:, 1:]]
    compared = drafts.columns[:, :-1] != IGNORED
    assert torch.equal(columns[compared], drafts.columns[:, :-1][compared])
    recipe.run(
        lambda hidden, normed, previous: seen.append(previous) or hidden, range(6), torch.Generator().manual_seed(1)
    )
    assert torch.equal(seen[0], recipe.embed(drafts.tokens))


def test_it_learns_what_depends_on_the_token_before(material, tmp_path: Path) -> None:
    """Behind a random first no position alone can name the second more often than once in ten."""
    target, conversations, features, folder = material
    recipe = make_recipe(material)
    learner = make_trainer(recipe, tmp_path, 60)
    before = learner.evaluate().summary()["accuracy"]
    learner.train()
    after = learner.evaluate().summary()["accuracy"]
    # Half of the labels are seconds, all known; the other half firsts, of which one in ten is.
    assert max(before) < 0.2
    assert min(after) > 0.45

    drafter = TreeFlashDrafter.load(tmp_path, target)
    body = load_body(folder, CPU, torch.float32)
    for name, tensor in body.state_dict().items():
        if not name.endswith("proj.weight") and name != "fc.weight":  # those are packed
            assert torch.equal(drafter.model.state_dict()[name], tensor), name
    assert torch.equal(recipe.exported().to(torch.bfloat16).fc.weight.float(), body.fc.weight)
    rounds = list(simulate(target, drafter, FixedBudget(20), conversations[:8], features))
    gained = [len(one.record.tokens) for one in rounds if one.limit >= 3]
    # A root that is a first leads to its second for certain, and ten firsts behind it: at least three tokens.
    assert sum(gained) / len(gained) > 2.5


def test_a_resumed_run_ends_with_the_same_weights(material, tmp_path: Path) -> None:
    whole = make_trainer(make_recipe(material), tmp_path / "whole", 20)
    whole.train()

    class KilledError(Exception):
        pass

    def kill(state) -> None:
        if killed.step == 13:
            raise KilledError

    killed = make_trainer(make_recipe(material), tmp_path / "killed", 20)
    with pytest.raises(KilledError):
        killed.train(kill)
    again = make_trainer(make_recipe(material), tmp_path / "killed", 20)
    again.resume()
    assert again.step == 10
    again.train()
    for name, tensor in whole.recipe.model.state_dict().items():
        assert torch.equal(tensor, again.recipe.model.state_dict()[name]), name


def test_a_run_on_another_body_is_not_resumed(material, tmp_path: Path) -> None:
    make_trainer(make_recipe(material), tmp_path, 2).train()
    target, conversations, features, folder = material
    body = existing_model(str(folder))
    with torch.no_grad():
        body.norm.weight[0] += 0.5
    for model, what in (
        (new_model(body, top_m=10), "body"),
        (new_model(existing_model(str(folder)), top_m=9), "body, sizes"),
    ):
        other = TreeFlashRecipe(model, target, conversations, features, DFlashSettings(anchors=8), CPU)
        with pytest.raises(BastionError, match=f"other settings \\({what}\\)"):
            make_trainer(other, tmp_path, 2).resume()


def test_a_top_m_that_makes_no_sense_is_refused(material) -> None:
    with pytest.raises(BastionError, match="top_m is 21, but must be a whole number from 1 to 20"):
        new_model(existing_model(str(material[3])), top_m=21)
