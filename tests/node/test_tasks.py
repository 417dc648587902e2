"""Whatever fails is seen, and what a node lives on goes on."""

import asyncio
from collections import Counter

import pytest

from node.tasks import Tasks


def test_what_fails_is_counted_and_begun_again(caplog: pytest.LogCaptureFixture) -> None:
    failures: Counter[str] = Counter()

    async def scenario() -> None:
        tasks, outcomes, done = Tasks(failures, again_s=0.0), [KeyError("x"), ValueError("y")], asyncio.Event()

        async def work() -> None:
            if outcomes:
                raise outcomes.pop()
            done.set()

        tasks.start("work", work)
        await done.wait()
        await tasks.close()
        assert len(tasks) == 0

    asyncio.run(scenario())
    assert failures == {"work": 2}
    assert [record.levelname for record in caplog.records] == ["ERROR", "ERROR"]


def test_a_callback_that_fails_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    failures: Counter[str] = Counter()

    async def scenario() -> None:
        tasks, loop, after = Tasks(failures), asyncio.get_running_loop(), asyncio.Event()
        loop.set_exception_handler(tasks.on_loop_error)
        loop.call_soon(dict[str, int]().__getitem__, "nobody")
        loop.call_soon(after.set)
        await after.wait()
        await tasks.close()

    asyncio.run(scenario())
    assert failures == {"callback": 1}
    assert "KeyError: 'nobody'" in caplog.text
