"""HuggingFaceTarget against the plain forward of tiny random transformers models."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, DynamicCache

from bastion.errors import BastionError
from bastion.targets.base import Rows
from bastion.targets.hf_cache import TreeCache, TreeLayer
from bastion.targets.huggingface import HuggingFaceTarget

# Weights much larger than usual, so that a wrong mask or position changes the logits visibly.
SPREAD = 0.3
TOKENS: dict[str, Any] = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
SMALL: dict[str, Any] = TOKENS | {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "initializer_range": SPREAD,
}
GROUPED: dict[str, Any] = SMALL | {"num_key_value_heads": 2}
GEMMA = GROUPED | {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 8}
GPT2 = TOKENS | {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 128, "initializer_range": SPREAD}
OPT = SMALL | {"ffn_dim": 48, "word_embed_proj_dim": 32, "init_std": SPREAD}
LFM2 = GROUPED | {"layer_types": ["conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False}
BAMBA = GROUPED | {"attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 12}
EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}

GPT_NEO: dict[str, Any] = TOKENS | {
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "attention_types": [[["global", "local"], 1]],
    "window_size": 8,
    "max_position_embeddings": 128,
    "initializer_range": SPREAD,
}
GEMMA3N: dict[str, Any] = GEMMA | {
    "intermediate_size": [48, 96, 48],
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "num_kv_shared_layers": 1,
    "vocab_size_per_layer_input": 64,
    "hidden_size_per_layer_input": 8,
    "laurel_rank": 4,
    "activation_sparsity_pattern": [0.0] * 3,
}

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", GROUPED),
    "qwen2": ("Qwen2Config", GROUPED),
    "qwen3": ("Qwen3Config", GROUPED | {"head_dim": 16}),
    "gpt2": ("GPT2Config", GPT2),
    "gpt-neox": ("GPTNeoXConfig", SMALL),
    "phi3": ("Phi3Config", GROUPED),
    "opt": ("OPTConfig", OPT),
    "granite": ("GraniteConfig", GROUPED | {"logits_scaling": 4.0}),
    "deepseek": ("DeepseekV3Config", SMALL | LATENT | EXPERTS | {"num_key_value_heads": 4}),
    "mistral-wide": ("MistralConfig", GROUPED | {"sliding_window": 128}),
    "mistral-sliding": ("MistralConfig", GROUPED | {"sliding_window": 8}),
    "gemma2": ("Gemma2Config", GEMMA),
    "gemma3": ("Gemma3TextConfig", GEMMA),
    "gemma3n": ("Gemma3nTextConfig", GEMMA3N),
    "lfm2": ("Lfm2Config", LFM2),
    "bloom": (
        "BloomConfig",
        TOKENS | {"hidden_size": 32, "n_layer": 3, "n_head": 4, "initializer_range": SPREAD},
    ),
    "falcon-mamba": (
        "FalconMambaConfig",
        TOKENS | {"hidden_size": 32, "num_hidden_layers": 3, "state_size": 8},
    ),
    "bamba": ("BambaConfig", BAMBA),
    "gpt-neo": ("GPTNeoConfig", GPT_NEO),
}
TREES = [*list(CONFIGS)[:10]]
# transformers learned to roll back these layers in the 5.x series; bloom and gpt-neo have ordinary keys and values.
CHAINS = [
    "bloom",
    "gpt-neo",
    *(["mistral-sliding", "gemma2", "gemma3", "gemma3n", "lfm2"] if hasattr(DynamicCache, "is_croppable") else []),
]
PLAIN = [name for name in CONFIGS if name not in (*TREES, *CHAINS)]
EAGER_ONLY = ("gemma2", "bloom", "falcon-mamba", "gpt-neo")


@cache
def load(name: str, attention: str = "eager") -> HuggingFaceTarget:
    kind, sizes = CONFIGS[name]
    torch.manual_seed(7)
    config = getattr(transformers, kind)(**sizes)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    return HuggingFaceTarget(model, name, "digest")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def both(names: Sequence[str]) -> pytest.MarkDecorator:
    pairs = [(name, attention) for name in names for attention in ("eager", "sdpa")]
    return pytest.mark.parametrize(
        ("name", "attention"), [pair for pair in pairs if pair[1] == "eager" or pair[0] not in EAGER_ONLY]
    )


def text(length: int) -> list[int]:
    return torch.randint(2, 64, (length,)).tolist()


def truth(target: HuggingFaceTarget, tokens: Sequence[int]) -> Tensor:
    """Logits [n, vocab] of one plain forward pass without a cache."""
    with torch.no_grad():
        return target.model(torch.tensor([list(tokens)]), use_cache=False).logits[0]


def rows(
    cache: Any, tokens: Sequence[int], positions: Sequence[int] | None = None, visible: Tensor | None = None
) -> Rows:
    if positions is None:
        positions = range(cache.length, cache.length + len(tokens))
    return Rows(torch.tensor(list(tokens)), torch.tensor(list(positions)), cache, visible)


def feed(target: HuggingFaceTarget, cache: Any, tokens: Sequence[int]) -> Tensor:
    """Run and keep `tokens`; their logits."""
    [verification] = target.forward([rows(cache, tokens)])
    target.commit(cache, range(len(tokens)))
    return verification.logits


PARENTS = [-1, 0, 0, 1, 2, 2, 3, 4]  # a tree of 8 nodes


def path(node: int) -> list[int]:
    return [] if node < 0 else [*path(PARENTS[node]), node]


def tree_rows(cache: Any, tokens: Sequence[int]) -> Rows:
    visible = torch.zeros(len(PARENTS), len(PARENTS), dtype=torch.bool)
    for node in range(len(PARENTS)):
        visible[node, path(node)] = True
    return rows(cache, tokens, [cache.length + len(path(node)) - 1 for node in range(len(PARENTS))], visible)


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@both(list(CONFIGS))
def test_support_is_found_and_explained(name: str, attention: str) -> None:
    target = load(name, attention)
    expected = "tree" if name in TREES else "chain" if name in CHAINS else "none"
    assert target.tree_support == expected, target.tree_support_reason
    assert ("agreed" in target.tree_support_reason) == (expected == "tree")


@both(list(CONFIGS))
def test_plain_decoding_writes_what_generate_writes(name: str, attention: str) -> None:
    target, prompt = load(name, attention), text(13)
    inputs = torch.tensor([prompt])
    expected = target.model.generate(
        inputs, attention_mask=torch.ones_like(inputs), do_sample=False, max_new_tokens=12
    )[0]
    cache = target.new_cache()
    written = [*prompt, int(feed(target, cache, prompt)[-1].argmax())]
    while len(written) < len(expected):
        written.append(int(feed(target, cache, written[-1:])[-1].argmax()))
    assert written == expected.tolist()
    assert cache.length == len(written) - 1


@both(TREES)
def test_every_node_of_a_tree_equals_its_path(name: str, attention: str) -> None:
    target, prompt, tokens = load(name, attention), text(11), text(len(PARENTS))
    cache = target.new_cache()
    feed(target, cache, prompt)
    [verification] = target.forward([tree_rows(cache, tokens)])
    for node in range(len(PARENTS)):
        own_path = [*prompt, *(tokens[i] for i in path(node))]
        close(verification.logits[node], truth(target, own_path)[-1])


@both(TREES)
@pytest.mark.parametrize("leaf", [6, 7, 5, 0])
def test_a_committed_path_continues_like_its_text(name: str, attention: str, leaf: int) -> None:
    target, written, tokens = load(name, attention), text(9), text(len(PARENTS))
    cache = target.new_cache()
    feed(target, cache, written)
    for _ in range(2):
        target.forward([tree_rows(cache, tokens)])
        target.commit(cache, path(leaf))
        written += [tokens[i] for i in path(leaf)]
    assert cache.length == len(written)
    more = text(3)
    close(feed(target, cache, more), truth(target, [*written, *more])[-3:])


@both(
    [
        "llama",
        "qwen3",
        "gpt2",
        "gpt-neox",
        "opt",
        "mistral-sliding",
        "gemma3",
        "bloom",
        "bamba",
        "falcon-mamba",
    ]
)
def test_features_are_the_hidden_states(name: str, attention: str) -> None:
    target, tokens = load(name, attention), text(10)
    with torch.no_grad():
        states = target.model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    cache = target.new_cache()
    target.set_feature_layers((1, 0))
    try:
        [first] = target.forward([rows(cache, tokens[:7])])
        target.commit(cache, range(7))
        [second] = target.forward([rows(cache, tokens[7:])])
    finally:
        target.set_feature_layers(())
    assert first.features is not None
    assert second.features is not None
    close(torch.cat((first.features, second.features)), torch.cat((states[2][0], states[1][0]), -1))
    assert target.forward([rows(target.new_cache(), tokens)])[0].features is None


OLD = tuple(int(part) for part in transformers.__version__.split(".")[:2]) < (5, 24)


@pytest.mark.skipif(OLD, reason="this transformers cannot give chosen hidden states only")
def test_other_layers_outputs_are_not_kept() -> None:
    target, seen = load("llama"), []
    target.set_feature_layers((1,))
    handle = target.model.register_forward_hook(lambda module, args, output: seen.append(output.hidden_states))
    try:
        target.forward([rows(target.new_cache(), text(4))])
    finally:
        handle.remove()
        target.set_feature_layers(())
    assert [state is not None for state in seen[0]] == [False, False, True, False]


def test_features_follow_the_tree() -> None:
    target, prompt, tokens = load("llama", "sdpa"), text(5), text(len(PARENTS))
    cache = target.new_cache()
    feed(target, cache, prompt)
    target.set_feature_layers((1,))
    try:
        [verification] = target.forward([tree_rows(cache, tokens)])
    finally:
        target.set_feature_layers(())
    assert verification.features is not None
    own_path = torch.tensor([[*prompt, *(tokens[i] for i in path(7))]])
    with torch.no_grad():
        states = target.model(own_path, output_hidden_states=True).hidden_states
    close(verification.features[7], states[2][0, -1])


@both(CHAINS)
@pytest.mark.parametrize("prompt_length", [1, 2, 13])
def test_rejected_ends_of_chains_leave_no_trace(name: str, attention: str, prompt_length: int) -> None:
    target, written = load(name, attention), text(prompt_length)
    cache = target.new_cache()
    close(feed(target, cache, written), truth(target, written))
    for kept in (3, 1, 5, 2, 1, 4):  # past the sliding window of 8 tokens
        chain = text(5)
        causal = torch.ones(5, 5, dtype=torch.bool).tril()
        [verification] = target.forward([rows(cache, chain, visible=causal)])
        close(verification.logits, truth(target, [*written, *chain])[-5:])
        target.commit(cache, range(kept))
        written += chain[:kept]
    assert cache.length == len(written)


@pytest.mark.skipif("mistral-sliding" not in CHAINS, reason="this transformers cannot roll back sliding layers")
def test_sliding_layers_keep_no_more_than_their_window() -> None:
    target = load("mistral-sliding")
    cache = target.new_cache()
    for _ in range(3):
        feed(target, cache, text(10))
        assert {layer.keys.shape[-2] for layer in cache.states.layers} == {7}  # the window less the new token


@pytest.mark.parametrize("name", [*TREES, *CHAINS])
def test_a_forward_pass_overwrites_pending_rows(name: str) -> None:
    target, prompt, tokens = load(name), text(10), text(4)
    cache = target.new_cache()
    feed(target, cache, prompt)
    target.forward([rows(cache, text(6))])
    close(feed(target, cache, tokens), truth(target, [*prompt, *tokens])[-4:])


@pytest.mark.parametrize("name", PLAIN)
def test_models_without_rollback_still_take_text_in_pieces(name: str) -> None:
    target, tokens = load(name), text(12)
    cache = target.new_cache()
    pieces = [feed(target, cache, piece) for piece in (tokens[:5], tokens[5:9], tokens[9:10], tokens[10:])]
    close(torch.cat(pieces), truth(target, tokens))
    target.forward([rows(cache, [5])])
    with pytest.raises(BastionError, match="decode it plainly"):
        target.commit(cache, ())


@pytest.mark.parametrize(("name", "passes"), [("bamba", 1), ("falcon-mamba", 6)])
def test_pieces_of_a_prompt_run_in_one_pass_where_the_model_reads_its_state(name: str, passes: int) -> None:
    target, tokens, ran = load(name), text(40), []
    cache = target.new_cache()
    feed(target, cache, tokens[:34])
    handle = target.model.register_forward_hook(lambda *arguments: ran.append(1))
    logits = feed(target, cache, tokens[34:])
    handle.remove()
    assert len(ran) == passes
    close(logits, truth(target, tokens)[34:])


@pytest.mark.parametrize("name", ["llama", "gemma3", "bamba"])
def test_a_cache_made_in_inference_mode_serves_outside_it(name: str) -> None:
    target, tokens = load(name), text(9)
    cache = target.new_cache(64)
    with torch.inference_mode():
        feed(target, cache, tokens[:5])
    close(torch.cat([feed(target, cache, tokens[i : i + 1]) for i in range(5, 9)]), truth(target, tokens)[5:])


@pytest.mark.parametrize("name", [*CHAINS, *PLAIN])
def test_trees_are_refused_with_the_reason(name: str) -> None:
    target = load(name)
    cache = target.new_cache()
    feed(target, cache, text(4))
    with pytest.raises(BastionError, match="cannot verify trees: ") as error:
        target.forward([tree_rows(cache, text(len(PARENTS)))])
    assert target.tree_support_reason in str(error.value)


def test_a_chain_keeps_only_its_beginning() -> None:
    target = load("bloom")
    cache = target.new_cache()
    target.forward([rows(cache, text(4))])
    with pytest.raises(BastionError, match="draft chains"):
        target.commit(cache, (0, 2))


@pytest.mark.parametrize("name", ["llama", "bloom"])
def test_rows_that_are_not_pending_cannot_be_kept(name: str) -> None:
    target = load(name)
    cache = target.new_cache()
    target.forward([rows(cache, text(2))])
    with pytest.raises(IndexError, match="only 2 are pending"):
        target.commit(cache, (0, 1, 2))


class Written(TorchDispatchMode):
    """Counts the elements of all tensors that operations make or change (views are free)."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and not function.is_view:
            self.elements += result.numel()
        return result


