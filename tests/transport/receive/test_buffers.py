"""One budget for the buffers of a listener: no connection exceeds it, and one that waits gets what others give back."""

import threading
import time
from contextlib import suppress

import pytest

from tests.transport.helpers import PATIENCE_S, SECRET, Memory, wait_for
from tests.transport.raw_sender import RawSender
from transport.receive.buffers import BufferRoom, Buffers, NoBufferRoom, RoomOfPeer
from transport.receive.options import Limits, ServerOptions
from transport.receive.server import TransferServer
from transport.wire.frames import Accept, Chunk, CodedChunk

KB = 1 << 10


def test_buffers_grow_out_of_one_budget_and_give_all_back() -> None:
    room = BufferRoom(100 * KB)
    one, other = Buffers(room, "a"), Buffers(room, "b")
    assert len(one.of("sink", 30 * KB)) >= 30 * KB
    one.of("plain", 20 * KB)
    assert room.lent_bytes == 50 * KB
    with pytest.raises(NoBufferRoom):
        one.of("plain", 21 * KB, wait_s=0.0)  # half of it is one address's
    other.of("sink", 50 * KB)
    with pytest.raises(NoBufferRoom):
        Buffers(room, "c").of("sink", KB, wait_s=0.01)
    one.close()
    other.close()
    assert room.lent_bytes == 0


def test_what_is_asked_for_together_comes_together_or_not_at_all() -> None:
    room = BufferRoom(100 * KB)
    buffers = Buffers(room, "a")
    with pytest.raises(NoBufferRoom):
        buffers.prepare({"carried": 30 * KB, "plain": 30 * KB}, wait_s=0.0)
    assert room.lent_bytes == 0
    buffers.prepare({"carried": 20 * KB, "plain": 20 * KB}, wait_s=0.0)
    buffers.prepare({"carried": 10 * KB, "plain": 25 * KB}, wait_s=0.0)
    assert room.lent_bytes == 45 * KB


def test_memory_that_the_machine_does_not_have_is_given_back() -> None:
    room = BufferRoom(1 << 62)
    buffers = Buffers(room, "a")
    with pytest.raises(MemoryError):
        buffers.prepare({"carried": KB, "plain": 1 << 60}, wait_s=0.0)
    buffers.close()
    assert room.lent_bytes == 0


def test_who_waits_has_what_others_give_back() -> None:
    room = BufferRoom(100 * KB)
    first = Buffers(room, "a")
    first.of("sink", 50 * KB)
    second = Buffers(room, "a")
    waiting = threading.Thread(target=second.of, args=("sink", 40 * KB, PATIENCE_S))
    waiting.start()
    first.relax()  # more than half of what its address may have
    waiting.join(PATIENCE_S)
    assert room.lent_bytes == 40 * KB


def test_what_is_kept_for_long_leaves_room_to_chunks() -> None:
    room = BufferRoom(100 * KB, spare_bytes=20 * KB)
    first, second = RoomOfPeer(room, "a"), RoomOfPeer(room, "b")
    assert [first.lend(20 * KB) for _ in range(3)] == [True, True, False]  # half of it, without half of the spare part
    assert [second.lend(20 * KB) for _ in range(3)] == [True, True, False]
    assert not RoomOfPeer(room, "c").lend(KB)
    for peer in ("a", "b"):
        Buffers(room, peer).of("sink", 10 * KB, wait_s=0.0)
    assert room.lent_bytes == 100 * KB


def test_a_small_budget_is_for_chunks_alone() -> None:
    assert ServerOptions(max_chunk_bytes=1 << 20, buffer_bytes=8 << 20).spare_buffer_bytes == 8 << 20
    assert ServerOptions(max_chunk_bytes=1 << 20, buffer_bytes=64 << 20).spare_buffer_bytes == 16 << 20


def test_buffers_are_kept_while_there_is_enough() -> None:
    room = BufferRoom(1000 * KB)
    buffers = Buffers(room, "a")
    buffers.of("sink", 50 * KB)
    buffers.relax()
    assert room.lent_bytes == 50 * KB


def test_a_budget_below_what_a_chunk_needs_is_refused() -> None:
    with pytest.raises(ValueError, match="buffer_bytes"):
        ServerOptions(max_chunk_bytes=1 << 20, buffer_bytes=1 << 20)


def test_stalled_coded_chunks_of_many_connections_take_no_more_than_the_budget() -> None:
    """Each begins a chunk whose payload never comes whole."""
    chunk = 256 * KB
    options = ServerOptions(max_chunk_bytes=chunk, buffer_bytes=8 * chunk)
    with TransferServer(options=options) as server:
        senders = []
        for number in range(12):
            server.expect(f"t{number}", SECRET, [chunk], Memory([chunk]))
            sender = RawSender.to(server.address)
            sender.say(sender.opening(0, f"t{number}", [chunk]))
            sender.hear(Accept)
            coded = CodedChunk(slot=0, offset=0, length=chunk, coded_length=chunk - 1, checksum=0)
            sender.say(sender.encoded(coded) + bytes(10))
            senders.append(sender)
        peak = 0
        give_up_at = time.monotonic() + PATIENCE_S
        while not server.counters["crowded:memory"] and time.monotonic() < give_up_at:
            peak = max(peak, server.buffers_lent_bytes)
            time.sleep(0.01)
        assert 0 < peak <= 4 * chunk  # the half that one address may have
        for sender in senders:
            sender.sock.close()
        wait_for(lambda: not server.buffers_lent_bytes)


def test_a_chunk_that_comes_too_slowly_ends_its_connection() -> None:
    impatient = ServerOptions(limits=Limits(payload_s=0.1, least_bytes_per_s=1e9))
    with TransferServer(options=impatient) as server:
        server.expect("t", SECRET, [100 * KB], Memory([100 * KB]))
        with RawSender.to(server.address) as sender:
            sender.say(sender.opening(0, "t", [100 * KB]))
            sender.hear(Accept)
            sender.say(sender.encoded(Chunk(slot=0, offset=0, length=100 * KB)))
            with suppress(OSError):
                while not server.counters["lost_connections"]:
                    sender.sock.sendall(b"x")
                    time.sleep(0.02)
        assert server.counters["lost_connections"] == 1
