"""A running system: nodes, a plan service if there is to be one, then the gateway; ended gateway first, nodes last."""

import asyncio
import dataclasses
import fcntl
import os
import signal
import tempfile
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp
import grpc.aio
import tomli_w

from gateway.errors import CannotListen
from gateway.workers.ports import bound
from node.config import IDENTITY_KEYS, NodeConfig
from node.kvcache.arena import SHM_DIR
from node.process.owned_names import sweep_directories, sweep_files
from prfaas.errors import StartError, TopologyError
from prfaas.system.certificates import clusterless, issue, node_holder
from prfaas.system.process import Process
from prfaas.system.stages import Progress
from prfaas.system.topology import Topology
from prfaas.system.upkeep import first_start, keep_up
from transport.control.asking import trusting
from transport.control.credentials import channel_credentials, channel_options
from transport.peers.name import PeerRole
from transport.wire.identity import Identity

NODE_MODULES = {"prfaas": "prfaas_cluster", "pd": "pd_cluster"}
NODE_START_S = 60.0
ENGINE_START_MARGIN_S = 60.0  # for a node to say that its engine did not come up
GATEWAY_START_S = 60.0
STOP_S = 60.0
DEFAULT_PORT = 8000
CERTIFICATE_DAYS = 365
ENGINE_LATE_TIMES = 2.0  # its node ends one that is late
POLL_S = 0.1
TELL_S = 15.0  # between two lines about nodes that are late
HEALTH_S = 5.0
LOOK_S = 1.0


class StartedNode:
    """A started node: its configuration, process and addresses, which it keeps from its start before."""

    def __init__(self, config: NodeConfig, process: Process, before: "StartedNode | None" = None) -> None:
        self.config = config
        self.process = process
        # A gateway that is started again meanwhile must be told where this node will be.
        self.agent_address: str = before.agent_address if before else ""
        self.metrics_url: str = before.metrics_url if before else ""
        self.engine_url: str = before.engine_url if before else ""


class RunLock:
    """The right to use a run directory; goes with the process, however it ends."""

    def __init__(self, run_dir: Path) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self._file = (run_dir / "lock").open("w")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise StartError(f"another system runs in {run_dir}: end it, or choose another --state-dir") from None

    def close(self) -> None:
        """Lets others in."""
        self._file.close()


def require_free_port(host: str, port: int) -> None:
    """Says now what the gateway would find out only after all engines have started. Raises TopologyError."""
    try:
        for each in bound(host, port, is_shared=False):
            each.close()
    except CannotListen as exc:
        raise TopologyError(f"[gateway]: port = {port}: {exc}") from exc


