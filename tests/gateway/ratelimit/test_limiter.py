"""Limits of tenants: by themselves, shared by workers, and before a running gateway."""

from pathlib import Path

import numpy as np
import pytest

from gateway.auth.keyring import EVERYBODY, Keyring, Tenant, digest_of
from gateway.config.tenants import TenantConfig
from gateway.errors import TenantLimited
from gateway.ratelimit.limiter import CLAIMS, HEAD_CELLS, ROWS, UNLIMITED, TenantLimiters, span
from gateway.shared_array import SharedArray
from planner.decisions.admission.limits import Bucket, TenantLimits
from planner.decisions.admission.places import Entry
from planner.decisions.admission.waiting import TenantShare
from tests.gateway.memory.pipeline import on_memory_loop, pipeline

ACME, RIVAL, FREE = "sk-acme", "sk-rival", "sk-free"
TENANT = Tenant("acme", "acme", b"", TenantLimits(Bucket(3), Bucket(600), 2))


def test_without_limits_nothing_is_counted() -> None:
    allowances = TenantLimiters(lambda: 0.0)
    assert allowances.enter(EVERYBODY) is UNLIMITED
    allowances.enter(EVERYBODY).leave()


def test_a_request_takes_its_part_and_gives_back_its_place() -> None:
    now = 100.0
    allowances = TenantLimiters(lambda: now)
    first, second = allowances.enter(TENANT), allowances.enter(TENANT)
    with pytest.raises(TenantLimited) as refused:
        allowances.enter(TENANT)
    assert (refused.value.status, refused.value.code) == (429, "concurrent_requests")
    first.read(500, 1)
    assert first.headers == {
        "x-ratelimit-limit-requests": "3",
        "x-ratelimit-remaining-requests": "1",
        "x-ratelimit-reset-requests": "40s",
        "x-ratelimit-limit-tokens": "600",
        "x-ratelimit-remaining-tokens": "100",
        "x-ratelimit-reset-tokens": "50s",
    }
    with pytest.raises(TenantLimited) as refused:
        second.read(200, 1)
    assert refused.value.code == "tokens_per_minute"
    assert refused.value.retry_after_s == pytest.approx(10.0)
    second.leave()
    second.leave()  # it has no place any more
    first.settle(200)
    first.leave()
    with pytest.raises(TenantLimited) as refused:
        allowances.enter(TENANT)
    assert (refused.value.code, refused.value.headers["x-ratelimit-remaining-tokens"]) == ("tokens_per_minute", "0")
    now = 111.0
    allowances.enter(TENANT).leave()


def test_workers_count_together_and_one_that_is_gone_has_nothing_under_way(tmp_path: Path) -> None:
    path = tmp_path / "allowances"
    TenantLimiters.create(path, 2)
    first, second = (TenantLimiters(lambda: 0.0, path, own=number) for number in range(2))
    first.enter(TENANT)
    second.enter(TENANT)
    with pytest.raises(TenantLimited, match="more requests at once than its limit of 2"):
        first.enter(TENANT)
    again = TenantLimiters(lambda: 0.0, path, own=0)  # in the place of the first
    again.enter(TENANT)
    with pytest.raises(TenantLimited) as refused:
        second.enter(TENANT)
    assert refused.value.code == "concurrent_requests"
    for each in (first, second, again):
        each.close()


def test_rows_of_tenants_that_are_gone_are_used_again() -> None:
    now = 0.0
    allowances = TenantLimiters(lambda: now)
    limits = TenantLimits(at_once=1)
    stays = allowances.enter(Tenant("stays", limits=limits))
    for number in range(ROWS + 10):
        allowances.enter(Tenant(f"t{number}", limits=limits)).leave()
    with pytest.raises(TenantLimited):
        allowances.enter(Tenant("stays", limits=limits))
    stays.leave()
    allowances.enter(Tenant("stays", limits=limits))


def test_spans_are_written_as_openai_writes_them() -> None:
    assert [span(seconds) for seconds in (0, 0.25, 1, 59.5, 90)] == ["0s", "250ms", "1s", "1m0s", "1m30s"]


