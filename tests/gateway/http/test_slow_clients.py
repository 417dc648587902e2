"""Clients that are slow, half gone or gone, before a gateway that is a process of its own: what they hold, and for how long.

`python -m tests.gateway.http.test_slow_clients [STREAMS]` says what idle streams cost the gateway in memory and CPU.
"""

import asyncio
import json
import os
import re
import resource
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from tests.gateway.scripted import Topology, topology
from tests.gateway.test_process import process, until_ready
from tests.gateway.worlds import PATIENCE_S, on_loop

pytestmark = pytest.mark.long

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
MIB = 1 << 20
WORD = "x" * 50_000
WORDS = 1000  # 50 MB, more than all buffers on the way: a receiving one may grow to 32 MiB
SLOW = 8
STREAMS_OF_A_WORKER = 4000  # two descriptors each
HELD_BYTES = 2 * MIB  # for each slow client at most: what was read of the engine, what waits to be sent


@asynccontextmanager
async def gateway(more: str = "") -> AsyncIterator[tuple[int, str, Topology]]:
    """Its process, where it listens and its nodes."""
    with tempfile.TemporaryDirectory() as folder:
        async with topology(decode=1) as nodes, process(Path(folder), nodes, more) as (running, url):
            async with aiohttp.ClientSession(url) as http:
                await until_ready(http)
            yield running.pid, url, nodes


