"""What Prometheus is told of requests. Values are handed in; no module outside `telemetry` knows the library."""

import json
import os
from collections import Counter as Tally
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Final, TypeVar

from prometheus_client import CollectorRegistry, generate_latest, values
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.mmap_dict import MmapedDict
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead
from prometheus_client.registry import Collector

from gateway.cluster.links import LinkStatus
from gateway.cluster.node import ClusterNode
from gateway.cluster.served_model import short
from gateway.members.roster import SourceStatus
from gateway.request.request import Request, cached_tokens, kept
from gateway.telemetry.added_up import CountersInFiles, LabelledValue, added_up
from gateway.telemetry.instruments import FileValues, build_instruments, counters, gauge, gauges, histogram, histograms
from gateway.telemetry.process_metrics import ProcessMetrics
from gateway.telemetry.tenant_usage import TenantUsage, spent_by
from membership.lines import LineUse
from planner.decisions.estimates.accuracy import Error
from planner.decisions.plans.live_plan import LivePlan

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
TTFT_BUCKETS_S: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
TBT_BUCKETS_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28)
E2E_BUCKETS_S: Final = (0.01, 0.05, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)
TOKEN_BUCKETS: Final = tuple(float(2**power) for power in range(21))  # to 1M; what `prfaas-plan fit --metrics` reads
GAP_BUCKETS_S: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 120.0)
LAG_BUCKETS_S: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5)
OVERLOADED: Final = 429
MAX_REVISIONS: Final = 8  # that a process names in its life: later ones are "other"
MAX_MODELS: Final = 64
SPENT: Final = ("prfaas_tenant_requests", "prfaas_tenant_tokens", "prfaas_tenant_kv_bytes")
SPENT_BEGIN: Final = '["' + SPENT[0].removesuffix("requests")  # of their names in files
WASTED: Final = {OVERLOADED: "refused", 499: "left"}  # by status; else the request failed


L = TypeVar("L", bound=tuple[str, ...])


def keep_in(directory: Path, worker: int) -> None:
    """This process's instruments live in files of `directory` from now on; to be called before the first one is made."""
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(directory)  # the library looks for it, too
    values.ValueClass = FileValues(directory, worker)


def forget_gauges(directory: Path, worker: int) -> None:
    """A worker has ended: what it had open is not open any more."""
    mark_process_dead(worker, str(directory))  # type: ignore[no-untyped-call]


