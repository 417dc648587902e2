"""Whatever fails is seen, and what a node lives on goes on."""

import asyncio
import threading
from collections import Counter

import pytest

from node.tasks import Tasks, in_daemon_thread


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


def test_a_call_that_hangs_does_not_keep_a_process_from_ending() -> None:
    hangs, threads = threading.Event(), []

    def hang() -> None:
        threads.append(threading.current_thread())
        hangs.wait(60.0)

    def fail() -> int:
        raise OSError("no disk")

    async def scenario() -> None:
        assert await in_daemon_thread("sum", lambda: 1 + 1) == 2
        with pytest.raises(OSError, match="no disk"):
            await in_daemon_thread("fail", fail)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await in_daemon_thread("hang", hang)

    asyncio.run(scenario())  # it waits for threads of executors
    assert [(thread.name, thread.daemon, thread.is_alive()) for thread in threads] == [("hang", True, True)]
    hangs.set()
    threads[0].join(60.0)
