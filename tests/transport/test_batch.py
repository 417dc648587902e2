"""Batches of one-sided writes and reads."""

import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.transport.helpers import PATIENCE_S, random_bytes, wait_for
from transport.batch import BatchEngine, Read, TaskState, Write
from transport.control.certificates import Authority
from transport.errors import LocalProtocolError
from transport.receive.options import ServerOptions
from transport.receive.registry.landings import Landings
from transport.receive.registry.segments import ReadRequest, RemoteSegment, read_id
from transport.receive.server import TransferServer
from transport.send.client import ClientOptions
from transport.wire.checksum import Integrity
from transport.wire.frames import Accept, Open, Refuse
from transport.wire.manifest import Manifest, proof_of


def wait(engine: BatchEngine, batch: int) -> TaskState:
    deadline = time.monotonic() + PATIENCE_S
    while (state := engine.batch_status(batch)) is TaskState.PENDING:
        assert time.monotonic() < deadline
        time.sleep(0.002)
    return state


def engine_of(integrity: Integrity, folder: Path) -> BatchEngine:
    identity = Authority(folder).issue("node") if integrity is Integrity.AEAD else None
    return BatchEngine(
        server_options=ServerOptions(integrity=integrity, identity=identity),
        client_options=ClientOptions(integrity=integrity, identity=identity),
    )


def test_writes_land_where_they_were_meant_to() -> None:
    source, target = random_bytes(1 << 20), bytearray(2 << 20)
    with BatchEngine() as near, BatchEngine() as far:
        ref = far.register_memory("kv", memoryview(target))
        batch = near.allocate_batch(8)
        view = memoryview(source)
        near.submit(batch, [Write(view[i << 17 : (i + 1) << 17], ref, (7 - i) << 18) for i in range(8)])
        assert wait(near, batch) is TaskState.COMPLETED
        for i in range(8):
            assert near.status(batch, i).transferred_bytes == 1 << 17
            assert target[(7 - i) << 18 : ((7 - i) << 18) + (1 << 17)] == source[i << 17 : (i + 1) << 17]
        near.free_batch(batch)
        with pytest.raises(LocalProtocolError, match="no batch"):
            near.status(batch, 0)


def test_every_task_has_its_own_status() -> None:
    with BatchEngine(client_options=ClientOptions(peer_timeout_s=2.0)) as near, BatchEngine() as far:
        good = far.register_memory("good", memoryview(bytearray(100)))
        gone = replace(good, address="127.0.0.1:1")
        batch = near.allocate_batch(2)
        near.submit(batch, [Write(memoryview(b"x" * 10), good, 0), Write(memoryview(b"y" * 10), gone, 0)])
        assert wait(near, batch) is TaskState.FAILED
        assert near.status(batch, 0).state is TaskState.COMPLETED
        assert near.status(batch, 1).reason == "peer_lost"
        near.free_batch(batch)


def test_a_segment_is_written_with_its_secret_and_inside_its_bounds_only() -> None:
    with BatchEngine() as near, BatchEngine() as far:
        ref = far.register_memory("kv", memoryview(bytearray(100)))
        cases = {
            "bad_secret": replace(ref, secret=b"guess"),
            "out_of_bounds": replace(ref, num_bytes=10_000),
            "unknown_transfer": replace(ref, name="other"),
        }
        for reason, wrong in cases.items():
            batch = near.allocate_batch(1)
            near.submit(batch, [Write(memoryview(b"x" * 50), wrong, 80 if reason == "out_of_bounds" else 0)])
            assert wait(near, batch) is TaskState.FAILED
            assert near.status(batch, 0).reason == reason
        far.unregister_memory("kv")
        batch = near.allocate_batch(1)
        near.submit(batch, [Write(memoryview(b"x"), ref, 0)])
        assert wait(near, batch) is TaskState.FAILED


def test_a_batch_has_limits() -> None:
    with BatchEngine() as near, BatchEngine() as far:
        ref = far.register_memory("kv", memoryview(bytearray(100)))
        batch = near.allocate_batch(1)
        write = Write(memoryview(b"x"), ref, 0)
        with pytest.raises(LocalProtocolError, match="at most"):
            near.submit(batch, [write, write])
        with pytest.raises(ValueError, match="leaves segment"):
            near.submit(batch, [Write(memoryview(b"x"), ref, 100)])


# Reads


