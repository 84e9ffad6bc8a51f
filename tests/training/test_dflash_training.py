"""The recipe of DFlash against the reference's numbers, and a drafter of a toy target that learns."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from bastion.drafters.dflash import load_model
from bastion.drafters.dflash.training import (
    DFlashRecipe,
    DFlashSettings,
    block_mask,
    existing_model,
    mask_token,
    new_model,
)
from bastion.errors import BastionError
from bastion.training.data import Conversation
from bastion.training.features import compute_features
from bastion.training.ingredients import block_labels, frequent_tokens, head_weights, sample_anchors, target_layers
from bastion.training.losses import IGNORED, decay_loss, distillation, dpace_loss, label_log_probs
from dflash_support import CPU, close, stub
from tiny import make_target
from training_support import counting

SIZE = 8


@pytest.fixture
def numbers(shared: Path) -> dict[str, torch.Tensor]:
    return load_file(shared / "fixtures" / "dflash_training_mask" / "io.safetensors")


@pytest.fixture
def losses(shared: Path) -> dict:
    return json.loads((shared / "fixtures" / "dflash_training_mask" / "losses.json").read_text())["losses"]


@pytest.mark.parametrize(("name", "window"), [("attention_mask", None), ("attention_mask_sliding", 12)])
def test_the_mask_is_the_references(numbers: dict, name: str, window: int | None) -> None:
    for anchors, keep, expected in zip(
        numbers["anchor_positions"], numbers["block_keep_mask"], numbers[name], strict=True
    ):
        rows = keep.repeat_interleave(SIZE)
        columns = torch.cat((torch.ones(40, dtype=torch.bool), rows))
        assert torch.equal(block_mask(anchors[keep].long(), 40, SIZE, window), expected[rows][:, columns])


def reference_labels(numbers: dict, sequence: int) -> torch.Tensor:
    """The reference's labels of the real blocks, slot 0 left out."""
    return numbers["labels"][sequence][numbers["block_keep_mask"][sequence]][:, 1:].long()


def test_labels_are_the_references_where_the_answer_is_one_piece(numbers: dict) -> None:
    compared = 0
    for sequence in range(2):
        keep, mask = numbers["block_keep_mask"][sequence], numbers["loss_mask"][sequence]
        ids, anchors = numbers["input_ids"][sequence].long(), numbers["anchor_positions"][sequence][keep].long()
        mine = block_labels(ids, 0, anchors, SIZE)
        positions = (anchors[:, None] + torch.arange(1, SIZE)).clamp(max=39)
        expected = reference_labels(numbers, sequence)
        assert torch.equal(mine.masked_fill(mask[positions] == 0, IGNORED), expected)
        prompt_length = int(mask.nonzero()[0])
        inside = anchors + 1 < prompt_length
        assert (block_labels(ids, prompt_length, anchors, SIZE)[inside, 0] == IGNORED).all()
        compared += len(anchors)
    assert compared >= 8


def test_losses_are_the_references(numbers: dict, losses: dict) -> None:
    of_labels, valid = [], []
    for sequence in range(2):
        labels = reference_labels(numbers, sequence)
        logits = numbers["draft_logits"][sequence][numbers["block_keep_mask"][sequence]][:, 1:]
        of_labels.append(label_log_probs(logits.log_softmax(-1), labels))
        valid.append(labels != IGNORED)
    log_probs, mask = torch.cat(of_labels), torch.cat(valid)
    for gamma, name in ((4.0, "4.0"), (7.0, "7.0"), (None, "None")):
        assert float(decay_loss(log_probs, mask, gamma)) == pytest.approx(
            losses[f"dflash.gamma{name}"]["loss"], rel=1e-5
        )
    # The reference divides by the number of sequences, we by that of blocks.
    mine = float(dpace_loss(log_probs, mask, log_probs)) * len(mask) / 2
    assert mine == pytest.approx(losses["dpace.gammaNone"]["loss"], rel=1e-5)


