"""What an agent says, as values: who its node is, how busy it is, what it caches; parsed from node.proto's messages."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import inf
from typing import Final

import msgspec

from gateway.cluster.pinned_prefixes import PinnedPrefix, kept_from
from hybrid_cache.cache.events import BlocksRemoved, BlocksStored, CacheCleared, Medium
from hybrid_cache.hashing.block_hash import HASH_BYTES, split_hashes
from hybrid_cache.index.digest import DigestCleared, DigestEvent, DigestPart, split_names
from transport.control.messages import BootstrapAddress, TicketInfo
from transport.control.proto import node_pb2 as pb
from transport.control.tickets import ticket_info

MAX_EVENT_HASHES: Final = 2048
MAX_STEPS: Final = 64  # step times in a report: nodes have a dozen
SILENT: Final = "engine_silent"
STATES: Final = {
    pb.NODE_STATE_STARTING: "starting",
    pb.NODE_STATE_READY: "ready",
    pb.NODE_STATE_DRAINING: "draining",
    pb.NODE_STATE_ENGINE_DOWN: "engine_down",
    pb.NODE_STATE_CONVERTING: "converting",
    pb.NODE_STATE_ENGINE_SILENT: SILENT,
}
MEDIA: Final = {pb.MEDIUM_SSD: Medium.SSD, pb.MEDIUM_ENGINE: Medium.ENGINE}  # anything else is memory


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeInfo:
    """Who a node is. `layout_json` is empty until its engine has said which model it runs."""

    node_id: str
    cluster: str
    cluster_kind: str
    role: str
    state: str
    engine_url: str
    model_id: str
    layout_json: str
    layout_fingerprint: str
    max_model_len: int
    boot_id: str
    engine_pid: int = 0
    block_size: int = 0
    role_epoch: int = 0  # of the newest command to change its role
    not_done_json: str = ""  # what its engine does nothing about
    adapters: tuple[str, ...] = ()  # that its engine serves beside the model
    takes_media: bool = False  # its engine takes messages with images, sounds or videos
    calls_port: int = 0  # where it takes calls over kept connections; 0: nowhere
    version: str = ""  # of what it runs; empty: of a time when nodes did not say
    contexts: tuple[PinnedPrefix, ...] = ()
    wall_clock_s: float = 0.0  # since 1970 by its clock, when it said this; 0: it did not
    plain: tuple[str, ...] = ()  # listeners of its that other machines reach, and that speak in clear
    rdma_direct: bool = False  # NICs of its cluster's nodes may write anywhere in its arena
    name_secrets: tuple[str, ...] = ()  # fingerprints of what it names blocks by, the newest first
    has_own_cache: bool = True  # its engine has one, whose blocks the node names; true of a node that does not say
    rooms: BootstrapAddress | None = None  # how its engine is paired; None: by tickets


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversionStatus:
    """A node's way to another role: how the newest command stands. `role` is what the node does now."""

    epoch: int
    role: str
    target: str
    is_under_way: bool
    outcome: str
    detail: str
    drain_s: float
    control_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkLoad:
    """Egress from a node to the cluster `peer`. `available_bytes_per_s` is 0 while unknown, as round trips are.

    `utilisation` is the share of it that is used; while it is unknown, the share of the budget.
    """

    peer: str
    available_bytes_per_s: float
    utilisation: float
    retransmit_ratio: float
    rtt_s: float
    min_rtt_s: float
    congested: bool
    queued_bytes: int
    estimate_error: float
    budget_bytes_per_s: float = 0.0  # 0: none
    own_budget_bytes_per_s: float = 0.0  # the same, whatever the node's share of the line's is now
    inflated: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FreeRoom:
    """What of a node's arena a new prompt could have: in pages, and in tokens of a prompt that fits.

    `free_tokens` fit into the free pages alone, `tokens` into these and what eviction would free.
    """

    pages_total: int
    pages_free: int
    pages_evictable: int
    free_tokens: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLoad:
    """How busy a node said it is. `slots` of 0 and a `room` of None are not known; for `steps` see `NodeView`."""

    running: int = 0
    waiting: int = 0
    queued_tokens: int = 0
    egress_bytes_total: int = 0
    links: tuple[LinkLoad, ...] = ()
    slots: int = 0
    steps: tuple[tuple[float, float], ...] = ()
    room: FreeRoom | None = None
    clock_s: float = 0.0  # the node's own, when it said this
    budgets: Mapping[str, float] = field(default_factory=dict)  # its own by destination, "" all others; 0: none
    booked_by_others: int = 0  # requests that other gateways have reserved for, and that its engine has not begun with
    booked_by_own: int = 0  # the same of this gateway


