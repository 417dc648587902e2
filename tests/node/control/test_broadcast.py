import asyncio

import pytest

from node.control.broadcast import (
    MAX_QUEUED_EVENTS,
    MOST_TOGETHER,
    MOST_TOGETHER_BYTES,
    Broadcast,
    WatcherTooSlow,
)
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


def heard_together(*events: pb.NodeEvent, later: pb.NodeEvent | None = None, waits_s: float = 30.0) -> list[int]:
    """What the first message holds, by number, and how many are left. `later` comes after a turn of the loop."""

    async def scenario() -> list[int]:
        with Broadcast().watch() as watcher:
            for event in events:
                watcher.offer(event)
            if later is not None:
                asyncio.get_running_loop().call_soon(watcher.offer, later)
            heard = await watcher.next_several(1.0, waits_s)
            left = 0
            while await watcher.next(0.0):
                left += 1
        return [*(event.seq for event in heard), left]

    return asyncio.run(scenario())


STORED = pb.BlocksStored(hashes=b"h" * 32)


def test_blocks_wait_for_what_is_more_urgent_and_go_with_it() -> None:
    stored, load = pb.NodeEvent(seq=1, stored=STORED), pb.NodeEvent(seq=2, load=pb.Load())
    assert heard_together(stored, later=load) == [1, 2, 0]


def test_blocks_alone_wait_no_longer_than_they_may() -> None:
    removed = pb.NodeEvent(seq=2, removed=pb.BlocksRemoved(hashes=b"h" * 32))
    assert heard_together(pb.NodeEvent(seq=1, stored=STORED), removed, waits_s=0.01) == [1, 2, 0]


def test_a_load_waits_for_nothing_and_takes_along_what_is_there() -> None:
    load, stored = pb.NodeEvent(seq=1, load=pb.Load()), pb.NodeEvent(seq=2, stored=STORED)
    assert heard_together(load, stored) == [1, 2, 0]


def test_one_message_is_bounded_in_events_and_in_bytes() -> None:
    small = [pb.NodeEvent(seq=1, stored=STORED) for _ in range(MOST_TOGETHER + 5)]
    assert heard_together(*small) == [1] * MOST_TOGETHER + [5]
    long = pb.BlocksStored(hashes=bytes(MOST_TOGETHER_BYTES // 2))
    assert heard_together(*(pb.NodeEvent(seq=1, stored=long) for _ in range(4))) == [1, 1, 2]


def test_nothing_comes_of_silence() -> None:
    async def scenario() -> object:
        with Broadcast().watch() as watcher:
            return await watcher.next_several(0.001, 30.0)

    assert asyncio.run(scenario()) == ()
