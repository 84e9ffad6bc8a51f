import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from bastion.cost.base import Measurement
from bastion.cost.ceilings import Ceilings
from bastion.cost.fit import Curve, MeasuredProfile, choose, cross_validate, fit_profile, fit_roofline
from bastion.cost.roofline import CalibratedRoofline
from bastion.errors import BastionError
from bastion.targets.base import ModelShape

SHAPE = ModelShape(layers=30, hidden=576, heads=9, kv_heads=3, head_dim=64, intermediate=1536, vocab=49152)
CEILINGS = Ceilings(flops=1e11, bandwidth=1e10)
ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 48)
CONTEXTS = (16, 128, 512)


def grid(seconds) -> list[Measurement]:
    return [Measurement(rows, context, seconds(rows, context)) for rows in ROWS for context in CONTEXTS]


def assert_convex_and_non_decreasing(profile: MeasuredProfile, most: int, context: float) -> None:
    seconds = profile.seconds(np.arange(1, most + 1), context)
    slopes = np.diff(seconds)
    rounding = 1e-12 * seconds.max()
    assert (seconds >= 0).all()
    assert (slopes >= -rounding).all()
    assert (np.diff(slopes) >= -rounding).all()


@pytest.mark.parametrize("entry", range(8))
def test_the_roofline_fit_finds_the_best_optimum_known(shared: Path, entry: int) -> None:
    folder = shared / "fixtures/roofline"
    wanted = json.loads((folder / "fits.json").read_text())[entry]
    reference = json.loads((folder / "roofline.json").read_text())
    shape = ModelShape(
        *(reference["model_args"][wanted["model"]][n] for n in ("L", "h", "n_q", "n_kv", "d", "h_ffn", "V"))
    )
    specs = reference["gpu_specs"][wanted["gpu"]]
    ceilings = Ceilings(specs["peak_throughput_bf16"], specs["memory_bandwidth"])
    table = [json.loads(line) for line in (folder / wanted["table"]).read_text().splitlines()]
    measurements = [Measurement(row["s"], row["c"], row["verification_latency_s"]) for row in table]

    fitted = fit_roofline(measurements, shape, 2, ceilings, wanted["sigma_scale"])

    rows, context, seconds = (np.array([getattr(m, n) for m in measurements]) for n in Measurement.__slots__)
    sigma = 1 + wanted["sigma_scale"] * (rows - rows.min()) / np.ptp(rows)
    residuals = (fitted.seconds(rows, context) - seconds) / (sigma / sigma.mean())
    assert (residuals**2).sum() <= 1.001 * wanted["weighted_sse_best_found_by_independent_search"]
    if wanted["upstream_reached_best"]:
        for point in wanted["predictions"]:
            assert fitted.seconds(np.array([point["s"]]), point["c"])[0] == pytest.approx(point["latency_s"], rel=1e-3)


@pytest.mark.parametrize(
    "parameters",
    [
        {"alpha_m": 1.5, "beta_m": 0.02, "alpha_c": 4.0, "beta_c": 0.005},
        {"alpha_m": 0.0, "beta_m": 0.03, "alpha_c": 1.0, "beta_c": 0.03},  # never bound by memory
        {"alpha_m": 2.0, "beta_m": 0.9, "alpha_c": 0.0, "beta_c": 0.0},  # always bound by memory
    ],
)
def test_a_roofline_is_recovered_from_its_own_times(parameters: dict[str, float]) -> None:
    truth = CalibratedRoofline(SHAPE, 4, CEILINGS, **parameters)
    measurements = grid(lambda rows, context: float(truth.seconds(np.array([rows]), context)[0]))
    fitted = fit_roofline(measurements, SHAPE, 4, CEILINGS)
    unseen = np.arange(1, ROWS[-1] + 1)
    np.testing.assert_allclose(fitted.seconds(unseen, 300), truth.seconds(unseen, 300), rtol=1e-4)


