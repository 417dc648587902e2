import asyncio
import errno
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import closing

import pytest

from transport.path.accept_loop import AcceptLoop

WITHIN_S = 60.0


class FullAtFirst(socket.socket):
    """A listener of a process that can open nothing the first time that it tries."""

    tries = 0

    def accept(self) -> tuple[socket.socket, object]:
        self.tries += 1
        if self.tries == 1:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return super().accept()


class LeapingLoop(asyncio.SelectorEventLoop):
    """Hours pass in it at a word."""

    skipped_s = 0.0

    def time(self) -> float:
        return super().time() + self.skipped_s


@pytest.fixture
def listener() -> Iterator[FullAtFirst]:
    with FullAtFirst(socket.AF_INET, socket.SOCK_STREAM) as made:
        made.bind(("127.0.0.1", 0))
        made.listen()
        yield made


def test_callers_wait_while_the_process_is_full_and_are_taken_then(
    listener: FullAtFirst, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        taken: asyncio.Queue[tuple[socket.socket, str]] = asyncio.Queue()
        accepting = AcceptLoop(listener, lambda *caller: taken.put_nowait(caller), "a test", pause_s=0.05)
        with closing(accepting), socket.create_connection(listener.getsockname()):
            async with asyncio.timeout(WITHIN_S):
                caller, address = await taken.get()
            with caller:
                assert (address, caller.getblocking()) == ("127.0.0.1", False)

    with caplog.at_level(logging.ERROR):
        asyncio.run(scenario())
    assert listener.tries >= 2
    (said,) = caplog.messages
    assert said.startswith("callers of a test wait for 0.05 s: ")


def test_one_that_is_closed_takes_no_caller_after_a_pause_either(listener: FullAtFirst) -> None:
    async def scenario() -> None:
        taken: list[str] = []
        accepting = AcceptLoop(listener, lambda _, address: taken.append(address), "a test", pause_s=3600.0)
        with socket.create_connection(listener.getsockname()):
            async with asyncio.timeout(WITHIN_S):
                while not listener.tries:  # noqa: ASYNC110 no event tells
                    await asyncio.sleep(0.001)
            accepting.close()
            loop.skipped_s = 7200.0
            for _ in range(10):  # timers that are due have been called, and readers of what is there
                await asyncio.sleep(0)
        assert (taken, listener.tries) == ([], 1)

    loop = LeapingLoop()
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(scenario())
