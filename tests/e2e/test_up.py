"""`prfaas up` as a process: what is killed comes back by itself, and its terminal may go."""

import contextlib
import http.client
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import tomllib
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from tests.e2e import tls
from tests.transport.path.ports import free_port

pytestmark = pytest.mark.e2e

TOPOLOGY = """
[model]
arch = "llama"
name = "tiny"
[gateway]
port = {port}
[node]
engine = "emulated"
engine_args = ["--decode-step-s", "0.02"]
cache_bytes = 8388608
[[clusters]]
name = "west"
kind = "pd"
nodes = [{{ node_id = "d0", role = "decode" }}]
"""


@pytest.fixture(autouse=True)
def _nothing_is_left() -> None:
    """In place of the package's: here no other system runs."""


class Up:
    """A running `prfaas up`, and what it says."""

    def __init__(self, process: subprocess.Popen[str], address: str, certificates: Path | None) -> None:
        self.process = process
        self.url = f"{'http' if certificates is None else 'https'}://{address}"
        self._certificates = certificates
        self._trust = None if certificates is None else tls.identity(certificates).client_context()
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)

    def wait_for(self, text: str) -> str:
        """The first line that has `text` in it."""
        while text not in (line := self._lines.get(timeout=100.0)):
            pass
        return line

    def child(self, module: str) -> int:
        """The pid of a child that runs a module."""
        pid = self.process.pid
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            if f"-m\0{module}\0" in Path(f"/proc/{child}/cmdline").read_text():
                return int(child)
        raise AssertionError(f"no child runs {module}")

    def children(self) -> list[int]:
        """The pids of all."""
        pid = self.process.pid
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def until_gone(self, pids: list[int]) -> None:
        """Waits until no process has one of these any more."""
        deadline = time.monotonic() + 100.0
        while left := [pid for pid in pids if Path(f"/proc/{pid}").exists()]:
            assert time.monotonic() < deadline, left
            time.sleep(0.01)

    def streaming(self, max_tokens: int) -> http.client.HTTPResponse:
        """A long answer that has begun."""
        said = {"model": "tiny", "prompt": "hello", "stream": True, "ignore_eos": True, "max_tokens": max_tokens}
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(f"{self.url}/v1/completions", json.dumps(said).encode(), headers)
        answer: http.client.HTTPResponse = urllib.request.urlopen(request, timeout=60.0, context=self._trust)
        return answer

    def ask(self) -> int:
        """The completion tokens of a request."""
        body = json.dumps({"model": "tiny", "prompt": "hello", "max_tokens": 4, "ignore_eos": True}).encode()
        request = urllib.request.Request(f"{self.url}/v1/completions", body, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=60.0, context=self._trust) as answer:
            usage: dict[str, Any] = json.load(answer)["usage"]
        return int(usage["completion_tokens"])

    def in_clear(self) -> list[str]:
        """What speaks so where nothing should, one line each."""
        return [] if self._certificates is None else tls.faults(self.process.pid, self._certificates)

    def until_answered(self) -> int:
        """The same, as soon as the gateway sees the node again."""
        deadline = threading.Event()
        timer = threading.Timer(60.0, deadline.set)
        timer.start()
        try:
            while not deadline.is_set():
                with contextlib.suppress(OSError):
                    return self.ask()
        finally:
            timer.cancel()
        return self.ask()


def write_topology(path: Path, text: str) -> Path | None:
    """With mutual TLS if the environment wants it: where the certificates are; None without."""
    document = tomllib.loads(text)
    certificates = tls.folder_for(document, path.parent)
    path.write_text(text if certificates is None else tomli_w.dumps(tls.secured(document, certificates)))
    return certificates


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Up]:
    port = free_port()
    path = tmp_path / "topology.toml"
    certificates = write_topology(path, TOPOLOGY.format(port=port))
    command = [sys.executable, "-m", "prfaas", "up", "-c", str(path), "--state-dir", str(tmp_path / "state")]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, start_new_session=True, preexec_fn=_hear_a_hang_up
    ) as process:
        running = Up(process, f"127.0.0.1:{port}", certificates)
        try:
            yield running
        finally:
            if process.poll() is None:
                process.terminate()


def _hear_a_hang_up() -> None:
    """Tests that run under nohup ignore the signal, and children inherit that."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def test_what_is_killed_comes_back_by_itself(up: Up) -> None:
    up.wait_for("Ctrl-C ends it")
    assert up.ask() == 4
    os.kill(up.child("pd_cluster"), signal.SIGKILL)
    up.wait_for("d0 ended with status -9: it is started again in 0.5 s")
    up.wait_for("d0 is back")
    assert up.until_answered() == 4
    os.kill(up.child("gateway"), signal.SIGKILL)
    up.wait_for("gateway is back")
    assert up.until_answered() == 4
    assert up.in_clear() == []
    children = up.children()
    with up.streaming(max_tokens=30_000) as stream:  # for ten minutes
        assert stream.readline().startswith(b"data: ")
        up.process.send_signal(signal.SIGHUP)
        up.wait_for("stopping: running streams finish first")
        assert stream.readline() == b"\n"
        assert stream.readline().startswith(b"data: ")
        up.process.send_signal(signal.SIGINT)  # the second signal ends streams, too
        assert up.process.wait(100.0) == 0
        with contextlib.suppress(OSError, http.client.HTTPException):
            assert b"data: [DONE]" not in stream.read()
    up.until_gone(children)


@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="this machine has no IPv6")
def test_a_system_on_ipv6_answers(tmp_path: Path) -> None:
    port, path = free_port(), tmp_path / "topology.toml"
    text = TOPOLOGY.format(port=port).replace("[gateway]\n", '[gateway]\nhost = "::1"\nthreshold_tokens = 1000\n')
    text = text.replace("[node]\n", '[node]\nhost = "::1"\n')
    text = text.replace("nodes = [{", 'nodes = [{ node_id = "p0", role = "prefill" }, {')
    certificates = write_topology(path, text)
    command = [sys.executable, "-m", "prfaas", "up", "-c", str(path), "--state-dir", str(tmp_path / "state")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        running = Up(process, f"[::1]:{port}", certificates)
        try:
            running.wait_for("Ctrl-C ends it")
            assert running.until_answered() == 4
            assert running.in_clear() == []
        finally:
            process.terminate()
        assert process.wait(60) == 0