def test_commit_moves_accepted_rows_only_whatever_the_context() -> None:
    target = load("llama")
    written = {}
    for length in (10, 100):
        cache = target.new_cache(128)
        feed(target, cache, text(length))
        target.forward([tree_rows(cache, text(len(PARENTS)))])
        with Written() as counter:
            target.commit(cache, path(7))
        written[length] = counter.elements
    moved = len(path(7)) - 1  # the root is in place already
    # keys and values of each row, read into a copy and written to their slots, and the slots' numbers
    row = target.shape.layers * 2 * target.shape.kv_heads * target.shape.head_dim
    assert written[10] == written[100]
    assert moved * row <= written[100] <= 2 * moved * row + 2 * moved


def test_commit_moves_nothing_that_is_in_place() -> None:
    target = load("llama")
    cache = target.new_cache(128)
    target.forward([rows(cache, text(20))])
    with Written() as counter:
        target.commit(cache, range(17))
    assert counter.elements == 0


def test_buffers_stay_where_they_are_and_grow_by_doubling() -> None:
    target, tokens = load("llama"), text(96)
    cache = target.new_cache(70)
    assert isinstance(cache, TreeCache)
    layer = cache.states.layers[-1]
    assert isinstance(layer, TreeLayer)
    logits = [feed(target, cache, tokens[:60])]
    address = layer.keys.data_ptr()
    logits.append(feed(target, cache, tokens[60:70]))
    assert (layer.keys.data_ptr(), layer.keys.shape[2]) == (address, 70)
    logits.append(feed(target, cache, tokens[70:]))
    assert layer.keys.shape[2] == layer.values.shape[2] == 140
    close(torch.cat(logits), truth(target, tokens))


