"""A picker, an Envoy that asks it, and servers that it chooses among.

The picker is ours, in a process of its own. Another one is tested by two variables of the environment:

    EPP_COMMAND   its command line, in which {endpoints}, {grpc}, {health} and {metrics} are a file in llm-d's format and ports
    EPP_OURS=0    leaves out what only ours promises

ENVOY_BINARY names an Envoy; without it, .envoy/envoy is run (`scripts/fetch-envoy`).
"""

import asyncio
import contextlib
import io
import json
import os
import shlex
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Final, TypeVar

import aiohttp

from tests.epp.envoy import OWN, Way, configuration
from tests.epp.servers import StandInServer, running_servers
from tests.transport.path.ports import free_ports

T = TypeVar("T")

ROOT: Final = Path(__file__).parents[2]
ENVOY: Final = Path(os.environ.get("ENVOY_BINARY", ROOT / ".envoy" / "envoy"))
OURS: Final = os.environ.get("EPP_OURS", "1") != "0"
OWN_COMMAND: Final = (
    f"{sys.executable} -m prfaas epp --endpoints {{endpoints}} --grpc-port {{grpc}}"
    " --grpc-health-port {health} --metrics-port {metrics} --pool-name test"
)
COMMAND: Final = os.environ.get("EPP_COMMAND", OWN_COMMAND)
START_S: Final = 240.0  # that a process may take, beside suites that take all cores
ACT_S: Final = 400.0  # what a test does must end, even there
ROLE_LABEL: Final = "llm-d.ai/role"


@dataclass(slots=True)
class PickerWorld:
    """What runs. `roles` are by server, empty where nothing is said; `role_label` says them."""

    servers: list[StandInServer]
    folder: Path
    way: Way
    http: aiohttp.ClientSession
    more: Sequence[str] = ()
    roles: Sequence[str] = ()
    role_label: str = ROLE_LABEL
    ports: dict[str, int] = field(default_factory=dict)
    picker: asyncio.subprocess.Process | None = None
    envoy: asyncio.subprocess.Process | None = None
    url: str = ""

    @property
    def endpoints(self) -> Path:
        return self.folder / "endpoints.json"

    def list_servers(self, servers: Sequence[StandInServer]) -> None:
        """Writes the file that the picker watches."""
        roles = [*self.roles, *[""] * len(servers)]
        listed = [
            {
                "name": f"s{index}",
                "namespace": "test",
                "address": "127.0.0.1",
                "port": str(server.port),
                "labels": {self.role_label: role} if role else {},
            }
            for index, (server, role) in enumerate(zip(servers, roles, strict=False))
        ]
        fresh = self.endpoints.with_suffix(".new")
        fresh.write_text(json.dumps({"endpoints": listed}))
        fresh.replace(self.endpoints)

    async def start_picker(self) -> None:
        command = COMMAND.format(endpoints=self.endpoints, **self.ports)
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        with _log(self.folder / "picker.log") as log:
            self.picker = await asyncio.create_subprocess_exec(
                *shlex.split(command), *self.more, stdout=log, stderr=log, env=environment
            )
        await _until_open(self.ports["grpc"], self.picker, self.folder / "picker.log")

    async def metrics(self) -> str:
        """The picker's own page."""
        async with self.http.get(f"http://127.0.0.1:{self.ports['metrics']}/metrics") as page:
            return await page.text()

    async def metric(self, name: str) -> float:
        """The sum of all series of that name; 0 without any."""
        lines = [line for line in (await self.metrics()).splitlines() if line.split("{")[0].split(" ")[0] == name]
        return sum(float(line.split()[-1]) for line in lines)

    async def ask(self, body: bytes | None = None, path: str = "/v1/chat/completions", **headers: str) -> "Told":
        """One request through Envoy."""
        named = {"content-type": "application/json"} | {key.replace("_", "-"): each for key, each in headers.items()}
        method = "GET" if body is None else "POST"
        data = None if body is None else io.BytesIO(body)
        async with self.http.request(method, f"{self.url}{path}", data=data, headers=named) as answer:
            return Told(answer.status, dict(answer.headers), await answer.read())

    async def reported(self) -> None:
        """Waits until the picker has asked every server twice more: it has read what the first of both times said."""
        wanted = [server.reports + 2 for server in self.servers]
        while any(server.reports < number for server, number in zip(self.servers, wanted, strict=True)):  # noqa: ASYNC110
            await asyncio.sleep(0.05)

    async def knows_nodes(self) -> None:
        """Waits until the picker has asked the nodes: those count no questions."""
        wanted = 2 * len(self.servers)
        await until(lambda: self.metric("prfaas_picker_reports_total"), lambda reports: reports >= wanted)


