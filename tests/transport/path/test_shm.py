"""Transfers between two nodes of one host: the receiver copies from the sender's arena file."""

import mmap
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.transport.helpers import PATIENCE_S, SECRET, Memory, random_bytes, wait_for
from transport.errors import LocalProtocolError
from transport.path.shm import ArenaSource, copy, copy_extents, merge_extents, open_arena, pieces_of, pour
from transport.receive.options import ServerOptions
from transport.receive.registry.landing import LandingResult
from transport.receive.server import TransferServer
from transport.send.client import ClientOptions, TransferClient
from transport.send.spec import TransferSpec, Via
from transport.wire.checksum import Integrity
from transport.wire.frames import MAX_LIST

SIZES = [300_000, 0, 20_480, 1, 3_000_000] * 2


class Arena:
    """A source memory in a file, as an agent's arena is."""

    def __init__(self, path: Path, sizes: list[int]) -> None:
        self.memory = Memory(sizes, fill=True)
        path.write_bytes(self.memory.buffer)
        with path.open("r+b") as file:
            self.map = mmap.mmap(file.fileno(), 0)
        self.source = ArenaSource(str(path), memoryview(self.map), self.memory.segments)

    def close(self) -> None:
        self.source.arena.release()
        self.map.close()


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[Arena]:
    arena = Arena(tmp_path / "arena", SIZES)
    yield arena
    arena.close()


def push(arena: Arena, server: TransferServer, client: TransferClient) -> tuple[Memory, list[LandingResult], str]:
    target, results, landed = Memory(SIZES, seed=2), [], threading.Event()
    server.expect("t", SECRET, SIZES, target, on_done=lambda result: (results.append(result), landed.set()))
    push = client.open(TransferSpec(server.address, "t", SECRET, SIZES, via=Via.SHM), arena.source)
    push.ready_all()
    result = push.wait(PATIENCE_S)
    assert result is not None
    if result.ok:
        assert landed.wait(PATIENCE_S)
    return target, results, result.reason


def test_bytes_are_copied_out_of_the_arena(arena: Arena, tmp_path: Path) -> None:
    with TransferServer(options=ServerOptions(arena_dirs=(str(tmp_path),))) as server, TransferClient() as client:
        target, results, reason = push(arena, server, client)
        assert reason == ""
        assert results[0].ok
        assert target.content() == arena.memory.content()


def test_the_same_source_serves_tcp(arena: Arena) -> None:
    with TransferServer() as server, TransferClient() as client:
        target = Memory(SIZES, seed=2)
        server.expect("t", SECRET, SIZES, target)
        push = client.open(TransferSpec(server.address, "t", SECRET, SIZES), arena.source)
        push.ready_all()
        result = push.wait(PATIENCE_S)
        assert result is not None
        assert result.ok
        assert target.content() == arena.memory.content()


def test_ranges_that_do_not_touch_in_the_arena_take_several_references(tmp_path: Path) -> None:
    count, size = 2 * MAX_LIST + 10, 8
    path = tmp_path / "arena"
    path.write_bytes(random_bytes(2 * count * size))
    source = ArenaSource(str(path), memoryview(path.read_bytes()), lambda i: [(2 * i * size, size)])
    target = bytearray(count * size)
    options = ServerOptions(arena_dirs=(str(tmp_path),))
    with TransferServer(options=options) as server, TransferClient(options=ClientOptions(connections=1)) as client:
        server.expect("t", SECRET, [size] * count, lambda i: [memoryview(target)[i * size : (i + 1) * size]])
        push = client.open(TransferSpec(server.address, "t", SECRET, [size] * count, via=Via.SHM), source)
        push.ready_all()
        result = push.wait(PATIENCE_S)
        assert result is not None
        assert result.ok
        assert result.stats.chunks >= 3
        assert result.stats.bytes_sent == count * size
        assert target == b"".join(bytes(source(i)[0]) for i in range(count))
        assert not server.counters["lost_connections"]


