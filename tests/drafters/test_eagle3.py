"""EAGLE-3 against the reference implementation's numbers."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from bastion.decoding.growth import grow
from bastion.drafters.base import DraftContext, Frontier
from bastion.drafters.checkpoint import fetch
from bastion.drafters.eagle3 import Eagle3Config, Eagle3Drafter, load_model, save_model
from bastion.errors import BastionError
from bastion.targets.base import Rows
from dflash_support import CPU, close, edited
from tiny import make_target


@pytest.fixture(scope="module")
def fixture(shared):
    folder = shared / "fixtures" / "eagle3"
    target = make_target(AutoModelForCausalLM.from_pretrained(folder / "target"))
    return folder, target, load_file(folder / "io.safetensors")


def make(fixture, **settings):
    folder, target, _ = fixture
    return Eagle3Drafter(load_model(folder / "draft", CPU, torch.float32), target, **settings)


def first_round(fixture):
    _, _, numbers = fixture
    drafter = make(fixture, depth=4, beam=4)
    tokens = numbers["prompt_ids"].tolist() + numbers["next_token"].tolist()
    context = DraftContext(tokens, features=[numbers["fused_features"]])
    return drafter, context, drafter.propose([context])[0], numbers


def test_first_pass_and_cache(fixture):
    drafter, context, _, numbers = first_round(fixture)
    model = drafter.model
    close(model.lm_head(model.norm(context.memory.hidden))[0].detach(), numbers["draft_first_logits"])
    cache = context.memory.cache
    close(cache.buffer[0, 0, :, : cache.length], numbers["draft_kv_k"])
    close(cache.buffer[0, 1, :, : cache.length], numbers["draft_kv_v"])


def test_dynamic_tree(fixture):
    _, _, proposal, numbers = first_round(fixture)
    tree = grow(proposal, int(numbers["next_token"]), 15)
    check_tree(tree, numbers["tree_tokens"], numbers["tree_positions"], numbers["tree_mask"])
    assert proposal.passes == 4


def test_later_levels(fixture):
    """Each level's rows read the context, their ancestors and themselves, at their own depth's position."""
    _, _, proposal, numbers = first_round(fixture)
    proposal.expand(Frontier(0, np.zeros(1, np.int64), np.zeros(1, np.int64)), 4)
    tokens, parents = numbers["tree_tokens"].numpy(), numbers["tree_parents"].numpy()
    level = np.flatnonzero(parents == 0)
    found = proposal.expand(Frontier(1, tokens[level].astype(np.int64), np.zeros(4, np.int64)), 96)
    expected = numbers["expand_logits.0"].log_softmax(-1).topk(4).values
    close(torch.from_numpy(found.log_probs), expected)


def test_the_next_round_reads_the_accepted_tokens_features(fixture):
    drafter, context, proposal, numbers = first_round(fixture)
    grow(proposal, int(numbers["next_token"]), 15)
    context.tokens += numbers["round2.accepted_tokens"].tolist()[1:] + numbers["round2.bonus_token"].tolist()
    context.features.append(numbers["round2.features"])
    proposal = drafter.propose([context])[0]
    model = drafter.model
    close(model.lm_head(model.norm(context.memory.hidden))[0].detach(), numbers["round2.draft_first_logits"])
    tree = grow(proposal, int(numbers["round2.bonus_token"]), 15)
    check_tree(tree, numbers["round2.tree_tokens"], numbers["round2.tree_positions"], numbers["round2.tree_mask"])


def test_features_are_the_inputs_of_the_reference_layers(fixture):
    """Where the file names no layers: those of SafeAILab's code, whose numbers the fixture has."""
    drafter, _, _, numbers = first_round(fixture)
    target = fixture[1]
    assert drafter.feature_layers == (1, 3, 4)
    target.set_feature_layers(drafter.feature_layers)
    tokens = numbers["prompt_ids"].long()
    (found,) = target.forward([Rows(tokens, torch.arange(len(tokens)), target.new_cache())])
    target.set_feature_layers(())
    close(found.features, numbers["fused_features"])


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({}, ()),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 5]}}, (1, 3, 5)),  # outputs
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 4, 6]}}, (1, 3, 5)),  # inputs
        ({"eagle_aux_hidden_state_layer_ids": [2, 4, 6]}, (1, 3, 5)),
        ({"eagle_config": {"target_layer_ids": [0, 3, 5], "eagle_aux_hidden_state_layer_ids": [1, 4, 6]}}, (0, 3, 5)),
    ],
)
def test_both_ways_to_name_layers(fixture, changes, layers):
    raw = json.loads((fixture[0] / "draft" / "config.json").read_text())
    assert Eagle3Config.from_dict(raw | changes).target_layers == layers


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 2}, "num_hidden_layers 1"),
        ({"norm_before_residual": True}, "norm_before_residual"),
        ({"draft_vocab_size": 1000}, "draft_vocab_size"),
        ({"draft_vocab_size": 95}, "shape"),
        ({"hidden_size": 60}, "does not describe a Llama body"),
        ({"eagle_config": {"target_layer_ids": [0, 3]}}, "names 2 target layers"),
        ({"eagle_config": {"target_layer_ids": "all"}}, "layer ids"),
        ({"eagle_config": {"target_layer_ids": [0, 3, 9]}}, "reads layers"),
        ({"vocab_size": 600}, "vocabulary of 600"),
    ],
)
def test_what_does_not_fit_is_refused(fixture, tmp_path, changes, message):
    folder, target, _ = fixture
    with pytest.raises(BastionError, match=message):
        Eagle3Drafter.load(edited(folder / "draft", tmp_path / "draft", **changes), target)


