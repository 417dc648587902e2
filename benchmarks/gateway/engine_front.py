"""What mutual TLS on engine legs costs: CPU of the agent per token, and time until a first token.

An engine that computes nothing streams tokens as engines do: each decode step gives all streams one, one stream after the
other. Callers read them on its own port in clear, through an agent's TlsFront over mutual TLS, and through the floor: a
process that reads and writes each token in clear, and does nothing else. Engine, front, floor and callers are processes; the
ways take turns. CPU is that of the front's or the floor's process alone.
"""

import argparse
import asyncio
import json
import os
import select
import socket
import ssl
import statistics
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

import uvloop

from benchmarks.lib.processes import GreetingChild
from node.process.ports import ListenPort
from node.process.tls_front import TlsFront
from transport.control.certificates import Authority
from transport.wire.identity import Identity

HOST: Final = "127.0.0.1"
NAME: Final = "node"
REQUEST: Final = b"POST /v1/completions HTTP/1.1\r\nHost: engine\r\nContent-Length: %d\r\n\r\n"
PROMPT_BYTES: Final = 30_000  # a prompt of some 8,000 tokens
TOKEN: Final = b'data: {"id":"cmpl-0123456789abcdef","choices":[{"index":0,"text":" token","logprobs":null}]}\n\n'
HEAD: Final = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
CHUNK: Final = b"%x\r\n%b\r\n" % (len(TOKEN), TOKEN)
END: Final = b"0\r\n\r\n"
STEP_S: Final = 0.02  # between two tokens of a stream
READ_BYTES: Final = 1 << 16


class Steps:
    """Decode steps: each gives every stream that is there a token, and `apart_s` later the next stream its."""

    def __init__(self, tokens: int, apart_s: float) -> None:
        self._tokens = tokens
        self._apart_s = apart_s
        self._left: dict[asyncio.StreamWriter, int] = {}

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(int(head.rpartition(b"Content-Length: ")[2].split(b"\r")[0]))
                writer.write(HEAD + CHUNK)
                self._left[writer] = self._tokens - 1
        writer.close()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(STEP_S)
            at = time.perf_counter()
            for writer, left in list(self._left.items()):
                if left:
                    self._left[writer] = left - 1
                    writer.write(CHUNK)
                else:
                    del self._left[writer]
                    writer.write(END)
                at += self._apart_s
                while time.perf_counter() < at:  # what an engine's server computes for each of its streams
                    pass


async def serve_engine(tokens: int, apart_s: float) -> None:
    """Answers each request with a stream of tokens, one each STEP_S."""
    steps = Steps(tokens, apart_s)
    server = await asyncio.start_server(steps.answer, HOST, 0)
    print(json.dumps({"port": server.sockets[0].getsockname()[1]}), flush=True)
    running = asyncio.create_task(steps.run())
    await asyncio.to_thread(sys.stdin.read)
    running.cancel()


def serve_floor(engine_port: int) -> None:
    """Carries bytes both ways in clear, and answers as the front does."""
    listener = socket.create_server((HOST, 0), backlog=128)
    print(json.dumps({"port": listener.getsockname()[1]}), flush=True)
    threading.Thread(target=tell_cpu, daemon=True).start()
    ready, peers = select.epoll(), dict[int, socket.socket]()
    ready.register(listener, select.EPOLLIN)
    while True:
        for number, _ in ready.poll():
            if number == listener.fileno():
                outside, inside = listener.accept()[0], socket.create_connection((HOST, engine_port))
                for one, other in ((outside, inside), (inside, outside)):
                    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    peers[one.fileno()] = other
                    ready.register(one, select.EPOLLIN)
            elif data := os.read(number, READ_BYTES):
                peers[number].sendall(data)
            else:
                ready.unregister(number)


def tell_cpu() -> None:
    """Answers each line with the CPU seconds that this process has taken."""
    while sys.stdin.readline():
        print(json.dumps({"cpu_s": time.process_time()}), flush=True)


async def serve_front(identity: Identity, engine_port: int) -> None:
    """Answers a line on its standard input with the CPU seconds that it has taken."""
    front = TlsFront(identity)
    await front.start(ListenPort("engine_port", HOST, 0))
    front.open(f"http://{HOST}:{engine_port}")
    print(json.dumps({"port": int(front.url.rpartition(":")[2])}), flush=True)
    await asyncio.to_thread(tell_cpu)
    await front.close()