@pytest.mark.parametrize("integrity", [Integrity.NONE, Integrity.CHECKSUM])
def test_memory_that_its_owner_had_back_before_it_was_copied_does_not_count(
    integrity: Integrity, tmp_path: Path
) -> None:
    sizes = [1000, 300_000]
    arena, target = Arena(tmp_path / "arena", sizes), Memory(sizes, seed=2)
    had_back = threading.Event()

    def late_target(index: int) -> list[memoryview]:
        """Where range 1 belongs is said when its memory is gone."""
        assert not index or had_back.wait(PATIENCE_S)
        return target(index)

    options = ServerOptions(arena_dirs=(str(tmp_path),), integrity=integrity)
    client_options = ClientOptions(connections=1, integrity=integrity)
    with TransferServer(options=options) as server, TransferClient(options=client_options) as client:
        landing = server.expect("t", SECRET, sizes, late_target)
        push = client.open(TransferSpec(server.address, "t", SECRET, sizes, via=Via.SHM), arena.source)
        push.ready(0)
        wait_for(lambda: push.stats.bytes_acked == sizes[0])
        push.ready(1)
        wait_for(lambda: push.stats.bytes_sent == sum(sizes))
        push.abort("the engine died", keep_landing=True)
        assert push.wait(PATIENCE_S) is not None
        arena.map[:] = bytes(len(arena.map))
        had_back.set()
        wait_for(lambda: not landing.senders)
        assert server.counters["rejected:checksum"]
        assert landing.bytes_landed == sizes[0]
    arena.close()


def test_an_arena_outside_the_allowed_places_is_not_read(arena: Arena) -> None:
    with TransferServer(options=ServerOptions(arena_dirs=("/proc",))) as server, TransferClient() as client:
        _, _, reason = push(arena, server, client)
        assert reason == "arena_not_readable"


def test_a_link_out_of_the_allowed_place_is_not_followed(tmp_path: Path) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    (tmp_path / "secret").write_text("x")
    (inside / "arena").symlink_to(tmp_path / "secret")
    with pytest.raises(PermissionError):
        open_arena(str(inside / "arena"), [str(inside)])
    os.mkfifo(inside / "pipe")
    with pytest.raises(PermissionError, match="regular file"):
        open_arena(str(inside / "pipe"), [str(inside)])


def test_bytes_that_changed_after_ready_do_not_land(arena: Arena, tmp_path: Path) -> None:
    class Moving(ArenaSource):
        def extents(self, first: int, stop: int, skip: int, size: int) -> list[tuple[int, int]]:
            extents = super().extents(first, stop, skip, size)
            for start, length in extents:
                self.arena[start : start + length] = os.urandom(length)
            return extents

    moving = Moving(arena.source.path, arena.source.arena, arena.source.segments)
    with TransferServer(options=ServerOptions(arena_dirs=(str(tmp_path),))) as server, TransferClient() as client:
        server.expect("t", SECRET, SIZES, Memory(SIZES))
        push = client.open(TransferSpec(server.address, "t", SECRET, SIZES, via=Via.SHM), moving)
        push.ready_all()
        result = push.wait(PATIENCE_S)
        assert result is not None
        assert result.reason == "checksum"
        assert server.counters["rejected:checksum"] > 0


def test_a_truncated_arena_is_a_rejected_chunk_not_a_crash(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 100)
    fd = open_arena(str(path), [str(tmp_path)])
    try:
        assert copy_extents(fd, [(0, 100)], [memoryview(bytearray(60)), memoryview(bytearray(40))])
        assert not copy_extents(fd, [(50, 100)], [memoryview(bytearray(100))])
    finally:
        os.close(fd)


def test_shared_memory_needs_an_arena() -> None:
    with TransferClient(options=ClientOptions()) as client, pytest.raises(LocalProtocolError):
        client.open(TransferSpec("127.0.0.1:1", "t", SECRET, [1], via=Via.SHM), Memory([1]))


def test_neighbouring_extents_merge() -> None:
    assert merge_extents([(0, 10), (10, 5), (20, 1)]) == [(0, 15), (20, 1)]


@given(st.lists(st.integers(1, 50), min_size=1, max_size=20), st.lists(st.integers(1, 50), min_size=1, max_size=20))
def test_views_are_cut_copied_together_and_filled_again(cuts: list[int], places: list[int]) -> None:
    data = bytes(range(256)) * 4
    views = [memoryview(data)[sum(cuts[:i]) : sum(cuts[: i + 1])] for i in range(len(cuts))]
    pieces = [bytes(piece) for piece in pieces_of(views, 16, 8, memoryview(bytearray(16)))]
    assert all(len(piece) <= 16 for piece in pieces)
    assert b"".join(pieces) == data[: sum(cuts)]
    room = [memoryview(bytearray(size)) for size in [*places, sum(cuts)]]
    left = list(room)
    for piece in pieces:
        pour(memoryview(piece), left, copy)
    assert b"".join(room)[: sum(cuts)] == data[: sum(cuts)]
