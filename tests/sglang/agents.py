"""Agents that SGLang's classes are tested over."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc

from transport.control.proto import node_pb2_grpc as rpc

ANSWER_S = 60.0


class Agent:
    """An agent in a process of its own, and what a gateway would say to it."""

    def __init__(self, name: str, folder: Path, role: str = "decode") -> None:
        self.socket = folder / f"{name}.sock"
        settings = {
            "node_id": name, "cluster": "c", "cluster_kind": "pd", "role": role, "model": "m", "socket": str(self.socket),
            "run_dir": str(folder / name), "cache_bytes": 4 << 20,
        }  # fmt: skip
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.vllm.agent_process", json.dumps(settings)], stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.control: str = json.loads(self.process.stdout.readline())["control"]
        self.channel = grpc.insecure_channel(self.control)
        self.stub: Any = rpc.NodeAgentStub(self.channel)  # type: ignore[no-untyped-call]

    def close(self) -> None:
        self.channel.close()
        self.process.terminate()
        self.process.wait(ANSWER_S)
        assert self.process.stdout is not None
        self.process.stdout.close()

    def kill(self) -> None:
        """As if it had crashed."""
        self.process.kill()
        self.process.wait(ANSWER_S)
