"""What strangers do to the port: slow, idle, malformed, too many, half-closed. Honest requests pass."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from gateway.config.gateway import Strangers
from gateway.http.connections import ClientConnection, ConnectionState, Gate
from gateway.http.listener import client_connections
from gateway.telemetry.metrics import Metrics
from tests.gateway.memory.pipeline import on_memory_loop, pipeline
from tests.gateway.scripted import topology
from tests.gateway.worlds import PATIENCE_S, Deployment, config_for, on_loop, until, world
from tests.transport.path.ports import free_port

COMPLETION = json.dumps({"model": "scripted", "prompt": "hello there"}).encode()
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


class Raw:
    """A client that says exactly what it is told to."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def say(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of the next answer that is no 1xx."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        first, *lines = head.decode().splitlines()
        status = int(first.split()[1])
        if status < 200:
            return await self.answer()
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)}
        return status, headers, await self.reader.readexactly(int(headers.get("content-length", 0)))

    async def ended(self) -> bool:
        """Whether the gateway has closed the connection, after whatever it still said."""
        try:
            while await self.reader.read(65536):
                pass
        except ConnectionResetError:
            pass
        return True


@asynccontextmanager
async def raw(w: Deployment) -> AsyncIterator[Raw]:
    reader, writer = await w.connect()
    try:
        yield Raw(reader, writer)
    finally:
        writer.close()
        await asyncio.gather(writer.wait_closed(), return_exceptions=True)


async def turned_away(w: Deployment, reason: str) -> float:
    counted = (line for line in (await w.metrics()).splitlines() if "turned_away_total{" in line)
    lines = [line for line in counted if f'reason="{reason}"' in line]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def is_openai(body: bytes) -> bool:
    return set(json.loads(body)["error"]) == {"message", "type", "param", "code"}


@on_loop
async def test_slow_bodies_take_no_place_and_end_by_themselves() -> None:
    strangers = Strangers(body_grace_s=1.5)
    async with world(max_in_flight=2, strangers=strangers) as w, AsyncExitStack() as stack:
        slow = [await stack.enter_async_context(raw(w)) for _ in range(20)]
        for each in slow:
            await each.say(HEAD + b"Content-Length: 1000\r\n\r\n{")
        assert (await w.complete("hello there")).status == 200
        for each in slow:
            status, _, body = await each.answer()
            assert (status, json.loads(body)["error"]["code"]) == (408, "request_timeout")


@on_loop
async def test_whoever_sends_a_request_gets_in_however_many_connections_are_held() -> None:
    async with world(strangers=Strangers(max_connections=30)) as w, AsyncExitStack() as stack:
        idle = [await stack.enter_async_context(raw(w)) for _ in range(60)]
        for each in idle[30:45]:
            await each.say(HEAD + b"Content-Length: 1000\r\n\r\n{")
        for _ in range(5):
            assert (await w.complete("hello there")).status == 200
        await asyncio.gather(*(each.ended() for each in idle[:20]))  # those that had waited for longest
        assert await turned_away(w, "too_many") >= 30
        assert "prfaas_connections{" in await w.metrics()


@on_loop
async def test_a_head_that_does_not_come_ends_its_connection() -> None:
    async with world(strangers=Strangers(header_s=1.0, idle_s=1.0)) as w, raw(w) as silent, raw(w) as used:
        await silent.say(b"POST /v1/compl")
        await used.say(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await used.answer())[0] == 200
        assert await silent.ended()
        assert await used.ended()
        assert (await turned_away(w, "no_request"), await turned_away(w, "idle")) == (1, 1)


class Broken(ClientConnection):
    """A connection about which nothing can be found out."""

    def __init__(self, gate: Gate) -> None:
        self.gate, self.state, self.address = gate, ConnectionState.NEW, "10.0.0.1"
        self.ended = False

    @property
    def has_said_nothing(self) -> bool:
        raise ValueError("negative file descriptor")

    def end(self) -> None:
        self.ended = True


class Silent(Broken):
    @property
    def has_said_nothing(self) -> bool:
        return True


def test_an_error_of_one_connection_leaves_the_others_to_the_gate() -> None:
    now = [0.0]
    gate = Gate("clients", 100, Strangers(header_s=1.0), Metrics(), lambda: now[0])
    connections = [Broken(gate), Silent(gate)]
    for each in connections:
        gate.opened(each)
    now[0] = 2.0
    gate.sweep()
    assert [each.ended for each in connections] == [True, True]
    for each in connections:
        gate.closed(each)
    assert len(gate) == 0


