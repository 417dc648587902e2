"""Connections of clients: how many, how long without a request, what they are told when they make no sense.

    new ── head ──► receiving ── body ──► serving ── answer ──► idle ── head ──► receiving …

A connection in any state but `serving` waits for its client and may be closed for it: when it is too slow, and when there are
too many, the one that has waited for longest first. So a client that sends a request gets in, however many strangers hold
connections. The operators' listener has a gate, and descriptors, of its own.
"""

import asyncio
import logging
import re
import socket
import sys
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from functools import partial
from http import HTTPStatus
from itertools import islice
from typing import Any, Final, cast

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http_parser import RawRequestMessage
from aiohttp.http_writer import StreamWriter
from aiohttp.streams import EMPTY_PAYLOAD, StreamReader
from aiohttp.web_protocol import RequestHandler
from multidict import CIMultiDict

from gateway.api.dialects.translation import error_told
from gateway.config.gateway import Strangers
from gateway.errors import ApiError, Overloaded, Unauthorised
from gateway.telemetry.metrics import Metrics
from planner.decisions.admission.overload import spread_s

log = logging.getLogger("prfaas.gateway.connections")

LOG_INTERVAL_S: Final = 10.0
JSON: Final = "application/json"
CHALLENGE: Final = 'Bearer realm="prfaas"'  # not Basic: a browser would ask its user, and keep the key for ever
PORTS: Final = 1 << 16
CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
TCP_CLOSE: Final = 7  # include/net/tcp_states.h
BYTES_RECEIVED: Final = 128  # in struct tcp_info, include/uapi/linux/tcp.h
# A head's offer of another protocol, which is never taken: aiohttp would lose what follows such a request in one packet.
# Bodies are searched for it, too: `re` finds its first bytes thirty times as fast as it checks what must not be before them.
UPGRADE: Final = re.compile(rb"\r\n(?<!\r\n\r\n)(?i:upgrade)(?=[ \t]*:)")
MAX_OFFERS: Final = 16  # looked at in one packet; each costs some microseconds
NOT_TAKEN: Final = b"\r\nx-offer"
# An answer is shown as what it says it is, and as no part of a page; the console's pages say other things.
ALWAYS: Final[Mapping[str, str]] = {"X-Content-Type-Options": "nosniff"}
OF_NO_PAGE: Final[Mapping[str, str]] = {
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
}
MOMENT_S: Final = 0.005
FIRST_LOOK_S: Final = 0.0005  # after asking; the next ones after twice as long each
LAST_LOOK_S: Final = 1.0


class ConnectionState(StrEnum):
    """What a connection is doing."""

    NEW = "new"
    RECEIVING = "receiving"
    SERVING = "serving"
    IDLE = "idle"