class Metrics:
    """The gateway's instruments, in a registry of their own.

    Workers keep theirs in files of one `directory` (`keep_in`): the page of any of them adds all up. What a worker counted
    stays when it has died; another one in its place counts on.
    """

    _requests = counters("prfaas_requests", "Finished requests", "route", "reason", "status")
    _revisions = counters("prfaas_revision_requests", "Finished requests that were routed", "revision", "status")
    _models = counters("prfaas_model_requests", "Finished requests that were read, by model", "model", "status")
    _model_tokens = counters(
        "prfaas_model_tokens", "Tokens served by model: of prompts, of these cached, of answers", "model", "kind"
    )
    _model_ttft = histograms("prfaas_model_time_to_first_token_seconds", "TTFT", "model", buckets=TTFT_BUCKETS_S)
    _ttft = histograms("prfaas_time_to_first_token_seconds", "TTFT", "route", buckets=TTFT_BUCKETS_S)
    _tbt = histograms(
        "prfaas_inter_token_latency_seconds",
        "Mean time between the tokens of a stream, until its client has to be waited for",
        "route",
        buckets=TBT_BUCKETS_S,
    )
    _e2e = histograms("prfaas_e2e_request_latency_seconds", "E2E", "route", buckets=E2E_BUCKETS_S)
    _kv_bytes = counters(
        "prfaas_kv_transfer_bytes",
        "KVCache sent for requests, by destination cluster and by what carried it",
        "route",
        "link",
        "transport",
    )
    _tenant_requests = counters(
        "prfaas_tenant_requests", "Finished requests of tenants, refused ones too", "tenant", "status"
    )
    _tenant_tokens = counters(
        "prfaas_tenant_tokens", "Tokens served to tenants: of prompts, of these cached, of answers", "tenant", "kind"
    )
    _tenant_bytes = counters(
        "prfaas_tenant_kv_bytes",
        "KVCache that went from cluster to cluster for tenants, by what for",
        "tenant",
        "source",
        "destination",
        "kind",
    )
    _prompt_tokens = counters("prfaas_prompt_tokens", "Prompt tokens by where they came from", "source")
    _readings = counters(
        "prfaas_prompt_readings",
        "Prompts read: continued from where an earlier one ended, or as a whole for a reason",
        "how",
    )
    _uncached = histogram("prfaas_uncached_prompt_tokens", "Prompt tokens that had to be computed", TOKEN_BUCKETS)
    _output = histogram("prfaas_output_tokens", "Tokens of answers", TOKEN_BUCKETS)
    _contexts = counters("prfaas_contexts", "Prefixes of prompts that were to be kept", "outcome")
    _fallbacks = counters("prfaas_fallbacks", "Times that a first choice did not work out", "reason")
    _far_hits = counters(
        "prfaas_summary_hits", "Prefixes that a digest told of, by whether the node had all of it", "outcome"
    )
    _takeovers = counters(
        "prfaas_takeovers", "Streams whose engine failed, by whether another one went on, or why not", "outcome"
    )
    _broken = counters(
        "prfaas_streams_broken",
        "Streams whose client had a part of its answer and was not given the rest, by why",
        "reason",
    )
    _retries_refused = counters(
        "prfaas_retries_refused", "Failures that were not tried elsewhere, as too many were of late", "stage"
    )
    _gaps = histogram(
        "prfaas_takeover_gap_seconds",
        "From an engine's failure in a stream to the next one's first bytes",
        GAP_BUCKETS_S,
    )
    _turned_away = counters(
        "prfaas_connections_turned_away",
        "Connections that the gateway closed, by listener and reason",
        "listener",
        "reason",
    )
    connections = gauges("prfaas_connections", "Open connections, by listener", "listener")
    _refused = counters(
        "prfaas_refusals",
        "Requests that were sent away for load, by class and binding stage",
        "service_class",
        "reason",
    )
    _wasted = counters(
        "prfaas_wasted_prefill_seconds", "Prefill computed for requests whose answer never began, by why", "reason"
    )
    _promises = counters(
        "prfaas_promises",
        "Streams of classes that are promised something, by what came of it",
        "service_class",
        "outcome",
    )
    _lag = histogram("prfaas_event_loop_lag_seconds", "Delay of the event loop", LAG_BUCKETS_S)
    in_flight = gauge("prfaas_requests_in_flight", "Requests being served")
    waiting = gauge("prfaas_requests_waiting", "Requests that wait for room on a decode node")

    def __init__(self, directory: Path | None = None) -> None:
        registry = CollectorRegistry()
        self._page = registry
        self._files = (
            CountersInFiles(directory, MmapedDict.read_all_values_from_file, SPENT_BEGIN)
            if directory is not None
            else None
        )
        if directory is not None:
            self._page = CollectorRegistry()
            self._page.register(_AddedUp(directory))
        self.upkeep = ProcessMetrics(registry)
        self._seen = _Seen()
        self._page.register(self._seen)
        build_instruments(self, registry)
        self._named_revisions = _Labels(MAX_REVISIONS)
        self._named_models = _Labels(MAX_MODELS)

    def _count_revision(self, request: Request, status: int) -> None:
        if request.progress.route is not None:
            self._revisions[self._named_revisions.of(short(request.served.revision)), str(status)].inc()

    def _count_model(self, request: Request, status: int) -> None:
        model = self._named_models.of(request.served.name)
        self._models[model, str(status)].inc()
        if request.has_cost:
            self._model_tokens[model, "prompt"].inc(request.asked.num_tokens)
            self._model_tokens[model, "cached"].inc(cached_tokens(request))
            self._model_tokens[model, "completion"].inc(request.output_tokens)
        if status == 200 and request.call.stream and request.progress.timeline.ttft_s is not None:
            self._model_ttft[model,].observe(request.progress.timeline.ttft_s)

    def finished(self, request: Request, status: int, code: str = "none") -> None:
        """Counts a request that is over, however it ended; `code` is why, if it was not even routed."""
        route = request.route_label
        self._requests[route, request.reason_label if request.progress.route else code, str(status)].inc()
        self._count_revision(request, status)
        self._count_model(request, status)
        self.travelled(request)
        if tenant := request.tenant.name:
            self._count_tenant(request, tenant, status)
        if (
            request.stream.broken_off is not None
            and request.call.stream
            and request.progress.timeline.first_token is not None
        ):
            self._broken[request.stream.broken_off.reason,].inc()
        if request.progress.wasted_prefill_s:
            self._wasted[WASTED.get(status, "failed"),].inc(request.progress.wasted_prefill_s)
        if status == OVERLOADED and code != "none":
            self._refused[request.service.name, code].inc()
        if status != 200:
            return
        if request.service.promises and (outcome := kept(request)):
            self._promises[request.service.name, outcome].inc()
        timeline = request.progress.timeline
        # An answer that is not streamed comes as a whole: its first byte says nothing about its first token.
        if request.call.stream and timeline.ttft_s is not None:
            self._ttft[route,].observe(timeline.ttft_s)
        if timeline.e2e_s is not None:
            self._e2e[route,].observe(timeline.e2e_s)
        if (tbt_s := request.tbt_s) is not None:
            self._tbt[route,].observe(tbt_s)
        self._count_tokens(request)

    def travelled(self, request: Request) -> None:
        """Counts the KVCache that a try has had sent, whatever becomes of the answer. To be called once for each try."""
        if sent := request.progress.outcome:
            self._kv_bytes[request.route_label, request.progress.destination, sent.link or "unknown"].inc(
                sent.bytes_total
            )
            self.sent_for(
                request.tenant.name, request.progress.origin, request.progress.destination, "request", sent.bytes_total
            )

    def _count_tenant(self, request: Request, tenant: str, status: int) -> None:
        self._tenant_requests[tenant, str(status)].inc()
        if request.has_cost:
            self._tenant_tokens[tenant, "prompt"].inc(request.asked.num_tokens)
            self._tenant_tokens[tenant, "cached"].inc(cached_tokens(request))
            self._tenant_tokens[tenant, "completion"].inc(request.output_tokens)

    def sent_for(self, tenant: str, source: str, destination: str, kind: str, size: int) -> None:
        """Counts KVCache that went from cluster to cluster for a tenant; "" is no tenant."""
        if tenant:
            self._tenant_bytes[tenant, source, destination, kind].inc(size)

    def spent(self) -> list[TenantUsage]:
        """What each tenant has been served, by all workers together."""
        series = _counters_of(self._page) if self._files is None else self._files.series()
        return spent_by(*(series[name] for name in SPENT))

    def _count_tokens(self, request: Request) -> None:
        if request.progress.route is None:
            return
        cached = cached_tokens(request)
        self._prompt_tokens["cache",].inc(cached)
        self._prompt_tokens["computed",].inc(max(0, request.asked.num_tokens - cached))
        self._uncached.observe(max(0, request.asked.num_tokens - cached))
        self._output.observe(request.output_tokens)

    def read(self, how: str) -> None:
        """Counts a prompt that was read."""
        self._readings[how,].inc()

    def context(self, outcome: str) -> None:
        """A marked prefix is kept, or why not."""
        self._contexts[outcome,].inc()

    def rejected(self, code: str, status: int, tenant: str = "") -> None:
        """Counts a request, of a tenant or none, that was answered with an error before any decision."""
        self._requests["none", code, str(status)].inc()
        if tenant:
            self._tenant_requests[tenant, str(status)].inc()

    def passed_on(self, tenant: str, status: int) -> None:
        """Counts a tenant's request that an engine has answered, and that is no generation."""
        if tenant:
            self._tenant_requests[tenant, str(status)].inc()

    def computed(self, tenant: str, tokens: int) -> None:
        """Counts a prompt of a tenant that is for no generation."""
        if tenant and tokens:
            self._tenant_tokens[tenant, "prompt"].inc(tokens)

    def far_hit(self, outcome: str) -> None:
        self._far_hits[outcome,].inc()

    def fallback(self, reason: str) -> None:
        self._fallbacks[reason,].inc()

    def retry_refused(self, stage: str) -> None:
        self._retries_refused[stage,].inc()

    def taken_over(self, outcome: str, gap_s: float | None = None) -> None:
        """Counts a stream whose engine failed: "continued" after `gap_s`, or why not."""
        self._takeovers[outcome,].inc()
        if gap_s is not None:
            self._gaps.observe(gap_s)

    def turned_away(self, listener: str, reason: str) -> None:
        self._turned_away[listener, reason].inc()

    def loop_lag(self, seconds: float) -> None:
        self._lag.observe(seconds)

    def render(self) -> bytes:
        """The text exposition."""
        return generate_latest(self._page)

    # What is looked up when the page is asked for, as this process sees it

    def observe_nodes(self, nodes: Collection[ClusterNode]) -> None:
        """Takes down what the nodes say of themselves."""
        counts, egress = Tally[tuple[str, str, str]](), dict[tuple[str, str], float]()
        for node in nodes:
            cluster = node.info.cluster if node.info else "unknown"
            counts[cluster, node.role, node.state] += 1
            egress[cluster, node.id] = node.load.egress_bytes_total
        self._seen.note("prfaas_nodes", "Nodes by role and state", ("cluster", "role", "state"), counts)
        self._seen.note(
            "prfaas_node_egress_bytes", "KVCache bytes a node said it has sent", ("cluster", "node"), egress
        )

    def observe_members(self, sources: Collection[SourceStatus]) -> None:
        """Takes down what the registries of members are worth, as this worker sees them."""
        counts = {(each.source, each.state): each.members - each.refused for each in sources}
        counts |= {(each.source, "refused"): each.refused for each in sources}
        what = "Members by registry, and whether it is fresh; refused: may not be spoken to"
        self._seen.note("prfaas_members", what, ("source", "state"), counts)
        left_out = {(each.source, reason): count for each in sources for reason, count in each.left_out.items()}
        what = "What a registry of members lists and no gateway can use, by reason"
        self._seen.note("prfaas_members_left_out", what, ("source", "reason"), left_out)
        frozen = {(each.source,): each.frozen_s for each in sources}
        what = "For how long a registry of members has been lost, 0: it is not"
        self._seen.note("prfaas_membership_frozen_seconds", what, ("source",), frozen)

    def observe_links(self, links: Collection[LinkStatus]) -> None:
        """Takes down which links there are, and which are in use."""
        senders = Tally(
            (link.source, link.destination, str(state)) for link in links for state in link.senders.values()
        )
        what = "Nodes that may send over a link, by the state of their breaker (closed: in use; unheard: the node is silent)"
        self._seen.note("prfaas_link_senders", what, ("source", "destination", "state"), senders)
        ends = ("source", "destination")
        up = {(link.source, link.destination): int(link.up) for link in links}
        self._seen.note("prfaas_link_up", "1 while requests may go over a link", ends, up)
        drained = {(link.source, link.destination): int(link.drained) for link in links}
        budgets = {(link.source, link.destination): link.budget_bytes_per_s or 0.0 for link in links}
        what = "Egress budgets of all senders of a link, silent ones too; 0: not every sender has one"
        self._seen.note("prfaas_line_budget_bytes_per_second", what, ("cluster", "link"), budgets)
        _note_lines(self._seen, [line for link in links for line in link.lines])
        self._seen.note("prfaas_link_drained", "1 while operators want nothing new on a link", ends, drained)

    def observe_estimates(self, by_model: Mapping[str, Mapping[tuple[str, str], Error]]) -> None:
        """Takes down how wrong predictions were, by model, by what was predicted, and of what."""
        labels, named = _of_models(by_model)
        stats = {
            (*named[model], *kind, name): getattr(error, name)
            for model, errors in by_model.items()
            for kind, error in errors.items()
            for name in ("mean", "p90")
        }
        what = "|predicted / seen - 1| of the latest predictions, by what was predicted"
        self._seen.note("prfaas_estimate_error_ratio", what, (*labels, "what", "of", "stat"), stats)

    def observe_plan(self, by_model: Mapping[str, LivePlan | None], at: float) -> None:
        """Takes down which plan is followed for each model; `at` is seconds since the epoch."""
        labels, named = _of_models(by_model)
        plans = {named[model]: plan for model, plan in by_model.items()}
        versions = {key: plan.version if plan is not None else 0 for key, plan in plans.items()}
        ages_s = {key: max(0.0, at - plan.made_at) if plan is not None else 0.0 for key, plan in plans.items()}
        self._seen.note("prfaas_plan_version", "Version of the plan followed, 0: none", labels, versions)
        self._seen.note("prfaas_plan_age_seconds", "Age of the plan followed, 0: none", labels, ages_s)

    def observe_models(self, ready: Mapping[str, bool], waiting: Mapping[str, int], plans: Mapping[str, int]) -> None:
        """Takes down how each model is served: whether a request would be, how many wait, by which plan (0: none)."""
        labels = ("model",)
        named = {(name,): int(is_ready) for name, is_ready in ready.items()}
        self._seen.note("prfaas_model_ready", "1 while requests to a model would be served", labels, named)
        counts = {(name,): count for name, count in waiting.items()}
        what = "Requests that wait for room on a decode node of a model, in this process"
        self._seen.note("prfaas_model_requests_waiting", what, labels, counts)
        versions = {(name,): version for name, version in plans.items()}
        what = "Version of the plan that is followed for a model, 0: none"
        self._seen.note("prfaas_model_plan_version", what, labels, versions)

    def observe_index(self, blocks: int, names: int) -> None:
        """Takes down what is known of the nodes' caches; `names` by digests."""
        what = "Blocks that nodes have cached, as far as this gateway has heard"
        self._seen.note("prfaas_known_blocks", what, (), {(): blocks})
        what = "Short names of blocks that digests of nodes far away have"
        self._seen.note("prfaas_known_names", what, (), {(): names})

    def observe_names(self, moved: float, has_earlier: bool) -> None:
        """Takes down by which secrets blocks are named."""
        what = "Share of prompts that the newest secret names whatever is cached; 1: an earlier one is of no use"
        self._seen.note("prfaas_names_moved_ratio", what, (), {(): moved})
        what = "1 while the file of names_secret has an earlier secret, too"
        self._seen.note("prfaas_names_earlier_secret", what, (), {(): int(has_earlier)})

    def observe_workers(self, states: Mapping[str, int], restarts: int) -> None:
        """Takes down how the processes of this gateway are."""
        by_state = {(state,): count for state, count in states.items()}
        self._seen.note("prfaas_workers", "Processes of this gateway, by state", ("state",), by_state)
        family = CounterMetricFamily("prfaas_worker_restarts", "Workers that died and were started again")
        family.add_metric((), restarts)
        self._seen.families["prfaas_worker_restarts"] = family


