"""A whole node in this process, its emulated engine as a child: agent, gRPC, metrics, as node.main puts them together."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import grpc.aio
import pytest
import uvloop

from node.agent import NodeAgent
from node.config import NodeConfig
from node.engine.liveness import TIMES, LivenessTimes
from node.engine.supervisor import EngineCommand, engine_command
from node.grpc_service import NodeService, serve
from node.metrics import MetricsServer, serve_metrics
from pd_cluster.role import PD
from transport.control.proto import node_pb2 as pb
from transport.control.proto import node_pb2_grpc as rpc

T = TypeVar("T")

BLOCK = 16
START_S = 60.0


def new_runner() -> asyncio.Runner:
    """The event loop that a node really runs on."""
    return asyncio.Runner(loop_factory=uvloop.new_event_loop)


def config(tmp_path: Path, **changes: Any) -> NodeConfig:
    values: dict[str, Any] = {
        "node_id": f"n{time.monotonic_ns()}",
        "cluster": "west",
        "cluster_kind": "pd",
        "role": "decode",
        "model": "kimi_linear",
        "engine": "emulated",
        "run_dir": str(tmp_path),
        "cache_bytes": 16 << 20,
        "chunk_tokens": 64,
        "block_size": BLOCK,
        "lease_s": 600.0,
        "engine_start_timeout_s": START_S,
    }
    return NodeConfig(**(values | changes))


class RunningNode:
    """The node, a channel to it, and an HTTP client."""

    def __init__(
        self, agent: NodeAgent, address: str, stub: Any, metrics: MetricsServer, http: aiohttp.ClientSession
    ) -> None:
        self.agent = agent
        self.address = address
        self.stub = stub
        self.metrics = metrics
        self.http = http

    async def describe(self) -> pb.NodeDescription:
        description: pb.NodeDescription = await self.stub.Describe(pb.DescribeRequest(check_integrity=True))
        return description

    async def prefill(self, prompt: list[int]) -> int:
        """Has the engine compute a prompt; returns how many of its tokens were cached."""
        url = (await self.describe()).engine_url
        body = {"model": self.agent.config.model_name, "prompt": prompt, "max_tokens": 1}
        async with self.http.post(f"{url}/v1/completions", json=body) as answer:
            answer.raise_for_status()
            usage = (await answer.json())["usage"]
        cached: int = usage["prompt_tokens_details"]["cached_tokens"]
        return cached

    async def get(self, path: str) -> tuple[int, str]:
        async with self.http.get(f"{self.metrics.url}{path}") as answer:
            return answer.status, await answer.text()


@contextlib.asynccontextmanager
async def running_node(
    node_config: NodeConfig,
    *,
    wait: bool = True,
    engine_command: EngineCommand = engine_command,
    liveness: LivenessTimes = TIMES,
) -> AsyncIterator[RunningNode]:
    """Everything ends with the block, in the order in which node.main ends it."""
    async with contextlib.AsyncExitStack() as stack:
        agent = NodeAgent(node_config, PD, time.monotonic, engine_command=engine_command, liveness=liveness)
        stack.push_async_callback(agent.close)
        metrics = await serve_metrics(agent, node_config.host, 0)
        stack.push_async_callback(metrics.close)
        server, port = await serve(NodeService(agent, time.monotonic), node_config.host, 0)
        stack.push_async_callback(server.stop, None)
        address = f"{node_config.host}:{port}"
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(address))
        http = await stack.enter_async_context(aiohttp.ClientSession())
        await agent.start()
        if wait:
            await agent.wait_ready(START_S)
        yield RunningNode(agent, address, rpc.NodeAgentStub(channel), metrics, http)  # type: ignore[no-untyped-call]


async def until(holds: Callable[[], Awaitable[bool]], timeout_s: float = 30.0) -> None:
    """Waits for what other processes and threads do."""
    async with asyncio.timeout(timeout_s):
        while not await holds():  # noqa: ASYNC110 other processes have no Event of ours
            await asyncio.sleep(0.01)


async def bounded(scenario: Coroutine[Any, Any, T]) -> T:
    async with asyncio.timeout(100.0):
        return await scenario


def alone(scenario: Coroutine[Any, Any, T]) -> T:
    """For tests whose node is theirs."""
    with new_runner() as runner:
        return runner.run(bounded(scenario))


async def refused(call: Any) -> tuple[grpc.StatusCode, str]:
    """Status code and reason of a call that must fail."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), dict(caught.value.trailing_metadata() or ()).get("prfaas-reason", "")
