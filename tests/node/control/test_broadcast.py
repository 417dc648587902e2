import asyncio

import pytest

from node.control.broadcast import MAX_QUEUED_EVENTS, Broadcast, WatcherTooSlow
from transport.control.proto import node_pb2 as pb


def test_every_watcher_hears_everything_in_order() -> None:
    async def scenario() -> list[int]:
        broadcast = Broadcast()
        with broadcast.watch() as one, broadcast.watch() as two:
            for number in range(3):
                broadcast.publish(pb.NodeEvent(seq=number))
            heard = [await watcher.next(1.0) for watcher in (one, two) for _ in range(3)]
        return [event.seq for event in heard if event]

    assert asyncio.run(scenario()) == [0, 1, 2, 0, 1, 2]


def test_a_slow_watcher_is_cut_off_not_waited_for() -> None:
    async def scenario() -> None:
        broadcast = Broadcast()
        with broadcast.watch() as watcher:
            for _ in range(MAX_QUEUED_EVENTS + 1):
                broadcast.publish(pb.NodeEvent())
            with pytest.raises(WatcherTooSlow):
                await watcher.next(1.0)

    asyncio.run(scenario())


def test_silence_is_none() -> None:
    async def scenario() -> object:
        with Broadcast().watch() as watcher:
            return await watcher.next(0.001)

    assert asyncio.run(scenario()) is None
