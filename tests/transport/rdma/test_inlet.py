"""The receiving ends of rails: a number that arrives waits for its Written, and only so many of them do."""

from collections.abc import Iterable

import pytest

from transport.errors import RemoteProtocolError
from transport.rdma.device import RECEIVE_DEPTH, QueuePair, QueuePairEnd, RdmaDevices
from transport.rdma.inlet import NUMBER_S, RailEnds
from transport.rdma.loopback import LoopbackFabric
from transport.rdma.rails import Posting, RailWrite
from transport.wire.frames import RailAnswer, RailOffer, Written


class World:
    """A sender's queue pair, granted and connected."""

    def __init__(self, number_s: float = NUMBER_S) -> None:
        fabric = LoopbackFabric()
        devices = RdmaDevices([fabric.device("far")])
        self.counted: list[str] = []
        self.ends = RailEnds(devices, self.counted.append, number_s=number_s)
        self.ends.nics(devices.register(memoryview(bytearray(4096))))
        self.queue_pair: QueuePair = fabric.device("near").queue_pair()
        near = self.queue_pair.end
        answer = self.ends.offer(
            RailOffer(
                rail=0, attempt=1, nic=0, queue_pair=near.number, packet_number=0, gid=near.gid, mtu=near.mtu
            )
        )  # fmt: skip
        assert isinstance(answer, RailAnswer)
        self.queue_pair.connect(QueuePairEnd(number=answer.queue_pair, packet_number=0, gid=answer.gid, mtu=answer.mtu))

    def write(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self.queue_pair.write(Posting(number, RailWrite(0, 0, 0), True, number), 0, 0)
        self.queue_pair.poll()

    def named(self, number: int) -> bool:
        return self.ends.has_arrived(Written(slot=0, offset=0, length=0, checksum=0, rail=0, attempt=1, number=number))


def test_numbers_are_named_in_any_order() -> None:
    world = World()
    for first in range(0, 4 * RECEIVE_DEPTH, RECEIVE_DEPTH):
        numbers = range(first, first + RECEIVE_DEPTH)
        world.write(numbers)
        assert all(world.named(number) for number in reversed(numbers))
    assert world.counted == ["rail_opened"]


def test_a_peer_that_does_not_say_what_it_has_written_is_not_kept_in_mind_without_end() -> None:
    world = World()
    world.write(range(RECEIVE_DEPTH))
    assert world.named(0)
    world.write(range(RECEIVE_DEPTH, RECEIVE_DEPTH + 2))  # one more than there are receives for
    with pytest.raises(RemoteProtocolError, match=f"more than {RECEIVE_DEPTH} chunks"):
        world.named(RECEIVE_DEPTH)


def test_a_number_that_does_not_come_costs_the_rail() -> None:
    world = World(number_s=0.01)
    assert not world.named(7)
    assert world.counted == ["rail_opened", "rail_lost"]
