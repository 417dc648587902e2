"""Has nodes change their role, one after the other, and sees each through. The node itself drains, flips and verifies.

Its commands carry an epoch that only grows. Each leader has the epochs of its term, and takes the next of them that the node has
not seen. So a node refuses what a leader commands that another one has replaced, once it has heard of the later one. Where a
person converts a node, that epoch is the next one of the same term. A command that is under way in this term is followed.
"""

import asyncio
from typing import Final, Protocol

import grpc
import grpc.aio

from planner.decisions.plans.live_plan import LivePlan
from planner.decisions.plans.offered import NodeReport
from planner.decisions.views import Role
from transport.control.credentials import channel_credentials, channel_options, server_certificate
from transport.control.proto import node_pb2 as pb
from transport.control.proto.node_pb2_grpc import NodeAgentStub
from transport.peers.rights import SERVE
from transport.wire.identity import Identity

RPC_S: Final = 5.0
WAIT_S: Final = 10.0  # of one call; a caller that waits longer asks again
VERIFY_S: Final = 60.0  # for everything after the drain
EPOCHS_PER_TERM: Final = 1 << 16
DONE: Final = ("converted", "unchanged")


class ConversionFailed(Exception):
    """The node keeps its old role; the message says why."""


class NodeConverter(Protocol):
    """What can have a node converted."""

    async def convert(self, node: NodeReport, role: Role, plan: LivePlan) -> None:
        """Returns when the node holds the role that `plan` gives it. Raises ConversionFailed."""
        ...


def next_epoch(term: int, newest: int) -> int:
    """The epoch of a command of the leader of `term`, for a node that has seen `newest`.

    Raises ConversionFailed where that is no epoch of this term any more.
    """
    first = term * EPOCHS_PER_TERM
    epoch = max(first, newest + 1)
    if epoch >= first + EPOCHS_PER_TERM:
        raise ConversionFailed(
            f"its newest command has epoch {newest}, which a leader of a later term than {term} gave; "
            "if there was none, end the node, remove its .role.json in run_dir, and start it"
        )
    return epoch


class AgentConverter:
    """Over gRPC; `identity` where agents ask for mutual TLS."""

    def __init__(self, drain_timeout_s: float, identity: Identity | None = None) -> None:
        self._drain_timeout_s = drain_timeout_s
        self._identity = identity

    async def convert(self, node: NodeReport, role: Role, plan: LivePlan) -> None:
        """Returns when the node holds the role. Raises ConversionFailed."""
        try:
            async with asyncio.timeout(self._drain_timeout_s + VERIFY_S), self._channel(node) as channel:
                await self._check(node)
                await self._seen_through(NodeAgentStub(channel), role, plan.term)  # type: ignore[no-untyped-call]
        except TimeoutError:
            raise ConversionFailed("the node has not reported how it ended") from None
        except (OSError, ValueError) as error:  # its certificate, or ours
            raise ConversionFailed(f"no look at its certificate: {error}") from error
        except grpc.aio.AioRpcError as error:
            raise ConversionFailed(f"{error.code().name.lower()}: {error.details()}") from error

    async def _check(self, node: NodeReport) -> None:
        """gRPC only compares names: whether it is a node, and counts, its certificate says. Raises ConversionFailed."""
        if self._identity is None:
            return
        shown = await server_certificate(node.agent, self._identity, RPC_S)
        if why := self._identity.guard().refusal(SERVE, shown.peer, node.agent, f"{node.cluster}/{node.node_id}"):
            raise ConversionFailed(why)

    async def _seen_through(self, agent: NodeAgentStub, role: Role, term: int) -> None:
        newest = (await agent.Describe(pb.DescribeRequest(), timeout=RPC_S)).conversion
        is_under_way = newest.epoch // EPOCHS_PER_TERM == term and newest.target == role and not newest.outcome
        epoch = newest.epoch if is_under_way else next_epoch(term, newest.epoch)
        request = pb.ConvertRequest(
            epoch=epoch, role=role, drain_timeout_s=self._drain_timeout_s, wait_s=WAIT_S
        )  # fmt: skip
        while True:
            found = await agent.Convert(request, timeout=WAIT_S + RPC_S)
            if found.epoch != epoch:
                raise ConversionFailed(f"overruled by epoch {found.epoch}")
            if found.outcome in DONE:
                return
            if found.outcome:
                raise ConversionFailed(f"{found.outcome}: {found.detail}" if found.detail else found.outcome)

    def _channel(self, node: NodeReport) -> grpc.aio.Channel:
        if self._identity is None:
            return grpc.aio.insecure_channel(node.agent)
        return grpc.aio.secure_channel(
            node.agent, channel_credentials(self._identity), channel_options(node.node_id)
        )  # fmt: skip
