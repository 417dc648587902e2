"""The gateway's side of node.proto: one agent, called over gRPC or a kept connection, answering in values of ours."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import inf
from typing import Any, Final

import grpc
import grpc.aio

from gateway.cluster.agent_connection import CallConnection, PersistentCalls
from gateway.cluster.agent_peer import AgentPeer
from gateway.cluster.agent_values import (
    ConversionStatus,
    GrantedReservation,
    NodeEvent,
    NodeInfo,
    NodeLoad,
    conversion_from,
    events_from,
    granted_from,
    hashes_in,
    info_from,
    load_from,
)
from gateway.cluster.pinned_prefixes import PinnedPrefix, kept_from
from gateway.errors import AgentCallFailed, unheard
from gateway.prompt.prompt import Prompt
from planner.decisions.links.shares import RateGrant
from transport.control.credentials import channel_credentials, channel_options
from transport.control.messages import TicketInfo
from transport.control.proto import node_pb2 as pb
from transport.control.proto.node_pb2_grpc import NodeAgentStub
from transport.control.tickets import MAX_CONTROL_BYTES, REASON_KEY, ticket_info, ticket_message
from transport.peers.guard import Guard
from transport.wire.identity import Identity

REASONS: Final = {
    grpc.StatusCode.RESOURCE_EXHAUSTED: "no_capacity",
    grpc.StatusCode.UNAVAILABLE: "unreachable",
    grpc.StatusCode.DEADLINE_EXCEEDED: "timeout",
    grpc.StatusCode.FAILED_PRECONDITION: "not_ready",
    grpc.StatusCode.INVALID_ARGUMENT: "invalid",
}
# What gRPC says of a node whose certificate is not accepted; of ours, the node's side tells nothing but a closed socket.
NOT_WHO_WE_MEANT: Final = ("handshake failed", "Hostname Verification Check failed", "CERTIFICATE_VERIFY_FAILED")


TURN_HASHES: Final = 512  # that are taken in at once, or the last part of more
RENEWED: Final = "renewed"
RENEW_LOOK_S: Final = 10.0  # between two looks at our certificate
RENEW_SPREAD_S: Final = 60.0  # within which all agents are watched anew with it


@dataclass(slots=True)
class NearClusters:
    """The clusters whose nodes name every block; none: all do. All agents of a gateway share it, and a reload may change it."""

    names: tuple[str, ...] = ()

    def has(self, cluster: str) -> bool:
        """Whether nodes of that cluster name every block."""
        return not self.names or cluster in self.names


class AgentClient:
    """One agent. Every call has a deadline; every failure is an AgentCallFailed with a reason label."""

    renew_look_s: float = RENEW_LOOK_S
    renew_spread_s: float = RENEW_SPREAD_S

    def __init__(
        self,
        address: str,
        timeout_s: float,
        identity: Identity | None = None,
        name: str = "",
        by_grpc: Callable[[str], None] = lambda reason: None,
        holder: str = "",
        guard: Guard | None = None,
        near: NearClusters | None = None,
    ) -> None:
        """`by_grpc` is told why a call that every request makes did not go over a kept connection.

        `holder` names this process: the agent frees what it holds once its connections are gone. "": with the lease.
        `guard` knows which certificates agents may have. An agent of a cluster that is not `near` sends digests; none: all
        agents name every block. If that changes, an agent for which that differs is watched anew.
        """
        self.address = address
        self.timeout_s = timeout_s
        self._identity = identity
        self._version = identity.version() if identity is not None else ()
        self._name = name
        self._peer = AgentPeer(address, timeout_s, identity, guard)
        self.kept = PersistentCalls(address, timeout_s, identity, name, holder, self._peer.refusal)
        self.certified_name = self.kept.certified_name
        self._holder = holder
        self.near = near or NearClusters()
        self._by_grpc = by_grpc
        self._look_at, self._renew_at = 0.0, inf
        self._channel = self._open()
        self._stub: Any = NodeAgentStub(self._channel)  # type: ignore[no-untyped-call]

    def _open(self) -> grpc.aio.Channel:
        options: list[tuple[str, Any]] = [
            ("grpc.max_send_message_length", MAX_CONTROL_BYTES),
            ("grpc.max_receive_message_length", MAX_CONTROL_BYTES),
            # A node that comes back must be found at once, not after gRPC's own backoff of up to two minutes.
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 2000),
        ]
        if self._identity is None:
            return grpc.aio.insecure_channel(self.address, options=options)
        options += channel_options(self._name)
        return grpc.aio.secure_channel(self.address, channel_credentials(self._identity), options=options)

    async def renew(self) -> None:
        """Connects anew where our certificate has changed, or the agent's must have. Raises AgentCallFailed."""
        if self._identity is None:
            return
        try:
            version = self._identity.version()
            if version == self._version and not self._peer.has_expired:
                return
            self._identity.check()
            old, self._channel = self._channel, self._open()
        except OSError as error:
            raise AgentCallFailed(self.address, "identity", str(error)) from error
        self._version, self._renew_at = version, inf
        self._stub = NodeAgentStub(self._channel)  # type: ignore[no-untyped-call]
        self.kept.renew()
        await old.close(self.timeout_s)

    def _is_to_renew(self, now: float) -> bool:
        """Whether a certificate was replaced, and it is this agent's turn: not all nodes are watched anew at once."""
        if self._identity is None or now < self._look_at:
            return False
        self._look_at = now + self.renew_look_s
        try:
            if self._identity.version() == self._version and not self._peer.has_expired:
                self._renew_at = inf
                return False
            self._identity.check()
        except OSError:  # its key is not there yet
            return False
        self._renew_at = min(self._renew_at, now + self.renew_spread_s * _turn(self.address))
        return now >= self._renew_at

    async def close(self) -> None:
        await self.kept.close()
        await self._channel.close()

    async def check_peer(self) -> None:
        """Looks whether who listens there may be an agent. Raises AgentCallFailed."""
        await self._peer.look()

    async def describe(self) -> tuple[NodeInfo, NodeLoad]:
        """Who the node is, and how busy."""
        node = await self._call(self._stub.Describe, pb.DescribeRequest())
        self._peer.says(node.cluster, node.node_id)
        return info_from(node), load_from(node.load)

    async def convert(
        self, epoch: int, role: str, *, drain_timeout_s: float = 0.0, verify_timeout_s: float = 0.0, wait_s: float = 0.0
    ) -> ConversionStatus:
        """Has the node change its role, or says how that stands; waits up to `wait_s` for its end. 0: the node's own limits."""
        message = pb.ConvertRequest(
            epoch=epoch, role=role, drain_timeout_s=drain_timeout_s, verify_timeout_s=verify_timeout_s, wait_s=wait_s
        )
        return conversion_from(await self._call(self._stub.Convert, message, self.timeout_s + wait_s))

    async def reserve(
        self, request_id: str, prompt: Prompt, ttl_s: float, tenant: str = "", sender: str = ""
    ) -> GrantedReservation:
        """Room for the KVCache of all but the last token of `prompt` on this decode node, of the part of `tenant`.

        `sender` is the node that will send it; empty: any.
        """
        message = pb.ReserveRequest(
            request_id=request_id,
            num_tokens=prompt.transfer_tokens,
            tokens_digest=prompt.digest,
            ttl_s=ttl_s,
            tenant=tenant,
            sender=sender,
        )
        return granted_from(await self._reserve(message, prompt.hashes))

    async def reserve_prefix(
        self, request_id: str, hashes: Sequence[bytes], num_tokens: int, ttl_s: float, sender: str = ""
    ) -> TicketInfo:
        """Room for a prefix of whole blocks that another node will send."""
        message = pb.ReserveRequest(
            request_id=request_id, num_tokens=num_tokens, ttl_s=ttl_s, prefix_only=True, sender=sender
        )
        return ticket_info(await self._reserve(message, hashes))

    async def readdress(self, transfer_id: str, sender: str) -> None:
        """Another node sends instead. Raises AgentCallFailed."""
        if self._identity is not None:  # else no receiver looks
            await self._call(self._stub.Readdress, pb.ReaddressRequest(transfer_id=transfer_id, sender=sender))

    async def load(self, request_id: str, hashes: Sequence[bytes], ticket: TicketInfo, timeout_s: float) -> int:
        """Has this node send a prefix that it holds to the holder of `ticket`; returns the bytes sent."""
        message = pb.LoadRequest(request_id=request_id, block_hashes=b"".join(hashes), ticket=ticket_message(ticket))
        return int((await self._call(self._stub.Load, message, timeout_s)).bytes_sent)

    async def commit(self, transfer_id: str, timeout_s: float) -> None:
        """Waits until a prefix has landed here and can be hit."""
        done = await self._call(self._stub.Commit, pb.TransferRef(transfer_id=transfer_id), timeout_s)
        if not done.ok:
            raise AgentCallFailed(self.address, "not_landed", done.reason)

    async def share_egress(
        self, holder: str, cluster: str, grant: RateGrant, *, serial: int, lease_s: float, until_clock_s: float
    ) -> None:
        """Gives this node another part of a line's budget, for a time. Raises AgentCallFailed."""
        message = pb.EgressShare(
            holder=holder,
            serial=serial,
            cluster=cluster,
            bytes_per_s=grant.bytes_per_s,
            own_bytes_per_s=grant.own_bytes_per_s,
            lease_s=lease_s,
            until_clock_s=until_clock_s,
        )
        await self._call(self._stub.ShareEgress, message, min(self.timeout_s, lease_s))

    async def drop_prefix(self, hashes: Sequence[bytes], keep_tokens: int, unused_s: float) -> int:
        """Has this node give up a prefix beyond `keep_tokens`, unless used within `unused_s`; returns the pages freed."""
        message = pb.DropPrefixRequest(block_hashes=b"".join(hashes), keep_tokens=keep_tokens, unused_s=unused_s)
        return int((await self._call(self._stub.DropPrefix, message)).pages)

    async def keep(
        self,
        context_id: str,
        hashes: Sequence[bytes],
        num_tokens: int,
        owner: str,
        ttl_s: float,
        budget_tokens: int,
    ) -> PinnedPrefix:
        """Has this node keep what it has of a prefix, which it may keep already. Raises AgentCallFailed."""
        message = pb.ContextRequest(
            context_id=context_id,
            block_hashes=b"".join(hashes),
            num_tokens=num_tokens,
            owner=owner,
            ttl_s=ttl_s,
            budget_tokens=budget_tokens,
        )
        return kept_from(await self._call(self._stub.CreateContext, message))

    async def delete_context(self, context_id: str, owner: str) -> None:
        """Has this node keep a prefix no longer. Raises AgentCallFailed."""
        await self._call(self._stub.DeleteContext, pb.ContextRequest(context_id=context_id, owner=owner))

    async def probe(self, ticket: TicketInfo, timeout_s: float) -> str:
        """Has this node ask the receiver that `ticket` names for an answer; "" when one came, else why not."""
        done = await self._call(self._stub.Probe, ticket_message(ticket), timeout_s)
        return "" if done.ok else done.reason or "other"

    async def abort(self, transfer_id: str, reason: str) -> None:
        """Frees what a reservation, or a push to it, still holds here."""
        message = pb.AbortRequest(transfer_id=transfer_id, reason=reason)
        if (answer := self._asked(pb.Call(abort=message))) is not None:
            _unless_refused(await answer, self.address)
            return
        await self._call(self._stub.Abort, message)

    async def watch(self, load_interval_s: float, silence_s: float) -> AsyncGenerator[NodeEvent, None]:
        """Events until the stream ends or is silent for `silence_s`. Raises AgentCallFailed, also on a lost event.

        With RENEWED, nothing is wrong as far as is known: the next stream shows another certificate of ours, sees another one
        of the agent's, or says that it is near, or not any more.
        """
        await self.renew()
        await self._peer.look()
        told, cluster = NearClusters(self.near.names), ""
        stream = self._stub.Watch(
            pb.WatchRequest(load_interval_s=load_interval_s, holder=self._holder, near=told.names, takes_several=True)
        )
        last_seq: int | None = None
        num_hashes = 0  # since others had their turn
        try:
            while True:
                event = await _next(stream, silence_s, self.address)
                if last_seq is not None and event.seq != last_seq + 1:
                    raise AgentCallFailed(self.address, "event_gap", f"{event.seq} after {last_seq}")
                last_seq = event.seq
                self._peer.unless_revoked()
                is_changed = cluster and told.has(cluster) != self.near.has(cluster)
                if is_changed or self._is_to_renew(asyncio.get_running_loop().time()):
                    raise AgentCallFailed(self.address, RENEWED)
                for value in events_from(event):
                    if isinstance(value, NodeInfo):
                        cluster = value.cluster
                        self._peer.says(value.cluster, value.node_id)
                        self.kept.offered(value.calls_port)
                    yield value
                    num_hashes += hashes_in(value)
                    if num_hashes >= TURN_HASHES:  # a long snapshot must not hold the event loop
                        num_hashes = 0
                        await asyncio.sleep(0)
        finally:
            stream.cancel()

    async def _reserve(self, message: pb.ReserveRequest, hashes: Sequence[bytes]) -> pb.Ticket:
        message.holder, message.block_hashes = self._holder, b"".join(hashes)
        if (answer := self._asked(pb.Call(reserve=message))) is not None:
            return _unless_refused(await answer, self.address).ticket
        ticket: pb.Ticket = await self._call(self._stub.Reserve, message)
        return ticket

    def _asked(self, call: pb.Call) -> "asyncio.Future[pb.CallAnswer] | None":
        """The answer to a call over the kept connection; None without one: then the call goes by gRPC."""
        connection = self.kept.connection()
        if isinstance(connection, CallConnection):
            return connection.ask(call, self.timeout_s)
        self._by_grpc(connection)
        return None

    async def _call(self, method: Any, message: Any, timeout_s: float | None = None) -> Any:
        try:
            return await method(message, timeout=self.timeout_s if timeout_s is None else timeout_s)
        except grpc.aio.AioRpcError as error:
            raise node_error(self.address, error) from error


