"""Calls that may hang for ever, such as those that ask a disk or a file server."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")


def in_daemon_thread(name: str, call: Callable[[], T]) -> "asyncio.Future[T]":
    """What `call` returns or raises, on a thread of its own, for which the process does not wait at its end."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()

    def finish(result: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(lambda: None if answer.done() else result())

    def run() -> None:
        try:
            value = call()
        except BaseException as exc:
            error = exc
            finish(lambda: answer.set_exception(error))
        else:
            finish(lambda: answer.set_result(value))

    threading.Thread(target=run, name=name, daemon=True).start()
    return answer
