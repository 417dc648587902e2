"""A node's /metrics and /health, read from the agent when asked: nothing is counted twice."""

import contextlib
import logging
from collections.abc import Iterable, Iterator, Mapping
from hashlib import sha256
from pathlib import Path

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from node.agent import NodeAgent
from node.config import PICKED, NodeConfig
from transport.control.certificates import expires_at
from transport.control.proto import node_pb2 as pb
from transport.metrics import TransportCollector
from transport.path.guarded_port import GuardedPort
from transport.path.tcp import format_address

log = logging.getLogger(__name__)


class InCluster(Collector):
    """Another collector's series with `cluster` added: the node's own, where `link` is the other end."""

    def __init__(self, cluster: str, inner: Collector) -> None:
        self._labels = {"cluster": cluster}
        self._inner = inner

    def collect(self) -> Iterable[Metric]:
        """All families of the other collector."""
        for family in self._inner.collect():
            family.samples = [sample._replace(labels={**sample.labels, **self._labels}) for sample in family.samples]
            yield family


class NodeCollector(Collector):
    """Turns the agent's description into metric families."""

    def __init__(self, agent: NodeAgent) -> None:
        self._agent = agent

    def collect(self) -> Iterable[Metric]:
        """All families of the node."""
        description = self._agent.describe()
        yield from _pool(description.pool)
        yield from _load(description.load)
        yield from _as_vllm(description)
        contexts = GaugeMetricFamily("prfaas_context_tokens", "Tokens of prefixes that are kept on request")
        contexts.add_metric([], sum(context.num_tokens for context in description.contexts))
        yield contexts
        if description.HasField("ssd"):
            yield from _ssd(description.ssd)
        yield from self._requests()
        ready = GaugeMetricFamily("prfaas_node_ready", "1 when the node takes requests")
        ready.add_metric([], float(description.state == pb.NODE_STATE_READY))
        yield ready
        yield from _role(description.conversion, self._agent.conversions.counts)
        restarts = CounterMetricFamily("prfaas_engine_restarts", "Times the engine was started again")
        restarts.add_metric([], self._agent.supervisor.restarts)
        yield restarts
        yield _counter(
            "prfaas_engine_silences",
            "Times the engine ran without answering, by how",
            "kind",
            self._agent.vigil.counts,
        )
        yield from _security(self._agent.config)
        direct = GaugeMetricFamily("prfaas_node_rdma_direct", "1 where NICs of peers may write anywhere in the arena")
        direct.add_metric([], float(self._agent.reach.is_open_to_peers))
        yield direct
        if self._agent.guard is not None:
            yield _refused(self._agent.guard.refused)
        yield _counter(
            "prfaas_node_internal_errors", "Errors of our own that were survived", "task", self._agent.failures
        )
        yield _counter(
            "prfaas_control_connections_ended",
            "Connections to the control port that the node ended or turned away, by why",
            "reason",
            self._agent.ended.get("control", {}),
        )
        yield _counter(
            "prfaas_calls_ended",
            "Kept connections that the node ended, by why",
            "reason",
            self._agent.ended.get("calls", {}),
        )
        yield _counter(
            "prfaas_metrics_connections_ended",
            "Connections to the metrics port that the node ended or turned away, by why",
            "reason",
            self._agent.ended.get("metrics", {}),
        )
        yield _counter(
            "prfaas_engine_connections_ended",
            "Connections to the engine that the node ended or turned away, by why",
            "reason",
            self._agent.door.ended,
        )
        yield from self._picked()
        yield _counter("prfaas_config_reloads", "SIGHUPs, by what came of them", "outcome", self._agent.reloads)

    def _picked(self) -> Iterator[Metric]:
        if self._agent.config.picked_port is None:
            return
        counts = self._agent.picked
        about = "Requests that an endpoint picker has picked the node for, by what came of them"
        yield _counter("prfaas_picked_requests", about, "outcome", counts.requests)
        about = "Of them, prompts that were computed here though another node was to prefill them, by why"
        yield _counter("prfaas_picked_fallbacks", about, "reason", counts.fallbacks)
        about = "Prefills of picked requests for other nodes, by what came of them"
        yield _counter("prfaas_picked_legs", about, "outcome", counts.legs)
        about = "Connections to the port of picked requests that the node ended or turned away, by why"
        yield _counter("prfaas_picked_connections_ended", about, "reason", self._agent.ended.get(PICKED, {}))

    def _requests(self) -> Iterator[Metric]:
        agent = self._agent
        if not (agent.loans and agent.legs and agent.incoming and agent.decodes):
            return
        loans, incoming, decodes = agent.loans.counts, agent.incoming.counts, agent.decodes
        yield _counter(
            "prfaas_prefill_tokens",
            "Prompt tokens, by where they came from",
            "source",
            {
                "computed": loans.prefilled_tokens,
                "cached": loans.cached_tokens,
                "landed": decodes.loaded_tokens,
            },
        )
        jobs = CounterMetricFamily(
            "prfaas_engine_jobs",
            "Pages that the engine had on loan, by what for and what came of it",
            labels=["kind", "outcome"],
        )
        for labels, count in (loans.jobs | decodes.jobs).items():
            jobs.add_metric(labels, count)
        yield jobs
        yield _counter("prfaas_pushes", "Transfers that left, by outcome", "outcome", agent.legs.pushed)
        dropped = CounterMetricFamily("prfaas_dropped_pages", "Pages of cold copies of prefixes, dropped by command")
        dropped.add_metric([], loans.dropped_pages)
        yield dropped
        yield _counter("prfaas_prefill_refused", "Prefill jobs refused, by reason", "reason", loans.refused)
        yield _counter(
            "prfaas_landings_refused",
            "Reservations and claims refused, by reason",
            "reason",
            incoming.refused + decodes.refused,
        )
        yield _counter("prfaas_reservations_ended", "Reservations, by how they ended", "reason", incoming.ended)
        yield _counter(
            "prfaas_landings_quantised",
            "Landings that are not exact, by whether they became prefix cache",
            "cache",
            incoming.quantised,
        )


