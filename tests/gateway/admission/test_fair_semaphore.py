"""Turns that tenants share."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from gateway.admission.fair_semaphore import FairSemaphore


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(scenario())


def test_who_has_many_waiting_keeps_nobody_else_waiting_behind_them() -> None:
    async def scenario() -> None:
        turns, order = FairSemaphore(1), list[str]()

        async def work(tenant: str) -> None:
            async with turns.turn(tenant):
                order.append(tenant)
                await asyncio.sleep(0)

        await asyncio.gather(*(work("many") for _ in range(4)), work("one"), *(work("two") for _ in range(2)))
        assert order == ["many", "many", "one", "two", "many", "two", "many"]

    run(scenario)


def test_who_leaves_the_line_and_who_leaves_as_its_turn_comes_keep_none() -> None:
    async def scenario() -> None:
        turns = FairSemaphore(1)

        async def work() -> None:
            async with turns.turn("t"):
                pass

        async with turns.turn("t"):
            leaves, is_let_in, stays = (asyncio.create_task(work()) for _ in range(3))
            await asyncio.sleep(0)
            leaves.cancel()
            await asyncio.sleep(0)
        is_let_in.cancel()  # it has been given its turn, and has not run since
        async with asyncio.timeout(10.0):
            await stays
            await work()
        assert leaves.cancelled()
        assert is_let_in.cancelled()

    run(scenario)


@given(
    st.integers(1, 3),
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 3), st.integers(0, 6)), max_size=20),
)
def test_never_more_at_once_and_all_of_them_come_back(at_once: int, works: list[tuple[str, int, int]]) -> None:
    """A work takes so many steps, and is cancelled after so many."""

    async def scenario() -> None:
        turns, running, most = FairSemaphore(at_once), 0, 0

        async def work(tenant: str, steps: int) -> None:
            nonlocal running, most
            async with turns.turn(tenant):
                running += 1
                most = max(most, running)
                try:
                    for _ in range(steps):
                        await asyncio.sleep(0)
                finally:
                    running -= 1

        async def leaves(task: asyncio.Task[None], after: int) -> None:
            for _ in range(after):
                await asyncio.sleep(0)
            task.cancel()

        tasks = [asyncio.create_task(work(tenant, steps)) for tenant, steps, _ in works]
        await asyncio.gather(*(leaves(task, after) for task, (_, _, after) in zip(tasks, works, strict=True)))
        await asyncio.gather(*tasks, return_exceptions=True)
        assert most <= at_once

        async with asyncio.timeout(10.0):  # none was lost
            for _ in range(at_once):
                await turns.turn("z").__aenter__()

    run(scenario)
