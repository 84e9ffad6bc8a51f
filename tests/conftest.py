"""Fixtures that many tests need."""

import os
from pathlib import Path

import pytest
import torch

from bastion.paths import cache_root

ALL_THREADS = torch.get_num_threads()


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of reference numbers and prompt sets beside the checkout."""
    folder = Path(__file__).resolve().parents[2] / "shared"
    if not (folder / "fixtures").is_dir():
        pytest.skip("the folder ../shared with reference fixtures is not there")
    return folder


@pytest.fixture(scope="session")
def embedded() -> Path:
    """The folder of the embedded model. BASTION_REQUIRE_MODEL=1 makes its absence a failure."""
    folder = cache_root() / "models" / "smollm2-135m"
    if not folder.is_dir():
        missing = pytest.fail if os.environ.get("BASTION_REQUIRE_MODEL") else pytest.skip
        missing("the embedded model is not fetched; run: bastion models fetch smollm2-135m")
    return folder


@pytest.fixture(autouse=True)
def _settled(request: pytest.FixtureRequest) -> None:
    """The same random numbers for each test; one thread for tiny models, which only wait for a second one."""
    torch.manual_seed(0)
    torch.set_num_threads(ALL_THREADS if request.node.get_closest_marker("model") else 1)