def _role(conversion: pb.Conversion, ended: Mapping[str, int]) -> Iterator[Metric]:
    role = GaugeMetricFamily("prfaas_node_role", "1 for what the node does", labels=["role"])
    role.add_metric([conversion.role], 1.0)
    yield role
    epoch = GaugeMetricFamily("prfaas_node_role_epoch", "Of the newest command to change the role")
    epoch.add_metric([], conversion.epoch)
    yield epoch
    yield _counter("prfaas_conversions", "Commands to change the role, by how they ended", "outcome", ended)


def _security(config: NodeConfig) -> Iterator[Metric]:
    info = GaugeMetricFamily(
        "prfaas_node_security", "1 for what protects transfers and calls", labels=["integrity", "control"]
    )
    info.add_metric([config.sealing, "mtls" if config.identity else "plain"], 1.0)
    yield info
    plain = GaugeMetricFamily(
        "prfaas_node_plain_listener",
        "1 for each port that other machines reach, and that speaks in clear",
        labels=["listener"],
    )
    for listener in config.plain_listeners:
        plain.add_metric([listener], 1.0)
    yield plain
    if config.identity is None:
        return
    expiry = GaugeMetricFamily("prfaas_certificate_expiry_timestamp_seconds", "When the certificate on disk ends")
    with contextlib.suppress(OSError, ValueError):  # it is being replaced
        expiry.add_metric([], expires_at(config.identity.certificate))
    yield expiry


def _refused(refused: Mapping[tuple[str, str], int]) -> Metric:
    family = CounterMetricFamily(
        "prfaas_peer_refusals",
        "What peers were refused for want of a right, by what they asked for and the role in their certificate",
        labels=["operation", "role"],
    )
    for labels, count in refused.items():
        family.add_metric(labels, count)
    return family


