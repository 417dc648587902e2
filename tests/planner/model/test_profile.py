import json

import numpy as np
import pytest

from planner.errors import InputError, OutsideProfile
from planner.model.profile import (
    KvSize,
    PrefillCurve,
    ProfileWindow,
    calibrate,
    dump_curve,
    fit_quadratic,
    load_profile,
    parse_profile,
    provenance_kind,
)
from planner.model.throughput import kv_throughput
from tests.planner.conftest import CONFIGS

MIB = 2**20


def curve(**fields) -> PrefillCurve:
    return PrefillCurve(**({"coefficients": (0.1, 1e-4, 1e-10), "valid_tokens": (1, 100_000)} | fields))


@pytest.mark.parametrize(("tokens", "mib"), [(1024, 190.8), (8192, 308.9), (32_000, 701.3), (130_000, 2316.3)])
def test_kv_size_of_the_case_study_meets_table_5(tokens, mib):
    kv = load_profile(CONFIGS / "profiles/internal-1t.json").kv_size()
    assert kv(tokens) / MIB == pytest.approx(mib, abs=0.05)


@pytest.mark.parametrize(("tokens", "seconds"), [(1000, 0.434), (8000, 0.735), (32_000, 1.841), (128_000, 7.416)])
def test_the_h200_curve_is_the_least_squares_quadratic_of_table_5(tokens, seconds):
    profile = load_profile(CONFIGS / "profiles/internal-1t.json")
    assert profile.prefill_on("h200x8")(tokens) == pytest.approx(seconds, abs=5e-4)


@pytest.mark.parametrize(("tokens", "share"), [(1024, 91), (8192, 56), (15_000, 41), (45_046, 19)])
def test_the_fixed_state_dominates_short_prompts(tokens, share):
    kv = load_profile(CONFIGS / "profiles/internal-1t.json").kv_size()
    assert 100 * kv.fixed_bytes / kv(tokens) == pytest.approx(share, abs=0.5)


@pytest.mark.parametrize(
    ("name", "gpus", "length", "gbps"),
    [
        ("minimax-m2.5", 512, 32_000, 3836),  # "3.8 Tbit/s"
        ("qwen3-235b", 512, 32_000, 2134),  # "2.1 Tbit/s"
        ("ring-2.5-1t", 512, 32_000, 166),  # "roughly 170 Gbit/s"
        ("ring-2.5-1t", 512, 128_000, 93.4),  # "below 100 Gbit/s"
        ("ring-2.5-1t", 10_000, 128_000, 1825),  # "about 1.8 Tbit/s"
    ],
)
def test_egress_of_section_2_3(name, gpus, length, gbps):
    profile = load_profile(CONFIGS / f"profiles/{name}.json")
    assert gpus / 8 * profile.kv_throughput(length) == pytest.approx(gbps, abs=0.5)


@pytest.mark.parametrize("name", ["kimi-linear-48b", "mimo-v2-flash", "qwen3.5-397b", "minimax-m2.5", "qwen3-235b"])
def test_table_3_comes_back_from_the_profiles(name):
    profile = load_profile(CONFIGS / f"profiles/{name}.json")
    for tokens, gbps in profile.kv_throughput_gbps:
        phi = kv_throughput(profile.kv_size()(tokens), profile.prefill_on("h200x8")(tokens))
        assert float(phi) * 8e-9 == pytest.approx(gbps, rel=1e-3)


def test_kv_size_of_windows_stops_growing():
    kv = KvSize(fixed_bytes=10, bytes_per_token=2, windows=(ProfileWindow(100, 3),))
    assert [kv(50), kv(100), kv(1000)] == [260, 510, 2310]
    assert list(kv.of(np.array([50.0, 1000.0]))) == [260, 2310]


def test_points_are_joined_by_straight_lines_and_the_ends_go_on():
    piecewise = curve(coefficients=None, points=((1000, 1.0), (2000, 3.0)), valid_tokens=(1000, 2000))
    assert [piecewise(1000), piecewise(1500), piecewise(3000)] == [1.0, 2.0, 5.0]
    assert list(piecewise.of(np.array([1500.0, 3000.0]))) == [2.0, 5.0]


def test_a_prefix_saves_its_part_of_the_curve():
    assert curve().with_prefix(10_000, 4_000) == pytest.approx(0.1 + 0.6 + 1e-10 * (10_000**2 - 4_000**2))
    assert curve().with_prefix(10_000, 0) == curve()(10_000)


def test_lengths_outside_are_refused_with_what_would_do():
    with pytest.raises(OutsideProfile, match=r"T on x: length 200000 .* outside the profiled 1–100000.*--extrapolate"):
        curve().check(np.array([5.0, 200_000.0]), "T on x")
    curve().check(np.array([200_000.0]), "T on x", extrapolate=True)


def test_calibration_finds_the_missing_overhead():
    truth = curve(overhead_s=0.36, scale=1.2)
    result = calibrate(curve(), [(n, truth(n)) for n in (1000, 8000, 32_000)])
    assert (result.curve.overhead_s, result.curve.scale) == pytest.approx((0.36, 1.2))
    assert max(abs(r) for r in result.residuals_s) < 1e-9
    assert provenance_kind(result.curve.provenance) == "fitted"


def test_calibration_refuses_what_makes_no_sense():
    with pytest.raises(InputError, match="check the points"):
        calibrate(curve(), [(1000, 5.0), (32_000, 1.0)])


def test_a_quadratic_needs_three_points():
    with pytest.raises(InputError, match="points=2"):
        fit_quadratic([(1, 1), (2, 2)])


def test_a_curve_survives_its_json():
    table = {"schema": 1, "model": "m", "prefill": {"x": dump_curve(curve(overhead_s=0.2))}}
    assert parse_profile(json.loads(json.dumps(table))).prefill["x"] == curve(overhead_s=0.2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": 2}, "schema=2"),
        ({"prefill": {"x": {"points": [[1, 1], [2, 2]], "interpolation": "cubic"}}}, "interpolation='cubic'"),
        ({"prefill": {"x": {"points": [[1, 1], [2, 2]], "provenance": "guessed"}}}, "provenance='guessed'"),
        ({"decode": {"x": {"max_running": 0, "step_s": 1}}}, "max_running=0"),
    ],
)
def test_bad_profiles_are_named(change, message):
    with pytest.raises(InputError, match=message):
        parse_profile({"schema": 1, "model": "m"} | change)


def test_a_profile_without_kv_says_so():
    with pytest.raises(InputError, match="only its KV throughput is known"):
        load_profile(CONFIGS / "profiles/ring-2.5-1t.json").kv_size()
    with pytest.raises(InputError, match="not profiled on 'tpu'; known: h200x8"):
        load_profile(CONFIGS / "profiles/qwen3-235b.json").prefill_on("tpu")
