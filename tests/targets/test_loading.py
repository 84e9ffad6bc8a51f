"""From names, folders, GGUF files and hub ids to targets."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import gguf
import huggingface_hub.constants
import pytest
import torch
from huggingface_hub.errors import (
    GatedRepoError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from loading_support import SPECIAL, VOCAB, tiny_config, write_gguf, write_llama, write_tokenizer
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel, LlamaForCausalLM

import bastion
from bastion.errors import BastionError
from bastion.layers.linear import cpu_has_bfloat16
from bastion.targets import loading, zoo
from bastion.targets.base import Rows, Target
from bastion.targets.checkpoint import SafetensorsFolder
from bastion.targets.decoder import DecoderTarget
from bastion.targets.gguf import load_gguf, read_header
from bastion.targets.huggingface import HuggingFaceTarget
from bastion.targets.loading import eos_ids, load_target, resolve_device, resolve_dtype, resolve_source

IDS = torch.tensor([5, 9, 100, 33, 250])


def logits_of(target: Target) -> torch.Tensor:
    return target.forward([Rows(IDS, torch.arange(len(IDS)), target.new_cache())])[0].logits


def write_gpt2(folder: Path) -> GPT2LMHeadModel:
    config = GPT2Config(vocab_size=len(VOCAB), n_positions=64, n_embd=32, n_layer=2, n_head=2)
    model = GPT2LMHeadModel(config).eval()
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return model


def one_line(error: pytest.ExceptionInfo[BastionError]) -> str:
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("shards", ["5GB", "20KB"])
def test_folder_goes_to_the_lean_decoder(tmp_path: Path, shards: str) -> None:
    model = write_llama(tmp_path, shards)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shards == "20KB")
    loaded = load_target(tmp_path, "cpu", "float32")
    target, tokenizer = loaded.target, loaded.tokenizer
    assert isinstance(target, DecoderTarget)
    assert (target.name, target.dtype) == (str(tmp_path), torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(logits_of(target), model(IDS[None]).logits[0])
    assert tokenizer("a")["input_ids"] == [VOCAB.index("a")]


def test_other_architectures_go_through_transformers(tmp_path: Path) -> None:
    model = write_gpt2(tmp_path)
    target = load_target(str(tmp_path), "cpu", torch.float32).target
    assert isinstance(target, HuggingFaceTarget)
    with torch.no_grad():
        torch.testing.assert_close(logits_of(target), model(IDS[None]).logits[0])


def test_quantised_checkpoint_does_not_go_to_the_lean_decoder(tmp_path: Path) -> None:
    write_llama(tmp_path)
    tiny_config(quantization_config={"quant_method": "awq", "bits": 4}).save_pretrained(tmp_path)
    with pytest.raises(BastionError, match="transformers cannot load") as caught:
        load_target(tmp_path, "cpu", "float32")
    one_line(caught)


def test_gguf_file(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path)
    loaded = load_target(path, "cpu", "float32")
    target, tokenizer = loaded.target, loaded.tokenizer
    assert isinstance(target, DecoderTarget)
    model, _ = load_gguf(path, torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(logits_of(target), model(IDS[None]).logits[0])
    assert tokenizer("  1").tokens() == ["ĠĠ", "1"]
    assert eos_ids(loaded.config, loaded.generation_config, tokenizer) == {2}


@pytest.mark.parametrize(("stated", "expected"), [((2, None), {2}), ((2, 1), {1, 2}), ((None, 1), {1}), ((), set())])
def test_ends_of_text_of_a_gguf_file(tmp_path: Path, stated: tuple[int | None, ...], expected: set[int]) -> None:
    path = tmp_path / "tiny.gguf"
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    write_gguf(path, dict(zip(keys, stated or (None, None), strict=True)))
    model, tokenizer = load_gguf(path, torch.float32)
    assert eos_ids(model.config, model.generation_config, tokenizer) == expected


@pytest.mark.parametrize(
    ("metadata", "change", "message"),
    [
        ({}, {"blk.1.ffn_up": None}, r"incomplete: 1 weights .* first model.layers.1.mlp.up_proj.weight"),
        ({}, {"rope_freqs": (4,)}, "RoPE scaling; use the model's folder"),
        ({"llama.rope.scaling.factor": 4.0}, {}, "RoPE scaling; use the model's folder"),
        ({"tokenizer.ggml.pre": "deepseek-llm"}, {}, "pre-tokenizer 'deepseek-llm'; use the model's folder"),
    ],
)
def test_gguf_file_that_transformers_would_read_wrongly(
    tmp_path: Path, metadata: dict[str, object], change: dict[str, tuple[int, ...] | None], message: str
) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, metadata, change)
    with pytest.raises(BastionError, match=message) as caught:
        load_target(path, "cpu", "float32")
    one_line(caught)


def test_pre_tokenizer_that_transformers_applies(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, {"tokenizer.ggml.pre": "qwen2"})
    _, tokenizer = load_gguf(path, torch.float32)
    pieces = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("ab 123")
    assert [piece for piece, _ in pieces] == ["ab", "Ġ", "1", "2", "3"]


def test_header_of_a_gguf_file(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path)
    metadata, tensors = read_header(path)
    reader = gguf.GGUFReader(path)
    assert tensors == {tensor.name for tensor in reader.tensors}
    expected = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert metadata == {name: value for name, value in expected.items() if not isinstance(value, list)}


def test_weights_that_are_not_there_are_not_made_up(tmp_path: Path) -> None:
    write_gpt2(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if ".h.1.mlp." not in name}
    assert len(kept) < len(tensors)
    save_file(kept, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(BastionError, match=r"incomplete: 4 weights .* first transformer\.h\.1\.mlp") as caught:
        load_target(tmp_path, "cpu", "float32")
    one_line(caught)


def test_model_whose_first_pass_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gpt2(tmp_path)

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no kernel\nsecond line")

    monkeypatch.setattr(HuggingFaceTarget, "_plain", fail)
    with pytest.raises(BastionError, match="no kernel") as caught:
        load_target(tmp_path, "cpu", "float32")
    one_line(caught)


def test_model_from_a_gguf_file_knows_its_ends(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, {"tokenizer.ggml.eot_token_id": 1})
    model = bastion.load(path, device="cpu", dtype="float32")
    assert (model.end_ids, model.sampling_defaults, model.notices) == ({1, 2}, {}, [])


@pytest.mark.parametrize("drafter", [None, 3, ["ngram"]])
def test_what_is_no_drafter_is_refused_at_load(drafter: object) -> None:
    with pytest.raises(BastionError, match="is no drafter") as caught:
        bastion.load("./nothing", drafter=drafter)
    one_line(caught)


def test_damaged_gguf_file(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(b"GGUF, but not really")
    with pytest.raises(BastionError, match=r"tiny\.gguf") as caught:
        load_target(path)
    one_line(caught)


def test_weights_come_from_the_right_shard_in_any_order(tmp_path: Path) -> None:
    expected = write_llama(tmp_path, "20KB").state_dict()
    weights = SafetensorsFolder(tmp_path)
    for name in [*expected, *reversed(expected)]:
        tensor = weights(name)
        assert tensor is not None
        assert torch.equal(tensor, expected[name])
    assert weights("model.layers.0.self_attn.q_proj.bias") is None


def test_digest_follows_weights_and_config_only(tmp_path: Path) -> None:
    first = tmp_path / "first"
    write_llama(first)
    digest = SafetensorsFolder(first).digest()

    copy = tmp_path / "copy"
    shutil.copytree(first, copy)
    assert SafetensorsFolder(copy).digest() == digest

    tensors = load_file(copy / "model.safetensors")
    tensors["model.norm.weight"] *= 1.5
    save_file(tensors, copy / "model.safetensors", {"format": "pt"})
    assert SafetensorsFolder(copy).digest() != digest

    shutil.copy(first / "model.safetensors", copy)
    tiny_config(rms_norm_eps=1e-5).save_pretrained(copy)
    assert SafetensorsFolder(copy).digest() != digest


@pytest.mark.parametrize(
    ("lost", "message"),
    [
        ("model-00002-of-*.safetensors", "model-00002-of-"),
        ("model*.safetensors*", "has no model.safetensors"),
        ("config.json", "config.json"),
        ("token*", "tokenizer"),
    ],
)
def test_incomplete_folder(tmp_path: Path, lost: str, message: str) -> None:
    write_llama(tmp_path, "20KB")
    for path in tmp_path.glob(lost):
        path.unlink()
    with pytest.raises(BastionError, match=message) as caught:
        load_target(tmp_path)
    one_line(caught)


@pytest.mark.parametrize("file", ["model.safetensors", "config.json", "tokenizer.json"])
def test_truncated_file(tmp_path: Path, file: str) -> None:
    write_llama(tmp_path)
    path = tmp_path / file
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(BastionError) as caught:
        load_target(tmp_path)
    one_line(caught)


@pytest.mark.parametrize("content", ['{"weight_map": ', "{}", '{"weight_map": {}}', '{"weight_map": 3}', "[]"])
def test_damaged_index(tmp_path: Path, content: str) -> None:
    write_llama(tmp_path, "20KB")
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(BastionError, match="fetch it again") as caught:
        SafetensorsFolder(tmp_path)
    one_line(caught)


@pytest.mark.parametrize("source", ["a/" + "a" * 5000, "~nosuchuser/x", "a\0b", None, 7])
def test_odd_sources(source: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "snapshot_download", None)
    with pytest.raises(BastionError, match=r"is no model: use a model folder|cannot download"):
        resolve_source(source)


def test_zoo_name_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_llama(tmp_path)
    monkeypatch.setattr(zoo, "fetch", lambda name, progress: tmp_path)
    target = load_target("smollm2-135m", "cpu").target
    assert target.name == "smollm2-135m"


@pytest.mark.parametrize("source", ["./nothing", "/nothing/at/all", "~/nothing", "nothing.gguf", Path("nothing")])
def test_missing_path_is_not_looked_up_on_the_hub(source: str | Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "snapshot_download", None)
    with pytest.raises(BastionError, match="there is no model at"):
        resolve_source(source)


def test_other_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").touch()
    with pytest.raises(BastionError, match=r"neither a \.gguf file nor a model folder"):
        resolve_source(tmp_path / "model.bin")


def test_revision_is_for_the_hub_only(tmp_path: Path) -> None:
    write_llama(tmp_path)
    for source in (tmp_path, "smollm2-135m"):
        with pytest.raises(BastionError, match="leave the revision out"):
            resolve_source(source, "main")


def test_hub_id_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(BastionError, match=r"not in the cache.*hf download org/model") as caught:
        load_target("org/model")
    one_line(caught)

    snapshot = tmp_path / "models--org--model" / "snapshots" / "abc"
    write_llama(snapshot)
    refs = tmp_path / "models--org--model" / "refs"
    refs.mkdir()
    (refs / "main").write_text("abc")
    target = load_target("org/model", "cpu").target
    assert target.name == "org/model"


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (GatedRepoError, "hf auth login"),
        (RepositoryNotFoundError, "smollm2-135m"),
        (RevisionNotFoundError, "no revision v9"),
        (LocalEntryNotFoundError, "org/model at revision v9 is not in the cache"),
        (RuntimeError, "connection reset; try again"),
    ],
)
def test_hub_errors(error: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    raised = error.__new__(error)
    raised.args = ("connection reset\nsecond line",)

    def fail(*_: object, **__: object) -> str:
        raise raised

    monkeypatch.setattr(loading, "snapshot_download", fail)
    with pytest.raises(BastionError, match=message) as caught:
        resolve_source("org/model", "v9")
    one_line(caught)


def test_impossible_hub_id() -> None:
    with pytest.raises(BastionError, match="use a model folder") as caught:
        resolve_source("a/b/c d")
    one_line(caught)


@pytest.mark.parametrize("device", ["gpu", "cuda:99", "cpu:1", "meta", 3.5])
def test_device_that_is_not_here(device: object) -> None:
    with pytest.raises(BastionError, match="device"):
        resolve_device(device)


def test_dtypes() -> None:
    cpu = torch.device("cpu")
    assert resolve_dtype("float16", cpu) == torch.float16
    for dtype in ("int8", torch.int8, "bf17"):
        with pytest.raises(BastionError, match="use float32, bfloat16, float16"):
            resolve_dtype(dtype, cpu)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("fpu avx2 avx512f avx512bw", torch.float32),
        ("fpu avx2 avx512_bf16", torch.bfloat16),
        ("amx_bf16 amx_tile", torch.bfloat16),
        (None, torch.float32),
    ],
)
def test_default_dtype_of_the_cpu(flags: str | None, expected: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_text(path: Path, encoding: str) -> str:
        if flags is None:
            raise FileNotFoundError(path)
        return f"processor\t: 0\nflags\t\t: {flags}\nbugs\t\t: none\n"

    monkeypatch.setattr(Path, "read_text", read_text)
    cpu_has_bfloat16.cache_clear()
    assert resolve_dtype(None, torch.device("cpu")) == expected
    cpu_has_bfloat16.cache_clear()


@pytest.mark.parametrize(
    ("generation", "config", "tokenizer", "expected"),
    [
        ([1, 2], 3, 4, {1, 2}),
        (0, 3, 4, {0}),
        (None, [3, 5], 4, {3, 5}),
        (None, None, 4, {4}),
        (None, None, None, set()),
    ],
)
def test_eos_ids(generation: object, config: object, tokenizer: object, expected: set[int]) -> None:
    holder = tiny_config(eos_token_id=config)
    assert eos_ids(holder, SimpleNamespace(eos_token_id=generation), SimpleNamespace(eos_token_id=tokenizer)) == (
        frozenset(expected)
    )


def test_configs_of_a_folder(tmp_path: Path) -> None:
    model = LlamaForCausalLM(tiny_config())
    model.generation_config.eos_token_id = [0, 2]
    model.save_pretrained(tmp_path)
    config, generation_config = loading.load_configs(tmp_path)
    assert eos_ids(config, generation_config, None) == {0, 2}
    (tmp_path / "generation_config.json").unlink()
    config, generation_config = loading.load_configs(tmp_path)
    assert generation_config is None
    assert eos_ids(config, None, None) == {2}


@pytest.mark.model
def test_embedded_model_answers() -> None:
    if zoo.list_models()[0].folder is None:
        pytest.skip("not fetched; run: bastion models fetch smollm2-135m")
    loaded = load_target("smollm2-135m", "cpu", "float32")
    target, tokenizer = loaded.target, loaded.tokenizer
    question = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(question, add_generation_prompt=True, tokenize=False)
    ids = torch.tensor(tokenizer(text + "The capital of France is")["input_ids"])
    logits = target.forward([Rows(ids, torch.arange(len(ids)), target.new_cache())])[0].logits
    assert tokenizer.decode(logits[-1].argmax()) == " Paris"
    assert [tokenizer.convert_ids_to_tokens(i) for i in range(3)] == SPECIAL
    assert tokenizer("    2 é🎉\n").tokens() == ["ĠĠĠĠ", "2", "ĠÃ©", "ðŁ", "İ", "ī", "Ċ"]
    for sample in ("def f(x):\n\treturn x  # 世界", "a   b 12  3", "<|im_start|>user\nhi<|im_end|>\n"):
        assert tokenizer.decode(tokenizer(sample)["input_ids"]) == sample
