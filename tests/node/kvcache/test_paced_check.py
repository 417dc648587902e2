import asyncio
from collections.abc import Generator

from hybrid_cache.cache.prefix_cache import PrefixCache
from hybrid_cache.errors import IntegrityError
from node.kvcache.paced_check import PacedCheck
from tests.hybrid_cache.builders import FULL, make_layout, prefill


class Pool:
    """A pool whose check takes `seconds` on the clock, in ten steps."""

    def __init__(self, seconds: float) -> None:
        self.now, self.checks, self.wrong = 100.0, 0, False
        self._seconds = seconds

    def integrity_steps(self) -> Generator[None, None, None]:
        self.checks += 1
        for _ in range(10):
            self.now += self._seconds / 10
            yield
        if self.wrong:
            raise IntegrityError("a page is in two places")


def test_a_fast_check_is_made_whenever_it_is_asked_for() -> None:
    async def scenario() -> None:
        pool = Pool(0.001)
        check = PacedCheck(lambda: pool.now)
        assert await check.result(pool.integrity_steps) == ""
        pool.wrong = True
        assert await check.result(pool.integrity_steps) == "a page is in two places"

    asyncio.run(scenario())


def test_a_slow_one_takes_a_hundredth_of_the_time() -> None:
    async def scenario() -> int:
        pool = Pool(0.3)
        check = PacedCheck(lambda: pool.now)
        while pool.now < 400.0:
            await check.result(pool.integrity_steps)
            pool.now += 0.05
        return pool.checks

    assert 9 <= asyncio.run(scenario()) <= 11


def test_other_work_has_its_turn_between_two_steps() -> None:
    async def scenario() -> int:
        pool, turns = Pool(0.3), 0
        check = PacedCheck(lambda: pool.now)

        async def other() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        working = asyncio.create_task(other())
        await check.result(pool.integrity_steps)
        working.cancel()
        return turns

    assert asyncio.run(scenario()) >= 10


def test_those_who_ask_together_share_a_slow_check() -> None:
    async def scenario() -> tuple[int, list[str]]:
        pool = Pool(0.3)
        pool.wrong = True
        check = PacedCheck(lambda: pool.now)
        answers = await asyncio.gather(*(check.result(pool.integrity_steps) for _ in range(3)))
        return pool.checks, list(answers)

    assert asyncio.run(scenario()) == (1, ["a page is in two places"] * 3)


def test_a_check_whose_caller_leaves_makes_room_for_the_next() -> None:
    async def scenario() -> str:
        cache = PrefixCache(make_layout(FULL), 10_000)
        prefill(cache, list(range(20_000)))
        check = PacedCheck(lambda: 0.0)
        leaving = asyncio.create_task(check.result(cache.integrity_steps))
        await asyncio.sleep(0)
        leaving.cancel()
        await asyncio.wait([leaving])
        return await check.result(cache.integrity_steps)  # `leaving` still has the error, and what that refers to

    assert asyncio.run(scenario()) == ""
