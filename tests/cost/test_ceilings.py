import json
from pathlib import Path

import pytest
import torch

from bastion.cost import ceilings
from bastion.cost.ceilings import Ceilings, datasheet, device_name, measure_ceilings

CPU = torch.device("cpu")


def test_a_real_device_gives_possible_numbers() -> None:
    measured = measure_ceilings(CPU, torch.float32)
    assert 1e8 < measured.flops < 1e15
    assert 1e8 < measured.bandwidth < 1e14


def test_the_best_rate_counts_and_slow_products_end_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    # Products of 8 (held up), 16 and 32 (the budget ends here), then reading, then copying.
    clock = iter([[0.1], [0.05, 0.02], [0.3], [0.5, 0.4], [0.9, 0.7]])

    def fake_times(work, device) -> list[float]:
        work()
        return next(clock)

    monkeypatch.setattr(ceilings, "_times", fake_times)
    monkeypatch.setattr(ceilings, "MATMUL_SECONDS", 0.25)
    monkeypatch.setattr(ceilings, "MATMUL_SIZES", (8, 16, 32, 64))
    monkeypatch.setattr(ceilings, "CPU_BUFFER_BYTES", 1024)
    assert measure_ceilings(CPU, torch.bfloat16) == Ceilings(2 * 16**3 / 0.02, 2 * 1024 / 0.7)
    assert list(clock) == []


def seconds_of(monkeypatch: pytest.MonkeyPatch, runs: list[float]) -> list[float]:
    """What `_times` returns of work whose runs take so long."""
    now = 0.0
    remaining = iter(runs)

    def work() -> None:
        nonlocal now
        now += next(remaining)

    monkeypatch.setattr(ceilings.time, "perf_counter", lambda: now)
    return ceilings._times(work, CPU)


def test_the_warm_up_run_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [0.0001, *(0.01 for _ in range(ceilings.REPEATS))]
    assert seconds_of(monkeypatch, runs) == pytest.approx(runs[1:])


def test_a_slow_run_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    assert seconds_of(monkeypatch, [0.5, 0.4]) == pytest.approx([0.4])


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("NVIDIA RTX A5000", "a5000"),
        ("NVIDIA RTX A6000", "a6000"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "b6000"),
    ],
)
def test_datasheet_values_are_those_of_the_reference(shared: Path, name: str, model: str) -> None:
    specs = json.loads((shared / "fixtures/roofline/roofline.json").read_text())["gpu_specs"][model]
    assert datasheet(name) == Ceilings(specs["peak_throughput_bf16"], specs["memory_bandwidth"])


@pytest.mark.parametrize("name", ["NVIDIA GH200 480GB", "NVIDIA RTX 6000 Ada Generation", "AMD EPYC", ""])
def test_an_unlisted_device_is_not_mistaken_for_a_listed_one(name: str) -> None:
    assert datasheet(name) is None


def test_the_cpu_has_a_name_of_one_line() -> None:
    name = device_name(CPU)
    assert name
    assert name == name.strip()
    assert "\n" not in name
