"""`prfaas up` as a user runs it, seen from outside: what it started, what that holds, and what it leaves behind."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Self

import aiohttp
import grpc.aio
import tomli_w

from gateway.auth.keyring import digest_of
from prfaas.commands.keys import new_key
from tests.e2e import tls
from tests.transport.path.ports import free_port
from tests.transport.proxy import Proxy
from transport.control.proto import node_pb2 as pb
from transport.control.proto import node_pb2_grpc as rpc

SHARED_MEMORY: Final = 1 << 30  # bytes of /dev/shm that the system has to itself, where it can
DISK: Final = 96 << 20
PORTS: Final = range(10_000, 32_768)  # below those that Linux gives to connections
NODES: Final = {
    "far": ("east", "prefill"),
    "near": ("west", "prefill"),
    "decode0": ("west", "decode"),
    "decode1": ("west", "decode"),
}
POLL_S: Final = 0.2


@dataclass(frozen=True, slots=True)
class Running:
    """A process of the system. `kind` is gateway, agent or engine; `node` is empty for the gateway.

    `own_bytes` is what is resident beside shared memory: which pages of an arena a process has seen says nothing of it.
    """

    pid: int
    kind: str
    node: str
    rss_bytes: int
    own_bytes: int


@dataclass(frozen=True, slots=True)
class NodePorts:
    """What a node listens on, all of it on 127.0.0.1."""

    control: int
    transfer: int
    engine: int
    metrics: int


class StormSystem:
    """Two clusters, four nodes and a gateway; KVCache from `far` to the decode nodes goes through relays that can be cut."""

    def __init__(
        self, model: Path, home: Path, tenants: Mapping[str, str] = MappingProxyType({}), *, has_tls: bool = False
    ) -> None:
        """`tenants`: keys by name. With them an operator's key, too, is needed for what is not for clients."""
        self.home = home
        self._tenants = tenants
        self._operator_key = new_key()
        self._model = model
        self._stack = ExitStack()
        self._ports = {name: NodePorts(*(free_port() for _ in range(4))) for name in NODES}
        self.api_port, self.operators_port = free_port(), free_port()
        self.certificates = home / "certificates" if has_tls else None
        self.api_url = f"{'https' if has_tls else 'http'}://127.0.0.1:{self.api_port}"
        self.relays: dict[str, Proxy] = {}
        self.isolated = os.geteuid() == 0
        self._up: asyncio.subprocess.Process

    async def __aenter__(self) -> Self:
        for name in ("decode0", "decode1"):
            self.relays[name] = self._stack.enter_context(Proxy(f"127.0.0.1:{self._ports[name].transfer}"))
        (self.home / "tmp").mkdir()
        (self.home / "ssd").mkdir()
        document = self._document()
        if self.certificates is not None:
            document = tls.secured(document, self.certificates)
        (self.home / "topology.toml").write_text(tomli_w.dumps(document))
        with (self.home / "up.log").open("wb") as log:
            self._up = await asyncio.create_subprocess_exec(
                *self._command(), stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log,
                env={**os.environ, "TMPDIR": str(self.home / "tmp"), "PYTHONUNBUFFERED": "1"},
            )  # fmt: skip
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.end(30.0)
        self._stack.close()

    def _command(self) -> list[str]:
        config = str(self.home / "topology.toml")
        up = [sys.executable, "-m", "prfaas", "up", "-c", config, "--state-dir", str(self.home / "state")]
        if not self.isolated:
            return up
        # Memory and disk of its own, so that filling them up harms no other process.
        mounts = (
            f"mount -t tmpfs -o size={SHARED_MEMORY} tmpfs /dev/shm && "
            f"mount -t tmpfs -o size={DISK} tmpfs {self.home / 'ssd'}"
        )
        return ["unshare", "--mount", "--propagation", "private", "sh", "-c", f'{mounts} && exec "$@"', "sh", *up]

    def _document(self) -> dict[str, Any]:
        def node(name: str) -> dict[str, Any]:
            ports = {f"{kind}_port": port for kind, port in asdict(self._ports[name]).items()}
            table: dict[str, Any] = {"node_id": name, "role": NODES[name][1], **ports}
            if name in self.relays:
                table["transfer_advertise"] = self.relays[name].address
            if name == "far":
                table |= {"transport": "tcp", "ssd_dir": str(self.home / "ssd"), "ssd_bytes": 2 * DISK}
            return table

        return {
            "model": {"path": str(self._model), "name": "tiny"},
            "gateway": {
                "port": self.api_port,
                "metrics_port": self.operators_port,
                "threshold_tokens": 300,
                "routing": {"prefill_tokens_per_s": 1000.0},
                **self._who_may_ask(),
            },
            "node": {"block_size": 64, "chunk_tokens": 128, "cache_bytes": 96 << 20, "lease_s": 20.0},
            "clusters": [
                {"name": cluster, "kind": kind, "nodes": [node(n) for n, (c, _) in NODES.items() if c == cluster]}
                for cluster, kind in (("east", "prfaas"), ("west", "pd"))
            ],
        }

    def _who_may_ask(self) -> dict[str, Any]:
        if not self._tenants:
            return {}
        tenants = {name: {"keys": [digest_of(key)]} for name, key in self._tenants.items()}
        return {"operator_keys": [digest_of(self._operator_key)], "tenants": tenants}

    def ports(self) -> dict[str, int]:
        """Everything that listens, by what and whose it is."""
        nodes = {
            f"{kind} of {name}": port for name, ports in self._ports.items() for kind, port in asdict(ports).items()
        }
        return {"the API": self.api_port, "the operators' pages": self.operators_port, **nodes}

    # What runs

    @property
    def returncode(self) -> int | None:
        """Of `prfaas up`; None while it runs."""
        return self._up.returncode

    def processes(self) -> list[Running]:
        """Everything that `prfaas up` started and that lives."""
        return [found for pid in self.pids() if (found := described(pid)) is not None]

    def pids(self) -> list[int]:
        """All descendants of `prfaas up`."""
        children: dict[int, list[int]] = {}
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if fields[0] != "Z":
                    children.setdefault(int(fields[1]), []).append(int(entry.name))
        found, open_ = [], [self._up.pid]
        while open_:
            below = children.get(open_.pop(), [])
            found += below
            open_ += below
        return found

    def inside(self, path: str) -> Path:
        """A path as the system sees it, whose mounts are its own."""
        return Path(f"/proc/{self._up.pid}/root{path}")

    # What it says

    async def ready(self, session: aiohttp.ClientSession) -> bool:
        """Whether the gateway answers and sees every node ready."""
        url, key = f"{self.api_url}/health", {"authorization": f"Bearer {self._operator_key}"} if self._tenants else {}
        try:
            async with session.get(url, headers=key, timeout=aiohttp.ClientTimeout(total=5.0)) as answer:
                states = (await answer.json()).get("nodes", {})
        except (aiohttp.ClientError, TimeoutError, ValueError):
            return False
        return [state for state in states.values() if state == "ready"] == ["ready"] * len(NODES)

    async def until_ready(self, session: aiohttp.ClientSession, timeout_s: float) -> bool:
        """Waits until it is, or has ended, or the time is over; whether it is."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while asyncio.get_running_loop().time() < deadline and self.returncode is None:
            if await self.ready(session):
                return True
            await asyncio.sleep(POLL_S)
        return False

    async def held(self) -> dict[str, str]:
        """What nodes hold without any request, and books that do not balance."""
        wrong = {}
        for name, ports in self._ports.items():
            if held := await held_at(f"127.0.0.1:{ports.control}", name, self.certificates):
                wrong[name] = held
        return wrong

    def in_clear(self) -> list[str]:
        """Ports that speak in clear where none should, one line each."""
        return tls.faults(self._up.pid, self.certificates) if self.certificates is not None else []

    def client(self) -> aiohttp.ClientSession:
        """For those who ask the system."""
        who = tls.identity(self.certificates) if self.certificates is not None else None
        return tls.client_session(who)

    # Its end

    async def end(self, timeout_s: float) -> list[str]:
        """SIGTERM. What should not be there afterwards, one line each."""
        started = self.pids()
        if self._up.returncode is None:
            self._up.send_signal(signal.SIGTERM)
            try:
                async with asyncio.timeout(timeout_s):
                    await self._up.wait()
            except TimeoutError:
                self._up.kill()
                await self._up.wait()
                return [f"prfaas up did not end within {timeout_s:.0f} s"]
        left = [f"process {described(pid)} is left" for pid in started if described(pid) is not None]
        return left + [f"{path} is left" for path in (self.home / "tmp").iterdir() if path.name.startswith("prfaas")]


async def held_at(agent: str, name: str = "", certificates: Path | None = None) -> str:
    """What a node holds, or what does not balance there; nothing where all is well."""
    async with tls.channel(agent, name, certificates) as channel:
        stub = rpc.NodeAgentStub(channel)  # type: ignore[no-untyped-call]
        try:
            node: pb.NodeDescription = await stub.Describe(pb.DescribeRequest(), timeout=5.0)
        except grpc.aio.AioRpcError as exc:
            return str(exc.code())
    pool, load = node.pool, node.load
    counts = (pool.reservations, pool.pages_transfer, pool.pages_locked, load.running, load.waiting)
    return str(node.integrity_error or (f"holds {counts}" if any(counts) else ""))


def described(pid: int) -> Running | None:
    """What a process of ours is; None for another one, and for one that has ended."""
    try:
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
        sizes = _sizes(Path(f"/proc/{pid}/status").read_text())
        resident, own = sizes["VmRSS"], sizes["RssAnon"] + sizes["RssFile"]
    except (OSError, KeyError):  # gone, or as good as
        return None
    modules = list(_modules(arguments))
    line = " ".join(arguments)
    node = next((name for name in NODES if f"/{name}.toml" in line or f"node-id {name}" in line), "")
    if "gateway" in modules:
        return Running(pid, "gateway", "", resident, own)
    if "pd_cluster" in modules or "prfaas_cluster" in modules:
        return Running(pid, "agent", node, resident, own)
    if "engine" in modules:
        parent = described(int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]))
        return Running(pid, "engine", parent.node if parent else "", resident, own)
    return None


def _sizes(status: str) -> dict[str, int]:
    """Bytes by name, as the kernel counts them."""
    lines = (line.split() for line in status.splitlines())
    return {words[0].rstrip(":"): int(words[1]) << 10 for words in lines if words[-1:] == ["kB"]}


def _modules(arguments: list[str]) -> Iterator[str]:
    return (after for flag, after in pairwise(arguments) if flag == "-m")
