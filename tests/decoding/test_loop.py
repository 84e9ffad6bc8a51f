"""Speculative decoding writes what plain decoding writes."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig

from bastion.cost.ceilings import Ceilings
from bastion.cost.fit import Curve, MeasuredProfile
from bastion.cost.roofline import CalibratedRoofline
from bastion.decoding.acceptance import walk
from bastion.decoding.budget import Chain, FixedBudget, Plain, RoundCost, Throughput
from bastion.decoding.loop import decode, prefill
from bastion.decoding.tree import DraftTree
from bastion.drafters.dflash.config import DFlashConfig
from bastion.drafters.dflash.drafter import DFlashDrafter
from bastion.drafters.ngram.drafter import NgramDrafter
from bastion.targets.base import ModelShape
from bastion.targets.checkpoint import SafetensorsFolder
from bastion.targets.decoder import DecoderTarget
from tiny import CPU, FixedDrafter, LinearCost, generation, make_model, make_target

POLICIES = {
    "chain": Chain(),
    "fixed:1": FixedBudget(1),
    "fixed:12": FixedBudget(12),
    "throughput": Throughput(RoundCost(LinearCost(1.0, 0.02), 0.1, 0.1), 32),
}


def write(target, drafter, policy, *generations):
    target.set_feature_layers(drafter.feature_layers if drafter else ())
    for _ in decode(target, drafter, policy, generations):
        pass
    return [one.stream.tokens for one in generations]


@pytest.fixture(scope="module")
def target():
    return make_target(make_model())


@pytest.fixture(scope="module")
def drafters(target):
    marginals = torch.randn(5, 96, generator=torch.Generator().manual_seed(1)).log_softmax(-1)
    return {"ngram": NgramDrafter(), "marginal": FixedDrafter(marginals)}


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "top_p": 0.95, "seed": 11}, {"repetition_penalty": 1.3}])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", ["ngram", "marginal"])
def test_same_tokens_as_plain_decoding(target, drafters, name, policy, sampling):
    """Above temperature 0 too: the n-th token depends on the seed and the text, not on the rounds."""
    prompt = [5, 9, 11, 5, 9, 11, 5, 9]
    (plain,) = write(target, None, Plain(), generation(target, prompt, 48, **sampling))
    (tree,) = write(target, drafters[name], POLICIES[policy], generation(target, prompt, 48, **sampling))
    assert tree == plain


def test_plain_decoding_is_that_of_transformers():
    model = make_model("qwen3")
    prompt = torch.randint(2, 96, (1, 12))
    reference = model.generate(prompt, max_new_tokens=40, do_sample=False)[0, 12:].tolist()
    target = make_target(model)
    (ours,) = write(target, None, Plain(), generation(target, prompt[0].tolist(), 40, eos=[1]))
    assert ours == reference


@settings(deadline=None, max_examples=15)
@given(st.lists(st.lists(st.integers(2, 95), min_size=1, max_size=20), min_size=2, max_size=4), st.data())
def test_a_batch_of_unequal_texts_is_each_text_alone(target, drafters, prompts, data):
    drafter = drafters[data.draw(st.sampled_from(["ngram", "marginal"]))]
    policy = POLICIES[data.draw(st.sampled_from(sorted(POLICIES)))]
    lengths = data.draw(st.lists(st.integers(1, 15), min_size=len(prompts), max_size=len(prompts)))
    batch = [generation(target, prompt, n) for prompt, n in zip(prompts, lengths, strict=True)]
    together = write(target, drafter, policy, *batch)
    for prompt, n, tokens in zip(prompts, lengths, together, strict=True):
        assert tokens == write(target, None, Plain(), generation(target, prompt, n))[0]


def test_long_prompts_are_read_in_pieces(target, monkeypatch):
    prompt = torch.randint(2, 96, (45,)).tolist()
    whole = write(target, None, Plain(), generation(target, prompt, 10))
    monkeypatch.setattr("bastion.decoding.loop.PREFILL_ROWS", 7)
    assert write(target, None, Plain(), generation(target, prompt, 10)) == whole


def test_prompts_are_read_together_in_passes_of_bounded_size(target, drafters, monkeypatch):
    monkeypatch.setattr("bastion.decoding.loop.PREFILL_ROWS", 10)
    prompts = [[5 + n] * n for n in (4, 5, 3, 23, 6, 2, 9)]
    passes, forward = [], target.forward
    with monkeypatch.context() as patch:
        patch.setattr(target, "forward", lambda rows: passes.append([len(r.tokens) for r in rows]) or forward(rows))
        batch = [generation(target, prompt, 8) for prompt in prompts]
        prefill(target, *batch, feature_layers=(1,))
    assert passes == [[4, 5], [3], [10], [10], [3, 6], [2], [9]]
    for prompt, one in zip(prompts, batch, strict=True):
        alone = generation(target, prompt, 8)
        prefill(target, alone, feature_layers=(1,))
        assert one.stream.tokens == alone.stream.tokens
        assert one.stats.prompt_tokens == len(prompt) == one.cache.length
        assert one.stats.prefill_seconds > 0
        assert torch.allclose(torch.cat(one.draft.features), torch.cat(alone.draft.features), atol=1e-5)


def test_stops_at_the_first_end_id_inside_a_round(target, drafters):
    prompt = [5, 9, 11]
    (plain,) = write(target, None, Plain(), generation(target, prompt, 48))
    end = plain[20]
    expected = plain[: plain.index(end) + 1]
    for policy in POLICIES.values():
        one = generation(target, prompt, 48, eos=[end])
        assert write(target, drafters["ngram"], policy, one) == [expected]
        assert one.stream.finish_reason == "eos"


def test_no_pass_is_spent_beyond_the_last_token(target, drafters):
    """The last round needs no draft, and no tree is deeper than the tokens that are still wanted."""
    one = generation(target, [5, 9], 4)
    records = [r for _, _, r in decode(target, drafters["marginal"], FixedBudget(8), [one]) if r]
    written = 1
    for record in records:
        assert int(record.tree.depths.max()) <= 4 - written - 1
        written += record.accepted_length
    assert written == 4


def test_walk_follows_only_children_of_the_node_it_is_at():
    # 0 -> 1 (token 5), 2 (token 6); 1 -> 3 (token 6); 2 -> 4 (token 5)
    tree = DraftTree(
        np.array([9, 5, 6, 6, 5]), np.array([-1, 0, 0, 1, 2]), np.array([0, 1, 1, 2, 2]), np.zeros(5, np.float32)
    )
    wanted = {0: 6, 1: 0, 2: 5, 3: 0, 4: 7}
    outcome = walk(tree, lambda node, path: wanted[node])
    assert outcome.nodes == [0, 2, 4]
    assert outcome.tokens == [6, 5, 7]


def reference_models(shared, arch):
    folder = shared / "fixtures/dflash_drafter" / arch
    config = AutoConfig.from_pretrained(folder / "target")
    weights = SafetensorsFolder(folder / "target")
    target = DecoderTarget(config, weights, CPU, torch.float32, "fixture", "digest")
    return target, DFlashDrafter.load(folder / "drafter", target)


@pytest.mark.parametrize("arch", ["qwen3", "llama"])
def test_same_rounds_as_the_reference_implementations(shared, arch):
    """Tokens, accepted lengths and tree sizes of DFlash, DDTree, CaDDTree and BASTION."""
    target, drafter = reference_models(shared, arch)
    info = json.loads((shared / f"fixtures/dflash_generate/{arch}.json").read_text())
    roofline = json.loads((shared / "fixtures/roofline/roofline.json").read_text())
    cost = info["caddtree_cost"]
    curves = [
        Curve(1, tuple(range(1, 258)), tuple(0.02 + 1e-4 * max(0, n - 20) for n in range(257))),
        Curve(100, tuple(range(1, 258)), tuple(0.021 + 1.5e-4 * max(0, n - 12) for n in range(257))),
    ]
    caddtree = Throughput(RoundCost(MeasuredProfile(tuple(curves)), cost["draft_cost_s"], 0), cost["max_tree_budget"])

    def run(prompt, policy, reference, sizes=None):
        # Longer than theirs: they draft beyond the end of the text, we do not.
        one = generation(target, prompt["prompt_ids"], prompt["max_new_tokens"] + 12)
        (tokens,) = write(target, drafter, policy, one)
        rounds = len(reference["acceptance_lengths"])
        assert tokens[: prompt["max_new_tokens"]] == prompt["ar_output_ids"] == reference["output_ids"]
        assert one.stats.accepted_lengths[:rounds] == reference["acceptance_lengths"]
        if sizes is not None:
            assert one.stats.tree_sizes[:rounds] == sizes

    for prompt in info["prompts"][:4]:
        run(prompt, Chain(), prompt["dflash"])
        run(prompt, caddtree, prompt["caddtree"], prompt["caddtree"]["budgets"])
        for reference in prompt["ddtree"]:
            run(prompt, FixedBudget(reference["budget"]), reference)
        for reference in prompt["bastion"]:
            if reference["variant"] != "exact_stop":
                continue
            (case,) = [c for c in info["cost_sets"] if c["name"] == reference["cost_set"]]
            specification = roofline["gpu_specs"][case["cost_gpu_type"]]
            ceilings = Ceilings(specification["peak_throughput_bf16"], specification["memory_bandwidth"])
            sizes = roofline["model_args"][case["cost_model_name"]]
            shape = ModelShape(*(sizes[name] for name in ("L", "h", "n_q", "n_kv", "d", "h_ffn", "V")))
            verify = CalibratedRoofline(
                shape, 2, ceilings, *(case["params"][name] for name in ("alpha_m", "beta_m", "alpha_c", "beta_c"))
            )
            policy = Throughput(RoundCost(verify, case["draft"], case["nonverify"]), 700)
            # Their tree sizes count the root.
            run(prompt, policy, reference, [size - 1 for size in reference["tree_sizes"]])


@pytest.mark.parametrize("policy", POLICIES)
def test_a_random_dflash_drafter_changes_nothing(shared, policy):
    target, drafter = reference_models(shared, "qwen3")
    for parameter in drafter.model.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    assert isinstance(drafter.model.config, DFlashConfig)
    for seed in range(3):
        prompt = torch.randint(500, (20,), generator=torch.Generator().manual_seed(seed)).tolist()
        (plain,) = write(target, None, Plain(), generation(target, prompt, 40))
        assert write(target, drafter, POLICIES[policy], generation(target, prompt, 40)) == [plain]
