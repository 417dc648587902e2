"""The agents of scripted nodes, called in memory: the gateway's own client over a channel that calls the node's methods."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any, NoReturn, cast

import grpc
import grpc.aio

from gateway.cluster.agent_client import AgentClient
from tests.gateway.memory.loop import HOST, memory_loop
from tests.gateway.scripted import ScriptedNode
from transport.control.proto import node_pb2 as pb

Metadata = Sequence[tuple[str, str | bytes]]


def failure(code: grpc.StatusCode, details: str, metadata: Metadata = ()) -> grpc.aio.AioRpcError:
    """The error that a caller gets from gRPC."""
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*metadata), details)


class MemoryContext:
    """What a node's methods may do beside answering."""

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Metadata = ()) -> NoReturn:
        raise failure(code, details, trailing_metadata)

    def set_code(self, code: grpc.StatusCode) -> None:
        """A method that no node has says so, before it raises."""

    def set_details(self, details: str) -> None:
        """The same in words."""


class MemoryStream:
    """The events of one Watch, as a caller reads them."""

    def __init__(self, node: ScriptedNode, request: pb.WatchRequest) -> None:
        self._events: asyncio.Queue[Any] = asyncio.Queue()
        self._watching = asyncio.ensure_future(self._watch(node, request))

    async def read(self) -> Any:
        """The next event, or EOF."""
        return await self._events.get()

    def cancel(self) -> None:
        self._watching.cancel()

    async def _watch(self, node: ScriptedNode, request: pb.WatchRequest) -> None:
        async with aclosing(cast(Any, node.Watch(request, MemoryContext()))) as events:
            async for event in events:
                self._events.put_nowait(event)
        self._events.put_nowait(grpc.aio.EOF)


class MemoryChannel:
    """A channel to the node of an address. Messages are copied, as they are on a wire."""

    def __init__(self, node: ScriptedNode) -> None:
        self._node = node

    def unary_unary(self, path: str, **options: Any) -> Callable[..., Awaitable[Any]]:
        method = getattr(self._node, path.rpartition("/")[2])

        async def call(message: Any, **limit: float | None) -> Any:
            sent = type(message)()
            sent.CopyFrom(message)
            try:
                async with asyncio.timeout(limit["timeout"]):
                    return await method(sent, MemoryContext())
            except TimeoutError as error:
                raise failure(grpc.StatusCode.DEADLINE_EXCEEDED, f"no answer within {limit['timeout']} s") from error
            except NotImplementedError as error:
                raise failure(grpc.StatusCode.UNIMPLEMENTED, str(error)) from error

        return call

    def unary_stream(self, path: str, **options: Any) -> Callable[[pb.WatchRequest], MemoryStream]:
        return lambda request: MemoryStream(self._node, request)

    async def close(self, grace: float | None = None) -> None:
        """Nothing is open."""


class MemoryAgent(AgentClient):
    """A node's agent. Everything is the gateway's own client but the channel."""

    def _open(self) -> grpc.aio.Channel:
        node = memory_loop().agents[self.address]
        assert isinstance(node, ScriptedNode)
        return cast(grpc.aio.Channel, MemoryChannel(node))


@asynccontextmanager
async def in_memory(node: ScriptedNode) -> AsyncIterator[None]:
    """`node` serves inside the block: its engine on a port of the loop's, its agent at an address of the loop's."""
    agents = memory_loop().agents
    node.agent_address = f"{HOST}:{len(agents) + 1}"
    agents[node.agent_address] = node
    await node.start_engine()
    try:
        yield
    finally:
        await node.stop_engine()
        del agents[node.agent_address]
