"""The node's ends of all links: transport threads on one side, the agent's event loop on the other.

Transport calls back from its own threads; everything here is handed to the loop before anyone of the agent sees it.
"""

import asyncio
import contextlib
import hashlib
import logging
import os
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from msgspec import structs

from node.config import ANY_CLUSTER, INTEGRITIES, NodeConfig
from node.errors import NodeConfigError, NodeRefusal
from node.kvcache.arena import SHM_DIR
from node.transfer.shares import EgressShares
from transport.coding.choice import FormatOf
from transport.control.messages import TicketInfo
from transport.control.proto import node_pb2 as pb
from transport.errors import Closed, TransportError
from transport.metrics import TransportCollector
from transport.path.link import LinkState, together
from transport.path.pacing import Budget, rate_now
from transport.path.shm import ArenaSource
from transport.path.tcp import TcpOptions
from transport.peers.guard import Guard
from transport.rdma.device import RdmaDevices, RdmaError
from transport.rdma.topology import fabrics_of, matrix
from transport.rdma.verbs import RdmaOptions, open_devices
from transport.receive.options import ServerOptions
from transport.receive.registry import landing as landings
from transport.receive.server import TransferServer
from transport.send import client
from transport.send.client import ClientOptions, TransferClient
from transport.send.schedule.push import PushResult
from transport.send.spec import TransferSpec, Urgency, Via
from transport.wire.frames import Code

log = logging.getLogger(__name__)

SHM, RDMA, TCP = "shm", "rdma", "tcp"
# A push that the link carries within SMALL_S does not wait behind large ones. Such pushes take URGENT_S together, at
# most, so that many of them do not keep a large one waiting for ever.
SMALL_S: Final = 0.025
URGENT_S: Final = 0.1
PROBE_TIMEOUT_S: Final = 10.0  # twice what a sender waits for a connection


def spec_of(
    ticket: TicketInfo, kind: str, address: str, sizes: Sequence[int], formats: FormatOf | None, urgency: Urgency
) -> TransferSpec:
    """What the holder of `ticket` is sent: whose it is, with its weight, and by when. Raises ValueError for what cannot be."""
    return TransferSpec(
        address,
        ticket.transfer_id,
        ticket.secret,
        sizes,
        via=Via(kind),
        link=ticket.cluster,
        formats=formats,
        urgency=urgency,
        tenant=ticket.tenant,
        weight=ticket.weight,
        due_s=ticket.ttl_s,
    )


class OutgoingTransfer:
    """One transfer that leaves."""

    def __init__(self, push: client.Push, kind: str) -> None:
        self._push = push
        self.kind = kind

    @property
    def bytes_sent(self) -> int:
        """Bytes that have left so far."""
        stats = self._push.stats
        return min(stats.bytes_sent, stats.bytes_total)

    def ready(self, ranges: Iterable[int]) -> None:
        """These ranges may leave."""
        self._push.ready(list(ranges))

    def abort(self, reason: str) -> None:
        """Stops sending; what has landed stays, for another sender with the same ticket."""
        self._push.abort(reason, keep_landing=True)


class IncomingTransfer:
    """One transfer that is expected."""

    def __init__(self, server: TransferServer, landing: landings.Landing) -> None:
        self._server = server
        self._landing = landing

    @property
    def bytes_landed(self) -> int:
        """Verified bytes so far."""
        return self._landing.bytes_landed

    @property
    def bytes_total(self) -> int:
        """Bytes that are to come, in all."""
        return self._landing.bytes_total

    def readdress(self, sender: str) -> None:
        """Only that sender may go on, by its certificate."""
        self._server.readdress(self._landing, sender)

    def cancel(self, reason: str) -> None:
        """Ends it; its callback comes when no thread writes into the pages any more."""
        self._server.cancel(self._landing.transfer_id, reason)


