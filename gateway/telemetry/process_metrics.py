"""What Prometheus is told of the process itself, its links, plans and logs, beside what it is told of requests."""

from prometheus_client import CollectorRegistry

from gateway.telemetry.instruments import build_instruments, counters, gauge


class ProcessMetrics:
    """Counts what goes on around requests: nodes, links, moves, plans, what the gateway does for itself."""

    _link_failures = counters(
        "prfaas_link_failures", "Times that a link between clusters was found dead", "source", "destination"
    )
    _plans = counters("prfaas_plans", "Plans that were applied, or refused with a reason", "outcome")
    _plan_polls = counters("prfaas_plan_polls", "Questions to the plan service, by what came of them", "outcome")
    _lost = counters("prfaas_node_watch_failures", "Times that an agent could not be watched (on), by reason", "reason")
    _not_logged = counters(
        "prfaas_request_log_lost", "Finished requests that are not in the request log, by reason", "reason"
    )
    _not_traced = counters("prfaas_spans_lost", "Spans that did not reach the collector of traces, by reason", "reason")
    _keys_asked = counters(
        "prfaas_identity_provider_questions",
        "Times that the identity provider was asked for its keys, by outcome",
        "outcome",
    )
    _poisoned = counters(
        "prfaas_engine_killers",
        "Requests under which engines died in turn, by what became of others of their shape",
        "outcome",
    )
    _by_grpc = counters(
        "prfaas_calls_by_grpc",
        "Reservations and aborts that went by gRPC, by why not over a kept connection",
        "reason",
    )
    _unforeseen = counters(
        "prfaas_unforeseen_errors", "Errors of the gateway's own, by the work that they ended", "work"
    )
    _reloads = counters("prfaas_config_reloads", "SIGHUPs, by what came of them", "outcome")
    _moves = counters(
        "prfaas_prefix_moves", "Prefixes sent from node to node, by what for and outcome", "reason", "outcome"
    )
    _moved_bytes = counters("prfaas_prefix_moved_bytes", "KVCache sent to move prefixes", "reason")
    _shares = counters(
        "prfaas_egress_shares", "Parts of a line's egress budget dealt out to its senders, by outcome", "outcome"
    )
    _drops = counters(
        "prfaas_prefix_drops", "Cold copies of prefixes that nodes were told to give up, by outcome", "outcome"
    )

    _keys_shown = counters(
        "prfaas_wrong_keys",
        "Wrong keys that were shown, answers to such that were delayed, requests held off, and tokens that did not hold",
        "what",
    )
    _peers_refused = counters(
        "prfaas_agent_refusals", "Agents and engines that were refused for their certificate, by why", "reason"
    )
    _not_audited = counters("prfaas_audit_lost", "Lines that are not in the audit log's files, by reason", "reason")

    _member_changes = counters(
        "prfaas_member_changes", "Changes of members that a worker has taken over, by kind", "kind"
    )
    _registry_failures = counters(
        "prfaas_registry_failures", "Times that a registry of members was lost, as a worker saw it", "source", "reason"
    )
    _fleet_failures = counters(
        "prfaas_fleet_failures", "Times that this gateway could not agree with others, by what about", "about", "reason"
    )
    _fleet_gateways = gauge("prfaas_fleet_gateways", "Gateways that divide tenants' limits, 0: none are divided")

    _fleet_usage_bytes = counters(
        "prfaas_fleet_usage_bytes", "Tenants' usage that was written to etcd, or read of it", "way"
    )
    _fleet_usage_runs = gauge("prfaas_fleet_usage_runs", "Runs of gateways whose usage lies in etcd by itself")
    _fleet_usage_read = gauge(
        "prfaas_fleet_usage_read_timestamp_seconds", "When the usage of all gateways was read last, since the epoch"
    )

    def __init__(self, registry: CollectorRegistry) -> None:
        build_instruments(self, registry)

    def key_shown(self, what: str) -> None:
        """`wrong`, `delayed`, `held_off`, or `token`."""
        self._keys_shown[what,].inc()

    def peer_refused(self, reason: str) -> None:
        """`nameless`, `revoked`, `trust_domain` or `role`."""
        self._peers_refused[reason,].inc()

    def not_audited(self, reason: str, lines: int) -> None:
        self._not_audited[reason,].inc(lines)

    def plan_polled(self, outcome: str) -> None:
        self._plan_polls[outcome,].inc()

    def plan_offered(self, outcome: str) -> None:
        self._plans[outcome,].inc()

    def link_failed(self, source: str, destination: str) -> None:
        self._link_failures[source, destination].inc()

    def not_logged(self, reason: str, requests: int) -> None:
        self._not_logged[reason,].inc(requests)

    def not_traced(self, reason: str, spans: int) -> None:
        self._not_traced[reason,].inc(spans)

    def keys_asked(self, outcome: str) -> None:
        self._keys_asked[outcome,].inc()

    def poisoned(self, outcome: str) -> None:
        self._poisoned[outcome,].inc()

    def node_lost(self, reason: str) -> None:
        self._lost[reason,].inc()

    def called_by_grpc(self, reason: str) -> None:
        self._by_grpc[reason,].inc()

    def unforeseen(self, work: str) -> None:
        self._unforeseen[work,].inc()

    def reloaded(self, outcome: str) -> None:
        self._reloads[outcome,].inc()

    def moved(self, reason: str, outcome: str, size: int = 0) -> None:
        """Counts a prefix move that has ended, or was not begun."""
        self._moves[reason, outcome].inc()
        self._moved_bytes[reason,].inc(size)

    def shared(self, outcome: str) -> None:
        """Counts a part of a line's egress budget that a sender was told to keep to."""
        self._shares[outcome,].inc()

    def dropped(self, outcome: str) -> None:
        """Counts a cold copy whose node was told to give it up."""
        self._drops[outcome,].inc()

    def member_changed(self, kind: str) -> None:
        """`joined`, `left`, `moved`, `role` or `details`."""
        self._member_changes[kind,].inc()

    def registry_failed(self, source: str, reason: str) -> None:
        """`missing`, `unreadable`, `malformed`, `silent`, `late` ..."""
        self._registry_failures[source, reason].inc()

    def fleet_failed(self, about: str, reason: str) -> None:
        """`unreachable`, `denied`, `late`, `malformed`, `contended`, `lapsed`, `same_name` ..."""
        self._fleet_failures[about, reason].inc()

    def fleet_seen(self, gateways: int) -> None:
        self._fleet_gateways.set(gateways)

    def usage_moved(self, way: str, size: int) -> None:
        """`written` or `read`."""
        self._fleet_usage_bytes[way,].inc(size)

    def usage_read(self, runs: int, unix_s: float) -> None:
        """So many were found, at a time since the epoch."""
        self._fleet_usage_runs.set(runs)
        self._fleet_usage_read.set(unix_s)
