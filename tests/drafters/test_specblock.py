"""The SpecBlock drafter against its own training forward, and what the rank head and the checkpoint promise."""

import json
from itertools import pairwise

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from bastion.decoding.budget import Chain, FixedBudget, Plain, RoundCost, Throughput
from bastion.decoding.growth import grow
from bastion.decoding.loop import decode
from bastion.drafters.base import DraftContext, Frontier
from bastion.drafters.specblock import SpecBlockConfig, SpecBlockDrafter, SpecBlockModel, load_model, save_model
from bastion.drafters.specblock.training import existing_model, new_model
from bastion.errors import BastionError
from dflash_support import CPU, close
from tiny import LinearCost, generation, make_target
from training_support import counting

K, PASSES = 3, 3
PATH = [7, 30, 51, 12, 80, 4, 66]  # a root and the tokens up to the last block's prefix


def make_model(target, draft_vocab=None, positions=K, passes=PASSES, **settings) -> SpecBlockModel:
    """A random model that drafts clearly different things for different inputs."""
    model = new_model(target, [counting(30, 0)], positions=positions, passes=passes, draft_vocab=draft_vocab)
    raw = model.config.raw
    model.config = SpecBlockConfig.from_dict(raw | {"specblock_config": raw["specblock_config"] | settings})
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.normal_(0, 0.15)
            elif name.endswith("norm.weight"):
                weight.normal_(1, 0.1)
    return model.eval()


@pytest.fixture(scope="module")
def target():
    torch.manual_seed(0)
    return make_target()


def some_features(target, model, count):
    return torch.randn(count, len(model.config.body.target_layers) * target.shape.hidden)


def context_of(features, root=PATH[0], temperature=0.0, pieces=100):
    return DraftContext([5] * len(features) + [root], temperature, list(features.split(pieces)))


def along(proposal, path, width=96, places=0):
    """The log-probabilities [v] by token of each depth along a path, root first, as the proposal gives them."""
    found = []
    for depth, token in enumerate(path):
        frontier = Frontier(depth, np.array([token]), np.array([places if depth == 1 else 0]))
        candidates = proposal.expand(frontier, width)
        rows = torch.full((96,), -torch.inf)
        rows[torch.from_numpy(candidates.tokens[0])] = torch.from_numpy(candidates.log_probs[0])
        found.append(rows)
    return torch.stack(found)


def trained(target, model, features, path):
    """Log-probabilities [M * K, v] of the training forward for one draft, among others that it must not see."""
    others = [torch.tensor([9, 8, 7, 6, 5, 4, 3]), torch.tensor(path), torch.tensor([1] * 7)]
    length = len(features)
    anchors = torch.tensor([2, length, 1])
    more = torch.cat((features, torch.randn(2, features.shape[1])))  # features behind the root, which are hidden
    sees = torch.arange(length + 2) < anchors[:, None]
    with torch.no_grad():
        hidden, ranks = model(
            target.embed(torch.stack((*others, torch.tensor(path)))),
            torch.cat((anchors, torch.tensor([length]))),
            torch.cat((more, features)),  # a second sequence with the same draft
            torch.cat((torch.arange(length + 2), torch.arange(length))),
            torch.cat((anchors - 1, torch.tensor([2 * length + 1]))),
            [sees, torch.ones(1, length, dtype=torch.bool)],
        )
    close(hidden[1], hidden[3])
    return target.head(hidden[1], model.body.token_ids()).log_softmax(-1), ranks[1]


def widest(size):
    """Settings with which nothing is left out."""
    return {"rank_widths": [size] * 4}


def test_every_block_drafts_what_the_training_forward_computes(target) -> None:
    model = make_model(target, **widest(96))
    features = some_features(target, model, 11)
    expected, _ = trained(target, model, features, PATH)
    (proposal,) = SpecBlockDrafter(model, target).propose([context_of(features)])
    path = [*PATH, 3, 2]  # what the last block is behind, and two tokens that its positions must not depend on
    assert (proposal.depth, proposal.ready, proposal.passes) == (9, 3, 1)
    close(along(proposal, path), expected)
    assert (proposal.ready, proposal.passes) == (9, 3)
    assert all((one - other).abs().max() > 0.1 for one, other in pairwise(expected))


