"""An engine is verified over the way that requests take, however its answer comes; no request waits meanwhile."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from node.config import NodeConfig
from node.engine.doors import OpenDoor
from node.tasks import Tasks
from node.transfer.services import DecodeService, OutgoingLegs
from pd_cluster.converter import RoleConverter
from pd_cluster.verification import MAX_ANSWER_BYTES, VerificationFailed, verify
from tests.node.running import config
from transport.control import messages as m
from transport.control.proto import node_pb2 as pb

PATIENCE_S = 60.0
ANSWER = (b'{"usage": {"completion', b'_tokens": 1}}')

Answering = Callable[[web.StreamResponse], Coroutine[Any, Any, None]]


class FakeNode:
    """As much of a node as a conversion sees; its engine is at `engine_url`."""

    def __init__(self, node_config: NodeConfig, engine_url: str) -> None:
        self.config = node_config
        self.tasks = Tasks(Counter())
        self.legs: OutgoingLegs | None = None
        self.decodes: DecodeService | None = None
        self.engine_load = m.LoadReport(running=0, waiting=0, queued_tokens=0)
        self.door = OpenDoor()
        self.door.open(engine_url)

    def state(self) -> pb.NodeState:
        return pb.NODE_STATE_READY

    def publish_description(self) -> None:
        pass


@asynccontextmanager
async def node_with(tmp_path: Path, answering: Answering) -> AsyncIterator[FakeNode]:
    async def answer(http: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(http)
        await answering(response)
        await response.write_eof()
        return response

    app = web.Application()
    app.router.add_post("/v1/completions", answer)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield FakeNode(config(tmp_path), f"http://127.0.0.1:{runner.addresses[0][1]}")
    finally:
        await runner.cleanup()


def run(scenario: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(PATIENCE_S):
            await scenario

    asyncio.run(bounded())


def test_an_answer_may_come_in_pieces(tmp_path: Path) -> None:
    async def in_pieces(response: web.StreamResponse) -> None:
        for piece in ANSWER:
            await response.write(piece)
            await asyncio.sleep(0.05)

    async def scenario() -> None:
        async with node_with(tmp_path, in_pieces) as node:
            await verify(node)

    run(scenario())


def test_an_answer_without_end_is_none(tmp_path: Path) -> None:
    async def for_ever(response: web.StreamResponse) -> None:
        while True:
            await response.write(b" " * MAX_ANSWER_BYTES)

    async def scenario() -> None:
        async with node_with(tmp_path, for_ever) as node:
            with pytest.raises(VerificationFailed, match="more than"):
                await verify(node)

    run(scenario())


def test_an_answer_that_is_no_text_makes_no_sense(tmp_path: Path) -> None:
    async def no_text(response: web.StreamResponse) -> None:
        await response.write(b'{"usage": "\xff"}')

    async def scenario() -> None:
        async with node_with(tmp_path, no_text) as node:
            with pytest.raises(VerificationFailed, match="cannot be read"):
                await verify(node)

    run(scenario())


def test_who_does_not_wait_for_the_end_is_answered_while_the_engine_is_verified(tmp_path: Path) -> None:
    async def scenario() -> None:
        asked, goes_on = asyncio.Event(), asyncio.Event()

        async def when_told(response: web.StreamResponse) -> None:
            asked.set()
            await goes_on.wait()
            for piece in ANSWER:
                await response.write(piece)

        async with node_with(tmp_path, when_told) as node:
            converter = RoleConverter(node, asyncio.get_running_loop().time, write_s=10 * PATIENCE_S)
            for _ in range(2):
                begun = await converter.convert(pb.ConvertRequest(epoch=1, role="prefill"))
                assert (begun.epoch, begun.outcome) == (1, "")
                await asked.wait()
            goes_on.set()
            ended = await converter.convert(pb.ConvertRequest(epoch=1, role="prefill", wait_s=PATIENCE_S))
            assert (ended.role, ended.outcome) == ("prefill", "converted")

    run(scenario())