@pytest.mark.parametrize("context", [1, 1000])
@pytest.mark.parametrize("most", [100, 128])
def test_the_profile_equals_the_exact_solution_on_an_even_grid(shared: Path, context: int, most: int) -> None:
    reference = load_file(shared / "fixtures/tree_caddtree/trees.safetensors")
    latency = reference[f"fit.input.ctx{context}.latency_n1_to_128"][:most]
    measurements = [Measurement(n, context, float(x)) for n, x in enumerate(latency, start=1)]
    seconds = fit_profile(measurements, convex=True).seconds(np.arange(1, most + 1), context)
    exact = reference[f"fit.max{most}.ctx{context}.exact_qp_n1_to_max"]
    upstream = reference[f"fit.max{most}.ctx{context}.curve_n0_to_max"][1:]  # entry 0 repeats one row
    np.testing.assert_allclose(seconds, exact, rtol=0, atol=1e-9)
    np.testing.assert_allclose(seconds, upstream, rtol=0, atol=1e-5)


def test_the_profile_is_convex_in_rows_where_the_reference_is_convex_in_the_index(shared: Path) -> None:
    reference = load_file(shared / "fixtures/tree_caddtree/trees.safetensors")
    points = zip(reference["fit.sparse.n"].tolist(), reference["fit.sparse.latency"].tolist(), strict=True)
    profile = fit_profile([Measurement(n, 0, seconds) for n, seconds in points], convex=True)
    assert_convex_and_non_decreasing(profile, 200, 0)
    upstream = reference["fit.sparse.upstream_index_convex"]
    slopes = np.diff(upstream) / np.diff(reference["fit.sparse.n"])
    assert np.diff(slopes).min() < -1e-5  # on purpose different: theirs is not convex in rows


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_no_feasible_curve_is_nearer_to_the_measurements(data: st.DataObject) -> None:
    rows = sorted(data.draw(st.sets(st.integers(1, 90), min_size=2, max_size=9)))
    times = st.floats(1e-3, 1.0)
    measurements = [Measurement(n, 64, data.draw(times)) for n in rows for _ in range(data.draw(st.integers(1, 2)))]
    profile = fit_profile(measurements, convex=True)
    assert_convex_and_non_decreasing(profile, 120, 64)

    # Another feasible curve: slopes that only grow, summed up from a first value.
    growth = data.draw(st.lists(st.floats(0, 0.02), min_size=len(rows) - 1, max_size=len(rows) - 1))
    steps = np.cumsum(growth) * np.diff(rows)
    other = data.draw(st.floats(0, 1.0)) + np.concatenate(([0.0], np.cumsum(steps)))

    def distance(curve: np.ndarray) -> float:
        return sum((curve[rows.index(m.rows)] - m.seconds) ** 2 for m in measurements)

    fitted = profile.seconds(np.array(rows), 64)
    for share in (1e-3, 0.1, 1.0):  # feasible curves near the fitted one are the strictest test
        assert distance(fitted) <= distance((1 - share) * fitted + share * other) + 1e-10


def test_convex_times_are_kept_and_the_last_slope_continues() -> None:
    profile = fit_profile([Measurement(2, 10, 1.0), Measurement(4, 10, 1.0), Measurement(8, 10, 3.0)])
    seconds = profile.seconds(np.array([1, 2, 3, 4, 6, 8, 10]), 10)
    np.testing.assert_allclose(seconds, [1.0, 1.0, 1.0, 1.0, 2.0, 3.0, 4.0], atol=1e-9)


@pytest.mark.parametrize(
    ("context", "expected"),
    [
        (0, [1.0, 2.0]),
        (100, [1.0, 2.0]),
        (150, [1.5, 3.0]),
        (200, [2.0, 4.0]),
        (275.0, [3.5, 7.0]),
        (9000, [4.0, 8.0]),
    ],
)
def test_context_is_interpolated_and_clamped(context: float, expected: list[float]) -> None:
    curves = (Curve(100, (1, 3), (1.0, 2.0)), Curve(200, (1, 3), (2.0, 4.0)), Curve(300, (1, 3), (4.0, 8.0)))
    seconds = MeasuredProfile(curves).seconds(np.array([1, 3]), context)
    np.testing.assert_allclose(seconds, expected)


def test_repeated_measurements_count_each() -> None:
    repeated = [
        Measurement(1, 0, 1.0),
        Measurement(2, 0, 2.0),
        Measurement(2, 0, 2.0),
        Measurement(2, 0, 5.0),
    ]
    np.testing.assert_allclose(fit_profile(repeated, convex=True).seconds(np.array([1, 2]), 0), [1.0, 3.0])


