"""A test leaves the process as it found it: no thread, no descriptor more than before.

Import the fixture into the conftest of a package, and all its tests are watched.
"""

import asyncio
import os
import threading
import time
from collections.abc import Iterator
from typing import Final

import grpc.aio
import pytest
import uvloop

PATIENCE_S: Final = 20.0


@pytest.fixture(scope="session")
def kept_by_libraries() -> None:
    """What asyncio's gRPC and libuv keep for the process, a thread, sockets and a pipe, is there before anybody counts."""

    async def on_a_loop() -> None:
        grpc.aio.init_grpc_aio()

    asyncio.run(on_a_loop())
    uvloop.new_event_loop().close()


@pytest.fixture(autouse=True)
def nothing_leaks(kept_by_libraries: None) -> Iterator[None]:
    threads, fds = set(threading.enumerate()), set(os.listdir("/proc/self/fd"))
    yield
    deadline = time.monotonic() + PATIENCE_S
    while left := _new_threads(threads) + _new_fds(fds):
        if time.monotonic() > deadline:
            pytest.fail(f"left behind: {left}")
        time.sleep(0.01)


def _new_threads(before: set[threading.Thread]) -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread not in before]


def _new_fds(before: set[str]) -> list[str]:
    new = []
    for fd in set(os.listdir("/proc/self/fd")) - before:
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue  # it was the listing's own
        if not target.startswith("anon_inode:[event"):  # gRPC's event engines come and go as they like
            new.append(f"{fd} -> {target}")
    return new
