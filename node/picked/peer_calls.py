"""What a decode node asks the node that prefills its picked requests: who it is, and the prefill itself.

Over mutual TLS where the node has certificates: the other end must be a node by its certificate, wherever it listens.
"""

import socket
from collections.abc import AsyncIterable
from io import BytesIO
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

import aiohttp
import msgspec

from node.errors import NodeRefusal, UnansweredCall
from node.known_peers import KnownPeers
from node.picked.bodies import NOT_JSON
from node.picked.engine_calls import JSON, KEEP_ALIVE_S
from node.picked.legs import LEG_PATH, PLACE_PATH, LegAnswer, PrefillAsked, PrefillPlace, label
from transport.control.bounded import BodyTooLong, read_bounded
from transport.control.calls import keep_alive
from transport.wire.asked_servers import AskedNodes

T = TypeVar("T")

CONNECT_S: Final = 2.0
PLACE_S: Final = 5.0
MAX_ANSWER_BYTES: Final = 64 * 1024

_PLACE: Final = msgspec.json.Decoder(PrefillPlace)
_LEG: Final = msgspec.json.Decoder(LegAnswer)


class PeerCalls:
    """All other nodes, by address."""

    def __init__(self, known: KnownPeers, asked: AskedNodes | None) -> None:
        """`asked` has the node's identity; None: in clear."""
        self._known = known
        self._asked = asked
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S, socket_factory=probed_socket)
        self._session = aiohttp.ClientSession(connector=connector)

    async def close(self) -> None:
        """Ends what is asked."""
        await self._session.close()

    async def place(self, address: str) -> PrefillPlace:
        """Which node is at HOST:PORT. Raises UnansweredCall; NodeRefusal for one that is not among this node's peers."""
        timeout = aiohttp.ClientTimeout(total=PLACE_S, sock_connect=CONNECT_S)
        told = await self._told("GET", address, PLACE_PATH, None, timeout, self._asked)
        found = _decoded(_PLACE, told)
        self._known.require_name(found.place)
        return found

    async def prefill(self, address: str, place: str, asked: PrefillAsked, within_s: float) -> LegAnswer:
        """Has the node `place`, at `address`, compute and send a prompt. Raises UnansweredCall, NodeRefusal, TimeoutError."""
        timeout = aiohttp.ClientTimeout(total=within_s, sock_connect=CONNECT_S)
        body = msgspec.json.encode(asked)
        by_place = None if self._asked is None else self._asked.at(place)
        return _decoded(_LEG, await self._told("POST", address, LEG_PATH, body, timeout, by_place))

    async def _told(
        self,
        method: str,
        address: str,
        path: str,
        body: bytes | None,
        limits: aiohttp.ClientTimeout,
        asked: AskedNodes | None,
    ) -> bytes:
        self._known.require_address(_checked(address))
        try:
            secure = None if asked is None else asked.context()
            async with self._session.request(
                method,
                f"{'http' if secure is None else 'https'}://{address}{path}",
                data=None if body is None else BytesIO(body),
                headers=JSON,
                ssl=True if secure is None else secure,
                timeout=limits,
                allow_redirects=False,
            ) as answer:
                told = await _bounded(answer.content.iter_any())
        except TimeoutError:  # aiohttp's own are some of these
            raise
        except (aiohttp.ClientError, OSError, BodyTooLong) as exc:
            raise UnansweredCall("unreachable", repr(exc)) from exc
        if answer.status != 200:
            raise UnansweredCall(label(_code(told) or str(answer.status)), told[:200].decode("utf-8", "replace"))
        return told


def probed_socket(to: tuple[Any, ...]) -> socket.socket:
    """For one connection to a resolved address. A machine that is gone says nothing: the kernel finds out in half a minute."""
    connection = socket.socket(*to[:3])
    try:
        connection.setblocking(False)
        keep_alive(connection)
    except OSError:
        connection.close()
        raise
    return connection


async def _bounded(chunks: AsyncIterable[bytes]) -> bytes:
    return await read_bounded(chunks, MAX_ANSWER_BYTES)


def _checked(address: str) -> str:
    """Raises NodeRefusal for what is no HOST:PORT: the proxy, or a client that reaches this port, wrote it."""
    try:
        parts = urlsplit(f"http://{address}")
        is_whole = bool(parts.hostname and parts.port) and parts.netloc == address and "@" not in address
    except ValueError:
        is_whole = False
    if not is_whole or not address.isascii() or not address.isprintable():
        raise NodeRefusal("bad_address", f"{address[:100]!r} is no HOST:PORT")
    return address


def _decoded(decoder: "msgspec.json.Decoder[T]", told: bytes) -> T:
    try:
        return decoder.decode(told)
    except NOT_JSON as exc:
        raise UnansweredCall("bad_answer", str(exc)) from exc


class _Error(msgspec.Struct):
    code: str = ""


class _ErrorBody(msgspec.Struct):
    error: _Error


_ERROR: Final = msgspec.json.Decoder(_ErrorBody)


def _code(told: bytes) -> str:
    try:
        return _ERROR.decode(told).error.code
    except NOT_JSON:
        return ""