class System:
    """`async with System(...) as system`: everything runs inside, everything has ended after."""

    def __init__(
        self, topology: Topology, run_dir: Path, report: Callable[[str], None], *, tell_s: float = TELL_S
    ) -> None:
        """`report` is told of nodes that are late every `tell_s`."""
        self.topology = topology
        self._tell_s = tell_s
        self._run_dir = run_dir
        self._report = report
        self.nodes: dict[str, StartedNode] = {}
        self.gateway: Process | None = None
        self.plan: Process | None = None
        self.plan_url = ""
        self.api_url = ""
        self._lock: RunLock | None = None

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.stop()

    async def _start(self) -> None:
        self._lock = RunLock(self._run_dir)
        require_free_port(
            self.topology.gateway.get("host", "127.0.0.1"), self.topology.gateway.get("port", DEFAULT_PORT)
        )
        self._make_certificates()
        self._report(f"starting {len(self.topology.nodes)} nodes and a gateway; logs in {self._run_dir}/")
        keepers: list[asyncio.Task[None]] = []
        try:
            async with asyncio.TaskGroup() as group:
                await self._start_all(group, keepers)
                await self._until_seen(len(self.nodes))
                for keeper in keepers:
                    keeper.cancel()
        except* StartError as failures:
            raise failures.exceptions[0] from None

    async def _start_all(self, group: asyncio.TaskGroup, keepers: list["asyncio.Task[None]"]) -> None:
        """Nodes, then what wants to know their addresses. What has come up is kept up while others are late."""

        def keep(coroutine: Coroutine[None, None, None]) -> None:
            keepers.append(group.create_task(coroutine))

        async def start(config: NodeConfig) -> None:
            node = await self._first(config.node_id, partial(self._start_afresh, config))
            keep(self._keep_up(node, partial(self._node_again, self.nodes[config.node_id])))

        for each in [group.create_task(start(config)) for config in self.topology.nodes]:
            await each
        if self.topology.plan is not None:
            keep(self._keep_up(await self._first("plan", self._plan_again), self._plan_again))
        gateway = await self._first("gateway", self._first_gateway)
        keep(self._keep_up(gateway, self._gateway_again, is_needed=True))

    async def _first(self, name: str, start: Callable[[], Awaitable[Process]]) -> Process:
        return await first_start(name, start, self._report, time.monotonic)

    def _make_certificates(self) -> None:
        """New ones at every start, by an authority that stays. Raises CertificateError."""
        folder = self.topology.certificates
        if folder is None:
            return
        nodes = [node_holder(each.cluster, each.cluster_kind, each.node_id) for each in self.topology.nodes]
        plan_host = (self.topology.plan or {}).get("host")
        others = [clusterless(role) for role in (PeerRole.GATEWAY, PeerRole.OPERATOR)]
        others.append(clusterless(PeerRole.PLANNER, (plan_host,) if plan_host else ()))
        issue(folder, [*nodes, *others], CERTIFICATE_DAYS)
        self._report(f"mutual TLS: certificates for {len(nodes)} nodes, gateway, planner and operator in {folder}/")

    async def start_node(self, config: NodeConfig) -> StartedNode:
        """Starts one node and waits for its engine. Raises StartError."""
        path = self._run_dir / f"{config.node_id}.toml"
        config = dataclasses.replace(config, run_dir=str(self._run_dir))
        path.write_text(tomli_w.dumps({"node": _without_defaults(config)}))
        process = Process(
            config.node_id,
            ["-m", NODE_MODULES[config.cluster_kind], "-c", str(path)],
            self._run_dir / f"{config.node_id}.log",
        )
        node = self.nodes[config.node_id] = StartedNode(config, process, self.nodes.get(config.node_id))
        await process.start()
        listening = await process.line("node listening ", NODE_START_S, self._report)
        node.agent_address, node.metrics_url = listening["agent"], listening["metrics"]
        ready_s = config.start_timeout_s + ENGINE_START_MARGIN_S
        progress = Progress(
            config.node_id, self._run_dir / f"{config.node_id}-engine.log", self._report, time.monotonic
        )
        watching = asyncio.create_task(_look_again(progress))
        try:
            ready = await process.line("node ready ", ready_s, self._report, late_times=ENGINE_LATE_TIMES)
        finally:
            watching.cancel()
            await asyncio.wait([watching])
        node.engine_url = ready["engine"]
        place = f"{config.cluster_kind}/{config.cluster} {config.role}"
        self._report(f"  {config.node_id:<10} {place:<22} agent {node.agent_address}")
        return node

    async def start_gateway(self) -> Process:
        """Starts the gateway over the nodes there are. Raises StartError."""
        table: dict[str, Any] = {
            "tokenizer_dir": str(self.topology.tokenizer_dir),
            "served_model": self.topology.model.served_name,
            **self._followed_plan(),
            **_links(self.topology.nodes),
            **self.topology.gateway,
            "nodes": [_agent(node) for node in self.nodes.values()],
        }
        path = self._run_dir / "gateway.toml"
        path.write_text(tomli_w.dumps({"gateway": table}))
        self.gateway = Process("gateway", ["-m", "gateway", "-c", str(path)], self._run_dir / "gateway.log")
        await self.gateway.start()
        self.api_url = (await self.gateway.line("gateway ready ", GATEWAY_START_S, self._report))["url"]
        self._report(f"  {'gateway':<10} {self.api_url}")
        self._tell_plan()
        return self.gateway

    def _followed_plan(self) -> Mapping[str, Any]:
        """What a gateway's file says of the plan service, if there is one."""
        if self.topology.plan is None:
            return {}
        plan = {"url": self.plan_url, "plan_file": str(self._run_dir.absolute() / "followed-plan.json")}
        return {"plan": plan | {key: self.topology.plan[key] for key in ("token_file",) if key in self.topology.plan}}

    async def start_plan(self) -> Process:
        """Starts the plan service; it hears of the gateway when there is one. Raises StartError."""
        path = self._write_plan()
        self.plan = Process("plan", ["-m", "planner", "serve", "-c", str(path)], self._run_dir / "plan.log")
        await self.plan.start()
        self.plan_url = (await self.plan.line("plan service ready ", GATEWAY_START_S, self._report))["url"]
        self._report(f"  {'plan':<10} {self.plan_url}")
        return self.plan

    def _write_plan(self) -> Path:
        assert self.topology.plan is not None
        table = {"state_dir": str(self._run_dir.absolute() / "plan"), **self.topology.plan}
        if self.plan_url:
            table["port"] = _port_of(self.plan_url)
        if self.api_url:
            table["gateways"] = [self._operators_url()]
        path = self._run_dir / "plan.toml"
        path.write_text(tomli_w.dumps({"plan": table}))
        return path

    def _tell_plan(self) -> None:
        """Has the plan service read where the gateway is."""
        if self.plan is not None and self.plan.returncode is None:
            self._write_plan()
            os.kill(self.plan.pid, signal.SIGHUP)

    def _operators_url(self) -> str:
        port = self.topology.gateway.get("metrics_port", 0)
        return f"{self.api_url.rpartition(':')[0]}:{port}" if port else self.api_url

    async def watch(self) -> None:
        """Starts again, at its old addresses, what ends by itself; until cancelled. Raises StartError when it is in vain."""
        assert self.gateway is not None
        try:
            async with asyncio.TaskGroup() as group:
                for node in self.nodes.values():
                    group.create_task(self._keep_up(node.process, partial(self._node_again, node)))
                group.create_task(self._keep_up(self.gateway, self._gateway_again, is_needed=True))
                if self.plan is not None:
                    group.create_task(self._keep_up(self.plan, self._plan_again))
        except* StartError as failures:
            raise failures.exceptions[0] from None

    async def _keep_up(
        self, process: Process, start_again: Callable[[], Awaitable[Process]], *, is_needed: bool = False
    ) -> None:
        await keep_up(process, start_again, self._report, time.monotonic, is_needed=is_needed)

    async def _node_again(self, before: StartedNode) -> Process:
        """Gateways and Prometheus know its addresses; its engine's, they are told."""
        return await self._start_afresh(
            dataclasses.replace(
                before.config, control_port=_port_of(before.agent_address), metrics_port=_port_of(before.metrics_url)
            )
        )

    async def _start_afresh(self, config: NodeConfig) -> Process:
        """Starts a node, and stops it again if it does not come up. Raises StartError, OSError."""
        try:
            return (await self.start_node(config)).process
        except (StartError, OSError):
            if (node := self.nodes.get(config.node_id)) is not None:
                await node.process.stop(STOP_S)
            raise

    async def _gateway_again(self) -> Process:
        self.topology = self.topology.replace_gateway(port=_port_of(self.api_url))
        return await self._first_gateway()

    async def _first_gateway(self) -> Process:
        try:
            return await self.start_gateway()
        except (StartError, OSError):
            if self.gateway is not None:
                await self.gateway.stop(STOP_S)
            raise

    async def _plan_again(self) -> Process:
        try:
            return await self.start_plan()
        except (StartError, OSError):
            if self.plan is not None:
                await self.plan.stop(STOP_S)
            raise

    async def _until_seen(self, num_nodes: int) -> None:
        """Waits until the gateway sees `num_nodes` nodes ready, and says how many it sees where that takes long."""
        told_at = time.monotonic()
        async with self._session() as session:
            while (seen := await _nodes_ready(session, self.api_url)) < num_nodes:
                if time.monotonic() - told_at >= self._tell_s:
                    told_at = time.monotonic()
                    self._report(f"  {'gateway':<10} sees {seen} of {num_nodes} nodes ready; the others are waited for")
                await asyncio.sleep(POLL_S)

    def _session(self) -> aiohttp.ClientSession:
        """Asks the gateway, whose certificate it knows; its name is of no concern here."""
        file = self.topology.gateway.get("tls_certificate")
        trust = trusting(Path(file), checks_names=False) if file else True
        return aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=trust))

    async def wait_ready(self, num_nodes: int) -> None:
        """Waits until the gateway sees `num_nodes` nodes ready. Raises StartError."""
        async with self._session() as session:
            for _ in range(int(GATEWAY_START_S / POLL_S)):
                if await _nodes_ready(session, self.api_url) >= num_nodes:
                    return
                await asyncio.sleep(POLL_S)
        raise StartError(f"the gateway does not see {num_nodes} nodes ready after {GATEWAY_START_S:.0f} s")

    def gateway_identity(self) -> Identity | None:
        """What the gateway shows to nodes; None without certificates."""
        gateway = self.topology.gateway
        if not gateway.keys() >= set(IDENTITY_KEYS):
            return None
        certificate, private, authority = (Path(gateway[key]) for key in IDENTITY_KEYS)
        return Identity(certificate=certificate, key=private, authority=authority)

    def agent_channel(self, name: str) -> grpc.aio.Channel:
        """To a node's agent, as its gateway has it."""
        node, identity = self.nodes[name], self.gateway_identity()
        if not node.config.certificate or identity is None:
            return grpc.aio.insecure_channel(node.agent_address)
        return grpc.aio.secure_channel(node.agent_address, channel_credentials(identity), channel_options(name))

    async def stop(self) -> None:
        """Gateway first, so that running streams can finish; then all nodes at once.

        When cancelled, it does not wait: it tells all to end, for the second time those that it told before.
        """
        try:
            if self.gateway is not None:
                await self.gateway.stop(STOP_S)
            if self.plan is not None:
                await self.plan.stop(STOP_S)
            stopping = (node.process.stop(node.config.drain_timeout_s + STOP_S) for node in self.nodes.values())
            await asyncio.gather(*stopping)
        except asyncio.CancelledError:
            for node in self.nodes.values():
                node.process.tell_to_end()
            raise
        # Nodes that were killed have left theirs, and perhaps no later start sweeps here.
        for parent in {SHM_DIR, Path(tempfile.gettempdir())}:
            if parent.is_dir():
                await asyncio.to_thread(_sweep, parent)
        if self._lock is not None:
            self._lock.close()


