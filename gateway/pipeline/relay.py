"""Relays the decode node's bytes to the client, unchanged but for the number of cached tokens.

Should the node fail in the middle of a stream, another one goes on where the client's last token was
(`gateway.pipeline.stream_resume`). Where none can, the error can only be told in the stream: as its last event, at once,
whatever the error.
"""

from collections.abc import Awaitable, Callable, Mapping
from typing import Final, Protocol

from aiohttp import web

from gateway.api.sse import DONE, ERROR
from gateway.api.usage import MARK, RECOMPUTED, Details, UsagePatch, completion_tokens, with_cached_tokens, with_details
from gateway.errors import ApiError, DecodeFailed, LegFailed
from gateway.http.response import Date, Reply
from gateway.pipeline.attempt import Attempt
from gateway.pipeline.dispatcher import Answering
from gateway.pipeline.fanout import AnswerListener, PartReply
from gateway.pipeline.stream_resume import MAX_TOLD_BYTES, StreamResume, names_tokens, why_not
from gateway.request.request import BrokenOff, Request
from gateway.request.request import cached_tokens as known_cached_tokens
from gateway.tasks import TaskSet
from gateway.telemetry.recorder import RequestRecorder

OUTCOME_WAIT_S: Final = 2.0  # the prefill's own report is a round trip behind the KVCache that the answer needed
EVENT_END: Final = b"\n\n"
COMMENT: Final = b":\n\n"  # clients of SSE ignore it
CUT: Final = (
    "stream_cut",
    "the stream ended before its end",
)  # told as an error: a part must not be taken for the whole

PIECE_BYTES: Final = 128 * 1024  # of a whole answer: more than a transport holds without asking to wait for the client

Read = Callable[[], Awaitable[bytes]]


class ClientStream(Protocol):
    """An answer on its way to a client."""

    def offer(self, data: bytes) -> bool:
        """Sends `data`; whether the client is behind."""

    async def taken(self) -> None:
        """Waits until it no longer is."""


