"""One connection to an engine, over a wire that the test holds the other end of."""

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import LegFailed
from gateway.upstream.http1 import MAX_QUIET_BYTES, MAX_UNREAD_BYTES, EngineAnswer, UpstreamConnection
from tests.gateway.memory.pipeline import on_memory_loop
from tests.gateway.worlds import on_loop

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/x\r\n"
WORDS = (b"one", b" two", b" three\r\n\r\n", b"0\r\n\r\n")
BODY = b"".join(WORDS)
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"".join(b"%x\r\n%b\r\n" % (len(w), w) for w in (*WORDS, b""))
SIZED = HEAD + b"Content-Length: %d\r\n\r\n%b" % (len(BODY), BODY)
UNTIL_CLOSED = HEAD + b"\r\n" + BODY
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 102 Processing\r\n\r\n"
LONG_S = 1000.0


class Wire(asyncio.Transport):
    """What a connection writes to."""

    def __init__(self, connection: UpstreamConnection) -> None:
        super().__init__()
        self.sent = b""
        self.asked = asyncio.Event()
        self.unsent_bytes = 0
        self.is_open = True
        self._reads = True
        self._connection = connection
        connection.connection_made(self)

    def writelines(self, list_of_data: object) -> None:
        assert isinstance(list_of_data, tuple)
        self.sent += b"".join(list_of_data)
        self.asked.set()

    def get_write_buffer_size(self) -> int:
        return self.unsent_bytes

    def is_reading(self) -> bool:
        return self._reads

    def pause_reading(self) -> None:
        assert self._reads
        self._reads = False

    def resume_reading(self) -> None:
        assert not self._reads
        self._reads = True

    def abort(self) -> None:
        self.is_open = False
        asyncio.get_running_loop().call_soon(self._connection.connection_lost, None)

    def close_by_peer(self) -> None:
        self._connection.eof_received()
        self._connection.connection_lost(None)


class Shelf:
    """Owns connections."""

    def __init__(self) -> None:
        self.unused_ones: list[UpstreamConnection] = []
        self.closed_ones: list[UpstreamConnection] = []

    def unused(self, connection: UpstreamConnection) -> None:
        self.unused_ones.append(connection)

    def closed(self, connection: UpstreamConnection) -> None:
        self.closed_ones.append(connection)


class Bench:
    """A connection, its wire and its owner."""

    def __init__(self) -> None:
        self.shelf = Shelf()
        self.connection = UpstreamConnection(self.shelf)
        self.wire = Wire(self.connection)

    def ask(self, within_s: float = LONG_S, body: bytes = b"{}") -> "asyncio.Task[EngineAnswer]":
        due = asyncio.get_running_loop().time() + within_s
        return asyncio.create_task(self.connection.ask(b"POST\r\n\r\n", body, due))

    async def told(self, *parts: bytes) -> EngineAnswer:
        """The answer to a request that the other end answers with these, one at a time."""
        asking = self.ask()
        await self.wire.asked.wait()
        for part in parts:
            self.connection.data_received(part)
        return await asking

    @property
    def is_kept(self) -> bool:
        return bool(self.shelf.unused_ones) and not self.shelf.closed_ones and self.wire.is_open


def pieces(data: bytes, cuts: Sequence[int]) -> list[bytes]:
    at = [0, *sorted(cut % len(data) for cut in cuts), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(at) if a < b]


CUTS = st.lists(st.integers(0, 400), max_size=12)


@given(kind=st.sampled_from([CHUNKED, SIZED, CONTINUE + SIZED]), cuts=CUTS)
def test_an_answer_is_the_same_however_it_is_cut(kind: bytes, cuts: list[int]) -> None:
    @on_loop
    async def scenario() -> None:
        bench = Bench()
        answer = await bench.told(*pieces(kind, cuts))
        assert (answer.status, answer.content_type) == (200, "text/x")
        assert await answer.whole() == BODY
        assert bench.is_kept
        assert bench.shelf.unused_ones == [bench.connection]

    scenario()


@given(cuts=CUTS)
def test_without_a_length_the_end_is_the_end(cuts: list[int]) -> None:
    @on_loop
    async def scenario() -> None:
        bench = Bench()
        answer = await bench.told(*pieces(UNTIL_CLOSED, cuts))
        bench.wire.close_by_peer()
        assert await answer.whole() == BODY
        assert not bench.is_kept

    scenario()


