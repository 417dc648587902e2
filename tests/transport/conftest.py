"""Every test leaves the process as it found it: no thread, no descriptor more than before."""

import os
import threading
import time
from collections.abc import Iterator

import pytest

from tests.transport.helpers import PATIENCE_S


@pytest.fixture(autouse=True)
def nothing_leaks() -> Iterator[None]:
    threads, fds = set(threading.enumerate()), set(os.listdir("/proc/self/fd"))
    yield
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline and (_new_threads(threads) or _new_fds(fds)):
        time.sleep(0.01)
    assert not _new_threads(threads)
    assert not _new_fds(fds)


def _new_threads(before: set[threading.Thread]) -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread not in before]


def _new_fds(before: set[str]) -> list[str]:
    new = []
    for fd in set(os.listdir("/proc/self/fd")) - before:
        try:
            new.append(f"{fd} -> {os.readlink(f'/proc/self/fd/{fd}')}")
        except OSError:
            continue  # it was the listing's own
    return new
