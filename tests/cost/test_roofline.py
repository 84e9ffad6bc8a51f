import json
from pathlib import Path

import numpy as np
import pytest

from bastion.cost.ceilings import Ceilings
from bastion.cost.roofline import CalibratedRoofline, pass_work
from bastion.targets.base import ModelShape

SMALL = ModelShape(layers=2, hidden=8, heads=4, kv_heads=2, head_dim=2, intermediate=16, vocab=32)


@pytest.fixture(scope="module")
def reference(shared: Path):
    return json.loads((shared / "fixtures/roofline/roofline.json").read_text())


@pytest.fixture(scope="module")
def shapes(reference) -> dict[str, ModelShape]:
    names = ("L", "h", "n_q", "n_kv", "d", "h_ffn", "V")
    return {model: ModelShape(*(a[n] for n in names)) for model, a in reference["model_args"].items()}


def test_work_equals_the_reference_exactly(reference, shapes) -> None:
    for row in reference["analytic"]:
        work = pass_work(shapes[row["model"]], [row["s"]], row["c"], 2)
        assert work.flops.tolist() == [row["flops"]]
        assert work.parameter_bytes.tolist() == [row["bytes_param"]]
        assert work.cache_bytes.tolist() == [row["bytes_kv"]]
        assert work.activation_bytes.tolist() == [row["bytes_act"]]
        assert work.total_bytes.tolist() == [row["bytes_total"]]


def test_estimates_equal_the_reference(reference, shapes) -> None:
    assert reference["estimate_columns"][:5] == ["model", "gpu", "params", "context", "s"]
    for model, gpu, name, context, rows, raw_compute, raw_memory, estimate, delta in reference["estimate"]:
        specs = reference["gpu_specs"][gpu]
        ceilings = Ceilings(specs["peak_throughput_bf16"], specs["memory_bandwidth"])
        parameters = reference["calibration_params"][name]
        roofline = CalibratedRoofline(shapes[model], 2, ceilings, **parameters)
        seconds = roofline.seconds(np.array([rows, rows + 1]), context)
        assert seconds[0] == pytest.approx(estimate, rel=1e-9)
        assert seconds[1] - seconds[0] == pytest.approx(delta, rel=1e-6)
        work = pass_work(shapes[model], [rows], context, 2)
        assert work.flops[0] / ceilings.flops == pytest.approx(raw_compute, rel=1e-9)
        assert work.total_bytes[0] / ceilings.bandwidth == pytest.approx(raw_memory, rel=1e-9)


def test_wider_values_move_more_bytes_and_compute_the_same() -> None:
    half, full = (pass_work(SMALL, [1, 5], 7, size) for size in (2, 4))
    assert (full.total_bytes == 2 * half.total_bytes).all()
    assert (full.flops == half.flops).all()


def test_many_rows_in_small_integers_do_not_overflow() -> None:
    shape = ModelShape(36, 2560, 32, 8, 128, 9728, 151936)
    narrow = pass_work(shape, np.array([1, 1024], np.int32), 100_000, 2)
    one_by_one = [pass_work(shape, rows, 100_000, 2).flops for rows in (1, 1024)]
    assert narrow.flops.tolist() == one_by_one
    assert narrow.flops[1] == 1024 * (2 * (36 * 100_925_440 + 151936 * 2560) + 4 * 36 * 4096 * 101_024)


@pytest.mark.parametrize("parameter", ["alpha_m", "beta_m", "alpha_c", "beta_c"])
@pytest.mark.parametrize("value", [-1e-9, float("nan"), float("inf")])
def test_impossible_parameters_are_refused(parameter: str, value: float) -> None:
    with pytest.raises(ValueError, match="not negative"):
        CalibratedRoofline(SMALL, 2, Ceilings(1e12, 1e11), **{parameter: value})
