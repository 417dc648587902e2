"""The gRPC face of a node: node.proto's calls, mapped onto the agent, refusals mapped onto status codes."""

import asyncio
import errno
import itertools
import logging
from collections.abc import AsyncIterator, Callable, Collection
from functools import cached_property
from typing import NoReturn

import grpc
import grpc.aio

from node.agent import NodeAgent
from node.control.booking_news import BookingNews
from node.control.broadcast import WatcherTooSlow
from node.control.control_server import HTTP_2, ControlServer, FrontCallers, uncertified
from node.control.holders import checked_name
from node.control.rights import CallerOf, RightsInterceptor
from node.control.summaries import Summaries
from node.control.watch_news import Backlog, WatchNews
from node.errors import NodeRefusal
from node.known_peers import NOT_A_PEER
from node.kvcache.pages import snapshot_messages, split_hashes
from node.kvcache.tenant_pages import TENANTS_PART
from node.process.ports import ListenPort
from node.process.tls_front import TlsFront
from transport.control.proto import node_pb2 as pb
from transport.control.proto import node_pb2_grpc as rpc
from transport.control.tickets import MAX_CONTROL_BYTES, REASON_KEY, ticket_info
from transport.path.tcp import format_address
from transport.peers.guard import Guard
from transport.wire.identity import Identity

log = logging.getLogger(__name__)

DEFAULT_LOAD_INTERVAL_S = 0.25
MIN_LOAD_INTERVAL_S = 0.02
FAR_LOAD_INTERVAL_S = 1.0  # to gateways of other regions
COMMIT_TIMEOUT_S = 120.0
# A gateway whose machine is gone says nothing, and no end of its connection comes: it would be taken to be there for ever.
KEEPALIVE_MS, KEEPALIVE_TIMEOUT_MS = 30_000, 20_000
INSIDE = "127.0.0.1"  # where gRPC listens for the front
HANDSHAKE_S = 20.0  # gRPC's own limit is two minutes, in which a stranger holds a descriptor and 17 KiB
STATUS_OF_REFUSAL = {
    "draining": grpc.StatusCode.UNAVAILABLE,
    "engine_down": grpc.StatusCode.UNAVAILABLE,
    "engine_silent": grpc.StatusCode.UNAVAILABLE,
    "starting": grpc.StatusCode.UNAVAILABLE,
    "no_capacity": grpc.StatusCode.RESOURCE_EXHAUSTED,
    TENANTS_PART: grpc.StatusCode.RESOURCE_EXHAUSTED,
    "over_budget": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "not_cached": grpc.StatusCode.NOT_FOUND,
    "unknown_context": grpc.StatusCode.NOT_FOUND,
    "context_exists": grpc.StatusCode.ALREADY_EXISTS,
    "bad_request": grpc.StatusCode.INVALID_ARGUMENT,
    "share_held": grpc.StatusCode.FAILED_PRECONDITION,
    "no_route": grpc.StatusCode.UNAVAILABLE,
    NOT_A_PEER: grpc.StatusCode.FAILED_PRECONDITION,
    "push_failed": grpc.StatusCode.UNAVAILABLE,
    "wrong_role": grpc.StatusCode.FAILED_PRECONDITION,
    "converting": grpc.StatusCode.UNAVAILABLE,
    "cannot_convert": grpc.StatusCode.FAILED_PRECONDITION,
    "stale_epoch": grpc.StatusCode.FAILED_PRECONDITION,
    "layout_mismatch": grpc.StatusCode.FAILED_PRECONDITION,
}


