"""An answer's way to its client: head and first bytes in one write, each further part in one of its own.

aiohttp stays the server: it parses requests and keeps or closes connections, and it writes all answers but those of engines.
"""

import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from email.utils import format_datetime
from http import HTTPStatus
from typing import Final

from aiohttp import web
from aiohttp.http import HttpVersion11

from gateway.http.connections import ClientConnection

REASONS: Final = {status.value: status.phrase for status in HTTPStatus}
WITHOUT_BODY: Final = frozenset({204, 304})  # RFC 9110 §6.4.1
CONTROL: Final = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
LAST_CHUNK: Final = b"0\r\n\r\n"


class Date:
    """The value of `Date`, formatted once a second."""

    def __init__(self) -> None:
        self._second = datetime.min.replace(tzinfo=UTC)
        self._text = ""

    def __call__(self) -> str:
        if (second := datetime.now(UTC).replace(microsecond=0)) != self._second:
            self._second, self._text = second, format_datetime(second, usegmt=True)
        return self._text


class Reply(web.StreamResponse):
    """The answer to `http`, of `length` bytes or (None) as many as come. It begins with the first bytes offered.

    Raises ValueError for a header that would be more than one.
    """

    def __init__(
        self, http: web.BaseRequest, status: int, headers: Mapping[str, str], date: Date, length: int | None = None
    ) -> None:
        super().__init__(status=status)
        connection = http.protocol
        assert isinstance(connection, ClientConnection)
        self._http = http
        self._connection = connection
        self._is_empty = status in WITHOUT_BODY
        ends = self._is_empty or length is not None
        self._is_chunked = not ends and http.version >= HttpVersion11
        self._keep_alive = http.keep_alive and (ends or self._is_chunked)
        lines = {**connection.always, **headers, "Date": date()}
        if self._is_chunked:
            lines["Transfer-Encoding"] = "chunked"
        elif length is not None and not self._is_empty:
            lines["Content-Length"] = str(length)
        if self._keep_alive != (http.version >= HttpVersion11):
            lines["Connection"] = "keep-alive" if self._keep_alive else "close"
        if CONTROL.search("".join(lines.values())):
            raise ValueError(f"control characters in a header of {lines!r}")
        major, minor = http.version
        first = f"HTTP/{major}.{minor} {status} {REASONS.get(status, '')}"
        text = "\r\n".join([first, *(f"{name}: {value}" for name, value in lines.items()), "\r\n"])
        self._head = text.encode("utf-8", "surrogateescape")

    @property
    def prepared(self) -> bool:
        """Whether it has begun."""
        return not self._head

    def offer(self, data: bytes) -> bool:
        """Sends `data`. Whether the client is behind: the next bytes should wait until these are `taken`.

        Raises ConnectionResetError when the client has left.
        """
        if self._is_chunked and data:
            data = b"%x\r\n%b\r\n" % (len(data), data)
        return self._send(data)

    def probed_by(self, probe: Callable[[], None] | None) -> None:
        """Has the connection find out by `probe` whether a client that has closed its half still listens."""
        self._connection.probe_stream = probe

    async def taken(self) -> None:
        """Waits until the client has taken what was offered, but for some bytes. Raises ConnectionResetError."""
        await self._connection.taken()

    async def prepare(self, request: web.BaseRequest) -> None:
        """The server's question, which has been answered by then."""

    async def write_eof(self, data: bytes = b"") -> None:
        """Ends it, once: the server would, too. Raises ConnectionResetError."""
        if self._eof_sent:
            return
        self._eof_sent = True
        if self._is_chunked:
            data = (b"%x\r\n%b\r\n" % (len(data), data) if data else b"") + LAST_CHUNK
        if self._send(data):
            await self.taken()

    def _send(self, data: bytes) -> bool:
        connection = self._connection
        transport = connection.transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError("the client has left")
        if self._is_empty:
            data = b""
        if self._head:
            data, self._head = self._head + data, b""
            connection.has_begun = True
            self._http.writer.output_size = len(data)  # the server's sign that an error comes too late to be told
        if data:
            transport.write(data)
        return connection.writing_paused
