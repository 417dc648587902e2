"""The sending end of a node's links: which way a transfer takes, how urgent it is, and how fast bytes may leave."""

import asyncio
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from msgspec import structs

from node.config import ANY_CLUSTER, INTEGRITIES, NodeConfig
from node.errors import NodeRefusal
from node.tasks import on_loop
from node.transfer.reach import RDMA, SHM, TCP, PeerReach
from transport.coding.choice import FormatOf
from transport.control.messages import TicketInfo
from transport.control.proto import node_pb2 as pb
from transport.errors import TransportError
from transport.path.link import LinkState, together
from transport.path.pacing import Budget, rate_now
from transport.path.shm import ArenaSource
from transport.path.tcp import TcpOptions
from transport.send import client
from transport.send.client import ClientOptions, TransferClient
from transport.send.schedule.push import PushResult
from transport.send.spec import TransferSpec, Urgency, Via
from transport.wire.frames import Code
from transport.wire.sizes import RangeSizes

# A push that the link carries within SMALL_S does not wait behind large ones. Such pushes take URGENT_S together, at
# most, so that many of them do not keep a large one waiting for ever.
SMALL_S: Final = 0.025
URGENT_S: Final = 0.1
PROBE_TIMEOUT_S: Final = 10.0  # twice what a sender waits for a connection


def spec_of(
    ticket: TicketInfo,
    kind: str,
    address: str,
    sizes: Sequence[int] | RangeSizes,
    formats: FormatOf | None,
    urgency: Urgency,
) -> TransferSpec:
    """A transfer to the holder of `ticket`, with its tenant, weight and deadline. Raises ValueError for what cannot be."""
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
        receiver=f"{ticket.cluster}/{ticket.node_id}",
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

    def ready(self, ranges: Iterable[int | range]) -> None:
        """These ranges may leave."""
        self._push.ready(ranges)

    def abort(self, reason: str) -> None:
        """Stop sending. What has landed stays, for another sender with the same ticket."""
        self._push.abort(reason, keep_landing=True)


class EgressLinks:
    """Sends to other nodes. Transport calls back from its own threads; callbacks run on the agent's loop."""

    def __init__(self, config: NodeConfig, reach: PeerReach) -> None:
        self.client = TransferClient(options=_options(config, reach))
        self._reach = reach
        self._known_peers = config.known_peers()
        self.set_budgets(config.budgets())
        self._urgent_bytes: Counter[str] = Counter()  # of small pushes under way, by destination cluster

    def close(self) -> None:
        """End all pushes and join all threads. Blocks; call it off the loop."""
        self.client.close()

    # Transfers

    def push(
        self,
        ticket: TicketInfo,
        sizes: Sequence[int] | RangeSizes,
        source: ArenaSource,
        on_done: Callable[[PushResult], None],
        *,
        formats: FormatOf | None = None,
        urgency: Urgency = Urgency.NORMAL,
    ) -> OutgoingTransfer:
        """Open a transfer to the holder of `ticket`. Raises NodeRefusal.

        The reservation's lease orders it among others, but does not end it: progress renews the lease. A small transfer
        goes first, unless it is bulk.
        """
        self._known_peers.require_name(f"{ticket.cluster}/{ticket.node_id}")
        kind, address = self._choose(ticket)
        self._known_peers.require_address(address)
        sizes = RangeSizes.of(sizes)
        num_bytes, cluster = sizes.total_bytes, ticket.cluster
        if urgency is Urgency.NORMAL and kind == TCP:
            urgency = self.urgency_for(cluster, num_bytes)
        urgent_bytes = num_bytes if urgency is Urgency.URGENT else 0

        def pushed(result: PushResult) -> None:
            self._urgent_bytes[cluster] -= urgent_bytes
            on_done(result)

        try:
            spec = spec_of(ticket, kind, address, sizes, formats, urgency)
            push = self.client.open(spec, source, on_done=on_loop(pushed))
        except (TransportError, ValueError, OSError) as exc:
            raise NodeRefusal("push_failed", str(exc)) from exc
        self._urgent_bytes[cluster] += urgent_bytes
        return OutgoingTransfer(push, kind)

    async def probe(self, ticket: TicketInfo) -> str:
        """Ask the receiver that a ticket names for an answer, over the way its bytes would take; "" when one came.

        The probe offers a transfer that the receiver does not expect: its answer is a refusal by that name. Raises NodeRefusal.
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
        """The urgency of a push that a request waits for."""
        states = self._by_cluster().get(cluster)
        return urgency_of(num_bytes, together(states) if states else None, self._urgent_bytes[cluster])

    def _choose(self, ticket: TicketInfo) -> tuple[str, str]:
        reach = self._reach
        for kind, address, place in ticket.endpoints:
            if kind == TCP or (kind == SHM and reach.host_id and place == reach.host_id):
                return kind, address
            # Equal subnets of two datacenters are not one fabric; and what leaves the cluster has a budget to keep.
            if kind == RDMA and ticket.cluster == reach.cluster and reach.fabrics & set(place.split()):
                return kind, address
        raise NodeRefusal("no_route", f"ticket {ticket.transfer_id} names no endpoint that this node can reach")

    # Budgets and reports

    def set_budgets(self, budgets: Mapping[str, Budget]) -> None:
        """Change at once how fast bytes may leave for each cluster. The node's own cluster has a budget only if named."""
        self._budgets = dict(budgets)
        self.client.set_egress_budget(budgets[ANY_CLUSTER])
        for cluster, budget in {self._reach.cluster: None, **budgets}.items():
            if cluster != ANY_CLUSTER:
                self.client.set_egress_budget(budget, cluster)

    def own_budgets(self) -> dict[str, float]:
        """What the node's own budgets allow now, by destination cluster; under "" that of all others. 0: no limit."""
        return {
            "" if cluster == ANY_CLUSTER else cluster: rate_now(budget) or 0.0
            for cluster, budget in self._budgets.items()
        }

    @property
    def bytes_sent(self) -> int:
        """Bytes delivered over TCP so far, including those to nodes that are gone."""
        return sum(size for size, _ in self.client.delivered().values())

    def states(self) -> list[pb.Link]:
        """Egress over TCP, one entry per destination cluster."""
        found = []
        for cluster, states in sorted(self._by_cluster().items()):
            message = _message(together(states))
            message.own_budget_bytes_per_s = self.client.egress_budget(cluster) or 0.0
            found.append(message)
        return found

    def _by_cluster(self) -> dict[str, list[LinkState]]:
        found: dict[str, list[LinkState]] = {}
        for state in self.client.links():
            found.setdefault(state.link, []).append(state)
        return found


def urgency_of(num_bytes: int, link: LinkState | None, urgent_bytes: int) -> Urgency:
    """Whether a push goes before others; `urgent_bytes` do so already. No push does on a link without an estimate."""
    rate = link.available_bytes_per_s if link is not None else 0.0
    small = num_bytes <= SMALL_S * rate and urgent_bytes + num_bytes <= URGENT_S * rate
    return Urgency.URGENT if small else Urgency.NORMAL


def _options(config: NodeConfig, reach: PeerReach) -> ClientOptions:
    options = ClientOptions(
        integrity=INTEGRITIES[config.sealing],
        plain_to=frozenset(config.plain_clusters),
        identity=config.identity,
        guard=reach.guard,
        tcp=TcpOptions(congestion=config.congestion_control),
        rdma=reach.rdma,
        coding_cores=config.codings().max_cores,
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
