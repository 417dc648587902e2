"""A test leaves the process as it found it: no thread, no descriptor more than before. A suite leaves the machine so.

Import the fixture into the conftest of a package, and all its tests are watched.
"""

import asyncio
import contextlib
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import grpc.aio
import pytest
import uvloop

from node.process.owned_names import sweep_directories, sweep_files

PATIENCE_S: Final = 20.0
LOOK_S: Final = 5.0
SHARED_MEMORY: Final = Path("/dev/shm")  # of arenas and of ranks; named semaphores, too


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


@contextlib.contextmanager
def nothing_is_left_behind(patience_s: float = PATIENCE_S, look_s: float = LOOK_S) -> Iterator[set[str]]:
    """Fails if something that is started inside leaves files behind: names in /dev/shm, sockets, a node's directories.

    What is started has a directory for temporary files of its own (TMPDIR), by which it is known. Yielded are its names in
    /dev/shm, which grow: none of them may stay without an owner.
    """
    usual = os.environ.get("TMPDIR")
    with tempfile.TemporaryDirectory(prefix="t-") as place:  # a path of a socket has 107 bytes at most
        os.environ["TMPDIR"] = place
        with _names_of(place, look_s) as names:
            try:
                yield names
            finally:
                os.environ.pop("TMPDIR") if usual is None else os.environ.update(TMPDIR=usual)
        # What a node that was killed leaves is for the next one to take away, which none may have come to do.
        sweep_directories(Path(place))
        sweep_files(SHARED_MEMORY)
        deadline = time.monotonic() + patience_s
        while left := [*sorted(names & abandoned()), *_sockets_and_nodes(Path(place))]:
            if time.monotonic() > deadline:
                pytest.fail(f"left behind: {left}")
            time.sleep(0.1)


@contextlib.contextmanager
def _names_of(place: str, look_s: float) -> Iterator[set[str]]:
    """Names in /dev/shm that processes with this TMPDIR have had, as far as looks now and then tell. Others may run beside."""
    names, ended = set[str](), threading.Event()

    def look() -> None:
        while not ended.wait(look_s):
            names.update(_in_use(f"TMPDIR={place}".encode()))

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield names
    finally:
        names.update(_in_use(f"TMPDIR={place}".encode()))
        ended.set()
        thread.join()


def abandoned() -> set[str]:
    """Names in /dev/shm that no process has open or mapped: no owner is left to remove them."""
    return {entry.name for entry in SHARED_MEMORY.iterdir()} - _in_use(b"")


def _in_use(variable: bytes) -> set[str]:
    """Names in /dev/shm that processes with this in their environment have open or mapped."""
    names, beginning = set[str](), f"{SHARED_MEMORY}/"
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            if variable and variable not in (process / "environ").read_bytes().split(b"\0"):
                continue
            paths = [line.split(maxsplit=5)[-1] for line in (process / "maps").read_text().splitlines()]
            paths += [os.readlink(fd) for fd in (process / "fd").iterdir()]
            names.update(path.removeprefix(beginning) for path in paths if path.startswith(beginning))
    return names


def _sockets_and_nodes(place: Path) -> list[str]:
    """Caches of libraries may stay."""
    return [str(path) for path in place.rglob("*") if path.is_socket() or path.name.startswith(("prfaas-", ".prfaas-"))]
