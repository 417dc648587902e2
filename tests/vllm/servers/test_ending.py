"""Ctrl-C at a `prfaas up` of two vLLM servers: what streams goes on to its end, then all of it is gone within seconds."""

import http.client
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from tests.leaks import nothing_is_left_behind
from tests.vllm.cases import build
from tests.vllm.servers.test_serving import ARCH

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900), pytest.mark.dimensions(start="ending")]

ENDS_S = (
    5.0  # where nothing else wants the processors; they are what ending takes, so a load of twice as many doubles it
)
# Where a shell has put us in its background, children are born deaf to Ctrl-C.
MAIN = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from prfaas.cli import main
sys.exit(main())
"""


class Up:
    """A running `prfaas up`."""

    def __init__(self, folder: Path, model: Path) -> None:
        (folder / "topology.toml").write_text(tomli_w.dumps(document(model)))
        arguments = ["up", "-c", str(folder / "topology.toml"), "--port", "0", "--state-dir", str(folder)]
        self.process = subprocess.Popen(
            [sys.executable, "-c", MAIN, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def wait_ready(self) -> None:
        assert self.process.stdout is not None
        said: list[str] = []
        for line in self.process.stdout:
            said.append(line)
            if line.startswith("API "):
                self.url = line.split()[1]
            if line.startswith("Ctrl-C ends it"):
                return
        raise AssertionError(f"it did not start:\n{''.join(said)}")

    def stream(self, max_tokens: int) -> http.client.HTTPResponse:
        """An answer that has begun."""
        body = {"model": "tiny", "prompt": "x" * 700, "stream": True, "ignore_eos": True, "max_tokens": max_tokens}
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(f"{self.url}/completions", json.dumps(body).encode(), headers)
        answer: http.client.HTTPResponse = urllib.request.urlopen(request, timeout=120.0)
        return answer

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
        self.process.communicate(timeout=120.0)


def document(model: Path) -> dict[str, Any]:
    return {
        "model": {"path": str(model), "name": "tiny"},
        "gateway": {"threshold_tokens": 300},
        "node": {
            "engine": "vllm",
            "engine_args": ["--dtype", "float32", "--num-gpu-blocks-override", "512"],
            "chunk_tokens": 256,
            "max_model_len": 4096,
            "cache_bytes": 64 << 20,
        },
        "clusters": [
            {"name": "east", "kind": "prfaas", "nodes": [{"node_id": "far", "role": "prefill", "transport": "tcp"}]},
            {"name": "west", "kind": "pd", "nodes": [{"node_id": "decode0", "role": "decode"}]},
        ],
    }


@pytest.fixture
def up(models: Path, tmp_path: Path) -> Iterator[Up]:
    with nothing_is_left_behind():
        started = Up(tmp_path, build(ARCH, models))
        try:
            started.wait_ready()
            yield started
        finally:
            started.close()


def assert_ends_soon(up: Up) -> None:
    began, crowd = time.monotonic(), max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
    assert up.process.wait(120.0) == 0
    taken = time.monotonic() - began
    print(f"gone after {taken:.2f} s, with {crowd:.1f} times as much to do as there are processors")
    assert taken < ENDS_S * crowd


def test_an_idle_system_is_gone_soon(up: Up) -> None:
    with up.stream(4) as answer:
        assert answer.read().endswith(b"data: [DONE]\n\n")
    up.process.send_signal(signal.SIGINT)
    assert_ends_soon(up)


def test_a_stream_goes_on_to_its_end_before(up: Up) -> None:
    with up.stream(400) as answer:
        first = answer.readline()
        up.process.send_signal(signal.SIGINT)
        said = [first, *answer]
    assert said[-2:] == [b"data: [DONE]\n", b"\n"]
    events = [json.loads(line[6:]) for line in said if line.startswith(b"data: {")]
    assert events[-1]["choices"][0]["finish_reason"] == "length"
    assert_ends_soon(up)
