"""`prfaas drain --node`: a node takes nothing new, or takes requests again; asked of its agent, which logs who asked."""

import asyncio
import getpass
import os
import socket
from dataclasses import dataclass
from pathlib import Path

import grpc

from gateway.cluster.agent_client import node_error
from gateway.config.gateway import load
from gateway.errors import AgentCallFailed
from prfaas.commands.convert import Say, agents_of, answering, meant
from prfaas.commands.fleet.members import listed_members
from prfaas.commands.operator import operator_identity
from transport.control.credentials import channel_credentials, channel_options
from transport.control.proto import node_pb2 as pb
from transport.control.proto.node_pb2_grpc import NodeAgentStub
from transport.wire.identity import Identity

RPC_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainWish:
    """What the operator wants. `node` is an id, or the host:port of an agent; a timeout of 0 waits for nothing."""

    node: str
    undo: bool = False
    timeout_s: float = 0.0
    certificate: Path | None = None  # an operator's


async def drain_node(wish: DrainWish, gateway_file: Path, say: Say) -> bool:
    """Whether the node has done so: drained whole, or takes requests. Raises ConversionError."""
    async with agents_of(gateway_file, wish.certificate) as agents:
        node = meant(wish.node, await answering(agents), agents)
        config = load(gateway_file)
        members = (await asyncio.to_thread(listed_members, config)).members
        named = next((each.name for each in members if each.agent == node.agent.address), "")
        try:
            identity = operator_identity(config, wish.certificate)
            async with _channel(node.agent.address, named, identity) as channel:
                stub = NodeAgentStub(channel)  # type: ignore[no-untyped-call]
                return await (_undrain if wish.undo else _drain)(stub, node.info.node_id, wish.timeout_s, say)
        except grpc.aio.AioRpcError as error:
            say(f"{node.info.node_id}: {_in_words(node_error(node.agent.address, error))}")
            return False


async def _drain(stub: NodeAgentStub, name: str, timeout_s: float, say: Say) -> bool:
    least_s = max(timeout_s, 1e-3)  # 0 is the node's own limit
    done = await stub.Drain(pb.DrainRequest(timeout_s=least_s, by=_user()), timeout=least_s + RPC_S)
    say(f"{name}: takes nothing new; {'nothing runs any more' if done.ok else done.reason}")
    return bool(done.ok) or not timeout_s


async def _undrain(stub: NodeAgentStub, name: str, timeout_s: float, say: Say) -> bool:
    await stub.Undrain(pb.UndrainRequest(by=_user()), timeout=RPC_S)
    say(f"{name}: takes requests again")
    return True


def _channel(address: str, name: str, identity: Identity | None) -> grpc.aio.Channel:
    if identity is None:
        return grpc.aio.insecure_channel(address)
    return grpc.aio.secure_channel(address, channel_credentials(identity), channel_options(name))


def _in_words(error: AgentCallFailed) -> str:
    if error.reason == "unimplemented":
        return "its version cannot undo a drain: start it again"
    return str(error)


def _user() -> str:
    """Who runs this process, and where; a container's user may have no name."""
    try:
        name = getpass.getuser()
    except (KeyError, OSError):
        name = f"uid {os.getuid()}"
    return f"{name}@{socket.gethostname()}"
