"""Growth against brute force, and against the trees of the reference implementations."""

import itertools
import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from bastion.cost.ceilings import Ceilings
from bastion.cost.fit import Curve, MeasuredProfile
from bastion.cost.roofline import CalibratedRoofline
from bastion.decoding.budget import RoundCost, Throughput
from bastion.decoding.growth import grow
from bastion.decoding.tree import DraftTree
from bastion.drafters.base import Candidates, Outlook
from bastion.drafters.marginal import MarginalProposal
from bastion.targets.base import ModelShape


def paths_of(tree: DraftTree) -> list[tuple[int, ...]]:
    """The token paths of the nodes in order, root left out."""
    return [tuple(tree.tokens[tree.path(node)[1:]].tolist()) for node in range(1, tree.size + 1)]


class ConditionalProposal:
    """Children depend on the path: a table from path to distribution, for brute force."""

    passes = 1
    beam = None

    def __init__(self, table):
        self.table = table
        self.depth = self.ready = max(map(len, table)) + 1
        self.paths = []

    def expand(self, frontier, width):
        if frontier.depth == 0:
            paths = [()]
        else:
            pairs = zip(frontier.rows.tolist(), frontier.tokens.tolist(), strict=True)
            paths = [(*self.paths[row], token) for row, token in pairs]
        log_probs = torch.tensor([self.table[path] for path in paths])
        values, tokens = log_probs.topk(min(width, log_probs.shape[1]))
        self.paths, self.tokens = paths, tokens
        return Candidates(tokens.numpy(), values.numpy())


@st.composite
def conditional_tables(draw):
    vocabulary, depth = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    seed = draw(st.integers(0, 10**6))
    generator = torch.Generator().manual_seed(seed)
    sharpness = draw(st.sampled_from([0.0, 1.0, 5.0, 400.0]))  # 400: probabilities of exactly 1, so ties with parents
    table = {}
    for length in range(depth):
        for path in itertools.product(range(vocabulary), repeat=length):
            logits = torch.randn(vocabulary, generator=generator) * sharpness
            table[path] = logits.log_softmax(0).tolist()
    return table


@settings(deadline=None, max_examples=60)
@given(conditional_tables(), st.integers(1, 40))
def test_growth_keeps_the_most_probable_paths(table, max_nodes):
    tree = grow(ConditionalProposal(table), root=99, max_nodes=max_nodes)
    scores = {}
    for path in table:
        for token, log_prob in enumerate(table[path]):
            if log_prob > -math.inf:
                scores[(*path, token)] = scores.get(path, 0.0) + log_prob
    best = sorted(scores.values(), reverse=True)[:max_nodes]
    assert tree.size == len(best)
    assert tree.log_probs[1:].tolist() == pytest.approx(best, rel=1e-6, abs=1e-4)
    for node, path in enumerate(paths_of(tree), 1):
        assert tree.log_probs[node].item() == pytest.approx(scores[path], rel=1e-6, abs=1e-4)
        assert int(tree.depths[node]) == len(path)
        assert int(tree.parents[node]) < node  # so every prefix of the order is a tree
    assert len(set(paths_of(tree))) == tree.size


@settings(deadline=None, max_examples=40)
@given(conditional_tables(), st.integers(1, 30))
def test_visible_is_ancestor_or_self(table, max_nodes):
    tree = grow(ConditionalProposal(table), root=99, max_nodes=max_nodes)
    expected = np.zeros((tree.size + 1, tree.size + 1), dtype=bool)
    for node in range(tree.size + 1):
        expected[node, tree.path(node)] = True
    assert (tree.visible() == expected).all()


def test_width_one_is_the_greedy_chain_and_depth_is_limited():
    proposal = MarginalProposal(torch.randn(5, 30).log_softmax(-1))
    tree = grow(proposal, 7, 64, width=1)
    assert tree.tokens.tolist() == [7, *proposal.log_probs.argmax(-1).tolist()]
    assert tree.parents.tolist() == [-1, 0, 1, 2, 3, 4]
    assert int(grow(proposal, 7, 64, max_depth=2).depths.max()) == 2
    assert grow(proposal, 7, 64, max_depth=0).size == 0
    assert grow(proposal, 7, 0).size == 0


def test_impossible_candidates_are_left_out():
    log_probs = torch.tensor([[0.0, -torch.inf, -torch.inf], [-torch.inf] * 3])
    assert paths_of(grow(MarginalProposal(log_probs), 7, 10)) == [(0,)]


@pytest.mark.parametrize("budget", [16, 64, 256])
@pytest.mark.parametrize("number", [0, 1, 2])
def test_same_trees_as_ddtree(shared, number, budget):
    stored = load_file(shared / "fixtures/tree_ddtree/trees.safetensors")
    proposal = MarginalProposal(stored[f"logits{number}"].log_softmax(-1))
    tree, prefix = grow(proposal, 0, budget), f"logits{number}.budget{budget}"
    assert tree.tokens[1:].tolist() == stored[f"{prefix}.node_token_ids"].tolist()
    assert tree.depths[1:].tolist() == stored[f"{prefix}.node_depths"].tolist()
    assert tree.parents.tolist() == stored[f"{prefix}.parents"].tolist()
    assert (tree.visible() == stored[f"{prefix}.visibility"].bool().numpy()).all()
    assert np.allclose(tree.log_probs[1:], stored[f"{prefix}.cum_logprobs"].numpy(), atol=1e-5)


