"""A gateway of several processes: real ones, before scripted nodes."""

import asyncio
import json
import os
import re
import signal
import socket
import sys
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

import aiohttp
import pytest

from gateway.auth.keyring import digest_of
from gateway.workers.generation import SHARED_MEMORY
from node.process.owned_names import sweep_directories
from tests.gateway.scripted import ScriptedNode, Topology, topology
from tests.gateway.test_process import write_config
from tests.gateway.worlds import PATIENCE_S, on_loop, until

pytestmark = [pytest.mark.long, pytest.mark.turns]

SHORT: Final = {"model": "scripted", "prompt": "hello there"}
WORKERS: Final = 2


class Reserved(ScriptedNode):
    """Has no word for gateways that come while its door is closed."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.door = asyncio.Event()
        self.door.set()

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[Any]:
        await self.door.wait()
        async for event in super().Watch(request, context):
            yield event


@dataclass
class System:
    """A gateway process with workers, and the nodes behind it."""

    nodes: Topology
    process: asyncio.subprocess.Process
    url: str
    open: list[aiohttp.ClientSession] = field(default_factory=list)

    @property
    def workers(self) -> set[int]:
        """Process ids."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return set(map(int, children.split()))

    @property
    def running(self) -> int:
        return sum(node.running for node in self.nodes.decode)

    async def clients(self, each: int) -> dict[int, list[aiohttp.ClientSession]]:
        """With a connection of its own each, which it keeps: at least so many of every worker; the kernel deals them out."""
        found = defaultdict[int, list[aiohttp.ClientSession]](list)
        while len(found) < WORKERS or min(map(len, found.values())) < each:
            made: list[socket.socket] = []  # another one only when a gateway that ends has closed the first
            connector = aiohttp.TCPConnector(limit=1, keepalive_timeout=PATIENCE_S, socket_factory=partial(_made, made))
            session = aiohttp.ClientSession(self.url, connector=connector)
            self.open.append(session)
            async with session.get("/livez") as answer:
                await answer.read()
            found[self.worker_of(made[0].getsockname()[1])].append(session)
        return found

    def worker_of(self, client_port: int) -> int:
        """Whose connection it is that comes from this port."""
        server_port = int(self.url.rpartition(":")[2])
        wanted = (f"0100007F:{server_port:04X}", f"0100007F:{client_port:04X}")
        lines = (line.split() for line in Path("/proc/net/tcp").read_text().splitlines())
        inode = next(line[9] for line in lines if (line[1], line[2]) == wanted)
        return next(pid for pid in self.workers if f"socket:[{inode}]" in _descriptors(pid))

    async def health(self) -> dict[str, Any]:
        async with aiohttp.ClientSession(self.url) as http, http.get("/health") as answer:
            return await answer.json() if answer.status == 200 else {}

    async def until_ready(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while (await self.health()).get("workers_ready") != WORKERS:  # noqa: ASYNC110 it changes in other processes
                await asyncio.sleep(0.01)

    def hold_answers(self) -> Callable[[], None]:
        """Decode legs wait until the function returned is called."""
        gate = asyncio.Event()
        for node in self.nodes.decode:
            node.script.decode_gate = gate
        return gate.set


def _made(made: list[socket.socket], _: object) -> socket.socket:
    made.append(socket.socket())
    made[-1].setblocking(False)
    return made[-1]


def _descriptors(pid: int) -> set[str]:
    links = set()
    for each in Path(f"/proc/{pid}/fd").iterdir():
        try:
            links.add(str(each.readlink()))
        except OSError:
            continue  # closed meanwhile
    return links


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@asynccontextmanager
async def system(
    directory: Path, decode: int = 2, tables: str = "", kind: type[ScriptedNode] = ScriptedNode
) -> AsyncIterator[System]:
    """A gateway of two workers that is ready; before decode nodes alone, so that nothing is reserved anywhere."""
    async with AsyncExitStack() as stack:
        nodes = await stack.enter_async_context(topology(remote=0, local=0, decode=decode, kind=kind))
        path = write_config(directory, nodes)
        path.write_text(path.read_text().replace("port = 0", f"port = 0\nworkers = {WORKERS}\n") + tables)
        yield await stack.enter_async_context(started(path, nodes))


@asynccontextmanager
async def started(path: Path, nodes: Topology) -> AsyncIterator[System]:
    argv = [sys.executable, "-m", "gateway", "-c", str(path)]
    process = await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    workers: set[int] = set()
    running = System(nodes, process, "")
    try:
        line = (await process.stdout.readline()).decode().strip()
        assert line.startswith("gateway ready url=http://127.0.0.1:")
        running.url = line.partition("url=")[2]
        await running.until_ready()
        yield running
    finally:
        for session in running.open:
            await session.close()
        workers = running.workers if process.returncode is None else set()
        if process.returncode is None:
            await end_now(process)
        process.stdout.feed_eof()
        await until(lambda: not any(map(is_alive, workers)))


async def end_now(process: asyncio.subprocess.Process) -> None:
    """In order, so that nothing stays in /dev/shm, but without waiting for streams."""
    for number in (signal.SIGTERM, signal.SIGTERM):
        process.send_signal(number)
        with suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await process.wait()
                return
    async with asyncio.timeout(PATIENCE_S):
        await process.wait()


async def ask(http: aiohttp.ClientSession) -> tuple[int, bytes]:
    """Status and body of an answer; (0, b"") when the connection broke."""
    try:
        async with http.post("/v1/completions", json={**SHORT, "stream": True}) as answer:
            return answer.status, await answer.read()
    except aiohttp.ClientError:
        return 0, b""


def is_whole(answer: tuple[int, bytes]) -> bool:
    return answer[0] == 200 and answer[1].endswith(b"data: [DONE]\n\n")


async def is_draining(http: aiohttp.ClientSession) -> bool:
    async with http.get("/health") as answer:
        return answer.status == 503 and b"shutting down" in await answer.read()


async def series(http: aiohttp.ClientSession, name: str) -> float:
    """The sum of a metric's series."""
    async with http.get("/metrics") as page:
        lines = re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", await page.text(), re.MULTILINE)
    return sum(map(float, lines))


@on_loop
async def test_two_workers_are_one_gateway(tmp_path: Path) -> None:
    """Rules that leave a gateway as it was share the start of one, up to its end."""
    async with system(tmp_path) as s:
        await any_worker_answers_for_all(s)
        await what_one_worker_gives_a_node_the_other_sees_at_once(s)
        await short_prompts_that_come_at_once_spread_over_the_nodes(s)
        await two_gateways_never_share_a_port(s, tmp_path)
        await sighup_or_an_operator_has_every_worker_read_the_file_again(s, tmp_path)
        await all_workers_together_serve_no_more_than_the_limit(s)
        await sigterm_loses_no_stream(s)


@on_loop
async def test_a_worker_that_is_killed_loses_its_own_streams_and_is_started_again(tmp_path: Path) -> None:
    async with system(tmp_path) as s:
        clients = await s.clients(each=2)
        release = s.hold_answers()
        asked = {pid: [asyncio.create_task(ask(http)) for http in some] for pid, some in clients.items()}
        total = sum(map(len, asked.values()))
        await until(lambda: s.running == total)
        killed, survivor = clients
        os.kill(killed, signal.SIGKILL)
        lost = await asyncio.gather(*asked[killed])
        assert {status for status, _ in lost} == {0}
        await until(lambda: len(s.workers - {killed}) == WORKERS)
        await s.until_ready()
        release()
        assert all(map(is_whole, await asyncio.gather(*asked[survivor])))
        by_both = [some[0] for some in (await s.clients(each=1)).values()]
        assert [is_whole(await ask(http)) for http in by_both] == [True, True]
        async with asyncio.timeout(PATIENCE_S):
            while await series(by_both[0], "prfaas_requests_in_flight"):  # noqa: ASYNC110 in other processes
                await asyncio.sleep(0.01)
        assert await series(by_both[1], "prfaas_worker_restarts_total") == 1
        assert await series(by_both[1], "prfaas_requests_total") == len(asked[survivor]) + 2


async def sigterm_loses_no_stream(s: System) -> None:
    spare, clients = zip(*[some[:2] for some in (await s.clients(each=2)).values()], strict=True)
    release = s.hold_answers()
    asked = [asyncio.create_task(ask(http)) for http in clients]
    await until(lambda: s.running == len(asked))
    workers = s.workers
    s.process.terminate()
    async with asyncio.timeout(PATIENCE_S):
        for http in spare:
            while not await is_draining(http):  # noqa: ASYNC110 in other processes
                await asyncio.sleep(0.01)
        for http in spare:
            assert (await ask(http))[0] == 503
    release()
    assert all(map(is_whole, await asyncio.gather(*asked)))
    async with asyncio.timeout(PATIENCE_S):
        assert await s.process.wait() == 0
    assert not any(map(is_alive, workers))
    assert not s.nodes.leftovers()


async def all_workers_together_serve_no_more_than_the_limit(s: System) -> None:
    clients = await s.clients(each=6)
    await five_are_served(s, [http for some in clients.values() for http in some])
    # A worker that dies with places gives them back.
    s.hold_answers()
    killed, survivor = clients
    dying = [asyncio.create_task(ask(http)) for http in clients[killed][:5]]
    await until(lambda: s.running == 5)
    os.kill(killed, signal.SIGKILL)
    assert {status for status, _ in await asyncio.gather(*dying)} == {0}
    await until(lambda: s.running == 0 and len(s.workers - {killed}) == WORKERS)
    await five_are_served(s, clients[survivor])
    await s.until_ready()


async def five_are_served(s: System, clients: list[aiohttp.ClientSession]) -> None:
    """And no more, of requests that come at once."""
    release, refused = s.hold_answers(), len(clients) - 5
    asked = [asyncio.create_task(ask(http)) for http in clients]
    await until(lambda: s.running == 5 and sum(task.done() for task in asked) == refused)
    release()
    assert sorted(status for status, _ in await asyncio.gather(*asked)) == [200] * 5 + [429] * refused
    async with asyncio.timeout(PATIENCE_S):
        while await series(clients[0], "prfaas_requests_in_flight"):  # noqa: ASYNC110 in other processes
            await asyncio.sleep(0.01)


async def what_one_worker_gives_a_node_the_other_sees_at_once(s: System) -> None:
    one, other = (some[0] for some in (await s.clients(each=1)).values())
    for _ in range(6):
        release = s.hold_answers()
        asked = [asyncio.create_task(ask(one))]
        await until(lambda: s.running == 1)
        asked.append(asyncio.create_task(ask(other)))
        await until(lambda: s.running == 2)
        assert [node.running for node in s.nodes.decode] == [1, 1]
        release()
        assert all(map(is_whole, await asyncio.gather(*asked)))
        await until(lambda: s.running == 0)


async def short_prompts_that_come_at_once_spread_over_the_nodes(s: System) -> None:
    clients = [http for some in (await s.clients(each=6)).values() for http in some[:6]]
    release = s.hold_answers()
    asked = [asyncio.create_task(ask(http)) for http in clients]
    await until(lambda: s.running == len(clients) == 12)
    # Two workers may decide in the same moment; a later one sees both.
    assert min(node.running for node in s.nodes.decode) >= 3
    release()
    assert all(map(is_whole, await asyncio.gather(*asked)))


async def any_worker_answers_for_all(s: System) -> None:
    clients = [some[:3] for some in (await s.clients(each=3)).values()]
    for http in [http for some in clients for http in some]:
        assert is_whole(await ask(http))
    async with asyncio.timeout(PATIENCE_S):
        # The last one may be counted when its client has the answer already.
        while (  # noqa: ASYNC110
            await series(http, "prfaas_requests_total") < 6
            or len(await records_after(http, 0)) < 6
            or (await load_of(http))["outputs"]["last_seq"] < 6
        ):
            await asyncio.sleep(0.01)
    for http, *_ in clients:
        assert await series(http, "prfaas_requests_total") == 6
        assert await series(http, "prfaas_e2e_request_latency_seconds_count") == 6
        assert await series(http, "prfaas_nodes") == 2
        assert await series(http, "prfaas_workers") == WORKERS
        records = await records_after(http, 0)
        assert [record["seq"] for record in records] == [1, 2, 3, 4, 5, 6]
        assert [record["seq"] for record in await records_after(http, 4)] == [5, 6]
        assert len(await records_after(http, 7)) == 6  # a number of an earlier start
        async with http.get("/prfaas/requests", params={"id": records[2]["id"]}) as answer:
            assert [json.loads(line)["seq"] for line in (await answer.text()).splitlines()] == [3]
        async with http.get("/prfaas/console", params={"since": 4}) as answer:
            snapshot = await answer.json()
        assert [record["seq"] for record in snapshot["requests"]] == [5, 6]
        assert (snapshot["last_seq"], snapshot["workers"]["ready"]) == (6, WORKERS)
    loads = [await load_of(http) for http, *_ in clients]
    assert [len(load["uncached"]["values"]) for load in loads] == [6, 6]
    assert [load["outputs"]["last_seq"] for load in loads] == [6, 6]
    assert loads[0]["boot"] == loads[1]["boot"]


async def load_of(http: aiohttp.ClientSession) -> dict[str, Any]:
    async with http.get("/prfaas/load") as answer:
        return await answer.json()  # type: ignore[no-any-return]


async def records_after(http: aiohttp.ClientSession, seq: int) -> list[dict[str, Any]]:
    async with http.get("/prfaas/requests", params={"since": seq}) as answer:
        return [json.loads(line) for line in (await answer.text()).splitlines()]


@on_loop
async def test_when_the_parent_is_killed_streams_end_and_the_port_is_free(tmp_path: Path) -> None:
    async with system(tmp_path) as s:
        clients = await s.clients(each=1)
        release = s.hold_answers()
        asked = [asyncio.create_task(ask(some[0])) for some in clients.values()]
        await until(lambda: s.running == len(asked))
        workers = s.workers
        s.process.kill()
        await s.process.wait()
        port = int(s.url.rpartition(":")[2])
        await until(lambda: _is_free(port))
        assert all(map(is_alive, workers))
        release()
        assert all(map(is_whole, await asyncio.gather(*asked)))
        await until(lambda: not any(map(is_alive, workers)))
        sweep_directories(SHARED_MEMORY)  # as the next gateway does, of what the one that was killed left


def _is_free(port: int) -> bool:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


async def sighup_or_an_operator_has_every_worker_read_the_file_again(s: System, directory: Path) -> None:
    clients = await s.clients(each=1)
    path = directory / "gateway.toml"
    path.write_text(path.read_text().replace("port = 0", "port = 0\nmax_in_flight = 3"))
    s.process.send_signal(signal.SIGHUP)
    async with asyncio.timeout(PATIENCE_S):
        some = next(iter(clients.values()))[0]
        while await series(some, "prfaas_config_reloads_total") < WORKERS:  # noqa: ASYNC110 in other processes
            await asyncio.sleep(0.01)
    # And any of them answers so.
    path.write_text(path.read_text().replace("max_in_flight = 3", "max_in_flight = 5"))
    async with some.post("/prfaas/config", headers={"Content-Type": "application/json"}) as answer:
        assert [each["key"] for each in (await answer.json())["data"]] == ["max_in_flight"]
    async with asyncio.timeout(PATIENCE_S):
        while await series(some, "prfaas_config_reloads_total") < 2 * WORKERS:  # noqa: ASYNC110 in other processes
            await asyncio.sleep(0.01)
    assert s.workers == set(clients)


async def two_gateways_never_share_a_port(s: System, directory: Path) -> None:
    path = directory / "second.toml"
    path.write_text((directory / "gateway.toml").read_text().replace("port = 0", f"port = {s.url.rpartition(':')[2]}"))
    argv = [sys.executable, "-m", "gateway", "-c", str(path)]
    second = await asyncio.create_subprocess_exec(*argv, stderr=asyncio.subprocess.PIPE)
    _, error = await second.communicate()
    assert second.returncode == 2
    assert b"Address already in use; choose another" in error


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("[[[", "the configuration stays as it was"),
        ('[[gateway.nodes]]\nagent = "127.0.0.1:1"', "workers = 2: only a restart makes it 3"),
    ],
    ids=["wrong", "other nodes"],
)
@on_loop
async def test_a_worker_is_started_again_with_the_file_that_the_others_have(
    tmp_path: Path, change: str, said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    async with system(tmp_path) as s:
        path = tmp_path / "gateway.toml"
        path.write_text(f"{path.read_text().replace('workers = 2', 'workers = 3')}\n{change}\n")
        s.process.send_signal(signal.SIGHUP)
        dead = next(iter(s.workers))
        os.kill(dead, signal.SIGKILL)
        await until(lambda: dead not in s.workers and len(s.workers) == WORKERS)
        await s.until_ready()
        for sessions in (await s.clients(each=1)).values():
            async with sessions[0].post("/v1/completions", json=SHORT) as answer:
                assert answer.status == 200
    assert said in capfd.readouterr().err


@on_loop
async def test_a_worker_that_is_killed_leaves_its_tenants_place_before_another_one_is_there(tmp_path: Path) -> None:
    key = {"Authorization": "Bearer sk-one"}
    tenant = f'[gateway.tenants.one]\nkeys = ["{digest_of("sk-one")}"]\nconcurrent_requests = 1\n'
    async with system(tmp_path, tables=tenant, kind=Reserved) as s:
        clients = await s.clients(each=2)
        release = s.hold_answers()
        killed, survivor = clients

        async def status(http: aiohttp.ClientSession) -> int:
            try:
                async with http.post("/v1/completions", json=SHORT, headers=key) as answer:
                    return answer.status
            except aiohttp.ClientError:
                return 0

        dying = asyncio.create_task(status(clients[killed][0]))
        await until(lambda: s.running == 1)
        other = clients[survivor][0]
        assert await status(other) == 429
        doors = [cast(Reserved, node).door for node in s.nodes.decode]
        for door in doors:
            door.clear()  # its successor is not there before the test has looked
        os.kill(killed, signal.SIGKILL)
        assert await dying == 0
        release()
        async with asyncio.timeout(PATIENCE_S):
            while await status(other) != 200:  # noqa: ASYNC110 in other processes
                await asyncio.sleep(0.01)
        async with other.get("/health") as health:
            assert (await health.json())["workers_ready"] == 1
        for door in doors:
            door.set()
