"""The seventh room: the decode node's bytes go to the client, unchanged but for the number of cached tokens.

Once a byte of a stream has left, an error can only be told in the stream: as its last event, at once, whatever the error.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Final, Protocol

from aiohttp import web

from gateway.accounts import Accounts
from gateway.connections import Connection
from gateway.errors import ApiError, DecodeFailed
from gateway.request import Request
from gateway.run import Attempt
from gateway.tasks import TaskSet
from gateway.usage import RECOMPUTED, UsagePatch, completion_tokens, with_cached_tokens

OUTCOME_WAIT_S: Final = 2.0  # the prefill's own report is a round trip behind the KVCache that the answer needed
EVENT_END: Final = b"\n\n"
COMMENT: Final = b":\n\n"  # clients of SSE ignore it

PIECE_BYTES: Final = 128 * 1024  # of a whole answer: more than aiohttp writes without waiting for the client

Read = Callable[[], Awaitable[bytes]]


class Writable(Protocol):
    """A stream that has begun."""

    async def write(self, data: bytes) -> None: ...


class Relay:
    """Relays answers."""

    def __init__(self, accounts: Accounts, tasks: TaskSet, clock: Callable[[], float]) -> None:
        self._accounts = accounts
        self._tasks = tasks
        self._clock = clock

    async def send(self, http: web.Request, request: Request, attempt: Attempt) -> web.StreamResponse:
        """Relays all of the answer."""
        answer = attempt.answer
        headers = {
            "x-request-id": request.id,
            "Content-Type": answer.content_type,
            "x-prfaas-route": route_header(request),
        }
        if answer.status == 200 and request.call.stream:
            return await self._stream(http, request, attempt, headers)
        body = answer.first if answer.status != 200 else await self._whole(request, attempt)
        request.completion_tokens = completion_tokens(body)
        if len(body) <= PIECE_BYTES:
            # Head and body in one write.
            short = web.Response(status=answer.status, headers=headers, body=body)
            await short.prepare(http)
            with offering(request, self._clock):
                await short.write_eof()
            self._accounts.relayed(request)
            return short
        response = web.StreamResponse(status=answer.status, headers=headers)
        response.content_length = len(body)
        await response.prepare(http)
        for start in range(0, len(body), PIECE_BYTES):
            with offering(request, self._clock):
                await response.write(body[start : start + PIECE_BYTES])
        await response.write_eof()
        self._accounts.relayed(request)
        return response

    async def _whole(self, request: Request, attempt: Attempt) -> bytes:
        self._accounts.notice_recompute(request, attempt.answer.first)
        return with_cached_tokens(attempt.answer.first, await cached_tokens(attempt))

    async def _stream(
        self, http: web.Request, request: Request, attempt: Attempt, headers: dict[str, str]
    ) -> web.StreamResponse:
        headers |= {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        stream = web.StreamResponse(status=200, headers=headers)
        await stream.prepare(http)
        try:
            with self._probed(http, stream, request):
                await pass_on(self._reading(request, attempt), stream, request, self._clock)
        except DecodeFailed as error:
            await self._end_with(stream, request, f"The decode node failed: {error.reason}.", error.reason, error)
        except ConnectionResetError:
            raise  # the client has left
        except Exception as error:
            self._tasks.unforeseen("relay", error)
            await self._end_with(stream, request, "Internal error.", "internal_error", error)
        with offering(request, self._clock):
            await stream.write_eof()
        self._accounts.relayed(request)
        return stream

    @contextmanager
    def _probed(self, http: web.Request, stream: web.StreamResponse, request: Request) -> Iterator[None]:
        """Lets the connection find out whether a client that has closed its half still listens."""

        def probe() -> None:
            if request.is_between_events:  # else the rest of one follows at once
                self._tasks.start(stream.write(COMMENT), "probe", expected=(ConnectionError,))

        connection = http.protocol
        assert isinstance(connection, Connection)
        connection.probe_stream = probe
        try:
            yield
        finally:
            connection.probe_stream = None

    async def _end_with(
        self, stream: web.StreamResponse, request: Request, message: str, code: str, error: Exception
    ) -> None:
        request.stream_error = str(error) or code
        failure = ApiError(502, message, type="server_error", code=code)
        with offering(request, self._clock):
            await stream.write(b"data: " + failure.body() + EVENT_END)

    def _reading(self, request: Request, attempt: Attempt) -> Read:
        """Reads the answer from its first byte; what the client should not be the only one to learn is noticed."""
        answer = attempt.answer
        first: bytes | None = answer.first

        async def read() -> bytes:
            nonlocal first
            chunk, first = first, None
            try:
                chunk = chunk or await answer.read()
            except DecodeFailed as error:
                self._accounts.fell_back(request, f"decode_{error.reason}", error)
                raise
            if RECOMPUTED in chunk:
                self._accounts.notice_recompute(request, chunk)
            return chunk

        if not request.call.options.wants_usage:
            return read
        return UsagePatch(read, lambda: cached_tokens(attempt)).read


async def pass_on(read: Read, stream: Writable, request: Request, clock: Callable[[], float]) -> None:
    """Writes all that is read."""
    while chunk := await read():
        request.events += chunk.count(EVENT_END)
        # Before it is written: it has left when the write waits for the client, and others may write then.
        request.is_between_events = chunk.endswith(EVENT_END)
        request.writing_since = clock()
        await stream.write(chunk)
        request.writing_since = None


@contextmanager
def offering(request: Request, clock: Callable[[], float]) -> Iterator[None]:
    """The time in which a client has to take what it is offered, or loses its place."""
    request.writing_since = clock()
    try:
        yield
    finally:
        request.writing_since = None


async def cached_tokens(attempt: Attempt) -> int | None:
    """What the prefill reused, or None when the decode node knows better."""
    if attempt.delivery is None:
        return None
    done, _ = await asyncio.wait([attempt.delivery], timeout=OUTCOME_WAIT_S)
    if not done or attempt.delivery.cancelled() or attempt.delivery.exception() is not None:
        return None
    outcome = attempt.delivery.result()
    return outcome.cached_tokens if outcome else None


def route_header(request: Request) -> str:
    """Where the prompt was computed, and why there: `local; node=p0; uncached=812; reason=short`."""
    uncached = request.route.uncached_tokens if request.route else 0
    parts = [
        request.route_label,
        f"node={request.prefill_node}",
        f"uncached={uncached}",
        f"reason={request.reason_label}",
    ]
    parts += [f"fallback={reason}" for reason in request.fallbacks]
    return "; ".join(parts)
