"""Saving DFlash checkpoints, and what is refused at load."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import load_file, save_file
from torch import Tensor

from bastion.drafters.dflash import DFlashDrafter, DFlashModel, load_model, save_model
from bastion.drafters.loading import load_drafter
from bastion.errors import BastionError
from dflash_support import CPU, edited, small_config, stub


@pytest.fixture
def qwen3(shared: Path) -> Path:
    return shared / "fixtures" / "dflash_drafter" / "qwen3"


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_saving_a_loaded_checkpoint_gives_the_same_files(shared: Path, tmp_path: Path, family: str) -> None:
    original, saved = shared / "fixtures" / "dflash_drafter" / family / "drafter", tmp_path / "saved"
    save_model(load_model(original, CPU, torch.float32), saved)
    assert sorted(path.name for path in saved.iterdir()) == ["config.json", "model.safetensors"]
    assert (saved / "model.safetensors").read_bytes() == (original / "model.safetensors").read_bytes()
    before, after = (json.loads((place / "config.json").read_text()) for place in (original, saved))
    assert before == after


def test_a_saved_checkpoint_names_its_dtype_and_another_digest(qwen3: Path, tmp_path: Path) -> None:
    model = DFlashModel(small_config(qwen3))
    digest = model.digest()
    assert digest == model.digest()
    save_model(model, tmp_path)
    assert DFlashDrafter.load(tmp_path, stub(qwen3)).digest == digest
    with torch.no_grad():
        model.fc.weight[0, 0] += 1
    assert model.digest() != digest
    save_model(model.to(torch.bfloat16), tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    assert load_file(tmp_path / "model.safetensors")["fc.weight"].dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"vocab": 600}, "has a vocabulary of 512 tokens, stub of 600: use the drafter"),
        ({"hidden": 128}, "has hidden size 64, stub 128: use the drafter"),
        ({"layers": 9}, "was made for 8 layers, stub has 9: use the drafter"),
    ],
)
def test_a_drafter_of_another_target_is_refused(qwen3: Path, shape: dict[str, int], message: str) -> None:
    with pytest.raises(BastionError, match=message):
        DFlashDrafter.load(qwen3 / "drafter", stub(qwen3, **shape))


@pytest.mark.parametrize(("ids", "bad"), [([1, 3, 8], r"\[8\]"), ([-1, 3, 5], r"\[-1\]")])
def test_layers_that_the_target_lacks_are_refused(qwen3: Path, tmp_path: Path, ids: list[int], bad: str) -> None:
    dflash = {"mask_token_id": 500, "target_layer_ids": ids}
    checkpoint = edited(qwen3 / "drafter", tmp_path / "d", dflash_config=dflash, num_target_layers=None)
    with pytest.raises(BastionError, match=f"reads layers {bad}, stub has layers 0 to 7"):
        DFlashDrafter.load(checkpoint, stub(qwen3))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dflash_config": None}, "no dflash_config"),
        ({"dflash_config": {"target_layer_ids": [1]}}, "mask_token_id is None"),
        ({"dflash_config": {"mask_token_id": 512, "target_layer_ids": [1]}}, "512 is outside the vocabulary"),
        ({"dflash_config": {"mask_token_id": 5, "target_layer_ids": []}}, "target_layer_ids must list"),
        ({"block_size": 1}, "block_size is 1, but must be a whole number of at least 2"),
        ({"hidden_size": None}, "hidden_size is None"),
        ({"num_key_value_heads": 3}, "not a multiple of num_key_value_heads 3"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"layer_types": ["full_attention"]}, "does not describe a Qwen3 body"),
        ({"layer_types": ["sliding_attention"] * 3}, "sliding_window is None"),
        ({"rope_scaling": {"rope_type": "spiral"}}, "RoPE scaling 'spiral' is not supported"),
        ({"draft_vocab_size": 0}, "draft_vocab_size is 0"),
        ({"num_target_layers": "3"}, "num_target_layers is '3'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "keys in `rope_parameters` for 'rope_type'='yarn'"),
    ],
)
def test_a_config_that_cannot_be_used_is_refused(qwen3: Path, changes: dict[str, object], message: str) -> None:
    with pytest.raises(BastionError, match=message) as caught:
        small_config(qwen3, **changes)
    assert "\n" not in str(caught.value)


def damaged(qwen3: Path, into: Path, change: dict[str, Tensor | None], **config: object) -> Path:
    """A checkpoint with some tensors replaced or (None) left out."""
    checkpoint = edited(qwen3 / "drafter", into, **config)
    tensors = load_file(checkpoint / "model.safetensors") | change
    (checkpoint / "model.safetensors").unlink()
    save_file({k: v for k, v in tensors.items() if v is not None}, checkpoint / "model.safetensors")
    return checkpoint


@pytest.mark.parametrize(
    ("change", "config", "message"),
    [
        ({"fc.weight": None}, {}, "fc.weight is missing"),
        ({"extra.weight": torch.zeros(2)}, {}, "extra.weight is unexpected"),
        ({"fc.weight": torch.zeros(64, 64)}, {}, r"fc.weight has shape \[64, 64\] instead of \[64, 192\]"),
        ({}, {"num_hidden_layers": 2, "layer_types": None}, "and 8 more"),
        ({}, {"draft_vocab_size": 100}, "d2t is missing"),
        ({"d2t": torch.full((100,), 500)}, {}, "d2t does not name 100 different tokens"),
        ({"d2t": torch.tensor([1, 0])}, {}, "d2t does not name 2 different tokens"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    qwen3: Path,
    tmp_path: Path,
    change: dict[str, Tensor | None],
    config: dict[str, object],
    message: str,
) -> None:
    checkpoint = damaged(qwen3, tmp_path / "drafter", change, **config)
    with pytest.raises(BastionError, match=message):
        DFlashDrafter.load(checkpoint, stub(qwen3))


def test_incomplete_and_damaged_folders_are_refused(qwen3: Path, tmp_path: Path) -> None:
    with pytest.raises(BastionError, match=r"holds no config\.json"):
        load_model(tmp_path, CPU, torch.float32)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(BastionError, match=r"config\.json is not JSON"):
        load_model(tmp_path, CPU, torch.float32)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(BastionError, match="does not hold a JSON object"):
        load_model(tmp_path, CPU, torch.float32)
    shutil.copyfile(qwen3 / "drafter" / "config.json", tmp_path / "config.json")
    with pytest.raises(BastionError, match=r"holds no model\.safetensors"):
        load_model(tmp_path, CPU, torch.float32)
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 20)
    with pytest.raises(BastionError, match=r"model\.safetensors cannot be read"):
        load_model(tmp_path, CPU, torch.float32)


def test_a_hub_id_is_fetched_and_a_failure_is_one_line(qwen3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def fetch(repository: str, allow_patterns: list[str], **_: object) -> str:
        asked.append((repository, allow_patterns))
        return str(qwen3 / "drafter")

    monkeypatch.setattr("bastion.targets.loading.snapshot_download", fetch)
    drafter = load_drafter("someone/drafter", stub(qwen3))
    assert drafter.name == "someone/drafter"
    assert asked == [("someone/drafter", ["config.json", "model*.safetensors", "model.safetensors.index.json"])]

    def offline(repository: str, **options: object) -> str:
        raise LocalEntryNotFoundError("no network\nand nothing cached")

    monkeypatch.setattr("bastion.targets.loading.snapshot_download", offline)
    with pytest.raises(BastionError, match=r"someone/drafter is not in the cache.*hf download") as caught:
        load_drafter("someone/drafter", stub(qwen3))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("source", ["NGRAM", "none", "/nope/x", "./x", "~/nope/x", "~nosuchuser/x", Path("nope")])
def test_what_can_be_no_drafter_is_not_looked_up_on_the_hub(
    qwen3: Path, source: str | Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bastion.targets.loading.snapshot_download", None)
    with pytest.raises(BastionError, match='use "auto", "ngram", or the folder or hub id') as caught:
        load_drafter(source, stub(qwen3))
    assert len(str(caught.value)) < 160


def test_a_file_is_no_drafter(qwen3: Path) -> None:
    with pytest.raises(BastionError, match="is no folder"):
        load_drafter(qwen3 / "drafter" / "config.json", stub(qwen3))


@pytest.mark.parametrize("lacking", ["set_feature_layers", "head"])
def test_a_target_that_cannot_serve_the_drafter_is_refused_at_load(
    qwen3: Path, lacking: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = stub(qwen3)
    target.feature_layers = (2,)
    load_drafter(qwen3 / "drafter", target)
    assert target.feature_layers == (2,)

    def refuse(argument: object) -> None:
        raise BastionError(f"no {lacking} here")

    monkeypatch.setattr(target, lacking, refuse)
    with pytest.raises(BastionError, match=f"no {lacking} here"):
        load_drafter(qwen3 / "drafter", target)
