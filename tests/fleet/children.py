"""Processes of a fleet, from their start to their end; what they print goes to a file each."""

import asyncio
import contextlib
import os
import re
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

START_S: Final = 180.0
END_S: Final = 60.0


class Child:
    """A `python -m` process, and what it has said."""

    def __init__(self, running: asyncio.subprocess.Process, log: Path) -> None:
        self._running = running
        self._lines: list[str] = []
        self._has_said = asyncio.Condition()
        self._reader = asyncio.create_task(self._read(log))

    @classmethod
    async def start(cls, command: tuple[str, ...], log: Path, environment: Mapping[str, str]) -> "Child":
        running = await asyncio.create_subprocess_exec(
            sys.executable, "-m", *command, stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, env={**os.environ, **environment},
        )  # fmt: skip
        return cls(running, log)

    @property
    def pid(self) -> int:
        return self._running.pid

    @property
    def is_over(self) -> bool:
        return self._running.returncode is not None

    async def said(self, pattern: str) -> str:
        """The first group of the first of its lines that has it. Raises RuntimeError if it ends without."""

        def found() -> str | None:
            return next((match[1] for line in self._lines if (match := re.search(pattern, line))), None)

        async with asyncio.timeout(START_S), self._has_said:
            await self._has_said.wait_for(lambda: found() is not None or self._reader.done() or self._is_read)
        if (text := found()) is None:
            raise RuntimeError(f"process {self.pid} ended without {pattern!r}: {self._lines[-3:]}")
        return text

    def send(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    async def end(self, number: signal.Signals = signal.SIGTERM) -> str:
        """Why it did not end as it should; empty if it did."""
        self.send(number)
        try:
            async with asyncio.timeout(END_S):
                await self._running.wait()
        except TimeoutError:
            self._running.kill()
            await self._running.wait()
            return f"process {self.pid} did not end within {END_S:.0f} s"
        finally:
            await self._reader
        if number is signal.SIGTERM and self._running.returncode != 0:
            return f"process {self.pid} ended with {self._running.returncode}: {self._lines[-3:]}"
        return ""

    _is_read = False

    async def _read(self, log: Path) -> None:
        assert self._running.stdout is not None
        with log.open("a") as file:
            while line := (await self._running.stdout.readline()).decode(errors="replace"):
                file.write(line)
                file.flush()
                self._lines = [*self._lines[-200:], line.rstrip()]
                async with self._has_said:
                    self._has_said.notify_all()
        self._is_read = True
        async with self._has_said:
            self._has_said.notify_all()


def marked(marker: str) -> dict[int, str]:
    """Living processes with this text in their environment, and what they run."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            if marker.encode() in (entry / "environ").read_bytes() and _lives(entry):
                found[int(entry.name)] = (entry / "cmdline").read_bytes().decode().replace("\0", " ")[:120]
    return found


def children_of(pid: int) -> list[int]:
    """Those that it has started itself."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            if int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(entry.name))
    return found


def descriptors(pid: int) -> int:
    """How many a process has open; 0 for one that has ended."""
    with contextlib.suppress(OSError):
        return len(os.listdir(f"/proc/{pid}/fd"))
    return 0


def _lives(entry: Path) -> bool:
    return (entry / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