def _counter(name: str, about: str, label: str, values: Mapping[str, int]) -> Metric:
    family = CounterMetricFamily(name, about, labels=[label])
    for value, count in values.items():
        family.add_metric([value], count)
    return family


def _pool(pool: pb.PoolReport) -> Iterator[Metric]:
    pages = GaugeMetricFamily("prfaas_pool_pages", "Pages of the arena, by what they hold", labels=["state"])
    for state in ("total", "free", "prefix", "transfer", "locked"):
        pages.add_metric([state], getattr(pool, f"pages_{state}"))
    yield pages
    reservations = GaugeMetricFamily("prfaas_pool_reservations", "Requests that hold pages")
    reservations.add_metric([], pool.reservations)
    yield reservations
    size = GaugeMetricFamily("prfaas_pool_page_bytes", "Bytes of a page")
    size.add_metric([], pool.page_bytes)
    yield size


def _ssd(ssd: pb.SsdReport) -> Iterator[Metric]:
    is_open = GaugeMetricFamily("prfaas_ssd_open", "1 when the SSD tier's directory can be used")
    is_open.add_metric([], float(ssd.open))
    yield is_open
    held = GaugeMetricFamily("prfaas_ssd_bytes", "Bytes of the SSD tier, by state", labels=["state"])
    for state, size in (("capacity", ssd.capacity_bytes), ("held", ssd.bytes), ("queued", ssd.queued_bytes)):
        held.add_metric([state], size)
    yield held
    blocks = GaugeMetricFamily("prfaas_ssd_blocks", "Blocks and snapshots that the SSD tier holds")
    blocks.add_metric([], ssd.blocks)
    yield blocks
    yield _counter("prfaas_ssd_events", "What happened to blocks of the SSD tier", "event", ssd.events)
    yield _counter("prfaas_ssd_promotions", "Prefixes that requests needed back, by outcome", "outcome", ssd.promotions)


def _load(load: pb.Load) -> Iterator[Metric]:
    requests = GaugeMetricFamily("prfaas_node_requests", "Requests and transfers, by state", labels=["state"])
    for state in ("running", "waiting", "sending", "landing"):
        requests.add_metric([state], getattr(load, state))
    yield requests
    queued = GaugeMetricFamily("prfaas_node_queued_tokens", "Uncached prompt tokens not computed yet")
    queued.add_metric([], load.queued_tokens)
    yield queued
    slots = GaugeMetricFamily("prfaas_node_slots", "Sequences that the engine runs at once; 0: it does not say")
    slots.add_metric([], load.slots)
    yield slots
    room = GaugeMetricFamily("prfaas_node_room_tokens", "Of a prompt that fits into pages, by which", labels=["pages"])
    room.add_metric(["free"], load.room.free_tokens)
    room.add_metric(["free_or_evictable"], load.room.tokens)
    yield room
    steps = GaugeMetricFamily("prfaas_node_step_seconds", "What decode steps took lately, by octave", labels=["batch"])
    for step in load.steps:
        steps.add_metric([str(1 << (int(step.batch).bit_length() - 1))], step.seconds)
    yield steps
    moved = CounterMetricFamily(
        "prfaas_kv_bytes",
        "KVCache bytes: egress is what left over TCP, ingress what came over TCP, RDMA and shared memory",
        labels=["direction"],
    )
    moved.add_metric(["egress"], load.egress_bytes_total)
    moved.add_metric(["ingress"], load.ingress_bytes_total)
    yield moved


def _as_vllm(node: pb.NodeDescription) -> Iterator[Metric]:
    """What autoscalers and inference gateways read of a server, under vLLM's names."""
    pool = node.pool
    held = (pool.pages_locked + pool.pages_transfer) / pool.pages_total if pool.pages_total else 0.0
    for name, about, value in (
        ("num_requests_running", "Requests in the engine", node.load.running),
        ("num_requests_waiting", "Requests queued for the engine", node.load.waiting),
        ("kv_cache_usage_perc", "Share of the arena's pages that requests hold, 0 to 1", held),
    ):
        family = GaugeMetricFamily(f"vllm:{name}", about, labels=["model_name"])
        family.add_metric([node.model_id], value)
        yield family


