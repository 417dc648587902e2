"""All that the console shows, as the process that is asked sees it: `GET /prfaas/console?since=SEQ`.

It reads what is there and keeps nothing: histories are the console's own.
"""

from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from math import isfinite
from typing import Final

import msgspec

from gateway.admission.concurrency import ConcurrencyLimiter
from gateway.admission.service_classes import Classes
from gateway.cluster.agent_values import LinkLoad
from gateway.cluster.links import ClusterLinks, LinkStatus
from gateway.cluster.node import ClusterNode
from gateway.cluster.registry import Clusters
from gateway.cluster.served_model import short
from gateway.config.gateway import GatewayConfig
from gateway.members.roster import Roster, SourceStatus
from gateway.models.served import Models, ModelStanding
from gateway.routing.name_rotation import NameRotation, NameRotationStatus
from gateway.workers.process_scope import SingleProcess, WorkerProcess
from planner.decisions.plans.live_plan import LivePlan
from planner.decisions.views import Role, step_at

MOST_RECORDS: Final = 500  # in an answer: what a reader missed beyond that is of no use on a screen


class SenderSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """One sender's part of a link, as it says."""

    node: str
    breaker: str
    available_bytes_per_s: float | None
    budget_bytes_per_s: float | None
    utilisation: float
    retransmit_ratio: float
    rtt_s: float
    min_rtt_s: float
    queued_bytes: int
    congested: bool


class LinkSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """A link, all senders together, and each of them."""

    status: LinkStatus
    retransmit_ratio: float
    min_rtt_s: float
    drain_s: float
    backlog_s: float
    pressure: float
    senders: tuple[SenderSnapshot, ...]


class NodeSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """A node as its agent last described it, with what gateways have under way there. `age_s` is that of its last report."""

    node: str
    agent: str
    cluster: str
    kind: str
    role: str
    state: str
    age_s: float
    running: int
    waiting: int
    slots: int
    queued_tokens: int
    pending_tokens: int
    pending_requests: int
    prefill_share: float
    egress_bytes: int
    pages_total: int
    pages_free: int
    pages_evictable: int
    step_s: float
    plain: tuple[str, ...] = ()  # its listeners that other machines reach, and that speak in clear
    revision: str = ""  # of the model that it runs; "": not known yet
    model: str = ""  # as clients call it; "": none of this gateway's


class GroupSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """A KV cache group of the model, and how many different blocks of it the gateway has heard of."""

    name: str
    layers: int
    blocks: int
    block_bytes: int


class ClassSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """A class of requests; None: nothing is promised."""

    name: str
    ttft_s: float | None
    tbt_s: float | None
    priority: int


class ConsoleSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """How things stand. Sequence numbers and byte counts of another `boot` begin anew.

    Threshold, plan, block size, groups and errors are those of the default model, which `model` names.
    """

    boot: str
    at: float  # seconds since the epoch
    clock_s: float  # the same moment on the clock of requests' `arrived_s`
    model: str
    serves_clients: bool  # whether the API answers at this port, too
    workers: Mapping[str, int]
    in_flight: int
    max_in_flight: int
    waiting: int
    max_waiting: int
    is_draining: bool
    threshold_tokens: float
    tie_share: float
    plan: LivePlan | None
    has_plan_service: bool
    block_size: int
    registries: tuple[SourceStatus, ...]
    models: tuple[ModelStanding, ...]
    nodes: tuple[NodeSnapshot, ...]
    names: NameRotationStatus
    links: tuple[LinkSnapshot, ...]
    groups: tuple[GroupSnapshot, ...]
    classes: tuple[ClassSnapshot, ...]
    tenants: tuple[str, ...]
    errors: Mapping[str, float]  # p90 of predictions, relative, by what was predicted and of what
    last_seq: int
    requests: tuple[msgspec.Raw, ...]
    flows: tuple[msgspec.Raw, ...]  # but those of requests