@given(kind=st.sampled_from([CHUNKED, SIZED]), at=st.integers(1, 10_000), cuts=CUTS)
def test_what_is_cut_short_is_never_taken_for_whole(kind: bytes, at: int, cuts: list[int]) -> None:
    kind = kind[: max(1, at % len(kind))]

    @on_loop
    async def scenario() -> None:
        bench = Bench()
        asking = bench.ask()
        await bench.wire.asked.wait()
        for part in pieces(kind, cuts):
            bench.connection.data_received(part)
        bench.wire.close_by_peer()
        with pytest.raises(LegFailed) as failed:
            await (await asking).whole()
        assert failed.value.reason == "connection_lost"
        assert bench.shelf.closed_ones == [bench.connection]

    scenario()


@given(noise=st.binary(min_size=1, max_size=200), cuts=CUTS)
def test_noise_is_refused_and_closes(noise: bytes, cuts: list[int]) -> None:
    @on_loop
    async def scenario() -> None:
        bench = Bench()
        asking = bench.ask()
        await bench.wire.asked.wait()
        for part in pieces(b"\x00" + noise, cuts):
            bench.connection.data_received(part)
        with pytest.raises(LegFailed, match="no HTTP"):
            await asking
        assert not bench.wire.is_open

    scenario()


def case(scenario: Callable[[Bench], Awaitable[None]]) -> Callable[[], None]:
    @on_loop
    async def run() -> None:
        await scenario(Bench())

    return run


@case
async def test_head_and_body_leave_in_one_write(bench: Bench) -> None:
    await bench.told(SIZED)
    assert bench.wire.sent == b"POST\r\n\r\n{}"


@case
async def test_a_stream_is_read_as_it_comes(bench: Bench) -> None:
    head = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
    answer = await bench.told(head, b"3\r\none\r\n", b"3\r\ntwo\r\n")
    assert await answer.read() == b"onetwo"  # one piece for what came meanwhile
    reading = asyncio.create_task(answer.read())
    await asyncio.sleep(0)
    bench.connection.data_received(b"5\r\nthree\r\n0\r\n\r\n")
    assert await reading == b"three"
    assert await answer.read() == b""
    assert bench.is_kept


@case
async def test_what_has_come_is_read_before_what_broke_is_told(bench: Bench) -> None:
    answer = await bench.told(HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"3\r\none\r\n")
    bench.wire.close_by_peer()
    assert await answer.read() == b"one"
    with pytest.raises(LegFailed):
        await answer.read()


@case
async def test_an_engine_waits_for_who_does_not_read(bench: Bench) -> None:
    size = MAX_UNREAD_BYTES + 1
    answer = await bench.told(HEAD + b"Content-Length: %d\r\n\r\n" % (2 * size), bytes(size))
    assert not bench.wire.is_reading()
    assert len(await answer.read()) == size
    assert bench.wire.is_reading()
    bench.connection.data_received(bytes(size))
    assert len(await answer.read()) == size
    assert bench.is_kept
    assert bench.wire.is_reading()


@on_memory_loop
async def test_an_engine_that_had_to_wait_was_not_quiet_meanwhile() -> None:
    bench, size, quiet_s = Bench(), MAX_UNREAD_BYTES + 1, 0.05
    answer = await bench.told(HEAD + b"Content-Length: %d\r\n\r\n" % (2 * size), bytes(size))
    await asyncio.sleep(2 * quiet_s)
    bench.connection.give_up(quiet_s)
    assert len(await answer.read()) == size
    bench.connection.give_up(quiet_s)  # what it has said meanwhile is still in the kernel
    bench.connection.data_received(bytes(size))
    assert len(await answer.read()) == size
    bench.wire.asked.clear()
    answer = await bench.told(HEAD + b"Content-Length: 2\r\n\r\n.")
    assert await answer.read() == b"."
    await asyncio.sleep(2 * quiet_s)
    bench.connection.give_up(quiet_s)
    with pytest.raises(LegFailed, match="silent"):
        await answer.read()


@pytest.mark.parametrize(
    "answer",
    [
        SIZED.replace(b"HTTP/1.1", b"HTTP/1.0"),
        SIZED.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n", 1),
        SIZED + SIZED,  # one that was not asked for
    ],
)
def test_a_connection_is_not_used_again_after(answer: bytes) -> None:
    @on_loop
    async def scenario() -> None:
        bench = Bench()
        assert await (await bench.told(answer)).whole() == BODY
        assert not bench.shelf.unused_ones
        assert not bench.wire.is_open

    scenario()


