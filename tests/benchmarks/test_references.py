"""The outside references: what they are given, what they write, and what they refuse."""

import copy
import itertools
import json
import sys
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

import bastion
from bastion import BastionError
from bastion.benchmarks import references
from bastion.benchmarks.methods import PolicyMethod, TextSettings, expand_methods
from bastion.benchmarks.references import make_reference
from bastion.model import Model
from bastion.targets.huggingface import HuggingFaceTarget
from targets.loading_support import write_chat_llama, write_gguf

MESSAGES = [{"role": "user", "content": "aaa bbb aaa bbb"}]
GREEDY = TextSettings(40, 0.0, 3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_chat_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def loaded(folder):
    return bastion.load(folder, "ngram", "plain", "cpu", "float32")


@pytest.fixture
def model(loaded):
    """A model whose settings a test may change; the target, and what is kept about it, stay."""
    return copy.copy(loaded)


def write(model, folder, name, settings=GREEDY):
    """What bastion writes plainly, and what the reference writes."""
    methods = PolicyMethod("ar", model), make_reference(name, model, str(folder))
    return [method.write(MESSAGES, settings) for method in methods]


def name_of(kind, folder):
    return f"{kind}:{folder}" if kind == "hf-assisted" else kind


@pytest.mark.parametrize("kind", ["hf", "hf-lookup", "hf-assisted"])
def test_greedy_texts_are_those_of_plain_decoding(model, folder, kind):
    ours, theirs = write(model, folder, name_of(kind, folder))
    assert (theirs.token_ids, theirs.text) == (ours.token_ids, ours.text)
    assert theirs.prompt_tokens == ours.prompt_tokens
    assert 0 < theirs.prefill_seconds < theirs.seconds
    assert all(got <= 1 + drafted for got, drafted in zip(theirs.accepted_lengths, theirs.tree_sizes, strict=True))
    if kind == "hf":
        assert theirs.accepted_lengths == ours.accepted_lengths == [1] * 39
    else:
        assert max(theirs.accepted_lengths) > 1  # the drafts did something
        assert sum(theirs.accepted_lengths) == 40  # here the first pass verifies drafts too


def test_the_prefill_is_the_first_pass_without_the_draft_before_it(model, folder, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(references, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    method = make_reference(f"hf-assisted:{folder}", model, str(folder))

    def takes(seconds):
        def hook(module, args, output):
            now[0] += seconds

        return hook

    assistant = method._helpers["assistant_model"]
    with (
        method._network.model.register_forward_hook(takes(1)),
        assistant.model.register_forward_hook(takes(1000)),
    ):
        found = method.write(MESSAGES, GREEDY)
    assert found.prefill_seconds == 1
    assert found.seconds % 1000 == len(found.accepted_lengths)
    assert found.seconds > 1000


@pytest.mark.parametrize("kind", ["hf", "hf-lookup", "hf-assisted"])
def test_they_end_where_the_model_ends(model, folder, kind):
    tokens = PolicyMethod("ar", model).write(MESSAGES, GREEDY).token_ids
    end = max(tokens, key=tokens.index)  # the one that occurs first the latest
    model.end_ids = frozenset({end, 2})
    ours, theirs = write(model, folder, name_of(kind, folder))
    assert theirs.token_ids == ours.token_ids == tokens[: tokens.index(end) + 1]
    assert 10 < len(theirs.token_ids) < 40


def test_sampling_defaults_of_the_model_hold_and_no_others(model, folder, tmp_path):
    greedy = write(model, folder, "hf")[1].token_ids
    model.sampling_defaults = {"repetition_penalty": 1.5}
    ours, theirs = write(model, folder, "hf")
    assert theirs.token_ids == ours.token_ids != greedy
    model.sampling_defaults |= {"top_k": 1}
    assert write(model, folder, "hf", TextSettings(40, 1.0, 3))[1].token_ids == theirs.token_ids

    write_chat_llama(tmp_path)
    kept = json.loads((tmp_path / "generation_config.json").read_text())
    (tmp_path / "generation_config.json").write_text(json.dumps(kept | {"no_repeat_ngram_size": 1}))
    with_notice = bastion.load(tmp_path, "ngram", "plain", "cpu", "float32")
    assert write(with_notice, tmp_path, "hf")[1].token_ids == greedy


def test_seeds_decide_and_the_whole_vocabulary_can_be_drawn(model, folder):
    method = make_reference("hf", model, str(folder))
    texts = [method.write(MESSAGES, TextSettings(12, 1.0, seed)).token_ids for seed in (5, 5, 6)]
    assert texts[0] == texts[1] != texts[2]
    firsts = {tuple(method.write(MESSAGES, TextSettings(1, 1e4, seed)).token_ids) for seed in range(80)}
    assert len(firsts) > 50  # transformers' own default is the 50 likeliest


def test_the_weights_are_loaded_once_and_a_wrapped_model_not_at_all(model, folder, monkeypatch):
    network = make_reference("hf", model, str(folder))._network
    assert (network.dtype, network.config._attn_implementation) == (torch.float32, "sdpa")
    monkeypatch.setattr(references, "_load", None)
    assert make_reference("hf-lookup", model, str(folder))._network is network
    own = AutoModelForCausalLM.from_pretrained(folder)
    wrapped = Model(HuggingFaceTarget(own, "own", "digest"), model.tokenizer, model.drafter, "plain", model.end_ids)
    before = own.generation_config
    ours, theirs = write(wrapped, folder, "hf")
    assert theirs.token_ids == ours.token_ids
    assert own.generation_config is before
    assert not own._forward_pre_hooks


def test_assistants_of_another_family(model, folder, tmp_path):
    write_chat_llama(tmp_path)
    tokenizer = tmp_path / "tokenizer.json"
    words = json.loads(tokenizer.read_text())
    words["model"]["vocab"]["xy"] = words["model"]["vocab"].pop("ĠĠ")
    words["model"]["merges"] = []
    tokenizer.write_text(json.dumps(words))
    with pytest.raises(BastionError, match=r"another tokenizer than .*: choose an assistant of its family"):
        make_reference(f"hf-assisted:{tmp_path}", model, str(folder))
    smaller = AutoModelForCausalLM.from_pretrained(folder)
    smaller.resize_token_embeddings(259)
    smaller.save_pretrained(tmp_path)
    ours, theirs = write(model, folder, f"hf-assisted:{tmp_path}")
    assert theirs.token_ids == ours.token_ids


def test_texts_stop_at_the_end_of_the_context(model, folder):
    model.target = copy.copy(model.target)
    model.target.max_context = len(model.encode(MESSAGES)) + 7
    ours, theirs = write(model, folder, "hf-lookup")
    assert theirs.token_ids == ours.token_ids
    assert len(theirs.token_ids) == 7
    model.target.max_context -= 7
    with pytest.raises(BastionError, match="shorten it"):
        make_reference("hf", model, str(folder)).write(MESSAGES, GREEDY)


def test_names_and_their_arguments():
    names = ["hf", "hf-lookup", "hf-assisted:a", "hf-assisted:b/c:d", "llama.cpp"]
    assert expand_methods(names) == names
    for name, message in {
        "hf-assisted": "as in hf-assisted:MODEL",
        "hf-assisted:": "as in hf-assisted:MODEL",
        "hf:16": "method hf takes nothing behind a colon: leave :16 out",
        "llama.cpp:": "method llama.cpp takes nothing behind a colon",
        "hf-assist": "unknown method 'hf-assist'",
    }.items():
        with pytest.raises(BastionError, match=message):
            expand_methods([name])


END = 2


class FakeLlama:
    """Counts up from the number of prompt tokens, three tokens and the end, over and over."""

    def __init__(self, path, **options):
        self.path, self.options, self.cached, self.closed, self.prompts = path, options, 0, False, []
        MADE.append(self)

    def n_ctx(self):
        return self.options["n_ctx"]

    def close(self):
        self.closed = True

    def eval(self, tokens):
        self.cached += len(tokens)

    def reset(self):
        self.cached = 0

    def set_seed(self, seed):
        self.seed = seed

    def generate(self, tokens, **sampling):
        assert not self.cached, "the prompt would be skipped"
        self.prompts.append(tokens)
        self.sampling = sampling
        self.eval(tokens)
        for token in itertools.cycle((70, 71, 72, END)):
            yield token
            self.eval([token])


MADE: list[FakeLlama] = []


@pytest.fixture
def llama_cpp(monkeypatch):
    MADE.clear()
    package = SimpleNamespace(Llama=FakeLlama, LLAMA_SPLIT_MODE_NONE=0, llama_supports_gpu_offload=lambda: False)
    monkeypatch.setitem(sys.modules, "llama_cpp", package)
    return package


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(path)
    return path


@pytest.fixture(scope="module")
def quantised(file):
    return bastion.load(file, "ngram", "plain", "cpu", "float32")


def test_llama_cpp_is_given_what_bastion_has(llama_cpp, quantised, file, monkeypatch):
    monkeypatch.setattr(references, "SMALLEST_CONTEXT", 32)
    model = copy.copy(quantised)
    model.sampling_defaults = {"top_k": 20}
    method = make_reference("llama.cpp", model, str(file))
    found = method.write(MESSAGES, TextSettings(10, 0.7, 2**32 + 4))
    prompt = model.encode(MESSAGES)
    assert found.token_ids == [70, 71, 72, END]
    assert found.text == model.tokenizer.decode([70, 71, 72])
    assert (found.prompt_tokens, found.accepted_lengths, found.tree_sizes) == (len(prompt), [1] * 3, [0] * 3)
    assert 0 <= found.prefill_seconds < found.seconds
    (llama,) = MADE
    assert (llama.path, llama.prompts) == (str(file), [prompt])
    assert llama.sampling == {"top_k": 20, "top_p": 1.0, "min_p": 0.0, "temp": 0.7}
    assert llama.seed == 5
    threads = torch.get_num_threads()
    assert llama.options.items() >= {"n_threads": threads, "n_threads_batch": threads, "n_gpu_layers": 0}.items()
    assert len(method.write(MESSAGES, TextSettings(2, 0.0, 0)).token_ids) == 2
    assert len(MADE) == 1
    model.end_ids = frozenset()
    assert len(method.write(MESSAGES, TextSettings(100, 0.0, 0)).token_ids) == 100
    assert MADE[0].closed
    assert MADE[1].n_ctx() >= len(prompt) + 100
    assert llama.n_ctx() < len(prompt) + 100


def test_llama_cpp_refuses_in_one_line(llama_cpp, quantised, file, model, folder, monkeypatch):
    with pytest.raises(BastionError, match=r"needs a GGUF file, which .* is not: give a \.gguf file"):
        make_reference("llama.cpp", model, str(folder))

    penalised = copy.copy(quantised)
    penalised.sampling_defaults = {"repetition_penalty": 1.1}
    with pytest.raises(BastionError, match=r"repetition_penalty.*leave the method llama.cpp out"):
        make_reference("llama.cpp", penalised, str(file))

    elsewhere = copy.copy(quantised)
    elsewhere.target = copy.copy(quantised.target)
    elsewhere.target.device = torch.device("cuda")
    with pytest.raises(BastionError, match="knows no GPU: give --device cpu"):
        make_reference("llama.cpp", elsewhere, str(file))

    def fail(*arguments, **options):
        raise ValueError("Failed to load model from file\nmore")

    monkeypatch.setattr(llama_cpp, "Llama", fail)
    with pytest.raises(BastionError, match=r"cannot load .*tiny\.gguf \(Failed to load model from file\)"):
        make_reference("llama.cpp", quantised, str(file)).write(MESSAGES, GREEDY)

    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    with pytest.raises(BastionError, match=r"run: pip install 'bastion\[bench\]'"):
        make_reference("llama.cpp", quantised, str(file))