class ConsoleSnapshots:
    """Takes them."""

    def __init__(
        self,
        *,
        config: GatewayConfig,
        clusters: Clusters,
        roster: Roster,
        rotation: NameRotation,
        links: ClusterLinks,
        models: Models,
        admission: ConcurrencyLimiter,
        classes: Callable[[], Classes],
        tenants: Callable[[], tuple[str, ...]],
        seat: SingleProcess | WorkerProcess,
        clock: Callable[[], float],
    ) -> None:
        self._config = config
        self._clusters = clusters
        self._roster = roster
        self._rotation = rotation
        self._links = links
        self._models = models
        self._admission = admission
        self._classes = classes
        self._tenants = tenants
        self._seat = seat
        self._clock = clock

    async def taken(self, news: Callable[[int], Awaitable[tuple[list[bytes], list[bytes]]]], since: int) -> bytes:
        """The snapshot as JSON, with the latest requests and flows after number `since`."""
        since = self._seat.cursor(since)
        records, flows = await news(since)
        return msgspec.json.encode(self._now(records[-MOST_RECORDS:], flows[-MOST_RECORDS:], since))

    def _now(self, records: list[bytes], flows: list[bytes], since: int) -> ConsoleSnapshot:
        config, served, now = self._config, self._clusters.served, self._clock()
        default = self._models.default
        setting = default.router.setting
        states = self._seat.states()
        return ConsoleSnapshot(
            boot=self._seat.offered.boot,
            at=datetime.now(UTC).timestamp(),
            clock_s=now,
            model=served.name if served is not None else "",
            serves_clients=not config.metrics_port,
            workers={state.name.lower(): count for state, count in states.items()},
            in_flight=self._seat.in_flight.taken,
            max_in_flight=self._admission.limit,
            waiting=self._seat.waiting.taken + sum(len(each.line) for each in self._models if each is not default),
            max_waiting=default.line.limit,
            is_draining=self._admission.is_draining,
            threshold_tokens=setting.threshold_tokens,
            tie_share=setting.tie_share,
            plan=default.follower.plan,
            has_plan_service=bool(default.config.plan.url),
            models=tuple(self._models.standing()),
            block_size=served.layout.block_size if served is not None else 0,
            registries=tuple(self._roster.status()),
            nodes=tuple(
                _node(node, self._models.name_of(node.model), config.routing.decode_slots, now)
                for node in self._clusters.nodes
            ),
            names=self._rotation.status(),
            links=self._all_links(),
            groups=self._groups(),
            classes=tuple(
                ClassSnapshot(
                    name=each.name, ttft_s=_or_none(each.ttft_s), tbt_s=_or_none(each.tbt_s), priority=each.priority
                )
                for each in self._classes().all()
            ),
            tenants=self._tenants(),
            errors={" ".join(what): error.p90 for what, error in default.router.errors().items()},
            last_seq=max([since, *(_SEQ.decode(lines[-1]).seq for lines in (records, flows) if lines)]),
            requests=tuple(map(msgspec.Raw, records)),
            flows=tuple(map(msgspec.Raw, flows)),
        )

    def _all_links(self) -> tuple[LinkSnapshot, ...]:
        by_id = {node.id: node for node in self._clusters.nodes if node.info is not None}
        views = {(view.source, view.destination): view for view in self._links.views()}
        found = []
        for status in self._links.status():
            view = views[status.source, status.destination]
            found.append(
                LinkSnapshot(
                    status=status,
                    retransmit_ratio=view.retransmit_ratio,
                    min_rtt_s=view.min_rtt_s,
                    drain_s=view.drain_s,
                    backlog_s=view.backlog_s,
                    pressure=self._models.default.router.pressure(view),
                    senders=tuple(
                        _sender(by_id[name], breaker, status.destination) for name, breaker in status.senders.items()
                    ),
                )
            )
        return tuple(found)

    def _groups(self) -> tuple[GroupSnapshot, ...]:
        index = self._clusters.index
        if index is None:
            return ()
        layout = index.layout
        return tuple(
            GroupSnapshot(
                name=f"{type(group.spec).__name__} {number}",
                layers=len(group.layers),
                blocks=index.blocks_of(number),
                block_bytes=layout.block_bytes(number),
            )
            for number, group in enumerate(layout.groups)
        )


class _Numbered(msgspec.Struct, frozen=True):
    seq: int


_SEQ: Final = msgspec.json.Decoder(_Numbered)


def _sender(node: ClusterNode, breaker: str, destination: str) -> SenderSnapshot:
    load = node.link_to(destination)
    if load is None:  # it has sent nothing there yet
        load = LinkLoad(
            peer=destination, available_bytes_per_s=0, utilisation=0, retransmit_ratio=0, rtt_s=0, min_rtt_s=0,
            congested=False, queued_bytes=0, estimate_error=0,
        )  # fmt: skip
    return SenderSnapshot(
        node=node.id,
        breaker=breaker,
        available_bytes_per_s=load.available_bytes_per_s or None,
        budget_bytes_per_s=load.budget_bytes_per_s or None,
        utilisation=load.utilisation,
        retransmit_ratio=load.retransmit_ratio,
        rtt_s=load.rtt_s,
        min_rtt_s=load.min_rtt_s,
        queued_bytes=load.queued_bytes,
        congested=load.congested,
    )


def _node(node: ClusterNode, model: str, decode_slots: int, now: float) -> NodeSnapshot:
    load, room = node.load, node.load.room
    return NodeSnapshot(
        node=node.id,
        agent=node.agent.address,
        cluster=node.cluster,
        kind=node.info.cluster_kind if node.info is not None else "unknown",
        role=node.role,
        state=node.state,
        age_s=max(0.0, now - node.reported_at) if node.reported_at else 0.0,
        running=load.running,
        waiting=load.waiting,
        slots=load.slots or (decode_slots if node.role == Role.DECODE else 1),
        queued_tokens=load.queued_tokens,
        pending_tokens=node.pending_tokens,
        pending_requests=node.pending_requests,
        prefill_share=node.prefill_share.at(now),
        egress_bytes=load.egress_bytes_total,
        pages_total=room.pages_total if room is not None else 0,
        pages_free=room.pages_free if room is not None else 0,
        pages_evictable=room.pages_evictable if room is not None else 0,
        step_s=step_at(load.steps, load.running) if load.steps else 0.0,
        plain=node.info.plain if node.info is not None else (),
        revision=short(node.revision),
        model=model if node.info is not None and node.model is not None else "",
    )


def _or_none(promise: float) -> float | None:
    return promise if isfinite(promise) else None
