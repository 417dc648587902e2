"""Places among the requests in flight, as several workers share them."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

import pytest

from gateway.admission.concurrency import ASK_AGAIN_S, ConcurrencyLimiter
from gateway.errors import ApiError, Overloaded
from gateway.prompt.reader_queue import ReadingRoom
from gateway.ratelimit.limiter import TenantLimiters
from gateway.workers.shared_counters import (
    IN_FLIGHT,
    PLACES_WANTED,
    SharedCounters,
    SharedInFlightSlots,
    SharedSlots,
)
from planner.decisions.admission.waiting import TenantShare
from tests.gateway.memory.pipeline import on_memory_loop
from tests.gateway.worlds import on_loop

HEAVY, LIGHT, THIRD = TenantShare("heavy"), TenantShare("light"), TenantShare("third")
LIMIT = 64
KEPT = 2
ROOM_BYTES = 1000


class SharingWorkers:
    """Those of one gateway, in one process."""

    def __init__(self, directory: Path, number: int, clock: Callable[[], float] | None = None) -> None:
        clock = clock or (lambda: self.now)
        SharedCounters.create(directory / "board", number, 1)
        TenantLimiters.create(directory / "allowances", number)
        self.now = 0.0
        self.bodies = ReadingRoom(ROOM_BYTES)
        self.boards = [SharedCounters(directory / "board", each) for each in range(number)]
        self.claims = [TenantLimiters(clock, directory / "allowances", own=each) for each in range(number)]
        self.limiters = [
            ConcurrencyLimiter(
                LIMIT,
                lambda _: None,
                clock=clock,
                patience_s=30.0,
                taken=SharedInFlightSlots(board),
                wanted=SharedSlots(board, PLACES_WANTED),
                claims=claims,
                bodies=self.bodies,
            )
            for board, claims in zip(self.boards, self.claims, strict=True)
        ]

    @property
    def taken(self) -> int:
        return self.boards[0].taken(IN_FLIGHT)

    @property
    def wanted(self) -> int:
        return self.boards[0].taken(PLACES_WANTED)

    async def fill(self, share: TenantShare) -> Counter[int]:
        """Has all workers take places for a tenant until each refuses it; how many each took."""
        took: Counter[int] = Counter()
        refused: set[int] = set()
        while len(refused) < len(self.limiters):
            for number, limiter in enumerate(self.limiters):
                try:
                    await limiter.take(share)
                    took[number] += 1
                except Overloaded:
                    refused.add(number)
        return took

    def close(self) -> None:
        for board, claims in zip(self.boards, self.claims, strict=True):
            board.close()
            claims.close()


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[SharingWorkers]:
    made = SharingWorkers(tmp_path, 3)
    yield made
    made.close()


def test_one_tenant_cannot_take_all_places_of_all_workers(workers: SharingWorkers) -> None:
    @on_loop
    async def check() -> None:
        assert (await workers.fill(HEAVY)).total() == LIMIT - KEPT
        first, second, third = workers.limiters
        for limiter in workers.limiters:
            with pytest.raises(ApiError):
                limiter.check(HEAVY)
            limiter.check(LIGHT)
        await second.take(LIGHT)
        await third.take(THIRD)
        first.check(LIGHT)
        assert workers.taken == LIMIT
        second.give_back(LIGHT)
        with pytest.raises(ApiError):
            await first.take(HEAVY)
        await first.take(LIGHT)

    check()


def test_within_its_part_a_tenant_waits_for_the_next_place_and_others_get_none_before(workers: SharingWorkers) -> None:
    @on_loop
    async def check() -> None:
        took = await workers.fill(HEAVY)
        first, second, _ = workers.limiters
        for _ in range(KEPT):
            await second.take(LIGHT)
        waiting = [asyncio.ensure_future(second.take(LIGHT)) for _ in range(5)]
        waiting.append(asyncio.ensure_future(second.take(THIRD)))
        await asyncio.sleep(0)
        assert (workers.taken, workers.wanted) == (LIMIT, 6)
        for number in range(6):
            assert took[0] > number
            first.give_back(HEAVY)
            with pytest.raises(ApiError):
                await first.take(HEAVY)
        async with asyncio.timeout(10.0):
            await asyncio.gather(*waiting)
        assert (workers.taken, workers.wanted) == (LIMIT, 0)

    check()


def test_of_those_that_wait_in_a_worker_tenants_take_turns(workers: SharingWorkers) -> None:
    @on_loop
    async def check() -> None:
        await workers.fill(HEAVY)
        limiter = workers.limiters[0]
        for _ in range(KEPT):
            await limiter.take(LIGHT)
        order: list[str] = []

        async def take(share: TenantShare) -> None:
            await limiter.take(share)
            order.append(share.flow)

        waiting = {asyncio.ensure_future(take(share)) for share in (LIGHT, LIGHT, LIGHT, THIRD)}
        await asyncio.sleep(0)
        while waiting:
            limiter.give_back(HEAVY)
            _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        assert order.index("third") <= 1

    check()


def test_one_that_waits_too_long_or_leaves_has_no_claim_any_more(workers: SharingWorkers) -> None:
    @on_loop
    async def check() -> None:
        await workers.fill(HEAVY)
        limiter = workers.limiters[0]
        for _ in range(KEPT):
            await limiter.take(LIGHT)
        leaves, late = (asyncio.ensure_future(limiter.take(share)) for share in (LIGHT, THIRD))
        await asyncio.sleep(0)
        assert workers.wanted == 2
        leaves.cancel()
        await asyncio.wait({leaves})
        assert (workers.wanted, workers.claims[1].claims(LIGHT).own) == (1, KEPT)
        workers.now = 31.0
        with pytest.raises(ApiError, match="already serves 64 requests"):
            await late
        assert (workers.wanted, workers.claims[1].claims(THIRD).own) == (0, 0)
        drained = asyncio.ensure_future(limiter.take(THIRD))
        await asyncio.sleep(0)
        limiter.is_draining = True
        with pytest.raises(ApiError, match="shutting down"):
            await drained
        assert workers.wanted == 0

    check()


def test_bodies_that_wait_with_their_requests_are_bounded_together(workers: SharingWorkers) -> None:
    @on_loop
    async def check() -> None:
        await workers.fill(HEAVY)
        limiter = workers.limiters[0]
        for _ in range(KEPT):
            await limiter.take(LIGHT)
        waiting = [asyncio.ensure_future(limiter.take(share, 400)) for share in (LIGHT, THIRD)]
        await asyncio.sleep(0)
        assert workers.bodies.held_bytes == 800
        with pytest.raises(ApiError, match="that wait to be read take 400 bytes"):
            await limiter.take(LIGHT, 400)
        with pytest.raises(ApiError, match="that wait to be read take 800 bytes"):
            await limiter.take(TenantShare("fourth"), 400)
        assert (workers.wanted, workers.claims[1].claims(LIGHT).own) == (2, KEPT + 1)
        waiting[0].cancel()
        limiter.give_back(HEAVY)
        await asyncio.wait(waiting)
        assert (workers.wanted, workers.bodies.held_bytes) == (0, 0)

    check()


def test_a_worker_that_has_died_claims_nothing(workers: SharingWorkers) -> None:
    @on_loop
    async def check() -> None:
        took = await workers.fill(HEAVY)
        workers.boards[1].clear(0)
        workers.claims[1].clear(0)
        assert workers.claims[1].claims(HEAVY).own == workers.taken == took[1] + took[2]
        assert (await workers.fill(HEAVY)).total() == took[0]

    check()


@on_memory_loop
async def test_a_worker_without_places_waits_no_longer_than_those_that_came_before(tmp_path: Path) -> None:
    loop = asyncio.get_running_loop()
    workers = SharingWorkers(tmp_path, 3, loop.time)
    busy, idle, _ = workers.limiters
    for _ in range(LIMIT - KEPT):
        await busy.take(HEAVY)
    for _ in range(KEPT):
        await busy.take(LIGHT)
    before = [asyncio.ensure_future(busy.take(LIGHT)) for _ in range(5)]
    await asyncio.sleep(0.001)
    waiting = asyncio.ensure_future(idle.take(THIRD))
    await asyncio.sleep(0.001)
    behind = [asyncio.ensure_future(busy.take(LIGHT))]
    for _ in range(6):  # as many as it comes behind, and its own
        busy.give_back(LIGHT)
        behind.append(asyncio.ensure_future(busy.take(LIGHT)))
        await asyncio.sleep(0.001)
    assert (workers.taken, all(each.done() for each in before)) == (LIMIT - 1, True)
    await asyncio.sleep(ASK_AGAIN_S)
    assert (workers.taken, waiting.done()) == (LIMIT, True)
    for each in behind:
        each.cancel()
    await asyncio.gather(*behind, return_exceptions=True)
    assert workers.wanted == 0
    workers.close()


def test_without_tenants_all_places_can_be_had(workers: SharingWorkers) -> None:
    @on_loop
    async def check() -> None:
        assert (await workers.fill(TenantShare())).total() == LIMIT

    check()


MOST_S = 1e-3  # of the processor


def test_a_place_is_quick_with_a_thousand_tenants_and_sixteen_workers(tmp_path: Path) -> None:
    workers = SharingWorkers(tmp_path, 16)

    @on_loop
    async def check() -> None:
        for limiter in workers.limiters:
            limiter.limit = 1024
        for number in range(1000):
            await workers.limiters[number % 16].take(TenantShare(f"t{number}"))
        taken_s = []
        for number in range(100):
            limiter, share = workers.limiters[number % 16], TenantShare(f"t{number}")
            begin = time.thread_time()
            limiter.give_back(share)
            await limiter.take(share)
            taken_s.append(time.thread_time() - begin)
        assert median(taken_s) < MOST_S

    check()
    workers.close()