@pytest.mark.parametrize(
    ("measurements", "message"),
    [([], "no measurements"), ([Measurement(4, 77, 0.1), Measurement(4, 77, 0.2)], "context 77")],
)
def test_too_few_measurements_for_a_profile_are_explained(measurements, message: str) -> None:
    with pytest.raises(BastionError, match=message):
        fit_profile(measurements, convex=True)


def test_no_measurements_for_a_roofline_are_explained() -> None:
    with pytest.raises(BastionError, match="no measurements"):
        fit_roofline([], SHAPE, 2, CEILINGS)


@pytest.mark.parametrize("values", [(0, 5, 0.1), (1, -1, 0.1), (1, 5, 0.0), (1, 5, float("nan")), (1, 5, float("inf"))])
def test_impossible_measurements_are_refused(values: tuple[int, int, float]) -> None:
    with pytest.raises(ValueError, match="not a verify pass"):
        Measurement(*values)


@pytest.mark.parametrize(
    ("rows", "seconds"),
    [
        ((1,), (1.0,)),
        ((1, 2), (1.0,)),
        ((2, 1), (1.0, 2.0)),
        ((1, 1), (1.0, 2.0)),
        ((1, 2), (1.0, float("nan"))),
    ],
)
def test_impossible_curves_are_refused(rows: tuple[int, ...], seconds: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="curve"):
        Curve(0, rows, seconds)


def test_cross_validation_predicts_what_was_held_out() -> None:
    # Without its middle the profile is a line: 2.5 seconds where 2.0 were measured.
    errors = cross_validate([Measurement(n, 8, s) for n, s in ((1, 1.0), (2, 2.0), (3, 4.0))], SHAPE, 2, CEILINGS)
    assert errors["profile"] == pytest.approx(0.25)


def test_cross_validation_tries_contexts_too() -> None:
    # Two row counts: only a context length can be held out. 4.5 seconds are predicted where 4.0 are right.
    times = {16: 1.0, 128: 4.0, 240: 8.0}
    passes = [Measurement(n, c, s) for c, s in times.items() for n in (1, 2)]
    assert cross_validate(passes, SHAPE, 2, CEILINGS)["profile"] == pytest.approx(0.125)


def test_the_model_that_predicts_better_is_chosen() -> None:
    # Curved between the grid points: the roofline knows how, the profile does not.
    truth = CalibratedRoofline(SHAPE, 4, CEILINGS, 1.5, 0.02, 4.0, 0.005)
    errors = cross_validate(grid(lambda n, c: float(truth.seconds(np.array([n]), c)[0])), SHAPE, 4, CEILINGS)
    assert choose(errors) == "roofline"
    assert errors["roofline"] < 1e-3 < errors["profile"]
    # Three slopes: more than a roofline has.
    errors = cross_validate(grid(lambda n, c: 0.03 + 0.01 * max(0, n - 4) + 0.1 * max(0, n - 24)), SHAPE, 4, CEILINGS)
    assert choose(errors) == "profile"


def test_equal_errors_choose_the_profile() -> None:
    assert choose({"roofline": 0.1, "profile": 0.1}) == "profile"


def test_cross_validation_of_too_little_is_explained() -> None:
    with pytest.raises(BastionError, match="three or more row counts"):
        cross_validate([Measurement(1, 8, 1.0), Measurement(2, 8, 2.0)], SHAPE, 2, CEILINGS)


def test_the_monotone_fit_is_the_measurements_where_they_never_fall() -> None:
    """Steep, then flat: a convex curve misses it on both sides of the bend."""
    passes = [Measurement(n, 9, s) for n, s in [(1, 1.0), (2, 2.0), (3, 2.1), (8, 2.2), (32, 10.0)]]
    rows = np.array([m.rows for m in passes])
    assert fit_profile(passes).seconds(rows, 9).tolist() == [m.seconds for m in passes]
    convex = fit_profile(passes, convex=True).seconds(rows, 9)
    assert convex[0] > 1.05
    dip = [Measurement(n, 9, s) for n, s in [(1, 1.0), (2, 2.0), (3, 1.0), (8, 3.0)]]
    fitted = fit_profile(dip).seconds(np.array([1, 2, 3, 8]), 9)
    assert fitted[1] == fitted[2]
    assert 1.0 < fitted[1] < 1.5  # relative errors: nearer to the shorter time than the mean
