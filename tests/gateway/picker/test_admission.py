"""The picker refuses some requests while servers are saturated."""

from gateway.picker.admission import PickLimits, refusal
from gateway.picker.asking import NO_PROMPT, PickRequest
from gateway.picker.servers import ServerReport

FULL, FREE = ServerReport(waiting=5), ServerReport(waiting=4, kv_usage=0.94)
LIMITS = PickLimits(priorities={"batch": -1, "chat": 1})


def is_refused(
    *reports: ServerReport, tenant: str = "a", objective: str = "", ttft_s: float = 0.0, slo_s: float = 0.0, **held: int
) -> bool:
    asked = PickRequest(prompt=NO_PROMPT, tenant=tenant, objective=objective, ttft_s=slo_s)
    return refusal(asked, reports, ttft_s, held, LIMITS) is not None


def test_with_room_anywhere_nothing_is_refused() -> None:
    assert not is_refused(FULL, FREE, objective="batch", a=99)


def test_a_full_cache_is_saturation_too() -> None:
    assert is_refused(ServerReport(kv_usage=0.96), objective="batch")


def test_without_room_what_may_wait_is_refused() -> None:
    assert is_refused(FULL, FULL, objective="batch")
    assert not is_refused(FULL, FULL, objective="chat")
    assert not is_refused(FULL, FULL, objective="unknown")


def test_without_room_a_tenant_with_more_than_its_part_is_refused() -> None:
    assert is_refused(FULL, tenant="a", a=5, b=1)
    assert not is_refused(FULL, tenant="b", a=5, b=1)
    assert not is_refused(FULL, tenant="new", a=5, b=1)


def test_one_tenant_alone_has_all_of_it() -> None:
    assert not is_refused(FULL, tenant="a", a=50)


def test_a_promise_that_would_be_broken_refuses_what_may_wait_alone() -> None:
    assert is_refused(FREE, objective="batch", ttft_s=2.0, slo_s=1.0)
    assert not is_refused(FREE, objective="chat", ttft_s=2.0, slo_s=1.0)
    assert not is_refused(FREE, objective="batch", ttft_s=2.0)
