"""One child process: started, heard on standard output, ended by pid."""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from node.process.children import ending_with_us
from node.process.log_rotation import start_log
from prfaas.errors import StartError, StartKilled, StartRefused
from transport.control.python_command import SAFE_PATH

LOG_TAIL_BYTES = 1500
SIGNALLED = 128  # with the signal's number, the exit status of what a signal ended below another process
FROM_OUTSIDE = {signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP}  # a crash is a signal, too: by itself
LATE_TIMES = 10  # so many times later than it should be, a start is taken to be stuck
KILLED_S = 5.0  # after a kill, we wait this long for the end of its output: others may hold it open
BAD_CONFIG = 2  # the exit status of what nothing but another configuration helps
# gRPC's fork handlers start threads in children that are about to exec, and crash some of them.
ENVIRONMENT = {"GRPC_VERBOSITY": "ERROR", "GRPC_ENABLE_FORK_SUPPORT": "0"}


class Process:
    """A child whose standard output is read line by line and whose standard error goes to a log file."""

    def __init__(self, name: str, arguments: Sequence[str], log_path: Path) -> None:
        self.name = name
        self.log_path = log_path
        self._arguments = [sys.executable, SAFE_PATH, *arguments]
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int:
        """Of the started child."""
        assert self._process is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """None while it runs."""
        return self._process.returncode if self._process else None

    async def start(self) -> None:
        """Starts the child in a session of its own: a Ctrl-C in the terminal reaches it through us, in order."""
        with start_log(self.log_path) as log:
            self._process = await asyncio.create_subprocess_exec(
                *ending_with_us(self._arguments, signal.SIGTERM),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env={**ENVIRONMENT, **os.environ, "PYTHONUNBUFFERED": "1"},
                start_new_session=True,
            )

    async def line(
        self, prefix: str, expected_s: float, report: Callable[[str], None], *, late_times: float = LATE_TIMES
    ) -> dict[str, str]:
        """The first line of output that begins with `prefix`, its `key=value` words as a dict.

        One that is later than `expected_s` is reported and waited for. Raises StartError when the process has ended, or
        takes `late_times` as long.
        """
        telling = asyncio.create_task(self._tell_late(prefix, expected_s, report))
        try:
            return await self._line(prefix, expected_s * late_times)
        finally:
            telling.cancel()

    async def _tell_late(self, prefix: str, expected_s: float, report: Callable[[str], None]) -> None:
        began = time.monotonic()
        while True:
            await asyncio.sleep(expected_s)
            waited_s = time.monotonic() - began
            report(
                f"  {self.name:<10} is late: it has not said {prefix.strip()!r} after {waited_s:.0f} s; it is waited for"
            )

    async def _line(self, prefix: str, timeout_s: float) -> dict[str, str]:
        assert self._process is not None
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(timeout_s):
                while raw := await self._process.stdout.readline():
                    text = raw.decode(errors="replace").strip()
                    if text.startswith(prefix):
                        return dict(word.split("=", 1) for word in text[len(prefix) :].split() if "=" in word)
        except TimeoutError:
            raise StartError(f"{self.name} did not say {prefix!r} within {timeout_s:.0f} s{self._log_tail()}") from None
        status = await self._process.wait()
        if status == BAD_CONFIG:
            raise StartRefused(
                f"{self.name}: {self._refusal() or f'it refuses its configuration; see {self.log_path}'}"
            )
        kind = StartKilled if is_from_outside(status) else StartError
        raise kind(f"{self.name} ended with status {status} before it said {prefix!r}{self._log_tail()}")

    async def wait(self) -> int:
        """Its exit status, once it has ended."""
        assert self._process is not None
        return await self._process.wait()

    def _refusal(self) -> str:
        """What it said of itself, or else last: a process that refuses to start ends with the reason."""
        text = self.log_path.read_text(errors="replace") if self.log_path.exists() else ""
        lines = [line for line in text.splitlines() if line.strip()]
        own = f"node {self.name}: "
        said = [line.removeprefix(own) for line in lines if line.startswith(own)] or lines
        return said[-1] if said else ""

    def _log_tail(self) -> str:
        tail = self.log_path.read_text(errors="replace")[-LOG_TAIL_BYTES:] if self.log_path.exists() else ""
        return f"; end of {self.log_path}:\n{tail}" if tail else ""

    def tell_to_end(self) -> None:
        """SIGTERM, should it run."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()

    async def stop(self, timeout_s: float, killed_s: float = KILLED_S) -> int | None:
        """SIGTERM; after `timeout_s` SIGKILL, and up to `killed_s` more. Returns the exit status."""
        process = self._process
        if process is None:
            return None
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            async with asyncio.timeout(timeout_s):
                await _drained(process)
        except TimeoutError:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError, TimeoutError):
                    process.kill()
                    async with asyncio.timeout(killed_s):
                        await _drained(process)
        return process.returncode


def is_from_outside(status: int) -> bool:
    """Whether a process of this exit status was ended by a signal from outside, and not by itself or a crash."""
    return (-status if status < 0 else status - SIGNALLED) in FROM_OUTSIDE


async def _drained(process: asyncio.subprocess.Process) -> None:
    # An unread pipe would block the child's last words and, with them, its end.
    if process.stdout is not None:
        await process.stdout.read()
    await process.wait()
