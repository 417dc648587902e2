"""How a command hears signals: before it has an event loop, and in it."""

import asyncio
import contextlib
import signal
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """What runs inside, without an event loop, ends at a signal as at Ctrl-C: by KeyboardInterrupt, which lets it clean up."""
    is_ended = False

    def end(*_: object) -> None:
        nonlocal is_ended
        is_ended = True
        raise KeyboardInterrupt

    heard = [number for number in ENDING if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, end) for number in heard}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if is_ended:  # where Python ignores exceptions, as in finalisers, it ignored this one
        raise KeyboardInterrupt


def run_until_done(main: Coroutine[Any, Any, bool], on_signal: Callable[[], None] = lambda: None) -> int:
    """Runs a command's coroutine; signals cancel it, so that everything it started is ended in order.

    SIGHUP does, too: a terminal that closes sends it, and there is no file of a running system to read again. (Of a node
    there is, see `node.main`.) Who starts us with nohup wants none of it.
    """

    async def until_signalled() -> int:
        task = asyncio.ensure_future(main)

        def stop() -> None:
            on_signal()
            task.cancel()

        for number in ENDING:
            if signal.getsignal(number) is not signal.SIG_IGN:
                asyncio.get_running_loop().add_signal_handler(number, stop)
        await asyncio.wait([task])
        if task.cancelled():
            return EXIT_INTERRUPTED
        return 0 if task.result() else EXIT_FAILED

    return asyncio.run(until_signalled())