class PeerLinks:
    """Sends to and receives from other nodes."""

    def __init__(
        self, config: NodeConfig, *, use_shm: bool, rdma: RdmaDevices | None = None, guard: Guard | None = None
    ) -> None:
        port = config.port("transfer")
        server_options = replace(_server_options(config, use_shm), rdma=rdma, guard=guard)
        self._server = TransferServer(port.host, port.number, options=server_options)
        self._client = TransferClient(options=replace(_client_options(config), rdma=rdma, guard=guard))
        self._cluster = config.cluster
        self._rdma = rdma
        self._fabrics = fabrics_of(rdma.nics) if rdma is not None else frozenset()
        self._host_id = host_id() if use_shm else ""
        self._advertise = config.transfer_advertise
        self.coding = config.codings()
        self.shares = EgressShares(self._client, time.monotonic)
        self.collector = TransportCollector(self._client, self._server)
        self.set_budgets(config.budgets())
        self._urgent_bytes: Counter[str] = Counter()  # of small pushes under way, by destination cluster
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Binds the listener. Raises OSError."""
        self._loop = asyncio.get_running_loop()
        self._server.start()

    def close(self) -> None:
        """Ends all transfers and joins all threads. Blocks; call it off the loop."""
        self._client.close()
        self._server.close()
        if self._rdma is not None:
            self._rdma.close()

    def open_memory(self, arena: memoryview) -> None:
        """Lets other nodes' NICs write into the arena, where there are NICs; without, what comes will come by TCP."""
        if self._rdma is None:
            return
        try:
            self._rdma.register(arena)
        except RdmaError as exc:
            log.error("no RDMA into an arena of %d bytes: %s", arena.nbytes, exc)

    def endpoints(self) -> list[pb.Endpoint]:
        """Where others may send to, best first."""
        shm = [pb.Endpoint(kind=SHM, address=self._server.address, host_id=self._host_id)] if self._host_id else []
        fabrics = " ".join(sorted(self._fabrics))
        rdma = [pb.Endpoint(kind=RDMA, address=self._server.address, host_id=fabrics)] if fabrics else []
        return [*shm, *rdma, pb.Endpoint(kind=TCP, address=self._advertise or self._server.address)]

    def push(
        self,
        ticket: TicketInfo,
        sizes: Sequence[int],
        source: ArenaSource,
        on_done: Callable[[PushResult], None],
        *,
        formats: FormatOf | None = None,
        urgency: Urgency = Urgency.NORMAL,
    ) -> OutgoingTransfer:
        """Opens a transfer to the holder of `ticket`. Raises NodeRefusal.

        The reservation's lease orders it among others, but does not end it: progress renews the lease. What is small goes
        first, unless it is bulk.
        """
        kind, address = self._choose(ticket)
        num_bytes, cluster = sum(sizes), ticket.cluster
        if urgency is Urgency.NORMAL and kind == TCP:
            urgency = self.urgency_for(cluster, num_bytes)
        urgent_bytes = num_bytes if urgency is Urgency.URGENT else 0

        def pushed(result: PushResult) -> None:
            self._urgent_bytes[cluster] -= urgent_bytes
            on_done(result)

        try:
            spec = spec_of(ticket, kind, address, sizes, formats, urgency)
            push = self._client.open(
                spec,
                source,
                on_done=lambda result: self._on_loop(pushed, result),
            )
        except (TransportError, ValueError, OSError) as exc:
            raise NodeRefusal("push_failed", str(exc)) from exc
        self._urgent_bytes[cluster] += urgent_bytes
        return OutgoingTransfer(push, kind)

    async def probe(self, ticket: TicketInfo) -> str:
        """Asks the receiver that a ticket names for an answer, over the way its bytes would take; "" when one came.

        What is offered is a transfer that is not expected, so that an answer is a refusal by that name. Raises NodeRefusal.
        """
        done: asyncio.Future[PushResult] = asyncio.get_running_loop().create_future()
        unexpected = structs.replace(ticket, transfer_id=f"probe-{secrets.token_hex(8)}")
        nothing = ArenaSource("", memoryview(b""), lambda index: ())  # its one byte never becomes ready
        push = self.push(unexpected, (1,), nothing, done.set_result, urgency=Urgency.BULK)
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                result = await asyncio.shield(done)
        except TimeoutError:
            return Code.DEADLINE
        finally:
            push.abort("probed")
        return "" if result.reason == Code.UNKNOWN_TRANSFER else result.reason or Code.OTHER

    def urgency_for(self, cluster: str, num_bytes: int) -> Urgency:
        """Of a push that a request waits for."""
        states = self._by_cluster().get(cluster)
        return urgency_of(num_bytes, together(states) if states else None, self._urgent_bytes[cluster])

    def _choose(self, ticket: TicketInfo) -> tuple[str, str]:
        for kind, address, place in ticket.endpoints:
            if kind == TCP or (kind == SHM and self._host_id and place == self._host_id):
                return kind, address
            # Equal subnets of two datacenters are not one fabric; and what leaves the cluster has a budget to keep.
            if kind == RDMA and ticket.cluster == self._cluster and self._fabrics & set(place.split()):
                return kind, address
        raise NodeRefusal("no_route", f"ticket {ticket.transfer_id} names no endpoint that this node can reach")

    def expect(
        self,
        transfer_id: str,
        secret: bytes,
        sizes: Sequence[int],
        target: Callable[[int], Sequence[memoryview]],
        on_done: Callable[[landings.LandingResult], None],
        *,
        exact: bool = True,
        sender: str = "",
    ) -> IncomingTransfer:
        """Announces a transfer whose range i goes into `target(i)`; `exact` refuses quantised bytes. Raises NodeRefusal.

        With a `sender`, CLUSTER/NAME of its certificate, others are refused.
        """
        try:
            landing = self._server.expect(
                transfer_id,
                secret,
                sizes,
                target,
                exact=exact,
                sender=sender,
                on_done=lambda result: self._on_loop(on_done, result),
            )
        except Closed as exc:
            raise NodeRefusal("draining", "the node ends") from exc
        except ValueError as exc:
            raise NodeRefusal("bad_request", str(exc)) from exc
        return IncomingTransfer(self._server, landing)

    def _on_loop(self, callback: Callable[[Any], None], result: object) -> None:
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop is closed: the process ends
            self._loop.call_soon_threadsafe(callback, result)

    @property
    def bytes_received(self) -> int:
        """Payload that arrived over all links."""
        return self._server.bytes_received

    def set_budgets(self, budgets: Mapping[str, Budget]) -> None:
        """Changes, at once, how fast bytes may leave for each destination cluster; within its own, only if it is named."""
        self._budgets = dict(budgets)
        self._client.set_egress_budget(budgets[ANY_CLUSTER])
        for cluster, budget in {self._cluster: None, **budgets}.items():
            if cluster != ANY_CLUSTER:
                self._client.set_egress_budget(budget, cluster)

    @property
    def bytes_sent(self) -> int:
        """Bytes delivered over TCP so far, also to nodes that are gone."""
        return sum(size for size, _ in self._client.delivered().values())

    def states(self) -> list[pb.Link]:
        """Egress over TCP, one entry per destination cluster."""
        found = []
        for cluster, states in sorted(self._by_cluster().items()):
            message = _message(together(states))
            message.own_budget_bytes_per_s = self._client.egress_budget(cluster) or 0.0
            found.append(message)
        return found

    def own_budgets(self) -> dict[str, float]:
        """What its own budgets allow now, by destination cluster, used or not; under "" that of all others. 0: no limit."""
        return {
            "" if cluster == ANY_CLUSTER else cluster: rate_now(budget) or 0.0
            for cluster, budget in self._budgets.items()
        }

    def _by_cluster(self) -> dict[str, list[LinkState]]:
        found: dict[str, list[LinkState]] = {}
        for state in self._client.links():
            found.setdefault(state.link, []).append(state)
        return found


