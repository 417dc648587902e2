"""Where contract tests find an etcd: the double, or a real one in a process of its own."""

import base64
import json
import os
import shutil
import signal
import subprocess
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import pytest

from tests.membership.etcd.double import EtcdDouble
from tests.transport.path.ports import free_port

BINARY = "ETCD_BINARY"
START_S = 60.0
CALL_S = 20.0  # for an answer, on a machine that has other things to do
MOST_PUTS = 128  # etcd's limit of operations in a transaction


def etcd_binary() -> str | None:
    """A real etcd, if there is one."""
    return os.environ.get(BINARY) or shutil.which("etcd")


class Clock:
    """A time that tests move."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class EtcdUnderTest(Protocol):
    """What contract tests do to an etcd."""

    @property
    def endpoint(self) -> str: ...

    def start(self) -> None: ...

    def kill(self) -> None: ...

    def compact(self) -> None: ...

    def put(self, key: str, value: bytes) -> None: ...

    def put_all(self, values: Mapping[str, bytes]) -> None:
        """Faster than one by one."""
        ...

    def delete(self, *keys: str) -> None: ...

    def waited(self, seconds: float) -> None:
        """So much time has passed, for leases."""
        ...

    def close(self) -> None: ...


class DoubledEtcd:
    """The double, by a clock that does not wait."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.double = EtcdDouble(self.clock)
        self.put, self.put_all, self.delete = self.double.put, self.double.put_all, self.double.delete
        self.compact = self.double.compact
        self.start, self.kill, self.close = self.double.start, self.double.stop, self.double.stop

    @property
    def endpoint(self) -> str:
        return self.double.endpoint

    def waited(self, seconds: float) -> None:
        self.clock.now += seconds
        self.double.tick()


class RealEtcd:
    """One member, with its data in a folder; changed by its JSON gateway."""

    def __init__(self, folder: Path, binary: str, arguments: Sequence[str] = (), tls: bool = False) -> None:
        self.port, self._peers, self._inner = (free_port() for _ in range(3))
        self._folder, self._binary, self._arguments = folder, binary, arguments
        self._scheme = "https" if tls else "http"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        return f"{self._scheme}://127.0.0.1:{self.port}"

    @property
    def inner(self) -> str:
        """Where it is asked in clear, and without a user's certificate."""
        return f"http://127.0.0.1:{self._inner}"

    def start(self) -> None:
        peers = f"http://127.0.0.1:{self._peers}"
        urls = f"{self.endpoint},{self.inner}"
        with (self._folder / "etcd.log").open("ab") as log:
            self._process = subprocess.Popen(
                [self._binary, "--name", "a", "--data-dir", str(self._folder / "data"), "--listen-client-urls", urls,
                 "--advertise-client-urls", urls, "--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers,
                 "--initial-cluster", f"a={peers}", *self._arguments],
                stdout=log, stderr=log,
            )  # fmt: skip
        until = time.monotonic() + START_S
        while not self._is_healthy():
            assert time.monotonic() < until, (self._folder / "etcd.log").read_text()[-2000:]
            time.sleep(0.05)

    def kill(self) -> None:
        """As by `kill -9`."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            self._process = None

    close = kill

    def compact(self) -> None:
        revision = self.ask("kv/range", key=_encoded(b"x"))["header"]["revision"]
        self.ask("kv/compaction", revision=revision, physical=True)

    def values(self, prefix: str) -> dict[str, str]:
        """By what follows `prefix` in their keys."""
        end = prefix[:-1] + chr(ord(prefix[-1]) + 1)
        kept = self.ask("kv/range", key=_encoded(prefix.encode()), range_end=_encoded(end.encode())).get("kvs", [])
        return {_decoded(each["key"]).removeprefix(prefix): _decoded(each.get("value", "")) for each in kept}

    def put(self, key: str, value: bytes) -> None:
        self.ask("kv/put", key=_encoded(key.encode()), value=_encoded(value))

    def put_all(self, values: Mapping[str, bytes]) -> None:
        puts = [
            {"request_put": {"key": _encoded(key.encode()), "value": _encoded(value)}} for key, value in values.items()
        ]
        for start in range(0, len(puts), MOST_PUTS):
            self.ask("kv/txn", success=puts[start : start + MOST_PUTS])

    def delete(self, *keys: str) -> None:
        gone = [{"request_delete_range": {"key": _encoded(key.encode())}} for key in keys]
        self.ask("kv/txn", success=gone)

    def waited(self, seconds: float) -> None:
        time.sleep(seconds)

    def ask(self, path: str, **body: Any) -> Any:
        request = urllib.request.Request(f"{self.inner}/v3/{path}", json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=10.0) as answer:
            return json.load(answer)

    def _is_healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.inner}/health", timeout=1.0) as answer:
                return bool(json.load(answer)["health"] == "true")
        except OSError:
            return False


def _encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _decoded(text: str) -> str:
    return base64.b64decode(text).decode()


def needed_binary() -> str:
    """A real etcd; skips the test where it finds no such binary."""
    if (binary := etcd_binary()) is None:
        pytest.skip(f"no etcd: set {BINARY}, or run `make test-etcd`, which fetches one")
    return binary


def until(holds: Callable[[], object], patience_s: float = 20.0) -> None:
    """What another thread or process does."""
    end = time.monotonic() + patience_s
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)
