"""Every gRPC call is asked for its caller's right, by the certificate that it has shown."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final, Protocol

import grpc
import grpc.aio

from transport.control.tickets import REASON_KEY
from transport.peers.guard import Guard
from transport.peers.name import PeerCertificate

DENIED: Final = "permission_denied"
UNCERTIFIED: Final = PeerCertificate(None, 0, "it has not come")

# Maps gRPC's name of a connection to its caller's certificate and address; None: it has shown no certificate.
CallerOf = Callable[[str], tuple[PeerCertificate, str] | None]


class Callers(Protocol):
    """Those who call gRPC."""

    def __call__(self, peer: str) -> tuple[PeerCertificate, str] | None:
        """A CallerOf."""

    def has_left(self, peer: str) -> bool:
        """Whether it was known, and its connection has ended a moment ago."""


Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler | None]]


class RightsInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Refuses what the caller's role may not do, and ends streams of callers that are revoked meanwhile."""

    def __init__(self, guard: Guard, callers: Callers) -> None:
        self._guard = guard
        self._callers = callers

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler | None:
        """The handler of a call, behind the question. There are calls with one request only."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None  # there is no such call, and gRPC says so
        operation = f"rpc.{handler_call_details.method.rpartition('/')[2]}"
        forms = (handler.request_deserializer, handler.response_serializer)
        if handler.unary_unary is not None:
            return grpc.unary_unary_rpc_method_handler(self._answer(operation, handler.unary_unary), *forms)
        assert handler.unary_stream is not None, f"{operation}: a stream of requests"
        return grpc.unary_stream_rpc_method_handler(self._stream(operation, handler.unary_stream), *forms)

    def _answer(self, operation: str, answer: Callable[[Any, Any], Awaitable[Any]]) -> Any:
        async def answer_if_allowed(request: Any, context: grpc.aio.ServicerContext) -> Any:
            await self._require(operation, context)
            return await answer(request, context)

        return answer_if_allowed

    def _stream(self, operation: str, stream: Callable[[Any, Any], AsyncIterator[Any]]) -> Any:
        async def stream_while_allowed(request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
            peer = await self._require(operation, context)
            task, ended = asyncio.current_task(), ""
            assert task is not None

            def end(reason: str) -> None:
                nonlocal ended
                ended = reason
                task.cancel()

            with self._guard.opened(peer, end):
                try:
                    async for each in stream(request, context):
                        yield each
                except asyncio.CancelledError:
                    if not ended:
                        raise
                    task.uncancel()
                    await _deny(context, f"{peer} is {ended}")

        return stream_while_allowed

    async def _require(self, operation: str, context: grpc.aio.ServicerContext) -> PeerCertificate:
        name = context.peer()
        if self._callers.has_left(name):  # it had rights, perhaps, and hears nothing any more
            await context.abort(grpc.StatusCode.CANCELLED, "the caller has left")
        peer, address = self._callers(name) or (UNCERTIFIED, name)
        if why := self._guard.refusal(operation, peer, address):
            await _deny(context, why)
        return peer


async def _deny(context: grpc.aio.ServicerContext, why: str) -> None:
    metadata = ((REASON_KEY, DENIED),)
    await context.abort(grpc.StatusCode.PERMISSION_DENIED, why, trailing_metadata=metadata)
