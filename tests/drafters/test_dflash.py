"""The DFlash drafter against the reference implementation's numbers."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from bastion.drafters.base import DraftContext, Frontier
from bastion.drafters.dflash import DFlashConfig, DFlashDrafter, DFlashModel, load_model, save_model
from bastion.drafters.dflash.model import sliding_visible
from bastion.drafters.marginal import MarginalProposal
from dflash_support import CPU, close, edited, rounds, small_config, stub, tokens_before


@pytest.fixture(params=["qwen3", "llama"])
def folder(request: pytest.FixtureRequest, shared: Path) -> Path:
    return shared / "fixtures" / "dflash_drafter" / request.param


@pytest.fixture
def qwen3(shared: Path) -> Path:
    return shared / "fixtures" / "dflash_drafter" / "qwen3"


def test_every_round_matches_the_reference(folder: Path) -> None:
    target = stub(folder)
    drafter = DFlashDrafter.load(folder / "drafter", target)
    for prompt in rounds(load_file(folder / "io.safetensors")):
        context = DraftContext(tokens=[])
        for reference in prompt:
            assert (reference["block_ids"][1:] == drafter.model.config.mask_token).all()
            context.tokens = tokens_before(reference["block_ids"][0], reference["start"])
            context.features = list(reference["context_features"].split(5))
            (proposal,) = drafter.propose([context])
            assert context.features == []
            assert proposal.depth == drafter.depth == len(reference["draft_logits"])
            close(proposal.log_probs, reference["draft_logits"].log_softmax(-1))
            start = int(reference["start"])
            assert context.memory.length == start
            for layer in range(drafter.model.config.layers):
                if (name := f"cache_after.layer{layer}") + ".k" in reference:
                    close(context.memory.buffer[layer, 0, :, :start], reference[name + ".k"])
                    close(context.memory.buffer[layer, 1, :, :start], reference[name + ".v"])


def test_hidden_states_match_the_reference_with_and_without_a_cache(folder: Path) -> None:
    target, model = stub(folder), load_model(folder / "drafter", CPU, torch.float32)
    for prompt in rounds(load_file(folder / "io.safetensors")):
        cache, seen = model.new_cache(), []
        for reference in prompt:
            seen.append(reference["context_features"])
            block, start = target.embed(reference["block_ids"]), int(reference["start"])
            with torch.no_grad():
                model.read(cache, reference["context_features"])
                hidden = model.draft(cache, block)
                close(hidden, reference["draft_hidden"])
                close(target.head(hidden[1:]), reference["draft_logits"])
                positions, mask = torch.arange(start + len(block)), torch.ones(len(block), start + len(block))
                whole = model(block, positions[start:], torch.cat(seen), positions[:start], [mask.bool()])
            close(whole, reference["draft_hidden"])


def test_rope_frequencies_match_the_reference(folder: Path) -> None:
    numbers = load_file(folder / "io.safetensors")
    rotary = load_model(folder / "drafter", CPU, torch.float32).rotary
    torch.testing.assert_close(rotary.inverse_frequencies, numbers["rope.drafter_inv_freq"], rtol=1e-6, atol=0)
    assert rotary.attention_scaling == pytest.approx(float(numbers["rope.drafter_attention_scaling"]))


def test_positions_follow_a_model_that_is_cast_after_use(qwen3: Path) -> None:
    model = DFlashModel(small_config(qwen3))
    for dtype in (torch.float32, torch.bfloat16):
        model.to(dtype)
        with torch.no_grad():
            hidden = model.draft(model.new_cache(), torch.randn(8, 64, dtype=dtype))
        assert hidden.dtype == dtype


def test_llama_drafter_without_rope_scaling_matches_the_reference(shared: Path, tmp_path: Path) -> None:
    folder = shared / "fixtures" / "dflash_drafter" / "llama"
    numbers = load_file(folder / "io.safetensors")
    checkpoint = edited(folder / "drafter", tmp_path / "drafter", rope_scaling=None)
    drafter = DFlashDrafter.load(checkpoint, stub(folder))
    torch.testing.assert_close(
        drafter.model.rotary.inverse_frequencies, numbers["rope.noscale_inv_freq"], rtol=1e-6, atol=0
    )
    context, compared = DraftContext(tokens=[]), 0
    for reference in rounds(numbers)[1]:
        context.tokens = tokens_before(reference["block_ids"][0], reference["start"])
        context.features = [reference["context_features"]]
        (proposal,) = drafter.propose([context])
        if "noscale.draft_logits" in reference:
            close(proposal.log_probs, reference["noscale.draft_logits"].log_softmax(-1))
            compared += 1
    assert compared


def test_rope_parameters_spelling_is_read_like_rope_theta_and_scaling(shared: Path) -> None:
    path = shared / "fixtures" / "dflash_drafter" / "llama" / "drafter" / "config.json"
    old = json.loads(path.read_text())
    new = {key: value for key, value in old.items() if key not in ("rope_theta", "rope_scaling")}
    new["rope_parameters"] = old["rope_scaling"] | {"rope_theta": old["rope_theta"]}
    before, after = DFlashModel(DFlashConfig.from_dict(old)), DFlashModel(DFlashConfig.from_dict(new))
    assert after.rotary.kind == "llama3"
    assert torch.equal(before.rotary.inverse_frequencies, after.rotary.inverse_frequencies)


def test_feature_layers_are_the_outputs_that_the_reference_reads(folder: Path) -> None:
    numbers = load_file(folder / "io.safetensors")
    drafter = DFlashDrafter.load(folder / "drafter", stub(folder))
    states = numbers["p0.prefill.all_hidden_states"]
    features = torch.cat([states[i + 1] for i in drafter.feature_layers], -1)
    assert torch.equal(features, numbers["p0.round0.context_features"])


def test_sequences_drafted_together_get_what_each_gets_alone(qwen3: Path) -> None:
    target = stub(qwen3)
    drafter = DFlashDrafter.load(qwen3 / "drafter", target)
    first, second = (prompt[0] for prompt in rounds(load_file(qwen3 / "io.safetensors")))

    def contexts() -> list[DraftContext]:
        return [
            DraftContext(tokens_before(r["block_ids"][0], r["start"]), 0.0, [r["context_features"]])
            for r in (first, second)
        ]

    target.asked.clear()
    together = drafter.propose(contexts())
    assert target.asked == [2 * drafter.depth]
    for proposal, context in zip(together, contexts(), strict=True):
        close(proposal.log_probs, drafter.propose([context])[0].log_probs)


@pytest.mark.parametrize(("temperature", "divisor"), [(0.0, 1.0), (0.5, 0.5), (2.0, 2.0)])
def test_the_draft_is_taken_at_the_temperature(qwen3: Path, temperature: float, divisor: float) -> None:
    reference = rounds(load_file(qwen3 / "io.safetensors"))[0][0]
    drafter = DFlashDrafter.load(qwen3 / "drafter", stub(qwen3))
    context = DraftContext(
        tokens_before(reference["block_ids"][0], reference["start"]),
        temperature,
        [reference["context_features"]],
    )
    (proposal,) = drafter.propose([context])
    close(proposal.log_probs, (reference["draft_logits"] / divisor).log_softmax(-1))
    assert proposal.log_probs.max() <= 0


def test_a_root_without_context_and_a_context_beyond_the_first_buffer(qwen3: Path) -> None:
    drafter = DFlashDrafter.load(qwen3 / "drafter", stub(qwen3))
    features = torch.randn(700, 192)
    context = DraftContext([3])
    assert drafter.propose([context])[0].log_probs.isfinite().all()
    for end in (1, 2, 255, 256, 700):  # the buffer starts with room for 256
        context.tokens = [0] * end + [3]
        context.features = [features[context.memory.length : end]]
        grown = drafter.propose([context])[0].log_probs
    at_once = drafter.propose([DraftContext(context.tokens, 0.0, [features])])[0].log_probs
    close(grown, at_once)


def test_features_that_do_not_reach_the_root_are_refused(qwen3: Path) -> None:
    drafter = DFlashDrafter.load(qwen3 / "drafter", stub(qwen3))
    with pytest.raises(ValueError, match="4 tokens precede the root, but features came for 3"):
        drafter.propose([DraftContext([1, 2, 3, 4, 5], 0.0, [torch.randn(3, 192)])])


def test_reduced_vocabulary_uses_those_rows_of_the_targets_head(qwen3: Path, tmp_path: Path) -> None:
    reference = rounds(load_file(qwen3 / "io.safetensors"))[0][0]
    ids = torch.arange(512)[torch.randperm(512)[:100]].sort().values
    tensors = load_file(qwen3 / "drafter" / "model.safetensors")
    tensors["d2t"] = ids - torch.arange(100)
    checkpoint = edited(qwen3 / "drafter", tmp_path / "drafter")
    seen = torch.zeros(512, dtype=torch.bool)
    seen[ids] = True
    (checkpoint / "model.safetensors").unlink()
    save_file(tensors | {"t2d": seen}, checkpoint / "model.safetensors")
    save_model(load_model(checkpoint, CPU, torch.float32), tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["draft_vocab_size"] == 100

    drafter = DFlashDrafter.load(tmp_path / "saved", stub(qwen3))
    context = DraftContext(tokens_before(reference["block_ids"][0], reference["start"]))
    context.features = [reference["context_features"]]
    (proposal,) = drafter.propose([context])
    logits = reference["draft_logits"][:, ids]
    close(proposal.log_probs, logits.log_softmax(-1))
    root = Frontier(0, np.array([5]), np.array([0]))
    assert proposal.expand(root, 4).tokens[0].tolist() == ids[logits[0].topk(4).indices].tolist()


def test_sliding_window_mask_is_the_training_mask(shared: Path) -> None:
    numbers = load_file(shared / "fixtures" / "dflash_training_mask" / "io.safetensors")
    window, length, size = 12, 40, 8
    for anchors, keep, mask in zip(
        numbers["anchor_positions"],
        numbers["block_keep_mask"],
        numbers["attention_mask_sliding"],
        strict=True,
    ):
        for block, anchor in enumerate(anchors[keep].tolist()):
            rows = mask[block * size : (block + 1) * size]
            first = max(0, anchor - window + 1)
            own = rows[:, length + block * size : length + (block + 1) * size]
            assert torch.equal(torch.cat((rows[:, first:anchor], own), 1), sliding_visible(anchor, size, window))
            assert not rows[:, :first].any()


def test_sliding_layers_draft_what_the_training_forward_computes(qwen3: Path) -> None:
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    config = small_config(qwen3, layer_types=kinds, sliding_window=12, use_sliding_window=True)
    model, full = DFlashModel(config), DFlashModel(small_config(qwen3))
    full.load_state_dict(model.state_dict())
    features, block = torch.randn(30, 192), torch.randn(8, 64)
    cache = model.new_cache()
    for start in (5, 11, 12, 30):  # shorter than the window, at its edges, longer
        mask = torch.ones(8, start + 8, dtype=torch.bool)
        distance = torch.arange(start, start + 8)[:, None] - torch.arange(start + 8)
        sliding = (distance >= 0) & (distance < 12)
        positions = torch.arange(start + 8)
        inputs = (block, positions[start:], features[:start], positions[:start], [mask])
        with torch.no_grad():
            model.read(cache, features[cache.length : start])
            drafted = model.draft(cache, block)
            close(drafted, model(*inputs, [sliding]))
            assert (drafted - full(*inputs)).abs().max() > 1e-3
    with pytest.raises(ValueError, match="sliding_masks"):
        model(*inputs)


def test_training_forward_matches_the_reference_and_reaches_every_weight(shared: Path, qwen3: Path) -> None:
    numbers = load_file(shared / "fixtures" / "dflash_training_mask" / "io.safetensors")
    target, model = stub(qwen3), load_model(qwen3 / "drafter", CPU, torch.float32)
    size, length = model.config.block_size, numbers["step.input_ids"].shape[1]
    # A cache grown under inference mode must not spoil a later training step.
    with torch.inference_mode():
        model.rotary.at(torch.arange(600))
    for sequence, anchors in enumerate(numbers["step.anchor_positions"].tolist()):
        ids = torch.full((len(anchors), size), model.config.mask_token)
        ids[:, 0] = numbers["step.input_ids"][sequence][anchors]
        starts = torch.tensor(anchors).repeat_interleave(size)
        positions = starts + torch.arange(size).repeat(len(anchors))
        own = torch.block_diag(*torch.ones(len(anchors), size, size)).bool()
        mask = torch.cat((torch.arange(length) < starts[:, None], own), 1)
        hidden = model(
            target.embed(ids).flatten(0, 1),
            positions,
            numbers["step.target_features"][sequence],
            torch.arange(length),
            [mask],
        )
        real = starts > 0  # anchor 0 stands for a padded block, which the reference masks completely
        close(hidden[real], numbers["step.draft_hidden"][sequence][real])
        hidden.square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in model.parameters())


def test_a_bfloat16_drafter_serves_a_float32_target(qwen3: Path) -> None:
    reference = rounds(load_file(qwen3 / "io.safetensors"))[0][0]
    drafter = DFlashDrafter.load(qwen3 / "drafter", stub(qwen3), dtype=torch.bfloat16)
    context = DraftContext(tokens_before(reference["block_ids"][0], reference["start"]))
    context.features = [reference["context_features"]]
    (proposal,) = drafter.propose([context])
    assert context.memory.buffer.dtype == torch.bfloat16
    assert proposal.log_probs.dtype == torch.float32
    expected = reference["draft_logits"].log_softmax(-1)
    assert (proposal.log_probs - expected).abs().mean() < 0.1


def test_marginal_proposal_ranks_each_depth_whatever_the_parent() -> None:
    log_probs = torch.randn(3, 20).log_softmax(-1)
    proposal = MarginalProposal(log_probs)
    for depth, nodes, width in ((0, 1, 4), (1, 5, 9), (2, 2, 50), (1, 1, 2)):
        frontier = Frontier(depth, *[np.zeros(nodes, np.int64)] * 2)
        candidates = proposal.expand(frontier, width)
        order = log_probs[depth].argsort(descending=True)[:width]
        assert candidates.tokens.shape == candidates.log_probs.shape == (nodes, min(width, 20))
        assert (candidates.tokens == order.numpy()).all()
        assert (candidates.log_probs == log_probs[depth][order].numpy()).all()
