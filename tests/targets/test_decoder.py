"""The lean decoder against transformers' own forward, and its cache."""

import gc
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from bastion.decoding.growth import grow
from bastion.decoding.loop import tree_rows
from bastion.decoding.tree import DraftTree
from bastion.drafters.marginal import MarginalProposal
from bastion.errors import BastionError
from bastion.layers.linear import Linear, cpu_has_bfloat16, for_inference, packs
from bastion.layers.rotary import RotaryEmbedding
from bastion.targets.attention import CALL, TreeMask, worth_sharing
from bastion.targets.base import Rows
from bastion.targets.decoder import DecoderTarget, unsupported
from tiny import CPU, make_model, make_target

YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
CASES = {
    "llama": ("llama", {}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama with biases": ("llama", {"attention_bias": True}),
    "llama3 scaling": ("llama", {"rope_parameters": LLAMA3}),
    "linear scaling": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
    "dynamic scaling": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, "max_position_embeddings": 32},
    ),
    "all heads their own": ("llama", {"num_key_value_heads": 6}),
    "one key head": ("llama", {"num_key_value_heads": 1}),
    "mistral": ("mistral", {}),
    "qwen2 (biases)": ("qwen2", {}),
    "qwen3 (norms)": ("qwen3", {}),
    "qwen3 yarn": ("qwen3", {"rope_parameters": YARN}),
}


def rows(target, cache, tokens, **options):
    positions = torch.arange(cache.length, cache.length + len(tokens))
    return Rows(torch.as_tensor(tokens), positions, cache, **options)


def read(target, cache, tokens, prompt_length=0):
    """Forward and commit all; the logits."""
    result = target.forward([rows(target, cache, tokens, prompt_length=prompt_length)])[0]
    target.commit(cache, range(len(tokens)))
    return result.logits


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_transformers(name):
    family, changes = CASES[name]
    model = make_model(family, **changes)
    target, tokens = make_target(model), torch.randint(2, 96, (60,))
    with torch.no_grad():
        expected = model(tokens[None]).logits[0]
    assert expected.std() > 0.1  # else the tolerance would mean nothing
    cache = target.new_cache()
    assert torch.allclose(read(target, cache, tokens, 60), expected, atol=1e-4)
    cache = target.new_cache()
    pieces = torch.cat([read(target, cache, piece, 60) for piece in tokens.split([37, 1, 22])])
    assert torch.allclose(pieces, expected, atol=1e-4)


def test_dynamic_scaling_continues_as_in_transformers_generate():
    model = make_model("llama", **CASES["dynamic scaling"][1])
    target, prompt = make_target(model), torch.randint(2, 96, (1, 40))
    reference = model.generate(prompt, max_new_tokens=12, do_sample=False, eos_token_id=None)[0, 40:].tolist()
    cache = target.new_cache()
    logits, tokens = read(target, cache, prompt[0], 40), []
    for _ in range(12):
        tokens.append(int(logits[-1].argmax()))
        logits = read(target, cache, tokens[-1:])
    assert tokens == reference


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_node_of_a_tree_sees_its_path_only(family):
    target = make_target(make_model(family))
    target.set_feature_layers([0, 2])
    prompt = torch.randint(2, 96, (9,))
    tree = grow(MarginalProposal(torch.randn(4, 96).log_softmax(-1)), 7, 20)
    assert (tree.parents[1:] == 0).sum() > 1  # it branches
    cache = target.new_cache()
    read(target, cache, prompt)
    verified = target.forward([tree_rows(target, tree, cache)])[0]
    for node in range(tree.size + 1):
        path = torch.from_numpy(tree.tokens[tree.path(node)])
        alone = target.new_cache()
        expected = target.forward([rows(target, alone, torch.cat((prompt, path)))])[0]
        assert torch.allclose(verified.logits[node], expected.logits[-1], atol=1e-4)
        assert torch.allclose(verified.features[node], expected.features[-1], atol=1e-4)