@asynccontextmanager
async def connection(
    url: str, buffer_bytes: int = 0
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A client that takes in so little at once."""
    plain = socket.socket()
    if buffer_bytes:
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
    plain.setblocking(False)
    host, _, port = url.removeprefix("http://").rpartition(":")
    await asyncio.get_running_loop().sock_connect(plain, (host, int(port)))
    reader, writer = await asyncio.open_connection(sock=plain, limit=1)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


def asking(stream: bool = True) -> bytes:
    body = json.dumps({"model": "scripted", "prompt": "hello there", "stream": stream}).encode()
    return HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body


def rss_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()


def is_running(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def family(pid: int) -> list[int]:
    """A gateway's process and its workers."""
    return [pid, *(int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]


def pss_bytes(pids: list[int]) -> int:
    """What processes have in memory, each page that they share counted once."""
    found = (re.search(r"^Pss: +(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.M) for pid in pids)
    return sum(1024 * int(each[1]) for each in found if each)


def cpu_s(pids: list[int]) -> float:
    tasks = (task for pid in pids for task in Path(f"/proc/{pid}/task").iterdir())
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) * 1e-9


async def until_running(nodes: Topology, number: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while nodes.decode[0].running != number:  # noqa: ASYNC110 it changes when another process hangs up
            await asyncio.sleep(0.005)


async def answer(url: str) -> bytes:
    async with aiohttp.ClientSession(url) as http, asyncio.timeout(PATIENCE_S):
        body = {"model": "scripted", "prompt": "hello there", "stream": True}
        async with http.post("/v1/completions", json=body) as response:
            return await response.read()


@on_loop
async def test_clients_that_read_a_byte_at_a_time_hold_little_memory_and_nobody_up() -> None:
    async with gateway() as (pid, url, nodes), AsyncExitStack() as stack, asyncio.timeout(PATIENCE_S):
        assert b"three" in await answer(url)
        before = rss_bytes(pid)
        nodes.decode[0].script.words = (WORD,) * WORDS
        slow = [await stack.enter_async_context(connection(url, 4096)) for _ in range(SLOW)]
        for _, writer in slow:
            writer.write(asking())
        await until_running(nodes, SLOW)
        for reader, _ in slow:
            assert await reader.readexactly(1) == b"H"
        nodes.decode[0].script.words = ("one", " three")
        for _ in range(20):
            assert b"three" in await answer(url)
            for reader, _ in slow:
                assert len(await reader.readexactly(1)) == 1
        assert nodes.decode[0].running == SLOW  # the engine waits for them
        assert rss_bytes(pid) - before < SLOW * HELD_BYTES
        for _, writer in slow:
            writer.transport.abort()
        await until_running(nodes, 0)
        for stream in (False, True):  # a client that has sent everything still listens
            async with connection(url) as (reader, writer):
                nodes.decode[0].script.word_interval_s = 0.02
                writer.write(asking(stream))
                writer.write_eof()
                told = await reader.read()
                assert b" 200 OK" in told
                assert b"three" in told


@on_loop
async def test_what_does_not_come_holds_nothing_for_long() -> None:
    room = 64 * 1024
    limits = f"max_body_bytes = {room}\n[gateway.strangers]\nmax_receiving_bytes = {room}\n"
    slow = "header_s = 0.3\nbody_grace_s = 0.3\nmin_body_bytes_per_s = 256\n"
    async with gateway(limits + slow) as (_, url, nodes), asyncio.timeout(PATIENCE_S):
        whole = asking()
        for start in (whole[:20], whole[:-5]):
            async with connection(url) as (reader, writer):
                writer.write(start)
                told = await reader.read(1 << 16)
                assert told.startswith(b"HTTP/1.1 408 ")
                assert b'"code":"request_timeout"' in told
        async with connection(url) as (reader, _):
            assert not await reader.read()  # a client that has said nothing is told nothing
        for leaves in (close, reset, close_one_half):
            async with connection(url) as (_, writer):
                writer.write(HEAD + b"Content-Length: %d\r\n\r\n" % room + b" " * (room - 10))
                await until_let_in(url, False)
                leaves(writer)
                await until_let_in(url, True)  # minutes before the body had to be there
        assert not nodes.decode[0].running


def close(writer: asyncio.StreamWriter) -> None:
    writer.close()


def reset(writer: asyncio.StreamWriter) -> None:
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


def close_one_half(writer: asyncio.StreamWriter) -> None:
    writer.write_eof()


async def until_let_in(url: str, is_wanted: bool) -> None:
    while await is_let_in(url) is not is_wanted:  # noqa: ASYNC110 it changes in another process
        await asyncio.sleep(0.01)


async def is_let_in(url: str) -> bool | None:
    """Whether there is room for another body that does not come with its head. None: we were too slow to find out."""

    async def body() -> AsyncIterator[bytes]:
        yield asking(False).partition(b"\r\n\r\n")[2]

    headers = {"Content-Type": "application/json"}
    async with (
        aiohttp.ClientSession(url) as http,
        http.post("/v1/completions", data=body(), headers=headers) as response,
    ):
        assert response.status in (200, 408, 429)
        return None if response.status == 408 else response.status == 200


async def hold(url: str, streams: int) -> None:
    """Begins so many streams, says so, and holds them until standard input ends."""
    async with AsyncExitStack() as stack:
        for _ in range(streams):
            reader, writer = await stack.enter_async_context(connection(url))
            writer.write(asking())
            while b"data: " not in await reader.read(65536):
                pass
        print("begun", flush=True)
        await asyncio.to_thread(sys.stdin.read)


async def main(streams: int) -> None:
    workers = -(-streams // STREAMS_OF_A_WORKER)
    async with gateway(f"max_in_flight = {streams}\nworkers = {workers}\n") as (pid, url, nodes):
        await answer(url)
        nodes.decode[0].script.word_interval_s = 1000.0
        pids = family(pid)
        before, began_s = pss_bytes(pids), cpu_s(pids)
        clients = await asyncio.create_subprocess_exec(
            sys.executable, "-m", __spec__.name, url, str(streams), stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert clients.stdin is not None
        assert clients.stdout is not None
        assert await clients.stdout.readline() == b"begun\n"
        held, idle_at, idle_cpu_s = pss_bytes(pids), time.monotonic(), cpu_s(pids)
        await asyncio.sleep(10.0)
        share = (cpu_s(pids) - idle_cpu_s) / (time.monotonic() - idle_at)
        print(
            f"{streams} idle streams, {workers} workers: {(held - before) / streams / 1024:.1f} KiB each, "
            f"{held / MIB:.0f} MiB in all, {1e3 * (idle_cpu_s - began_s) / streams:.2f} ms of CPU to begin each, "
            f"{share:.1%} of a core while they idle; load {os.getloadavg()[0]:.1f}"
        )
        clients.stdin.close()
        await clients.wait()
        async with asyncio.timeout(PATIENCE_S):
            await until_running(nodes, 0)
            os.kill(pid, signal.SIGTERM)  # workers share files, which end with their parent
            while is_running(pid):  # noqa: ASYNC110 another process ends
                await asyncio.sleep(0.01)


if __name__ == "__main__":
    match sys.argv[1:]:
        case [url, streams]:
            asyncio.run(hold(url, int(streams)))
        case arguments:
            asyncio.run(main(int(arguments[0]) if arguments else 1000))
