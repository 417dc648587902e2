"""The fleet: emulated nodes in three registries and a folder, and gateways that share limits.

Each node is what it is anywhere: an agent and an engine without a model, two processes that take 92 MiB together.
"""

import asyncio
import shutil
import signal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import aiohttp
import tomli_w

from engine.byte_tokenizer import save_byte_tokenizer
from gateway.auth.keyring import digest_of
from tests.fleet.children import Child, marked
from tests.fleet.clock import set_clock
from tests.fleet.judgement import NodeSeen, differences
from tests.fleet.plans import PlanServices
from tests.membership.etcd.servers import RealEtcd
from tests.membership.kubernetes.servers import NAMESPACE, READ, SELECTOR, Cluster, DoubledApi

STARTS_AT_ONCE: Final = 4
VOCABULARY: Final = 4096
OPERATOR_KEY, FREE_KEY, CAPPED_KEY = "sk-operator", "sk-free", "sk-capped"
CAPPED_PER_MINUTE: Final = 240
LISTENING: Final = r"node listening id=\S+ agent=(\S+)"
TIMES: Final = ("--decode-step-s", "0.02", "--prefill-per-token-s", "0.0002")


@dataclass(slots=True)
class FleetNode:
    """A node, whether it runs or not. `agent` is empty while it is not there."""

    name: str
    cluster: str
    role: str
    registry: str
    child: Child | None = None
    agent: str = ""
    is_busy: bool = field(default=False, repr=False)  # something happens to it

    @property
    def lives(self) -> bool:
        return bool(self.agent)


