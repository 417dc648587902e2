"""`python -m tests.storm.crowd --connections 10000`: crowds of strangers before every port, one after the other.

Half of them connect and say nothing, half send a byte of a request each second, and those turned away come back. They come
from a hundred addresses. It passes if honest requests get the right tokens, their P90 is hardly longer than without a crowd
(the mean over all ports; a single one's ratio is printed), nothing grows, and everything is ready when a crowd has left.
"""

import argparse
import asyncio
import contextlib
import math
import multiprocessing
import random
import socket
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import cycle, islice
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

import aiohttp

from engine.torch.tiny import build_model
from prfaas.demo.client import complete
from tests.e2e.tls import is_wanted
from tests.storm.system import StormSystem
from tests.storm.traffic import Question, questions

REQUESTS: Final = 100
TOKENS: Final = 4  # of each answer
START_S: Final = 180.0
PATIENCE_S: Final = 60.0
ADDRESSES: Final = 100  # 127.0.1.1 to 127.0.1.100
AT_ONCE: Final = 200  # connections that a crowd opens at a time
BYTE_EVERY_S: Final = 1.0
# The crowd is a process of this machine: on two cores it takes time from those whom it wants to keep away.
MOST_RATIO: Final = 1.25
MARGIN_BYTES: Final = 48 << 20
PER_STRANGER_BYTES: Final = 20 << 10  # gRPC takes 17 KiB for a connection on which nothing was said yet
HEAD: Final = b"POST /v1/completions HTTP/1.1\r\nHost: gateway\r\nContent-Length: 100000\r\n\r\n" + b"x" * 100_000
PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0" * 100_000


@dataclass(frozen=True, slots=True)
class Round:
    """A hundred honest requests, one after the other: seconds each, and what was wrong."""

    latencies_s: list[float]
    wrong: int

    @property
    def p90_s(self) -> float:
        return statistics.quantiles(self.latencies_s, n=10)[-1]


class Crowd:
    """A process that holds connections to one port, until it is told to leave."""

    def __init__(self, port: int, size: int, opening: bytes) -> None:
        self._ours, theirs = multiprocessing.Pipe()
        self._process = multiprocessing.get_context("spawn").Process(
            target=_crowd, args=(theirs, port, size, opening), daemon=True
        )
        self._process.start()
        theirs.close()

    def wait(self) -> None:
        """Until everybody has come once."""
        if not self._ours.poll(PATIENCE_S):
            raise TimeoutError("the crowd did not come")
        self._ours.recv()

    def leave(self) -> tuple[int, int]:
        """How many connections stood at the end, and how many had been closed by the other side until then."""
        self._ours.send(None)
        standing, closed = self._ours.recv() if self._ours.poll(PATIENCE_S) else (0, 0)
        self._process.join(PATIENCE_S)
        self._process.kill()
        return standing, closed


def _crowd(told: Connection, port: int, size: int, opening: bytes) -> None:
    asyncio.run(_gather(told, port, size, opening))


async def _gather(told: Connection, port: int, size: int, opening: bytes) -> None:
    loop = asyncio.get_running_loop()
    gate, counts = asyncio.Semaphore(AT_ONCE), {"standing": 0, "closed": 0, "came": 0}
    all_came, over = asyncio.Event(), asyncio.Event()

    async def stranger(number: int) -> None:
        said = opening if number % 2 else b""
        while True:
            with contextlib.suppress(OSError):
                await visit(f"127.0.1.{1 + number % ADDRESSES}", said)
            await asyncio.sleep(BYTE_EVERY_S)

    async def visit(source: str, said: bytes) -> None:
        async with gate:
            sock = socket.socket()
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_IP, getattr(socket, "IP_BIND_ADDRESS_NO_PORT", 24), 1)
            try:
                sock.bind((source, 0))
                async with asyncio.timeout(PATIENCE_S):
                    await loop.sock_connect(sock, ("127.0.0.1", port))
            except BaseException:
                sock.close()
                raise
            finally:
                counts["came"] += 1
                if counts["came"] >= size:
                    all_came.set()
        counts["standing"] += 1
        listening = asyncio.create_task(_until_closed(sock))
        try:
            for byte in said:
                done, _ = await asyncio.wait({listening}, timeout=BYTE_EVERY_S)
                if done:
                    break
                sock.send(bytes([byte]))
            await listening
        finally:
            listening.cancel()
            sock.close()
            counts["standing"] -= 1
            counts["closed"] += 1

    strangers = [asyncio.create_task(stranger(number)) for number in range(size)]
    loop.add_reader(told.fileno(), over.set)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(PATIENCE_S - 5.0):
            await all_came.wait()
    told.send(None)
    await over.wait()
    told.send((counts["standing"], counts["closed"]))
    for each in strangers:
        each.cancel()
    await asyncio.gather(*strangers, return_exceptions=True)