@settings(deadline=None, max_examples=25)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=6), st.integers(0, 10**6))
def test_any_sequence_of_trees_leaves_the_cache_of_the_text(sizes, seed):
    """Trees of changing sizes, a random path kept of each: a wrong mask or a wrong move would show."""
    torch.manual_seed(seed)
    target = make_target(make_model(num_hidden_layers=2))
    cache, text = target.new_cache(), [3, 4]
    read(target, cache, text)
    for size in sizes:
        tree = grow(MarginalProposal(torch.randn(5, 96).log_softmax(-1)), 7, size)
        target.forward([tree_rows(target, tree, cache)])
        path = tree.path(int(torch.randint(tree.size + 1, (1,))))
        target.commit(cache, path)
        text += tree.tokens[path].tolist()
    assert cache.length == len(text)
    fresh = target.new_cache()
    read(target, fresh, text)
    kept = (cache.buffer[:, :, :, : len(text)], fresh.buffer[:, :, :, : len(text)])
    assert torch.allclose(*kept, atol=1e-5)


class Traffic(TorchDispatchMode):
    """Counts the numbers that operations write."""

    def __init__(self):
        super().__init__()
        self.written = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        copies = ("aten.index_select", "aten.copy_", "aten.clone", "aten.cat", "aten.index")
        if isinstance(result, torch.Tensor) and str(function).startswith(copies):
            self.written += result.numel()
        return result


@pytest.mark.parametrize("context", [8, 400])
def test_commit_moves_only_accepted_rows(context):
    target = make_target(make_model())
    cache = target.new_cache(512)
    read(target, cache, torch.randint(2, 96, (context,)))
    parents = np.array([-1, 0, 0, 2, 2, 4])
    tree = DraftTree(np.arange(6) + 5, parents, np.array([0, 1, 1, 2, 2, 3]), np.zeros(6, np.float32))
    target.forward([tree_rows(target, tree, cache)])
    path, moved = [0, 2, 4, 5], 3
    with Traffic() as traffic:
        target.commit(cache, path)
    row = cache.buffer.numel() // cache.buffer.shape[3]
    assert traffic.written == 2 * moved * row  # gathered, and put in place
    # A chain from the root is in place already.
    target.forward([rows(target, cache, [1, 2, 3])])
    with Traffic() as traffic:
        target.commit(cache, [0, 1])
    assert traffic.written == 0


def test_the_mask_of_a_round_does_not_touch_the_prefix():
    mask = TreeMask(3, CPU, torch.float32)
    visible = torch.eye(4, dtype=torch.bool)
    visible[:, 0] = True
    mask.view(visible, 4, 2000)
    with Traffic() as traffic:
        view = mask.view(visible, 4, 1900)
    assert traffic.written <= 200  # the square of 4 rows, 3 times; not 12 * 1900
    expected = torch.zeros(4, 1900)
    expected[:, 1896:][~visible] = -torch.inf
    assert torch.equal(view, expected.repeat_interleave(3, 0))


class Texts:
    """Sequences that are decoded together, and what each has read so far."""

    def __init__(self, target):
        self.target, self.entries = target, []

    def open(self, capacity=0):
        self.entries.append((self.target.new_cache(capacity), []))

    def read(self, pieces):
        """One pass over the pieces {index: tokens}; checks every row against its text alone."""
        chosen = [(*self.entries[index], torch.tensor(piece)) for index, piece in pieces.items()]
        results = self.target.forward([rows(self.target, cache, piece) for cache, _, piece in chosen])
        for (cache, text, piece), result in zip(chosen, results, strict=True):
            self.target.commit(cache, range(len(piece)))
            text += piece.tolist()
            alone = self.target.new_cache(600)  # not of their capacity, so it is no neighbour
            expected = self.target.forward([rows(self.target, alone, text, first_logit=len(text) - len(piece))])[0]
            assert torch.allclose(result.logits, expected.logits, atol=1e-4)
            assert torch.allclose(result.features, expected.features[-len(piece) :], atol=1e-4)


@pytest.fixture(scope="module")
def two_layers():
    target = make_target(make_model("qwen3", num_hidden_layers=2))
    target.set_feature_layers([0])
    return target