class Relay:
    """Relays answers."""

    def __init__(self, accounts: RequestRecorder, tasks: TaskSet, clock: Callable[[], float]) -> None:
        self._accounts = accounts
        self._tasks = tasks
        self._clock = clock
        self._date = Date()

    def begin(self, request: Request, kept_bytes: int) -> None:
        """Its answer is about to be asked for: can another engine go on with it, so much of its tokens' names is kept."""
        if request.prompt.is_plain and not (why_not(request.call) or request.served.is_paired):
            request.stream.kept_bytes = kept_bytes

    def reply(self, http: web.BaseRequest, status: int, headers: Mapping[str, str], length: int | None = None) -> Reply:
        """The answer to `http`, which begins with its first bytes."""
        return Reply(http, status, headers, self._date, length)

    def _reply_to(
        self, listener: web.Request | AnswerListener, status: int, headers: dict[str, str], length: int | None = None
    ) -> Reply | PartReply:
        if isinstance(listener, AnswerListener):
            return listener.reply(status, headers)
        return Reply(listener, status, headers, self._date, length)

    async def send(
        self,
        listener: web.Request | AnswerListener,
        request: Request,
        answering: Answering,
        details: Details | None = None,
    ) -> web.StreamResponse:
        """Relays all of the answer; `details` is what its usage says of prefixes that are to be kept."""
        attempt = answering.attempt
        answer = attempt.answer
        self._accounts.notice_recompute(request, answer.first)
        if answer.status == 200 and request.call.stream:
            return await self._stream(listener, request, answering, details)
        request.stream.completion_tokens = completion_tokens(
            answer.first
        )  # whether its client waits for the rest or not
        body = answer.first if answer.status != 200 else await self._whole(attempt, details)
        headers = _headers(request, attempt)
        if request.telling is not None:
            body = request.telling.whole(answer.status, body)
        reply = self._reply_to(listener, answer.status, headers, len(body))
        last = max(0, len(body) - 1) // PIECE_BYTES * PIECE_BYTES
        for start in range(0, last, PIECE_BYTES):
            if reply.offer(body[start : start + PIECE_BYTES]):
                await waited_for(reply, request, self._clock)
        await self._end(reply, request, body[last:])
        return reply

    async def _whole(self, attempt: Attempt, details: Details | None) -> bytes:
        body, cached = attempt.answer.first, await cached_tokens(attempt)
        if details is None:
            return with_cached_tokens(body, cached)
        return await with_details(body, cached, details)

    async def _stream(
        self,
        listener: web.Request | AnswerListener,
        request: Request,
        answering: Answering,
        details: Details | None,
    ) -> web.StreamResponse:
        headers = _headers(request, answering.attempt) | {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        reply = self._reply_to(listener, 200, headers)

        def probe() -> None:
            """Lets the connection find out whether a client that has closed its half still listens."""
            if request.stream.is_between_events:  # else the rest of one follows at once
                reply.offer(COMMENT)

        reply.probed_by(probe)
        try:
            await pass_on(
                self._telling(request, answering, details),
                reply,
                request,
                self._clock,
                lambda: self._accounts.relayed(request),
            )
        except DecodeFailed as error:
            self._tell(reply, request, 502, f"The decode node failed: {error.reason}.", error.reason, error)
        except ApiError as error:  # what the engine says makes no sense in the client's dialect
            self._tell(reply, request, 502, error.message, error.code or "bad_answer", error)
        except ConnectionResetError:
            raise  # the client has left
        except Exception as error:
            self._tasks.unforeseen("relay", error)
            self._tell(reply, request, 500, "Internal error.", "internal_error", error)
        finally:
            reply.probed_by(None)
        await self._end(reply, request)
        return reply

    def _tell(
        self, reply: Reply | PartReply, request: Request, status: int, message: str, code: str, error: Exception
    ) -> None:
        request.stream.break_off(BrokenOff(code, str(error) or code, status))
        failure = ApiError(status, message, type="server_error", code=code)
        told = b"data: " + failure.body() + EVENT_END if request.telling is None else request.telling.failure(failure)
        reply.offer(told)

    async def _end(self, reply: Reply | PartReply, request: Request, rest: bytes = b"") -> None:
        request.stream.writing_since = self._clock()
        request.falls_behind(request.stream.writing_since)
        try:
            await reply.write_eof(rest)
        except ConnectionResetError:
            if not request.is_answered:
                raise  # else it has hung up at the last event: nothing was missing
        request.stream.writing_since = None
        self._accounts.relayed(request)

    def _telling(self, request: Request, answering: Answering, details: Details | None) -> Read:
        """Reads the answer in the client's dialect."""
        read, telling = self._reading(request, answering, details), request.telling
        if telling is None:
            return read

        async def told() -> bytes:
            while chunk := await read():
                events = telling.events(chunk)
                request.stream.completion_tokens = telling.output_tokens
                if events:
                    return events
            return telling.end()

        return told

    def _reading(self, request: Request, answering: Answering, details: Details | None) -> Read:
        """Reads the answer from its first byte; what the client should not be the only one to learn is noticed."""
        attempt = answering.attempt
        read: Read = self._uncontinued(request, attempt)
        if request.stream.kept_bytes:
            read = _Continued(request, answering, self._accounts, self._clock).read
        if not request.call.options.wants_usage:
            return read
        return UsagePatch(read, lambda: cached_tokens(attempt), details).read

    def _uncontinued(self, request: Request, attempt: Attempt) -> Read:
        """Reads an answer that ends with its engine."""
        answer = attempt.answer
        first: bytes | None = answer.first
        tail = b""

        async def read() -> bytes:
            nonlocal first, tail
            chunk, first = first, None
            try:
                chunk = chunk or await answer.read()
                if not chunk and tail != DONE:
                    raise DecodeFailed(attempt.decode.id, *CUT)
            except DecodeFailed as error:
                self._accounts.fell_back(request, f"decode_{error.reason}", error)
                self._accounts.not_taken_over(
                    request, why_not(request.call) or ("paired" if request.served.is_paired else "off")
                )
                raise
            tail += chunk
            _notice_error(request, tail)
            tail = tail[-len(DONE) :]
            if RECOMPUTED in chunk:
                self._accounts.notice_recompute(request, chunk)
            if MARK in chunk:
                request.stream.completion_tokens = completion_tokens(chunk)
            return chunk

        return read


class _Continued:
    """Reads an answer, by as many decode nodes as it takes."""

    def __init__(
        self, request: Request, answering: Answering, accounts: RequestRecorder, clock: Callable[[], float]
    ) -> None:
        self._request = request
        self._answering = answering
        self._accounts = accounts
        self._clock = clock
        self._seam = StreamResume(request.stream.kept_bytes, is_asked=names_tokens(request.call))
        self._first = answering.attempt.answer.first
        self._has_ended = False

    async def read(self) -> bytes:
        """The next bytes for the client, b"" at the end. Raises DecodeFailed when no node can go on."""
        failed_at: float | None = None
        while not self._has_ended:
            try:
                chunk = await self._next()
            except DecodeFailed as error:
                if failed_at is None:
                    failed_at = self._clock()
                if (missing := await self._after(error)) is not None:
                    self._has_ended = True
                    return missing
                continue
            if chunk is None:
                break
            if chunk:
                if failed_at is not None:
                    self._accounts.taken_over(self._request, self._clock() - failed_at)
                _notice_error(self._request, chunk)
                if RECOMPUTED in chunk:
                    self._accounts.notice_recompute(self._request, chunk)
                if named := self._seam.num_tokens:
                    self._request.stream.completion_tokens = named
                elif MARK in chunk:
                    self._request.stream.completion_tokens = completion_tokens(chunk)
                return chunk
        return b""

    async def _next(self) -> bytes | None:
        """What the engine's next bytes come to, perhaps nothing yet; None at the end. Raises DecodeFailed."""
        answer, seam = self._answering.attempt.answer, self._seam
        chunk, self._first = self._first, b""
        try:
            seam.check()
            chunk = chunk or await answer.read()
            if not chunk and not seam.is_whole:
                raise LegFailed(*CUT)
            return seam.take(chunk) if chunk else None
        except LegFailed as error:
            raise DecodeFailed(self._answering.attempt.decode.id, error.reason, str(error)) from error

    async def _after(self, error: DecodeFailed) -> bytes | None:
        """Has another node go on; or what is missing, if no token is. Raises `error` if no node can."""
        request, seam = self._request, self._seam
        self._accounts.fell_back(request, f"decode_{error.reason}", error)
        if seam.is_too_long or not seam.knows_tokens:
            why = self._answering.attempt.answer.not_resumable or "tokens_unknown"
            self._accounts.not_taken_over(request, "too_long" if seam.is_too_long else why)
            raise error
        asked, cached = request.asked.num_tokens, known_cached_tokens(request)
        missing = seam.ending(asked, cached, request.call.options.wants_usage)
        if missing is not None:
            self._accounts.not_taken_over(request, "ended")
            return missing
        seam.reopen()
        try:
            await self._answering.go_on(seam.tokens, error)
        except ApiError as failure:
            self._accounts.not_taken_over(request, failure.code or "refused")
            raise error from failure
        self._first = self._answering.attempt.answer.first
        return None


def _notice_error(request: Request, told: bytes) -> None:
    """An error that an engine tells goes to the client if no other node can go on: its answer ends there."""
    if ERROR in told and request.stream.broken_off is None:
        detail = told[told.index(ERROR) :][:MAX_TOLD_BYTES].decode(errors="replace")
        request.stream.break_off(BrokenOff("stream_error", detail))


async def pass_on(
    read: Read, reply: ClientStream, request: Request, clock: Callable[[], float], on_all: Callable[[], None]
) -> None:
    """Offers all that is read. A client that has been given the last event has all, and may hang up: `on_all` is told."""
    tail, telling = b"", request.telling
    while chunk := await read():
        tail = (tail + chunk)[-len(DONE) :]
        request.stream.events += chunk.count(EVENT_END)
        # Before it is offered: it has left when the client has to be waited for, and others may write then.
        request.stream.is_between_events = chunk.endswith(EVENT_END)
        if reply.offer(chunk):
            await waited_for(reply, request, clock)
        if tail == DONE or (telling is not None and telling.has_ended):
            request.falls_behind(clock())
            on_all()


async def waited_for(reply: ClientStream, request: Request, clock: Callable[[], float]) -> None:
    """The time in which a client has to take what it is offered, or loses its place."""
    request.stream.writing_since = clock()
    request.falls_behind(request.stream.writing_since)
    try:
        await reply.taken()
    finally:
        request.stream.writing_since = None


async def cached_tokens(attempt: Attempt) -> int | None:
    """What the prefill reused, or None when the decode node knows better."""
    if attempt.delivery is None:
        return None
    outcome = await attempt.delivery.outcome(OUTCOME_WAIT_S)
    return outcome.cached_tokens if outcome else None


def _headers(request: Request, attempt: Attempt) -> dict[str, str]:
    headers = {
        "x-request-id": request.id,
        "Content-Type": attempt.answer.content_type,
        "x-prfaas-route": route_header(request, attempt.decode.id),
        **request.allowance.headers,
    }
    return headers if request.telling is None else headers | dict(request.telling.headers)


def route_header(request: Request, decode_node: str) -> str:
    """Where the prompt was computed, by what is known now, and why there: `local; node=p0; uncached=812; reason=short`."""
    is_recomputed = request.progress.is_recomputed
    parts = [
        "local" if is_recomputed else request.route_label,
        f"node={decode_node if is_recomputed else request.progress.prefill_node}",
        f"uncached={request.asked.num_tokens - known_cached_tokens(request)}",
        f"reason={request.reason_label}",
    ]
    parts += [f"fallback={reason}" for reason in request.progress.fallbacks]
    return "; ".join(parts)