@pytest.mark.parametrize("name", ["llama", "mistral-sliding", "bamba", "bloom"])
@pytest.mark.parametrize("first", [0, 3, 5])
def test_logits_start_at_the_row_asked_for(name: str, first: int) -> None:
    target, tokens = load(name), text(11)
    cache = target.new_cache()
    feed(target, cache, tokens[:6])
    one = rows(cache, tokens[6:])
    one.first_logit = first
    [verification] = target.forward([one])
    close(verification.logits, truth(target, tokens)[6 + first :])


def test_the_head_is_not_run_on_rows_nobody_asks_for() -> None:
    target, seen = load("llama"), []
    head = target.model.get_output_embeddings()
    handle = head.register_forward_hook(lambda module, args, output: seen.append(args[0].shape[1]))
    one = rows(target.new_cache(), text(20))
    one.first_logit = 18
    target.forward([one])
    handle.remove()
    assert seen == [2]


@pytest.mark.parametrize("name", ["qwen2", "gemma3"])
def test_sequences_of_a_batch_do_not_mix(name: str) -> None:
    target, one, two = load(name), text(9), text(5)
    caches = target.new_cache(), target.new_cache()
    first, second = target.forward([rows(caches[0], one), rows(caches[1], two)])
    close(first.logits, truth(target, one))
    close(second.logits, truth(target, two))