class NodeService(rpc.NodeAgentServicer):
    """One node's control calls."""

    def __init__(self, agent: NodeAgent, now: Callable[[], float]) -> None:
        self._agent = agent
        self._now = now
        self.caller_of: CallerOf = uncertified  # of the server that it is served by
        self._news = BookingNews()

    @cached_property
    def _summaries(self) -> Summaries:
        return Summaries(self._agent.events, self._agent.snapshot, self._full_groups, self._now)

    def _full_groups(self) -> Collection[int]:
        return self._agent.pages.layout.full_groups if self._agent.pages is not None else ()

    async def Describe(self, request: pb.DescribeRequest, context: grpc.aio.ServicerContext) -> pb.NodeDescription:
        description = self._agent.describe()
        if request.check_integrity:
            description.integrity_error = await self._agent.integrity_error()
        return description

    # What is called over kept connections, too

    async def reserve(self, request: pb.ReserveRequest) -> pb.Ticket:
        """A ticket for pages that are ready to be written into. Raises NodeRefusal."""
        self._agent.role.admit(self._agent.conversions.standing, request)
        transfer_id, secret, reservation = await self._agent.reserve(request)
        config = self._agent.config
        try:
            incoming = self._agent.known(self._agent.incoming)
            ticket = pb.Ticket(
                transfer_id=transfer_id,
                secret=secret,
                num_tokens=reservation.num_tokens,
                have_tokens=reservation.cached_tokens,
                tokens_digest=request.tokens_digest,
                endpoints=self._agent.listener.endpoints(),
                ttl_s=incoming.granted_ttl_s(request),
                layout_fingerprint=incoming.layout.fingerprint,
                node_id=config.node_id,
                cluster=config.cluster,
                others=self._bookings_beside(request.holder),
            )
        except BaseException:  # the role ended meanwhile: the gateway never learns its id
            self._agent.abort(transfer_id, "given_up")
            raise
        if not request.prefix_only:
            self._booked()
        return ticket

    def _bookings_beside(self, holder: str) -> pb.Bookings:
        return pb.Bookings(
            requests=self._agent.holders.booked_by_others(holder), clock_s=self._agent.prefills.shares.now()
        )

    def _booked(self) -> None:
        """Watchers hear of many new bookings at once."""
        if (wait_s := self._news.booked(self._now())) is not None:
            asyncio.get_running_loop().call_later(wait_s, self._tell_load)

    def _tell_load(self) -> None:
        self._news.told(self._now())
        self._agent.events.publish(pb.NodeEvent(load=self._agent.load()))

    def abort(self, request: pb.AbortRequest) -> pb.Done:
        known = self._agent.abort(request.transfer_id, request.reason)
        return pb.Done(ok=True, reason="" if known else "unknown")

    # gRPC

    async def Reserve(self, request: pb.ReserveRequest, context: grpc.aio.ServicerContext) -> pb.Ticket:
        try:
            return await self.reserve(request)
        except NodeRefusal as exc:
            await _refuse(context, exc)

    async def Commit(self, request: pb.TransferRef, context: grpc.aio.ServicerContext) -> pb.Done:
        try:
            # What landed can be kept without an engine, and must be while draining.
            await self._agent.known(self._agent.incoming).commit(request.transfer_id, COMMIT_TIMEOUT_S)
        except (NodeRefusal, TimeoutError) as exc:
            return pb.Done(ok=False, reason=str(exc) or "timeout")
        return pb.Done(ok=True)

    async def Abort(self, request: pb.AbortRequest, context: grpc.aio.ServicerContext) -> pb.Done:
        return self.abort(request)

    async def Readdress(self, request: pb.ReaddressRequest, context: grpc.aio.ServicerContext) -> pb.Done:
        try:
            known = self._agent.known(self._agent.incoming).readdress(request.transfer_id, request.sender)
        except NodeRefusal as exc:
            await _refuse(context, exc)
        return pb.Done(ok=known, reason="" if known else "unknown")

    async def Load(self, request: pb.LoadRequest, context: grpc.aio.ServicerContext) -> pb.LoadResult:
        try:
            legs = self._agent.known(self._agent.legs)
            tokens, size = await legs.push_prefix(split_hashes(request.block_hashes), ticket_info(request.ticket))
        except NodeRefusal as exc:
            await _refuse(context, exc)
        except TimeoutError:
            await _refuse(context, NodeRefusal("push_failed", "timeout"))
        return pb.LoadResult(num_tokens=tokens, bytes_sent=size)

    async def ShareEgress(self, request: pb.EgressShare, context: grpc.aio.ServicerContext) -> pb.Done:
        try:
            self._agent.prefills.shares.take(request)
        except NodeRefusal as exc:
            await _refuse(context, exc)
        return pb.Done(ok=True)

    async def DropPrefix(self, request: pb.DropPrefixRequest, context: grpc.aio.ServicerContext) -> pb.DropPrefixResult:
        try:
            hashes = split_hashes(request.block_hashes)
            loans = self._agent.known(self._agent.loans)
            pages = loans.drop_prefix(hashes, request.keep_tokens, request.unused_s)
        except NodeRefusal as exc:
            await _refuse(context, exc)
        return pb.DropPrefixResult(pages=pages)

    async def Probe(self, request: pb.Ticket, context: grpc.aio.ServicerContext) -> pb.Done:
        try:
            reason = await self._agent.prefills.egress.probe(ticket_info(request))
        except NodeRefusal as exc:
            await _refuse(context, exc)
        return pb.Done(ok=not reason, reason=reason)

    async def Watch(self, request: pb.WatchRequest, context: grpc.aio.ServicerContext) -> AsyncIterator[pb.NodeEvent]:
        wished_s = request.load_interval_s or DEFAULT_LOAD_INTERVAL_S
        interval_s = wished_s if wished_s > MIN_LOAD_INTERVAL_S else MIN_LOAD_INTERVAL_S  # for NaN, too
        seq = 0
        try:
            holder = checked_name(request.holder)
        except NodeRefusal as exc:
            await _refuse(context, exc)
        is_far = bool(request.near) and self._agent.config.cluster not in request.near
        interval_s = max(interval_s, FAR_LOAD_INTERVAL_S) if is_far else interval_s
        events = self._summaries if is_far else self._agent.events
        # What changes while the snapshot is read, part by part, is queued behind it: nothing is missed, and the last word counts.
        with self._agent.holders.connected(holder), events.watch() as watcher:
            if is_far:
                await self._summaries.read()
            first = pb.NodeEvent(description=self._agent.describe())
            cached = self._summaries.whole() if is_far else snapshot_messages(self._agent.snapshot())
            self._tell_bookings(first, holder)
            for event in itertools.chain((first,), cached):
                event.seq = seq = seq + 1
                yield event
            news = WatchNews(interval_s, _backlog(first.description.load), self._now())
            while True:
                try:
                    heard = await watcher.next(max(0.0, news.due_at - self._now()))
                except WatcherTooSlow:
                    await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "watcher too slow: watch again")
                if self._now() >= news.due_at:
                    self._summaries.tell()
                heard = heard or watcher.next_at_once()
                while heard is not None:
                    news.hear(heard, _backlog(heard.load, self._agent.holders.booked_by_others(holder)))
                    heard = watcher.next_at_once() if not news.is_full else None
                for event in self._due(news, holder, request.takes_several):
                    event.seq = seq = seq + 1
                    yield event

    def _due(self, news: WatchNews, holder: str, takes_several: bool) -> list[pb.NodeEvent]:
        """Messages of a watcher's own: events are shared by all of them."""
        now = self._now()
        if now < news.due_at:
            return []
        events, is_load_due = news.take(now)
        if is_load_due:
            events.append(pb.NodeEvent(load=self._agent.load()))
        parts = pb.NodeEvents(events=events)
        for event in parts.events:
            self._tell_bookings(event, holder)
        if is_load_due:
            news.load_told(_backlog(parts.events[-1].load), now)
        return [pb.NodeEvent(several=parts)] if takes_several and len(events) > 1 else [*parts.events]

    def _tell_bookings(self, event: pb.NodeEvent, holder: str) -> None:
        """What is different for each watcher: which bookings are its own gateway's."""
        match event.WhichOneof("event"):
            case "load":
                load = event.load
            case "description":
                load = event.description.load
            case _:
                return
        load.booked_by_others = self._agent.holders.booked_by_others(holder)
        load.booked_by_own = self._agent.holders.booked_by(holder)

    async def CreateContext(self, request: pb.ContextRequest, context: grpc.aio.ServicerContext) -> pb.Context:
        try:
            return await self._agent.known(self._agent.contexts).create(request)
        except NodeRefusal as exc:
            await _refuse(context, exc)

    async def ExtendContext(self, request: pb.ContextRequest, context: grpc.aio.ServicerContext) -> pb.Context:
        try:
            return self._agent.known(self._agent.contexts).extend(request)
        except NodeRefusal as exc:
            await _refuse(context, exc)

    async def DeleteContext(self, request: pb.ContextRequest, context: grpc.aio.ServicerContext) -> pb.Done:
        known = self._agent.contexts is not None and self._agent.contexts.delete(request.context_id, request.owner)
        return pb.Done(ok=True, reason="" if known else "unknown")

    async def Drain(self, request: pb.DrainRequest, context: grpc.aio.ServicerContext) -> pb.Done:
        timeout_s = request.timeout_s or self._agent.config.drain_timeout_s
        ended = await self._agent.draining.begin(timeout_s, self._who(request.by, context))
        reason = "requests still run" if self._agent.draining.is_on else "undone"
        return pb.Done(ok=ended, reason="" if ended else reason)

    async def Undrain(self, request: pb.UndrainRequest, context: grpc.aio.ServicerContext) -> pb.Done:
        try:
            self._agent.draining.undo(self._who(request.by, context))
        except NodeRefusal as exc:
            await _refuse(context, exc)
        return pb.Done(ok=True)

    async def Convert(self, request: pb.ConvertRequest, context: grpc.aio.ServicerContext) -> pb.Conversion:
        try:
            return await self._agent.conversions.convert(request)
        except NodeRefusal as exc:
            await _refuse(context, exc)

    def _who(self, named: str, context: grpc.aio.ServicerContext) -> str:
        """The caller in words: the name that it gives, made printable, its certificate's name and its address."""
        name = "".join(each if each.isprintable() else "?" for each in named[:80]) or "somebody"
        certified = self.caller_of(context.peer())
        return f"{name} ({certified[0]}) at {certified[1]}" if certified is not None else f"{name} at {context.peer()}"