def test_nodes_that_are_drafted_together_get_what_each_gets_alone(target) -> None:
    """Every block reads its own path: the blocks of a pass start at siblings and cousins."""
    model = make_model(target, **widest(96))
    features = some_features(target, model, 11)
    (proposal,) = SpecBlockDrafter(model, target).propose([context_of(features)])
    levels = [([7], [0]), ([30, 31], [0, 0]), ([51, 52, 53], [1, 0, 1]), ([12, 13, 12, 14], [2, 0, 1, 1])]
    levels += [([1, 2, 3], [1, 3, 0]), ([4, 5, 6], [2, 0, 1]), ([8, 9], [1, 2])]
    found = [proposal.expand(Frontier(i, *map(np.array, level)), 96) for i, level in enumerate(levels)]
    second = [(7, 31, 53, 12), (7, 31, 51, 13), (7, 30, 52, 12), (7, 30, 52, 14)]
    third = [(*second[1], 1, 5, 8), (*second[3], 2, 6, 9)]
    for depth, paths in ((3, second), (6, third)):
        for node, path in enumerate(paths):
            expected, _ = trained(target, model, features, [*path, 1, 1, 1][:7])
            order = torch.from_numpy(found[depth].tokens[node])
            close(torch.from_numpy(found[depth].log_probs[node]), expected[depth][order])


