"""A gateway replaces another one while requests go on: real processes, before scripted nodes."""

import asyncio
import json
import os
import re
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import aiohttp
import pytest

from tests.gateway.scripted import Topology, topology
from tests.gateway.test_process import write_config
from tests.gateway.workers.test_supervisor import end_now, is_alive, is_whole, series
from tests.gateway.worlds import PATIENCE_S, until

pytestmark = [
    pytest.mark.long,
    pytest.mark.turns,
    pytest.mark.timeout(900),
]  # five starts of gateways, seconds each on an idle machine

SHORT: Final = {"model": "scripted", "prompt": "hello there", "stream": True}
CLIENTS: Final = 2  # of either kind: on a kept connection, on a new one for each request
PAUSE_S: Final = 0.05
START_S: Final = 120.0  # three on an idle machine


NOWHERE: Final = '[[gateway.nodes]]\nagent = "127.0.0.1:1"\n'
TIMEOUTS: Final = "[gateway.timeouts]\nstream_idle_s = 900\n"  # a stream is held for as long as gateways take to start


@dataclass
class Site:
    """Nodes, and the file of the gateway before them."""

    nodes: Topology
    path: Path
    url: str = ""
    running: list[asyncio.subprocess.Process] = field(default_factory=list)

    @property
    def log(self) -> Path:
        """What all gateways say."""
        return self.path.with_name("log")

    async def start(self, *more: str) -> asyncio.subprocess.Process:
        """A gateway that has said that it is ready, or has ended."""
        argv = [sys.executable, "-m", "gateway", "-c", str(self.path), *more]
        with self.log.open("a") as log:
            process = await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.PIPE, stderr=log)
        self.running.append(process)
        assert process.stdout is not None
        async with asyncio.timeout(START_S):
            line = (await process.stdout.readline()).decode().strip()
        if line:
            url = line.partition("url=")[2]
            assert self.url in ("", url)
            self.url = url
        return process


@asynccontextmanager
async def site(directory: Path) -> AsyncIterator[Site]:
    async with AsyncExitStack() as stack:
        nodes = await stack.enter_async_context(topology(remote=0, local=0, decode=2))
        path = write_config(directory, nodes)
        path.write_text(path.read_text() + TIMEOUTS)
        s = Site(nodes, path)
        try:
            yield s
        finally:
            for process in s.running:
                if process.returncode is None:
                    await end_now(process)
                await process.communicate()


class Load:
    """Requests without end, of clients that connect anew for each and of clients that keep their connection."""

    def __init__(self, url: str) -> None:
        self.outcomes = Counter[str]()
        self._url = url
        self._ends = False

    @asynccontextmanager
    async def going(self) -> AsyncIterator["Load"]:
        async with asyncio.TaskGroup() as group:
            for number in range(2 * CLIENTS):
                group.create_task(self._ask(keeps=number < CLIENTS))
            try:
                yield self
            finally:
                self._ends = True

    async def more(self, number: int) -> None:
        """Waits for so many more answers."""
        wanted = self.outcomes.total() + number
        await until(lambda: self.outcomes.total() >= wanted)

    async def _ask(self, *, keeps: bool) -> None:
        connector = aiohttp.TCPConnector(force_close=not keeps)
        async with aiohttp.ClientSession(self._url, connector=connector) as http:
            while not self._ends:
                try:
                    async with http.post("/v1/completions", json=SHORT) as answer:
                        whole = is_whole((answer.status, await answer.read()))
                        self.outcomes["whole" if whole else str(answer.status)] += 1
                except (aiohttp.ClientError, OSError) as error:
                    self.outcomes[repr(error)] += 1
                await asyncio.sleep(PAUSE_S)


async def words_of(answer: aiohttp.ClientResponse) -> str:
    events = [line.removeprefix("data: ") for line in (await answer.text()).splitlines() if line.startswith("data: {")]
    return "".join(each["choices"][0]["text"] for each in map(json.loads, events) if each["choices"])


