"""Receives a body: at a minimum rate, by a deadline, within bounds for all clients and for each address.

Nothing is taken from others while it does: a place among those served is given when the body is there.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from gateway.config.gateway import Strangers
from gateway.errors import ApiError, BadRequest, Overloaded
from gateway.http.codings import CODINGS, coding_of, decoded
from gateway.http.connections import ClientConnection

JSON: Final = "application/json"
CHUNKED: Final = "chunked"
NO_TYPE: Final = "application/octet-stream"  # what aiohttp calls a body without a Content-Type
PIECE_BYTES: Final = 256 * 1024
JOINED_AT_ONCE_BYTES: Final = 1024 * 1024  # copied in a millisecond; more, without the interpreter's lock


def too_large(limit: int) -> ApiError:
    """The answer to a body beyond the limit, before or while it comes."""
    return ApiError(413, f"The body is larger than {limit} bytes.", code="request_too_large")


def check_head(http: web.Request, max_bytes: int) -> None:
    """Raises ApiError for a body that need not come at all."""
    if http.content_type != JSON and (http.content_type != NO_TYPE or "Origin" in http.headers):
        raise ApiError(415, f"Content-Type must be {JSON}, not {http.content_type}.", code="unsupported_media_type")
    if http.headers.get("Transfer-Encoding", CHUNKED).lower() != CHUNKED:
        raise ApiError(501, f"The only Transfer-Encoding here is {CHUNKED}.", code="unknown_transfer_coding")
    if (coding := _coding(http)) and coding not in CODINGS:
        known = ", ".join(CODINGS)
        error = ApiError(415, f"Content-Encoding must be one of {known}, not {coding!r}.", code="unsupported_coding")
        error.headers = {"Accept-Encoding": known}  # RFC 9110 §15.5.16
        raise error
    if (http.content_length or 0) > max_bytes:
        raise too_large(max_bytes)


def _coding(http: web.Request) -> str:
    return coding_of(http.headers.getall("Content-Encoding", []))


def _already_here(http: web.Request) -> bytes | None:
    """A body that came with its head, as short ones do."""
    content = http.content
    if http.content_length is None or not content.is_eof() or content.exception() is not None:
        return None
    return content.read_nowait()


class BodyPieces:
    """A body as it comes. Its pieces are put together in a thread if they are long: new memory takes 2 ms for each MB."""

    def __init__(self) -> None:
        self._whole = list[bytes]()
        self._open = bytearray()
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def append(self, data: bytes) -> None:
        """What comes next."""
        self._open += data
        self._size += len(data)
        if len(self._open) >= PIECE_BYTES:
            self._close_piece()

    async def joined(self) -> bytes:
        """All of it."""
        self._close_piece()
        if self._size <= JOINED_AT_ONCE_BYTES:
            return b"".join(self._whole)
        return await asyncio.to_thread(b"".join, self._whole)

    def _close_piece(self) -> None:
        self._whole.append(bytes(self._open))
        self._open = bytearray()


class BodyReceiver:
    """Receives bodies. `now` is the event loop's clock."""

    def __init__(self, limits: Strangers, max_bytes: int, body_s: float, now: Callable[[], float]) -> None:
        self._limits = limits
        self._max_bytes = max_bytes
        self._body_s = body_s
        self._now = now
        self._held_bytes = 0
        self._by_address: Counter[str] = Counter()

    async def receive(self, http: web.Request) -> bytes:
        """All of the body. Raises ApiError."""
        check_head(http, self._max_bytes)
        coding = _coding(http)
        if not coding and (whole := _already_here(http)) is not None:
            return whole
        connection = http.protocol
        assert isinstance(connection, ClientConnection)
        with connection.receiving(), self._one_of(connection.address):
            return await (self._decoded_body(http, coding) if coding else self._body(http))

    async def _decoded_body(self, http: web.Request, coding: str) -> bytes:
        body, whole = await self._body(http), BodyPieces()
        self._hold(len(body))
        held = len(body)
        try:
            for piece in decoded(coding, body):
                self._hold(len(piece))
                held += len(piece)
                whole.append(piece)
                if len(whole) > self._max_bytes:
                    raise too_large(self._max_bytes)
                await asyncio.sleep(0)
        except ValueError as error:
            raise BadRequest(f"The body cannot be decoded from {coding}: {error}.", code="invalid_body") from error
        finally:
            self._held_bytes -= held
        return await whole.joined()

    async def _body(self, http: web.Request) -> bytes:
        body, began = BodyPieces(), self._now()
        try:
            async with asyncio.timeout_at(self._due(began, 0)) as deadline:
                while chunk := await self._chunk(http):
                    self._hold(len(chunk))
                    body.append(chunk)
                    if len(body) > self._max_bytes:
                        raise too_large(self._max_bytes)
                    deadline.reschedule(self._due(began, len(body)))
        except TimeoutError as error:
            raise ApiError(408, "The body did not arrive in time.", code="request_timeout") from error
        finally:
            self._held_bytes -= len(body)
        return await body.joined()

    async def _chunk(self, http: web.Request) -> bytes:
        try:
            return await http.content.readany()
        except (web.RequestPayloadError, HttpProcessingError) as error:
            reason = getattr(error, "message", "") or str(error)
            raise BadRequest(f"The body cannot be read: {reason}", code="invalid_body") from error

    def _due(self, began: float, received: int) -> float:
        """When a body with `received` bytes so far has to be further, or complete."""
        earned = self._limits.body_grace_s + received / self._limits.min_body_bytes_per_s
        return began + min(self._body_s, earned)

    def _hold(self, size: int) -> None:
        self._held_bytes += size
        if self._held_bytes > self._limits.max_receiving_bytes:
            self._held_bytes -= size
            raise Overloaded("Too many bodies are being received. Please retry.", "too_many_bodies")

    @contextmanager
    def _one_of(self, address: str) -> Iterator[None]:
        if self._by_address[address] >= self._limits.max_bodies_per_address and not self._limits.trusts(address):
            raise Overloaded("Too many bodies are being received from this address. Please retry.", "too_many_bodies")
        self._by_address[address] += 1
        try:
            yield
        finally:
            self._by_address[address] -= 1
            if not self._by_address[address]:
                del self._by_address[address]