@case
async def test_an_answer_to_what_has_not_left_yet_ends_the_connection(bench: Bench) -> None:
    bench.wire.unsent_bytes = 1
    assert await (await bench.told(SIZED)).whole() == BODY
    assert not bench.is_kept


@case
async def test_what_nobody_has_asked_for_closes(bench: Bench) -> None:
    bench.connection.data_received(SIZED)
    assert not bench.wire.is_open
    assert bench.shelf.closed_ones == [bench.connection]


@pytest.mark.parametrize("line", [b"X-%d: y\r\n", b"HTTP/1.1 100 Continue\r\n\r\n"])
def test_a_head_without_end_is_refused(line: bytes) -> None:
    @on_loop
    async def scenario() -> None:
        bench = Bench()
        asking = bench.ask()
        await bench.wire.asked.wait()
        bench.connection.data_received(b"" if line.startswith(b"HTTP") else HEAD)
        for number in range(MAX_QUIET_BYTES // 4):
            bench.connection.data_received(line % number if b"%" in line else line)
        with pytest.raises(LegFailed, match="too long"):
            await asking
        assert not bench.wire.is_open

    scenario()


@case
async def test_an_upgrade_is_refused(bench: Bench) -> None:
    with pytest.raises(LegFailed):
        await bench.told(b"HTTP/1.1 101 Switching\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n")
    assert not bench.wire.is_open


@case
async def test_an_answer_that_is_late_is_given_up(bench: Bench) -> None:
    with pytest.raises(LegFailed) as failed:
        await bench.ask(within_s=0.01)
    assert failed.value.reason == "timeout"
    assert not bench.wire.is_open


@case
async def test_a_stream_may_take_its_time_but_not_fall_silent(bench: Bench) -> None:
    answer = await bench.told(HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"3\r\none\r\n")
    answer.bound_silence(0.01)
    assert await answer.read() == b"one"
    with pytest.raises(LegFailed) as failed:
        await answer.read()
    assert failed.value.reason == "timeout"
    assert not bench.wire.is_open


@case
async def test_what_has_come_while_nobody_was_there_to_hear_it_is_no_silence(bench: Bench) -> None:
    answer = await bench.told(HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"3\r\none\r\n")
    answer.bound_silence(0.3)
    assert await answer.read() == b"one"
    reading = asyncio.create_task(answer.read())
    await asyncio.sleep(0)
    asyncio.get_running_loop().call_soon(bench.connection.data_received, b"3\r\ntwo\r\n")  # first of all, after that
    time.sleep(0.4)  # noqa: ASYNC251 the loop is stuck
    assert await reading == b"two"
    assert bench.wire.is_open
    with pytest.raises(LegFailed):
        await answer.read()


@case
async def test_who_is_cancelled_hangs_up(bench: Bench) -> None:
    asking = bench.ask()
    await bench.wire.asked.wait()
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert not bench.wire.is_open
    assert bench.shelf.closed_ones == [bench.connection]


@case
async def test_closing_what_is_not_whole_hangs_up(bench: Bench) -> None:
    answer = await bench.told(SIZED[:-1])
    answer.close()
    assert not bench.wire.is_open


@case
async def test_a_long_body_waits_for_the_engine_and_stops_with_its_answer(bench: Bench) -> None:
    body = bytes(4 << 20)
    bench.connection.pause_writing()
    asking = bench.ask(body=body)
    await bench.wire.asked.wait()
    bench.connection.data_received(b"HTTP/1.1 413 Too Large\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
    answer = await asking
    assert (answer.status, await answer.whole()) == (413, b"")
    assert len(bench.wire.sent) < len(body)
    assert not bench.wire.is_open


@case
async def test_an_answer_to_half_a_request_ends_the_connection(bench: Bench) -> None:
    """All that was written has left, but not all has been written: the engine would read the next request as the rest."""
    asking = bench.ask(body=bytes(4 << 20))
    await bench.wire.asked.wait()
    bench.connection.data_received(b"HTTP/1.1 413 Too Large\r\nContent-Length: 0\r\n\r\n")
    assert (await asking).status == 413
    assert len(bench.wire.sent) < 4 << 20
    assert not bench.is_kept
    assert not bench.wire.is_open


@case
async def test_a_long_request_leaves_a_connection_that_can_be_used_again(bench: Bench) -> None:
    asking = bench.ask(body=bytes(4 << 20))
    while len(bench.wire.sent) < 4 << 20:
        bench.wire.asked.clear()
        await bench.wire.asked.wait()
    bench.connection.data_received(SIZED)
    assert await (await asking).whole() == BODY
    assert bench.is_kept