@dataclass(frozen=True, slots=True)
class Told:
    """A whole answer."""

    status: int
    headers: dict[str, str]
    body: bytes

    def said(self, key: str) -> object:
        """A field of a server's answer."""
        return json.loads(self.body)[key]


def chat(text: str, turns: int = 1) -> bytes:
    """A body of a chat."""
    messages = [{"role": "user", "content": f"{text} {turn}"} for turn in range(turns)]
    return json.dumps({"model": "m", "messages": messages}).encode()


@asynccontextmanager
async def asked_world(
    folder: Path, way: Way = OWN, *, servers: int = 2, more: Sequence[str] = (), roles: Sequence[str] = ()
) -> AsyncIterator[PickerWorld]:
    """Servers and a picker inside the block, and no Envoy."""
    async with AsyncExitStack() as held:
        running = await held.enter_async_context(running_servers(servers))
        http = await held.enter_async_context(aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)))
        ports = dict(zip(("grpc", "health", "metrics", "api", "admin"), free_ports(5), strict=True))
        url = f"http://127.0.0.1:{ports['api']}"
        world = PickerWorld(running, folder, way, http, more, roles, ports=ports, url=url)
        world.list_servers(running)
        held.push_async_callback(_end_picker, world)
        await world.start_picker()
        yield world


@asynccontextmanager
async def nodes_world(folder: Path, way: Way, nodes: Mapping[int, str]) -> AsyncIterator[PickerWorld]:
    """The same around PrfaaS nodes, which listen at these ports in these roles."""
    async with AsyncExitStack() as held:
        http = await held.enter_async_context(aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)))
        ports = dict(zip(("grpc", "health", "metrics", "api", "admin"), free_ports(5), strict=True))
        servers = [StandInServer(port=port) for port in nodes]  # not started: the nodes are there
        roles = tuple(nodes.values())
        url = f"http://127.0.0.1:{ports['api']}"
        world = PickerWorld(servers, folder, way, http, (), roles, "prfaas/role", ports, url=url)
        world.list_servers(servers)
        held.push_async_callback(_end_picker, world)
        await world.start_picker()
        await held.enter_async_context(_asking_envoy(world))
        yield world


@asynccontextmanager
async def picker_world(
    folder: Path, way: Way, *, servers: int = 2, more: Sequence[str] = (), roles: Sequence[str] = ()
) -> AsyncIterator[PickerWorld]:
    """All of it, inside the block."""
    async with asked_world(folder, way, servers=servers, more=more, roles=roles) as world, _asking_envoy(world):
        yield world


@asynccontextmanager
async def _asking_envoy(world: PickerWorld) -> AsyncIterator[None]:
    folder, way, ports = world.folder, world.way, world.ports
    if way.subset is not None:  # servers are named by number: their ports are known only now
        named = tuple(world.servers[int(each)].address if each.isdigit() else each for each in way.subset)
        way = replace(way, subset=named)
    told = configuration(
        way,
        port=ports["api"],
        admin=ports["admin"],
        picker=f"127.0.0.1:{ports['grpc']}",
        servers=tuple(server.address for server in world.servers),
    )
    (folder / "envoy.yaml").write_text(told)
    with _log(folder / "envoy.log") as log:
        world.envoy = await asyncio.create_subprocess_exec(
            ENVOY, "-c", folder / "envoy.yaml", "--disable-hot-restart", "--concurrency", "1", "-l", "warning",
            stdout=log, stderr=log,
        )  # fmt: skip
    try:
        await _until_open(ports["api"], world.envoy, folder / "envoy.log")
        yield
    finally:
        await end(world.envoy)


async def _end_picker(world: PickerWorld) -> None:
    if world.picker is not None:
        await end(world.picker)


async def end(process: asyncio.subprocess.Process) -> None:
    """Kills what still runs."""
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.wait()


async def _until_open(port: int, process: asyncio.subprocess.Process, log: Path) -> None:
    async with asyncio.timeout(START_S):
        while True:
            if process.returncode is not None:
                raise AssertionError(f"ended with {process.returncode}:\n{_end_of(log)}")
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                await asyncio.sleep(0.05)
            else:
                writer.close()
                return


async def until(ask: Callable[[], Awaitable[T]], holds: Callable[[T], bool]) -> T:
    """Asks again and again until what it hears will do; the test has a time limit."""
    while not holds(found := await ask()):  # noqa: ASYNC110 nothing tells
        await asyncio.sleep(0.05)
    return found


def _log(path: Path) -> IO[bytes]:
    return open(path, "ab")


def _end_of(log: Path) -> str:
    return log.read_text()[-4000:]