def test_what_is_saved_can_be_read_again(fixture, tmp_path):
    drafter = make(fixture)
    save_model(drafter.model, tmp_path)
    assert load_file(tmp_path / "model.safetensors").keys() == load_file(fixture[0] / "draft/model.safetensors").keys()
    assert Eagle3Drafter(load_model(tmp_path, CPU, torch.float32), fixture[1]).model.token_ids().tolist() == (
        drafter.model.token_ids().tolist()
    )


def check_tree(tree, tokens, positions, mask):
    """The reference numbers nodes by generation: compare paths."""

    def paths(tokens, mask, depths):
        rows = (np.flatnonzero(row) for row in mask)
        return {tuple(tokens[sorted(row, key=lambda node: depths[node])].tolist()) for row in rows}

    ours = paths(tree.tokens, tree.visible(), tree.depths)
    assert ours == paths(tokens.numpy(), mask.numpy(), positions.numpy())


def pickled(fixture, folder, content):
    """The fixture's checkpoint with `content` in the file of weights that SafeAILab's first checkpoints have."""
    edited(fixture[0] / "draft", folder)
    (folder / "model.safetensors").unlink()
    torch.save(content, folder / "pytorch_model.bin")
    return folder


def test_pickled_weights_are_read(fixture, tmp_path):
    tensors = load_file(fixture[0] / "draft/model.safetensors")
    first = load_model(pickled(fixture, tmp_path / "draft", tensors), CPU, torch.float32)
    assert first.digest() == make(fixture).model.digest()


def test_a_checkpoint_of_the_hub_is_pickled_only_if_it_has_no_safetensors(fixture, tmp_path, monkeypatch):
    asked = []

    def from_hub(source, use, allow):
        asked.append(allow)
        return pickled(fixture, tmp_path / f"draft{len(asked)}", {})

    monkeypatch.setattr("bastion.drafters.checkpoint.from_hub", from_hub)
    fetch("owner/pickled")
    assert [("pytorch_model.bin" in names) for names in asked] == [False, True]
    monkeypatch.setattr("bastion.drafters.checkpoint.from_hub", lambda source, use, allow: fixture[0] / "draft")
    assert fetch("owner/safe") == fixture[0] / "draft"


class Exploit:
    def __reduce__(self):
        return print, ("executed",)


@pytest.mark.parametrize("content", [{"fc.weight": Exploit()}, [torch.zeros(2)], {"step": 5}, {1: torch.zeros(2)}])
def test_pickled_files_are_not_executed(fixture, tmp_path, capsys, content):
    with pytest.raises(BastionError, match="cannot be read"):
        load_model(pickled(fixture, tmp_path / "draft", content), CPU, torch.float32)
    assert "executed" not in capsys.readouterr().out


def test_a_damaged_pickled_file_is_one_line(fixture, tmp_path):
    folder = pickled(fixture, tmp_path / "draft", {})
    (folder / "pytorch_model.bin").write_bytes(b"half a file")
    with pytest.raises(BastionError, match="fetch the checkpoint again") as caught:
        load_model(folder, CPU, torch.float32)
    assert "\n" not in str(caught.value)