class Gate:
    """All connections of one listener. `now` is the event loop's clock."""

    def __init__(self, name: str, limit: int, limits: Strangers, metrics: Metrics, now: Callable[[], float]) -> None:
        self.limit = limit
        self.is_leaving = False  # every connection ends with the answer to its next request
        self._name = name
        self._limits = limits
        self._metrics = metrics
        self._now = now
        self._open: Counter[str] = Counter()
        # In the order in which they began to wait.
        self._waiting: dict[ConnectionState, OrderedDict[ClientConnection, float]] = {
            state: OrderedDict() for state in ConnectionState if state is not ConnectionState.SERVING
        }
        self._waiting_at: dict[str, OrderedDict[ClientConnection, None]] = {}
        self._suppressed: Counter[str] = Counter()
        self._logged_at = float("-inf")

    def __len__(self) -> int:
        return self._open.total()

    def opened(self, connection: "ClientConnection") -> None:
        """A client has connected; another one may have to go, or this one."""
        address = connection.address
        self._open[address] += 1
        self._metrics.connections[self._name,].set(len(self))
        self.changed(connection, ConnectionState.NEW)
        if self._open[address] > self._limits.max_connections_per_address and not self.trusts(address):
            self._close_longest_waiting(self._waiting_at.get(address, ()), connection, "per_address")
        elif len(self) > self.limit:
            fronts = [next(iter(each.items())) for each in self._waiting.values() if each]
            longest = [each for each, _ in sorted(fronts, key=lambda front: front[1])]
            self._close_longest_waiting(longest, connection, "too_many")

    def trusts(self, address: str) -> bool:
        """Whether many clients may come from there."""
        return self._limits.trusts(address)

    def closed(self, connection: "ClientConnection") -> None:
        """A connection is no more."""
        self._forget(connection)
        self._open[connection.address] -= 1
        if not self._open[connection.address]:
            del self._open[connection.address]
        self._metrics.connections[self._name,].set(len(self))

    def changed(self, connection: "ClientConnection", state: ConnectionState) -> None:
        """A connection is in another state from now on."""
        self._forget(connection)
        connection.state = state
        if state is not ConnectionState.SERVING:
            self._waiting[state][connection] = self._now()
            self._waiting_at.setdefault(connection.address, OrderedDict())[connection] = None

    def sweep(self) -> None:
        """Closes connections whose head has not come in time."""
        for state, limit_s in (
            (ConnectionState.NEW, self._limits.header_s),
            (ConnectionState.IDLE, self._limits.idle_s),
        ):
            waiting = self._waiting[state]
            while waiting:
                connection, since = next(iter(waiting.items()))
                if self._now() - since < limit_s:
                    break
                try:
                    self._end_unused(connection)
                except Exception as error:  # of one connection: the others end all the same
                    self.noted("broken", connection.address, repr(error))

    def _end_unused(self, connection: "ClientConnection") -> None:
        is_new = connection.state is ConnectionState.NEW
        try:
            if is_new and not connection.has_said_nothing:
                connection.refuse(ApiError(408, "The request's head did not arrive in time.", code="request_timeout"))
        finally:
            self.turn_away(connection, "no_request" if is_new else "idle")

    def turn_away(self, connection: "ClientConnection", reason: str) -> None:
        """Closes a connection for `reason`."""
        self._forget(connection)
        connection.end()
        self.noted(reason, connection.address)

    def noted(self, reason: str, address: str, detail: str = "") -> None:
        """Counts what was done to a stranger; the log gets a line of it now and then."""
        self._metrics.turned_away(self._name, reason)
        self._suppressed[reason] += 1
        if self._now() - self._logged_at < LOG_INTERVAL_S:
            return
        counts = ", ".join(f"{reason}={count}" for reason, count in self._suppressed.items())
        log.warning(
            "%s: turned away %s; last from %s%s; %d connections open",
            self._name, counts, address or "?", f" ({detail})" if detail else "", len(self),
        )  # fmt: skip
        self._suppressed.clear()
        self._logged_at = self._now()

    def _close_longest_waiting(self, waiting: Any, newcomer: "ClientConnection", reason: str) -> None:
        longest = next((each for each in waiting if each is not newcomer), None)
        if longest is None:
            newcomer.refuse(Overloaded("Too many connections from this address. Please retry.", "too_many_connections"))
        self.turn_away(longest or newcomer, reason)

    def _forget(self, connection: "ClientConnection") -> None:
        if connection.state is ConnectionState.SERVING:
            return
        self._waiting[connection.state].pop(connection, None)
        if (at_address := self._waiting_at.get(connection.address)) is not None:
            at_address.pop(connection, None)
            if not at_address:
                del self._waiting_at[connection.address]


