"""RDMA through real verbs, between processes, over links that break: soft-RoCE in the guest of `make test-rdma`."""

import os
import time
from collections.abc import Callable, Iterator

import pytest

from tests.rdma_vm.ends import End, RemoteEnd
from tests.rdma_vm.links import mend_all, resources, swallow, unplug
from transport.rdma.device import PROOF, QueuePair, RdmaError, WorkCompletion, address_of
from transport.rdma.peer_memory import BUFFER_BYTES, PeerMemory
from transport.rdma.rails import Posting, RailWrite
from transport.rdma.verbs import RdmaOptions, VerbsDevice, open_devices

pytestmark = [pytest.mark.rdma, pytest.mark.timeout(900)]

MIB = 1 << 20
NEAR, FAR = ("rxa0", "rxb0"), ("rxa1", "rxb1")
WITHIN_S = 300.0  # an emulated machine that others keep busy


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.005)


@pytest.fixture(scope="module")
def far() -> Iterator[RemoteEnd]:
    end = RemoteEnd(FAR)
    yield end
    end.close()


@pytest.fixture
def near() -> Iterator[End]:
    end = End(NEAR)
    yield end
    end.close()


def transfer(near: End, far: RemoteEnd, transfer_id: str, sizes: list[int]) -> Callable[[], None]:
    """Starts one; the returned function waits for it and compares every byte."""
    far.ask("expect", transfer_id, sizes, 1e9)
    sent = near.push(far.ask("address"), transfer_id, sizes)

    def arrives() -> None:
        result = near.pushes[transfer_id].wait(WITHIN_S)
        assert result is not None, near.client.rails()
        assert (result.ok, result.reason) == (True, "")
        assert far.ask("landing", transfer_id) == [True, "", sent]

    return arrives


def up(near: End, nic: str) -> bool:
    return any(rail.up for rail in near.client.rails() if rail.local == nic)


def failures(near: End, nic: str) -> dict[str, int]:
    return {k: v for rail in near.client.rails() if rail.local == nic for k, v in rail.failures.items()}


# The verbs themselves, both ends in this process


class Pair:
    """Two connected queue pairs on rail a, each with memory of its own."""

    def __init__(self, near: VerbsDevice, far: VerbsDevice) -> None:
        self.source, self.target = bytearray(b"x" * MIB), bytearray(MIB)
        self.keys = near.register(address_of(memoryview(self.source)), MIB, open_to_peers=False)
        self.far_keys = far.register(address_of(memoryview(self.target)), MIB, open_to_peers=True)
        self.near, self.far = near.queue_pair(), far.direct_queue_pair()
        self.near.connect(self.far.end)
        self.far.connect(self.near.end)
        self.far.receive()

    def post(self, wr_id: int, start: int, length: int, *, number: int | None = None, key: int | None = None) -> None:
        write = RailWrite(
            address_of(memoryview(self.source)) + start, address_of(memoryview(self.target)) + start, length
        )
        remote = self.far_keys.remote if key is None else key
        self.near.write(Posting(wr_id, write, number is not None, number), self.keys.local, remote)

    def close(self) -> None:
        self.near.close()
        self.far.close()


def completion_of(queue_pair: QueuePair) -> WorkCompletion:
    found: list[WorkCompletion] = []
    wait_for(lambda: bool(found.extend(queue_pair.poll()) or found), "a completion")
    return found[0]


@pytest.fixture
def pair() -> Iterator[Pair]:
    devices = [open_devices(RdmaOptions(devices=(name,))) for name in ("rxa0", "rxa1")]
    ends = [opened.device(name) for opened, name in zip(devices, ("rxa0", "rxa1"), strict=True)]
    assert all(isinstance(end, VerbsDevice) for end in ends)
    made = Pair(*ends)  # type: ignore[arg-type]
    yield made
    made.close()
    for opened in devices:
        opened.close()