@settings(deadline=None, max_examples=15)
@given(st.data())
def test_any_mixture_of_passes_is_each_text_alone(two_layers, data):
    """Texts begin, grow out of their slots, pause and die in any order; passes take any of them, in any order."""
    texts = Texts(two_layers)
    tokens = st.integers(2, 95)
    for _ in range(data.draw(st.integers(3, 8))):
        for _ in range(data.draw(st.integers(0, 5))):
            texts.open(data.draw(st.sampled_from([0, 100])))
        if texts.entries and data.draw(st.booleans()):
            del texts.entries[data.draw(st.integers(0, len(texts.entries) - 1))]
        if not texts.entries:
            continue
        places = st.integers(0, len(texts.entries) - 1)
        chosen = data.draw(st.lists(places, min_size=1, unique=True))
        long = data.draw(st.sets(st.sampled_from(chosen), max_size=2))
        texts.read({
            place: data.draw(st.lists(tokens, min_size=2, max_size=70)) if place in long else [data.draw(tokens)]
            for place in chosen
        })  # fmt: skip


def count_calls(monkeypatch):
    calls = []
    real = torch.nn.functional.scaled_dot_product_attention

    def counted(queries, *args, **kwargs):
        calls.append(len(queries))
        return real(queries, *args, **kwargs)

    monkeypatch.setattr("torch.nn.functional.scaled_dot_product_attention", counted)
    return calls


def test_single_rows_of_neighbours_attend_in_one_call(two_layers, monkeypatch):
    texts = Texts(two_layers)
    for _ in range(8):
        texts.open()
    texts.read({place: [5 + place] * (place + 1) for place in range(8)})
    calls = count_calls(monkeypatch)
    two_layers.forward([rows(two_layers, cache, [7]) for cache, _ in texts.entries])
    assert sorted(calls) == sorted([1, 1, 2, 4] * 2)  # slabs that double, two layers
    calls.clear()
    mixed = [rows(two_layers, cache, [7]) for cache, _ in texts.entries[4:]]
    two_layers.forward([*mixed[:2], rows(two_layers, texts.entries[0][0], [7, 8, 9]), *mixed[2:]])
    assert sorted(calls) == [1, 1, 4, 4]
    calls.clear()
    two_layers.forward(mixed[:1])
    assert calls == [1, 1]


def test_a_tree_beside_single_rows_is_the_tree_alone(two_layers):
    torch.manual_seed(2)
    tree = grow(MarginalProposal(torch.randn(4, 96).log_softmax(-1)), 7, 20)
    texts = Texts(two_layers)
    for _ in range(8):
        texts.open()
    texts.read({place: [5 + place] * (place + 3) for place in range(8)})
    caches = [cache for cache, _ in texts.entries]
    alone = two_layers.forward([tree_rows(two_layers, tree, caches[5])])[0]
    singles = [rows(two_layers, cache, [7]) for cache in caches]
    singles[5] = tree_rows(two_layers, tree, caches[5])
    together = two_layers.forward(singles)
    assert torch.allclose(together[5].logits, alone.logits, atol=1e-5)
    for place in (4, 6):
        expected = two_layers.forward([rows(two_layers, caches[place], [7])])[0]
        assert torch.allclose(together[place].logits, expected.logits, atol=1e-5)


def test_what_a_slot_held_before_cannot_be_seen(two_layers):
    """A masked NaN is a NaN still: a freed slot is cleared before another text takes it."""
    texts = Texts(two_layers)
    for _ in range(4):
        texts.open()
    texts.entries[3][0].buffer.fill_(torch.nan)
    slot = texts.entries[3][0].slot
    slab = texts.entries[3][0].slab
    del texts.entries[3]
    texts.open()
    assert (texts.entries[3][0].slab, texts.entries[3][0].slot) == (slab, slot)
    texts.read({2: [4] * 20, 3: [9, 8]})
    texts.read({2: [4], 3: [9]})