def roofline_of(case, data):
    specification = data["gpu_specs"][case["gpu"]]
    ceilings = Ceilings(specification["peak_throughput_bf16"], specification["memory_bandwidth"])
    sizes = data["model_args"][case["model"]]
    shape = ModelShape(sizes["L"], sizes["h"], sizes["n_q"], sizes["n_kv"], sizes["d"], sizes["h_ffn"], sizes["V"])
    parameters = data["calibration_params"][case["params"]]
    names = ("alpha_m", "beta_m", "alpha_c", "beta_c")
    return CalibratedRoofline(shape, 2, ceilings, *(parameters[name] for name in names))


def test_same_trees_as_bastion(shared):
    """With its own stop rule, where no cap binds. BASTION counts the root, we do not."""
    stored = load_file(shared / "fixtures/tree_bastion/trees.safetensors")
    info = json.loads((shared / "fixtures/tree_bastion/trees.json").read_text())
    data = json.loads((shared / "fixtures/roofline/roofline.json").read_text())
    data["calibration_params"] |= info["calibration_params"]
    checked = 0
    for result in info["results"]:
        if result["variant"] != "exact_stop" or result.get("top128_cap_binds"):
            continue
        case = info["cases"][result["case"]]
        verify = roofline_of(case, data)
        policy = Throughput(RoundCost(verify, case["draft"], case["nonverify"]), max_nodes=700)
        tree = grow(MarginalProposal(stored[result["logits"]][0].log_softmax(-1)), 7, policy.max_nodes)
        nodes = policy.choose(tree.gains, [case["context"]], [1])
        assert nodes + 1 == result["num_nodes"], result["key"]
        reference = {name: stored[f"{result['key']}.{name}"].tolist() for name in ("token_ids", "parents", "depths")}
        theirs = DraftTree(*(np.array(reference[n]) for n in ("token_ids", "parents", "depths")), np.zeros(1))
        assert set(paths_of(tree.first(nodes))) == set(paths_of(theirs)), result["key"]
        assert 1 + float(tree.gains[:nodes].sum(dtype=np.float64)) == pytest.approx(
            result["path_prob_sum_with_root"], rel=1e-5
        )
        checked += 1
    assert checked >= 15


def test_same_budgets_as_caddtree(shared):
    stored = load_file(shared / "fixtures/tree_caddtree/trees.safetensors")
    info = json.loads((shared / "fixtures/tree_caddtree/trees.json").read_text())
    # Their tables hold the cost of n nodes; a pass of n nodes has n + 1 rows.
    curves = []
    for context in info["context_lengths"]:
        seconds = stored[f"cost_curve.ctx{context}"].tolist()
        curves.append(Curve(context, tuple(range(1, len(seconds) + 1)), tuple(seconds)))
    profile = MeasuredProfile(tuple(curves))
    for result in info["results"]:
        policy = Throughput(RoundCost(profile, info["draft_cost_s"], 0.0), result["max_budget"])
        logits = stored[result["logits"]]
        tree = grow(MarginalProposal(logits.log_softmax(-1)), 0, policy.max_nodes)
        budget = policy.choose(tree.gains, [result["context"]], [1])
        assert budget == result["budget"], result["key"]
        tree = tree.first(budget)
        assert tree.tokens[1:].tolist() == stored[f"{result['key']}.node_token_ids"].tolist()
        assert tree.parents.tolist() == stored[f"{result['key']}.parents"].tolist()


class TableCost:
    """A VerifyCost from a list."""

    def __init__(self, table):
        self.table = np.array(table)

    def seconds(self, rows, context):
        return self.table[rows - 1]


@settings(deadline=None)
@given(
    st.lists(st.floats(1e-3, 1.0), min_size=1, max_size=30),
    st.lists(st.floats(1e-3, 10.0), min_size=40, max_size=40),
    st.floats(0, 1),
)
def test_throughput_is_the_argmax_even_where_cost_is_not_convex(gains, costs, fixed):
    gains = sorted(gains, reverse=True)
    policy = Throughput(RoundCost(TableCost(costs), fixed, 0.0), 30)
    chosen = policy.choose(np.array(gains), [100], [1])
    rates = [(1 + sum(gains[:n])) / (fixed + costs[n]) for n in range(len(gains) + 1)]
    assert rates[chosen] == pytest.approx(max(rates))


def test_levels_that_a_pass_gives_below_each_node():
    policy = Throughput(RoundCost(TableCost(1.0 + 0.02 * np.arange(60)), 0.5, 0.0), 40)
    frontier = np.array([0.6, 0.4], np.float32)
    gains = np.array([0.4], np.float32)

    def deepens(levels):
        return policy.deepens(Outlook(gains, frontier, 0.9, 0, levels), 10)

    assert deepens(5)
    assert deepens(np.array([5, 5]))
    assert deepens(np.array([5, 0]))
    assert not deepens(np.array([0, 1]))
    assert not deepens(np.array([0, 0]))


def test_a_batch_shares_one_budget():
    """Two sequences: the sure one gets the nodes, and the cost is that of all rows together."""
    from bastion.decoding.loop import cut

    sure = grow(MarginalProposal(torch.tensor([[0.98, 0.02]]).log().repeat(4, 1)), 1, 16)
    unsure = grow(MarginalProposal(torch.full((4, 10), 0.1).log()), 1, 16)
    policy = Throughput(RoundCost(TableCost(np.linspace(1.0, 9.0, 64)), 0.0, 0.0), 16)
    first, second = cut([sure, unsure], policy, [10, 10], [1, 1])
    assert first.size >= 4
    assert second.size == 0