def test_a_training_step_has_the_references_loss_and_gradients(shared: Path, numbers: dict, losses: dict) -> None:
    folder = shared / "fixtures" / "dflash_drafter" / "qwen3"
    target, model = stub(folder), load_model(folder / "drafter", CPU, torch.float32)
    ids, all_anchors = numbers["step.input_ids"].long(), numbers["step.anchor_positions"].long()

    class Stored:
        def of(self, index: int) -> torch.Tensor:
            return numbers["step.target_features"][index]

        def scale(self) -> torch.Tensor:
            return torch.ones(numbers["step.target_features"].shape[-1])

    left_out = iter(numbers["loss_mask"] == 0)  # the reference's answers have holes

    def with_holes(ids: torch.Tensor, prompt_length: int, anchors: torch.Tensor, size: int) -> torch.Tensor:
        positions = (anchors[:, None] + torch.arange(1, size)).clamp(max=len(ids) - 1)
        return block_labels(ids, prompt_length, anchors, size).masked_fill(next(left_out)[positions], IGNORED)

    conversations = [Conversation(tuple(one.tolist()), 1, "", 0.0) for one in ids]
    recipe = DFlashRecipe(model, target, conversations, Stored(), DFlashSettings(), CPU)
    chosen = iter([anchors[anchors > 0] for anchors in all_anchors])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bastion.training.recipe.sample_anchors", lambda *_: next(chosen))
        patch.setattr("bastion.training.recipe.block_labels", with_holes)
        outcome = recipe.run(model, range(len(ids)), torch.Generator())
    outcome.loss.backward()
    expected = losses["step"]
    assert float(outcome.loss.detach()) == pytest.approx(expected["loss"], rel=1e-5)
    share = (outcome.hits & outcome.present).sum() / outcome.present.sum()
    assert float(share) == pytest.approx(expected["accuracy"], abs=1e-6)
    norms = {name: float(p.grad.norm()) for name, p in model.named_parameters()}
    assert norms == pytest.approx(expected["grad_norms"], rel=1e-3, abs=1e-6)
    close(model.fc.weight.grad, numbers["step.grad.fc.weight"])


def test_target_layers_follow_the_rule() -> None:
    assert target_layers(36) == (1, 9, 17, 25, 33)
    assert target_layers(36, 1) == (18,)
    assert target_layers(30) == (1, 8, 14, 20, 27)
    for layers in (2, 3, 4, 5):
        assert set(target_layers(layers)) <= set(range(layers - 1))  # not every target gives its last layer
        assert target_layers(layers)
    assert target_layers(1) == (0,)


def test_anchors_are_different_positions_of_the_answer() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        anchors = sample_anchors(5, 12, 4, generator).tolist()
        assert anchors == sorted(set(anchors))
        assert len(anchors) == 4
        assert anchors[0] >= 5
        assert anchors[-1] < 12
    assert sample_anchors(5, 8, 100, generator).tolist() == [5, 6, 7]


def test_draft_vocabulary_and_mask_token() -> None:
    conversations = [Conversation((9, 9, 9, 1, 2, 2, 3, 3, 3), 3, "", 0.0), Conversation((9, 2, 95), 1, "", 0.0)]
    assert frequent_tokens(conversations, 2).tolist() == [2, 3]
    with pytest.raises(BastionError, match="4 different tokens"):
        frequent_tokens(conversations, 5)
    assert mask_token(conversations, 96) == 94
    assert mask_token([Conversation((0, 1, 0, 2, 2, 1, 1), 1, "", 0.0)], 3) == 2  # all occur: the rarest, the highest


def test_distillation_is_minus_the_cross_entropy_over_the_tokens_that_can_be_drafted() -> None:
    logits, teacher = torch.randn(3, 5), torch.randn(3, 4)
    ids = torch.tensor([[0, 3, IGNORED, 1], [4, 2, 1, 0], [IGNORED] * 4])
    value = distillation(logits.log_softmax(-1), ids, teacher)
    known = teacher[0, [0, 1, 3]].softmax(0)
    assert float(value[0]) == pytest.approx(float((known * logits[0].log_softmax(-1)[[0, 3, 1]]).sum()), rel=1e-5)
    assert float(value[1]) == pytest.approx(
        float((teacher[1].softmax(0) * logits[1].log_softmax(-1)[[4, 2, 1, 0]]).sum()), rel=1e-5
    )
    assert float(value[2]) == 0


