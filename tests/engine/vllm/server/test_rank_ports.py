import asyncio
import socket
from collections.abc import MutableMapping
from types import SimpleNamespace
from typing import Any

import pytest

from engine.vllm.internals import ASKED_RANK
from engine.vllm.server.rank_ports import RankPorts


async def nothing_comes() -> Any:
    raise AssertionError


async def nothing_leaves(message: Any) -> None:
    raise AssertionError(message)


def test_the_port_that_a_request_came_to_is_its_rank() -> None:
    """Of a request by websocket as well. One whose server has no port asks the first rank."""
    asked: list[int | None] = []

    async def app(scope: MutableMapping[str, Any], receive: object, send: object) -> None:
        asked.append(ASKED_RANK.get())

    async def scenario() -> None:
        with socket.create_server(("127.0.0.1", 0)) as second, socket.create_server(("127.0.0.1", 0)) as third:
            ports = RankPorts(app, listeners=[second, third], answers=lambda inner: inner)
            for kind, server in (
                ("http", third.getsockname()), ("websocket", second.getsockname()), ("http", ("::1", 1)), ("http", None),
            ):  # fmt: skip
                await ports({"type": kind, "server": server}, nothing_comes, nothing_leaves)
        assert ASKED_RANK.get() is None

    asyncio.run(scenario())
    assert asked == [2, 1, 0, 0]


def test_the_log_says_why_ports_are_not_open(caplog: pytest.LogCaptureFixture) -> None:
    async def app(scope: MutableMapping[str, Any], receive: object, send: object) -> None:
        async with asyncio.timeout(30.0):
            while not caplog.records:  # noqa: ASYNC110 nothing else tells
                await asyncio.sleep(0.01)

    stranger = SimpleNamespace(state=SimpleNamespace())  # an application that does not name its server
    ports = RankPorts(app, listeners=[], answers=lambda inner: inner)
    asyncio.run(ports({"type": "lifespan", "app": stranger}, nothing_comes, nothing_leaves))
    assert "the ports of the other ranks could not be opened" in caplog.text
