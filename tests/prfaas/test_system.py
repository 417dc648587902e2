"""What does not come up is said, and nothing of it stays."""

import asyncio
from pathlib import Path

import pytest

from prfaas.errors import StartError
from prfaas.system import RunLock, System
from prfaas.topology import parse_topology


def test_a_node_that_does_not_start_is_named_and_the_others_are_ended(tmp_path: Path) -> None:
    document = {
        "model": {"path": str(tmp_path / "no-model")},
        "gateway": {"port": 0},
        "node": {"engine_max_restarts": 0},
        "clusters": [
            {"name": "w", "kind": "pd", "nodes": [{"node_id": n, "role": "decode"} for n in ("one", "two")]},
        ],
    }
    system = System(parse_topology(document, tmp_path), tmp_path / "run", lambda line: None)

    async def scenario() -> None:
        async with system:
            raise AssertionError("it must not start")

    with pytest.raises(StartError, match=r"(one|two) ended with status 2"):
        asyncio.run(scenario())
    assert all(node.process.returncode is not None for node in system.nodes.values())
    RunLock(tmp_path / "run").close()


def test_a_run_directory_has_one_system(tmp_path: Path) -> None:
    lock = RunLock(tmp_path / "run")
    with pytest.raises(StartError, match="another system runs in"):
        RunLock(tmp_path / "run")
    lock.close()
    RunLock(tmp_path / "run").close()
