"""What is left of a vLLM server that is killed with its agent: nothing."""

import os
import select
from pathlib import Path

import pytest

from tests.vllm.cases import LLAMA, build
from tests.vllm.harness import Agent, EngineApart

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900), pytest.mark.dimensions(start="orphans")]

ENDS_S = 120.0


def test_engine_processes_end_when_agent_and_server_are_killed(models: Path, tmp_path: Path) -> None:
    agent = Agent("node", tmp_path, "decode")
    connector = {"agent_socket": str(agent.socket), "http_url": "http://127.0.0.1:1"}
    engine = EngineApart(tmp_path, LLAMA.options(build(LLAMA.arch, models)), connector)
    left: list[int] = []
    try:
        left = [os.pidfd_open(pid) for pid in engine.wait_started()]
        agent.kill()
        engine.kill_server()
        assert len(left) >= 2, "EngineCore and its rank are processes of their own"
        for pidfd in left:
            assert select.select([pidfd], [], [], ENDS_S)[0], (tmp_path / "apart.log").read_text()[-4000:]
    finally:
        engine.kill_server()
        agent.close()
        for pidfd in left:
            os.close(pidfd)
