"""The embedded model on real prompts: speculative decoding writes what plain decoding and transformers write.

By default a handful of short texts. BASTION_EXACTNESS=prompts,tokens sets another size; 120,128 takes under an hour.
"""

import json
import os

import pytest
import torch
from transformers import AutoModelForCausalLM

import bastion
from bastion.drafters.loading import load_drafter

pytestmark = pytest.mark.model

PROMPTS, TOKENS = map(int, os.environ.get("BASTION_EXACTNESS", "6,32").split(","))
BATCH = 24
NEAR_TIE = 0.3  # in bfloat16: logits of about 20 are rounded to 1/8, on both sides
SETS = ("gsm8k", "humaneval", "mt-bench")
POLICIES = ("chain:4", "fixed:4", "fixed:8", "roofline", "profile", "auto")


@pytest.fixture(scope="module")
def prompts(shared):
    each = -(-PROMPTS // len(SETS))
    texts = []
    for name in SETS:
        lines = (shared / "data" / f"{name}.jsonl").read_text().splitlines()[:each]
        texts += [json.loads(line)["turns"][0] for line in lines]
    return texts[:PROMPTS]


def write(model, prompts):
    tokens = []
    for start in range(0, len(prompts), BATCH):
        results = model.generate_batch(prompts[start : start + BATCH], max_new_tokens=TOKENS)
        tokens += [result.token_ids for result in results]
    return tokens


@pytest.fixture(scope="module")
def model(embedded):
    return bastion.load(embedded, dtype="float32", policy="plain")


@pytest.fixture(scope="module")
def plain(model, prompts):
    model.set_policy("plain")
    return write(model, prompts)


def test_plain_decoding_is_that_of_transformers(embedded, model, prompts, plain):
    reference = AutoModelForCausalLM.from_pretrained(embedded, dtype=torch.float32)
    for start in range(0, len(prompts), BATCH):
        ids = [torch.tensor(model.encode(prompt)) for prompt in prompts[start : start + BATCH]]
        padded = torch.nn.utils.rnn.pad_sequence(ids, True, reference.config.pad_token_id, "left")
        mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(i) for i in ids], True, 0, "left")
        out = reference.generate(padded, attention_mask=mask, max_new_tokens=TOKENS, do_sample=False)
        for tokens, row in zip(plain[start : start + BATCH], out[:, padded.shape[1] :].tolist(), strict=True):
            assert row[: len(tokens)] == tokens
            assert set(row[len(tokens) :]) <= {reference.config.pad_token_id}


@pytest.mark.parametrize("policy", POLICIES)
def test_ngram_trees_change_nothing(model, prompts, plain, policy):
    model.set_policy(policy)
    assert write(model, prompts) == plain


@pytest.mark.parametrize("policy", ["chain", "fixed:8", "fixed:32"])
def test_the_shipped_drafter_changes_nothing(model, prompts, plain, policy):
    drafter = load_drafter("smollm2-135m-dflash", model.target)
    other = bastion.Model(model.target, model.tokenizer, drafter, policy, model.end_ids)
    results = [other.generate(prompt, max_new_tokens=TOKENS) for prompt in prompts]
    assert [result.token_ids for result in results] == plain
    assert sum(result.stats.new_tokens for result in results) > 1.2 * sum(result.stats.rounds for result in results)


def test_in_bfloat16_any_difference_is_a_near_tie(embedded, model, prompts):
    half = bastion.load(embedded, dtype="bfloat16", policy="plain")
    reference, differences = write(half, prompts), 0
    half.set_policy("fixed:4")
    for prompt, ours, theirs in zip(prompts, write(half, prompts), reference, strict=True):
        if ours == theirs:
            continue
        place = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b)
        text = half.encode(prompt) + ours[:place]
        logits = _logits(model.target, text)  # re-scored in float32
        assert abs(logits[ours[place]] - logits[theirs[place]]) < NEAR_TIE
        assert logits.max() - logits[ours[place]] < NEAR_TIE
        differences += 1
    print(f"{differences} of {len(prompts)} texts differ in bfloat16")


def _logits(target, tokens):
    from bastion.targets.base import Rows

    row = Rows(torch.tensor(tokens), torch.arange(len(tokens)), target.new_cache(), first_logit=len(tokens) - 1)
    return target.forward([row])[0].logits[0]


def test_same_seed_same_text_above_temperature_zero(model, prompts):
    sampling = {"max_new_tokens": TOKENS, "temperature": 0.8, "top_p": 0.95, "seed": 5}
    model.set_policy("plain")
    expected = model.generate(prompts[0], **sampling).token_ids
    for policy in ("fixed:12", "profile"):
        model.set_policy(policy)
        assert model.generate(prompts[0], **sampling).token_ids == expected
