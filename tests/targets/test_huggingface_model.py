"""transformers models end to end: what `Model` writes with every policy is what `generate` writes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from bastion.decoding.budget import BudgetPolicy, Chain, FixedBudget, Plain, Throughput
from bastion.drafters.ngram import NgramDrafter
from bastion.model import Model
from bastion.targets.huggingface import HuggingFaceTarget

SPREAD = 0.3  # weights large enough for a wrong mask or position to change what is written
TOKENS: dict[str, Any] = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
SMALL: dict[str, Any] = TOKENS | {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": SPREAD,
}
GPT2 = TOKENS | {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 96, "initializer_range": SPREAD}
GPT_NEO: dict[str, Any] = TOKENS | {
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "attention_types": [[["global", "local"], 1]],
    "window_size": 8,
    "max_position_embeddings": 256,
    "initializer_range": SPREAD,
}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 4,
    "long_factor": [2.0, 3.0, 4.0, 8.0],
    "rope_theta": 1e4,
    "original_max_position_embeddings": 64,
}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2Config", GPT2),
    "gpt-neo": ("GPTNeoConfig", GPT_NEO),
    "gemma2": ("Gemma2Config", SMALL | {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 8}),
    "phi3-longrope": (
        "Phi3Config",
        SMALL | {"original_max_position_embeddings": 64, "rope_parameters": LONGROPE},
    ),
    "falcon-mamba": (
        "FalconMambaConfig",
        TOKENS | {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "initializer_range": SPREAD},
    ),
}
NEW_TOKENS = 40
POLICIES = [Plain(), Chain(8), FixedBudget(8)]


@cache
def load(name: str) -> HuggingFaceTarget:
    kind, sizes = CONFIGS[name]
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(getattr(transformers, kind)(**sizes), attn_implementation="eager")
    return HuggingFaceTarget(model, name, "digest")


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """Words t0 to t63."""
    backend = Tokenizer(models.WordLevel({f"t{i}": i for i in range(64)}, unk_token="t0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


@cache
def prompt(seed: int) -> list[int]:
    """27 tokens: nine, three times over, for the drafter to find."""
    return torch.randint(2, 64, (9,), generator=torch.Generator().manual_seed(seed)).tolist() * 3


@cache
def generated(name: str, seed: int) -> list[int]:
    """What transformers writes, up to the end of the context."""
    inputs, target = torch.tensor([prompt(seed)]), load(name)
    new = min(NEW_TOKENS, target.max_context - inputs.shape[1])
    output = target.model.generate(
        inputs, attention_mask=torch.ones_like(inputs), do_sample=False, max_new_tokens=new, pad_token_id=0
    )
    return output[0, inputs.shape[1] :].tolist()


def words(seed: int) -> str:
    return " ".join(f"t{token}" for token in prompt(seed))


@pytest.fixture(autouse=True)
def _small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One thread, prompts in pieces, a short probe, and nothing in the user's cache."""
    monkeypatch.setenv("BASTION_CACHE", str(tmp_path))
    monkeypatch.setattr("bastion.decoding.loop.PREFILL_ROWS", 16)
    monkeypatch.setattr("bastion.cost.probe.ROWS", (1, 2, 4, 8))
    monkeypatch.setattr("bastion.cost.probe.CONTEXTS", (8, 16))
    monkeypatch.setattr("bastion.cost.probe.REPEATS", 1)
    monkeypatch.setattr("bastion.cost.probe.ROUNDS", 2)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", list(CONFIGS))
@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
def test_every_policy_writes_what_generate_writes(name: str, policy: BudgetPolicy) -> None:
    target = load(name)
    model = Model(target, tokenizer(), NgramDrafter(), policy)
    rounds = 0
    for seed in range(2):
        result = model.generate(words(seed), max_new_tokens=NEW_TOKENS, raw=True)
        assert result.token_ids == generated(name, seed)
        rounds += result.stats.rounds
    written = sum(len(generated(name, seed)) - 1 for seed in range(2))  # the first tokens come with the prompts
    if target.tree_support == "none" or isinstance(policy, Plain):
        assert rounds == written
    else:
        assert rounds < written  # some drafts were accepted


def test_the_automatic_policy_probes_and_writes_what_generate_writes() -> None:
    model = Model(load("gpt2"), tokenizer(), NgramDrafter(), "auto")
    result = model.generate(words(0), max_new_tokens=NEW_TOKENS, raw=True)
    assert isinstance(model.policy, Throughput)
    assert result.token_ids == generated("gpt2", 0)


def test_texts_written_side_by_side_do_not_mix() -> None:
    model = Model(load("gemma2"), tokenizer(), NgramDrafter(), FixedBudget(8))
    results = model.generate_batch([words(seed) for seed in range(2)], max_new_tokens=NEW_TOKENS, raw=True)
    assert [result.token_ids for result in results] == [generated("gemma2", seed) for seed in range(2)]


def test_drafts_end_with_the_context() -> None:
    target = load("gpt2")
    model = Model(target, tokenizer(), NgramDrafter(), FixedBudget(8))
    result = model.generate(words(1), max_new_tokens=500, raw=True)
    assert len(result.token_ids) == 96 - len(prompt(1))
    assert result.token_ids[:NEW_TOKENS] == generated("gpt2", 1)