def test_slots_are_given_back_and_memory_too():
    target = make_target(make_model(num_hidden_layers=1))
    first = target.new_cache(65)
    assert first.slab.slots == 1  # one text takes memory for itself only
    caches = [first, *(target.new_cache(100) for _ in range(95))]
    slabs = {id(cache.slab): cache.slab.slots for cache in caches}
    assert sorted(slabs.values()) == [1, 1, 2, 4, 8, 16, 32, 32]
    assert len({(id(cache.slab), cache.slot) for cache in caches}) == 96
    assert {cache.buffer.shape[3] for cache in caches} == {128}
    for _ in range(200):  # texts end, and others begin
        caches.pop(0)
        caches.append(target.new_cache(100))
    assert len({(id(cache.slab), cache.slot) for cache in caches}) == 96
    assert sorted(slab.slots for slab in {cache.slab for cache in caches}) == [32, 32, 32]
    del first, caches
    gc.collect()
    assert target.new_cache(100).slab.slots == 1


def test_a_cache_that_grows_leaves_its_slot_to_others():
    target = make_target(make_model(num_hidden_layers=1))
    grown = target.new_cache(64)
    slab = grown.slab
    read(target, grown, [3] * 60)
    before = grown.buffer[:, :, :, :60].clone()
    read(target, grown, [3] * 5)
    assert grown.slab is not slab
    assert grown.buffer.shape[3] == 128
    assert torch.equal(grown.buffer[:, :, :, :60], before)
    assert target.new_cache(64).slab is slab
    assert target.new_cache(1500).buffer.shape[3] == 2048  # large ones are not rounded to powers of two
    assert target.new_cache(2049).buffer.shape[3] == 3072


def cost(caches):
    """What the calls of a set of caches cost, all in one."""
    slots = [cache.slot for cache in caches]
    return CALL + (max(slots) - min(slots) + 1) * max(cache.length for cache in caches)


@given(st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 31)), min_size=1, max_size=12, unique_by=lambda x: x[1]))
def test_a_call_is_shared_where_that_is_cheapest(sizes):
    caches = [SimpleNamespace(length=length, slot=slot) for length, slot in sorted(sizes)]
    count = worth_sharing(caches)
    costs = [sum(cost([one]) for one in caches)]
    costs += [cost(caches[:n]) + sum(cost([one]) for one in caches[n:]) for n in range(1, len(caches) + 1)]
    assert costs[count] == min(costs)
    assert count != 1  # one cache alone shares nothing


def test_commit_refuses_rows_that_are_not_pending():
    target = make_target(make_model())
    cache = target.new_cache()
    target.forward([rows(target, cache, [1, 2])])
    with pytest.raises(IndexError, match="only 2 are pending"):
        target.commit(cache, [0, 2])


def test_logits_only_where_wanted():
    target = make_target(make_model())
    first, second = target.new_cache(), target.new_cache()
    tokens = torch.randint(2, 96, (10,))
    both = target.forward([rows(target, first, tokens, first_logit=9), rows(target, second, tokens[:4])])
    assert [len(one.logits) for one in both] == [1, 4]
    assert torch.allclose(both[1].logits, read(target, target.new_cache(), tokens[:4]), atol=1e-5)


def test_reduced_head_is_rows_of_the_head():
    target = make_target(make_model())
    hidden, ids = torch.randn(2, 3, 72), torch.tensor([4, 90, 11])
    assert torch.allclose(target.head(hidden, ids), target.head(hidden)[..., ids], atol=1e-5)
    other = torch.tensor([5])
    assert torch.allclose(target.head(hidden, other), target.head(hidden)[..., other], atol=1e-5)