def key(text: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {text}"}


TENANTS = {
    "acme": TenantConfig(keys=(digest_of(ACME),), requests_per_minute=2),
    "rival": TenantConfig(keys=(digest_of(RIVAL),), tokens_per_minute=50),
    "free": TenantConfig(keys=(digest_of(FREE),)),
}


@on_memory_loop
async def test_a_tenants_limit_is_its_own() -> None:
    async with pipeline(tenants=TENANTS) as w:
        for remaining in ("1", "0"):
            answer = await w.complete("hello", headers=key(ACME))
            assert (answer.status, answer.headers["x-ratelimit-remaining-requests"]) == (200, remaining)
        refused = await w.complete("hello", headers=key(ACME))
        assert (refused.status, refused.headers["x-prfaas-rejected"]) == (429, "requests_per_minute")
        assert 25 <= int(refused.headers["Retry-After"]) <= 38  # half a minute, and up to a quarter more
        assert 25_000 <= int(refused.headers["retry-after-ms"]) <= 37_500
        assert refused.headers["x-ratelimit-limit-requests"] == "2"
        assert (await refused.json())["error"]["type"] == "rate_limit_error"
        async with w.http.post("/v1/tokenize", json={"model": "scripted"}, headers=key(ACME)) as tokens:
            assert tokens.status == 429
        for _ in range(3):
            answer = await w.complete("hello", headers=key(FREE))
            assert (answer.status, "x-ratelimit-limit-requests" in answer.headers) == (200, False)


@on_memory_loop
async def test_what_nobody_computed_is_not_paid_for_and_an_answer_is() -> None:
    async with pipeline(tenants=TENANTS) as w:
        w.admission.limit = 2
        await w.admission.take()
        refused = await w.complete(["a" * 10, "b" * 10], headers=key(RIVAL))  # two places, where one is free
        w.admission.give_back()
        assert (refused.status, refused.headers["x-prfaas-rejected"]) == (429, "rate_limit_exceeded")
        w.admission.limit = 100
        await w.idle()
        answer = await w.complete("a" * 45, headers=key(RIVAL))
        assert answer.status == 200
        assert int(answer.headers["x-ratelimit-remaining-tokens"]) < 10
        await answer.read()
        await w.idle()
        refused = await w.complete("a" * 20, headers=key(RIVAL))
        assert (refused.status, refused.headers["x-prfaas-rejected"]) == (429, "tokens_per_minute")
        assert w.admission.in_flight == 0


def test_a_tenants_limits_come_from_its_table() -> None:
    keyring = Keyring(TENANTS, ())
    assert keyring.named("acme").limits == TenantLimits(requests=Bucket(2))
    assert not keyring.named("free").limits.are_any


def test_workers_see_what_others_are_about_to_pin(tmp_path: Path) -> None:
    path = tmp_path / "allowances"
    TenantLimiters.create(path, 2)
    first, second = (TenantLimiters(lambda: 0.0, path, own=number) for number in range(2))
    assert first.are_shared
    assert (first.about_to_pin("acme", 100), second.about_to_pin("acme", 50)) == (0, 100)
    assert (first.about_to_pin("acme", -100), first.about_to_pin("globex", 1)) == (50, 0)
    first.clear(1)  # as the parent does when the second has died
    assert first.about_to_pin("acme", 0) == 0
    second.about_to_pin("acme", 50)
    third = TenantLimiters(lambda: 0.0, path, own=1)  # in the place of the second, which has died
    assert first.about_to_pin("acme", 0) == 0
    for each in (first, second, third):
        each.close()


def test_a_worker_that_has_died_leaves_its_tenants_places_to_the_others_at_once(tmp_path: Path) -> None:
    path = tmp_path / "allowances"
    TenantLimiters.create(path, 2)
    parent, first, second = (TenantLimiters(lambda: 0.0, path, own=number) for number in (0, 0, 1))
    first.enter(TENANT)
    kept = second.enter(TENANT)
    parent.clear(0)
    second.enter(TENANT).leave()
    kept.leave()
    for each in (parent, first, second):
        each.close()


def test_a_claim_that_a_killed_worker_had_half_written_is_gone_with_it(tmp_path: Path) -> None:
    path, share = tmp_path / "allowances", TenantShare("acme")
    TenantLimiters.create(path, 2)
    first, second = (TenantLimiters(lambda: 0.0, path, own=number) for number in (0, 1))
    for each in (first, second):
        each.claim(share, lambda _: Entry.TAKES)
    written = SharedArray(path, np.float64)
    of_all = written.cells[HEAD_CELLS:].reshape(-1, ROWS)[CLAIMS]
    of_all[of_all > 0] += 1  # and not in its own column yet
    first.clear(1)
    assert first.claims(share).own == 1
    del of_all
    for each in (first, second, written):
        each.close()