@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt-neox", "gemma3", "falcon-mamba"])
def test_drafters_can_share_embeddings_and_head(name: str) -> None:
    target, tokens = load(name), torch.tensor(text(6))
    close(
        target.embed(tokens),
        target.model.get_input_embeddings().weight[tokens] * (32**0.5 if name == "gemma3" else 1),
    )
    with torch.no_grad():
        output = target.model(tokens[None], output_hidden_states=True)
    hidden = output.hidden_states[-1]
    close(target.head(hidden), output.logits)
    chosen = torch.tensor([9, 4, 30])
    close(target.head(hidden, chosen), output.logits[..., chosen])
    other = torch.tensor([1, 2])
    close(target.head(hidden, other), output.logits[..., other])


@pytest.mark.parametrize("name", ["gemma2", "granite"])
def test_a_head_whose_logits_are_changed_afterwards_is_not_shared(name: str) -> None:
    target = load(name)
    with pytest.raises(BastionError, match="head of its own"):
        target.head(torch.zeros(1, 32))


@pytest.mark.parametrize("layers", [(3,), (-1,), (0, 2)])
def test_layers_that_give_no_features_are_refused(layers: tuple[int, ...]) -> None:
    target = load("llama")
    with pytest.raises(BastionError, match=r"llama: transformers gives no output|llama has layers 0 to 2"):
        target.set_feature_layers(layers)
    assert target.feature_layers == ()


