"""What serves each model of a gateway, by its key, and which of them a request is for.

body ──► the model that it names ──► its reader, router, line ──► nodes of that model alone
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import msgspec

from gateway.admission.queue import WaitingLine
from gateway.admission.slo import SloGate
from gateway.auth.keyring import Tenant
from gateway.cluster.registry import Clusters, is_ready
from gateway.cluster.served_model import ServedModel
from gateway.config.gateway import GatewayConfig
from gateway.config.models import REST, ModelCatalog
from gateway.errors import NoModel, Overloaded, no_model_named, unknown_model
from gateway.models.asked import model_at_begin, model_in
from gateway.pipeline.pipeline import Pipeline
from gateway.request.request import Request
from gateway.routing.plan_follower import Follower
from gateway.routing.prefix_transfers import PrefixTransfers
from gateway.routing.replication import Replicas
from gateway.routing.router import Router
from gateway.telemetry.load_report import OfferedLoad

SHORT_BODY_BYTES: Final = 128 * 1024  # the worst JSON of this length is gone through in less than a millisecond


@dataclass(slots=True, kw_only=True, eq=False)
class ModelParts:
    """What serves one model: its own reader, line, costs, estimates, plan and steps; `uses` are under way."""

    key: str
    config: GatewayConfig  # as it holds for this model
    router: Router
    follower: Follower
    moves: PrefixTransfers
    replicas: Replicas | None
    refusals: SloGate
    line: WaitingLine
    offered: OfferedLoad
    steps: Pipeline
    forget: Callable[[str], None]  # what was learned of a node
    uses: int = 0
    in_flight: int = 0  # of the uses, those that have a place among the gateway's requests

    def __repr__(self) -> str:
        return f"<Model {self.key!r} [{self.uses} under way]>"

    @contextmanager
    def used(self) -> Iterator[None]:
        """It is not closed before this block ends."""
        self.uses += 1
        try:
            yield
        finally:
            self.uses -= 1

    def check_room(self, places: int = 1) -> None:
        """Raises Overloaded while it may not have so many requests more."""
        limit = self.config.max_in_flight
        if self.in_flight + places <= limit:
            return
        most = "its limit" if self.in_flight >= limit else f"and {limit} at most"
        raise Overloaded(f"The gateway already serves {self.in_flight} requests of this model, {most}. Please retry.")

    @contextmanager
    def serving(self) -> Iterator[None]:
        """One more request of it has a place until the end of this block."""
        with self.used(), self.placed(1):
            yield

    @contextmanager
    def placed(self, places: int) -> Iterator[None]:
        """So many more requests of it, one for each answer, have places until the end of this block."""
        self.in_flight += places
        try:
            yield
        finally:
            self.in_flight -= places

    def configure(self, config: GatewayConfig) -> None:
        """Works by `config`, which is for this model, from now on."""
        self.config = config
        for part in (self.router, self.refusals, self.line):
            part.configure(config)


class ModelStanding(msgspec.Struct, frozen=True, kw_only=True):
    """How one model is served now. `aliases` are its further names for clients; `plan` is a version, 0: none."""

    model: str
    aliases: tuple[str, ...]
    is_ready: bool
    nodes: int  # that are connected
    revisions: int
    waiting: int
    threshold_tokens: float
    tie_share: float
    plan: int


@dataclass(slots=True)
class Models:
    """The models that are served, the default one first."""

    clusters: Clusters
    catalog: ModelCatalog
    _parts: dict[str, ModelParts] = field(default_factory=dict)

    def __iter__(self) -> Iterator[ModelParts]:
        return iter(self._parts.values())

    def __contains__(self, key: str) -> bool:
        return key in self._parts

    @property
    def default(self) -> ModelParts:
        """That of requests that name none."""
        return next(iter(self._parts.values()))

    def get(self, key: str) -> ModelParts | None:
        """What serves that model; None: nothing does."""
        return self._parts.get(key)

    def add(self, parts: ModelParts) -> None:
        """It is served from now on, by these and no others."""
        self._parts[parts.key] = parts

    def remove(self, key: str) -> ModelParts:
        """No request goes to it any more."""
        return self._parts.pop(key)

    def forget(self, node_id: str) -> None:
        """The node is gone, or is not what it was."""
        for parts in self:
            parts.forget(node_id)

    def serves(self, key: str) -> bool:
        """Whether a request to that model could be served now."""
        return any(is_ready(self.clusters, each) for each in self.clusters.revisions.values() if each.key == key)

    def of(self, request: Request) -> ModelParts:
        """The parts that serve the model of `request`. Raises NoModel if the model has left since the request was read."""
        return self._there(request.offered.key)

    def named(self, name: str) -> ModelParts:
        """What serves the model of that name. Raises ApiError."""
        if not name:
            return self.default
        if (key := next(self._keys(name), None)) is None:
            raise unknown_model(name)
        return self._there(key)

    def seen_as(self, name: str, tenant: Tenant) -> ServedModel | None:
        """The model that a tenant gets by that name; None without one, and before a node has said that it has it."""
        key = self._usable(name, tenant)
        return self.clusters.models.get(key) if key is not None and key in self._parts else None

    def standing(self) -> list[ModelStanding]:
        """How each is served now, those without nodes, too."""
        return [self._standing(parts) for parts in self]

    def _standing(self, parts: ModelParts) -> ModelStanding:
        clusters, served = self.clusters, self.clusters.models.get(parts.key)
        return ModelStanding(
            model=self.name_of(parts.key),
            aliases=served.aliases if served is not None else (),
            is_ready=self.serves(parts.key),
            nodes=sum(node.connected and node.model == parts.key for node in clusters.nodes),
            revisions=sum(each.key == parts.key for each in clusters.revisions.values()),
            waiting=len(parts.line),
            threshold_tokens=parts.router.setting.threshold_tokens,
            tie_share=parts.router.setting.tie_share,
            plan=parts.router.plan_version,
        )

    def name_of(self, key: str | None) -> str:
        """What clients call it; "" for no model, and before a node has said so."""
        served = self.clusters.models.get(key) if key is not None else None
        return served.name if served is not None else self.catalog.shown(key or "")

    def seen_by(self, tenant: Tenant) -> list[ServedModel]:
        """The models that some node has had, and that a tenant may use."""
        known = self.clusters.models
        return [known[key] for key in self._parts if key in known and self._may_use(tenant, key)]

    def served(self, key: str) -> ServedModel:
        """The model as its nodes have it. Raises NoModel before one has said so."""
        if (found := self.clusters.models.get(key)) is None:
            raise NoModel(self.catalog.shown(key))
        return found

    async def asked(self, body: bytes, tenant: Tenant) -> ModelParts:
        """What serves the model that `body` names. Raises ApiError."""
        if self.catalog.is_single and not tenant.models:  # its reader looks at the name
            return self.default
        name = model_at_begin(body)
        if name is None:
            if len(body) <= SHORT_BODY_BYTES:
                name = model_in(body)
            else:
                reader = self.default.steps.reader
                name = await reader.think(lambda _: model_in(body), tenant.share, len(body))
        if not name:
            if not self._may_use(tenant, self.default.key):
                raise no_model_named()
            if name is not None:
                raise unknown_model(name)
            return self.default
        return self.usable(name, tenant)

    def usable(self, name: str, tenant: Tenant) -> ModelParts:
        """What serves the model of that name to a tenant. Raises ApiError, the same for one that it may not use."""
        if (key := self._usable(name, tenant)) is None:
            raise unknown_model(name)
        return self._there(key)

    def _there(self, key: str) -> ModelParts:
        if (parts := self._parts.get(key)) is None:
            raise NoModel(self.catalog.shown(key))
        return parts

    def _usable(self, name: str, tenant: Tenant) -> str | None:
        """The key of the first model of that name that a tenant may use."""
        return next((key for key in self._keys(name) if self._may_use(tenant, key)), None)

    def _keys(self, name: str) -> Iterator[str]:
        """The models of that name: the one that the file calls so, else those of nodes that call one, or an adapter, so.

        Raises NoModel while it is not known what the default one is called.
        """
        known = self.clusters.models
        if (named := self.catalog.named(name)) is not None:
            yield named
            return
        for model in self.catalog.models:
            served = known.get(model.name)
            if served is not None and (name in served.called or name in served.adapters):
                yield model.name
        if not self.catalog.served_model and REST in self._parts and REST not in known:
            raise NoModel

    def _may_use(self, tenant: Tenant, key: str) -> bool:
        return not tenant.models or any(key in self._called(name) for name in tenant.models)

    def _called(self, name: str) -> Collection[str]:
        """The models of that name, adapters aside."""
        if (named := self.catalog.named(name)) is not None:
            return (named,)
        return [key for key, served in self.clusters.models.items() if name in served.called]


def config_of(config: GatewayConfig, catalog: ModelCatalog, key: str, workers: int) -> GatewayConfig:
    """The gateway's configuration as it holds for one of its models. Raises KeyError for none of them.

    The default one's line is shared by all workers; each worker has a part of the others', and of a model's `max_in_flight`.
    """
    if (model := catalog.by_name(key)) is None:
        raise KeyError(key)
    changes: dict[str, Any] = {}
    if model.max_in_flight is not None:
        changes["max_in_flight"] = max(1, min(model.max_in_flight, config.max_in_flight) // workers)
    if key != REST:
        changes |= {
            "tokenizer_dir": model.tokenizer_dir or (config.models_dir or Path()) / key,
            "served_model": key,
            "plan": model.plan,
            "revisions": model.revisions,
            "threshold_tokens": config.threshold_tokens if model.threshold_tokens is None else model.threshold_tokens,
        }
    own = replace(config, models=(), default_model="", **changes)
    return own if key == catalog.default else replace(own, max_waiting=max(1, config.max_waiting // workers))