@asynccontextmanager
async def held_stream(
    s: Site, http: aiohttp.ClientSession
) -> AsyncIterator[tuple[aiohttp.ClientResponse, Callable[[], None]]]:
    """A stream that has begun and goes on when the function is called."""
    gate = asyncio.Event()
    for node in s.nodes.decode:
        node.script.word_gate = gate
    async with http.post("/v1/completions", json=SHORT) as stream:
        for node in s.nodes.decode:
            node.script.word_gate = None
        yield stream, gate.set


async def goes_on(directory: Path, workers: tuple[int, ...]) -> None:
    """Gateways of so many processes, each in the place of the one before, and no request hears of it."""
    async with site(directory) as s:
        generations = [await s.start("--workers", str(workers[0]))]
        async with aiohttp.ClientSession(s.url) as http:
            async with http.post("/v1/completions", json=SHORT) as answer:
                right = await words_of(answer)
            # It begins at the first one, and ends when the last one serves.
            async with held_stream(s, http) as (stream, release), Load(s.url).going() as load:
                await load.more(20)
                for each in workers[1:]:
                    generations.append(await s.start("--workers", str(each), "--replace"))
                    await load.more(20)
                assert generations[0].returncode is None
                release()
                assert await words_of(stream) == right
        assert set(load.outcomes) == {"whole"}, load.outcomes
        async with asyncio.timeout(PATIENCE_S):
            assert [await each.wait() for each in generations[:-1]] == [0] * (len(workers) - 1)
        assert generations[-1].returncode is None
        async with aiohttp.ClientSession(s.url) as http:
            total = load.outcomes.total() + 2
            async with asyncio.timeout(PATIENCE_S):
                while await series(http, "prfaas_requests_total") < total:  # noqa: ASYNC110 in other processes
                    await asyncio.sleep(0.05)
            assert await series(http, "prfaas_requests_total") == total


def test_no_request_is_lost_when_a_gateway_is_replaced_twice(tmp_path: Path) -> None:
    asyncio.run(goes_on(tmp_path, (1, 1, 1)))


def test_no_request_is_lost_when_more_workers_replace_others(tmp_path: Path) -> None:
    asyncio.run(goes_on(tmp_path, (2, 3)))


def test_a_replacement_that_fails_leaves_the_one_before_as_it_was(tmp_path: Path) -> None:
    asyncio.run(stays(tmp_path))


async def stays(directory: Path) -> None:
    async with site(directory) as s:
        first = await s.start()
        text = s.path.read_text()
        async with Load(s.url).going() as load:
            # A file that is wrong; no node that is ready.
            s.path.write_text("[[[")
            assert await ended(await s.start("--replace")) == 2
            s.path.write_text(text.partition("[[gateway.nodes]]")[0] + NOWHERE)
            assert await ended(await s.start("--replace", "--ready-within", "1")) == 4
            await load.more(20)
        assert set(load.outcomes) == {"whole"}, load.outcomes
        assert first.returncode is None
        assert "not replaced, the gateway that runs goes on: no decode node was ready within 1 s" in s.log.read_text()
        # SIGUSR2 has it start its successor, by the file as it is now.
        s.path.write_text(text)
        first.send_signal(signal.SIGUSR2)
        async with asyncio.timeout(START_S):
            while is_alive(first.pid):  # noqa: ASYNC110 it is not asked for its status here
                await asyncio.sleep(0.05)
        async with aiohttp.ClientSession(s.url) as http, http.get("/readyz") as answer:
            assert answer.status == 200
        (successor,) = re.findall(r"started process (\d+) to replace this gateway", s.log.read_text())
        os.kill(int(successor), signal.SIGTERM)
        await until(lambda: not is_alive(int(successor)))


async def ended(process: asyncio.subprocess.Process) -> int:
    async with asyncio.timeout(START_S):
        return await process.wait()