class ClientConnection(RequestHandler):
    """aiohttp's, that tells its gate what it does, answers errors in OpenAI's shape, and outlives half of a close.

    `always` are headers of all its answers.
    """

    def __init__(self, gate: Gate, server: web.Server, *, always: Mapping[str, str] = ALWAYS, **options: Any) -> None:
        super().__init__(server, **options)
        self.always = always
        self.state = ConnectionState.NEW
        self.address = ""
        self.has_begun = False  # to answer the current request
        self.probe_stream: Callable[[], None] | None = None  # sends a byte that means nothing, in a stream
        self.gate = gate
        self._current: web.BaseRequest | None = None
        self._body: StreamReader = EMPTY_PAYLOAD  # of the latest request whose head has come
        self._looking: asyncio.TimerHandle | None = None
        self._wire: asyncio.Transport | None = None  # until it is gone; `transport` is None as soon as it is closed

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        wire = cast(asyncio.Transport, transport)  # uvloop's transports are not so by class
        self.begun(wire)
        self.joined(wire)

    def begun(self, wire: asyncio.Transport) -> None:
        """Requests come over `wire` from now on."""
        super().connection_made(wire)
        self._wire = wire

    def joined(self, wire: asyncio.Transport) -> None:
        """A client has connected."""
        self._wire = wire
        peer = wire.get_extra_info("peername")
        self.address = peer[0] if isinstance(peer, tuple) else ""
        self.gate.opened(self)

    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)
        self.parted()

    def parted(self) -> None:
        """The client is no longer connected."""
        self._wire = None
        if self._looking is not None:
            self._looking.cancel()
        self.gate.closed(self)

    def data_received(self, data: bytes) -> None:
        fed = 0
        for offer in islice(UPGRADE.finditer(data), MAX_OFFERS):
            self._feed(data[fed : offer.start()])
            self._feed(NOT_TAKEN if self._is_in_head else offer[0])
            fed = offer.end()
        self._feed(data[fed:] if fed else data)

    def _feed(self, data: bytes) -> None:
        super().data_received(data)
        if self._messages:
            self._body = self._messages[-1][1]

    @property
    def _is_in_head(self) -> bool:
        """Whether what comes next surely belongs to a head: a coded body may have any bytes in it."""
        return self._body.is_eof() and not self._buffer_paused

    def serving(self, http: web.BaseRequest) -> None:
        """A request's head is there."""
        self._current, self.has_begun = http, False
        self.gate.changed(self, ConnectionState.SERVING)

    def served(self) -> None:
        """Its answer has ended."""
        self._current = None
        if self._wire is not None:  # closed or not: the client may still have to read its answer
            self.gate.changed(self, ConnectionState.IDLE)

    @contextmanager
    def receiving(self) -> Iterator[None]:
        """The time until the body is there."""
        self.gate.changed(self, ConnectionState.RECEIVING)
        try:
            yield
        finally:
            if self._wire is not None:
                self.gate.changed(self, ConnectionState.SERVING)

    def end(self) -> None:
        """Closes now. What a client has not read by then would keep the descriptor for as long as it reads nothing."""
        wire = self._wire
        self.force_close()
        if wire is not None and wire.get_write_buffer_size():
            wire.abort()

    async def taken(self) -> None:
        """Waits until the client has taken most of what was sent. Raises ConnectionResetError."""
        await self._drain_helper()

    def refuse(self, error: ApiError) -> None:
        """Says why there is no answer, before any request has come."""
        if self.transport is None:
            return
        body = error.body()
        head = f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\n"
        head += f"Content-Type: {JSON}\r\nContent-Length: {len(body)}\r\n"
        if error.retry_after_s is not None:
            # Those who are refused at once are told apart by their ports.
            peer = self.transport.get_extra_info("peername")
            wait_s = spread_s(error.retry_after_s, (peer[1] % PORTS) / PORTS if peer else 0.0)
            head += f"Retry-After: {max(1, round(wait_s))}\r\nretry-after-ms: {round(1000 * wait_s)}\r\n"
        self.transport.write(f"{head}Connection: close\r\n\r\n".encode() + body)

    @property
    def has_said_nothing(self) -> bool:
        """Whether not a byte has come from the client, ever."""
        return self._wire is None or not _tcp_info(self._wire, BYTES_RECEIVED, 8)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """What is no HTTP, or not as it should be: one answer in the API's shape, one line in the log at most."""
        # What follows is what was read, and may be a key.
        text = (message or "Bad request.").splitlines()[0].partition(": b")[0][:200]
        self.gate.noted("malformed", self.address, text)
        response = error_response(ApiError(status, f"The request cannot be read: {text}", code="bad_http"))
        response.force_close()
        return response

    def log_exception(self, *args: Any, **kwargs: Any) -> None:
        """What aiohttp would log with a traceback, once per connection."""
        self.gate.noted("broken", self.address, str(kwargs.get("exc_info") or ""))

    # A client that has closed its half of the connection

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keeps the connection for a client that has said all it will say, if it still listens.

        Both a half-closed client and one that is gone send FIN. Another byte makes the second answer with RST.
        """
        is_served = self._current is not None
        # Else its request may have come in the same packet, and begins to be handled in a moment.
        self._looking = self._loop.call_later(0.0 if is_served else MOMENT_S, self._ask)
        return True

    def _ask(self) -> None:
        """Whether it still listens. Who is no longer there says so a round trip later."""
        transport, http = self.transport, self._current
        if transport is None or transport.is_closing():
            return
        if http is not None and not http.content.is_eof():
            transport.abort()  # the rest of its body will not come
            return
        if http is not None:
            self._probe(transport, http)
        self._look(FIRST_LOOK_S / 2)

    def _look(self, after_s: float) -> None:
        transport = self.transport
        if transport is None or transport.is_closing():
            return
        if self._current is None:
            transport.close()  # what is left of its answer is still sent
        elif _is_reset(transport):
            transport.abort()
        else:
            next_s = min(2 * after_s, LAST_LOOK_S)
            self._looking = self._loop.call_later(next_s, self._look, next_s)

    def _probe(self, transport: asyncio.Transport, http: web.BaseRequest) -> None:
        if self.probe_stream is not None:
            self.probe_stream()
        elif not self.has_begun and http.version >= (1, 1):
            transport.write(CONTINUE)  # RFC 9110 §15.2: a client takes 1xx it does not expect


def _is_reset(transport: asyncio.Transport) -> bool:
    return _tcp_info(transport, 0, 1) == TCP_CLOSE


def _tcp_info(transport: asyncio.Transport, offset: int, size: int) -> int:
    """A field of Linux's struct tcp_info; 0 where it has none, and of a socket that is closed."""
    connection = transport.get_extra_info("socket")
    if connection is None:
        return 0
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, offset + size)
    except (OSError, ValueError):  # uvloop raises ValueError
        return 0
    return int.from_bytes(info[offset:], sys.byteorder)