class _AddedUp(Collector):
    """The instruments of all workers, out of their files. Each gauge here is a sum ("livesum")."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def collect(self) -> Iterable[Metric]:
        found: dict[str, Metric] = {}
        for kind, values_of in added_up(self._directory, MmapedDict.read_all_values_from_file).items():
            for key, value in values_of.items():
                family, name, labels, what = json.loads(key)
                metric = found.setdefault(family, Metric(family, what, kind))
                metric._multiprocess_mode = "livesum"  # type: ignore[attr-defined]
                metric.add_sample(name, tuple(sorted(labels.items())), value)  # type: ignore[arg-type]
        return MultiProcessCollector._accumulate_metrics(found, True)  # type: ignore[no-untyped-call, no-any-return]


def _counters_of(page: CollectorRegistry) -> dict[str, list[LabelledValue]]:
    found: dict[str, list[LabelledValue]] = defaultdict(list)
    for family in page.collect():
        found[family.name] = [(each.labels, each.value) for each in family.samples if each.name.endswith("_total")]
    return found


class _Labels:
    """The values of a label, `most` of them in the life of a process: later ones are "other"."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._named: set[str] = set()

    def of(self, name: str) -> str:
        if len(self._named) < self._most:
            self._named.add(name)
        return name if name in self._named else "other"


