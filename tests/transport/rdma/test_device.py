import ctypes

import numpy as np
import pytest

from transport.rdma.device import PROOF, RECEIVE_DEPTH, Keys, RdmaDevices, RdmaError, WorkCompletion, address_of
from transport.rdma.loopback import LoopbackDevice, LoopbackFabric, LoopbackQueuePair
from transport.rdma.rails import Posting, RailWrite
from transport.rdma.topology import ANY_NODE, Nic
from transport.rdma.verbs import RdmaOptions


def connected(fabric: LoopbackFabric) -> tuple[LoopbackQueuePair, LoopbackQueuePair]:
    ends = [fabric.device("near").queue_pair(), fabric.device("far").direct_queue_pair()]
    near, far = (end for end in ends if isinstance(end, LoopbackQueuePair))
    near.connect(far.end)
    far.connect(near.end)
    far.receive()
    return near, far


def test_memory_is_registered_once_with_every_nic() -> None:
    fabric = LoopbackFabric()
    nics = [fabric.device(name) for name in ("a", "b")]
    devices = RdmaDevices(nics)
    memory = memoryview(bytearray(1000))
    region = devices.register(memory)
    assert devices.register(memory[100:200]) is region
    assert devices.find(region.address + 999, 1) is region
    assert devices.find(region.address + 999, 2) is None
    assert region.keys.keys() == {"a", "b"}
    assert [nic.registrations for nic in nics] == [1, 1]
    devices.close()
    assert devices.find(region.address, 1) is None


def test_memory_that_one_nic_does_not_take_is_given_back_by_the_others() -> None:
    class Full(LoopbackDevice):
        def register(self, address: int, length: int, *, open_to_peers: bool) -> Keys:
            raise RdmaError("no more memory to lock")

    fabric = LoopbackFabric()
    good = fabric.device("a")
    devices = RdmaDevices([good, Full(fabric, Nic(name="b", fabric="loop", numa_node=ANY_NODE))])
    for _ in range(3):
        with pytest.raises(RdmaError, match="no more memory"):
            devices.register(memoryview(bytearray(1000)))
    assert not good.memory


def test_nics_near_to_the_memory_are_preferred() -> None:
    memory = memoryview(bytearray(1000))
    fabric = LoopbackFabric()
    devices = RdmaDevices(
        [fabric.device("a", numa_node=0), fabric.device("b", numa_node=1)],
        numa_maps=lambda: f"{address_of(memory):x} default anon=9 N0=1 N1=8 kernelpagesize_kB=4",
    )
    assert [nic.preferred for nic in devices.nics_for(devices.register(memory))] == [False, True]
    assert [nic.preferred for nic in devices.nics_for(None)] == [True, True]


def test_an_address_is_where_the_bytes_are() -> None:
    memory = bytearray(b"0123456789")
    assert ctypes.string_at(address_of(memoryview(memory)[3:]), 4) == b"3456"
    assert ctypes.string_at(address_of(memoryview(bytes(memory))), 4) == b"0123"
    assert address_of(memoryview(b"")) == 0


def test_retries_that_never_end_are_refused() -> None:
    with pytest.raises(ValueError, match="retries 7: 1 to 6"):
        RdmaOptions(retries=7)


def test_a_nic_may_try_four_times_as_long_as_it_was_told() -> None:
    assert RdmaOptions(timeout_exponent=14, retries=5).gives_up_within_s == pytest.approx(1.61, abs=0.01)


# The made-up fabric behaves as the real one does (tests/rdma_vm)


def test_loopback_writes_into_registered_memory_and_tells_the_number() -> None:
    fabric = LoopbackFabric()
    near, far = connected(fabric)
    source, target = np.arange(100, dtype=np.uint8), np.zeros(100, np.uint8)
    here, there = source.ctypes.data, target.ctypes.data
    local = near.device.register(here, 100, open_to_peers=False)
    remote = far.device.register(there, 100, open_to_peers=True)
    near.prove()
    near.write(Posting(1, RailWrite(here, there, 50), False), local.local, remote.remote)
    near.write(Posting(2, RailWrite(here + 50, there + 50, 50), True, 7), local.local, remote.remote)
    assert near.poll() == [WorkCompletion(wr_id=PROOF), WorkCompletion(wr_id=2)]
    assert far.poll() == [WorkCompletion(wr_id=0, number=7)]
    assert target.tolist() == source.tolist()


def test_loopback_refuses_wrong_keys_and_flushes_what_follows() -> None:
    near, far = connected(LoopbackFabric())
    memory = bytearray(100)
    address = address_of(memoryview(memory))
    local = near.device.register(address, 100, open_to_peers=False)
    near.write(Posting(1, RailWrite(address, address, 10), True), local.local, 12345)
    near.write(Posting(2, RailWrite(address, address, 10), True), local.local, 12345)
    assert [completion.error for completion in near.poll()] == ["rem_access_err", "wr_flush_err"]
    assert far.broken


def test_loopback_has_no_more_room_than_a_nic() -> None:
    near, _ = connected(LoopbackFabric())
    for _ in range(RECEIVE_DEPTH):
        near.receive()
    with pytest.raises(RdmaError, match="receive queue is full"):
        near.receive()
