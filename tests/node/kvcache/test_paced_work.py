"""Work in steps, one in each turn of the loop."""

import asyncio
from collections.abc import Iterator
from typing import Any

from node.kvcache.paced_work import PacedWork
from tests.pd_cluster.handover import run


def test_one_step_a_turn_in_the_order_of_pieces() -> None:
    async def scenario() -> None:
        work, done = PacedWork(), list[str]()

        def steps(name: str, count: int) -> Iterator[None]:
            for number in range(count):
                done.append(f"{name}{number}")
                yield

        work.add("a", steps("a", 2))
        work.add("b", steps("b", 1))
        assert "a" in work
        assert "b" in work
        for turn in range(5):
            assert len(done) <= turn
            await asyncio.sleep(0)
        await work.settled()
        assert done == ["a0", "a1", "b0"]
        assert "a" not in work
        assert "b" not in work

    run(scenario())


def test_an_error_ends_its_piece_and_no_other() -> None:
    async def scenario() -> None:
        work, done, errors = PacedWork(), list[str](), list[dict[str, Any]]()
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: errors.append(context))

        def failing() -> Iterator[None]:
            yield
            raise ValueError("no more")

        def going() -> Iterator[None]:
            yield
            done.append("b")

        work.add("a", failing())
        work.add("b", going())
        await work.settled()
        assert done == ["b"]
        assert [str(each["exception"]) for each in errors] == ["no more"]
        assert "a" not in work

    run(scenario())


def test_settled_does_not_wait_for_what_comes_later() -> None:
    async def scenario() -> None:
        work = PacedWork()
        ends = asyncio.Event()

        def steps() -> Iterator[None]:
            yield from ()

        def until_told() -> Iterator[None]:
            while not ends.is_set():
                yield

        work.add("a", steps())
        waiting = asyncio.create_task(work.settled())
        await asyncio.sleep(0)
        work.add("b", until_told())
        async with asyncio.timeout(10.0):
            await waiting
        assert "b" in work
        ends.set()
        await work.settled()

    run(scenario())
