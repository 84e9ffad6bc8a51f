"""The drafters that come with the package."""

from types import SimpleNamespace

import pytest
import torch

from bastion.drafters.dflash import DFlashConfig, load_model
from bastion.drafters.loading import SHIPPED, load_drafter, shipped_folder
from bastion.drafters.mixed import MixedDrafter
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


def test_auto_is_the_shipped_drafter_of_a_known_target_and_ngram_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = []
    monkeypatch.setattr(
        "bastion.drafters.loading.DFlashDrafter.load",
        lambda folder, target: loaded.append(folder) or SimpleNamespace(name=str(folder)),
    )
    for target in ("smollm2-135m", "HuggingFaceTB/SmolLM2-135M-Instruct"):
        assert load_drafter("auto", SimpleNamespace(name=target)).name == NAME
        assert loaded.pop() == shipped_folder(NAME)
    assert load_drafter("auto", SimpleNamespace(name="some/other")).name == "ngram"
    assert load_drafter(NAME, SimpleNamespace(name="a fine-tune of it")).name == NAME


@pytest.mark.model
@pytest.mark.usefixtures("embedded")
def test_the_shipped_drafter_fits_its_target() -> None:
    target = load_target("smollm2-135m", "cpu", "float32").target
    drafter = load_drafter("auto", target)
    assert drafter.name == NAME
    config = DFlashConfig.read(shipped_folder(NAME))
    assert config.target_layers == (1, 8, 14, 20, 27)
    assert drafter.depth == config.block_size - 1


def test_ngram_behind_a_name_mixes_the_text_itself_in(monkeypatch: pytest.MonkeyPatch) -> None:
    inner = SimpleNamespace(name="x", digest="x", depth=7, feature_layers=(1,))
    monkeypatch.setattr("bastion.drafters.loading.DFlashDrafter.load", lambda folder, target: inner)
    mixed = load_drafter("auto+ngram", SimpleNamespace(name="smollm2-135m"))
    assert isinstance(mixed, MixedDrafter)
    assert mixed.name == f"{NAME}+ngram"
    assert load_drafter("auto+ngram", SimpleNamespace(name="some/other")).name == "ngram"
    with pytest.raises(BastionError, match="unknown drafter 'nothing'"):
        load_drafter("nothing+ngram", SimpleNamespace(name="some/other"))
