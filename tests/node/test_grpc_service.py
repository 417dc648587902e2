"""The control port: those who connect to it and say nothing, and those who watch."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, cast

import pytest

from node.agent import NodeAgent
from node.config import NodeConfig
from node.control.watch_news import APART_S
from node.grpc_service import NodeService, serve
from pd_cluster.role import PD
from tests.node.running import new_runner
from transport.control.proto import node_pb2 as pb

PATIENCE_S = 60.0


def test_a_stranger_who_says_nothing_is_turned_away() -> None:
    async def scenario() -> None:
        service = NodeService(cast(NodeAgent, None), time.monotonic)  # it is never asked for anything
        server, port = await serve(service, "127.0.0.1", 0, handshake_s=0.2)
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            async with asyncio.timeout(PATIENCE_S):
                while await reader.read(1 << 16):
                    pass
            writer.close()
        finally:
            await server.stop(None)

    with new_runner() as runner:
        runner.run(scenario())


STORED = [pb.NodeEvent(stored=pb.BlocksStored(group=group, hashes=bytes([group]) * 32)) for group in range(3)]


class Watching:
    """A node without an engine, and what a watcher of it hears."""

    def __init__(self, folder: Path) -> None:
        config = NodeConfig(
            node_id="watched", cluster="c", cluster_kind="pd", role="decode", model="m", run_dir=str(folder)
        )
        self.agent = NodeAgent(config, PD, time.monotonic)
        self._service = NodeService(self.agent, time.monotonic)

    def publish(self, events: Sequence[pb.NodeEvent]) -> None:
        for event in events:
            self.agent.events.publish(event)

    async def heard(
        self, request: pb.WatchRequest, then: Callable[[], None], until: Callable[[pb.NodeEvent], bool]
    ) -> list[pb.NodeEvent]:
        """The messages after the first two, once `then` was done, up to the one that `until` wants."""
        watch = self._service.Watch(request, cast(Any, None))
        async with asyncio.timeout(PATIENCE_S), aclosing(cast(AsyncGenerator[pb.NodeEvent, None], watch)) as stream:
            found = [await anext(stream) for _ in range(2)]
            asyncio.get_running_loop().call_later(2 * APART_S, then)
            while not until(found[-1]):
                found.append(await anext(stream))
        assert [event.seq for event in found] == [*range(1, len(found) + 1)]
        return found[2:]


def kinds(event: pb.NodeEvent) -> list[str | None]:
    return [each.WhichOneof("event") for each in event.several.events or [event]]


def test_what_happens_together_is_one_message_to_who_takes_several(tmp_path: Path) -> None:
    async def scenario() -> None:
        watching = Watching(tmp_path)
        request = pb.WatchRequest(load_interval_s=60.0, takes_several=True)
        happens = [STORED[0], pb.NodeEvent(load=pb.Load(running=1)), STORED[1], pb.NodeEvent(load=pb.Load(running=2))]
        told = await watching.heard(request, lambda: watching.publish(happens), lambda event: "load" in kinds(event))
        assert [kinds(event) for event in told] == [["stored", "stored", "load"]]
        assert [each.seq for each in told[0].several.events] == [0, 0, 0]

    asyncio.run(scenario())


def test_a_gateway_of_an_earlier_version_hears_one_event_in_a_message(tmp_path: Path) -> None:
    async def scenario() -> None:
        watching = Watching(tmp_path)
        request = pb.WatchRequest(load_interval_s=60.0)
        happens = [*STORED, pb.NodeEvent(load=pb.Load())]
        told = await watching.heard(request, lambda: watching.publish(happens), lambda event: "load" in kinds(event))
        assert [event.WhichOneof("event") for event in told] == ["stored", "stored", "stored", "load"]

    asyncio.run(scenario())


@pytest.mark.parametrize("takes_several", [False, True])
def test_each_watcher_hears_which_bookings_are_its_own(tmp_path: Path, *, takes_several: bool) -> None:
    async def scenario() -> None:
        watching = Watching(tmp_path)
        request = pb.WatchRequest(load_interval_s=60.0, holder="one.a", takes_several=takes_several)
        described = pb.NodeEvent(description=pb.NodeDescription(load=pb.Load(booked_by_own=7)))
        happens = [STORED[0], described]
        told = await watching.heard(
            request, lambda: watching.publish(happens), lambda event: "description" in kinds(event)[-1:]
        )
        (last,) = told if takes_several else told[1:]
        mine = last.several.events[-1] if takes_several else last
        assert mine.description.load.booked_by_own == 0
        assert described.description.load.booked_by_own == 7  # it is the other watchers', too

    asyncio.run(scenario())


def test_a_load_is_told_now_and_then_though_nothing_happens(tmp_path: Path) -> None:
    async def scenario() -> None:
        watching = Watching(tmp_path)
        request = pb.WatchRequest(load_interval_s=0.02)
        told = await watching.heard(request, lambda: None, lambda event: event.seq == 6)
        assert [event.WhichOneof("event") for event in told] == ["load"] * 4

    asyncio.run(scenario())
