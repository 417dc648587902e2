"""An emulated wide-area link between two network namespaces of this machine; nothing leaves it.

    with Wan(rate_mbit=500, rtt_ms=40, loss=0.0001) as wan:
        wan.run("a", [...]); wan.run("b", [...]); wan.set_rate(100); wan.stats()

Needs root, gcc, the `ip` and `chrt` tools and /dev/net/tun. It does not need netem, which many kernels lack.
"""

import json
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ADDRESSES = {"a": "10.88.0.1", "b": "10.88.0.2"}
SOURCE = Path(__file__).with_name("wanem.c")
IP_HEADERS = 52  # IPv4 and TCP with timestamps


def why_not() -> str | None:
    """The missing requirement of this machine; None when the emulator can run."""
    if os.geteuid() != 0:
        return "needs root, to make network namespaces"
    missing = [tool for tool in ("gcc", "ip", "chrt") if shutil.which(tool) is None]
    if missing:
        return f"needs {', '.join(missing)}"
    return None if Path("/dev/net/tun").exists() else "needs /dev/net/tun"


@dataclass
class Wan:
    """Both directions alike. `queue_bytes`: the tail-drop queue before the bottleneck, by default one rate × RTT."""

    rate_mbit: float = 500.0
    rtt_ms: float = 40.0
    loss: float = 0.0
    queue_bytes: int | None = None
    mtu: int = 1500
    seed: int = 1

    def __post_init__(self) -> None:
        self._prefix = f"pfw{os.getpid()}"
        self._dir = ""
        self._process: subprocess.Popen[str] | None = None

    @property
    def payload_bytes_per_s(self) -> float:
        """The most that TCP can carry: the rate without IP and TCP headers."""
        return self.rate_mbit * 1e6 / 8 * (self.mtu - IP_HEADERS) / self.mtu

    def __enter__(self) -> "Wan":
        if (reason := why_not()) is not None:
            raise RuntimeError(f"no emulated link here: {reason}")
        self._dir = tempfile.mkdtemp(prefix="wanem-")
        try:
            self._up()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        if self._process is not None:
            self._process.communicate(timeout=10)
        for side in "ab":
            subprocess.run(["ip", "netns", "del", self._prefix + side], capture_output=True, check=False)
        shutil.rmtree(self._dir, ignore_errors=True)

    def _up(self) -> None:
        program = str(Path(self._dir) / "wanem")
        subprocess.run(["gcc", "-O2", "-Wall", "-o", program, str(SOURCE)], check=True)
        queue = self.queue_bytes or max(64 << 10, int(self.rate_mbit * 1e6 / 8 * self.rtt_ms / 1e3))
        for side in "ab":
            _ip("netns", "add", self._prefix + side)
            _ip("-n", self._prefix + side, "link", "set", "lo", "up")
        numbers = [self.rate_mbit, self.rtt_ms / 2, self.loss, queue, self.mtu, self.seed]
        # A late emulator is a jittery link.
        command = [*_on_time(2), program, self._prefix + "a", self._prefix + "b", *map(str, numbers)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        if self._line() != "ready":
            raise RuntimeError("the emulator did not start")
        for side, address in ADDRESSES.items():
            _ip("-n", self._prefix + side, "addr", "add", f"{address}/24", "dev", "wan0")
            _ip("-n", self._prefix + side, "link", "set", "wan0", "mtu", str(self.mtu), "txqueuelen", "5000", "up")

    def command(self, side: str, argv: list[str]) -> list[str]:
        """`argv`, to be run at one end of the link; before other work of this machine, but after the emulator."""
        return ["ip", "netns", "exec", self._prefix + side, *_on_time(1), *argv]

    def set_rate(self, rate_mbit: float) -> None:
        self.rate_mbit = rate_mbit
        self._ask(f"rate {rate_mbit}")

    def stats(self) -> dict[str, Any]:
        """Packets, bytes, random losses, queue drops and longest queue since the last call, by direction."""
        answer: dict[str, Any] = json.loads(self._ask("stats"))
        return answer

    def _ask(self, line: str) -> str:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return self._line()

    def _line(self) -> str:
        assert self._process is not None
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


def _on_time(priority: int) -> list[str]:
    """Runs what follows before all ordinary work of this machine, and before lower priorities."""
    return ["chrt", "--rr", str(priority)]


def _ip(*args: str) -> None:
    subprocess.run(["ip", *args], check=True)
