"""A server's door to the network: mutual TLS outside, plain bytes on loopback inside.

    accepted ── handshake, within HANDSHAKE_S ── rights ── connected with the server ── relayed (`node.process.relay`)

Of a node with certificates, neither the engine nor gRPC opens a port to the network. A front takes the connections instead,
checks who calls, and carries bytes both ways. It reads none of them: one connection outside is one connection inside, from
its first byte to its last. While there is no server, the front resets callers before their handshake, as a port does where
nothing listens. Until its handshake is over, a caller has one of few places (`transport.path.handshakes`), so strangers take
none of the others.
"""

import asyncio
import logging
import secrets
import socket
import ssl
from collections import Counter
from collections.abc import Callable, Mapping
from ipaddress import ip_address
from typing import Any, Final, Protocol
from urllib.parse import urlsplit

from node.process.ports import ListenPort
from node.process.relay import READ_BYTES, STALLED_S, TlsRelay, reset
from transport.control.calls import keep_alive
from transport.path.accept_loop import BACKLOG, AcceptLoop
from transport.path.handshakes import HandshakePlaces, KnownSites
from transport.path.site import site_of
from transport.path.tcp import family_of, format_address, listen
from transport.peers.name import said_by
from transport.receive.few_lines import FewLines
from transport.wire.identity import Identity

log = logging.getLogger(__name__)

HANDSHAKE_S: Final = 5.0
CONNECT_S: Final = 5.0  # to an engine on the same machine, whose loop may be busy
MAX_CONNECTIONS: Final = 16_384  # of callers that may ask
MAX_OF_ADDRESS: Final = 4_096
MAX_LEFT: Final = 4_096

LOOPBACK: Final = "127.0.0.1"
LOOPBACK_BASE: Final = int(ip_address("127.1.0.0"))  # what lies below is used by others, by habit
LOOPBACK_SIZE: Final = int(ip_address("127.255.255.255")) - LOOPBACK_BASE

PeerCertificate = Mapping[str, Any]  # as `said_by` gives it
Complaint = Callable[[PeerCertificate], str]


def no_complaint(certificate: PeerCertificate) -> str:
    """Admits every caller with a certificate of the authority."""
    return ""


class AdmittedCaller(Protocol):
    """The holder of a good certificate, and where it calls from."""

    address: str
    certificate: PeerCertificate | None


def own_loopback() -> str:
    """An address of this machine for one connection, of sixteen million.

    None has it soon again, and other processes cannot guess it. So the server takes no connection for another one.
    """
    return str(ip_address(LOOPBACK_BASE + secrets.randbelow(LOOPBACK_SIZE)))


