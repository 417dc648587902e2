"""`prfaas convert`: has a node change its role, and tells how that goes.

A node does not know who else is there. The gateway's file does: so the last node of a role is not taken away by mistake.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gateway.cluster.agent_client import AgentClient
from gateway.cluster.agent_values import ConversionStatus, NodeInfo, NodeLoad
from gateway.errors import AgentCallFailed, GatewayConfigError
from planner.decisions.plans.conversions import NodeStanding, why_not
from planner.decisions.views import ClusterKind, Role
from prfaas.commands.fleet.members import listed_members
from prfaas.commands.operator import gateway_of, operator_identity
from prfaas.errors import ConversionError

RPC_S: Final = 5.0
MAX_EPOCH: Final = (1 << 64) - 1  # that a command can carry
TELL_S: Final = 1.0  # between two lines about a node that drains
DONE: Final = ("converted", "unchanged")

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertWish:
    """What the operator wants. `node` is an id, or the host:port of an agent; limits of 0 are the node's own."""

    node: str
    role: Role
    drain_timeout_s: float = 0.0
    verify_timeout_s: float = 0.0
    force: bool = False
    certificate: Path | None = None  # an operator's


@dataclass(frozen=True, slots=True)
class AnsweringNode:
    """A node that has answered."""

    agent: AgentClient
    info: NodeInfo
    load: NodeLoad

    @property
    def standing(self) -> NodeStanding:
        """As the planner sees it. Raises ConversionError for a node of a version that knows more kinds and roles."""
        info = self.info
        try:
            kind, role = ClusterKind(info.cluster_kind), Role(info.role)
        except ValueError as error:
            raise ConversionError(f"{info.node_id}: this version cannot read its description: {error}") from error
        return NodeStanding(
            node_id=info.node_id, cluster=info.cluster, kind=kind, role=role, is_ready=info.state == "ready"
        )


async def convert(wish: ConvertWish, gateway_file: Path, say: Say) -> bool:
    """Whether the node holds the role now. Raises ConversionError."""
    async with agents_of(gateway_file, wish.certificate) as agents:
        nodes = await answering(agents)
        node = meant(wish.node, nodes, agents)
        _check(wish, node, nodes)
        try:
            return await _carry_out(wish, node, say)
        except AgentCallFailed as error:
            say(str(error))
            return False


@asynccontextmanager
async def agents_of(gateway_file: Path, certificate: Path | None = None) -> AsyncIterator[Sequence[AgentClient]]:
    """The agents that a gateway's file and its registries name, asked with an operator's certificate. Raises ConversionError.

    What holds no node's certificate, or a revoked one, is told nothing.
    """
    try:
        config = gateway_of(gateway_file)
    except GatewayConfigError as error:
        raise ConversionError(str(error)) from error
    identity = operator_identity(config, certificate)
    try:
        guard = identity.guard() if identity is not None else None
    except OSError as error:
        raise ConversionError(str(error)) from error
    async with AsyncExitStack() as stack:
        members = (await asyncio.to_thread(listed_members, config)).members
        agents = [AgentClient(node.agent, RPC_S, identity, node.name, guard=guard) for node in members]
        for agent in agents:
            stack.push_async_callback(agent.close)
        yield agents


async def answering(agents: Sequence[AgentClient]) -> list[AnsweringNode]:
    """The nodes that answer."""
    return [node for node in await asyncio.gather(*map(_ask, agents)) if isinstance(node, AnsweringNode)]


async def _ask(agent: AgentClient) -> AnsweringNode | AgentCallFailed:
    try:
        await agent.check_peer()
        return AnsweringNode(agent, *await agent.describe())
    except AgentCallFailed as error:
        return error


def meant(name: str, nodes: Sequence[AnsweringNode], agents: Sequence[AgentClient]) -> AnsweringNode:
    """The node of that id, or of that address of an agent. Raises ConversionError."""
    for node in nodes:
        if name in (node.info.node_id, node.agent.address):
            return node
    if name in [agent.address for agent in agents]:
        raise ConversionError(f"{name} does not answer")
    known = ", ".join(sorted(node.info.node_id for node in nodes)) or "none"
    raise ConversionError(f"{name}: no such node, or it does not answer; these nodes do: {known}")


def _check(wish: ConvertWish, node: AnsweringNode, nodes: Sequence[AnsweringNode]) -> None:
    reason = why_not(node.info.node_id, wish.role, [other.standing for other in nodes])
    if reason and not wish.force:
        raise ConversionError(f"{reason}; --force converts it anyway")


async def _carry_out(wish: ConvertWish, node: AnsweringNode, say: Say) -> bool:
    name, epoch = node.info.node_id, node.info.role_epoch + 1
    if epoch > MAX_EPOCH:
        raise ConversionError(
            f"{name}: its newest command has epoch {node.info.role_epoch}, and no higher one exists: "
            "restart the node with this version, which clears the epoch"
        )
    say(f"{name}: {node.info.role} -> {wish.role}, epoch {epoch}")

    async def stands(wait_s: float) -> ConversionStatus:
        return await node.agent.convert(
            epoch,
            wish.role,
            drain_timeout_s=wish.drain_timeout_s,
            verify_timeout_s=wish.verify_timeout_s,
            wait_s=wait_s,
        )

    conversion = await stands(TELL_S)
    while conversion.is_under_way and conversion.epoch == epoch:
        say(f"{name}: {await _progress(node, conversion)}")
        conversion = await stands(TELL_S)
    say(f"{name}: {_ending(conversion, epoch)}")
    return conversion.outcome in DONE and conversion.epoch == epoch


async def _progress(node: AnsweringNode, conversion: ConversionStatus) -> str:
    if conversion.control_s:
        return f"its engine is asked for an answer since {conversion.control_s:.1f} s"
    _, load = await node.agent.describe()
    return f"drains since {conversion.drain_s:.0f} s: {load.running} run, {load.waiting} wait"


def _ending(conversion: ConversionStatus, epoch: int) -> str:
    if conversion.epoch != epoch:
        return f"overruled by epoch {conversion.epoch}, which wants {conversion.target}"
    if conversion.outcome == "converted":
        took = f"{conversion.drain_s:.2f} s to drain, {conversion.control_s * 1e3:.0f} ms for the rest"
        return f"is a {conversion.role} node now ({took})"
    if conversion.outcome == "unchanged":
        return f"is a {conversion.role} node already"
    detail = f": {conversion.detail}" if conversion.detail else ""
    return f"{conversion.outcome}{detail}; it is a {conversion.role} node as before"
