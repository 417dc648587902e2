"""What Prometheus is told of the process itself, its links, plans and logs, beside what it is told of requests."""

from typing import Final, TypeVar

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.metrics import MetricWrapperBase

MOST_SERIES: Final = 16_384  # of one metric; reloads may bring new tenants for ever

M = TypeVar("M", bound=MetricWrapperBase)


class Children(dict[tuple[str, ...], M]):
    """The children of a metric by the values of its labels, each looked up once; from `most` on one for all."""

    def __init__(self, metric: M, *, most: int = MOST_SERIES) -> None:
        super().__init__()
        self._metric = metric
        self._most = most

    def __missing__(self, values: tuple[str, ...]) -> M:
        if len(self) >= self._most:
            values = ("other",) * len(values)
        child = self[values] = self._metric.labels(*values)
        return child


class ProcessMetrics:
    """Counts what goes on around requests: nodes, links, moves, plans, what the gateway does for itself."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._link_failures = Counter(
            "prfaas_link_failures", "Times that a link between clusters was found dead", ["source", "destination"],
            registry=registry,
        )  # fmt: skip
        self._plans = Counter(
            "prfaas_plans", "Plans that were applied, or refused with a reason", ["outcome"], registry=registry
        )
        self._plan_polls = Counter(
            "prfaas_plan_polls", "Questions to the plan service, by what came of them", ["outcome"], registry=registry
        )
        self._lost = Counter(
            "prfaas_node_watch_failures", "Times that an agent could not be watched (on), by reason", ["reason"],
            registry=registry,
        )  # fmt: skip
        self._not_logged = Counter(
            "prfaas_request_log_lost", "Finished requests that are not in the request log, by reason", ["reason"],
            registry=registry,
        )  # fmt: skip
        self._not_traced = Counter(
            "prfaas_spans_lost", "Spans that did not reach the collector of traces, by reason", ["reason"],
            registry=registry,
        )  # fmt: skip
        self._keys_asked = Counter(
            "prfaas_identity_provider_questions", "Times that the identity provider was asked for its keys, by outcome",
            ["outcome"], registry=registry,
        )  # fmt: skip
        self._poisoned = Counter(
            "prfaas_engine_killers", "Requests under which engines died in turn, by what became of others of their shape",
            ["outcome"], registry=registry,
        )  # fmt: skip
        self._by_grpc = Counter(
            "prfaas_calls_by_grpc",
            "Reservations and aborts that went by gRPC, by why not over a kept connection",
            ["reason"],
            registry=registry,
        )
        self._unforeseen = Counter(
            "prfaas_unforeseen_errors", "Errors of the gateway's own, by the work that they ended", ["work"],
            registry=registry,
        )  # fmt: skip
        self._reloads = Counter(
            "prfaas_config_reloads", "SIGHUPs, by what came of them", ["outcome"], registry=registry
        )
        self._moves = Counter(
            "prfaas_prefix_moves", "Prefixes sent from node to node, by what for and outcome", ["reason", "outcome"],
            registry=registry,
        )  # fmt: skip
        self._moved_bytes = Counter(
            "prfaas_prefix_moved_bytes", "KVCache sent to move prefixes", ["reason"], registry=registry
        )
        self._shares = Counter(
            "prfaas_egress_shares", "Parts of a line's egress budget dealt out to its senders, by outcome", ["outcome"],
            registry=registry,
        )  # fmt: skip
        self._drops = Counter(
            "prfaas_prefix_drops", "Cold copies of prefixes that nodes were told to give up, by outcome", ["outcome"],
            registry=registry,
        )  # fmt: skip

        self._keys_shown = Counter(
            "prfaas_wrong_keys", "Wrong keys that were shown, answers to such that were delayed, and requests held off",
            ["what"], registry=registry,
        )  # fmt: skip
        self._not_audited = Counter(
            "prfaas_audit_lost", "Lines that are not in the audit log's files, by reason", ["reason"], registry=registry
        )

    def key_shown(self, what: str) -> None:
        """`wrong`, `delayed` or `held_off`."""
        self._keys_shown.labels(what).inc()

    def not_audited(self, reason: str, lines: int) -> None:
        self._not_audited.labels(reason).inc(lines)

    def plan_polled(self, outcome: str) -> None:
        self._plan_polls.labels(outcome).inc()

    def plan_offered(self, outcome: str) -> None:
        self._plans.labels(outcome).inc()

    def link_failed(self, source: str, destination: str) -> None:
        self._link_failures.labels(source, destination).inc()

    def not_logged(self, reason: str, requests: int) -> None:
        self._not_logged.labels(reason).inc(requests)

    def not_traced(self, reason: str, spans: int) -> None:
        self._not_traced.labels(reason).inc(spans)

    def keys_asked(self, outcome: str) -> None:
        self._keys_asked.labels(outcome).inc()

    def poisoned(self, outcome: str) -> None:
        self._poisoned.labels(outcome).inc()

    def node_lost(self, reason: str) -> None:
        self._lost.labels(reason).inc()

    def called_by_grpc(self, reason: str) -> None:
        self._by_grpc.labels(reason).inc()

    def unforeseen(self, work: str) -> None:
        self._unforeseen.labels(work).inc()

    def reloaded(self, outcome: str) -> None:
        self._reloads.labels(outcome).inc()

    def moved(self, reason: str, outcome: str, size: int = 0) -> None:
        """Counts a prefix move that has ended, or was not begun."""
        self._moves.labels(reason, outcome).inc()
        self._moved_bytes.labels(reason).inc(size)

    def shared(self, outcome: str) -> None:
        """Counts a part of a line's egress budget that a sender was told to keep to."""
        self._shares.labels(outcome).inc()

    def dropped(self, outcome: str) -> None:
        """Counts a cold copy whose node was told to give it up."""
        self._drops.labels(outcome).inc()