def test_packed_linear_is_linear():
    layer = torch.nn.Sequential(torch.nn.Linear(33, 17), torch.nn.ReLU(), torch.nn.Linear(17, 5, bias=False))
    for size in (1, 2, 31, 64):
        x = torch.randn(2, size, 33)
        expected = layer(x)
        copy = torch.nn.Sequential(*(m for m in layer))
        for_inference(copy)
        assert torch.allclose(copy(x), expected, atol=1e-5)


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("bias", [None, torch.randn(8, dtype=torch.bfloat16)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_linear_is_linear_for_few_rows_and_many(monkeypatch, native, bias, dtype):
    if native and not cpu_has_bfloat16():
        pytest.skip("this CPU does not multiply bfloat16")
    monkeypatch.setattr("bastion.layers.linear.cpu_has_bfloat16", lambda: native)
    weight, bias = torch.randn(8, 64, dtype=dtype), None if bias is None else bias.to(dtype)
    linear = Linear(weight, bias)
    assert linear.packed == (native and dtype == torch.bfloat16)
    assert linear.emulated != native
    assert torch.equal(linear.plain(), weight)
    for rows in (1, 4, 40):
        x = torch.randn(rows, 64, dtype=dtype)
        expected = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
        assert linear(x).dtype == dtype
        assert torch.allclose(linear(x).double(), expected, rtol=1e-2, atol=5e-2)


def test_weights_stay_plain_where_torch_refuses_to_pack_them(monkeypatch):
    monkeypatch.setattr("bastion.layers.linear.cpu_has_bfloat16", lambda: True)

    def refuse(weight, batch):
        raise RuntimeError("mkldnn_reorder_linear_weight: bf16 path needs the cpu support avx512bw")

    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", refuse)
    packs.cache_clear()
    weight, x = torch.randn(8, 64).bfloat16(), torch.randn(3, 64).bfloat16()
    linear = Linear(weight)
    packs.cache_clear()
    assert not linear.packed
    assert torch.equal(linear(x), x @ weight.T)


def test_rotary_table_grows_without_changing():
    rotary = RotaryEmbedding(make_model().config, CPU, torch.float32)
    before = rotary.at(torch.arange(200))
    rotary.at(torch.tensor([5000]))
    after = rotary.at(torch.arange(200))
    assert torch.equal(before[0], after[0])
    assert torch.equal(before[1], after[1])


def test_a_scaling_extends_the_context_it_was_made_for():
    assert make_target(make_model("qwen3", rope_parameters=YARN, max_position_embeddings=32)).max_context == 128
    assert make_target(make_model("llama", **CASES["dynamic scaling"][1])).max_context == 64
    assert make_target(make_model("llama", rope_parameters=LLAMA3)).max_context == 512


def test_what_is_not_supported_is_refused_by_name():
    config = make_model().config
    config.rope_parameters = {"rope_type": "longrope", "rope_theta": 1e4}
    assert "longrope" in unsupported(config)
    with pytest.raises(BastionError, match="longrope"):
        DecoderTarget(config, {}.get, CPU, torch.float32, "it", "digest")
    windowed = make_model("mistral").config
    windowed.sliding_window = 8
    assert "sliding" in unsupported(windowed)


def test_bad_feature_layers_and_incomplete_checkpoints_are_refused():
    model = make_model()
    target = make_target(model)
    with pytest.raises(BastionError, match="layers 0 to 2, not 3"):
        target.set_feature_layers([0, 3])
    weights = dict(model.state_dict())
    del weights["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(BastionError, match=r"no parameter 'model\.layers\.1\.mlp\.up_proj\.weight'"):
        DecoderTarget(model.config, weights.get, CPU, torch.float32, "it", "digest")


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        (
            "model.layers.1.mlp.up_proj.weight",
            (111, 72),
            r"up_proj.weight' has shape \[111, 72\], by the config \[112, 72\]",
        ),
        ("model.embed_tokens.weight", (95, 72), "embed_tokens"),
        ("lm_head.weight", (97, 72), "lm_head"),
        ("model.norm.weight", (1,), "model.norm"),
        ("model.layers.0.self_attn.q_proj.bias", (1,), "q_proj.bias"),
        ("model.layers.3.input_layernorm.weight", (72,), "more than the config's 3 layers"),
    ],
)
def test_weights_that_do_not_fit_the_config_are_refused(name, shape, message):
    model = make_model("llama")
    weights = model.state_dict() | {name: torch.ones(shape)}
    with pytest.raises(BastionError, match=message):
        DecoderTarget(model.config, weights.get, CPU, torch.float32, "tiny", "digest")
