"""The drafters that come with the package."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bastion.drafters.dflash import DFlashConfig, load_model
from bastion.drafters.loading import SHIPPED, load_drafter, shipped_folder
from bastion.drafters.mixed import MixedDrafter, alone
from bastion.errors import BastionError
from bastion.targets.loading import load_target

NAME = "smollm2-135m-dflash"


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_drafter_is_whole_small_and_described(name: str) -> None:
    folder = shipped_folder(name)
    sizes = [path.stat().st_size for path in folder.iterdir()]
    assert max(sizes) <= 16_000_000
    assert sum(sizes) <= 30_000_000
    model = load_model(folder, torch.device("cpu"), torch.float32)
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    card = (folder / "README.md").read_text(encoding="utf-8")
    for part in ("Licence", "Data", "Recipe", "Accepted length"):
        assert part in card


def drafter_at(folder: Path) -> SimpleNamespace:
    return SimpleNamespace(name=str(folder), digest="x", depth=7, feature_layers=(1,))


def test_auto_is_the_shipped_drafter_and_the_index_or_the_index(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loaded = []
    monkeypatch.setattr(
        "bastion.drafters.loading.DFlashDrafter.load",
        lambda folder, target: loaded.append(folder) or drafter_at(folder),
    )
    for target in ("smollm2-135m", "HuggingFaceTB/SmolLM2-135M-Instruct"):
        assert load_drafter("auto", SimpleNamespace(name=target)).name == f"{NAME}+ngram"
        assert loaded.pop() == shipped_folder(NAME)
    assert load_drafter("auto", SimpleNamespace(name="some/other")).name == "ngram"
    assert load_drafter(NAME, SimpleNamespace(name="a fine-tune of it")).name == NAME


@pytest.mark.model
@pytest.mark.usefixtures("embedded")
def test_the_shipped_drafter_fits_its_target() -> None:
    target = load_target("smollm2-135m", "cpu", "float32").target
    drafter = load_drafter("auto", target)
    assert drafter.name == f"{NAME}+ngram"
    assert alone(drafter).name == NAME
    config = DFlashConfig.read(shipped_folder(NAME))
    assert config.target_layers == (1, 8, 14, 20, 27)
    assert alone(drafter).depth == config.block_size - 1


def test_ngram_behind_a_name_mixes_the_text_itself_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bastion.drafters.loading.DFlashDrafter.load", lambda folder, target: drafter_at(folder))
    mixed = load_drafter(f"{NAME}+ngram", SimpleNamespace(name="a fine-tune of it"))
    assert isinstance(mixed, MixedDrafter)
    assert mixed.name == f"{NAME}+ngram"
    for name in ("auto+ngram", "ngram+ngram"):
        with pytest.raises(BastionError, match="has the n-gram index already"):
            load_drafter(name, SimpleNamespace(name="smollm2-135m"))
    with pytest.raises(BastionError, match="unknown drafter 'nothing'"):
        load_drafter("nothing+ngram", SimpleNamespace(name="some/other"))
