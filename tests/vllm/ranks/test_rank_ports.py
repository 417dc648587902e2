"""The middleware under uvicorn, as vLLM runs it: each port is a rank."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest

from engine.vllm.internals import ASKED_RANK
from engine.vllm.server.rank_ports import RankPorts

uvicorn = pytest.importorskip("uvicorn")  # comes with vLLM
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300), pytest.mark.dimensions(start="ports of ranks")]


class Application:
    """Answers with the rank that is asked, and holds the server where vLLM's does."""

    def __init__(self, listeners: list[socket.socket]) -> None:
        self.state = SimpleNamespace(server=None)
        self._ports = RankPorts(self._answer, listeners=listeners, answers=lambda inner: inner)

    async def __call__(
        self,
        scope: MutableMapping[str, Any],
        receive: Callable[[], Awaitable[Any]],
        send: Callable[[Any], Awaitable[None]],
    ) -> None:
        await self._ports({**scope, "app": self}, receive, send)

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            while (await receive())["type"] == "lifespan.startup":
                await send({"type": "lifespan.startup.complete"})
            await send({"type": "lifespan.shutdown.complete"})
            return
        if scope["path"] == "/slow":
            await asyncio.sleep(0.5)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": str(ASKED_RANK.get()).encode()})


@asynccontextmanager
async def serving() -> AsyncIterator[tuple[Any, list[str]]]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
    urls = [f"http://127.0.0.1:{each.getsockname()[1]}" for each in sockets]
    application = Application(sockets[1:])
    server = uvicorn.Server(uvicorn.Config(application, log_level="error", timeout_graceful_shutdown=10))
    application.state.server = server
    running = asyncio.create_task(server.serve(sockets=sockets[:1]))
    async with asyncio.timeout(30.0):
        while len(getattr(server, "servers", [])) < 3:  # noqa: ASYNC110 nothing tells
            await asyncio.sleep(0.01)
    try:
        yield server, urls
    finally:
        server.should_exit = True
        await running


def test_a_request_is_the_ranks_whose_port_it_came_to() -> None:
    async def scenario() -> list[str]:
        async with serving() as (_, urls), aiohttp.ClientSession() as session:
            said = []
            for url in [*urls, urls[1]]:
                async with session.get(url, headers={"X-data-parallel-rank": "0"}) as answer:
                    said.append(await answer.text())
            return said

    assert asyncio.run(scenario()) == ["0", "1", "2", "1"]


def test_all_ports_end_with_the_server_and_what_runs_is_answered() -> None:
    async def scenario() -> None:
        async with aiohttp.ClientSession() as session:
            async with serving() as (server, urls):
                asking = asyncio.create_task(session.get(f"{urls[2]}/slow"))
                await asyncio.sleep(0.1)
                server.should_exit = True
                async with await asking as answer:
                    assert await answer.text() == "2"
            for url in urls:
                with pytest.raises(aiohttp.ClientConnectionError):
                    await session.get(url)

    asyncio.run(scenario())
