"""A system of real SGLang servers on a CPU behind our gateway, and one server alone to compare with."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import requests

from node.engine.shm_cleanup import remove, shared_by
from node.process.children import kill_group

CPU = Path(__file__).parent / "cpu"  # stands in for kernels that SGLang wants on a CPU
PAGE, CHUNK, CONTEXT = 16, 128, 2048
THRESHOLD = 300
FLAGS = (
    "--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--grammar-backend", "none",
    "--dtype", "float32", "--max-total-tokens", "16384", "--max-running-requests", "8", "--mem-fraction-static", "0.05",
    "--disable-cuda-graph", "--disable-overlap-schedule", "--sleep-on-idle",
    "--disaggregation-decode-retraction-backup", "cpu_tensor",
)  # fmt: skip
START_S = 300.0
ANSWER_S = 60.0


@contextlib.contextmanager
def kernels_stood_in() -> Iterator[None]:
    """Whatever is started meanwhile can import SGLang."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(CPU), *([before] if before else [])])
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def document(model: Path, **nodes: dict[str, Any]) -> dict[str, Any]:
    """One PrfaaS node, one PD prefill node, one decode node; `nodes` has more of each by its name."""
    return {
        "model": {"path": str(model), "name": "tiny"},
        "gateway": {"port": 0, "threshold_tokens": THRESHOLD, "routing": {"prefill_tokens_per_s": 1000.0}},
        "node": {
            "engine": "sglang",
            "engine_args": list(FLAGS),
            "chunk_tokens": CHUNK,
            "block_size": PAGE,
            "max_model_len": CONTEXT,
            "cache_bytes": 64 << 20,
            "lease_s": 60.0,
        },
        "clusters": [
            {
                "name": "east",
                "kind": "prfaas",
                "nodes": [{"node_id": "far", "role": "prefill", "transport": "tcp", **nodes.get("far", {})}],
            },
            {
                "name": "west",
                "kind": "pd",
                "nodes": [
                    {"node_id": "near", "role": "prefill", **nodes.get("near", {})},
                    {"node_id": "decode0", "role": "decode", **nodes.get("decode0", {})},
                ],
            },
        ],
    }


class Alone:
    """One SGLang server that prefills and decodes."""

    def __init__(self, model: Path, folder: Path, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.log = folder / "alone.log"
        command = [
            sys.executable,
            "-m",
            "sglang.launch_server",
            "--model-path",
            str(model),
            "--served-model-name",
            "tiny",
        ]
        command += ["--port", str(port), "--page-size", str(PAGE), "--context-length", str(CONTEXT)]
        command += ["--chunked-prefill-size", str(CHUNK), *FLAGS]
        with kernels_stood_in(), self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command, env=os.environ | {"HF_HUB_OFFLINE": "1"}, stdout=log, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip

    def wait(self) -> None:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and self.process.poll() is None:
            with contextlib.suppress(requests.RequestException):
                if requests.get(f"{self.url}/health", timeout=ANSWER_S).ok:
                    return
            time.sleep(0.5)
        raise AssertionError(f"{self.url} does not serve:\n{self.log.read_text()[-4000:]}")

    def close(self) -> None:
        leavings = shared_by(self.process.pid)
        kill_group(self.process.pid)
        self.process.wait(ANSWER_S)
        remove(leavings)