def altered(name: str, keyword: str) -> Any:
    """A model that ignores an argument of its forward."""
    kind, sizes = CONFIGS[name]
    model = AutoModelForCausalLM.from_config(getattr(transformers, kind)(**sizes))
    forward = model.forward

    def forgetful(**arguments: Any) -> Any:
        return forward(**(arguments | {keyword: None}))

    forgetful.__signature__ = inspect.signature(forward)  # type: ignore[attr-defined]
    model.forward = forgetful
    return model


@pytest.mark.parametrize("keyword", ["attention_mask", "position_ids"])
def test_a_model_that_ignores_masks_or_positions_gets_chains(keyword: str) -> None:
    target = HuggingFaceTarget(altered("llama", keyword), "forgetful", "digest")
    assert target.tree_support == "chain"
    assert "the logits of a test tree differ" in target.tree_support_reason


def test_a_cache_that_does_not_roll_back_gets_plain_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DynamicCache, "crop", lambda self, count: None)
    target = HuggingFaceTarget(altered("llama", "attention_mask"), "forgetful", "digest")
    assert target.tree_support == "none"
    assert "test chain" in target.tree_support_reason


@pytest.mark.parametrize(
    ("dtype", "support"), [(torch.bfloat16, "tree"), (torch.float16, "tree"), (torch.float32, "none")]
)
def test_only_rounding_as_coarse_as_the_dtype_is_forgiven(dtype: torch.dtype, support: str) -> None:
    """A GPU's kernels round one row and many rows differently; tiny models on a CPU show none of it."""
    kind, sizes = CONFIGS["llama"]
    model = AutoModelForCausalLM.from_config(getattr(transformers, kind)(**sizes), dtype=dtype)
    for layer in model.model.layers:
        layer.mlp.register_forward_hook(lambda module, args, output: output * (1 + 0.01 * torch.randn_like(output)))
    target = HuggingFaceTarget(model, "noisy", "digest")
    assert (target.tree_support, target.dtype) == (support, dtype)


