"""A port with few places for callers. A crowd of strangers fills these at most, and takes none from known callers.

    accepted ── a place ── TLS handshake, within `handshake_s`, if there is a context ── the protocol of `server`

A caller keeps its place until it leaves. Where a certificate admits callers (`holder_of`), it keeps the place until its
handshake is over, and then has one of those for holders. `transport.path.handshakes` and `transport.path.holders` say which
caller loses its place to another one.
"""

import asyncio
import socket
import ssl
from collections import Counter
from collections.abc import Callable
from typing import Final

from transport.path.accept_loop import BACKLOG, AcceptLoop
from transport.path.handshakes import HandshakePlaces, KnownSites
from transport.path.holders import HolderPlaces
from transport.path.site import site_of
from transport.path.tcp import listen, shut

HANDSHAKE_S: Final = 5.0
IN_ALL: Final = 256  # each takes some 60 KiB with TLS
OF_NETWORK: Final = 64

ProtocolFactory = Callable[[], asyncio.BaseProtocol]


class GuardedPort:
    """Listens from `start` to `close`. `ended` counts connections that it ended: crowded, crowded_holder, handshake."""

    def __init__(
        self,
        server: ProtocolFactory,
        context: ssl.SSLContext | None = None,
        *,
        holder_of: Callable[[asyncio.BaseTransport], str] | None = None,
        places: "HandshakePlaces[_Caller] | None" = None,
        holders: "HolderPlaces[_Caller] | None" = None,
        handshake_s: float = HANDSHAKE_S,
    ) -> None:
        self.ended: Counter[str] = Counter()
        self._server = server
        self._context = context
        self._holder_of = holder_of
        self._holders = holders if holders is not None else HolderPlaces()
        self._places = places if places is not None else HandshakePlaces(IN_ALL, OF_NETWORK)
        self._handshake_s = handshake_s
        self._callers: set[_Caller] = set()  # with a place
        self._known = KnownSites()
        self._loop: asyncio.AbstractEventLoop
        self._accepting: AcceptLoop | None = None

    def __len__(self) -> int:
        self._sweep()
        return len(self._callers)

    def start(self, host: str, port: int, whose: str) -> int:
        """Listens, inside an event loop; returns on which port. `whose` names it in the log. Raises OSError."""
        self._loop = asyncio.get_running_loop()
        listener = listen(host, port, BACKLOG)
        bound: int = listener.getsockname()[1]
        self._accepting = AcceptLoop(listener, self._take, whose)
        return bound

    def knows(self, address: str) -> None:
        """A caller at `address` has shown that it may ask. For a while strangers take no place from callers of its site."""
        self._known.remember(site_of(address), self._loop.time())

    async def close(self) -> None:
        """Listens no more, and ends handshakes; the server ends what it has."""
        if self._accepting is None:
            return
        self._accepting.close()
        self._accepting = None
        starting = [caller.starting for caller in self._callers if caller.starting is not None]
        for caller in self._callers:
            caller.end()
        await asyncio.gather(*starting, return_exceptions=True)

    def _take(self, connection: socket.socket, address: str) -> None:
        site = site_of(address)
        now = self._loop.time()
        self._sweep()
        caller = _Caller(connection)
        lost = self._places.enter(caller, site, now, is_known=self._known.is_known(site, now))
        if lost is not None:
            self.ended["crowded"] += 1
            self._callers.discard(lost)
            lost.end()
        if lost is caller:
            connection.close()
            return
        self._callers.add(caller)
        caller.starting = self._loop.create_task(self._begin(caller), name="caller")

    async def _begin(self, caller: "_Caller") -> None:
        limit_s = None if self._context is None else self._handshake_s
        try:
            transport, _ = await self._loop.connect_accepted_socket(
                self._server, caller.connection, ssl=self._context, ssl_handshake_timeout=limit_s
            )
        except (OSError, TimeoutError):  # ssl.SSLError, too
            if caller in self._callers:
                self.ended["handshake"] += 1
            self._forget(caller)
            caller.connection.close()
            return
        except BaseException:
            self._forget(caller)
            caller.connection.close()
            raise
        caller.transport = transport
        if caller not in self._callers:  # it has lost its place meanwhile
            transport.abort()
        elif self._holder_of is not None:
            self._forget(caller)
            self._admit(caller, self._holder_of(transport))

    def _admit(self, caller: "_Caller", holder: str) -> None:
        self._holders.leave_if(lambda each: each.has_left)
        lost = self._holders.enter(caller, holder)
        if lost is not None:
            self.ended["crowded_holder"] += 1
            lost.end()

    def _sweep(self) -> None:
        """Callers that have left give their places back."""
        for caller in [each for each in self._callers if each.has_left]:
            self._forget(caller)

    def _forget(self, caller: "_Caller") -> None:
        self._callers.discard(caller)
        self._places.leave(caller)


class _Caller:
    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.transport: asyncio.WriteTransport | None = None
        self.starting: asyncio.Task[None] | None = None

    @property
    def has_left(self) -> bool:
        """Whether its socket is closed: one that is closing may still hold what the caller does not read."""
        return self.connection.fileno() < 0

    def end(self) -> None:
        """Ends the connection, before or after its handshake."""
        if self.transport is not None:
            self.transport.abort()
        else:
            shut(self.connection)
