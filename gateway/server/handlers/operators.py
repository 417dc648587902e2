"""Paths without generation: the model list and health for clients, metrics and records for operators."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from typing import Final, Protocol

import msgspec
from aiohttp import web

from gateway.admission.concurrency import ConcurrencyLimiter
from gateway.auth.keyring import Keyring
from gateway.auth.rights import Route
from gateway.cluster.links import ClusterLinks
from gateway.cluster.registry import Clusters
from gateway.cluster.served_model import ServedModel
from gateway.errors import BadRequest, NoDecodeNode, Unavailable, unknown_model
from gateway.fleet.usage.counts import largest
from gateway.fleet.usage.keeper import FleetUsage
from gateway.http.connections import JSON
from gateway.members.roster import Roster
from gateway.models.load_report import LoadReporter
from gateway.models.served import ModelParts, Models
from gateway.routing.name_rotation import NameRotation
from gateway.routing.transfer_log import merged
from gateway.telemetry.metrics import CONTENT_TYPE, Metrics
from gateway.telemetry.page_thread import PageThread
from gateway.telemetry.tenant_usage import TenantUsage, as_csv
from gateway.workers.peers import NumberedRing, WorkerPeers, lines_of
from gateway.workers.process_scope import SingleProcess, WorkerProcess
from gateway.workers.shared_counters import WorkerState

Page = Callable[[web.Request], Awaitable[web.StreamResponse]]
News = Callable[[int], Awaitable[tuple[list[bytes], list[bytes]]]]


class OperatorPages(Protocol):
    """Further pages for operators, by path."""

    def to_get(self, news: News, sequence: Callable[[web.Request, str], int]) -> dict[str, Page]: ...
    def to_change(self) -> dict[Route, Page]: ...


class _Identified(msgspec.Struct, frozen=True):
    """What a record is asked for by."""

    id: str


COMPLETE: Final = "x-prfaas-usage-complete"  # of a table: it has no place for that
_ID: Final = msgspec.json.Decoder(_Identified)


class OperatorEndpoints:
    """Reads what others keep."""

    def __init__(
        self,
        *,
        clusters: Clusters,
        models: Models,
        links: ClusterLinks,
        admission: ConcurrencyLimiter,
        metrics: Metrics,
        usage: FleetUsage | None,
        kept: Mapping[str, NumberedRing],
        load: LoadReporter,
        seat: SingleProcess | WorkerProcess,
        siblings: WorkerPeers | None,
        console: OperatorPages,
        clock: Callable[[], float],
        keyring: Keyring,
        started_at: int,
        roster: Roster,
        rotation: NameRotation,
    ) -> None:
        self._clusters = clusters
        self._roster = roster
        self._rotation = rotation
        self._links = links
        self._models_served = models
        self._admission = admission
        self._metrics = metrics
        self._fleet_usage = usage
        self._kept = kept
        self._load = load
        self._seat = seat
        self._siblings = siblings
        self._console = console
        self._clock = clock
        self._keyring = keyring
        self._started_at = started_at
        self._page_thread = PageThread()

    def for_clients(self) -> dict[str, Page]:
        """By path."""
        return {"/v1/models": self._models, "/v1/models/{name:.+}": self._model}

    def by_operators(self) -> dict[Route, Page]:
        """By method and path."""
        return {("GET", path): page for path, page in self._for_operators().items()} | self._console.to_change()

    def _for_operators(self) -> dict[str, Page]:
        own: dict[str, Page] = {
            "/metrics": self._prometheus,
            "/prfaas/requests": self._requests,
            "/prfaas/flows": self._all_flows,
            "/prfaas/links": self._all_links,
            "/prfaas/load": self._all_load,
            "/prfaas/usage": self._usage,
            "/prfaas/audit": self._audit,
        }
        return own | self._console.to_get(self._news, _sequence)

    def health(self) -> dict[str, Page]:
        """By path: for anybody, on every port, as each may be watched alone."""
        alive: dict[str, Page] = dict.fromkeys(("/livez", "/liveness", "/ping"), self._alive)
        return alive | dict.fromkeys(("/health", "/healthz", "/readyz", "/readiness"), self._ready)

    async def _models(self, http: web.Request) -> web.Response:
        tenant = self._keyring.tenant(http.headers)
        cards = [
            self._card(served, name)
            for served in self._models_served.seen_by(tenant)
            for name in dict.fromkeys((served.name, *served.aliases, *sorted(served.adapters)))
            if self._models_served.seen_as(name, tenant) is served
        ]
        return json_response({"object": "list", "data": cards})

    async def _model(self, http: web.Request) -> web.Response:
        tenant, name = self._keyring.tenant(http.headers), http.match_info["name"]
        if (served := self._models_served.seen_as(name, tenant)) is None:
            raise unknown_model(name)
        is_own = name in served.adapters or name in served.aliases
        return json_response(self._card(served, name if is_own else served.name))

    def _card(self, served: ServedModel, name: str) -> dict[str, object]:
        card: dict[str, object] = {"id": name, "object": "model", "created": self._started_at, "owned_by": "prfaas"}
        if name != served.name:
            card["parent"] = served.name  # as vLLM says of adapters
        return card | {"max_model_len": served.max_model_len}

    async def _alive(self, http: web.Request) -> web.Response:
        """Whether this process answers."""
        return json_response({"status": "ok"})

    async def _ready(self, http: web.Request) -> web.Response:
        """Whether a request would be served: a health check that says up while every chat fails would be useless."""
        if self._admission.is_draining or self._admission.is_leaving:
            raise Unavailable("The gateway is shutting down.", "draining")
        if not self._roster.is_synced:
            raise Unavailable("A registry of members has not been read yet.", "members_unread")
        wanted = http.query.get("model")
        if wanted is not None and not self._models_served.serves(self._seen(wanted, http).key):
            raise NoDecodeNode(wanted)
        if not self._clusters.is_ready:
            raise Unavailable("No decode node is ready.", "no_decode_node")
        workers = self._seat.states()
        if workers.get(WorkerState.WITHOUT_NODES):  # the port is theirs, too
            raise Unavailable("A worker of this gateway sees no decode node that is ready.", "worker_not_ready")
        # One that has not been heard may be listed by the name of another.
        states = {node.id: node.state for node in sorted(self._clusters.nodes, key=lambda node: node.info is not None)}
        health: dict[str, object] = {"status": "ok", "nodes_ready": list(states.values()).count("ready")}
        if not self._keyring.has_tenants or self._keyring.is_operator(http.headers):
            health["nodes"] = states
        return json_response(health | {"workers_ready": workers.get(WorkerState.READY, 0)} if workers else health)

    def _seen(self, name: str, http: web.Request) -> ModelParts:
        """The model of that name, if it may be known here that there is one. Raises ApiError.

        Where there are tenants, a probe shows a key like any client: strangers learn no names of models.
        """
        if not name or self._keyring.is_operator(http.headers):
            return self._models_served.named(name)
        return self._models_served.usable(name, self._keyring.tenant(http.headers))

    async def _prometheus(self, http: web.Request) -> web.Response:
        self._metrics.observe_nodes(self._clusters.nodes)
        self._metrics.observe_members(self._roster.status())
        self._metrics.observe_links(self._links.status())
        names = self._rotation.status()
        self._metrics.observe_names(names.moved, bool(names.earlier))
        served = {self._models_served.name_of(each.key): each for each in self._models_served}
        self._metrics.observe_estimates({name: each.router.errors() for name, each in served.items()})
        plans = {name: each.follower.plan for name, each in served.items()}
        self._metrics.observe_plan(plans, datetime.now(UTC).timestamp())
        index = self._clusters.index
        self._metrics.observe_index(len(index) if index is not None else 0, self._clusters.indexes.num_names)
        standing = self._models_served.standing()
        self._metrics.observe_models(
            {each.model: each.is_ready for each in standing},
            {each.model: each.waiting for each in standing},
            {each.model: each.plan for each in standing},
        )
        if workers := self._seat.states():
            by_name = {state.name.lower(): count for state, count in workers.items()}
            self._metrics.observe_workers(by_name, self._seat.restarts)
        body = await self._page_thread.has(self._metrics.render)
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE})

    async def _all_links(self, http: web.Request) -> web.Response:
        return json_response({"data": self._links.status()})

    async def _usage(self, http: web.Request) -> web.Response:
        """What each tenant has been served, here (`?gateway=self`) or by the whole fleet.

        `?format=csv` gives a table, `?top=N` the N tenants with the most tokens, and all others as one.
        """
        wanted, whose = http.query.get("format", "json"), http.query.get("gateway", "all")
        if wanted not in ("json", "csv"):
            raise BadRequest(f"format must be json or csv, not {wanted[:40]!r}.", param="format", code="invalid_value")
        if whose not in ("all", "self"):
            raise BadRequest(f"gateway must be all or self, not {whose[:40]!r}.", param="gateway", code="invalid_value")
        most = _top(http)
        if self._fleet_usage is None:
            spent = await _of_the_top(await self._page_thread.has(self._metrics.spent), most)
            return json_response({"data": spent}) if wanted == "json" else _csv(as_csv(spent))
        fleet = self._fleet_usage
        report = await self._page_thread.has(fleet.report if whose == "all" else fleet.own_report)
        report = msgspec.structs.replace(report, data=await _of_the_top(report.data, most))
        if wanted == "json":
            return json_response(report)
        table = _csv(as_csv(report.data))
        table.headers[COMPLETE] = str(report.complete).lower()
        return table

    async def _all_load(self, http: web.Request) -> web.Response:
        """What was asked for since `?boot=ID&uncached=SEQ&outputs=SEQ` of `?model=NAME`, and its clusters as they are."""
        uncached, outputs = (_sequence(http, name) for name in ("uncached", "outputs"))
        parts = self._models_served.named(http.query.get("model", ""))
        return json_response(self._load.after(parts, http.query.get("boot", ""), uncached, outputs))

    async def _requests(self, http: web.Request) -> web.Response:
        """Finished requests as JSON lines: those after `?since=SEQ`, those with `?id=ID`."""
        since, wanted = _sequence(http, "since"), http.query.get("id")
        last = self._siblings.last_seq() if self._siblings is not None else 0
        lines = await self._lines("requests", self._seat.cursor(since), last)
        if wanted is not None:
            lines = [line for line in lines if _ID.decode(line).id == wanted]
        return web.Response(
            body=b"".join(line + b"\n" for line in lines), headers={"Content-Type": "application/jsonl"}
        )

    async def _audit(self, http: web.Request) -> web.Response:
        """The newest changes and refused attempts as JSON lines; `?since=SEQ`: those after that one."""
        last = self._siblings.last_seq() if self._siblings is not None else 0
        lines = await self._lines("audit", self._seat.cursor(_sequence(http, "since")), last)
        return web.Response(
            body=b"".join(line + b"\n" for line in lines), headers={"Content-Type": "application/jsonl"}
        )

    async def _all_flows(self, http: web.Request) -> web.Response:
        """What went from node to node, as JSON lines: those after `?since=SEQ`."""
        records, flows = await self._news(_sequence(http, "since"))
        epoch_s = datetime.now(UTC).timestamp() - self._clock()
        found = merged(
            records, flows, {node.id: node.cluster for node in self._clusters.nodes if node.info is not None}, epoch_s
        )
        body = b"".join(msgspec.json.encode(flow) + b"\n" for flow in found)
        return web.Response(body=body, headers={"Content-Type": "application/jsonl"})

    async def _news(self, seq: int) -> tuple[list[bytes], list[bytes]]:
        """Records and flows after number `seq`. A reader that next asks for what follows the last of them misses nothing."""
        last = self._siblings.last_seq() if self._siblings is not None else 0
        seq = self._seat.cursor(seq)
        return await self._lines("requests", seq, last), await self._lines("flows", seq, last)

    async def _lines(self, what: str, seq: int, last: int) -> list[bytes]:
        if self._siblings is None:
            return [line for _, line in lines_of(self._kept[what], seq)]
        lines, silent = await self._siblings.lines(what, seq, last)
        for _ in range(silent):
            self._metrics.fallback("worker_silent")
        return [line for _, line in lines]


def _top(http: web.Request) -> int | None:
    """How many tenants are wanted; None: all. Raises BadRequest."""
    text = http.query.get("top")
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) < 5 and int(text)):
        raise BadRequest("top must be a number of tenants from 1 to 9999.", param="top", code="invalid_value")
    return int(text)


async def _of_the_top(accounts: list[TenantUsage], most: int | None) -> list[TenantUsage]:
    """In a thread: there may be thousands."""
    return accounts if most is None else await asyncio.to_thread(largest, accounts, most)


def _sequence(http: web.Request, name: str) -> int:
    """A cursor in the query; 0 without one. Raises BadRequest."""
    text = http.query.get(name, "0")
    if not (text.isascii() and text.isdecimal() and len(text) < 20):
        raise BadRequest(f"{name} must be a sequence number.", param=name, code="invalid_value")
    return int(text)


def _csv(text: str) -> web.Response:
    return web.Response(text=text, content_type="text/csv")


def json_response(value: object) -> web.Response:
    """A page of JSON."""
    return web.Response(body=msgspec.json.encode(value), headers={"Content-Type": JSON})