@dataclass(frozen=True, slots=True, kw_only=True)
class BookingsBeside:
    """How many requests other gateways have booked a node for, by its word at `clock_s` of its own clock."""

    requests: int
    clock_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GrantedReservation:
    """A node's answer to Reserve. `beside` is None of a node of a time when it did not say."""

    ticket: TicketInfo
    beside: BookingsBeside | None


class PrefillOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What a node tells of a prefill and of its push: `kv_transfer_params` of a prefill leg's answer.

    Times are seconds since the start of the job on its node.
    """

    delivered: bool = False
    num_tokens: int = 0
    cached_tokens: int = 0
    bytes_total: int = 0
    bytes_before_prefill_end: int | None = 0  # None: unknown
    bytes_saved: int = 0
    codecs: dict[str, int] = {}
    prefill_start_s: float = 0.0
    prefill_end_s: float = 0.0
    delivered_s: float = 0.0
    link: str = ""
    reason: str = ""


NodeEvent = NodeInfo | NodeLoad | PinnedPrefix | BlocksStored | BlocksRemoved | CacheCleared | DigestEvent


def events_from(event: pb.NodeEvent) -> Iterator[NodeEvent]:
    """The values that one proto event stands for; each is made when it is asked for."""
    match event.WhichOneof("event"):
        case "description":
            yield info_from(event.description)
            yield load_from(event.description.load)
        case "load":
            yield load_from(event.load)
        case "snapshot":
            yield CacheCleared()
            for group in event.snapshot.groups:
                yield from _in_parts(BlocksStored, group)
        case "stored":
            yield from _in_parts(BlocksStored, event.stored)
        case "removed":
            yield from _in_parts(BlocksRemoved, event.removed)
        case "context":
            yield kept_from(event.context)
        case "digest":
            if event.digest.anew:
                yield DigestCleared()
            for part in event.digest.parts:
                yield from _digest_in_parts(part)
        case "cleared":
            every = event.cleared.medium == pb.MEDIUM_UNSPECIFIED
            yield CacheCleared(None if every else _medium(event.cleared.medium))
        case "several":
            yield from _said_at_once(event.several.events)
        case _:
            return  # an event of a later version


def _said_at_once(events: Sequence[pb.NodeEvent]) -> Iterator[NodeEvent]:
    """Of several loads only the last one counts: they are one report, and two that agree say more than one."""
    kinds = [each.WhichOneof("event") for each in events]
    last = max((at for at, kind in enumerate(kinds) if kind in ("description", "load")), default=-1)
    for at, (kind, each) in enumerate(zip(kinds, events, strict=True)):
        if at >= last or kind not in ("description", "load"):
            yield from events_from(each)
        elif kind == "description":
            yield info_from(each.description)


def hashes_in(event: NodeEvent) -> int:
    """How many hashes or names of blocks it has: the work that it makes."""
    match event:
        case BlocksStored() | BlocksRemoved():
            return len(event.hashes)
        case DigestPart():
            return len(event.added) + len(event.removed)
        case _:
            return 0


def info_from(node: pb.NodeDescription) -> NodeInfo:
    """A description as a value."""
    return NodeInfo(
        node_id=node.node_id,
        cluster=node.cluster,
        cluster_kind=node.cluster_kind,
        role=node.role,
        state=STATES.get(node.state, "unknown"),
        engine_url=node.engine_url.rstrip("/"),
        model_id=node.model_id,
        layout_json=node.layout_json,
        layout_fingerprint=node.layout_fingerprint,
        max_model_len=node.max_model_len,
        not_done_json=node.not_done_json,
        adapters=tuple(node.adapters),
        takes_media=node.takes_media,
        boot_id=node.boot_id,
        engine_pid=node.engine_pid,
        block_size=node.block_size,
        role_epoch=node.conversion.epoch,
        calls_port=node.calls_port,
        version=node.version,
        wall_clock_s=node.wall_clock_s,
        contexts=tuple(kept_from(context) for context in node.contexts),
        plain=tuple(node.plain),
        rdma_direct=node.rdma_direct,
        name_secrets=tuple(node.name_secrets),
        has_own_cache=node.own_cache or not node.HasField("own_cache"),
        rooms=BootstrapAddress(node.rooms.host, node.rooms.port) if node.HasField("rooms") else None,
    )


def conversion_from(conversion: pb.Conversion) -> ConversionStatus:
    """How a conversion stands, as a value."""
    return ConversionStatus(
        epoch=conversion.epoch,
        role=conversion.role,
        target=conversion.target,
        is_under_way=conversion.phase in (pb.CONVERSION_PHASE_DRAINING, pb.CONVERSION_PHASE_VERIFYING),
        outcome=conversion.outcome,
        detail=conversion.detail,
        drain_s=conversion.drain_s,
        control_s=conversion.control_s,
    )


def load_from(load: pb.Load) -> NodeLoad:
    """A load report as a value."""
    return NodeLoad(
        running=load.running,
        waiting=load.waiting,
        queued_tokens=load.queued_tokens,
        egress_bytes_total=load.egress_bytes_total,
        links=tuple(
            LinkLoad(
                peer=link.peer,
                available_bytes_per_s=link.available_bytes_per_s,
                utilisation=link.utilisation,
                retransmit_ratio=link.retransmit_ratio,
                rtt_s=link.rtt_s,
                min_rtt_s=link.min_rtt_s,
                congested=link.congested,
                inflated=link.inflated,
                queued_bytes=link.queued_bytes,
                estimate_error=link.estimate_error,
                budget_bytes_per_s=link.budget_bytes_per_s,
                own_budget_bytes_per_s=link.own_budget_bytes_per_s,
            )
            for link in load.links
        ),
        clock_s=load.clock_s,
        budgets=dict(load.budgets),
        booked_by_others=load.booked_by_others,
        booked_by_own=load.booked_by_own,
        slots=load.slots,
        steps=_steps_from(load.steps),
        room=_room_from(load.room) if load.HasField("room") else None,
    )


def granted_from(ticket: pb.Ticket) -> GrantedReservation:
    """The answer to Reserve as a value."""
    others = ticket.others
    beside = BookingsBeside(requests=others.requests, clock_s=others.clock_s) if others.clock_s else None
    return GrantedReservation(ticket=ticket_info(ticket), beside=beside)


def _steps_from(steps: Iterable[pb.StepTime]) -> tuple[tuple[float, float], ...]:
    """By rising batch; what makes no sense is left out, and so is what is too much."""
    sane = {step.batch: step.seconds for step in islice(steps, MAX_STEPS) if step.batch > 0 and 0 < step.seconds < inf}
    return tuple(sorted(sane.items()))


def _room_from(room: pb.Room) -> FreeRoom:
    return FreeRoom(
        pages_total=room.pages_total,
        pages_free=room.pages_free,
        pages_evictable=room.pages_evictable,
        free_tokens=room.free_tokens,
        tokens=room.tokens,
    )


def _in_parts(
    kind: type[BlocksStored | BlocksRemoved], message: pb.BlocksStored | pb.BlocksRemoved
) -> Iterator[NodeEvent]:
    """The event in parts that are taken in one at a time."""
    hashes, medium = message.hashes, _medium(message.medium)  # once: a message makes a copy each time
    step = MAX_EVENT_HASHES * HASH_BYTES
    for start in range(0, len(hashes), step):
        yield kind(message.group, tuple(split_hashes(hashes[start : start + step])), medium)


def _digest_in_parts(message: pb.DigestPart) -> Iterator[NodeEvent]:
    added, removed = split_names(message.added), split_names(message.removed)
    medium = Medium.ENGINE if message.medium == pb.MEDIUM_ENGINE else Medium.MEMORY
    for start in range(0, max(len(added), len(removed)), MAX_EVENT_HASHES):
        some = slice(start, start + MAX_EVENT_HASHES)
        yield DigestPart(message.group, medium, tuple(added[some]), tuple(removed[some]))


def _medium(medium: pb.Medium) -> Medium:
    return MEDIA.get(medium, Medium.MEMORY)
