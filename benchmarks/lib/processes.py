"""Benchmark ends as child processes that are asked in JSON lines."""

import json
import signal
import subprocess
import sys
from typing import Any

from benchmarks.lib import peers


class GreetingChild:
    """A child process; `greeting` is what it says first."""

    def __init__(self, argv: list[str], env: dict[str, str] | None = None, *, quiet: bool = False) -> None:
        stderr = subprocess.DEVNULL if quiet else None
        self._process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True, bufsize=1, env=env
        )
        self.greeting = self._answer()

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, **request: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def pause(self) -> None:
        """Engines whose threads spin while idle would otherwise be measured together with everybody else's run."""
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        self.resume()
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=15)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        while line := self._process.stdout.readline():
            if line.startswith("{"):
                answer: dict[str, Any] = json.loads(line)
                return answer
        raise RuntimeError(f"{self._process.args} ended")


def our_argv(role: str, *args: str) -> list[str]:
    return [sys.executable, "-m", "benchmarks.transport.ends", role, *args]


def peer_argv(peer: str, role: str, *args: str) -> list[str]:
    return [str(peers.PYTHON), "-m", "benchmarks.transport.peer_ends", peer, role, *args]
