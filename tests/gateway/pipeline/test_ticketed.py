"""Both legs end with their request, however it ends."""

import asyncio

from gateway.pipeline.attempt import hang_up
from tests.gateway.worlds import on_loop, until


class Answer:
    """A decode node's, that has begun."""

    closed = False

    def close(self) -> None:
        self.closed = True


@on_loop
async def test_an_answer_that_comes_with_the_cancellation_is_closed() -> None:
    answer = Answer()

    async def asked() -> Answer:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return answer
        raise AssertionError

    asking = asyncio.create_task(asked())
    await asyncio.sleep(0)
    await hang_up(asking)  # type: ignore[arg-type]
    await until(lambda: answer.closed)


@on_loop
async def test_an_answer_that_comes_late_is_closed_though_nobody_waits_any_more() -> None:
    answer, go_on = Answer(), asyncio.Event()

    async def asked() -> Answer:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await go_on.wait()
            return answer
        raise AssertionError

    asking = asyncio.create_task(asked())
    await asyncio.sleep(0)
    hanging_up = asyncio.create_task(hang_up(asking))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    hanging_up.cancel()
    await asyncio.wait([hanging_up])
    assert hanging_up.cancelled()
    go_on.set()
    await until(lambda: answer.closed)


@on_loop
async def test_an_answer_that_has_begun_is_closed_at_once() -> None:
    answer = Answer()

    async def asked() -> Answer:
        return answer

    asking = asyncio.create_task(asked())
    await asking
    await hang_up(asking)  # type: ignore[arg-type]
    assert answer.closed