def test_loopback_and_proxies_that_are_trusted_speak_for_many() -> None:
    limits = Strangers(trusted_proxies=("10.1.2.3",))
    assert [limits.trusts(each) for each in ("127.0.0.1", "::1", "10.1.2.3", "10.1.2.4", "")] == [True] * 3 + [
        False
    ] * 2


def test_connections_of_clients_leave_descriptors_for_everything_else() -> None:
    @on_loop
    async def scenario() -> None:
        async with topology() as nodes:
            config = config_for(nodes, max_in_flight=100)
            assert client_connections(config, 20_000) < 20_000 - 200
            assert client_connections(config, 1024) == 1024 - 200 - 448
            assert client_connections(config, 400) == 100
            assert client_connections(config_for(nodes, strangers=Strangers(max_connections=7)), 20_000) == 7

    scenario()


@pytest.mark.parametrize(
    ("request_bytes", "expected"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\nbad header\r\n\r\n", 400),
        (b"GET /livez HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 20_000 + b"\r\n\r\n", 400),
        (HEAD + b"Content-Length: 5\r\nExpect: miracles\r\n\r\n", 417),
        (b"GET /nothing HTTP/1.1\r\nHost: x\r\nExpect: miracles\r\n\r\n", 417),
        (HEAD + b"Content-Length: 99999999999\r\nExpect: 100-continue\r\n\r\n", 413),
        (HEAD + b"Content-Length: 99999999999\r\n\r\n", 413),
        (HEAD + b"Content-Length: 4\r\nContent-Encoding: gzip\r\n\r\nabcd", 400),
        (HEAD + b"Content-Length: 4\r\nContent-Encoding: nonsense\r\n\r\nabcd", 415),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
    ],
)
def test_what_aiohttp_refuses_itself_has_the_apis_shape(request_bytes: bytes, expected: int) -> None:
    @on_memory_loop
    async def scenario() -> None:
        async with pipeline() as w, raw(w) as client:
            await client.say(request_bytes)
            status, headers, body = await client.answer()
            assert (status, headers["content-type"]) == (expected, "application/json")
            assert is_openai(body)

    scenario()


@on_memory_loop
async def test_a_client_that_expects_100_continue_gets_it_and_its_answer() -> None:
    async with pipeline() as w, raw(w) as client:
        await client.say(HEAD + b"Content-Length: %d\r\nExpect: 100-continue\r\n\r\n" % len(COMPLETION))
        assert (await client.reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100 ")
        await client.say(COMPLETION)
        assert (await client.answer())[0] == 200


@on_memory_loop
async def test_malformed_connections_are_counted_and_log_a_line_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    async with pipeline() as w:
        for _ in range(5):
            async with raw(w) as client:
                await client.say(b"nonsense\r\n\r\n")
                assert (await client.answer())[0] == 400
        assert await turned_away(w, "malformed") == 5
        assert sum("malformed" in record.getMessage() for record in caplog.records) == 1


@on_memory_loop
async def test_a_key_that_is_too_long_to_be_read_is_in_no_log_and_no_answer(caplog: pytest.LogCaptureFixture) -> None:
    async with pipeline() as w, raw(w) as client:
        await client.say(
            b"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer secret" + b"y" * 20_000 + b"\r\n\r\n"
        )
        status, _, body = await client.answer()
    assert (status, b"Got more than 8190 bytes" in body, b"secret" in body) == (400, True, False)
    assert any("Got more than 8190 bytes" in record.getMessage() for record in caplog.records)
    assert "secret" not in caplog.text


@on_loop
async def test_a_half_closed_client_gets_its_answer() -> None:
    async with world() as w:
        for stream in (False, True):
            async with raw(w) as client:
                gate = w.nodes.local[0].script.prefill_gate = asyncio.Event()
                body = json.dumps({"model": "scripted", "prompt": "hello there", "stream": stream}).encode()
                await client.say(HEAD + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
                client.writer.write_eof()
                await until(lambda: w.nodes.local[0].running)
                async with w.http.get("/health") as asked_later:  # than the client's end of file came
                    assert asked_later.status == 200
                gate.set()
                async with asyncio.timeout(PATIENCE_S):
                    answer = await client.reader.read()
                assert b" 200 OK" in answer
                assert b"three" in answer
            await until(lambda: not w.nodes.leftovers(), w.nodes.leftovers)
    assert w.nodes.leftovers() == []


@on_loop
async def test_operators_have_a_port_of_their_own() -> None:
    async with world(metrics_port=free_port()) as w:
        base = w.gateway.metrics_url.removesuffix("/metrics")
        for path in ("/metrics", "/prfaas/requests"):
            async with w.http.get(path) as hidden:
                assert hidden.status == 404
            async with w.http.get(base + path) as shown:
                assert shown.status == 200
        async with w.http.get(base + "/health") as health:
            assert health.status == 200