async def _next(stream: Any, silence_s: float, address: str) -> pb.NodeEvent:
    loop = asyncio.get_running_loop()
    due = loop.time() + silence_s
    try:
        async with asyncio.timeout_at(due):
            event: pb.NodeEvent = await stream.read()
    except TimeoutError as error:
        raise unheard(address, silence_s, loop.time() - due) from error
    except grpc.aio.AioRpcError as error:
        raise node_error(address, error) from error
    if event is grpc.aio.EOF:
        raise AgentCallFailed(address, "stream_ended")
    return event


def _turn(address: str) -> float:
    """A number in [0, 1) of an agent's own."""
    return int.from_bytes(blake2b(address.encode(), digest_size=4).digest()) / 2**32


def _unless_refused(answer: pb.CallAnswer, address: str) -> pb.CallAnswer:
    if answer.HasField("refusal"):
        raise AgentCallFailed(address, answer.refusal.reason, answer.refusal.detail)
    return answer


def node_error(address: str, error: grpc.aio.AioRpcError) -> AgentCallFailed:
    """The foreign error as ours, with the label it is counted under."""
    code = error.code()
    labels = [str(value) for key, value in error.trailing_metadata() or () if key == REASON_KEY]
    details = error.details() or ""
    if not labels and any(sign in details for sign in NOT_WHO_WE_MEANT):
        labels = ["identity"]
    return AgentCallFailed(address, labels[0] if labels else REASONS.get(code, code.name.lower()), details)