def _sweep(parent: Path) -> None:
    sweep_directories(parent)
    sweep_files(parent)


async def _look_again(progress: Progress) -> None:
    while True:
        await asyncio.sleep(LOOK_S)
        progress.look()


def _port_of(address: str) -> int:
    """Of host:port, or of a URL that ends with it."""
    return int(address.rpartition(":")[2])


def _agent(node: StartedNode) -> Mapping[str, str]:
    """How the gateway finds a node; with mutual TLS, its certificate must carry its id."""
    name = {"name": node.config.node_id} if node.config.certificate else {}
    return {"agent": node.agent_address, **name}


def _links(nodes: Sequence[NodeConfig]) -> Mapping[str, Any]:
    """Every link that there should be: the gateway reports one that is dead from the start."""
    sources, destinations = (
        dict.fromkeys(node.cluster for node in nodes if node.cluster_kind == kind) for kind in ("prfaas", "pd")
    )
    links = [f"{source}:{destination}" for source in sources for destination in destinations]
    return {"links": links} if links else {}


async def _nodes_ready(session: aiohttp.ClientSession, api_url: str) -> int:
    try:
        async with session.get(f"{api_url}/health", timeout=aiohttp.ClientTimeout(total=HEALTH_S)) as answer:
            health = await answer.json()
    except (aiohttp.ClientError, TimeoutError, ValueError):
        return 0
    return int(health.get("nodes_ready", 0))


def _without_defaults(config: NodeConfig) -> Mapping[str, Any]:
    """What a file must say to get this configuration back."""
    return {
        f.name: getattr(config, f.name)
        for f in dataclasses.fields(config)
        if f.default is dataclasses.MISSING or getattr(config, f.name) != f.default
    }