@pytest.mark.parametrize(
    "sizes", [{"layers": 0}, {"block_size": 1}, {"block_size": 1000}, {"draft_vocab": 0}, {"draft_vocab": 97}]
)
def test_sizes_that_make_no_sense_are_refused(sizes: dict) -> None:
    with pytest.raises(BastionError, match=r"a drafter has|draft vocabulary must"):
        new_model(make_target(), [counting(30, 0)], **sizes)


def test_what_is_no_checkpoint_cannot_be_trained_further(tmp_path: Path) -> None:
    for source in ("ngram", str(tmp_path)):
        with pytest.raises(BastionError, match=r"unknown drafter|no config.json"):
            existing_model(source)


def test_head_weights_give_what_the_head_gives() -> None:
    target, ids = make_target(), torch.tensor([3, 8, 90])
    hidden = torch.randn(4, target.shape.hidden)
    weight, bias = head_weights(target, ids, CPU)
    assert bias is None
    close(hidden @ weight.T, target.head(hidden, ids))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss": "mse"}, "unknown loss 'mse'"),
        ({"loss": "dpace", "gamma": 4.0}, "gamma belongs to"),
        ({"distill": 1.5}, "distill between"),
        ({"anchors": 0}, "anchors must be"),
        ({"gamma": float("nan")}, "gamma 0.1 or more"),
    ],
)
def test_settings_that_make_no_sense_are_refused(changes: dict, message: str) -> None:
    with pytest.raises(BastionError, match=message):
        DFlashSettings(**changes)


def test_the_exported_drafter_reads_features_as_they_are(toy, tmp_path: Path) -> None:
    target, conversations, features = toy
    torch.manual_seed(0)
    model = new_model(target, conversations, layers=1, block_size=4)
    raw = model.fc.weight.clone()
    scale = torch.linspace(0.01, 100, len(features.scale()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(features), "scale", lambda self: scale)
        recipe = DFlashRecipe(model, target, conversations, features, DFlashSettings(), CPU)
    close(recipe.model.fc.weight / scale, raw)
    recipe.save(tmp_path)
    torch.testing.assert_close(load_model(tmp_path, CPU, torch.float32).fc.weight, raw, rtol=1e-2, atol=0)
    seen = []
    recipe.run(
        lambda block, positions, read, *rest: seen.append(read) or model(block, positions, read, *rest),
        [0],
        torch.Generator(),
    )
    torch.testing.assert_close(seen[0] * scale, features.of(0)[: len(seen[0])].float())


def test_distillation_reads_what_the_target_said_after_the_token_before(toy) -> None:
    target, conversations, features = toy

    class OneHot:
        """A target that is sure of the very tokens of the text."""

        def of(self, index: int) -> torch.Tensor:
            return features.of(index)

        def scale(self) -> torch.Tensor:
            return features.scale()

        def ranked(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
            ids = torch.tensor(conversations[index].ids)
            following = torch.stack((ids.roll(-1), ids.roll(-1) + 1), 1) % 96
            return following.int(), torch.tensor([[60.0, 0.0]]).expand(len(ids), 2)

    losses = []
    for share in (0.0, 1.0):
        torch.manual_seed(0)
        model = new_model(target, conversations, layers=1, block_size=4)
        settings = DFlashSettings(anchors=8, distill=share)
        recipe = DFlashRecipe(model, target, conversations, OneHot(), settings, CPU)
        losses.append(float(recipe.run(model, range(4), torch.Generator().manual_seed(0)).loss.detach()))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_a_half_precision_target_trains_too(tmp_path: Path) -> None:
    target = make_target(dtype=torch.bfloat16)
    conversations = [counting(30, start) for start in range(8)]
    features = compute_features(target, conversations, (1,), tmp_path)
    model = new_model(target, conversations, layers=1, block_size=4, taps=1)
    recipe = DFlashRecipe(model, target, conversations, features, DFlashSettings(anchors=4), CPU)
    for half in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            loss = recipe.run(model, range(4), torch.Generator()).loss
        loss.backward()
        assert loss.isfinite()
