"""Asks one API server over HTTP: pages of lists, and watches, each within a time and a number of bytes.

The token and the authority are read anew for each question: the kubelet replaces them while the gateway runs.
"""

import asyncio
import os
import ssl
from collections.abc import AsyncIterable, AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from errno import ECONNREFUSED
from socket import IPPROTO_TCP, SO_KEEPALIVE, SOL_SOCKET, TCP_KEEPCNT, TCP_KEEPIDLE, TCP_KEEPINTVL, socket
from typing import Final
from weakref import WeakSet

import aiohttp
import msgspec

from membership.errors import KubernetesFailed
from membership.kubernetes.lines import WatchLines
from membership.kubernetes.objects import GONE, ApiStatus, shown
from membership.kubernetes.settings import ApiServerConfig
from transport.control.bounded import BodyTooLong, read_bounded
from transport.control.secret_files import read_secret

CONNECT_S: Final = 3.0
LEAVE_S: Final = 0.5  # that TLS may take to end; aiohttp does not wait for it where a watch is given up
CALL_S: Final = 10.0  # for a page of a list, or until a watch begins
MAX_PAGE_BYTES: Final = 16 << 20
MAX_EVENT_BYTES: Final = 4 << 20  # etcd takes objects of 1.5 MiB
MAX_REFUSAL_BYTES: Final = 64 * 1024
RIGHTS: Final = "its account needs a Role with the verbs list and watch"
MAX_AGAIN_S: Final = 30  # that a server may want to be left alone
# A connection that is cut off is seen within seconds, though a quiet watch says nothing for a minute.
KEEPALIVE: Final = ((TCP_KEEPIDLE, 3), (TCP_KEEPINTVL, 2), (TCP_KEEPCNT, 3))
REASONS: Final[Mapping[int, str]] = {401: "denied", 403: "denied", 404: "missing", 429: "busy"}

Params = Mapping[str, str]


class RelistNeeded(Exception):
    """The API server no longer knows what has changed since then, or how a list goes on."""


