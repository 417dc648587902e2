"""The picker's gRPC: a stream of external processing for each request, and health checks."""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Final, Protocol

import grpc
import grpc.aio

from gateway.errors import ExchangeError
from gateway.picker.asking import PickRequest, UnreadableBody, read_request
from gateway.picker.choosing import Pick
from gateway.picker.exchange import (
    ChoiceWanted,
    Exchange,
    ProxyAnswer,
    ProxyMessage,
    Refusal,
    ResponseHead,
)
from gateway.picker.headers import SATURATED, SERVICE, SHUTTING_DOWN
from gateway.picker.metrics import PickerMetrics
from gateway.picker.wire import read, write
from transport.control.proto import ext_proc_pb2 as pb

log = logging.getLogger("prfaas.picker")

HEALTH: Final = "grpc.health.v1.Health"
SERVING: Final = bytes(
    (0x08, 1)
)  # HealthCheckResponse {status}: its one field, so that no package of its own is needed
NOT_SERVING: Final = bytes((0x08, 2))
HEALTH_EVERY_S: Final = 0.25  # that a watcher is told of another state after
MAX_STREAMS: Final = 20_000
MESSAGE_BYTES: Final = 1 << 20  # of a message beside the body in it
OPTIONS: Final = (
    ("grpc.max_concurrent_streams", MAX_STREAMS),
    ("grpc.so_reuseport", 0),
)


class Picker(Protocol):
    """Who chooses."""

    async def pick(self, asked: PickRequest) -> Pick | Refusal: ...


class ExchangeService:
    """Answers proxies. After `leave` it refuses what is new."""

    def __init__(self, picker: Picker, metrics: PickerMetrics, *, max_body_bytes: int, max_held_bytes: int) -> None:
        """Of bodies that pass through, `max_held_bytes` are held at once until they are whole."""
        self._picker = picker
        self._metrics = metrics
        self._max_body_bytes = max_body_bytes
        self._max_held_bytes = max_held_bytes
        self._held_bytes = 0
        self._is_leaving = False
        self.streams = 0

    def leave(self) -> None:
        """Refuses what is new."""
        self._is_leaving = True

    async def process(self, messages: AsyncIterator[pb.ProcessingRequest], context: Any) -> AsyncIterator[bytes]:
        """One request's stream, to its end: the proxy's, unless we refuse the request."""
        exchange, picks = Exchange(self._max_body_bytes), list[Pick]()
        held = 0
        self.streams += 1
        try:
            async for received in messages:
                answers = deque(await self._answers(exchange, read(received), picks))
                del received  # streams outlive their bodies by far
                while answers:
                    yield write(answers.popleft())
                if exchange.is_over:
                    return
                held = self._hold(held, exchange.held_bytes)
                if held and self._held_bytes > self._max_held_bytes:
                    refusal = Refusal(status=429, text="too many bodies are held at once", reason=SATURATED)
                    self._metrics.picked(refusal)
                    yield write(refusal)
                    return
        except ExchangeError as error:
            self._metrics.broken(str(error))
            log.warning("a proxy's stream is ended: %s", error)
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        finally:
            self.streams -= 1
            self._hold(held, 0)
            for pick in picks:
                pick.end(exchange.hears_of_answers)

    async def _answers(self, exchange: Exchange, message: ProxyMessage, picks: list[Pick]) -> list[ProxyAnswer]:
        """What a message is answered. A pick that follows from it is added to the stream's."""
        self._metrics.heard(message)
        if isinstance(message, ResponseHead) and picks:
            self._metrics.answered(message.served, picks[0].choice)
        answers: list[ProxyAnswer] = []
        for answer in exchange.on(message):
            if isinstance(answer, ChoiceWanted):
                found = await self._found(answer)
                if isinstance(found, Pick):
                    picks.append(found)
                told = found.choice if isinstance(found, Pick) else found
                self._metrics.picked(told)
                answers += exchange.chosen(told)
            else:
                if isinstance(answer, Refusal):
                    self._metrics.picked(answer)
                answers.append(answer)
        return answers

    def _hold(self, before: int, now: int) -> int:
        self._held_bytes += now - before
        return now

    async def _found(self, wanted: ChoiceWanted) -> Pick | Refusal:
        if self._is_leaving:
            return Refusal(status=503, text="this picker is shutting down", reason=SHUTTING_DOWN, retry_after_s=1.0)
        try:
            asked = read_request(wanted.head, wanted.body)
        except UnreadableBody as error:
            return Refusal(status=400, text=str(error))
        return await self._picker.pick(asked)


class HealthService:
    """grpc.health.v1, of one state."""

    def __init__(self, is_serving: Callable[[], bool]) -> None:
        self._is_serving = is_serving

    async def check(self, request: bytes, context: Any) -> bytes:
        """Whether requests are taken."""
        return SERVING if self._is_serving() else NOT_SERVING

    async def watch(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        """Tells the state at once and after each change, until the caller hangs up."""
        told: bool | None = None
        while True:
            if (now := self._is_serving()) is not told:
                told = now
                yield SERVING if now else NOT_SERVING
            await asyncio.sleep(HEALTH_EVERY_S)


@asynccontextmanager
async def grpc_listening(
    host: str,
    port: int,
    service: ExchangeService | None,
    health: HealthService,
    *,
    max_body_bytes: int = 0,
    grace_s: float = 0.0,
    credentials: grpc.ServerCredentials | None = None,
) -> AsyncIterator[int]:
    """A server inside the block; its port. Without a `service` it tells of health alone, without `credentials` in clear.

    Raises OSError.
    """
    server = grpc.aio.server(options=[*OPTIONS, ("grpc.max_receive_message_length", max_body_bytes + MESSAGE_BYTES)])
    handlers = [
        grpc.method_handlers_generic_handler(
            HEALTH,
            {
                "Check": grpc.unary_unary_rpc_method_handler(health.check),
                "Watch": grpc.unary_stream_rpc_method_handler(health.watch),
            },
        )
    ]
    if service is not None:
        process = grpc.stream_stream_rpc_method_handler(
            service.process, request_deserializer=pb.ProcessingRequest.FromString
        )
        handlers.append(grpc.method_handlers_generic_handler(SERVICE, {"Process": process}))
    server.add_generic_rpc_handlers(tuple(handlers))
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        bound = (
            server.add_insecure_port(address) if credentials is None else server.add_secure_port(address, credentials)
        )
    except RuntimeError as error:
        raise OSError(f"{host}:{port} cannot be listened at: {error}") from error
    await server.start()
    try:
        yield bound
    finally:
        await server.stop(grace_s)
