"""What is no generation: the model list and health for clients, metrics and records for operators."""

from collections.abc import Awaitable, Callable

import msgspec
from aiohttp import web

from gateway.admit import Admission
from gateway.clusters import Clusters
from gateway.connections import JSON
from gateway.errors import ApiError, BadRequest, Unavailable
from gateway.links import Links
from gateway.metrics import CONTENT_TYPE, Metrics
from gateway.records import Records
from planner.decisions.estimates import LearnedCost

Page = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Pages:
    """Reads what others keep."""

    def __init__(
        self,
        clusters: Clusters,
        links: Links,
        cost: LearnedCost,
        admission: Admission,
        metrics: Metrics,
        records: Records,
        started_at: int,
    ) -> None:
        self._clusters = clusters
        self._links = links
        self._cost = cost
        self._admission = admission
        self._metrics = metrics
        self._records = records
        self._started_at = started_at

    def for_clients(self) -> dict[str, Page]:
        """By path."""
        return {"/v1/models": self._models, "/v1/models/{name:.+}": self._model, **self._health()}

    def for_operators(self) -> dict[str, Page]:
        """By path; /health is there as well, for ports that are watched alone."""
        own: dict[str, Page] = {
            "/metrics": self._prometheus,
            "/prfaas/requests": self._requests,
            "/prfaas/links": self._all_links,
        }
        return own | self._health()

    def _health(self) -> dict[str, Page]:
        alive: dict[str, Page] = dict.fromkeys(("/livez", "/liveness", "/ping"), self._alive)
        return alive | dict.fromkeys(("/health", "/healthz", "/readyz", "/readiness"), self._ready)

    async def _models(self, http: web.Request) -> web.Response:
        served = self._clusters.served
        return _json({"object": "list", "data": [self._card(served.name, served.max_model_len)] if served else []})

    async def _model(self, http: web.Request) -> web.Response:
        served, name = self._clusters.served, http.match_info["name"]
        if served is None or name not in (served.name, served.model_id):
            raise ApiError(404, f"The model '{name}' does not exist.", param="model", code="model_not_found")
        return _json(self._card(served.name, served.max_model_len))

    def _card(self, name: str, max_model_len: int) -> dict[str, object]:
        card = {"id": name, "object": "model", "created": self._started_at, "owned_by": "prfaas"}
        return card | {"max_model_len": max_model_len}

    async def _alive(self, http: web.Request) -> web.Response:
        """Whether this process answers."""
        return _json({"status": "ok"})

    async def _ready(self, http: web.Request) -> web.Response:
        """Whether a request would be served: health that says up while every chat fails helps nobody."""
        if self._admission.is_draining:
            raise Unavailable("The gateway is shutting down.", "draining")
        if not self._clusters.is_ready:
            raise Unavailable("No decode node is ready.", "no_decode_node")
        states = {node.id: node.state for node in self._clusters.nodes}
        return _json({"status": "ok", "nodes_ready": list(states.values()).count("ready"), "nodes": states})

    async def _prometheus(self, http: web.Request) -> web.Response:
        self._metrics.observe_nodes(self._clusters.nodes)
        self._metrics.observe_links(self._links.status())
        self._metrics.observe_estimates(self._cost.errors())
        index = self._clusters.index
        self._metrics.known_blocks.set(len(index) if index is not None else 0)
        return web.Response(body=self._metrics.render(), headers={"Content-Type": CONTENT_TYPE})

    async def _all_links(self, http: web.Request) -> web.Response:
        return _json({"data": self._links.status()})

    async def _requests(self, http: web.Request) -> web.Response:
        """Finished requests as JSON lines: those after `?since=SEQ`, those with `?id=ID`."""
        since, wanted = http.query.get("since", "0"), http.query.get("id")
        if not (since.isascii() and since.isdecimal()):
            raise BadRequest("since must be the seq of a record.", param="since", code="invalid_value")
        records = [record for record in self._records.since(int(since)) if wanted in (None, record.id)]
        lines = b"".join(msgspec.json.encode(record) + b"\n" for record in records)
        return web.Response(body=lines, headers={"Content-Type": "application/jsonl"})


def _json(value: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), headers={"Content-Type": JSON})
