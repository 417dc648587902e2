import pytest

from gateway.errors import DecodeFailed, PrefillFailed
from gateway.upstream.sglang_bootstrap import DECODE_ABORTED, label_in, to_blame
from planner.decisions.failures.retries import FailureKind

TROUBLE = PrefillFailed("p", "500", "somehow")


@pytest.mark.parametrize(
    ("message", "label"),
    [
        ("KVTransferError(bootstrap_room=3): no_capacity: the agent at 127.0.0.1:1: 40 pages needed", "no_capacity"),
        ("Prefill transfer failed: decode has aborted the request", DECODE_ABORTED),
        ("peer_lost", "peer_lost"),
        ("an unknown_no_capacity_thing", None),
        ("", None),
    ],
)
def test_our_own_reasons_are_found_in_sglangs_words(message: str, label: str | None) -> None:
    assert label_in(message) == label


@pytest.mark.parametrize(
    ("prefill", "decode", "is_prefill"),
    [
        (TROUBLE, None, True),
        (None, DecodeFailed("d", "500"), False),
        (TROUBLE, DecodeFailed("d", "500"), True),  # who computes is asked for elsewhere first
        (PrefillFailed("p", DECODE_ABORTED), DecodeFailed("d", "500"), False),
        (TROUBLE, DecodeFailed("d", "connection_lost"), False),
        (TROUBLE, DecodeFailed("d", "no_capacity"), False),
        (PrefillFailed("p", "engine_died"), DecodeFailed("d", "503"), True),
        (PrefillFailed("p", "400", "", FailureKind.REQUEST), None, True),
    ],
)
def test_who_was_told_of_a_failure_is_not_to_blame(
    prefill: PrefillFailed | None, decode: DecodeFailed | None, is_prefill: bool
) -> None:
    assert to_blame(prefill, decode) is (prefill if is_prefill else decode)
