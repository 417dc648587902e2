"""What Prometheus is told. Values are handed in; no other module of the gateway knows the library."""

from collections.abc import Collection, Mapping
from typing import Final, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics import MetricWrapperBase

from gateway.links import LinkStatus
from gateway.node import Node
from gateway.request import Request, cached_tokens
from planner.decisions.estimates import Error

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
TTFT_BUCKETS_S: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
TBT_BUCKETS_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28)
E2E_BUCKETS_S: Final = (0.01, 0.05, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)
TOKEN_BUCKETS: Final = tuple(float(2**power) for power in range(21))  # to 1M; what `prfaas-plan fit --metrics` reads
LAG_BUCKETS_S: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5)


M = TypeVar("M", bound=MetricWrapperBase)


class Children(dict[tuple[str, ...], M]):
    """The children of a metric by the values of its labels, each looked up in the library once. For labels of few values."""

    def __init__(self, metric: M) -> None:
        super().__init__()
        self._metric = metric

    def __missing__(self, values: tuple[str, ...]) -> M:
        child = self[values] = self._metric.labels(*values)
        return child


class Metrics:
    """The gateway's instruments, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self._requests = Children(
            Counter("prfaas_requests", "Finished requests", ["route", "reason", "status"], registry=registry)
        )
        self._ttft = Children(
            Histogram(
                "prfaas_time_to_first_token_seconds", "TTFT", ["route"], registry=registry, buckets=TTFT_BUCKETS_S
            )
        )
        self._tbt = Children(
            Histogram(
                "prfaas_inter_token_latency_seconds",
                "Mean time between the events of a stream",
                ["route"],
                registry=registry,
                buckets=TBT_BUCKETS_S,
            )
        )
        self._e2e = Children(
            Histogram("prfaas_e2e_request_latency_seconds", "E2E", ["route"], registry=registry, buckets=E2E_BUCKETS_S)
        )
        self._kv_bytes = Children(
            Counter(
                "prfaas_kv_transfer_bytes",
                "KVCache sent for requests, by destination cluster and by what carried it",
                ["route", "link", "transport"],
                registry=registry,
            )
        )
        self._prompt_tokens = Children(
            Counter("prfaas_prompt_tokens", "Prompt tokens by where they came from", ["source"], registry=registry)
        )
        self._uncached = Histogram(
            "prfaas_uncached_prompt_tokens",
            "Prompt tokens that had to be computed",
            registry=registry,
            buckets=TOKEN_BUCKETS,
        )
        self._output = Histogram("prfaas_output_tokens", "Tokens of answers", registry=registry, buckets=TOKEN_BUCKETS)
        self._fallbacks = Counter(
            "prfaas_fallbacks", "Times that a first choice did not work out", ["reason"], registry=registry
        )
        self._lost = Counter(
            "prfaas_node_watch_failures", "Times that an agent could not be watched (on), by reason", ["reason"],
            registry=registry,
        )  # fmt: skip
        self._unforeseen = Counter(
            "prfaas_unforeseen_errors", "Errors of the gateway's own, by the work that they ended", ["work"],
            registry=registry,
        )  # fmt: skip
        self._reloads = Counter(
            "prfaas_config_reloads", "SIGHUPs, by what came of them", ["outcome"], registry=registry
        )
        self._turned_away = Counter(
            "prfaas_connections_turned_away", "Connections that the gateway closed, by listener and reason",
            ["listener", "reason"], registry=registry,
        )  # fmt: skip
        self.connections = Gauge("prfaas_connections", "Open connections, by listener", ["listener"], registry=registry)
        self._moves = Counter(
            "prfaas_prefix_moves", "Prefixes sent from node to node, by what for and outcome", ["reason", "outcome"],
            registry=registry,
        )  # fmt: skip
        self._moved_bytes = Counter(
            "prfaas_prefix_moved_bytes", "KVCache sent to move prefixes", ["reason"], registry=registry
        )
        self._lag = Histogram(
            "prfaas_event_loop_lag_seconds", "Delay of the event loop", registry=registry, buckets=LAG_BUCKETS_S
        )
        self._link_failures = Counter(
            "prfaas_link_failures", "Times that a link between clusters was found dead", ["source", "destination"],
            registry=registry,
        )  # fmt: skip
        self._links = Gauge(
            "prfaas_link_senders", "Nodes that may send over a link, by the state of their breaker (closed: in use)",
            ["source", "destination", "state"], registry=registry,
        )  # fmt: skip
        self._estimates = Gauge(
            "prfaas_prefill_estimate_error_ratio", "|predicted / seen - 1| of the latest prefill times",
            ["cluster", "stat"], registry=registry,
        )  # fmt: skip
        self.known_blocks = Gauge(
            "prfaas_known_blocks", "Blocks that nodes have cached, as far as this gateway has heard", registry=registry
        )
        self.in_flight = Gauge("prfaas_requests_in_flight", "Requests being served", registry=registry)
        self.waiting = Gauge(
            "prfaas_requests_waiting", "Requests that wait for room on a decode node", registry=registry
        )
        self._nodes = Gauge("prfaas_nodes", "Nodes by role and state", ["cluster", "role", "state"], registry=registry)
        self._egress = Gauge(
            "prfaas_node_egress_bytes", "KVCache bytes a node said it has sent", ["cluster", "node"], registry=registry
        )

    def observe_nodes(self, nodes: Collection[Node]) -> None:
        """Takes down what the nodes say of themselves."""
        self._nodes.clear()
        self._egress.clear()
        for node in nodes:
            cluster = node.info.cluster if node.info else "unknown"
            self._nodes.labels(cluster, node.role, node.state).inc()
            self._egress.labels(cluster, node.id).set(node.load.egress_bytes_total)

    def observe_links(self, links: Collection[LinkStatus]) -> None:
        """Takes down which links are in use."""
        self._links.clear()
        for link in links:
            for state in link.senders.values():
                self._links.labels(link.source, link.destination, state).inc()

    def observe_estimates(self, errors: Mapping[str, Error]) -> None:
        """Takes down how wrong predicted prefill times were."""
        self._estimates.clear()
        for cluster, error in errors.items():
            self._estimates.labels(cluster, "mean").set(error.mean)
            self._estimates.labels(cluster, "p90").set(error.p90)

    def finished(self, request: Request, status: int, code: str = "none") -> None:
        """Counts a request that is over, however it ended; `code` is why, if it was not even routed."""
        route = request.route_label
        self._requests[route, request.reason_label if request.route else code, str(status)].inc()
        if outcome := request.outcome:  # it has travelled, whatever came of the answer
            self._kv_bytes[route, request.destination, outcome.link or "unknown"].inc(outcome.bytes_total)
        if status != 200:
            return
        timeline = request.timeline
        # An answer that is not streamed comes as a whole: its first byte says nothing about its first token.
        if request.call.stream and timeline.ttft_s is not None:
            self._ttft[route,].observe(timeline.ttft_s)
        if timeline.e2e_s is not None:
            self._e2e[route,].observe(timeline.e2e_s)
        if request.events > 1 and timeline.first_token is not None and timeline.last_token is not None:
            self._tbt[route,].observe((timeline.last_token - timeline.first_token) / (request.events - 1))
        self._count_tokens(request)

    def _count_tokens(self, request: Request) -> None:
        if request.route is None:
            return
        cached = cached_tokens(request)
        self._prompt_tokens["cache",].inc(cached)
        self._prompt_tokens["computed",].inc(max(0, request.prompt.num_tokens - cached))
        self._uncached.observe(max(0, request.prompt.num_tokens - cached))
        self._output.observe(request.output_tokens)

    def rejected(self, code: str, status: int) -> None:
        """Counts a request that was answered with an error before any decision."""
        self._requests["none", code, str(status)].inc()

    def fallback(self, reason: str) -> None:
        self._fallbacks.labels(reason).inc()

    def link_failed(self, source: str, destination: str) -> None:
        self._link_failures.labels(source, destination).inc()

    def node_lost(self, reason: str) -> None:
        self._lost.labels(reason).inc()

    def unforeseen(self, work: str) -> None:
        self._unforeseen.labels(work).inc()

    def reloaded(self, outcome: str) -> None:
        self._reloads.labels(outcome).inc()

    def turned_away(self, listener: str, reason: str) -> None:
        self._turned_away.labels(listener, reason).inc()

    def moved(self, reason: str, outcome: str, size: int = 0) -> None:
        """Counts a prefix move that has ended, or was not begun."""
        self._moves.labels(reason, outcome).inc()
        self._moved_bytes.labels(reason).inc(size)

    def loop_lag(self, seconds: float) -> None:
        self._lag.observe(seconds)

    def render(self) -> bytes:
        """The text exposition."""
        return generate_latest(self.registry)