class _ServerCollector(Collector):
    """What an endpoint picker reads of a model server, and no more: it reads that often."""

    def __init__(self, agent: NodeAgent) -> None:
        self._agent = agent

    def collect(self) -> Iterable[Metric]:
        """The families of `_as_vllm`."""
        yield from _as_vllm(self._agent.describe())


def server_page(agent: NodeAgent) -> bytes:
    """How busy the node is, under vLLM's names."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_ServerCollector(agent))
    return generate_latest(registry)


class MetricsServer:
    """The listener; `url` says where."""

    def __init__(self, runner: web.AppRunner, port: GuardedPort, url: str) -> None:
        self._runner = runner
        self._port = port
        self.url = url

    async def close(self) -> None:
        """Stops listening."""
        await self._port.close()
        await self._runner.cleanup()


class MetricsKey:
    """Who may see metrics: anybody, or who shows the key whose SHA-256 a file has."""

    def __init__(self, file: str) -> None:
        self._file = Path(file) if file else None

    def check(self, headers: Mapping[str, str]) -> bool:
        """Whether a key was shown: without a file, none is asked for. Raises HTTPUnauthorized."""
        if self._file is None:
            return False
        scheme, _, key = headers.get("Authorization", "").partition(" ")
        shown = sha256(key.strip().encode("utf-8", "surrogateescape")).hexdigest()
        if scheme.lower() != "bearer" or shown not in self._digests(self._file):
            raise web.HTTPUnauthorized(headers={"WWW-Authenticate": 'Bearer realm="prfaas"'})
        return True

    def _digests(self, file: Path) -> list[str]:
        """Several while one replaces another."""
        try:
            return file.read_text().split()
        except (OSError, ValueError) as error:
            log.error("metrics_key cannot be read, metrics are shown to no reader: %s", error)
            return []


async def _unnamed(_: web.BaseRequest, response: web.StreamResponse) -> None:
    """No answer names the server's software and its version."""
    response.headers.pop("Server", None)


async def serve_metrics(agent: NodeAgent, host: str, port: int) -> MetricsServer:
    """Serves /metrics and /health of a node on `host:port` (0: any free port). Raises OSError if the port is taken.

    Over HTTPS where the node has a certificate and its readers a key.
    """
    key = MetricsKey(agent.config.metrics_key)
    registry = CollectorRegistry(auto_describe=False)
    transport = TransportCollector(agent.prefills.egress.client, agent.listener.server)
    for collector in (NodeCollector(agent), transport):
        registry.register(InCluster(agent.config.cluster, collector))

    async def metrics(request: web.Request) -> web.Response:
        if key.check(request.headers):  # else strangers would be known as well as others
            callers.knows(request.remote or "")
        return web.Response(body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def health(request: web.Request) -> web.Response:
        state = pb.NodeState.Name(agent.state()).removeprefix("NODE_STATE_").lower()
        status = 200 if agent.state() == pb.NODE_STATE_READY else 503
        return web.json_response({"id": agent.config.node_id, "state": state}, status=status)

    app = web.Application()
    app.on_response_prepare.append(_unnamed)
    app.add_routes([web.get("/metrics", metrics), web.get("/health", health)])
    runner = web.AppRunner(app, access_log=None)
    identity = agent.config.identity if agent.config.metrics_key else None
    await runner.setup()
    assert runner.server is not None
    try:
        secure = identity.page_context() if identity is not None else None
        callers = GuardedPort(runner.server, secure)
        bound = callers.start(host, port, "the metrics")
    except BaseException:
        await runner.cleanup()
        raise
    agent.ended["metrics"] = callers.ended
    scheme = "http" if secure is None else "https"
    return MetricsServer(runner, callers, f"{scheme}://{format_address(host, bound)}")