class Caller:
    """One kept connection to an engine or its front."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def stream(self) -> float:
        """Seconds until the first token of a stream that was read to its end."""
        began = time.perf_counter()
        self._writer.write(REQUEST % PROMPT_BYTES + bytes(PROMPT_BYTES))
        data = await self._reader.read(1 << 16)
        first_s = time.perf_counter() - began
        while not data.endswith(END):
            data = data[-len(END) :] + await self._reader.read(1 << 16)
        return first_s

    def close(self) -> None:
        self._writer.close()


async def callers(port: int, number: int, secure: ssl.SSLContext | None) -> list[Caller]:
    name = NAME if secure else None
    return [Caller(*await asyncio.open_connection(HOST, port, ssl=secure, server_hostname=name)) for _ in range(number)]


async def compare(folder: Path, streams: int, tokens: int, apart_us: float, rounds: int) -> dict[str, float]:
    """Medians over rounds that alternate."""
    authority = Authority(folder)
    node, gateway = authority.issue(NAME), replace(authority.issue("gateway"), peer_name=NAME)
    module = [sys.executable, "-m", "benchmarks.gateway.engine_front"]
    engine = GreetingChild([*module, "--engine", str(tokens), "--apart-us", str(apart_us)])
    files = [str(path) for path in (node.certificate, node.key, node.authority)]
    front = GreetingChild([*module, "--front", str(engine.greeting["port"]), *files])
    floor = GreetingChild([*module, "--floor", str(engine.greeting["port"])])
    children = {"floor": floor, "front": front}
    try:
        ways = {
            "floor": await callers(floor.greeting["port"], streams, None),
            "plain": await callers(engine.greeting["port"], streams, None),
            "front": await callers(front.greeting["port"], streams, gateway.client_context()),
        }
        first_s: dict[str, list[float]] = {way: [] for way in ways}
        cpu_us: dict[str, list[float]] = {way: [] for way in children}
        for _ in range(rounds):
            for way, ends in ways.items():
                first_s[way] += [await ends[0].stream()]  # alone: what one caller waits
                child = children.get(way)
                between_s = child.ask()["cpu_s"] if child is not None else 0.0
                await asyncio.gather(*(end.stream() for end in ends))
                if child is not None:
                    cpu_us[way].append((child.ask()["cpu_s"] - between_s) / (streams * tokens) * 1e6)
        for ends in ways.values():
            for end in ends:
                end.close()
    finally:
        for child in (front, floor, engine):
            child.close()
    plain_ms, front_ms = (statistics.median(first_s[way]) * 1e3 for way in ("plain", "front"))
    return {
        "cpu_us_per_token": statistics.median(cpu_us["front"]),
        "least_cpu_us_per_token": min(cpu_us["front"]),
        "floor_cpu_us_per_token": statistics.median(cpu_us["floor"]),
        "least_floor_cpu_us_per_token": min(cpu_us["floor"]),
        "plain_first_token_ms": plain_ms,
        "front_first_token_ms": front_ms,
        "added_ms": front_ms - plain_ms,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=32, help="at once")
    parser.add_argument("--tokens", type=int, default=100, help="of each stream")
    parser.add_argument("--apart-us", type=float, default=20.0, help="between two streams of a step")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--engine", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--floor", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--front", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.engine is not None:
        uvloop.run(serve_engine(args.engine, args.apart_us * 1e-6))
    elif args.floor is not None:
        serve_floor(args.floor)
    elif args.front is not None:
        port, *files = args.front
        identity = Identity(**dict(zip(("certificate", "key", "authority"), map(Path, files), strict=True)))
        uvloop.run(serve_front(identity, int(port)))
    else:
        with tempfile.TemporaryDirectory() as folder:
            found = uvloop.run(compare(Path(folder), args.streams, args.tokens, args.apart_us, args.rounds))
        if args.json:
            print(json.dumps({"load_average": os.getloadavg(), **found}, indent=1))
            return
        print(f"load average {os.getloadavg()[0]:.1f}; medians of {args.rounds} rounds, {args.streams} streams at once")
        for what, key in (("the agent", "cpu_us_per_token"), ("the floor", "floor_cpu_us_per_token")):
            print(f"CPU of {what}     {found[key]:6.1f} µs a token, {found[f'least_{key}']:.1f} in the best round")
        print(f"first token          {found['plain_first_token_ms']:6.2f} ms plain, alone")
        print(f"                     {found['front_first_token_ms']:6.2f} ms through the front, alone")
        print(f"added                {found['added_ms']:6.2f} ms")


if __name__ == "__main__":
    main()
