"""Takes callers of kept connections in, and says which handshakes failed, and why.

    accepted ── a place (`transport.path.handshakes`) ── handshake, within `handshake_s` ── a connection

A server of asyncio drops a caller whose handshake fails without a word. So the listening is done here, a task for each
handshake, and each that fails has its reason and its address.
"""

import asyncio
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass

from transport.path.accept_loop import BACKLOG, AcceptLoop
from transport.path.handshakes import HandshakePlaces
from transport.path.site import site_of
from transport.path.tcp import listen

Refused = Callable[[str, str, str], None]  # is told a reason, an address and a detail


@dataclass(slots=True)
class _Accepted:
    """A caller whose handshake is to begin, or has begun."""

    socket: socket.socket
    address: str
    has_begun: bool = False  # from then on a transport closes its socket


class CallListener:
    """Listens on one port. Of handshakes there are so many at once as `HandshakePlaces` has places for."""

    def __init__(
        self,
        connection: Callable[[], asyncio.Protocol],
        refused: Refused,
        is_known: Callable[[str], bool],
        handshake_s: float,
        places: "HandshakePlaces[asyncio.Task[None]] | None" = None,
    ) -> None:
        """`is_known` says of a site whether a good caller has come from there."""
        self._connection = connection
        self._refused = refused
        self._is_known = is_known
        self._handshake_s = handshake_s
        self._places = places if places is not None else HandshakePlaces()
        self._tasks: dict[asyncio.Task[None], _Accepted] = {}
        self._secure: ssl.SSLContext | None = None
        self._loop: asyncio.AbstractEventLoop
        self._accepting: AcceptLoop | None = None

    def __len__(self) -> int:
        """How many handshakes are under way."""
        return len(self._tasks)

    def start(self, host: str, port: int, secure: ssl.SSLContext | None) -> int:
        """The port it listens on; without `secure` there are no handshakes. Raises OSError."""
        self._loop = asyncio.get_running_loop()
        self._secure = secure
        listener = listen(host, port, BACKLOG)
        self._accepting = AcceptLoop(listener, self._welcome, "node calls")
        bound: int = listener.getsockname()[1]
        return bound

    def stop(self) -> None:
        """Takes no more callers; handshakes under way end."""
        if self._accepting is None:
            return
        self._accepting.close()
        self._accepting = None
        for task in self._tasks:
            task.cancel()

    async def close(self) -> None:
        """The same, and waits until all handshakes have ended."""
        self.stop()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _welcome(self, caller: socket.socket, address: str) -> None:
        """Begins a handshake, for which another one may have to end."""
        accepted = _Accepted(caller, address)
        task = self._loop.create_task(self._shake_hands(accepted), name="handshake of a caller")
        self._tasks[task] = accepted
        task.add_done_callback(self._over)
        site = site_of(address)
        lost = self._places.enter(task, site, self._loop.time(), is_known=self._is_known(site))
        if lost is not None and lost.cancel():  # one that is over has lost nothing
            self._refused("crowded", self._tasks[lost].address, "too many shake hands")

    def _over(self, task: "asyncio.Task[None]") -> None:
        accepted = self._tasks.pop(task)
        self._places.leave(task)
        if not accepted.has_begun:
            accepted.socket.close()

    async def _shake_hands(self, accepted: _Accepted) -> None:
        accepted.has_begun = True
        within_s = self._handshake_s if self._secure is not None else None
        try:
            await self._loop.connect_accepted_socket(
                self._connection, accepted.socket, ssl=self._secure, ssl_handshake_timeout=within_s
            )
        except OSError as exc:
            self._refused("handshake", accepted.address, _detail(exc))


def _detail(error: OSError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message
    return str(error) or type(error).__name__
