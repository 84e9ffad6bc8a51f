"""`model.generate` with and without `custom_generate`."""

import gc
import string
import weakref
from functools import cache

import pytest
import torch
import transformers
from scipy.stats import chisquare
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, StoppingCriteria, StopStringCriteria
from transformers.generation import BaseStreamer, LogitsProcessor

import bastion
from bastion import BastionError
from bastion.drafters.dflash import DFlashConfig, DFlashDrafter, DFlashModel, save_model
from bastion.drafters.marginal import MarginalProposal
from bastion.drafters.mixed import alone
from bastion.drafters.ngram import NgramDrafter
from bastion.integrations import transformers as integration
from bastion.targets.huggingface import HuggingFaceTarget
from tiny import FixedDrafter, make_model

# Weights large enough for a wrong mask, position or padding to change what is written.
TOKENS = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.3}
SMALL = TOKENS | {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip
CONFIGS = {
    "llama": ("LlamaConfig", SMALL),
    "qwen3": ("Qwen3Config", SMALL | {"head_dim": 16}),
    "gpt2": ("GPT2Config", TOKENS | {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}),
    "mistral-sliding": ("MistralConfig", SMALL | {"sliding_window": 8}),
    "gemma2": ("Gemma2Config", SMALL | {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 8}),
    "falcon-mamba": ("FalconMambaConfig", TOKENS | {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}),
}
OURS = {"custom_generate": bastion.custom_generate, "policy": "fixed:8", "drafter": "ngram"}

pytestmark = pytest.mark.filterwarnings("ignore:bastion. .* verifies")


@cache
def load(name):
    kind, sizes = CONFIGS[name]
    torch.manual_seed(3)
    return AutoModelForCausalLM.from_config(getattr(transformers, kind)(**sizes)).eval()


@pytest.fixture(scope="module")
def llama():
    return load("llama")


def prompts(*lengths):
    """Texts that repeat themselves, padded at the left."""
    generator = torch.Generator().manual_seed(5)
    longest = max(lengths)
    ids, mask = torch.zeros(len(lengths), longest, dtype=torch.long), torch.zeros(len(lengths), longest).long()
    for row, length in enumerate(lengths):
        piece = torch.randint(3, 64, (9,), generator=generator).repeat(4)[:length]
        ids[row, longest - length :], mask[row, longest - length :] = piece, 1
    return {"input_ids": ids, "attention_mask": mask}


def both(model, inputs, **settings):
    """What transformers writes, and what we write."""
    given = {"do_sample": False, "max_new_tokens": 24} | settings
    ours = {name: given.pop(name) for name in ("policy", "drafter") if name in given}
    return model.generate(**inputs, **given), model.generate(**inputs, **given, **(OURS | ours))


def same(pair):
    assert pair[1].tolist() == pair[0].tolist()
    return pair[0]


@pytest.fixture
def passes(monkeypatch):
    """The number of rows of each pass of the target."""
    rows = []
    forward = HuggingFaceTarget.forward

    def counted(self, batch):
        rows.append([len(one.tokens) for one in batch])
        return forward(self, batch)

    monkeypatch.setattr(HuggingFaceTarget, "forward", counted)
    return rows


class Knowing:
    """Knows what will be written, but ranks it second in every third place: so branches of trees are accepted."""

    name, digest, feature_layers, depth = "knowing", "knowing", (), 4

    def __init__(self, inputs, written):
        starts = (inputs["attention_mask"] == 0).sum(1).tolist()
        self.texts = [row[start:] for row, start in zip(written.tolist(), starts, strict=True)]

    def propose(self, contexts):
        return [MarginalProposal(self.guess(context.tokens).log_softmax(-1)) for context in contexts]

    def guess(self, tokens):
        text = next(text for text in self.texts if text[: len(tokens)] == tokens)
        logits = torch.zeros(self.depth, 64)
        for depth, place in enumerate(range(len(tokens), min(len(tokens) + self.depth, len(text)))):
            logits[depth, text[place]] = 4.0
            logits[depth, (text[place] + 1) % 64] = 5.0 if place % 3 == 0 else 3.0
        return logits


@pytest.mark.parametrize("name", list(CONFIGS))
def test_greedy_texts_are_those_of_generate(name, passes):
    model, inputs = load(name), prompts(30, 10, 20)
    settings = {"do_sample": False, "max_new_tokens": 20, "eos_token_id": None}
    expected = model.generate(**inputs, **settings)
    drafter, needed = Knowing(inputs, expected), {}
    model.generate(**inputs, **OURS)  # tries out what the model can verify
    for policy in ("plain", "chain:4", "fixed:12"):
        passes.clear()
        written = model.generate(**inputs, **settings, **(OURS | {"drafter": drafter, "policy": policy}))
        assert written.tolist() == expected.tolist()
        needed[policy] = len(passes)
    support = integration._WRAPPED[model].target.tree_support  # of windows, it depends on the version of transformers
    if support == "none":
        assert needed["fixed:12"] == needed["plain"]
    else:
        assert needed["chain:4"] < 0.8 * needed["plain"]
        assert needed["fixed:12"] < (0.6 if support == "tree" else 0.8) * needed["plain"]
    assert support == {"llama": "tree", "qwen3": "tree", "gpt2": "tree", "falcon-mamba": "none"}.get(name, support)


def test_one_text_with_the_ngram_drafter(llama, passes):
    same(both(llama, prompts(27), eos_token_id=None, max_new_tokens=60))
    assert len([rows for rows in passes if 1 < rows[0] <= 9]) > 5  # drafts of up to 8 nodes


def test_a_dflash_drafter_from_a_folder_and_as_an_object(tmp_path):
    model = load("qwen3")
    config = DFlashConfig.from_dict(
        {
            "model_type": "qwen3", "block_size": 6, "hidden_act": "silu", "hidden_size": 32, "vocab_size": 64,
            "dflash_config": {"mask_token_id": 3, "target_layer_ids": [0]}, "num_hidden_layers": 1,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 48,
            "rms_norm_eps": 1e-6, "rope_theta": 1e4, "max_position_embeddings": 512, "attention_bias": False,
        }
    )  # fmt: skip
    drafter = DFlashModel(config)
    save_model(drafter, tmp_path)
    as_object = DFlashDrafter(drafter.eval().requires_grad_(False), HuggingFaceTarget(model, "tiny", "digest"))
    for guesses, policy in ((str(tmp_path), "chain"), (tmp_path, "fixed:8"), (as_object, "fixed:8")):
        same(both(model, prompts(30, 9), drafter=guesses, policy=policy, max_new_tokens=12))


@pytest.mark.parametrize(
    "settings",
    [
        {"repetition_penalty": 1.5},
        {"no_repeat_ngram_size": 2},
        {"bad_words_ids": [[7, 8], [9]], "suppress_tokens": [5, 6], "begin_suppress_tokens": [11]},
        {"encoder_repetition_penalty": 1.5, "encoder_no_repeat_ngram_size": 2},
        {"prefix_allowed_tokens_fn": lambda row, ids: range(3 + 8 * row, 30 + 8 * row + len(ids) % 3)},
        {"exponential_decay_length_penalty": (5, 1.3)},
        {"forced_eos_token_id": 2, "eos_token_id": 40},
        {"max_length": 40, "max_new_tokens": None},
        {"num_return_sequences": 2, "num_beams": 1, "do_sample": True, "top_k": 1},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_settings_of_a_generation_config_hold_in_a_padded_batch(llama, settings):
    inputs = prompts(30, 9, 21)
    output = same(both(llama, inputs, **settings))
    assert output.tolist() != llama.generate(**inputs, do_sample=False, max_new_tokens=24).tolist()


class ByAllThatIsShown(LogitsProcessor):
    """Depends on each shown token, padding included, on the length and on the row's scores."""

    def __call__(self, input_ids, scores):
        favoured = (input_ids.sum(1) * 7 + input_ids.shape[1]) % scores.shape[1]
        scores[torch.arange(len(scores)), favoured] += 4.0  # in place, as some do
        return scores - 0.5 * scores.roll(1, 1)


def test_a_processor_of_ones_own_sees_what_generate_shows(llama):
    inputs = prompts(30, 9, 21)
    same(both(llama, inputs, logits_processor=[ByAllThatIsShown()]))
    inputs["input_ids"][1, 0] = 5  # below the mask: no model sees it, processors do
    same(both(llama, inputs, logits_processor=[ByAllThatIsShown()]))


def test_guidance_holds_for_one_text_and_is_refused_for_more(llama):
    inputs = prompts(27)
    guided = same(both(llama, inputs, guidance_scale=1.8))
    assert guided.tolist() != llama.generate(**inputs, do_sample=False, max_new_tokens=24).tolist()
    with pytest.raises(BastionError, match="pass one prompt"):
        llama.generate(**prompts(27, 9), guidance_scale=1.8, **OURS)


def eos_of(model, inputs, place):
    """Ids that the rows write as their n-th tokens, as `place` says: they end them there at the latest."""
    written = model.generate(**inputs, do_sample=False, max_new_tokens=24, eos_token_id=None)
    return [int(written[row, inputs["input_ids"].shape[1] + step]) for row, step in enumerate(place)]


def test_texts_of_a_batch_end_early_and_are_padded(llama):
    inputs = prompts(30, 9, 21)
    ends = eos_of(llama, inputs, (2, 9, 5))
    output = same(both(llama, inputs, eos_token_id=ends))
    assert output.shape[1] < 30 + 24
    assert (output[:, -1] == 0).any()
    same(both(llama, inputs, eos_token_id=ends, pad_token_id=33))
    same(both(llama, inputs, eos_token_id=ends[:1], pad_token_id=None))


@pytest.mark.parametrize("least", [{"min_new_tokens": 20}, {"min_length": 50}], ids=str)
def test_a_least_length_counts_as_in_generate(llama, least):
    inputs = prompts(30, 9, 21)
    ends = eos_of(llama, inputs, (2, 9, 5))
    output = same(both(llama, inputs, eos_token_id=ends, **least))
    assert not torch.isin(output[:, 30:50], torch.tensor(ends)).any()


class Multiple(StoppingCriteria):
    """Ends a text whose tokens, padding included, have a sum that is a multiple of 6, or a great number of tokens."""

    def __call__(self, input_ids, scores, **kwargs):
        return (input_ids.sum(1) % 6 == 0) | (input_ids.shape[1] > 44)


class ByRow(StoppingCriteria):
    """Has a length of its own for each row."""

    def __call__(self, input_ids, scores, **kwargs):
        return torch.tensor([35, 41, 33]) <= input_ids.shape[1]


class ByScore(StoppingCriteria):
    """Ends a text whose last token was a matter of course."""

    def __call__(self, input_ids, scores, **kwargs):
        assert len(scores) == input_ids.shape[1] - 30
        return scores[-1].softmax(-1).amax(-1) > 0.25


def test_stopping_criteria_end_each_text_where_generate_does(llama):
    inputs = prompts(30, 9, 21)
    output = same(both(llama, inputs, stopping_criteria=[Multiple()]))
    lengths = (output[:, 30:] != 0).sum(1).tolist()
    assert len(set(lengths)) > 1
    assert max(lengths) <= 15
    assert same(both(llama, inputs, stopping_criteria=[ByRow()])).shape[1] == 41
    drafter = Knowing(inputs, llama.generate(**inputs, do_sample=False, max_new_tokens=24, eos_token_id=None))
    settings = {"return_dict_in_generate": True, "output_scores": True, "stopping_criteria": [ByScore()]}
    expected, written = both(llama, inputs, **settings, drafter=drafter)
    assert same((expected.sequences, written.sequences)).shape[1] < 30 + 24


def test_without_an_eos_token_criteria_are_refused_in_a_batch_only(llama):
    same(both(llama, prompts(27), stopping_criteria=[Multiple()], eos_token_id=None))
    with pytest.raises(BastionError, match="eos_token_id"):
        llama.generate(**prompts(27, 9), stopping_criteria=[Multiple()], eos_token_id=None, **OURS)


def letters():
    """A tokenizer whose 64 tokens are characters."""
    characters = string.ascii_letters + string.digits + ".,"
    backend = Tokenizer(models.BPE({character: i for i, character in enumerate(characters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def test_stop_strings_end_the_text_as_a_criterion_and_are_never_ignored(llama):
    inputs = prompts(27)
    without = llama.generate(**inputs, do_sample=False, max_new_tokens=24, eos_token_id=None)[0]
    stop = letters().decode(without[27 + 6 : 27 + 8])
    output = same(both(llama, inputs, stopping_criteria=[StopStringCriteria(letters(), [stop])]))
    assert 27 < output.shape[1] <= 27 + 8
    with pytest.raises(ValueError, match="tokenizer"):  # which transformers does not find when it calls a function
        llama.generate(**inputs, stop_strings=[stop], tokenizer=letters(), **OURS)


def test_padding_takes_no_room_of_the_context(llama):
    inputs = {name: torch.nn.functional.pad(value, (10, 0)) for name, value in prompts(27).items()}
    same(both(llama, inputs, max_new_tokens=256 - 27, eos_token_id=eos_of(llama, prompts(27), (9,))))


class Recorder(BaseStreamer):
    def __init__(self):
        self.events = []

    def put(self, value):
        self.events.append(value.tolist())

    def end(self):
        self.events.append("end")


@pytest.mark.parametrize("lengths", [(27,), (30, 10, 20)], ids=["one", "batch"])
def test_a_streamer_gets_prompt_tokens_and_end(llama, lengths):
    inputs = prompts(*lengths)
    ends = eos_of(llama, inputs, (9, 2, 5)[: len(lengths)])
    expected, streamer = Recorder(), Recorder()
    settings = {"do_sample": False, "eos_token_id": ends, "max_new_tokens": 20}
    llama.generate(**inputs, **settings, streamer=expected)
    drafter = Knowing(inputs, llama.generate(**inputs, **(settings | {"eos_token_id": None})))
    llama.generate(**inputs, **settings, streamer=streamer, **(OURS | {"drafter": drafter, "policy": "chain:4"}))
    assert streamer.events == expected.events
    assert streamer.events[-1] == "end"
    assert len(streamer.events) > 4


def test_scores_and_logits_are_those_of_generate_until_a_text_ends(llama):
    inputs = prompts(30, 9, 21)
    ends = eos_of(llama, inputs, (2, 9, 5))
    settings = {
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
        "repetition_penalty": 1.5,
        "eos_token_id": ends,
    }
    expected, written = both(llama, inputs, **settings)
    sequences = same((expected.sequences, written.sequences))
    assert written.cache is None if hasattr(written, "cache") else written.past_key_values is None
    for field in ("scores", "logits"):
        assert len(getattr(written, field)) == len(getattr(expected, field)) == sequences.shape[1] - 30
        for step, (ours, theirs) in enumerate(zip(getattr(written, field), getattr(expected, field), strict=True)):
            alive = ~torch.isin(sequences[:, 30 : 30 + step], torch.tensor(ends)).any(1)
            torch.testing.assert_close(ours[alive], theirs[alive], atol=1e-4, rtol=1e-4)
            assert ours[~alive].isnan().all()
    assert not torch.equal(written.scores[3][0], written.logits[3][0])
    only = llama.generate(**inputs, max_new_tokens=3, return_dict_in_generate=True, **OURS)
    assert only.scores is None
    assert only.logits is None


def test_draws_follow_the_processed_distribution_once():
    torch.manual_seed(1)
    model = make_model(vocab_size=8, num_hidden_layers=1)
    prompt, joint = torch.tensor([[3, 4, 5]]), {(): 1.0}
    for _ in range(3):
        joint = {
            (*path, token): p * q
            for path, p in joint.items()
            for token, q in step(model, torch.cat((prompt, torch.tensor([path]).long()), 1)).items()
        }
    settings = {"temperature": 0.5, "top_k": 2, "max_new_tokens": 3, "eos_token_id": None, "do_sample": True}
    drafter = FixedDrafter(torch.zeros(2, 8).log_softmax(-1))

    def draw(texts):
        arguments = OURS | settings | {"drafter": drafter, "policy": "fixed:20", "num_return_sequences": texts}
        return [tuple(row) for row in model.generate(prompt, **arguments)[:, 3:].tolist()]

    torch.manual_seed(2)
    drawn = [text for _ in range(4) for text in draw(50)]
    assert set(drawn) <= set(joint)
    expected = torch.tensor(list(joint.values()), dtype=torch.float64)
    observed = [drawn.count(text) for text in joint]
    assert chisquare(observed, (expected / expected.sum() * len(drawn)).numpy()).pvalue > 1e-3
    torch.manual_seed(2)
    assert draw(50) == drawn[:50]
    assert draw(50) != drawn[:50]


def step(model, ids):
    """The distribution of the next token at temperature 0.5 among the best 2."""
    with torch.no_grad():
        values, tokens = (model(ids).logits[0, -1] / 0.5).topk(2)
    return dict(zip(tokens.tolist(), values.softmax(-1).tolist(), strict=True))


def test_draws_with_a_seed_do_not_depend_on_the_policy(llama):
    texts = set()
    for policy in ("plain", "chain:4", "fixed:8"):
        torch.manual_seed(4)
        settings = OURS | {"policy": policy, "do_sample": True, "typical_p": 0.9, "min_p": 0.01}
        texts.add(str(llama.generate(**prompts(30, 9), max_new_tokens=24, **settings).tolist()))
    assert len(texts) == 1


def test_prompts_without_a_mask_and_no_prompt_at_all(llama):
    padded = prompts(30, 9, 21)["input_ids"]
    same(both(llama, {"input_ids": padded}))  # transformers infers the mask from the padding
    same(both(llama, {"input_ids": padded}, pad_token_id=2))  # here it cannot
    same(both(llama, {}))


REFUSED = {
    "num_beams": ({"num_beams": 2}, "beam search"),
    "beam_sample": ({"num_beams": 2, "do_sample": True}, "beam sample"),
    "contrastive": ({"penalty_alpha": 0.6, "top_k": 4}, "contrastive search"),
    "lookup": ({"prompt_lookup_num_tokens": 3}, "assisted generation"),
    "assistant": ({"assistant_model": True}, "assisted generation"),
    "embeddings": ({"inputs_embeds": torch.zeros(1, 27, 32)}, "inputs_embeds"),
    "static": ({"cache_implementation": "static"}, "cache_implementation"),
    "no cache": ({"use_cache": False}, "use_cache=False"),
    "chunks": ({"prefill_chunk_size": 8}, "prefill_chunk_size"),
    "attentions": ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions"),
    "states": ({"output_hidden_states": True, "return_dict_in_generate": True}, "output_hidden_states"),
    "synced": ({"synced_gpus": True}, "synced_gpus"),
    "positions": ({"position_ids": torch.arange(1, 28)[None]}, "position_ids"),
    "context": ({"max_new_tokens": 300}, "context of 256"),
    "policy": ({"policy": "large"}, "unknown policy"),
    "drafter": ({"drafter": "nobody"}, "unknown drafter"),
    "no drafter": ({"drafter": 7}, "is no drafter"),
}


@pytest.mark.parametrize(("settings", "message"), REFUSED.values(), ids=list(REFUSED))
def test_what_is_not_honoured_is_refused_in_one_line(llama, settings, message):
    if "assistant_model" in settings:
        settings = {"assistant_model": llama}
    with pytest.raises(BastionError, match=message) as error:
        llama.generate(**prompts(27), **({"max_new_tokens": 20} | OURS | settings))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("keyword", ["past_key_values", "cache"])
def test_a_cache_of_ones_own_is_refused(llama, keyword):
    if keyword == "cache" and not hasattr(transformers.DynamicCache, "is_croppable"):
        pytest.skip("this transformers has another name for it")
    with pytest.raises(BastionError, match="leave it out"):
        llama.generate(**prompts(27), **{keyword: transformers.DynamicCache()}, **OURS)


def test_right_padding_training_and_encoders_are_refused(llama):
    inputs = prompts(27, 9)
    right = {name: value.flip(1) for name, value in inputs.items()}
    with pytest.raises(BastionError, match="padding_side='left'"):
        llama.generate(**right, **OURS)
    llama.train()
    try:
        with pytest.raises(BastionError, match="eval"):
            llama.generate(**inputs, **OURS)
    finally:
        llama.eval()
    sizes = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4}
    t5 = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, decoder_start_token_id=0)).eval()
    with pytest.raises(BastionError, match="encoder-decoder"):
        t5.generate(input_ids=inputs["input_ids"], **OURS)


def test_a_model_is_tried_out_and_calibrated_once_and_not_kept_alive(tmp_path, monkeypatch):
    monkeypatch.setenv("BASTION_CACHE", str(tmp_path))
    monkeypatch.setattr("bastion.cost.probe.ROWS", (1, 2, 4, 8))
    monkeypatch.setattr("bastion.cost.probe.CONTEXTS", (8, 16))
    monkeypatch.setattr("bastion.cost.probe.REPEATS", 1)
    monkeypatch.setattr("bastion.cost.probe.ROUNDS", 2)
    wrapped, calibrated = [], []
    wrap, calibrate = integration._wrap, bastion.model.calibrate
    monkeypatch.setattr(integration, "_wrap", lambda model: (wrapped.append(1), wrap(model))[1])
    monkeypatch.setattr("bastion.model.calibrate", lambda *pair: (calibrated.append(1), calibrate(*pair))[1])
    model = make_model()
    prompt = torch.randint(2, 96, (1, 9)).repeat(1, 3)
    expected = model.generate(prompt, do_sample=False).tolist()
    for _ in range(2):
        written = model.generate(prompt, do_sample=False, custom_generate=bastion.custom_generate)
        assert written.tolist() == expected
    assert (len(wrapped), len(calibrated)) == (1, 1)
    model.generate(prompt, custom_generate=bastion.custom_generate, drafter=NgramDrafter(), policy="plain")
    assert len(wrapped) == 1
    model.double().generate(prompt, custom_generate=bastion.custom_generate, policy="plain")
    assert len(wrapped) == 2
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_what_a_model_cannot_verify_is_said():
    kind, sizes = CONFIGS["mistral-sliding"]
    model = AutoModelForCausalLM.from_config(getattr(transformers, kind)(**sizes)).eval()
    with pytest.warns(UserWarning, match="verifies (chains|no drafts).*: a layer sees the last 8 tokens only"):
        model.generate(**prompts(27), **OURS)


@pytest.mark.model
def test_the_shipped_drafter_serves_the_model_it_was_made_for(embedded):
    model = AutoModelForCausalLM.from_pretrained(embedded, dtype=torch.float32)
    model.name_or_path = model.config._name_or_path = "HuggingFaceTB/SmolLM2-135M-Instruct"
    prompt = torch.tensor([[1, 198, 2683, 359, 253, 5356, 2]])
    same(both(model, {"input_ids": prompt}, drafter="auto", policy="fixed:4", max_new_tokens=12))
    assert isinstance(alone(integration._WRAPPED[model].drafters["auto"]), DFlashDrafter)