class TlsFront:
    """Listens for callers with certificates, and carries what they say to a server on this machine."""

    def __init__(
        self,
        identity: Identity,
        complaint: Complaint = no_complaint,
        *,
        handshake_s: float = HANDSHAKE_S,
        handshakes: "HandshakePlaces[_Caller] | None" = None,
        of_address: int = MAX_OF_ADDRESS,
        stalled_s: float = STALLED_S,
        protocol: str = "",
        whose: str = "the engine",
    ) -> None:
        """`complaint` says why the holder of a certificate may not ask, or "" if it may.

        `protocol` is what the server speaks, for callers that ask for it by ALPN (RFC 7301). `whose` names it in the log.
        """
        self.ended: Counter[str] = Counter()  # connections that the front ended, by reason
        self.url = self.engine_url = ""
        self._engine: tuple[str, int] | None = None  # that takes connections
        self._callers: set[_Caller] = set()
        self._admitted: Counter[str] = Counter()  # by site
        self._known = KnownSites()  # since one of their admitted callers left
        self._identity = identity
        self._complaint = complaint
        self._handshake_s = handshake_s
        self._handshakes = handshakes if handshakes is not None else HandshakePlaces()
        self._of_address = of_address
        self._stalled_s = stalled_s
        self._protocol = protocol
        self._whose = whose
        self._inside: dict[str, _Caller] = {}  # by the address and port from which the server was called
        self._left: dict[str, None] = {}  # of those that were inside of late; the latest last
        self._scratch = memoryview(bytearray(READ_BYTES))
        self._loop: asyncio.AbstractEventLoop
        self._accepting: AcceptLoop | None = None
        self._lines = FewLines(log)

    def __len__(self) -> int:
        return len(self._callers)

    async def start(self, port: ListenPort) -> int:
        """Listens; `url` says where, and this on which port. Raises NodeConfigError."""
        try:
            listener = listen(port.host, port.number, BACKLOG)
        except OSError as exc:
            raise port.refused(exc) from exc
        bound: int = listener.getsockname()[1]
        self.url = f"https://{format_address(port.host, bound)}"
        self._loop = asyncio.get_running_loop()
        self._accepting = AcceptLoop(listener, self._take, self._whose)
        return bound

    def open(self, engine_url: str) -> None:
        """Carries callers to the server at `engine_url` from now on."""
        parts = urlsplit(engine_url)
        self.engine_url = engine_url
        self._engine = (parts.hostname or "", parts.port or 80)

    def shut(self) -> None:
        """Turns callers away: there is no server. Connections to the one that was there end with it."""
        self._engine = None

    def caller_at(self, inner: str) -> "AdmittedCaller | None":
        """The caller for which the front connected from that inner ADDRESS:PORT; None for other processes."""
        return self._inside.get(inner)

    def has_left(self, inner: str) -> bool:
        """Whether it was a caller's that left a moment ago: the server may still begin what it asked for."""
        return inner in self._left

    def check_again(self) -> None:
        """Ends the connections of callers that may not ask any more."""
        for caller in [each for each in self._callers if each.certificate is not None]:
            if complaint := self._complaint(caller.certificate or {}):
                self.end(caller, "no_right", complaint)

    async def close(self) -> None:
        """Listens no more, and ends all connections."""
        if self._accepting is None:
            return
        self._accepting.close()
        self._accepting = None
        callers = list(self._callers)
        for caller in callers:
            caller.abort()
        connecting = [caller.connecting for caller in callers if caller.connecting is not None]
        await asyncio.gather(*connecting, return_exceptions=True)

    def _take(self, connection: socket.socket, address: str) -> None:
        site = site_of(address)
        if reason := self._reason_against(site):
            self._turn_away(connection, reason)
        else:
            self._welcome(connection, address, site)

    def _reason_against(self, site: str) -> str:
        if self._engine is None:
            return "no_engine"
        is_crowded = self._admitted.total() >= MAX_CONNECTIONS or self._admitted[site] >= self._of_address
        return "crowded" if is_crowded else ""

    def _turn_away(self, connection: socket.socket, reason: str) -> None:
        self.ended[reason] += 1  # without a line in the log: there may be many
        reset(connection)

    def _welcome(self, connection: socket.socket, address: str, site: str) -> None:
        """Begins a handshake, for which another one may have to end."""
        try:
            keep_alive(connection)
            secure = self._identity.server_context(self._protocol).wrap_socket(
                connection, server_side=True, do_handshake_on_connect=False
            )
        except OSError as exc:  # it has hung up meanwhile, or our own files cannot be read
            self.count("handshake", address, _detail(exc))
            connection.close()
            return
        caller = _Caller(self, self._loop, secure, address, site)
        self._callers.add(caller)
        lost = self._handshakes.enter(caller, site, self._loop.time(), is_known=self._is_known(site))
        if lost is not None:
            self.ended["crowded"] += 1
            lost.abort()
        if lost is not caller:
            caller.shake_hands(self._handshake_s)

    def _is_known(self, site: str) -> bool:
        """Whether a good certificate has come from there of late."""
        return site in self._admitted or self._known.is_known(site, self._loop.time())

    # What callers tell

    def shaken(self, caller: "_Caller") -> None:
        """Its handshake is over, and its certificate is one of the authority's."""
        self._handshakes.leave(caller)
        try:
            complaint = self._complaint(caller.certificate or {})
        except Exception as error:  # an error of ours keeps no place
            self.end(caller, "internal", repr(error))
            return
        if complaint:
            self.end(caller, "no_right", complaint)
        elif reason := self._reason_against(caller.site):
            self.end(caller, reason, "there is no place, or no server")
        else:
            self._admitted[caller.site] += 1
            caller.is_admitted = True
            assert self._engine is not None
            caller.connecting = self._loop.create_task(self._connect(caller, self._engine), name="tls front")

    def end(self, caller: "_Caller", reason: str, detail: str) -> None:
        """Ends a connection, and says why."""
        self.count(reason, caller.address, detail)
        caller.abort()

    def count(self, reason: str, address: str, detail: str) -> None:
        """A connection has ended for `reason`."""
        self.ended[reason] += 1
        told = "a connection of %s to %s ended (%s): %s"
        self._lines.warning(self._loop.time(), told, address, self._whose, reason, detail)

    def forget(self, caller: "_Caller") -> None:
        """Gives back what a caller held that has left."""
        self._callers.discard(caller)
        self._handshakes.leave(caller)
        if self._inside.pop(caller.inner, None) is not None:
            self._left[caller.inner] = None
            if len(self._left) > MAX_LEFT:
                del self._left[next(iter(self._left))]
        if caller.is_admitted:
            caller.is_admitted = False
            self._admitted[caller.site] -= 1
            if not self._admitted[caller.site]:
                del self._admitted[caller.site]
            self._known.remember(caller.site, self._loop.time())

    async def _connect(self, caller: "_Caller", engine: tuple[str, int]) -> None:
        try:
            inside = socket.socket(family_of(engine[0]), socket.SOCK_STREAM)
        except OSError as exc:  # no descriptor: the caller's is one
            self.end(caller, "no_engine", _detail(exc))
            return
        try:
            inside.setblocking(False)
            if engine[0] == LOOPBACK:
                inside.bind((own_loopback(), 0))
            async with asyncio.timeout(CONNECT_S):
                await self._loop.sock_connect(inside, engine)
            caller.inner = format_address(*inside.getsockname()[:2])
            self._inside[caller.inner] = caller
            caller.join(inside, self._scratch, self._stalled_s)
        except (OSError, TimeoutError) as exc:
            inside.close()
            self.end(caller, "no_engine", _detail(exc))
        except BaseException:
            inside.close()
            caller.abort()
            raise