def test_a_token_changes_the_blocks_behind_it_and_nothing_before(target) -> None:
    model = make_model(target, **widest(96))
    features = some_features(target, model, 6)
    expected, _ = trained(target, model, features, PATH)
    for place in range(len(PATH)):
        changed = PATH.copy()
        changed[place] += 1
        logits, _ = trained(target, model, features, changed)
        first = -(-place // K) * K  # the first block that is told the token
        close(logits[:first], expected[:first])
        assert ((logits[first:] - expected[first:]).abs().amax(1) > 1e-3).all()


def test_the_shift_reaches_one_position_further_with_each_layer(target) -> None:
    """Without attention, two layers carry what a position is told to the next two, and nowhere else."""
    model = make_model(target, positions=5, passes=1, **widest(96))
    features = some_features(target, model, 6)
    drafter = SpecBlockDrafter(model, target)
    with torch.no_grad():
        for layer in model.body.layers:
            layer.self_attn.o_proj.weight.zero_()
        before = along(drafter.propose([context_of(features)])[0], PATH[:5])
        model.places[1] += 1
        after = along(drafter.propose([context_of(features)])[0], PATH[:5])
    assert ((before - after).abs().amax(1) > 1e-2).tolist() == [False, True, True, True, False]
    close(before[[0, 4]], after[[0, 4]])


def test_a_position_sees_none_behind_it(target) -> None:
    model = make_model(target, **widest(96))
    features = some_features(target, model, 6)
    before, _ = trained(target, model, features, PATH)
    with torch.no_grad():
        model.places[1] += 1
    after, _ = trained(target, model, features, PATH)
    close(before[0], after[0])
    assert (before[1:K] - after[1:K]).abs().amax(1).min() > 1e-2


def test_features_in_pieces_and_a_root_without_context(target) -> None:
    drafter = SpecBlockDrafter(make_model(target, **widest(96)), target)
    features = some_features(target, drafter.model, 300)
    context = DraftContext([PATH[0]])
    assert along(drafter.propose([context])[0], PATH).isfinite().all()
    for end in (1, 4, 255, 300):  # the buffer starts with room for 256
        context.tokens = [5] * end + [PATH[0]]
        context.features = list(features[context.memory.cache.length : end].split(7))
        grown = along(drafter.propose([context])[0], PATH)
        assert context.features == []
        close(grown, along(drafter.propose([context_of(features[:end])])[0], PATH))
    with pytest.raises(ValueError, match="4 tokens precede the root, but features came for 3"):
        drafter.propose([DraftContext([1, 2, 3, 4, 5], 0.0, [features[:3]])])


def test_sequences_drafted_together_and_their_temperatures(target) -> None:
    model = make_model(target, **widest(96))
    drafter, lengths, temperatures = SpecBlockDrafter(model, target), (4, 9, 6), (0.0, 0.5, 2.0)
    texts = [some_features(target, model, length) for length in lengths]
    contexts = [context_of(one, temperature=t) for one, t in zip(texts, temperatures, strict=True)]
    for proposal, features, temperature in zip(drafter.propose(contexts), texts, temperatures, strict=True):
        expected, _ = trained(target, model, features, PATH)
        close(along(proposal, PATH), (expected[:7] / (temperature or 1.0)).log_softmax(-1))


def test_widths_are_the_rank_heads(target) -> None:
    settings = {"rank_bounds": [1, 3, 8], "rank_widths": [1, 3, 8, 2], "coverage": 0.6}
    model = make_model(target, **settings)
    features = some_features(target, model, 11)
    expected, ranks = trained(target, model, features, PATH)
    drafter, buckets = SpecBlockDrafter(model, target), set()
    reached = ranks.softmax(-1).cumsum(-1)
    found = along(drafter.propose([context_of(features)])[0], PATH)
    for row, sums, logits in zip(found, reached, expected, strict=False):
        bucket = next((i for i, share in enumerate(sums) if share >= 0.6), 3)
        buckets.add(bucket)
        best = logits.topk(settings["rank_widths"][bucket])
        assert set(row.isfinite().nonzero()[:, 0].tolist()) == set(best.indices.tolist())
        close(row[best.indices], best.values)
    assert len(buckets) > 1
    narrow = along(drafter.propose([context_of(features)])[0], PATH, width=1)
    assert (narrow.isfinite().sum(1) == 1).all()


@pytest.mark.parametrize("widths", [[1, 1, 1, 1], [0, 0, 0, 5]])
def test_growth_within_the_widths(target, widths) -> None:
    """One child everywhere is a chain; where a position has none the path ends, and no pass is made."""
    model = make_model(target, rank_widths=widths, coverage=1.0 if widths[0] else 0.1)
    with torch.no_grad():
        model.rank_head.weight.zero_()
    proposal = SpecBlockDrafter(model, target).propose([context_of(some_features(target, model, 5))])[0]
    tree = grow(proposal, PATH[0], 40)
    assert tree.depths.tolist() == (list(range(10)) if widths[0] else [0])
    assert proposal.passes == (3 if widths[0] else 1)


def test_a_pass_is_made_for_the_beam_only(target, monkeypatch) -> None:
    model = make_model(target, **widest(8), beam=2)
    drafter = SpecBlockDrafter(model, target)
    made = []
    draft = model.draft
    monkeypatch.setattr(model, "draft", lambda cache, path: made.append(tuple(path.shape[:2])) or draft(cache, path))
    grow(drafter.propose([context_of(some_features(target, model, 5))])[0], PATH[0], 400)
    assert made == [(1, 1), (2, 1 + K), (2, 1 + 2 * K)]


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "top_p": 0.95}])
@pytest.mark.parametrize(
    "policy",
    [Chain(), FixedBudget(12), Throughput(RoundCost(LinearCost(1.0, 0.02), 0.1, 0.0, deepen=0.02), 24)],
    ids=["chain", "fixed", "throughput"],
)
def test_texts_are_those_of_plain_decoding(target, policy, sampling) -> None:
    drafter = SpecBlockDrafter(make_model(target), target)

    def write(drafter, policy):
        batch = [
            generation(target, prompt, 24, **sampling | {"seed": seed})
            for seed, prompt in enumerate([[5, 9, 11, 5, 9, 11], [3], [60] * 9])
        ]
        for _ in decode(target, drafter, policy, batch):
            pass
        return batch

    expected, found = write(None, Plain()), write(drafter, policy)
    assert [one.stream.tokens for one in found] == [one.stream.tokens for one in expected]
    assert sum(sum(one.stats.tree_sizes) for one in found) > 0