class Fleet:
    """What runs, and how to change it. Everything lies in `home`."""

    def __init__(
        self,
        home: Path,
        nodes: int,
        gateways: int,
        etcd_binary: str | None,
        *,
        cache_bytes: int = 8 << 20,
    ) -> None:
        self.home = home
        self._cache_bytes = cache_bytes  # of a node
        self.etcd = RealEtcd(home, etcd_binary) if etcd_binary is not None else None
        self.api = DoubledApi()
        self.pods = Cluster(self.api)
        self.nodes = {node.name: node for node in _members(nodes, [*self._registries()])}
        self.gateways: dict[str, Child] = {}
        self.urls: dict[str, str] = {}
        self.killed: set[str] = set()  # URLs of gateways that were killed: what they were answering is cut
        self.plans = None if self.etcd is None else PlanServices(home, self._etcd_table(), self._started, OPERATOR_KEY)
        self.failures: list[str] = []
        self.api_is_changed = asyncio.Lock()  # kubelets wait for an API server that is away
        self._names = [f"g{number}" for number in range(gateways)]
        self._starts = asyncio.Semaphore(STARTS_AT_ONCE)
        self._environment = {"TMPDIR": str(home / "tmp"), "PYTHONUNBUFFERED": "1", "GRPC_VERBOSITY": "ERROR"}

    @property
    def living(self) -> dict[str, str]:
        """Addresses by node."""
        return {name: node.agent for name, node in self.nodes.items() if node.lives}

    def running(self, *roles: str) -> int:
        return sum(node.lives and node.role in roles for node in self.nodes.values())

    async def start(self) -> None:
        for folder in ("tmp", "logs", "fleet", "tokenizer", "clocks"):
            (self.home / folder).mkdir()
        save_byte_tokenizer(self.home / "tokenizer", VOCABULARY)
        (self.home / "token").write_text("gateway\n")
        (self.home / "token").chmod(0o600)
        self.listed()
        self.api.start()
        self.api.allow("gateway", READ)
        if self.etcd is not None:
            await asyncio.to_thread(self.etcd.start)
        await asyncio.gather(*(self.start_node(node) for node in self.nodes.values()))
        await asyncio.gather(*(self.start_gateway(name) for name in self._names))
        if self.plans is not None:
            await self.plans.start([*self.urls.values()])

    async def end(self) -> list[str]:
        """Ends everything. What should not be there afterwards, one line each."""
        children = [*self.gateways.values(), *(node.child for node in self.nodes.values() if node.child is not None)]
        self.failures += filter(None, await asyncio.gather(*(child.end() for child in children)))
        if self.plans is not None:
            self.failures += await self.plans.end()
        if self.etcd is not None:
            self.etcd.close()
        self.api.close()
        return [f"{what} ({pid}) still runs" for pid, what in marked(str(self.home / "tmp")).items()]

    # Nodes

    async def start_node(self, node: FleetNode) -> None:
        """It is ready, and listed where its registry needs that."""
        path = self.home / f"{node.name}.toml"
        path.write_text(tomli_w.dumps({"node": self._node_file(node)}))
        module = "prfaas_cluster" if node.cluster == "east" else "pd_cluster"
        async with self._starts:
            node.child = await self._started(node.name, module, "-c", str(path))
            agent = await node.child.said(LISTENING)
            await node.child.said(r"node (ready)")
        node.agent = agent
        await self._list(node)

    async def end_node(self, node: FleetNode) -> None:
        """As an operator does it: it leaves its registry, then it ends."""
        node.agent = ""
        if node.registry == "kubernetes":
            await self._in_pods(self.pods.end, node.name)
        self.listed()
        assert node.child is not None
        self.failures += filter(None, [await node.child.end()])
        node.child = None
        await self._unlist(node)

    async def kill_node(self, node: FleetNode) -> None:
        """By `kill -9`. A kubelet has its Pod go; other registries have to notice."""
        node.agent = ""
        assert node.child is not None
        await node.child.end(signal.SIGKILL)
        node.child = None
        await self._unlist(node)

    def listed(self) -> None:
        """Writes the watched file anew, which is renamed into its place."""
        hidden = self.home / ".nodes"
        listed = [each for each in self.nodes.values() if each.registry == "file" and each.lives]
        entries = [{"id": each.name, "agent": each.agent} for each in listed]
        hidden.write_text(tomli_w.dumps({"may_be_empty": True, "nodes": entries}))
        hidden.rename(self.home / "nodes.toml")

    async def _list(self, node: FleetNode) -> None:
        if node.registry == "file":
            self.listed()
        if node.registry == "kubernetes":
            host, _, port = node.agent.rpartition(":")
            await self._in_pods(self.pods.add, node.name, host, int(port), {"prfaas/role": node.role})

    async def _unlist(self, node: FleetNode) -> None:
        if node.registry == "kubernetes":
            await self._in_pods(self.pods.gone, node.name)

    async def _in_pods(self, change: Callable[..., None], *words: object) -> None:
        async with self.api_is_changed:
            await asyncio.to_thread(change, *words)

    def _registries(self) -> Iterator[str]:
        yield from ("file", "kubernetes", "folder")
        if self.etcd is not None:
            yield from ("etcd", "etcd")

    def _node_file(self, node: FleetNode) -> dict[str, Any]:
        table: dict[str, Any] = {
            "node_id": node.name,
            "cluster": node.cluster,
            "cluster_kind": "prfaas" if node.cluster == "east" else "pd",
            "role": node.role,
            "model": "llama",
            "served_model": "tiny",
            "engine": "emulated",
            "engine_args": [*TIMES],
            "cache_bytes": self._cache_bytes,
            "run_dir": str(self.home / "tmp" / "run"),
        }
        if node.registry == "folder":
            table["registry"] = str(self.home / "fleet")
        if node.registry == "etcd":
            table["etcd"] = self._etcd_table()
        return table

    # Gateways

    async def start_gateway(self, name: str, *more: str) -> None:
        """Starts one, or one that takes the place of what runs."""
        path = self.home / f"{name}.toml"
        path.write_text(tomli_w.dumps(self._gateway_file(name)))
        child = await self._started(name, "prfaas", "gateway", "-c", str(path), *more)
        self.urls[name] = await child.said(r"gateway ready url=(\S+)")
        self.killed.discard(self.urls[name])  # its port may be that of one that was killed
        self.gateways[name] = child

    async def replace_gateway(self, name: str) -> None:
        before = self.gateways[name]
        await self.start_gateway(name, "--replace")
        self.failures += filter(None, [await before.end()])

    async def kill_gateway(self, name: str) -> None:
        """By `kill -9`; a load balancer sends it nothing until it is back, at another port."""
        self.killed.add(self.urls.pop(name))
        await self.gateways.pop(name).end(signal.SIGKILL)
        await self.start_gateway(name)

    def set_clock(self, name: str, wrong_by_s: float) -> None:
        """The time of day of a gateway's or an agent's process jumps."""
        set_clock(self._clock(name), wrong_by_s)

    def _clock(self, name: str) -> Path:
        return self.home / "clocks" / name

    def _gateway_file(self, name: str) -> dict[str, Any]:
        membership: dict[str, Any] = {
            "file": "nodes.toml",
            "folder": "fleet",
            "kubernetes": {
                "selector": SELECTOR,
                "namespaces": [NAMESPACE],
                "server": self.api.base,
                "token_file": "token",
            },
        }
        gateway: dict[str, Any] = {
            "port": 0,
            "tokenizer_dir": "tokenizer",
            "served_model": "tiny",
            "threshold_tokens": 300,
            "links": ["east:west"],
            "operator_keys": [digest_of(OPERATOR_KEY)],
            "tenants": {
                "free": {"keys": [digest_of(FREE_KEY)]},
                "capped": {"keys": [digest_of(CAPPED_KEY)], "requests_per_minute": CAPPED_PER_MINUTE},
            },
            "membership": membership,
        }
        if self.etcd is not None:
            membership["etcd"] = self._etcd_table()
            gateway["fleet"] = {"name": name, "gateways": len(self._names), "etcd": self._etcd_table()}
        return {"gateway": gateway}

    def _etcd_table(self) -> dict[str, Any]:
        assert self.etcd is not None
        return {"endpoints": [self.etcd.endpoint]}

    async def _started(self, name: str, *command: str) -> Child:
        clock = self._clock(name)
        if not clock.exists():
            set_clock(clock, 0.0)
        command = ("tests.fleet.clock", str(clock), *command)
        return await Child.start(command, self.home / "logs" / f"{name}.log", self._environment)

    # What gateways say

    async def seen(self, http: aiohttp.ClientSession, name: str) -> Mapping[str, NodeSeen]:
        """The nodes that a gateway has."""
        headers = {"authorization": f"Bearer {OPERATOR_KEY}"}
        async with http.get(f"{self.urls[name]}/prfaas/console", headers=headers) as answer:
            nodes = (await answer.json())["nodes"]
        return {each["node"]: NodeSeen(each["agent"], each["state"]) for each in nodes}

    async def wrong_views(self, http: aiohttp.ClientSession) -> list[str]:
        """What gateways have wrong now, one line each."""
        return [
            line for lines in await asyncio.gather(*(self._wrong(http, name) for name in self._names)) for line in lines
        ]

    async def _wrong(self, http: aiohttp.ClientSession, name: str) -> list[str]:
        try:
            view = await self.seen(http, name)
        except (aiohttp.ClientError, KeyError, ValueError) as failure:
            return [f"{name} does not say: {failure!r}"]
        return [f"{name}: {line}" for line in differences(self.living, view)]


class EtcdBackups:
    """Copies of an etcd's data, as an operator makes and restores them."""

    def __init__(self, etcd: RealEtcd, home: Path) -> None:
        self._etcd, self._data, self._copy = etcd, home / "data", home / "backup"

    def save(self) -> None:
        """While it is down for a moment."""
        self._etcd.kill()
        shutil.rmtree(self._copy, ignore_errors=True)
        shutil.copytree(self._data, self._copy)
        self._etcd.start()

    def restore(self) -> None:
        """What was written since is lost."""
        self._etcd.kill()
        shutil.rmtree(self._data)
        shutil.copytree(self._copy, self._data)
        self._etcd.start()


def _members(count: int, registries: list[str]) -> Iterator[FleetNode]:
    """Half of them decode, a quarter prefills beside them, and a quarter in the other cluster."""
    kinds = (("west", "decode"), ("west", "prefill"), ("west", "decode"), ("east", "prefill"))
    for number in range(count):
        cluster, role = kinds[number % len(kinds)]
        registry = registries[(number // len(kinds) + number) % len(registries)]
        yield FleetNode(f"{cluster}-{role[0]}{number}", cluster, role, registry)