class _Caller:
    """A connection from the moment when it is accepted."""

    def __init__(
        self,
        front: TlsFront,
        loop: asyncio.AbstractEventLoop,
        connection: ssl.SSLSocket,
        address: str,
        site: str,
    ) -> None:
        self.address = address
        self.site = site
        self.certificate: PeerCertificate | None = None  # shown, and good
        self.is_admitted = False
        self.inner = ""  # from where the server was called, once it was
        self.connecting: asyncio.Task[None] | None = None
        self._front = front
        self._loop = loop
        self._connection = connection
        self._relay: TlsRelay | None = None
        self._deadline: asyncio.TimerHandle | None = None

    def shake_hands(self, within_s: float) -> None:
        """Tells the front what came of it."""
        self._deadline = self._loop.call_later(within_s, self._late)
        self._loop.add_reader(self._connection, self._step)
        self._step()

    def join(self, inside: socket.socket, scratch: memoryview, stalled_s: float) -> None:
        """The engine has taken the connection."""
        self._relay = TlsRelay(self._loop, self._connection, inside, scratch, self._over, stalled_s)
        self._relay.start()

    def abort(self) -> None:
        """Ends it now, however far it is."""
        if self.connecting is not None and not self.connecting.done() and self.connecting is not asyncio.current_task():
            self.connecting.cancel()
        if self._relay is not None:
            self._relay.abort()
            return
        self._stop_waiting()
        self._connection.close()
        self._over("")

    def _step(self) -> None:
        self._loop.remove_writer(self._connection)
        try:
            self._connection.do_handshake()
        except ssl.SSLWantReadError:
            return
        except ssl.SSLWantWriteError:
            self._loop.add_writer(self._connection, self._step)
            return
        except (OSError, ValueError) as exc:  # ssl.SSLError, too
            self._front.end(self, "handshake", _detail(exc))
            return
        self._stop_waiting()
        self.certificate = said_by(self._connection)
        self._front.shaken(self)

    def _late(self) -> None:
        self._front.end(self, "handshake", "it takes too long")

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        if self._connection.fileno() >= 0:
            self._loop.remove_reader(self._connection)
            self._loop.remove_writer(self._connection)

    def _over(self, why: str) -> None:
        self._front.forget(self)
        if why:
            self._front.count(why, self.address, "it took nothing of what was said for a long time")


def _detail(exc: Exception) -> str:
    if isinstance(exc, ssl.SSLError) and exc.reason:
        return str(exc.reason).lower().replace("_", " ")
    return str(exc) or type(exc).__name__
