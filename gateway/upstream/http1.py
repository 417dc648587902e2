"""HTTP/1.1 to engines, as much of it as a leg needs: one POST at a time over kept connections, parsed by llhttp.

    idle ── post ──► asking ── first bytes ──► answering ── end ──► idle, or closed if either side says so

A connection goes back to the pool when the last byte of its answer has come, read or not. Whatever else happens
to an exchange (it is cancelled, late, broken, closed early, answered twice) closes the connection.
"""

import asyncio
from collections.abc import Callable
from typing import Final, Protocol, cast

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

from gateway.api.bodies import Body
from gateway.errors import LegFailed

JSON: Final = "application/json"
NODE_SILENT: Final = "node_silent"
ANSWERED: Final = b"x-prfaas-answered"
NOT_RESUMABLE: Final = b"x-prfaas-not-resumable"
# What may come without a byte of a body in it: heads (most servers take 8 to 64 KiB), chunk extensions, trailers.
MAX_QUIET_BYTES: Final = 64 * 1024
MAX_UNREAD_BYTES: Final = 256 * 1024  # then the engine has to wait until the client has read
MAX_WHOLE_WRITE_BYTES: Final = 512 * 1024
PIECE_BYTES: Final = 256 * 1024


class EngineAnswer:
    """What an engine answers. Status and type are known; its body may still be on its way."""

    __slots__ = (
        "_chunks", "_connection", "_error", "_idle_s", "_loop", "_on_whole", "_size", "_timer", "_waiter", "_waiting_since",
        "answered", "content_type", "is_whole", "not_resumable", "status",
    )  # fmt: skip

    def __init__(self, connection: "UpstreamConnection", loop: asyncio.AbstractEventLoop, due: float) -> None:
        self.status = 0
        self.content_type = JSON
        self.answered = b""  # after how many tokens of an answer it goes on
        self.not_resumable = b""  # why no other engine could go on with it, if this one says so
        self.is_whole = False  # all of it has come
        self._connection = connection
        self._loop = loop
        self._chunks: list[bytes] = []
        self._size = 0
        self._error: LegFailed | None = None
        self._on_whole: Callable[[], None] | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._waiting_since: float | None = None
        self._idle_s = 0.0
        self._timer = loop.call_at(due, self._late)

    async def begun(self) -> None:
        """Waits until the first bytes of the body are there. Raises LegFailed."""
        if not self._chunks and not self.is_whole:
            await self._more()

    async def read(self) -> bytes:
        """What has come since the last call, b"" at the end. Raises LegFailed."""
        if not self._chunks:
            if self.is_whole:
                return b""
            await self._more()
        chunks = self._chunks
        data = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        chunks.clear()
        if self._size > MAX_UNREAD_BYTES and not self.is_whole:
            self._connection.go_on()
        self._size = 0
        return data

    async def whole(self, limit: int | None = None) -> bytes:
        """All that has not been read yet, or the first `limit` bytes of it. Raises LegFailed."""
        data = await self.read()
        if self.is_whole and not self._chunks:
            return data[:limit]
        parts, size = [data], len(data)
        while data and (limit is None or size < limit):
            parts.append(data := await self.read())
            size += len(data)
        return b"".join(parts)[:limit]

    def bound_silence(self, idle_s: float) -> None:
        """From now on it may take as long as it likes, if `idle_s` at most pass between two parts of it."""
        self._timer.cancel()
        if not self.is_whole:
            self._idle_s = idle_s
            self._timer = self._loop.call_later(idle_s, self._look)

    def when_whole(self, tell: Callable[[], None]) -> None:
        """Calls `tell` once the whole answer has come, read or not; at once if it has."""
        if self.is_whole:
            tell()
        else:
            self._on_whole = tell

    def close(self) -> None:
        """The answer is not read any further: the engine stops if it has more to say."""
        self._timer.cancel()
        self._on_whole = None
        if not self.is_whole:
            self._connection.abort()

    async def _more(self) -> None:
        if self._error is not None:
            raise self._error
        self._waiter = self._loop.create_future()
        self._waiting_since = self._loop.time()
        try:
            await self._waiter
        finally:
            self._waiter = self._waiting_since = None
        if not self._chunks and self._error is not None:
            raise self._error

    def _late(self) -> None:
        self.failed(LegFailed("timeout"))
        self._connection.abort()

    def _look(self) -> None:
        """Bounds the pause between two chunks with one timer, however many chunks there are."""
        now = self._loop.time()
        since = now if self._waiting_since is None or self._chunks else self._waiting_since
        if now - since >= self._idle_s:
            self._late()
        else:
            self._timer = self._loop.call_at(since + self._idle_s, self._look)

    # The connection's side

    def add(self, data: bytes) -> bool:
        """Takes in a part of the body. Whether the engine has to wait now."""
        self._chunks.append(data)
        self._size += len(data)
        return self._size > MAX_UNREAD_BYTES

    def ended(self) -> None:
        """Nothing follows."""
        self.is_whole = True
        self._timer.cancel()
        tell, self._on_whole = self._on_whole, None
        if tell is not None:
            tell()

    def failed(self, error: LegFailed) -> None:
        """Nothing follows, and something is missing. What has come before can still be read."""
        if not self.is_whole and self._error is None:
            self._error = error
            self._timer.cancel()
            self.tell()

    def tell(self) -> None:
        """Wakes the reader, if there is something for it."""
        waiter = self._waiter
        if waiter is not None and not waiter.done() and (self._chunks or self.is_whole or self._error is not None):
            waiter.set_result(None)


