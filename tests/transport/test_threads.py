"""Calls that may hang."""

import asyncio
import threading

import pytest

from transport.threads import in_daemon_thread


def test_a_call_that_hangs_does_not_keep_a_process_from_ending() -> None:
    hangs, has_begun, threads = threading.Event(), threading.Event(), []

    def hang() -> None:
        threads.append(threading.current_thread())
        has_begun.set()
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
    assert has_begun.wait(60.0)
    assert [(thread.name, thread.daemon, thread.is_alive()) for thread in threads] == [("hang", True, True)]
    hangs.set()
    threads[0].join(60.0)
