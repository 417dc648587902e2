"""What leaves for a client, as bytes."""

import asyncio
import json
from email.utils import parsedate_to_datetime

import pytest

from tests.gateway.memory.pipeline import on_memory_loop, pipeline
from tests.gateway.worlds import Deployment, on_loop, world

FIELDS = {"model": "scripted", "prompt": "hello there"}
HOST = "Host: x\r\nContent-Type: application/json\r\n"
SSE = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"}


class Client:
    """Says HTTP by hand."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def of(cls, each: Deployment) -> "Client":
        return cls(*await each.connect())

    def ask(self, version: str, headers: str = "", **fields: object) -> None:
        body = json.dumps({**FIELDS, **fields})
        head = f"POST /v1/completions HTTP/{version}\r\n{HOST}{headers}Content-Length: {len(body)}\r\n\r\n"
        self._writer.write(f"{head}{body}".encode())

    async def head(self) -> tuple[str, dict[str, str]]:
        lines = (await self._reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")[:-2]
        headers = dict(line.split(": ", 1) for line in lines[1:])
        parsedate_to_datetime(headers.pop("Date"))
        assert "Server" not in headers
        return lines[0], {name.lower(): value for name, value in headers.items()}

    async def exactly(self, size: int) -> bytes:
        return await self._reader.readexactly(size)

    async def chunks(self) -> bytes:
        body = b""
        while size := int(await self._reader.readuntil(b"\r\n"), 16):
            body += await self._reader.readexactly(size)
            assert await self._reader.readexactly(2) == b"\r\n"
        assert await self._reader.readexactly(2) == b"\r\n"
        return body

    async def rest(self) -> bytes:
        """Until the gateway closes."""
        return await self._reader.read()

    def close(self) -> None:
        self._writer.close()


@on_memory_loop
async def test_a_whole_answer_has_a_length_and_the_connection_goes_on() -> None:
    async with pipeline(remote=0, local=0, decode=1) as each:
        client = await Client.of(each)
        for number in ("a", "b"):
            client.ask("1.1", f"x-request-id: {number}\r\n")
            line, headers = await client.head()
            body = await client.exactly(int(headers.pop("content-length")))
            assert line == "HTTP/1.1 200 OK"
            assert json.loads(body)["choices"][0]["text"] == "one two three"
            assert headers == {
                "x-request-id": number,
                "content-type": "application/json; charset=utf-8",
                "x-prfaas-route": headers["x-prfaas-route"],
                "x-content-type-options": "nosniff",
            }
        client.close()


@on_memory_loop
async def test_a_stream_is_chunked_and_the_connection_goes_on() -> None:
    async with pipeline(remote=0, local=0, decode=1) as each:
        client = await Client.of(each)
        for _ in range(2):
            client.ask("1.1", stream=True)
            line, headers = await client.head()
            body = await client.chunks()
            assert line == "HTTP/1.1 200 OK"
            assert headers.items() >= SSE.items()
            assert headers["transfer-encoding"] == "chunked"
            assert "connection" not in headers
            assert body.endswith(b"data: [DONE]\n\n")
            assert body.count(b"\n\n") == 4
        client.close()


@pytest.mark.parametrize("headers", ["", "Connection: keep-alive\r\n"])
def test_a_stream_for_http_1_0_ends_with_its_connection(headers: str) -> None:
    @on_memory_loop
    async def scenario() -> None:
        async with pipeline(remote=0, local=0, decode=1) as each:
            client = await Client.of(each)
            client.ask("1.0", headers, stream=True)
            line, told = await client.head()
            assert line == "HTTP/1.0 200 OK"
            assert not {"transfer-encoding", "content-length", "connection"} & told.keys()
            assert (await client.rest()).endswith(b"data: [DONE]\n\n")
            client.close()

    scenario()


@pytest.mark.parametrize(
    ("version", "headers", "connection"),
    [("1.1", "Connection: close\r\n", "close"), ("1.0", "", None), ("1.0", "Connection: keep-alive\r\n", "keep-alive")],
)
def test_a_connection_is_kept_as_its_client_wants(version: str, headers: str, connection: str | None) -> None:
    @on_memory_loop
    async def scenario() -> None:
        async with pipeline(remote=0, local=0, decode=1) as each:
            client = await Client.of(each)
            for _ in range(2 if connection == "keep-alive" else 1):
                client.ask(version, headers)
                _, told = await client.head()
                assert told.get("connection") == connection
                assert json.loads(await client.exactly(int(told["content-length"])))["id"] == "x"
            if connection != "keep-alive":
                assert await client.rest() == b""
            client.close()

    scenario()


@on_memory_loop
async def test_a_stream_that_breaks_ends_as_a_stream_does() -> None:
    async with pipeline(remote=0, local=0, decode=1) as each:
        each.nodes.decode[0].script.decode = ["die_after_first"]
        client = await Client.of(each)
        client.ask("1.1", stream=True)
        await client.head()
        events = (await client.chunks()).split(b"\n\n")
        assert json.loads(events[-2].removeprefix(b"data: "))["error"]["code"] == "stream_broken"
        client.close()


@on_loop
async def test_a_long_answer_arrives_whole() -> None:
    async with world(remote=0, local=0, decode=1) as each:
        each.nodes.decode[0].script.words = ("x" * (3 << 20),)
        response = await each.complete()
        assert (await response.json())["choices"][0]["text"] == "x" * (3 << 20)