def test_the_last_write_of_a_chunk_carries_its_number(pair: Pair) -> None:
    pair.near.prove()
    assert completion_of(pair.near) == WorkCompletion(wr_id=PROOF)
    pair.post(1, 0, MIB // 2)
    pair.post(2, MIB // 2, MIB // 2, number=0x01020304)
    assert completion_of(pair.near) == WorkCompletion(wr_id=2)
    assert completion_of(pair.far).number == 0x01020304
    assert pair.target == pair.source


def test_a_wrong_key_is_refused_and_breaks_the_queue_pair(pair: Pair) -> None:
    pair.post(1, 0, 4096, number=1, key=pair.far_keys.remote ^ 0x5A5A00)
    assert completion_of(pair.near).error == "rem_access_err"
    pair.post(2, 0, 4096, number=2)
    assert completion_of(pair.near).error == "wr_flush_err"
    assert not any(pair.target)


class BufferedPeer:
    """A sender's queue pair on rail a, and the end that has a buffer for it."""

    def __init__(self, near: VerbsDevice, far: VerbsDevice) -> None:
        self.source = bytearray(b"x" * MIB)
        self.keys = near.register(address_of(memoryview(self.source)), MIB, open_to_peers=False)
        self.memory = PeerMemory()
        self.near = near.queue_pair()
        self.far, self.key = far.buffer_queue_pair(self.memory.address, BUFFER_BYTES)
        self.near.connect(self.far.end)
        self.far.connect(self.near.end)
        self.far.receive()

    def write(self, address: int, key: int, length: int = 4096, number: int | None = None) -> str:
        """What the NIC says of it: empty, or the error."""
        self.near.write(
            Posting(1, RailWrite(address_of(memoryview(self.source)), address, length), True, number),
            self.keys.local,
            key,
        )
        return completion_of(self.near).error

    def content(self, start: int, length: int) -> bytes:
        return os.pread(self.memory.fd, length, start)

    def close(self) -> None:
        self.near.close()
        self.far.close()
        self.memory.close()


@pytest.fixture
def ends() -> Iterator[tuple[VerbsDevice, VerbsDevice]]:
    devices = [open_devices(RdmaOptions(devices=(name,))) for name in ("rxa0", "rxa1")]
    near, far = (opened.device(name) for opened, name in zip(devices, ("rxa0", "rxa1"), strict=True))
    assert isinstance(near, VerbsDevice)
    assert isinstance(far, VerbsDevice)
    yield near, far
    for opened in devices:
        opened.close()


def test_a_key_opens_the_buffer_of_its_rail_and_nothing_else(ends: tuple[VerbsDevice, VerbsDevice]) -> None:
    """Each wrong write breaks a queue pair, so each has one of its own."""
    _, far = ends
    arena = bytearray(MIB)
    place = address_of(memoryview(arena))
    arena_keys = far.register(place, MIB, open_to_peers=False)
    open_keys = far.register(place, MIB, open_to_peers=True)  # as it was before there were buffers
    peer = BufferedPeer(*ends)
    assert peer.write(peer.memory.address + MIB, peer.key, MIB, number=1) == ""
    assert completion_of(peer.far).number == 1
    assert peer.content(MIB, MIB) == peer.source
    peer.close()
    targets: list[Callable[[BufferedPeer], tuple[int, int]]] = [
        lambda thief: (place, thief.key),
        lambda thief: (place, arena_keys.local),
        lambda thief: (place, open_keys.remote),  # right, but for another protection domain
        lambda thief: (thief.memory.address - 1, thief.key),
        lambda thief: (thief.memory.address + BUFFER_BYTES - 4095, thief.key),
    ]
    for target in targets:
        thief = BufferedPeer(*ends)
        assert thief.write(*target(thief)) == "rem_access_err"
        thief.close()
    assert not any(arena)


def test_a_key_is_of_no_use_to_another_peer_and_void_once_its_rail_is_closed(
    ends: tuple[VerbsDevice, VerbsDevice],
) -> None:
    victim, thief = BufferedPeer(*ends), BufferedPeer(*ends)
    assert thief.write(victim.memory.address, victim.key) == "rem_access_err"
    assert not any(victim.content(0, BUFFER_BYTES))
    thief.close()

    late = BufferedPeer(*ends)
    victim.far.close()  # whatever its sender does
    assert late.write(victim.memory.address, victim.key) == "rem_access_err"
    assert victim.write(victim.memory.address, victim.key) == "retry_exc_err"
    assert not any(victim.content(0, BUFFER_BYTES))
    late.close()
    victim.close()


def test_a_receiver_cannot_write_into_the_memory_of_its_sender(ends: tuple[VerbsDevice, VerbsDevice]) -> None:
    near, far = ends
    secret = bytearray(MIB)
    place = address_of(memoryview(secret))
    open_keys = near.register(place, MIB, open_to_peers=True)  # the most that it could have
    sender, receiver = near.queue_pair(), far.direct_queue_pair()
    sender.connect(receiver.end)
    receiver.connect(sender.end)
    noise = bytearray(b"x" * 4096)
    keys = far.register(address_of(memoryview(noise)), 4096, open_to_peers=False)
    write = RailWrite(address_of(memoryview(noise)), place, 4096)
    receiver.write(Posting(1, write, True), keys.local, open_keys.remote)
    assert completion_of(receiver).error == "rem_inv_req_err"
    assert not any(secret)
    sender.close()
    receiver.close()


def test_devices_that_are_not_there_are_named() -> None:
    with pytest.raises(RdmaError, match="no RDMA device mlx5_7; there are: rxa0, rxa1, rxb0, rxb1"):
        open_devices(RdmaOptions(devices=("mlx5_7",)))


# Whole transfers, the receiver in another process


def test_one_rail(far: RemoteEnd) -> None:
    end = End(["rxa0"])
    try:
        transfer(end, far, "one rail", [300_000, 0, 1, 8 * MIB])()
        assert end.carried("rxa0") > 0
        assert [rail.remote for rail in end.client.rails()] == ["rxa1"]
    finally:
        end.close()


def test_direct_mode(far: RemoteEnd) -> None:
    receiver = End(["rxa0"], direct=True)
    try:
        receiver.expect("direct", [300_000, 0, 1, 4 * MIB], 1e9)
        sent = far.ask("push", receiver.address(), "direct", [300_000, 0, 1, 4 * MIB])
        assert receiver.landing("direct") == (True, "", sent)
        assert far.ask("carried", "rxa1") > 0
    finally:
        receiver.close()


def test_two_rails(near: End, far: RemoteEnd) -> None:
    first = transfer(near, far, "warm", [MIB])
    wait_for(lambda: up(near, "rxa0") and up(near, "rxb0"), "two rails")
    first()
    transfer(near, far, "two rails", [MIB] * 8)()
    assert near.carried("rxa0") > 0
    assert near.carried("rxb0") > 0


@pytest.mark.parametrize(
    ("damage", "netdev"),
    [(unplug, "na0"), (unplug, "na1"), (swallow, "na0")],
    ids=["near link down", "far link down", "silent loss"],
)
def test_a_rail_breaks_in_mid_transfer_and_comes_back(
    damage: Callable[[str], None], netdev: str, near: End, far: RemoteEnd, request: pytest.FixtureRequest
) -> None:
    name = request.node.name
    first = transfer(near, far, f"warm {name}", [MIB])
    wait_for(lambda: up(near, "rxa0") and up(near, "rxb0"), "two rails")
    first()
    before, lost = near.carried("rxa0"), sum(failures(near, "rxa0").values())
    under_way = transfer(near, far, f"broken {name}", [MIB] * 12)
    wait_for(lambda: near.carried("rxa0") > before, "rail a at work")
    damage(netdev)
    under_way()
    deadline, more = time.monotonic() + WITHIN_S, 0
    while sum(failures(near, "rxa0").values()) == lost:  # cut after its last chunk, it notices with the next
        assert time.monotonic() < deadline, "rail a has failed"
        more += 1
        transfer(near, far, f"more {more} {name}", [MIB] * 4)()
    assert near.carried("rxb0") > 0

    mend_all()
    wait_for(lambda: up(near, "rxa0"), "rail a is back")
    back = near.carried("rxa0")
    for attempt in range(5):  # the other rail may be quick
        transfer(near, far, f"mended {attempt} {name}", [MIB] * 8)()
        if near.carried("rxa0") > back:
            break
    assert near.carried("rxa0") > back


def test_without_any_rail_the_bytes_go_over_tcp(near: End, far: RemoteEnd) -> None:
    first = transfer(near, far, "before", [MIB])
    wait_for(lambda: up(near, "rxa0") and up(near, "rxb0"), "two rails")
    first()
    for netdev in ("na0", "nb1"):
        unplug(netdev)
    transfer(near, far, "no rail", [MIB] * 4)()
    assert near.client.fallback_bytes()["no_rail"] > 0
    mend_all()
    wait_for(lambda: up(near, "rxa0") or up(near, "rxb0"), "a rail is back")
    transfer(near, far, "after", [MIB] * 4)()


def test_a_wrong_secret_gets_no_rail(near: End, far: RemoteEnd) -> None:
    opened = far.ask("counters").get("rail_opened", 0)
    far.ask("expect", "secret", [MIB], 1e9)
    near.push(far.ask("address"), "secret", [MIB], "not the secret")
    result = near.pushes["secret"].wait(WITHIN_S)
    assert result is not None
    assert result.reason == "bad_secret"
    assert near.client.rails() == []
    assert far.ask("counters").get("rail_opened", 0) == opened
    far.ask("cancel", "secret")
    assert far.ask("landing", "secret")[:2] == [False, "cancelled"]


def test_a_landing_that_is_cancelled_in_mid_transfer(near: End, far: RemoteEnd) -> None:
    transfer(near, far, "first", [MIB])()
    far.ask("expect", "cancelled", [MIB] * 12, 1e9)
    near.push(far.ask("address"), "cancelled", [MIB] * 12, withheld=1)
    far.ask("cancel", "cancelled")
    assert far.ask("landing", "cancelled")[:2] == [False, "cancelled"]
    result = near.pushes["cancelled"].wait(WITHIN_S)
    assert result is not None
    assert result.reason == "cancelled"
    transfer(near, far, "next", [MIB])()


def test_the_receiver_is_killed_in_mid_transfer(near: End) -> None:
    victim = RemoteEnd(FAR)
    victim.ask("expect", "doomed", [MIB] * 48, 1e9)
    near.push(victim.ask("address"), "doomed", [MIB] * 48, withheld=1)
    wait_for(lambda: near.carried("rxa0") + near.carried("rxb0") > 0, "a rail at work")
    victim.kill()
    result = near.pushes["doomed"].wait(WITHIN_S)
    assert result is not None
    assert result.reason == "peer_lost"


def test_the_sender_is_killed_in_mid_transfer_and_another_goes_on(far: RemoteEnd) -> None:
    receiver = End(NEAR)
    try:
        victim = RemoteEnd(FAR)
        receiver.expect("orphan", [MIB] * 48, 2.0)
        victim.ask("push", receiver.address(), "orphan", [MIB] * 48, "", 1)
        wait_for(lambda: receiver.server.bytes_received > 0, "bytes on their way")
        victim.kill()
        ok, reason, _ = receiver.landing("orphan")
        assert (ok, reason) == (False, "sender_lost")
        receiver.expect("next", [MIB], 1e9)
        sent = far.ask("push", receiver.address(), "next", [MIB])
        assert receiver.landing("next") == (True, "", sent)
    finally:
        receiver.close()


def test_nothing_is_left_in_the_kernel(far: RemoteEnd) -> None:
    before = {name: resources()[name] for name in NEAR}
    end = End(NEAR)
    transfer(end, far, "last", [MIB] * 4)()
    assert {name: resources()[name] for name in NEAR} != before
    end.close()
    assert {name: resources()[name] for name in NEAR} == before
