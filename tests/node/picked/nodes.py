"""Two nodes that take picked requests, and what is asked of them."""

import asyncio
import contextlib
import io
import json
import ssl
import time
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import aiohttp
from aiohttp import web

from node.config import PICKED
from node.grpc_service import NodeService
from node.metrics import server_page
from node.picked.legs import LEG_PATH, PLACE_PATH
from node.picked.port import PREFILLER, PickedPort
from tests.node.running import RunningNode, config, new_runner, running_node, until
from transport.wire.identity import Identity

T = TypeVar("T")

MODEL: Final = "tiny"
START_S: Final = 240.0  # of engines that start side by side, on a busy machine


@dataclass(frozen=True, slots=True)
class PickedNode:
    """A node, and where it takes picked requests."""

    node: RunningNode
    port: PickedPort
    shown: Identity | None = None  # to its port, by those who ask

    @property
    def address(self) -> str:
        return self.port.url.partition("://")[2]

    async def complete(
        self, prompt: Sequence[int] | str, max_tokens: int = 8, *, prefiller: str = "", **options: Any
    ) -> dict[str, Any]:
        """A whole answer, which must be one."""
        status, told = await self.ask(prompt, max_tokens, prefiller=prefiller, **options)
        assert status == 200, told
        return told

    async def ask(
        self, prompt: Sequence[int] | str, max_tokens: int = 8, *, prefiller: str = "", **options: Any
    ) -> tuple[int, dict[str, Any]]:
        """Status and answer of a completion."""
        async with self.asking(prompt, max_tokens, prefiller=prefiller, **options) as answer:
            return answer.status, await answer.json()

    def asking(self, prompt: Sequence[int] | str, max_tokens: int = 8, *, prefiller: str = "", **options: Any) -> Any:
        """The request, to be entered."""
        text = prompt if isinstance(prompt, str) else list(prompt)
        body = {"model": MODEL, "prompt": text, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        headers = {PREFILLER: prefiller} if prefiller else {}
        body |= {"return_token_ids": True} | options
        sent = io.BytesIO(json.dumps(body).encode())
        secure = ssl_of(self.shown)
        return self.node.http.post(f"{self.port.url}/v1/completions", data=sent, headers=headers, ssl=secure)

    async def idle(self) -> None:
        """Nothing is held any more, and the books balance."""

        async def is_idle() -> bool:
            pool = (await self.node.describe()).pool
            return not (pool.reservations or pool.pages_locked or pool.pages_transfer)

        await until(is_idle)
        assert not (await self.node.describe()).integrity_error

    async def counted(self, **requests: int) -> None:
        """Requests that have ended are counted a moment later: these, and no others."""
        counts = self.node.agent.picked

        async def are_counted() -> bool:
            return counts.requests.total() >= sum(requests.values())

        await until(are_counted)
        assert counts.requests == requests, counts

    async def bytes_landed(self) -> int:
        assert self.node.agent.incoming is not None
        return self.node.agent.incoming.counts.bytes_landed


@contextlib.asynccontextmanager
async def picked_node(tmp_path: Path, **changes: Any) -> AsyncIterator[PickedNode]:
    """A node with an emulated engine, unless `changes` say otherwise. It may still be starting."""
    settings = config(
        tmp_path, **({"picked_port": 0, "served_model": MODEL, "engine_start_timeout_s": START_S} | changes)
    )
    async with running_node(settings, wait=False) as node:
        port = PickedPort(node.agent, NodeService(node.agent, time.monotonic), partial(server_page, node.agent))
        try:
            await port.start(settings.port(PICKED))
            yield PickedNode(node, port)
        finally:
            await port.close()


@contextlib.asynccontextmanager
async def pair(tmp_path: Path, **changes: Any) -> AsyncIterator[tuple[PickedNode, PickedNode]]:
    """A node that prefills and one that decodes."""
    async with (
        picked_node(tmp_path, role="prefill", **changes) as prefill,
        picked_node(tmp_path, role="decode", **changes) as decode,
    ):
        await prefill.node.agent.wait_ready(START_S)
        await decode.node.agent.wait_ready(START_S)
        yield prefill, decode


def ssl_of(shown: Identity | None) -> ssl.SSLContext | bool:
    """What aiohttp is told of a caller's certificate."""
    return True if shown is None else shown.client_context()


def tokens_of(told: dict[str, Any]) -> list[int]:
    """The tokens of an answer."""
    found: list[int] = told["choices"][0]["token_ids"]
    return found


@dataclass(slots=True)
class StandInPeer:
    """A prefill node that says of itself and of legs what it is told to; `asked` are legs, `left` those that hung up."""

    place: dict[str, Any]
    leg: dict[str, Any] | None = None  # None: no answer ever comes
    asked: int = 0
    left: int = 0
    address: str = ""
    real: str = ""  # URL of a node that does the legs, before their answers are lost

    async def _place(self, _: web.Request) -> web.Response:
        return web.json_response(self.place)

    async def _leg(self, request: web.Request) -> web.Response:
        await request.read()
        self.asked += 1
        if self.real:
            told = io.BytesIO(await request.read())
            async with aiohttp.request("POST", f"{self.real}{LEG_PATH}", data=told) as answer:
                assert answer.status == 200
        if self.leg is not None:
            return web.json_response(self.leg)
        try:
            await asyncio.Event().wait()
        finally:
            self.left += 1
        raise AssertionError("for ever")

    @contextlib.asynccontextmanager
    async def listening(self, secure: ssl.SSLContext | None = None) -> "AsyncIterator[StandInPeer]":
        app = web.Application(client_max_size=64 << 20)
        app.router.add_get(PLACE_PATH, self._place)
        app.router.add_post(LEG_PATH, self._leg)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=secure).start()
            self.address = f"127.0.0.1:{runner.addresses[0][1]}"
            yield self
        finally:
            await runner.cleanup()


@dataclass(frozen=True, slots=True)
class RunningPair:
    """Two nodes on a loop of their own; `run` runs a test's coroutine there."""

    runner: asyncio.Runner
    prefill: PickedNode
    decode: PickedNode

    def run(self, scenario: Coroutine[Any, Any, T], within_s: float = 60.0) -> T:
        return self.runner.run(_bounded(scenario, within_s))


@contextlib.contextmanager
def running_pair(tmp_path: Path, **changes: Any) -> Iterator[RunningPair]:
    """Both inside the block."""
    with new_runner() as runner:
        stack = contextlib.AsyncExitStack()
        prefill, decode = runner.run(_bounded(stack.enter_async_context(pair(tmp_path, **changes)), START_S))
        try:
            yield RunningPair(runner, prefill, decode)
        finally:
            runner.run(stack.aclose())


async def _bounded(scenario: Coroutine[Any, Any, T], within_s: float) -> T:
    async with asyncio.timeout(within_s):
        return await scenario
