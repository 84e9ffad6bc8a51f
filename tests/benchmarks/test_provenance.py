"""What a run records of itself."""

import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bastion.benchmarks import provenance as module
from bastion.benchmarks.provenance import Provenance, peak_memory, provenance
from bastion.drafters.ngram.drafter import NgramDrafter
from tiny import CPU, make_target


@pytest.fixture
def target():
    return make_target()


def test_a_run_is_described_and_read_back(target, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/opt/somewhere/bin/bastion", "bench", "--prompts", "my file.jsonl"])
    monkeypatch.setenv("WORLD_SIZE", "2")
    target.name = "/home/someone/models/tiny"
    drafter = NgramDrafter()
    key = SimpleNamespace(drafter_digest=drafter.digest)
    used = SimpleNamespace(key=key, date=datetime(2026, 11, 1, tzinfo=UTC), errors={"roofline": 0.1, "profile": 0.2})
    found = provenance(target, [drafter], [used])
    assert found.command == "bastion bench --prompts 'my file.jsonl'"
    assert (found.target.name, found.target.digest) == ("tiny", target.digest)
    assert [(one.name, one.digest) for one in found.drafters] == [(drafter.name, drafter.digest)]
    assert found.calibrations[0].drafter_digest == drafter.digest
    assert found.calibrations[0].errors == used.errors
    assert (found.dtype, found.attention) == ("float32", target.attention)
    assert found.threads == torch.get_num_threads()
    assert found.versions["torch"] == torch.__version__
    assert {"python", "bastion", "transformers", "numpy"} <= found.versions.keys()
    assert found.device == found.processor != ""
    text = found.model_dump_json()
    assert Provenance.model_validate_json(text) == found
    assert "/home" not in text
    assert "/opt" not in text


def test_the_command_of_a_module_says_so(tmp_path):
    """Started by python -m, a program has the path of its file as its name."""
    script = tmp_path / "shown" / "__main__.py"
    script.parent.mkdir()
    script.write_text("from bastion.benchmarks import provenance\nprint(provenance._command())\n")
    run = [sys.executable, "-m", "shown", "--dataset", "gsm8k"]
    told = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert told.stdout == "python -m shown --dataset gsm8k\n"


def test_the_commit_of_a_checkout_and_of_nothing_else(tmp_path):
    def git(*arguments):
        names = ["-c", "user.name=x", "-c", "user.email=x@example.org", "-c", "commit.gpgsign=false"]
        done = subprocess.run(["git", *names, *arguments], cwd=tmp_path, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    assert module._commit(tmp_path) is None
    git("init", "--quiet")
    assert module._commit(tmp_path) is None  # no commit yet
    (tmp_path / "file").write_text("one")
    git("add", "file")
    git("commit", "--quiet", "-m", "one")
    git("tag", "-a", "v1", "-m", "a tag does not stand for the commit")
    assert module._commit(tmp_path) == git("rev-parse", "HEAD")
    (tmp_path / "file").write_text("two")
    assert module._commit(tmp_path) == git("rev-parse", "HEAD") + "-dirty"
    (tmp_path / "inner").mkdir()
    assert module._commit(tmp_path / "inner") is None  # the package lies in someone else's checkout


def test_no_git_no_commit(tmp_path, monkeypatch):
    (tmp_path / ".git").mkdir()
    monkeypatch.setenv("PATH", "")
    assert module._commit(tmp_path) is None


def test_peak_memory_is_in_bytes():
    status = Path("/proc/self/status")
    if not status.exists():
        pytest.skip("no /proc to compare with")
    grown = torch.ones(2**24)  # 64 MiB
    peak = peak_memory(CPU)
    resident = next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmRSS"))
    assert grown.nbytes < peak
    assert 0.9 * 1024 * resident < peak < 2**44


def test_peak_memory_on_macos_needs_no_factor(monkeypatch):
    here = peak_memory(CPU)
    monkeypatch.setattr(sys, "platform", "darwin")
    assert peak_memory(CPU) * 1000 < here