class _Seen(Collector):
    """Gauges that each look replaces."""

    def __init__(self) -> None:
        self.families: dict[str, Metric] = {}

    def note(self, name: str, what: str, labels: tuple[str, ...], series: Mapping[L, float]) -> None:
        """What `name` is now, by the values of its labels."""
        family = GaugeMetricFamily(name, what, labels=labels)
        for values_of, value in series.items():
            family.add_metric(values_of, value)
        self.families[name] = family

    def collect(self) -> Iterable[Metric]:
        return list(self.families.values())


def _of_models(models: Collection[str]) -> tuple[tuple[str, ...], dict[str, tuple[str, ...]]]:
    """The label for models and its value for each; a gateway of one model has no such label."""
    if len(models) < 2:
        return (), dict.fromkeys(models, ())
    return ("model",), {model: (model,) for model in models}


def _note_lines(seen: "_Seen", lines: Collection[LineUse]) -> None:
    for name, what, field in (
        ("prfaas_described_line_rate_bytes_per_second", "What may go over a described line", "rate_bytes_per_s"),
        ("prfaas_described_line_share", "Part of what goes between its ends that takes a described line", "share"),
        ("prfaas_described_line_used_ratio", "What goes over a described line now, of what may", "used_ratio"),
        (
            "prfaas_described_line_warn_ratio",
            "Part of its rate or budget at which a described line is worth a look",
            "warn_ratio",
        ),
        (
            "prfaas_described_line_critical_ratio",
            "The same at which requests wait for it",
            "critical_ratio",
        ),
        ("prfaas_described_line_price_per_gb", "Price of a gigabyte over a described line", "price_per_gb"),
        (
            "prfaas_described_line_rent_per_month",
            "Price of a month of it, whatever is sent",
            "rent_per_month",
        ),
        (
            "prfaas_described_line_budget_per_month",
            "What a month of it may cost; 0: no budget",
            "budget_per_month",
        ),
    ):
        values = {(line.name, line.source, line.destination): getattr(line, field) for line in lines}
        seen.note(name, what, ("line", "cluster", "link"), values)
