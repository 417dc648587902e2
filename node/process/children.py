"""Child processes, started without fork: they end with their parent, however it went.

A parent that is killed -9 must not leave children behind that hold ports and memory. And a process with threads must not fork:
`preexec_fn`, and uvloop's own way to start processes, do; gRPC's fork handlers then crash some of the children before exec.
Without either, CPython's subprocess uses vfork, and `node.process.launcher` does in the child what is left to do.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final

LAUNCHER: Final = Path(__file__).with_name("launcher.py")
TRACKER: Final = b"multiprocessing.resource_tracker"
ASK_S: Final = 0.1
EXEC_S: Final = 1.0  # a process takes microseconds to become another program, if it gets a processor


def ending_with_us(command: Sequence[str], by: signal.Signals) -> list[str]:
    """`command`, so that it gets `by` when the thread of ours that starts it has ended."""
    return [sys.executable, "-I", "-S", str(LAUNCHER), str(os.getpid()), str(int(by)), *command]


class Child:
    """A child in a session of its own, whose end is awaited on the event loop (Linux 5.3: pidfd)."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        output: IO[Any],
        environment: Mapping[str, str],
        orphaned_by: signal.Signals,
        descriptors: Sequence[int] = (),
    ) -> None:
        """Starts it; it gets `descriptors`, under the same numbers. Raises OSError."""
        self._process = subprocess.Popen(
            ending_with_us(command, orphaned_by),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=dict(environment),
            start_new_session=True,
            pass_fds=descriptors,
        )

    @property
    def pid(self) -> int:
        """Its process id, and its group's."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """None while it runs; minus a signal's number if that ended it."""
        return self._process.poll()

    def terminate(self) -> None:
        """SIGTERM, if it still runs."""
        self._process.terminate()

    def send(self, number: signal.Signals) -> None:
        """A signal, if it still runs."""
        self._process.send_signal(number)

    async def wait(self) -> int:
        """Its returncode, once it has ended."""
        if (status := self._process.poll()) is not None:
            return status
        try:
            pidfd = os.pidfd_open(self.pid)
        except OSError:  # no descriptor is left: it is asked now and then, as nothing else may take it for ended
            while self._process.poll() is None:  # noqa: ASYNC110 nothing tells
                await asyncio.sleep(ASK_S)
            return self._process.wait()
        ended, loop = asyncio.Event(), asyncio.get_running_loop()
        loop.add_reader(pidfd, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(pidfd)
            os.close(pidfd)
        return self._process.wait()


def kill_group(leader: int) -> None:
    """SIGKILL for a child and whatever it started in its session, but for what tidies up after them.

    Python's resource tracker unlinks shared memory and semaphores that the killed ones held, and ends with the last of them;
    killed beside them it would leave those names for ever.
    """
    for folder in members(leader):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(int(folder.name), signal.SIGKILL)


def members(leader: int) -> Iterator[Path]:
    """A child and whatever it started in its session, but for what tidies up after them, as folders of /proc."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and _is_of(folder, leader):
            yield folder


def _is_of(process: Path, leader: int) -> bool:
    try:
        group = os.getpgid(int(process.name))
        return group == leader and TRACKER not in command_of(process)
    except OSError:  # it has ended
        return False


def command_of(process: Path, now: Callable[[], float] = time.monotonic) -> bytes:
    """Its command line. It is empty for an instant while a process becomes another program, and for ever once it has ended
    (proc(5)). Raises OSError if it is gone.
    """
    deadline = now() + EXEC_S
    while not (command := (process / "cmdline").read_bytes()) and now() < deadline:
        if b"\nVmSize:" not in (process / "status").read_bytes():
            break
        time.sleep(0.0005)
    return command
