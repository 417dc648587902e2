"""The sockets that a gateway listens on: its own, those of the gateway that it replaces, or systemd's.

    clients      worker 0 … N-1: a socket for each address, its own (SO_REUSEPORT) or shared
    operators    the same, if `metrics_port` is set

The parent of workers binds their sockets and never listens: a worker does when it can serve. So connections are dealt to those
that listen. What waits to be accepted stays with the socket, and any process that has it may accept.
"""

import logging
import os
import socket
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from enum import StrEnum
from typing import Any, Final

from gateway.config.gateway import GatewayConfig
from gateway.errors import CannotListen
from transport.path.tcp import format_address

log = logging.getLogger("prfaas.gateway.ports")

FIRST_PASSED: Final = 3  # sd_listen_fds(3)


class ListenerName(StrEnum):
    """Which application answers."""

    CLIENTS = "clients"
    OPERATORS = "operators"


Sockets = Mapping[ListenerName, Sequence[socket.socket]]


class Ports:
    """All of them, by listener and worker."""

    def __init__(self, config: GatewayConfig, given: Sockets) -> None:
        """Those `given` are used, others bound. Raises CannotListen."""
        self._of: dict[ListenerName, list[list[socket.socket]]] = {}
        self._workers = config.workers
        self.host = config.host  # systemd's sockets may be at other addresses
        try:
            for name, port in ports_of(config).items():
                self._of[name] = [[] for _ in range(config.workers)]
                self._deal(name, given.get(name) or bound(config.host, port, is_shared=config.workers > 1))
        except BaseException:
            self.close()
            raise

    @property
    def address(self) -> tuple[str, int]:
        """Where clients reach it."""
        host, port, *_ = self._of[ListenerName.CLIENTS][0][0].getsockname()
        return host, port

    def of(self, worker: int) -> Sockets:
        """Those that a worker listens on."""
        return {name: of_worker[worker] for name, of_worker in self._of.items()}

    def all(self) -> Sockets:
        """Each once."""
        return {name: list({id(each): each for some in by for each in some}.values()) for name, by in self._of.items()}

    def renew(self, worker: int) -> None:
        """A worker has ended: connections are dealt to the others until its successor listens, on another socket."""
        for by_worker in self._of.values():
            others = {id(each) for number, some in enumerate(by_worker) if number != worker for each in some}
            for at, each in enumerate(by_worker[worker]):
                with suppress(OSError):  # of a generation that has left, all are closed
                    if id(each) not in others and _may_have_siblings(each):
                        by_worker[worker][at] = _sibling(each)
                        each.close()

    def close(self) -> None:
        for sockets in self.all().values():
            for each in sockets:
                each.close()

    def _deal(self, name: ListenerName, sockets: Sequence[socket.socket]) -> None:
        """Gives every worker at least one socket of each address. Where no more can be made, workers share."""
        by_address = defaultdict[Any, list[socket.socket]](list)
        for each in sockets:
            by_address[each.getsockname()].append(each)
        for some in by_address.values():
            given = len(some)
            while len(some) < self._workers:
                try:
                    some.append(_sibling(some[0]))
                except OSError:
                    some.append(some[len(some) % given])
            for number, each in enumerate(some):
                self._of[name][number % self._workers].append(each)


def ports_of(config: GatewayConfig) -> dict[ListenerName, int]:
    """The listeners that a gateway has, with their ports."""
    operators = {ListenerName.OPERATORS: config.metrics_port} if config.metrics_port else {}
    return {ListenerName.CLIENTS: config.port, **operators}


def fitting(given: Sockets, config: GatewayConfig) -> Sockets:
    """Those of another gateway that listen where this one is to; 0: anywhere."""
    wanted = ports_of(config)
    return {
        name: [each for each in sockets if wanted[name] in (0, each.getsockname()[1])]
        for name, sockets in given.items()
        if name in wanted
    }


def bound(host: str, port: int, *, is_shared: bool) -> list[socket.socket]:
    """A socket for each address of `host` (0: any free port), alone there or with others like it. Raises CannotListen."""
    made: list[socket.socket] = []
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, _, _, _, address in dict.fromkeys(found):
            at = (address[0], made[0].getsockname()[1], *address[2:]) if made and not port else address
            if port and is_shared:
                # Sockets that share their port would share it with another gateway, too.
                probe = _bound(family, at, is_shared=False)
                with closing(probe):
                    probe.listen()
            made.append(_bound(family, at, is_shared=is_shared))
    except OSError as error:
        for each in made:
            each.close()
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
        raise CannotListen(f"cannot listen on {format_address(host, port)}: {reason}; choose another port") from error
    return made


def passed_by_systemd(environment: Mapping[str, str], config: GatewayConfig, first: int = FIRST_PASSED) -> Sockets:
    """Sockets that the process was started with (sd_listen_fds(3)): of operators by their name, or by their port."""
    if environment.get("LISTEN_PID") != str(os.getpid()):
        return {}
    number = int(environment.get("LISTEN_FDS", "0"))
    names = environment.get("LISTEN_FDNAMES", "").split(":") + [""] * number
    found: dict[ListenerName, list[socket.socket]] = defaultdict(list)
    for fd, name in zip(range(first, first + number), names, strict=False):
        passed = taken(fd)
        is_operators = name == ListenerName.OPERATORS or passed.getsockname()[1] == config.metrics_port != 0
        found[ListenerName.OPERATORS if is_operators else ListenerName.CLIENTS].append(passed)
    return found


def taken(fd: int) -> socket.socket:
    """The socket that this process was given; processes that it starts do not get it."""
    os.set_inheritable(fd, False)
    return socket.socket(fileno=fd)


def _bound(family: int, address: Any, *, is_shared: bool) -> socket.socket:
    made = socket.socket(family)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if is_shared:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        made.bind(address)
    except BaseException:
        made.close()
        raise
    return made


def _may_have_siblings(each: socket.socket) -> bool:
    return bool(each.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT))


def _sibling(each: socket.socket) -> socket.socket:
    """Another socket at the same address, to share what comes. Raises OSError where that one does not."""
    return _bound(each.family, each.getsockname(), is_shared=True)
