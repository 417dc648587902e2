from typing import Any

import pytest

from prfaas.demo.summary import DemoOutcome, summarise


def outcome(route: str, **record: Any) -> DemoOutcome:
    values = {
        "route": route,
        "total": 100,
        "cached": 0,
        "bytes": 1000,
        "overlap": None,
        "fallbacks": [],
        "kv_ready_minus_prefill_end_s": None,
    }
    return DemoOutcome(
        name="x", prompt="", max_tokens=1, token_ids=(1,), ttft_s=record.pop("ttft_s", 1.0), record=values | record
    )


def test_totals() -> None:
    summary = summarise(
        [
            outcome("local", cached=50, ttft_s=0.5),
            outcome(
                "remote", bytes=2_000_000, overlap=0.9, kv_ready_minus_prefill_end_s=0.02, fallbacks=["prefill_failed"]
            ),
            outcome("remote", bytes=2_000_000, overlap=0.7, kv_ready_minus_prefill_end_s=0.04, ttft_s=3.0),
        ],
        seconds=8.0,
    )
    assert summary.by_route == {"local": 1, "remote": 2}
    assert summary.hit_ratio == pytest.approx(50 / 300)
    assert summary.ttft_s["remote"] == pytest.approx((2.0, 2.8))
    assert summary.egress_bytes == 4_000_000
    assert summary.egress_mbit_per_s == pytest.approx(4.0)
    assert summary.overlap == pytest.approx(0.8)
    assert summary.kv_wait_p50_s == pytest.approx(0.03)
    assert summary.fallbacks == {"prefill_failed": 1}


def test_what_moves_inside_a_cluster_is_no_egress() -> None:
    assert summarise([outcome("local", bytes=5000)], 1.0).egress_bytes == 0


def test_nothing_to_summarise() -> None:
    with pytest.raises(ValueError, match="no request has finished"):
        summarise([], 1.0)
