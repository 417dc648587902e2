"""A node whose engine never comes, comes with a complaint, or goes: what its agent makes of that."""

import asyncio
import os
import re
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import grpc
import msgspec
import pytest

from engine.emulated.emulated import emulated_layout
from node import agent
from node.config import NodeConfig
from node.engine.liveness import Vigil
from node.errors import EngineFailure, NoArenaMemory
from tests.node.running import BLOCK, RunningNode, alone, config, refused, running_node, until
from transport.control import messages as m
from transport.control.proto import node_pb2 as pb

pytestmark = pytest.mark.turns

LAYOUT = emulated_layout("kimi_linear", BLOCK).to_json()
HELLO = m.Hello(engine_pid=1, model_id="m", layout_json=LAYOUT, max_model_len=1, http_url="")


def test_an_engine_that_keeps_dying_is_given_up(tmp_path: Path) -> None:
    async def scenario() -> None:
        options = {"engine_args": ("--no-such-option",), "engine_max_restarts": 1}
        async with running_node(config(tmp_path, **options), wait=False) as node:
            assert (await node.describe()).state == pb.NODE_STATE_STARTING
            assert await refused(node.stub.Load(pb.LoadRequest())) == (grpc.StatusCode.UNAVAILABLE, "starting")
            with pytest.raises(EngineFailure, match="died too often"):
                await node.agent.wait_ready(60.0)
            assert (await node.describe()).state == pb.NODE_STATE_ENGINE_DOWN
            assert node.agent.supervisor.restarts == 1

    alone(scenario())


def test_an_arena_that_does_not_fit_is_named_as_the_reason(tmp_path: Path) -> None:
    async def scenario() -> None:
        with pytest.raises(NoArenaMemory, match=f"cache_bytes = {1 << 45}.*bytes free"):
            async with running_node(config(tmp_path, cache_bytes=1 << 45), wait=False):
                pass

    alone(scenario())


def mute_node(settings: NodeConfig) -> AbstractAsyncContextManager[RunningNode]:
    """A node whose engine's process says nothing: tests speak in its stead."""
    return running_node(settings, wait=False, engine_command=lambda *_: ["sleep", "60"])


def test_an_engine_that_never_says_hello_is_killed_and_started_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with mute_node(config(tmp_path, engine_start_timeout_s=0.1)) as node:
            with pytest.raises(EngineFailure, match=r"it was not ready within 0.01 s \(engine_start_timeout_s\)"):
                await node.agent.wait_ready(0.01)
            first = asyncio.create_task(_pid_other_than(node, None))
            silent = await first
            assert await _pid_other_than(node, silent) != silent
            with pytest.raises(ProcessLookupError):
                os.kill(silent, 0)
        assert re.search(r"no Hello for [\d.]+s \(engine_start_timeout_s\)", caplog.text)

    alone(scenario())


def test_a_server_that_never_answers_is_killed_and_started_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM's connector says Hello long before its server listens, if it ever does."""
    hello = m.encode(msgspec.structs.replace(HELLO, http_url="http://127.0.0.1:1"))

    async def scenario() -> None:
        settings = config(tmp_path, engine="vllm", engine_start_timeout_s=0.5)
        async with mute_node(settings) as node:
            _, connector = await asyncio.open_unix_connection(node.agent.socket.path)
            connector.write(hello)

            async def was_restarted() -> bool:
                return "no answer over HTTP" in caplog.text and node.agent.supervisor.restarts > 0

            await until(was_restarted)
            connector.close()

    alone(scenario())


def test_an_engine_is_watched_once_whatever_becomes_of_a_look_at_its_adapters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, watched = [], []

    async def serves(url: str) -> None:
        """At once."""

    async def follow_adapters(url: str, tell: Callable[[tuple[str, ...]], None]) -> None:
        asked.append(url)
        if len(asked) == 1:
            raise ZeroDivisionError("of a look")
        tell(("terse",))
        await asyncio.Event().wait()

    async def watch(self: Vigil, url: str, leader: object) -> None:
        watched.append(url)
        await asyncio.Event().wait()

    monkeypatch.setattr(agent, "serves", serves)
    monkeypatch.setattr(agent, "follow_adapters", follow_adapters)
    monkeypatch.setattr(Vigil, "watch", watch)

    async def scenario() -> None:
        async with mute_node(config(tmp_path, engine="vllm")) as node:
            _, connector = await asyncio.open_unix_connection(node.agent.socket.path)
            connector.write(m.encode(HELLO))

            async def is_told() -> bool:
                return list((await node.describe()).adapters) == ["terse"]

            await until(is_told)
            connector.close()

    alone(scenario())
    assert (len(asked), len(watched)) == (2, 1)


def test_what_an_engine_warns_of_is_in_the_nodes_own_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with mute_node(config(tmp_path)) as node:
            _, engine = await asyncio.open_unix_connection(node.agent.socket.path)
            engine.write(m.encode(msgspec.structs.replace(HELLO, notice="vLLM 9 is not tested")))

            async def is_said() -> bool:
                return "vLLM 9 is not tested" in caplog.text

            await until(is_said)
            engine.close()

    alone(scenario())


async def _pid_other_than(node: RunningNode, pid: int | None) -> int:
    async with asyncio.timeout(30.0):
        while (found := node.agent.supervisor.pid) in (None, pid):  # noqa: ASYNC110 another process
            await asyncio.sleep(0.01)
    assert found is not None
    return found