def _backlog(load: pb.Load, booked_by_others: int | None = None) -> Backlog:
    """Of a load that a watcher is told, or of one that all are told of, where others than this one have so much booked."""
    booked = load.booked_by_others if booked_by_others is None else booked_by_others
    return Backlog(requests=load.running + load.waiting + booked, queued_tokens=load.queued_tokens)


async def _refuse(context: grpc.aio.ServicerContext, refusal: NodeRefusal) -> NoReturn:
    status = STATUS_OF_REFUSAL.get(refusal.label, grpc.StatusCode.INTERNAL)
    await context.abort(status, str(refusal), trailing_metadata=((REASON_KEY, refusal.label),))
    raise AssertionError("abort raises")


async def serve(
    service: NodeService,
    host: str,
    port: int,
    identity: Identity | None = None,
    guard: Guard | None = None,
    *,
    handshake_s: float = HANDSHAKE_S,
) -> tuple[ControlServer, int]:
    """Starts a gRPC server; returns it and its port.

    With an identity, callers speak mutual TLS 1.3, and must have a certificate whose name `guard` knows rights of; None:
    one of its own.
    A connection that has not said that it speaks HTTP/2 within `handshake_s` is turned away.
    Raises OSError if the port is taken or a certificate cannot be read; NodeConfigError if the front's port is taken.
    """
    options = [
        ("grpc.max_receive_message_length", MAX_CONTROL_BYTES),
        ("grpc.max_send_message_length", MAX_CONTROL_BYTES),
        ("grpc.so_reuseport", 0),
        ("grpc.server_handshake_timeout_ms", int(handshake_s * 1000)),
        ("grpc.keepalive_time_ms", KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ]
    if identity is None:
        server = _server(service, options, [])
        bound = _bound(server, host, port)
        await server.start()
        return ControlServer(server, None), bound
    front = TlsFront(identity, handshake_s=handshake_s, protocol=HTTP_2, whose="the control service")
    service.caller_of = FrontCallers(front)
    server = _server(service, options, [RightsInterceptor(guard or identity.guard(), service.caller_of)])
    inside = _bound(server, INSIDE, 0)
    await server.start()
    try:
        bound = await front.start(ListenPort("control_port", host, port))
    except BaseException:
        await server.stop(None)
        raise
    front.open(f"http://{INSIDE}:{inside}")
    return ControlServer(server, front), bound


def _server(
    service: NodeService, options: list[tuple[str, int]], interceptors: list[RightsInterceptor]
) -> grpc.aio.Server:
    server = grpc.aio.server(options=options, interceptors=interceptors)
    rpc.add_NodeAgentServicer_to_server(service, server)  # type: ignore[no-untyped-call]
    return server


def _bound(server: grpc.aio.Server, host: str, port: int) -> int:
    """Raises OSError."""
    try:
        bound: int = server.add_insecure_port(format_address(host, port))
    except RuntimeError as exc:
        raise OSError(errno.EADDRINUSE, f"cannot listen on {format_address(host, port)}") from exc
    return bound
