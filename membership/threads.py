"""Calls that may block, such as those that ask a file server: each in a thread of its own."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")


def in_thread(call: Callable[[], T], name: str) -> "asyncio.Future[T]":
    """What `call` returns or raises. The thread is a daemon: a file server that never answers must not keep the process."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()

    def tell(returned: T | None, raised: Exception | None) -> None:
        if answer.done():
            return
        if raised is not None:
            answer.set_exception(raised)
        else:
            answer.set_result(returned)  # type: ignore[arg-type]

    def run() -> None:
        returned, raised = None, None
        try:
            returned = call()
        except Exception as error:
            raised = error
        with suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(tell, returned, raised)

    threading.Thread(target=run, name=name, daemon=True).start()
    return answer