def test_reads_fetch_what_lies_where_they_ask() -> None:
    source, target = random_bytes(2 << 20), bytearray(1 << 20)
    with BatchEngine() as near, BatchEngine() as far:
        ref = far.register_memory("kv", memoryview(source), remote_read=True)
        batch = near.allocate_batch(8)
        view = memoryview(target)
        near.submit(batch, [Read(view[i << 17 : (i + 1) << 17], ref, (7 - i) << 18) for i in range(8)])
        assert wait(near, batch) is TaskState.COMPLETED
        for i in range(8):
            assert near.status(batch, i).transferred_bytes == 1 << 17
            assert target[i << 17 : (i + 1) << 17] == source[(7 - i) << 18 : ((7 - i) << 18) + (1 << 17)]
        near.free_batch(batch)
        wait_for(lambda: not far.serving)


@pytest.mark.parametrize("integrity", list(Integrity))
def test_reads_and_writes_share_a_batch_and_a_pair_of_engines(integrity: Integrity, tmp_path: Path) -> None:
    here, there = random_bytes(300_000, seed=1), random_bytes(300_000, seed=2)
    back = bytearray(300_000)
    with engine_of(integrity, tmp_path) as near, engine_of(integrity, tmp_path) as far:
        ref = far.register_memory("kv", memoryview(there), remote_read=True)
        own = near.register_memory("own", memoryview(here).toreadonly(), remote_read=True, remote_write=False)
        batch = near.allocate_batch(3)
        requests = [Read(memoryview(back)[:100_000], ref, 0), Write(memoryview(here)[:50_000], ref, 200_000)]
        near.submit(batch, [*requests, Read(memoryview(back)[100_000:], own, 100_000)])  # one's own memory, too
        assert wait(near, batch) is TaskState.COMPLETED
        assert back[:100_000] == random_bytes(300_000, seed=2)[:100_000]
        assert back[100_000:] == here[100_000:]
        assert there[200_000:250_000] == here[:50_000]
        for engine in (near, far):
            assert not engine.counters["internal_errors"]


def test_a_segment_is_read_with_its_secret_inside_its_bounds_and_if_it_may_be_read() -> None:
    memory = bytearray(random_bytes(100))
    with BatchEngine() as near, BatchEngine() as far:
        ref = far.register_memory("kv", memoryview(memory), remote_read=True)
        closed = far.register_memory("closed", memoryview(bytearray(100)))
        fixed = far.register_memory("fixed", memoryview(bytearray(100)), remote_read=True, remote_write=False)
        cases = {
            "bad_secret": Read(memoryview(bytearray(50)), replace(ref, secret=b"guess"), 0),
            "out_of_bounds": Read(memoryview(bytearray(50)), replace(ref, num_bytes=10_000), 80),
            "unknown_transfer": Read(memoryview(bytearray(50)), replace(ref, name="other"), 0),
            "access_denied": Read(memoryview(bytearray(50)), closed, 0),
        }
        for reason, read in cases.items():
            batch = near.allocate_batch(1)
            near.submit(batch, [read])
            assert wait(near, batch) is TaskState.FAILED
            assert near.status(batch, 0).reason == reason
            assert not any(read.target)
            assert far.counters[f"refused:{reason}"] == 1
            near.free_batch(batch)
        batch = near.allocate_batch(1)
        near.submit(batch, [Write(memoryview(b"x"), fixed, 0)])
        assert wait(near, batch) is TaskState.FAILED
        assert near.status(batch, 0).reason == "access_denied"
        assert far.counters["reads"] == 0


def test_an_owner_that_is_not_there_is_a_failed_read() -> None:
    with BatchEngine(client_options=ClientOptions(peer_timeout_s=0.3)) as near:
        gone = near.register_memory("kv", memoryview(bytearray(100)), remote_read=True)
        batch = near.allocate_batch(1)
        near.submit(batch, [Read(memoryview(bytearray(10)), replace(gone, address="127.0.0.1:1"), 0)])
        assert wait(near, batch) is TaskState.FAILED
        assert near.status(batch, 0).reason == "peer_lost"


def test_an_owner_whom_the_reader_does_not_let_in_is_a_failed_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transport.batch.READ_ORPHAN_S", 0.5)
    # The reader's listener takes only senders that check what they send, and so does the owner.
    careless = ClientOptions(integrity=Integrity.NONE, peer_timeout_s=0.3)
    with BatchEngine() as near, BatchEngine(client_options=careless) as far:
        ref = far.register_memory("kv", memoryview(bytearray(100)), remote_read=True)
        batch = near.allocate_batch(1)
        near.submit(batch, [Read(memoryview(bytearray(10)), ref, 0)])
        assert wait(near, batch) is TaskState.FAILED
        assert near.status(batch, 0).reason == "sender_lost"


