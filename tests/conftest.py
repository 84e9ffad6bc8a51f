"""Fixtures that many tests need."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from bastion.cli import main
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


@pytest.fixture
def run_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Runs a command line in this process: exit status, standard output, standard error."""

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["bastion", *map(str, arguments)])
        try:
            main()
            status = 0
        except SystemExit as end:
            status = int(end.code or 0)
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return run
