"""What an engine's answer to a leg comes to."""

import json
from typing import Any

import pytest

from node.picked.legs import MAX_LABEL_CHARS, LegAnswer, PrefillAsked, engine_body, label, leg_answer
from transport.control.messages import TicketInfo

TICKET = TicketInfo(
    transfer_id="t", secret=b"s", num_tokens=2, have_tokens=0, tokens_digest=b"d", endpoints=(), ttl_s=1.0,
    layout_fingerprint="l", node_id="n", cluster="c",
)  # fmt: skip


@pytest.mark.parametrize(
    ("status", "told", "answer"),
    [
        (
            200,
            {"kv_transfer_params": {"delivered": True, "bytes_total": 7, "cached_tokens": 3, "link": "tcp"}},
            LegAnswer(delivered=True, bytes_total=7, cached_tokens=3),
        ),
        (200, {"kv_transfer_params": {"delivered": False, "reason": "link down"}}, LegAnswer(reason="link_down")),
        (200, {"kv_transfer_params": {"delivered": False}}, LegAnswer(reason="not_delivered")),
        (200, {"kv_transfer_params": None}, LegAnswer(reason="not_delivered")),
        (200, [], LegAnswer(reason="bad_answer")),
        (503, {"error": {"code": "no_capacity", "message": "full"}}, LegAnswer(reason="no_capacity")),
        (500, {"error": {}}, LegAnswer(reason="500")),
    ],
)
def test_an_engines_answer(status: int, told: Any, answer: LegAnswer) -> None:
    assert leg_answer(status, json.dumps(told).encode()) == answer


def test_bytes_that_are_no_answer() -> None:
    assert leg_answer(502, b"\xff") == LegAnswer(reason="bad_answer")


def test_an_engine_is_asked_for_tokens_and_nothing_more() -> None:
    asked = PrefillAsked(request_id="r", tokens=[1, 2, 3], ticket=TICKET, salt="aa", namespace="ns", tenant="t")
    said = json.loads(engine_body(asked, "m"))
    params = said.pop("kv_transfer_params")
    assert said == {"model": "m", "prompt": [1, 2, 3], "max_tokens": 1, "stream": False, "cache_salt": "ns"}
    assert (params["do_remote_decode"], params["salt"], params["tenant"]) == (True, "aa", "t")


def test_labels_are_short_and_plain() -> None:
    assert label("a b\n") == "a_b_"
    assert len(label("x" * 1000)) == MAX_LABEL_CHARS
