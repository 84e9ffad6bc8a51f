"""Fixtures that many tests need."""

from pathlib import Path

import pytest
import torch

ALL_THREADS = torch.get_num_threads()


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of reference numbers and prompt sets beside the checkout."""
    folder = Path(__file__).resolve().parents[2] / "shared"
    if not (folder / "fixtures").is_dir():
        pytest.skip("the folder ../shared with reference fixtures is not there")
    return folder


@pytest.fixture(autouse=True)
def _settled(request: pytest.FixtureRequest) -> None:
    """The same random numbers for each test; one thread for tiny models, which only wait for a second one."""
    torch.manual_seed(0)
    torch.set_num_threads(ALL_THREADS if request.node.get_closest_marker("model") else 1)