async def _until_closed(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    with contextlib.suppress(OSError):
        while await loop.sock_recv(sock, 4096):
            pass


async def honest(session: aiohttp.ClientSession, api_url: str, asked: list[Question]) -> Round:
    """A hundred requests, one after the other."""
    latencies, wrong = [], 0
    for number, question in enumerate(islice(cycle(asked), REQUESTS)):
        body = {"model": "tiny", "prompt": question.prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
        began = time.monotonic()
        answer = await complete(session, api_url, body, f"honest-{number}")
        latencies.append(time.monotonic() - began)
        wrong += answer.token_ids != question.answer[:TOKENS]
    return Round(latencies, wrong)


async def main(arguments: argparse.Namespace) -> int:
    home = Path(arguments.home or tempfile.mkdtemp(prefix="crowd-"))
    build_model("kimi_linear", home / "model", report=lambda line: None)
    asked = await asyncio.to_thread(questions, home / "model", 1)
    random.Random(arguments.seed).shuffle(asked)
    print(f"{arguments.connections} strangers at a time; logs in {home}", flush=True)
    failures: list[str] = []
    async with StormSystem(home / "model", home, has_tls=arguments.tls) as system, system.client() as session:
        if not await system.until_ready(session, START_S):
            print("FAILED: the system did not start:", (home / "up.log").read_text()[-2000:])
            return 1
        await honest(session, system.api_url, asked)  # caches and clocks are warm from here on
        rss = {each.pid: each for each in system.processes()}
        print(f"{'port':28} {'standing':>8} {'closed':>7} {'P90 alone':>10} {'in crowd':>9} {'ratio':>6}", flush=True)
        ratios = []
        before = await honest(session, system.api_url, asked)
        for name, port in system.ports().items():
            crowd = Crowd(port, arguments.connections, PREFACE if name.startswith("control") else HEAD)
            try:
                await asyncio.to_thread(crowd.wait)
                within = await honest(session, system.api_url, asked)
            finally:
                standing, closed = await asyncio.to_thread(crowd.leave)
            after = await honest(session, system.api_url, asked)
            alone_s = (before.p90_s + after.p90_s) / 2
            ratios.append(within.p90_s / alone_s)
            print(
                f"{name:28} {standing:8} {closed:7} {alone_s * 1e3:7.1f} ms {within.p90_s * 1e3:6.1f} ms "
                f"{ratios[-1]:6.2f}",
                flush=True,
            )
            wrong = within.wrong + after.wrong
            failures += [f"{name}: {wrong} answers were wrong"] if wrong else []
            if not await system.ready(session):
                failures.append(f"{name}: not every node is ready after its crowd")
            before = after
        middle = math.exp(statistics.fmean(map(math.log, ratios)))
        print(f"ratio of P90s over all ports: {middle:.2f} (geometric mean), {max(ratios):.2f} at most")
        if middle > MOST_RATIO:
            failures.append(f"honest requests took {middle:.2f} as long")
        for each in system.processes():
            first = rss.get(each.pid)
            if first is None:
                failures.append(f"{each.kind} {each.node} was started again")
            elif each.rss_bytes > first.rss_bytes * 1.25 + MARGIN_BYTES + arguments.connections * PER_STRANGER_BYTES:
                failures.append(
                    f"{each.kind} {each.node} grew from {first.rss_bytes >> 20} to {each.rss_bytes >> 20} MiB"
                )
        failures += await system.end(90.0)
    for failure in failures:
        print("FAILED:", failure)
    print("the crowds have left:", "something broke" if failures else "within limits")
    return 1 if failures else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.storm.crowd", description=__doc__)
    parser.add_argument("--connections", type=int, default=10_000)
    parser.add_argument("--seed", default="1")
    parser.add_argument("--tls", action="store_true", default=is_wanted(), help="mutual TLS on every hop")
    parser.add_argument("--home", help="where logs are kept (default: a new temporary directory)")
    sys.exit(asyncio.run(main(parser.parse_args())))