def test_a_checkpoint_is_read_as_it_was_written(target, tmp_path) -> None:
    model = make_model(target, draft_vocab=20, **widest(20))
    features = some_features(target, model, 9)
    expected, _ = trained(target, model, features, PATH)
    save_model(model, tmp_path)
    assert "d2t" in load_file(tmp_path / "model.safetensors")
    again = load_model(tmp_path, CPU, torch.float32)
    assert again.config == SpecBlockConfig.from_dict(model.config.raw | {"dtype": "float32"})
    drafter = SpecBlockDrafter.load(tmp_path, target)
    found = along(drafter.propose([context_of(features)])[0], PATH)
    ids = model.body.token_ids()
    close(found[:, ids], expected[: len(PATH)])
    assert found.isfinite().sum(1).tolist() == [20] * len(PATH)
    assert drafter.digest == again.digest()
    assert drafter.digest != SpecBlockDrafter(make_model(target, draft_vocab=20, beam=7), target).digest
    again = existing_model(str(tmp_path))  # can be trained further
    again(*_inputs(target, again, features))[0].square().sum().backward()
    assert all(p.grad is not None for name, p in again.named_parameters() if "rank_head" not in name)


def _inputs(target, model, features):
    count = len(features)
    sees = torch.ones(1, count, dtype=torch.bool)
    embedded = target.embed(torch.tensor([PATH])).clone()
    return embedded, torch.tensor([count]), features, torch.arange(count), torch.tensor([count - 1]), [sees]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_layer_ids": []}, "target_layer_ids"),
        ({"positions": 0}, "positions is 0"),
        ({"beam": True}, "beam is True"),
        ({"rank_bounds": [3, 1, 8]}, "rank_bounds"),
        ({"rank_widths": [1, 3, 8]}, "rank_widths must list 4"),
        ({"rank_widths": [0, 0, 0, 0]}, "rank_widths must list 4"),
        ({"coverage": 0}, "coverage is 0"),
        ({"branching": 3}, "branching is not known"),
        ({"positions": 4}, "places has shape"),
        ({"target_layer_ids": [0, 7]}, "shape"),
        ({"rank_bounds": [1, 2], "rank_widths": [1, 2, 3]}, "rank_head"),
    ],
)
def test_settings_that_do_not_fit_are_refused(target, tmp_path, changes, message) -> None:
    save_model(make_model(target), tmp_path)
    path = tmp_path / "config.json"
    raw = json.loads(path.read_text())
    path.write_text(json.dumps(raw | {"specblock_config": raw["specblock_config"] | changes}))
    with pytest.raises(BastionError, match=message):
        SpecBlockDrafter.load(tmp_path, target)


def test_another_target_and_what_is_no_drafter_are_refused(target, tmp_path) -> None:
    model = make_model(target)
    for changes, message in (
        ({"vocab_size": 100}, "vocabulary of 96"),
        ({"hidden_size": 36}, "hidden size 72"),
        ({"num_hidden_layers": 2}, "made for 3 layers"),
    ):
        with pytest.raises(BastionError, match=message):
            SpecBlockDrafter(model, make_target(**changes))
    raw = {key: value for key, value in model.config.raw.items() if key != "specblock_config"}
    with pytest.raises(BastionError, match="not a SpecBlock drafter"):
        SpecBlockConfig.from_dict(raw)
    kinds = ["sliding_attention", "full_attention"]
    with pytest.raises(BastionError, match="no sliding layers"):
        SpecBlockConfig.from_dict(model.config.raw | {"layer_types": kinds, "sliding_window": 8})


def test_damaged_weights_are_refused(target, tmp_path) -> None:
    save_model(make_model(target), tmp_path)
    weights = tmp_path / "model.safetensors"
    tensors = load_file(weights)
    save_file({name: tensor for name, tensor in tensors.items() if name != "join.weight"}, weights)
    with pytest.raises(BastionError, match=r"join\.weight is missing"):
        load_model(tmp_path, CPU, torch.float32)
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(BastionError, match="cannot be read"):
        load_model(tmp_path, CPU, torch.float32)