def test_sizes_come_from_the_config() -> None:
    shape = load("qwen3").shape
    assert (shape.layers, shape.hidden, shape.heads, shape.kv_heads) == (3, 32, 4, 2)
    assert (shape.head_dim, shape.intermediate, shape.vocab) == (16, 48, 64)
    assert load("gemma3n").shape.intermediate == 96
    assert (load("gpt2").shape.intermediate, load("gpt2").shape.kv_heads) == (128, 4)
    assert (load("opt").shape.intermediate, load("opt").max_context) == (48, 128)


YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0, 3.0, 4.0, 8.0], "rope_theta": 1e4}


@pytest.mark.parametrize(
    ("kind", "rope", "context"),
    [
        ("LlamaConfig", YARN, 512),
        ("LlamaConfig", YARN | {"original_max_position_embeddings": 64}, 256),
        ("LlamaConfig", YARN | {"original_max_position_embeddings": 16}, 128),
        # transformers scales all rows of a pass by its last position: drafts would change what is written
        ("LlamaConfig", {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}, 128),
        ("Phi3Config", LONG | {"original_max_position_embeddings": 40}, 40),
    ],
)
def test_scaled_positions_set_the_context(kind: str, rope: dict[str, Any], context: int) -> None:
    original = {"original_max_position_embeddings": 40} if kind == "Phi3Config" else {}
    config = getattr(transformers, kind)(**GROUPED, rope_parameters=dict(rope), **original)
    target = HuggingFaceTarget(AutoModelForCausalLM.from_config(config), "scaled", "digest")
    assert (target.max_context, target.tree_support) == (context, "tree")


def test_a_model_that_fails_or_overflows_is_refused_in_one_line() -> None:
    kind, sizes = CONFIGS["llama"]
    model = AutoModelForCausalLM.from_config(getattr(transformers, kind)(**sizes), dtype=torch.float16)
    model.lm_head.weight.data.fill_(torch.inf)
    with pytest.raises(BastionError, match="not finite in float16: load it with another dtype"):
        HuggingFaceTarget(model, "huge", "digest")
    model.model.norm.weight.data = torch.ones(7, dtype=torch.float16)
    with pytest.raises(BastionError, match=r"a first forward pass of odd failed: .*7.*; try another") as error:
        HuggingFaceTarget(model, "odd", "digest")
    assert "\n" not in str(error.value)


def test_models_that_are_no_decoders_are_refused() -> None:
    encoder_decoder = transformers.T5Config(
        vocab_size=64, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    with pytest.raises(BastionError, match="encoder-decoder"):
        HuggingFaceTarget(transformers.T5ForConditionalGeneration(encoder_decoder), "t5", "digest")
    with pytest.raises(BastionError, match="AutoModelForCausalLM"):
        HuggingFaceTarget(transformers.LlamaModel(transformers.LlamaConfig(**GROUPED)), "headless", "digest")
