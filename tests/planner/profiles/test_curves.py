"""Curves through measured runs, and what is refused."""

import pytest

from planner.errors import InputError
from planner.profiles.curves import decode_profile, prefill_curve
from planner.profiles.results.serving import serving_run
from tests.planner.profiles.results import LENGTHS, SWEEP, vllm


def runs(*tables):
    return [serving_run(table, f"r{at}.json") for at, table in enumerate(tables)]


def test_prefill_is_what_waits_for_nothing():
    curve = prefill_curve(runs(*SWEEP))
    assert curve.points == tuple((tokens, ms / 1000) for tokens, ms in LENGTHS)
    assert curve.valid_tokens == (1_000, 100_000)
    assert curve.error == pytest.approx(0.03)
    assert curve.provenance == (
        "measured: time to the first token, one request at a time; vllm bench serve: 4 runs of 40 requests in r0.json, r1.json, "
        "r2.json and 1 more"
    )


def test_the_error_is_the_spread_of_repeated_runs():
    bare = {"std_ttft_ms": None}
    curve = prefill_curve(
        runs(*[vllm(prompt=n, ttft_ms=t) | bare for n, t in ((1_000, 100), (1_010, 120), (8_000, 700))])
    )
    assert curve.points[0] == (1_005, pytest.approx(0.11))
    assert curve.error == pytest.approx(0.01 / 0.11)
    assert prefill_curve(runs(*[vllm(prompt=n, ttft_ms=t) | bare for n, t in LENGTHS])).error is None


def test_single_requests_are_grouped_by_length():
    lengths = [1_000, 1_010, 990, 1_020, 8_000, 8_100, 7_900]
    details = {"input_lens": lengths, "ttfts": [5.0, 0.1, 0.1, 0.1, 0.7, 0.7, 0.7]}
    curve = prefill_curve(runs(vllm() | details))
    assert curve.points == ((1_005, pytest.approx(0.1)), (8_000, pytest.approx(0.7)))  # the first one was a warm-up
    assert curve.error == pytest.approx(0)


def test_a_fall_within_the_noise_is_levelled_and_one_beyond_it_refused():
    level = prefill_curve(
        runs(vllm(prompt=100, ttft_ms=51), vllm(prompt=200, ttft_ms=50), vllm(prompt=8_000, ttft_ms=700))
    )
    assert [seconds for _, seconds in level.points] == [pytest.approx(0.0505), pytest.approx(0.0505), 0.7]
    with pytest.raises(
        InputError, match=r"prefill: 0.3 s for 8,000 tokens \(r1.json\), but 0.7 s for 4,000 \(r0.json\)"
    ):
        prefill_curve(runs(vllm(prompt=4_000, ttft_ms=700), vllm(prompt=8_000, ttft_ms=300)))


def test_times_that_are_mostly_waiting_are_refused():
    with pytest.raises(InputError, match=r"several requests at once \(16 at least\).*--max-concurrency 1"):
        prefill_curve(runs(vllm(running=16), vllm(running=32)))
    with pytest.raises(InputError, match="about 8,050 tokens, which is one point and no curve"):
        prefill_curve(runs(vllm(), vllm(prompt=8_100)))


def test_decode_by_batch():
    tables = [vllm(prompt=1_000, ttft_ms=1e-3, running=b, step_ms=20 + 0.5 * b, completed=100) for b in (1, 8, 32, 64)]
    decode = decode_profile(runs(*tables))
    assert (decode.step_s, decode.step_s_per_request) == (pytest.approx(0.020, rel=1e-3), pytest.approx(5e-4, rel=1e-3))
    assert (decode.max_running, decode.error) == (64, pytest.approx(0, abs=1e-3))
    assert "max_running is the largest batch measured" in decode.provenance
    assert decode_profile(runs(*tables), 40).max_running == 40


def test_rounding_is_no_error():
    """A line through equal steps misses them by 1e-16, which is no error that a profile may have."""
    decode = decode_profile(runs(*[vllm(running=b, step_ms=25, completed=100) for b in (1, 8, 32)]))
    assert decode.error == 0
    details = {
        "input_lens": [1_000] * 4 + [8_000] * 3,
        "ttfts": [0.1 + 1e-16, 0.1, 0.1, 0.1 + 2e-16, 0.7, 0.7, 0.7 + 2e-16],
    }
    assert prefill_curve(runs(vllm() | details)).error == 0


def test_decode_of_one_batch_and_of_none():
    decode = decode_profile(runs(vllm(running=16, step_ms=30, completed=160)))
    assert (decode.step_s, decode.step_s_per_request, decode.error) == (0.03, 0, None)
    assert decode_profile(runs(vllm(output=1))) is None


def test_steps_never_get_shorter_and_no_part_is_negative():
    with pytest.raises(InputError, match=r"decode: 0.01 s between tokens with .* fuller batches take no less time"):
        decode_profile(runs(vllm(step_ms=25), vllm(running=32, step_ms=10, completed=64)))
    flat = decode_profile(runs(vllm(step_ms=25), vllm(running=32, step_ms=24.5, completed=64)))
    assert (flat.step_s_per_request, flat.step_s) == (0, pytest.approx(0.02475, rel=1e-3))
    steep = decode_profile(runs(vllm(step_ms=1), vllm(running=32, step_ms=60, completed=64)))
    assert steep.step_s == 0
