"""Builders: a small tokenizer, a gateway before scripted nodes, a client."""

import asyncio
import functools
import inspect
import json
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest
import uvloop

from gateway.admission.concurrency import ConcurrencyLimiter
from gateway.api.openai import Endpoint
from gateway.assembly import running
from gateway.cluster.agent_client import AgentClient
from gateway.cluster.registry import NODE_TIMES, Clusters, NodeTimes
from gateway.cluster.served_model import ServedModel
from gateway.config.gateway import GatewayConfig, NodeAddress, Timeouts
from gateway.construction import RunningGateway
from gateway.models.upkeep import loaded
from gateway.prompt.prompt import Hashing, Prompt, PromptMemory, PromptModel, read_call
from gateway.request.request import Request, RequestProgress, Timeline
from gateway.server.app import GenerationEndpoint
from gateway.workers.process_scope import SingleProcess
from prompts.tokens.tokenizer import TextTokenizer
from tests.gateway.layouts import LAYOUT
from tests.gateway.scripted import ScriptedNode, Topology, topology
from tests.prompts.builders import text_tokenizer

# What must happen may take this long on a machine that is busy with other things; what must not take long is not timed.
PATIENCE_S = 60.0
PATIENT = Timeouts(
    connect_s=PATIENCE_S,
    rpc_s=PATIENCE_S,
    prefill_s=PATIENCE_S,
    first_token_s=PATIENCE_S,
    stream_idle_s=PATIENCE_S,
    answer_s=PATIENCE_S,
)


def model_of(hashing: Hashing, max_model_len: int = 1 << 20) -> PromptModel:
    return PromptModel(names=("scripted", "m"), max_model_len=max_model_len, hashing=hashing)


def prompt_of(endpoint: Endpoint, hashing: Hashing, **fields: Any) -> Prompt:
    """The prompt of a call with these fields, as the gateway reads it."""
    body = json.dumps({"model": "scripted", **fields}).encode()
    return read_call(endpoint, body, model_of(hashing), PromptMemory(text_tokenizer()))[1]


def request_of(text: str, served: ServedModel, **fields: Any) -> Request:
    """A plain request as the gateway holds it once it has read it."""
    body = json.dumps({"model": served.name, "prompt": text}).encode()
    call, prompt = read_call(Endpoint.COMPLETIONS, body, served.as_read(), PromptMemory(text_tokenizer()))
    return Request("r", "r-1", call, prompt, served, RequestProgress(Timeline(0.0)), **fields)


LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
}
SERVED = ServedModel("scripted", "scripted", LAYOUT, 4096, Hashing(block_size=16, salt=b"salt"))


def on_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Runs an async test on a loop of its own; a task left behind is an error."""
    return on_loops(test, [asyncio.new_event_loop])


def on_both_loops(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """The same once more on the loop that processes run on: its transports differ in more than speed.

    Where cases rotate, each test of a module runs on one of the two.
    """

    @functools.wraps(test)
    def run(*args: Any, loop: str | None = None, **kwargs: Any) -> None:
        for each in LOOPS if loop is None else [loop]:  # none: it is called in a test
            _run(LOOPS[each], test, *args, **kwargs)

    arguments = inspect.signature(test)
    loop = inspect.Parameter("loop", inspect.Parameter.KEYWORD_ONLY)
    run.__signature__ = arguments.replace(parameters=[*arguments.parameters.values(), loop])  # type: ignore[attr-defined]
    marked: Callable[..., None] = pytest.mark.rotating("loops")(pytest.mark.parametrize("loop", LOOPS)(run))
    return marked


def on_loops(
    test: Callable[..., Awaitable[None]], loops: Sequence[Callable[[], asyncio.AbstractEventLoop]]
) -> Callable[..., None]:
    """The same on each of these loops."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        for loop in loops:
            _run(loop, test, *args, **kwargs)

    return run


def _run(
    loop: Callable[[], asyncio.AbstractEventLoop], test: Callable[..., Awaitable[None]], *args: Any, **kwargs: Any
) -> None:
    async def main() -> None:
        async with asyncio.timeout(2 * PATIENCE_S):
            await test(*args, **kwargs)
        # A grpc server's own tasks end a few steps after it has stopped.
        await until(lambda: len(asyncio.all_tasks()) == 1, asyncio.all_tasks)

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(main())


async def until(holds: Callable[[], object], found: Callable[[], object] = lambda: "it did not happen") -> None:
    """Waits for something that happens without notice; `found` says what there was instead."""
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, found()
        await asyncio.sleep(0.005)