class ApiClient:
    """Questions to one API server; they raise KubernetesFailed and RelistNeeded."""

    def __init__(self, config: ApiServerConfig, call_s: float = CALL_S) -> None:
        """Inside an event loop."""
        self._config = config
        self._call_s = call_s
        self._sockets: WeakSet[socket] = WeakSet()
        connector = aiohttp.TCPConnector(limit=0, force_close=True, socket_factory=self._kept_alive)
        self._http = aiohttp.ClientSession(connector=connector, auto_decompress=False)

    async def close(self) -> None:
        """Within `LEAVE_S`, all sockets of a server that answers are closed."""
        await self._http.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(LEAVE_S):
                while any(each.fileno() >= 0 for each in self._sockets):  # noqa: ASYNC110 nothing tells
                    await asyncio.sleep(0.005)

    async def page(self, path: str, params: Params) -> bytes:
        """One page of a list."""
        async with self._asked(f"list {name_of(path)}", path, params, self._call_s) as answer:
            try:
                return await read_bounded(answer.content.iter_any(), MAX_PAGE_BYTES)
            except BodyTooLong as error:
                raise KubernetesFailed("too_long", f"{self.where}: a page of {name_of(path)} has {error}") from error

    @asynccontextmanager
    async def watch(
        self, path: str, params: Params, watch_s: float, late_s: float
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """The lines of a watch that has begun, until the API server ends it after `watch_s`; it is late `late_s` after."""
        asked = {**params, "watch": "1", "timeoutSeconds": f"{watch_s:.0f}"}
        async with self._asked(f"watch {name_of(path)}", path, asked, watch_s + late_s) as answer:
            yield _lines(answer.content.iter_any(), f"{self.where}: {name_of(path)}")

    @property
    def where(self) -> str:
        return f"the API server at {self._config.base}"

    @asynccontextmanager
    async def _asked(
        self, what: str, path: str, params: Params, within_s: float
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """An answer of status 200. What goes wrong while it is read is told in the same words."""
        timeout = aiohttp.ClientTimeout(total=within_s, sock_connect=CONNECT_S)
        headers = {"accept": "application/json", "accept-encoding": "identity", **self._token()}
        try:
            async with asyncio.timeout(self._call_s):  # a watch begins at once, too
                answer = await self._http.get(
                    self._config.base + path, params=params, headers=headers, timeout=timeout, ssl=self._tls(),
                    allow_redirects=False,
                )  # fmt: skip
            async with answer:
                if answer.status != 200:
                    raise await self._refusal(answer, what)
                yield answer
        except TimeoutError as error:
            raise KubernetesFailed("late", f"{self.where}: it does not answer: {what}") from error
        except aiohttp.ClientError as error:
            raise KubernetesFailed("unreachable", f"{self.where}: {_why(error)}") from error

    async def _refusal(self, answer: aiohttp.ClientResponse, what: str) -> Exception:
        status = ApiStatus()
        with suppress(BodyTooLong, msgspec.DecodeError, UnicodeDecodeError):
            body = await read_bounded(answer.content.iter_any(), MAX_REFUSAL_BYTES)
            status = msgspec.json.decode(body, type=ApiStatus)
        said = shown(status.message or answer.reason or "no reason given")
        if answer.status in (GONE, 504):  # 504 says that the list is newer than what the API server knows
            return RelistNeeded(f"{self.where} cannot {what} ({answer.status}): {said}")
        of_token = f"is the token of {self._config.token_file} good?" if self._config.has_token else "name token_file"
        advice = {401: f": {of_token}", 403: f": {RIGHTS}"}.get(answer.status, "")
        reason = REASONS.get(answer.status, "unreachable" if answer.status >= 500 else "refused")
        text = f"{self.where} refuses to {what} ({answer.status}): {said}{advice}"
        return KubernetesFailed(reason, text, _again_s(answer.headers.get("retry-after", "")))

    def _kept_alive(self, address: aiohttp.AddrInfoType) -> socket:
        family, kind, protocol, *_ = address
        made = socket(family, kind, protocol)
        made.setblocking(False)
        made.setsockopt(SOL_SOCKET, SO_KEEPALIVE, 1)
        for option, value in KEEPALIVE:
            made.setsockopt(IPPROTO_TCP, option, value)
        self._sockets.add(made)
        return made

    def _token(self) -> dict[str, str]:
        path = self._config.token_file
        if not self._config.has_token:
            return {}
        try:
            token = read_secret(path)
        except (OSError, UnicodeDecodeError) as error:
            raise KubernetesFailed("unreadable", f"token_file {path}: {error}") from error
        if not token or not token.isascii() or not token.isprintable() or " " in token:
            raise KubernetesFailed("unreadable", f"token_file {path}: it is no token: must be one word")
        return {"authorization": f"Bearer {token}"}

    def _tls(self) -> ssl.SSLContext | bool:
        if not self._config.is_tls:
            return True
        path = self._config.authority
        try:
            return ssl.create_default_context(cafile=str(path))
        except (OSError, ValueError) as error:
            raise KubernetesFailed("unreadable", f"authority {path}: {error}") from error


async def _lines(parts: AsyncIterable[bytes], told_by: str) -> AsyncIterator[bytes]:
    lines = WatchLines(MAX_EVENT_BYTES, told_by)
    async for part in parts:
        for line in lines.feed(part):
            yield line


def name_of(path: str) -> str:
    """`pods in namespace llm`, of the path of a collection."""
    *_, namespace, resource = path.split("/")
    return f"{resource} in namespace {namespace}"


def _again_s(retry_after: str) -> float:
    """0.0 for a date: it would be told by another clock."""
    is_number = retry_after.isascii() and retry_after.isdigit() and len(retry_after) < 6
    return float(min(int(retry_after), MAX_AGAIN_S)) if is_number else 0.0


def _why(error: aiohttp.ClientError) -> str:
    """In words that stay the same while the failure does."""
    match error:
        case aiohttp.ClientConnectorCertificateError():
            return f"its certificate is not good: {shown(str(error.certificate_error))}"
        case aiohttp.ClientConnectorSSLError():
            return "it does not speak TLS as we do"
        case aiohttp.ClientConnectorDNSError():
            return "no such host"
        case aiohttp.ClientConnectorError():
            return os.strerror(error.os_error.errno or ECONNREFUSED).lower()
        case aiohttp.ServerDisconnectedError() | aiohttp.ClientPayloadError() | aiohttp.ClientOSError():
            return "the connection was lost"
    return shown(str(error))
