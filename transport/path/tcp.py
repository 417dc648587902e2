"""TCP sockets as this package wants them: blocking, with a tick, and with the options that matter on a long link."""

import random
import select
import socket
import struct
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Final

# A blocked read or write returns this often, so that a cancelled transfer gives its memory back soon.
TICK_S: Final = 0.01
HANG_UP_S: Final = 1.0  # for a peer to read why
MAX_VIEWS: Final = 512  # of one sendmsg or recvmsg; the kernel's IOV_MAX is 1024
SO_MAX_PACING_RATE: Final = 47
TCP_NOTSENT_LOWAT: Final = 25
LONG_RTT_S: Final = 2e-3
# What is on its way stays in the processor's cache: twice the speed of what the kernel would choose, and steadier.
SAME_HOST_BUFFER_BYTES: Final = 2 << 20
# Bytes that the kernel has taken but not sent cannot be given to a faster lane, nor overtaken by urgent ones.
NOTSENT_LOWAT_BYTES: Final = 256 << 10
NOTSENT_LEAST_BYTES: Final = 16 << 10
NOTSENT_S: Final = 0.08  # of what a lane carries
EPHEMERAL: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")
LOWEST_LASTING_PORT: Final = 20_000
TRIES: Final = 64
ANY_IPV6: Final = "::"


@dataclass(frozen=True, slots=True, kw_only=True)
class TcpOptions:
    """`congestion` is asked for, not demanded: what a kernel allows differs; LinkState reports what holds.

    "auto" asks by round trip (bbr for long ones, cubic for short ones), None takes the system's default.
    """

    congestion: str | None = "auto"
    connect_timeout_s: float = 5.0
    dead_after_s: float = 10.0


def parse_address(address: str) -> tuple[str, int]:
    """ "host:port", the host in brackets when it is IPv6."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"not host:port: {address!r}")
    return host.strip("[]"), int(port)


def format_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches who listens there."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def free_port(host: str) -> int:
    """A number for a process that asks for one. Another process may take it first: the process that got it then fails to bind."""
    with listen(host, 0) as probe:
        port: int = probe.getsockname()[1]
        return port


def lasting_port(host: str) -> int:
    """As `free_port`, for a port that is left and taken again: the kernel gives it to no socket that asks for any.

    Where nearly all are given to such sockets, it is one of theirs.
    """
    ports = range(LOWEST_LASTING_PORT, int(EPHEMERAL.read_text().split()[0]))
    for port in random.Random().sample(ports, min(TRIES, len(ports))):
        with suppress(OSError), listen(host, port):
            return port
    return free_port(host)


def family_of(host: str) -> socket.AddressFamily:
    """The address family of a listener at this address or name."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def dial(address: str, options: TcpOptions) -> socket.socket:
    """A connected socket. Raises OSError."""
    sock = socket.create_connection(parse_address(address), timeout=options.connect_timeout_s)
    try:
        prepare(sock, options)
    except BaseException:
        sock.close()
        raise
    return sock


def listen(host: str, port: int, backlog: int = 1024) -> socket.socket:
    """Listens; at "::" to IPv4 as well, as gRPC and vLLM do. Raises OSError."""
    return socket.create_server(
        (host, port),
        family=family_of(host),
        backlog=backlog,
        dualstack_ipv6=host == ANY_IPV6 and socket.has_dualstack_ipv6(),
    )


def prepare(sock: socket.socket, options: TcpOptions) -> None:
    """Blocking with a tick; a peer that acknowledges nothing for `dead_after_s` is dead, whatever we are doing."""
    sock.settimeout(None)
    tick = struct.pack("ll", 0, int(TICK_S * 1e6))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, tick)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, tick)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(options.dead_after_s * 1000))
    if _within_host(sock):  # elsewhere the kernel tunes them, as a long link needs
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SAME_HOST_BUFFER_BYTES)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SAME_HOST_BUFFER_BYTES)
    if options.congestion not in (None, "auto"):
        ask_for_congestion_control(sock, options.congestion)