@dataclass
class Deployment(ABC):
    """Scripted nodes, what serves requests by them, and a client session whose base is that."""

    nodes: Topology
    http: aiohttp.ClientSession

    @property
    @abstractmethod
    def url(self) -> str: ...

    @property
    @abstractmethod
    def clusters(self) -> Clusters: ...

    @property
    @abstractmethod
    def door(self) -> GenerationEndpoint: ...

    @property
    def admission(self) -> ConcurrencyLimiter:
        return self.door.rooms.admission

    @abstractmethod
    async def records(self) -> list[dict[str, Any]]:
        """Of the requests so far, once they have ended."""

    @abstractmethod
    async def metrics(self) -> str:
        """The page, once no request is being served."""

    async def complete(
        self, prompt: Any = "hello there the quick brown fox", headers: dict[str, str] | None = None, **fields: Any
    ) -> aiohttp.ClientResponse:
        body = {"model": "scripted", "prompt": prompt, **fields}
        response = await self.http.post("/v1/completions", json=body, headers=headers)
        await response.read()
        return response

    def hashes_of(self, text: str) -> list[bytes]:
        """The blocks of a plain prompt, as the gateway names them."""
        served = self.clusters.served
        assert served is not None
        return prompt_of(Endpoint.COMPLETIONS, served.hashing, prompt=text).hashes

    async def connect(self, limit: int = 1 << 16) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection of a client that says HTTP by itself, and reads `limit` bytes ahead."""
        address = urlsplit(self.url)
        return await asyncio.open_connection(address.hostname, address.port or 80, limit=limit)

    async def settled(self) -> None:
        """Waits until nothing is under way on any node; raises if something stays."""
        await until(lambda: not self.nodes.leftovers(), self.nodes.leftovers)

    async def idle(self) -> None:
        """Waits until the gateway has closed the account of every request."""
        await self.admission.wait_idle()

    async def fallbacks(self) -> dict[str, float]:
        return await self.counted("prfaas_fallbacks_total{")

    async def counted(self, name: str) -> dict[str, float]:
        """The values of a metric by its first label."""
        found = [line for line in (await self.metrics()).splitlines() if line.startswith(name)]
        return {line.split('"')[1]: float(line.rsplit(" ", 1)[1]) for line in found}


@dataclass
class World(Deployment):
    """A gateway before scripted nodes."""

    gateway: RunningGateway

    @property
    def url(self) -> str:
        return self.gateway.url

    @property
    def clusters(self) -> Clusters:
        return self.gateway.clusters

    @property
    def door(self) -> GenerationEndpoint:
        return self.gateway.door

    async def records(self) -> list[dict[str, Any]]:
        await self.idle()
        async with self.http.get("/prfaas/requests") as response:
            return [json.loads(line) for line in (await response.text()).splitlines()]

    async def metrics(self) -> str:
        await self.idle()
        async with self.http.get("/metrics") as response:
            return await response.text()


def config_for(nodes: Topology, **fields: Any) -> GatewayConfig:
    config = GatewayConfig(
        tokenizer_dir=Path("unused"),
        port=0,
        served_model="scripted",
        threshold_tokens=100,
        timeouts=PATIENT,
        nodes=tuple(NodeAddress(agent=node.agent_address) for node in nodes.nodes),
    )
    return replace(config, **fields)


@asynccontextmanager
async def world(
    remote: int = 1,
    local: int = 1,
    decode: int = 2,
    *,
    remote_clusters: tuple[str, ...] = ("east",),
    clusters: tuple[str, ...] = ("west",),
    kind: type[ScriptedNode] = ScriptedNode,
    wait: bool = True,
    clock: Callable[[], float] = time.monotonic,
    read_again: Callable[[GatewayConfig], GatewayConfig] = lambda config: config,
    seat: SingleProcess | None = None,
    agent_client: type[AgentClient] = AgentClient,
    node_times: NodeTimes = NODE_TIMES,
    load_tokenizer: Callable[[GatewayConfig], TextTokenizer] = loaded,
    **fields: Any,
) -> AsyncIterator[World]:
    """A gateway before that many scripted nodes."""
    async with AsyncExitStack() as stack:
        nodes = await stack.enter_async_context(topology(remote, local, decode, remote_clusters, clusters, kind))
        config = config_for(nodes, **fields)
        gateway = await stack.enter_async_context(
            running(
                config,
                text_tokenizer(),
                clock,
                seat,
                lambda: read_again(config),
                agent_client=agent_client,
                node_times=node_times,
                load_tokenizer=load_tokenizer,
            )
        )
        http = await stack.enter_async_context(aiohttp.ClientSession(gateway.url))
        if wait:
            known = gateway.clusters
            assert await known.wait_for(lambda: all(node.connected for node in known.nodes), PATIENCE_S)
        yield World(nodes, http, gateway)