class ConnectionOwner(Protocol):
    """What keeps connections."""

    def unused(self, connection: "UpstreamConnection") -> None:
        """`connection` may be used again."""

    def closed(self, connection: "UpstreamConnection") -> None:
        """`connection` is no more."""


class UpstreamConnection(asyncio.Protocol):
    """One connection to an engine, and the answer that is under way on it."""

    def __init__(self, owner: ConnectionOwner) -> None:
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        self._parser: HttpResponseParser | None = HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None  # until it is closed by either side
        self._answer: EngineAnswer | None = None
        self._quiet_bytes = 0
        self._quiet_since = 0.0
        self._ends_by_closing = True
        self._has_answered = False  # its last byte came in what is being parsed
        self._is_spent = False
        self._is_held = False  # reading
        self._is_asking = False  # parts of the request have not been written yet
        self._writable: asyncio.Future[None] | None = None

    async def ask(self, head: bytes, body: Body | bytes, due: float) -> EngineAnswer:
        """Sends a request. The answer has begun, or has failed by the time `due` of the loop's clock. Raises LegFailed."""
        if self._transport is None:  # it has been closed in the step of the loop in which it was opened
            raise LegFailed("connection_lost", "the engine closed the connection")
        body = body if isinstance(body, Body) else Body((body,))
        answer = self._answer = EngineAnswer(self, self._loop, due)
        self._quiet_bytes, self._quiet_since = 0, self._loop.time()
        try:
            if len(body) <= MAX_WHOLE_WRITE_BYTES:
                self._transport.writelines((head, *body.pieces))
            else:
                await self._write_in_pieces(answer, head, body)
            await answer.begun()
        except BaseException:
            answer.close()
            raise
        return answer

    async def _write_in_pieces(self, answer: EngineAnswer, head: bytes, body: Body) -> None:
        """Others get their turn in between."""
        left = len(body)
        for part in body.parts(PIECE_BYTES):
            if self._transport is None or self._answer is not answer:
                return  # it has been answered, or broken
            self._transport.writelines((head, *part) if left == len(body) else part)
            left -= sum(map(len, part))
            self._is_asking = left > 0
            if self._writable is not None:
                await self._writable
            else:
                await asyncio.sleep(0)

    def go_on(self) -> None:
        """More may come."""
        if self._is_held and self._transport is not None:
            self._is_held, self._quiet_since = False, self._loop.time()  # it was we who kept it quiet
            self._transport.resume_reading()

    def abort(self) -> None:
        """Closes now, whatever is under way."""
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.abort()
            self._gone(LegFailed("connection_lost", "closed"))

    def give_up(self, quiet_s: float) -> None:
        """Ends what is under way if nothing has come for `quiet_s`, though we would have read it."""
        quiet = self._loop.time() - self._quiet_since
        if self._answer is not None and not self._is_held and quiet >= quiet_s:
            self._answer.failed(LegFailed(NODE_SILENT, f"its node is silent, the engine for {quiet:.1f} s"))
            self.abort()

    def _gone(self, error: LegFailed) -> None:
        answer, self._answer = self._answer, None
        if answer is not None:
            answer.failed(error)
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)
        self._parser = None  # it refers to this object, and this to it
        self._owner.closed(self)

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transports are not so by class

    def data_received(self, data: bytes) -> None:
        parser, answer = self._parser, self._answer
        if parser is None:
            return
        self._quiet_bytes += len(data)
        self._quiet_since = self._loop.time()
        try:
            parser.feed_data(data)
        except (HttpParserError, HttpParserUpgrade) as error:
            self._break_off(f"no HTTP: {error}")
            return
        if self._quiet_bytes > MAX_QUIET_BYTES:
            self._break_off("the answer's head is too long")
            return
        if self._has_answered:
            self._answered()
        elif self._is_spent:
            self.abort()
        if answer is not None:
            answer.tell()

    def eof_received(self) -> None:
        if self._answer is not None and self._answer.status and self._ends_by_closing:
            answer, self._answer = self._answer, None
            answer.ended()
            answer.tell()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._transport is not None:
            self._transport = None
            self._gone(LegFailed("connection_lost", str(exc) if exc else "the engine closed the connection"))

    def pause_writing(self) -> None:
        self._writable = self._loop.create_future()

    def resume_writing(self) -> None:
        writable, self._writable = self._writable, None
        if writable is not None and not writable.done():
            writable.set_result(None)

    def _break_off(self, why: str) -> None:
        if self._answer is not None:
            self._answer.failed(LegFailed("connection_lost", why))
        self.abort()

    def _answered(self) -> None:
        self._has_answered = False
        transport = self._transport
        if self._is_spent or self._is_asking or transport is None or transport.get_write_buffer_size():
            self.abort()  # else the engine would take the next request for what this one still owes it
        else:
            self.go_on()
            self._owner.unused(self)

    # The parser's callbacks

    def on_message_begin(self) -> None:
        self._ends_by_closing = True
        if self._answer is None:
            self._is_spent = True  # no request has asked

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name == b"content-type" and self._answer is not None:
            self._answer.content_type = value.decode("utf-8", "surrogateescape")
        elif name == b"content-length" or (name == b"transfer-encoding" and value.lower().endswith(b"chunked")):
            self._ends_by_closing = False
        elif name == ANSWERED and self._answer is not None:
            self._answer.answered = value
        elif name == NOT_RESUMABLE and self._answer is not None:
            self._answer.not_resumable = value

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        status = self._parser.get_status_code()
        if self._answer is not None and status >= 200:  # else the answer follows
            self._answer.status = status

    def on_body(self, data: bytes) -> None:
        if self._answer is None:
            return
        self._quiet_bytes = 0
        if self._answer.add(data) and not self._is_held and self._transport is not None:
            self._is_held = True
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        answer = self._answer
        if answer is None or not answer.status:
            return
        assert self._parser is not None
        self._answer, self._has_answered = None, True
        self._is_spent = self._is_spent or not self._parser.should_keep_alive()
        answer.ended()