def urgency_of(num_bytes: int, link: LinkState | None, urgent_bytes: int) -> Urgency:
    """Whether a push goes before others; `urgent_bytes` do so already. On a link that is not known yet nothing does."""
    rate = link.available_bytes_per_s if link is not None else 0.0
    small = num_bytes <= SMALL_S * rate and urgent_bytes + num_bytes <= URGENT_S * rate
    return Urgency.URGENT if small else Urgency.NORMAL


def _server_options(config: NodeConfig, use_shm: bool) -> ServerOptions:
    return ServerOptions(
        integrity=INTEGRITIES[config.integrity],
        identity=config.identity,
        arena_dirs=(str(SHM_DIR),) if use_shm else (),
        codecs=config.codings().taken,
        tcp=TcpOptions(congestion=config.congestion_control),
    )


def _client_options(config: NodeConfig) -> ClientOptions:
    options = ClientOptions(
        integrity=INTEGRITIES[config.integrity],
        identity=config.identity,
        tcp=TcpOptions(congestion=config.congestion_control),
    )
    if isinstance(config.connections, str):
        return options  # as many as the link turns out to need
    return replace(options, connections=config.connections, max_connections=config.connections)


def _message(link: LinkState) -> pb.Link:
    return pb.Link(
        peer=link.link,
        available_bytes_per_s=link.available_bytes_per_s,
        goodput_bytes_per_s=link.goodput_bytes_per_s,
        utilisation=link.utilisation,
        retransmit_ratio=link.retransmit_ratio,
        rtt_s=link.rtt_s,
        min_rtt_s=link.min_rtt_s,
        queued_bytes=link.queued_bytes,
        connections=link.connections,
        bytes_total=link.bytes_total,
        retransmitted_bytes_total=link.retransmitted_bytes_total,
        budget_bytes_per_s=link.budget_bytes_per_s,
        congested=link.congested,
        inflated=link.inflated,
        estimate_error=link.estimate_error,
    )


def rdma_of(
    config: NodeConfig, *, open_devices: Callable[[RdmaOptions], RdmaDevices] = open_devices
) -> RdmaDevices | None:
    """The NICs that a node uses. Raises NodeConfigError where it was told to use some and cannot."""
    # By default, encryption that was asked for is not given up for speed.
    if config.transport == "tcp" or (config.transport == "auto" and config.integrity == "aead"):
        return None
    try:
        devices = open_devices(RdmaOptions(devices=config.rdma_devices))
    except RdmaError as exc:
        if config.transport == "rdma" or config.rdma_devices:
            raise NodeConfigError(f"transport = {config.transport!r}: RDMA is not possible here: {exc}") from exc
        log.info("no RDMA: %s", exc)
        return None
    for location, (preferred, secondary) in matrix(devices.nics).items():
        log.info("RDMA %s preferred=%s secondary=%s", location, ",".join(preferred), ",".join(secondary))
    return devices


def host_id() -> str:
    """Equal for processes that can map each other's /dev/shm files: same boot, same user, same mount."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    mount = os.stat(SHM_DIR)
    return hashlib.sha256(f"{boot} {os.getuid()} {mount.st_dev}".encode()).hexdigest()[:32]