def test_unregistering_ends_reads_and_waits_for_them() -> None:
    slow = ClientOptions(egress_bytes_per_s=1e6, chunk_bytes=1 << 17)
    target = bytearray(8 << 20)
    with BatchEngine() as near, BatchEngine(client_options=slow) as far:
        ref = far.register_memory("kv", memoryview(bytearray(8 << 20)), remote_read=True)
        batch = near.allocate_batch(1)
        near.submit(batch, [Read(memoryview(target), ref, 0)])
        wait_for(lambda: far.serving and near.bytes_received)
        far.unregister_memory("kv")
        wait_for(lambda: not far.serving)
        assert wait(near, batch) is TaskState.FAILED
        assert near.status(batch, 0).reason == "aborted"


def test_a_read_that_was_granted_before_its_segment_went_is_not_served_after() -> None:
    with BatchEngine() as engine:
        segment = RemoteSegment(memoryview(bytearray(10)), b"secret", readable=True)
        request = ReadRequest("kv", segment, "reply:kv:1", b"secret", "127.0.0.1:1", (segment.view,))
        engine.register_memory("kv", memoryview(bytearray(10)), remote_read=True)  # the name is not the segment
        engine.serve(request)
        assert not engine.serving


def test_unregistering_waits_for_the_writes_under_way() -> None:
    slow = ClientOptions(egress_bytes_per_s=20e6, connections=2)
    memory = bytearray(8 << 20)
    with BatchEngine(client_options=slow) as near, BatchEngine() as far:
        ref = far.register_memory("kv", memoryview(memory))
        batch = near.allocate_batch(1)
        near.submit(batch, [Write(memoryview(b"x" * (8 << 20)), ref, 0)])
        wait_for(lambda: any(memory))
        far.unregister_memory("kv")
        left = bytes(memory)
        assert wait(near, batch) is TaskState.FAILED
        assert near.status(batch, 0).reason == "cancelled"
        assert memory == left
        assert not all(left)


def test_reads_not_taken_up_yet_go_with_their_segment() -> None:
    landings = Landings()
    landings.connected(1)
    landings.segments.register("kv", RemoteSegment(memoryview(bytearray(100)), b"secret", readable=True))
    manifest, transcript = Manifest([10]), b"n" * 32
    asked = read_id("kv", "1", "host:7")
    request = Open(
        slot=3, transfer_id=asked, proof=proof_of(b"secret", asked, manifest.digest, transcript), total_bytes=10,
        num_ranges=1, manifest_digest=manifest.digest, placement=((0, 10),),
    )  # fmt: skip
    assert landings.open(1, request, transcript, 0.0) == Accept(slot=3, missing=())
    landings.segments.unregister("kv")
    assert landings.segments.take_reads() == []
    assert landings.open(1, request, transcript, 0.0) == Refuse(slot=3, code="unknown_transfer")


def test_a_request_that_is_repeated_is_served_once() -> None:
    landings = Landings()
    landings.segments.register("kv", RemoteSegment(memoryview(bytearray(100)), b"secret", readable=True))
    manifest, transcript = Manifest([10, 20]), b"n" * 32
    asked = read_id("kv", "1", "host:7")
    request = Open(
        slot=3, transfer_id=asked, proof=proof_of(b"secret", asked, manifest.digest, transcript), total_bytes=30,
        num_ranges=2, manifest_digest=manifest.digest, placement=((0, 10), (50, 20)),
    )  # fmt: skip
    for who in (1, 2):
        landings.connected(who)
        assert landings.open(who, request, transcript, 0.0) == Accept(slot=3, missing=())
    (read,) = landings.segments.take_reads()
    assert (read.address, read.reply_id, [len(view) for view in read.views]) == ("host:7", "reply:kv:1", [10, 20])
    assert landings.segments.take_reads() == []
    other = replace(request, placement=((0, 11), (50, 20)))
    assert landings.open(1, other, transcript, 0.0) == Refuse(slot=3, code="manifest_mismatch")


def test_memory_is_registered_as_what_it_is() -> None:
    with BatchEngine() as engine:
        with pytest.raises(ValueError, match="its memory is not"):
            engine.register_memory("fixed", memoryview(b"x" * 10))
        with pytest.raises(ValueError, match="colon nor an @"):
            engine.register_memory("a@b", memoryview(bytearray(10)))
        ref = engine.register_memory("fixed", memoryview(b"x" * 10), remote_read=True, remote_write=False)
        batch = engine.allocate_batch(1)
        with pytest.raises(ValueError, match="is not writable"):
            engine.submit(batch, [Read(memoryview(b"y" * 10), ref, 0)])
    with TransferServer() as server, pytest.raises(ValueError, match="nothing here serves"):
        server.register_segment("kv", memoryview(bytearray(10)), b"secret", readable=True)