def _within_host(sock: socket.socket) -> bool:
    near, far = sock.getsockname(), sock.getpeername()
    return bool(near[0] == far[0])


def peer_of(sock: socket.socket) -> str:
    """The address of the other end, for a log; never fails."""
    try:
        return format_address(*sock.getpeername()[:2])
    except OSError:
        return "an address that is gone"


def limit_unsent(sock: socket.socket, bytes_per_s: float = float("inf")) -> None:
    """For long links; on short ones it only makes the sender wake more often."""
    size = max(NOTSENT_LEAST_BYTES, min(NOTSENT_LOWAT_BYTES, NOTSENT_S * bytes_per_s))
    sock.setsockopt(socket.IPPROTO_TCP, TCP_NOTSENT_LOWAT, int(size))


def has_room(sock: socket.socket) -> bool:
    """Whether less than half of the limit waits unsent. A write alone would go on filling the last 64 KiB buffer."""
    poller = select.poll()
    poller.register(sock, select.POLLOUT)
    return bool(poller.poll(0))


def choose_congestion_control(sock: socket.socket, rtt_s: float) -> None:
    """Chooses by the round trip, for a fresh connection, whose handshake has measured it.

    bbr fills a long path in spite of loss; within a host or a rack its pacing timers cost up to half the speed.
    """
    for name in ("bbr", "cubic") if rtt_s >= LONG_RTT_S else ("cubic", "reno"):
        if ask_for_congestion_control(sock, name):
            return


def ask_for_congestion_control(sock: socket.socket, name: str) -> bool:
    """False when this kernel does not have or not allow it."""
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode())
    except OSError:
        return False
    return True


def congestion_control(sock: socket.socket) -> str:
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode()


def set_pacing_rate(sock: socket.socket, bytes_per_s: float | None) -> None:
    """The kernel spaces the packets of this connection (None: not); works without the fq qdisc and without
    privileges.
    """
    rate = (1 << 64) - 1 if bytes_per_s is None else int(bytes_per_s)
    sock.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, struct.pack("Q", rate))


def receive_now(sock: socket.socket, into: memoryview, flags: int = 0) -> int | None:
    """Reads the available bytes: returns their number, 0 at the end of the stream, or None when no byte is there
    yet."""
    try:
        return sock.recv_into(into, 0, socket.MSG_DONTWAIT | flags)
    except BlockingIOError:
        return None


def receive_some(sock: socket.socket, into: list[memoryview], flags: int = 0) -> int | None:
    """Blocks for a tick at most; answers as receive_now() does."""
    try:
        return sock.recvmsg_into(into[:MAX_VIEWS], 0, flags)[0]
    except BlockingIOError:
        return None


def send_some(sock: socket.socket, views: Iterable[memoryview | bytes]) -> int:
    """Blocks for a tick at most; how many bytes the kernel took."""
    try:
        return sock.sendmsg(views)
    except BlockingIOError:
        return 0


def wait_readable(fds: Iterable[int], timeout_s: float) -> None:
    """Until one of them has something to read (or is at its end)."""
    poller = select.poll()
    for fd in fds:
        poller.register(fd, select.POLLIN)
    poller.poll(max(0.0, timeout_s) * 1000)


def hang_up(sock: socket.socket) -> None:
    """Ends a connection after its last words were read: unread bytes at close become a reset, which would overtake
    them. The caller closes it.
    """
    give_up_at = time.monotonic() + HANG_UP_S
    with suppress(OSError):
        sock.shutdown(socket.SHUT_WR)  # on a TLS socket, too, what follows is plain
        sock.settimeout(HANG_UP_S)
        while sock.recv(64 << 10) and time.monotonic() < give_up_at:
            pass


def shut(sock: socket.socket) -> None:
    """Wakes the thread that is blocked on the socket; its owner closes it."""
    with suppress(OSError):  # already disconnected
        sock.shutdown(socket.SHUT_RDWR)
