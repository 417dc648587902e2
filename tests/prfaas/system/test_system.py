"""What does not come up is said, and nothing of it stays."""

import asyncio
import contextlib
import os
import signal
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from engine.byte_tokenizer import save_byte_tokenizer
from engine.emulated.emulated import emulated_tokens
from prfaas.demo.client import complete
from prfaas.errors import StartError, TopologyError
from prfaas.system.models import ensure_model
from prfaas.system.process import Process
from prfaas.system.system import RunLock, System, require_free_port
from prfaas.system.topology import parse_topology

pytestmark = [pytest.mark.long, pytest.mark.turns]


def test_a_port_is_free_for_a_gateway_where_it_would_listen() -> None:
    """At "::" that is IPv6 alone: another program may have the same port of IPv4."""
    with socket.create_server(("0.0.0.0", 0)) as taken:
        port = taken.getsockname()[1]
        require_free_port("::", port)
        with pytest.raises(TopologyError, match=rf"port = {port}: cannot listen on 127.0.0.1:{port}: Address already"):
            require_free_port("127.0.0.1", port)


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

    with pytest.raises(StartError, match=r"(one|two): .*it must be a model directory"):
        asyncio.run(scenario())
    assert all(node.process.returncode is not None for node in system.nodes.values())
    RunLock(tmp_path / "run").close()


def test_a_node_that_is_started_again_is_told_to_gateways_where_it_was(tmp_path: Path) -> None:
    """A gateway that has ended, too, may be back before it is."""
    document = {
        "model": {"path": str(tmp_path / "no-model")},
        "clusters": [{"name": "w", "kind": "pd", "nodes": [{"node_id": "d0", "role": "decode"}]}],
    }
    topology = parse_topology(document, tmp_path)
    (tmp_path / "run").mkdir()
    system = System(topology, tmp_path / "run", lambda line: None)

    async def scenario() -> None:
        with pytest.raises(StartError):
            await system.start_node(topology.nodes[0])
        system.nodes["d0"].agent_address = "127.0.0.1:7001"  # as if it had come up, and said so
        with pytest.raises(StartError):
            await system.start_node(topology.nodes[0])

    asyncio.run(scenario())
    assert system.nodes["d0"].agent_address == "127.0.0.1:7001"


def test_a_run_directory_has_one_system(tmp_path: Path) -> None:
    lock = RunLock(tmp_path / "run")
    with pytest.raises(StartError, match="another system runs in"):
        RunLock(tmp_path / "run")
    lock.close()
    RunLock(tmp_path / "run").close()


def one_emulated_node(directory: Path) -> dict[str, Any]:
    """Real processes from gateway to engine, and no model: a directory with a tokenizer is all that there is."""
    (directory / "models" / "llama-0").mkdir(parents=True)
    save_byte_tokenizer(directory / "models" / "llama-0", 4096)
    return {
        "model": {"arch": "llama", "name": "tiny"},
        "gateway": {"port": 0},
        "node": {"engine": "emulated", "cache_bytes": 8 << 20},
        "clusters": [{"name": "west", "kind": "pd", "nodes": [{"node_id": "d0", "role": "decode"}]}],
    }


async def killed(process: Callable[[], Process | None]) -> None:
    """Kills a process as soon as there is one."""
    while (found := process()) is None or found.returncode is not None:  # noqa: ASYNC110 it is started by the test
        await asyncio.sleep(0.005)
    await asyncio.sleep(0.2)  # it has begun, and is far from ready
    with contextlib.suppress(ProcessLookupError):
        os.kill(found.pid, signal.SIGKILL)


def test_a_system_whose_processes_are_killed_while_it_starts_comes_up_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    told: list[str] = []
    system = System(parse_topology(one_emulated_node(tmp_path), tmp_path), tmp_path / "run", told.append)

    def listening() -> Process | None:
        return node.process if (node := system.nodes.get("d0")) is not None and node.agent_address else None

    async def scenario() -> None:
        killers = [asyncio.create_task(killed(listening)), asyncio.create_task(killed(lambda: system.gateway))]
        async with system, aiohttp.ClientSession() as session:
            await asyncio.gather(*killers)
            body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0, "ignore_eos": True}
            assert (await complete(session, system.api_url, body, "r")).token_ids == emulated_tokens([5, 6, 7], 4)
            os.kill(system.nodes["d0"].process.pid, signal.SIGKILL)  # without a restart no name is swept
            await system.nodes["d0"].process.wait()

    asyncio.run(scenario())
    assert [line.partition(" did not come up")[0] for line in told if "did not come up" in line] == ["d0", "gateway"]
    assert list((tmp_path / "tmp").glob("*prfaas-*")) == []


def test_nodes_that_the_gateway_does_not_see_yet_are_waited_for_and_answer_with_their_tokens(tmp_path: Path) -> None:
    told: list[str] = []
    prompt = list(range(4, 260))
    topology = parse_topology(one_emulated_node(tmp_path), tmp_path)
    system = System(topology, tmp_path / "run", told.append, tell_s=0.05)

    async def scenario() -> list[list[int]]:
        agent = asyncio.create_task(stopped_until_told())
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
        async with system, aiohttp.ClientSession() as session:
            await agent
            return [(await complete(session, system.api_url, body, name)).token_ids for name in ("first", "again")]

    async def stopped_until_told() -> None:
        """The agent stands still from before the gateway's start until a line says so."""
        while not any(" agent " in line for line in told):  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        pid = system.nodes["d0"].process.pid
        os.kill(pid, signal.SIGSTOP)
        while not any("sees 0 of 1 nodes ready; the others are waited for" in line for line in told):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        os.kill(pid, signal.SIGCONT)

    assert asyncio.run(scenario()) == [emulated_tokens(prompt, 12)] * 2


def test_a_system_that_stands_in_for_a_profile_offloads_long_prompts_and_answers_with_their_tokens(
    tmp_path: Path,
) -> None:
    profile = Path(__file__).parents[3] / "configs" / "profiles" / "internal-1t.json"
    document = {
        "model": {"profile": str(profile), "time_scale": 0.02, "token_scale": 1 / 64, "byte_scale": 0.001},
        "gateway": {"port": 0, "threshold_tokens": 304},
        "node": {"cache_bytes": 16 << 20, "block_size": 16},
        "links": [{"source": "east", "destination": "west", "capacity_gbps": 100}],
        "clusters": [
            {
                "name": "east", "kind": "prfaas", "hardware": "h200x8",
                "nodes": [{"node_id": "p0", "role": "prefill", "transport": "tcp"}],
            },
            {
                "name": "west", "kind": "pd", "hardware": "h20x8",
                "nodes": [{"node_id": "p1", "role": "prefill"}, {"node_id": "d0", "role": "decode"}],
            },
        ],
    }  # fmt: skip
    topology = parse_topology(document, tmp_path)
    ensure_model(topology.model, tmp_path, print)
    system = System(topology, tmp_path / "run", lambda line: None)
    prompts = {"local": [7 + number % 200 for number in range(100)], "remote": [5 + n % 300 for n in range(800)]}

    async def scenario() -> None:
        async with system, aiohttp.ClientSession() as session:
            for route, prompt in prompts.items():
                body = {"model": "internal-1t", "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
                answer = await complete(session, system.api_url, body, f"to-{route}")
                assert answer.route.startswith(route)
                assert answer.token_ids == emulated_tokens(prompt, 8)

    asyncio.run(scenario())