RequestFactory = Callable[
    [RawRequestMessage, StreamReader, RequestHandler, AbstractStreamWriter, "asyncio.Task[None]"], web.BaseRequest
]
Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
Way = Callable[[web.Request], Awaitable[web.StreamResponse]]


def shaped(application: Handler, straight: Mapping[str, Way]) -> Handler:
    """`application` for connections of ours; errors that aiohttp raises outside of it get the API's shape, too.

    POSTs to the paths of `straight` that expect nothing go around it.
    """

    async def handler(http: web.BaseRequest) -> web.StreamResponse:
        connection = http.protocol
        assert isinstance(connection, ClientConnection)
        way = straight.get(http.raw_path) if http.method == "POST" and "Expect" not in http.headers else None
        connection.serving(http)
        try:
            return await (application(http) if way is None else way(cast(web.Request, http)))
        except web.HTTPException as error:
            return http_error_response(http, error)
        finally:
            connection.served()

    return handler


def nameless(make: RequestFactory) -> RequestFactory:
    """What makes requests, so that no answer to them names the server's software and its version."""

    def made(
        message: RawRequestMessage,
        payload: StreamReader,
        protocol: RequestHandler,
        writer: AbstractStreamWriter,
        task: "asyncio.Task[None]",
    ) -> web.BaseRequest:
        assert isinstance(writer, StreamWriter)
        assert isinstance(protocol, ClientConnection)
        if protocol.gate.is_leaving and not message.should_close:
            message = message._replace(should_close=True)  # the answer says `Connection: close`
        own = StreamWriter(protocol, writer.loop, on_headers_sent=partial(_guarded, protocol.always))
        return make(message, payload, protocol, own, task)

    return made


async def _guarded(always: Mapping[str, str], headers: "CIMultiDict[str]") -> None:
    headers.pop("Server", None)
    for name, value in (*always.items(), *OF_NO_PAGE.items()):
        headers.setdefault(name, value)


def http_error_response(http: web.BaseRequest, error: web.HTTPException) -> web.Response:
    """An error of aiohttp's in the API's shape."""
    match error.status:
        case 404:
            shape = ApiError(404, f"Unknown URL: {http.method} {http.path}", code="unknown_url")
        case 405:
            shape = ApiError(405, f"{http.method} is not allowed for {http.path}.", code="method_not_allowed")
        case 417:
            shape = ApiError(417, "The only expectation that is met is 100-continue.", code="expectation_failed")
        case _:
            shape = ApiError(error.status, error.reason, code=error.reason.lower().replace(" ", "_"))
    response = error_response(shape, body=error_told(http.path, shape))
    if "Allow" in error.headers:
        response.headers["Allow"] = error.headers["Allow"]
    return response


def error_response(error: ApiError, tie: float = 0.0, body: bytes | None = None) -> web.Response:
    """The answer that an ApiError stands for; `body` is what it says in another shape than OpenAI's.

    Requests of different `tie` are told to come again at different times.
    """
    headers = {"Content-Type": JSON, **error.headers}
    if error.retry_after_s is not None:
        retry_after_s = spread_s(error.retry_after_s, tie)
        headers["Retry-After"] = str(max(1, round(retry_after_s)))
        headers["retry-after-ms"] = str(max(1, round(1000 * retry_after_s)))  # OpenAI's clients read this one first
    if error.status in (429, 503) and error.code:
        headers["x-prfaas-rejected"] = error.code
    if isinstance(error, Unauthorised):
        headers["WWW-Authenticate"] = CHALLENGE
    if error.is_final:
        headers["x-should-retry"] = "false"  # as the OpenAI clients read it
    return web.Response(status=error.status, body=error.body() if body is None else body, headers=headers)
