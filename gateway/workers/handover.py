"""A gateway hands its sockets to its successor, over a Unix socket that has a name by the user and the gateway's file.

    successor ──"replace"──► gateway      ◄── what there is to take over, with descriptors (`HandoverOffer`), or why not
    successor ──"serving"──► gateway      it accepts already, from the same queues: none that waits there is lost
                             gateway      ◄──"left": accepts no more, and has given up the name
                             gateway      ◄──"withdrawn": the successor took too long, and another one has asked

A successor that is gone before it says "serving" has changed nothing. The name is abstract (unix(7)): it goes when its process
ends. Another user may take the name, but not a socket: each end checks the other's user.
"""

import asyncio
import logging
import os
import socket
import struct
from collections.abc import Callable, Collection
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Final

import msgspec

from gateway.errors import NotReplaced
from gateway.workers.ports import ListenerName, Sockets, taken

log = logging.getLogger("prfaas.gateway.handover")

REPLACE, SERVING, LEFT, WITHDRAWN = b"replace", b"serving", b"left", b"withdrawn"
MAX_BYTES: Final = 1 << 16
MAX_DESCRIPTORS: Final = 253  # in one message (SCM_MAX_FD)
ANSWER_S: Final = 10.0  # a gateway that takes longer is stuck
OFFER_S: Final = 300.0  # a successor that takes longer is stuck: another one may take its offer
UCRED: Final = struct.Struct("3i")  # unix(7): process, user, group
DIGEST_BYTES: Final = 16
TRUSTED: Final = frozenset({os.geteuid(), 0})


class HandoverOffer(msgspec.Struct, frozen=True, kw_only=True):
    """What a gateway has for its successor, in the order of the descriptors: its lock on the lineage, its sockets."""

    pid: int
    lineage: str
    format: str
    sockets: dict[ListenerName, int]
    host: str = ""
    refused: str = ""


def name_of(config_path: Path) -> str:
    """The name at which the gateway of this file can be asked. Links are not followed: releases are switched by them."""
    path = os.path.abspath(config_path).encode()
    return f"\0prfaas-gateway/{os.geteuid()}/{blake2b(path, digest_size=DIGEST_BYTES).hexdigest()}"


class Predecessor:
    """The gateway that is to be replaced, as its successor sees it. It serves until its successor says that it serves."""

    def __init__(self, connection: socket.socket, offer: HandoverOffer, lock: int, sockets: Sockets) -> None:
        self.pid = offer.pid
        self.lineage = Path(offer.lineage)
        self.format = offer.format
        self.host = offer.host
        self.lock = lock
        self.sockets = sockets
        self._connection = connection

    @classmethod
    def of(cls, name: str, trusted: Collection[int] = TRUSTED) -> "Predecessor | None":
        """The one that has this name, and belongs to one of these users; None: no gateway has it. Raises NotReplaced."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.settimeout(ANSWER_S)
            try:
                connection.connect(name)
            except (ConnectionRefusedError, FileNotFoundError):
                connection.close()
                return None
            if _user_of(connection) not in trusted:
                raise NotReplaced("another user's process has the name of this gateway")
            with suppress(BrokenPipeError):  # what it has said before it closed can still be read
                connection.send(REPLACE)
            text, descriptors, _, _ = socket.recv_fds(connection, MAX_BYTES, MAX_DESCRIPTORS)
            offer = msgspec.json.decode(text, type=HandoverOffer)
            if offer.refused:
                raise NotReplaced(offer.refused)
            lock, *fds = descriptors
            os.set_inheritable(lock, False)
            each = iter(fds)
            sockets = {name: [taken(next(each)) for _ in range(number)] for name, number in offer.sockets.items()}
            return cls(connection, offer, lock, sockets)
        except (OSError, ValueError, StopIteration, msgspec.MsgspecError) as error:
            connection.close()
            raise NotReplaced(f"the gateway that runs does not hand over: {error!r}") from error
        except BaseException:
            connection.close()
            raise

    def leave(self) -> None:
        """Says that we serve. Blocks until it accepts no more or is gone. Raises NotReplaced if our offer was withdrawn."""
        try:
            with self._connection as connection:
                with suppress(BrokenPipeError):
                    connection.send(SERVING)
                word = connection.recv(MAX_BYTES)
                if word == WITHDRAWN:
                    raise NotReplaced("the new one took too long, and another one was started")
                if word != LEFT:
                    log.warning("the gateway that was replaced, pid=%d, has ended at once", self.pid)
        except OSError as error:
            log.warning("the gateway that is replaced, pid=%d, does not say that it leaves: %r", self.pid, error)

    def has_ended(self) -> bool:
        """Whether it has ended. Call this last: the connection does not block any more."""
        try:
            self._connection.setblocking(False)
            return not self._connection.recv(MAX_BYTES, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        """Ends the connection."""
        self._connection.close()


class HandoverDoor:
    """Where a gateway can be asked by its successor. All of it is on the event loop, and nothing of it waits."""

    def __init__(
        self,
        name: str,
        offer: Callable[[], tuple[HandoverOffer, list[int]]],
        leave: Callable[[int], None],
        offer_s: float = OFFER_S,
    ) -> None:
        """`leave` is told which process has taken over; from then on this gateway is not to accept any more."""
        self._name = name
        self._offer = offer
        self._leave = leave
        self._offer_s = offer_s
        self._offered_at = 0.0
        self._listening: socket.socket | None = None
        self._asking = set[socket.socket]()
        self._successor: socket.socket | None = None  # the one of these that has been given all
        self._is_told = False

    def open(self) -> None:
        """Answers from now on, unless another gateway of the same file does."""
        if self._listening is not None:
            return
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            listening.setblocking(False)
            listening.bind(self._name)
            listening.listen()
        except OSError as error:
            listening.close()
            if not self._is_told:
                log.warning("no other gateway can replace this one yet: %s", error)
            self._is_told = True
            return
        self._is_told = False
        self._listening = listening
        asyncio.get_running_loop().add_reader(listening, self._accept)

    @property
    def has_offered(self) -> bool:
        """Whether another gateway is about to take over."""
        return self._successor is not None

    def close(self) -> None:
        """Answers no more."""
        self.close_name()
        for connection in list(self._asking):
            self._drop(connection)

    def _accept(self) -> None:
        assert self._listening is not None
        try:
            connection, _ = self._listening.accept()
        except OSError:
            return
        connection.setblocking(False)
        if _user_of(connection) not in TRUSTED:
            connection.close()
            return
        self._asking.add(connection)
        asyncio.get_running_loop().add_reader(connection, self._read, connection)

    def _read(self, connection: socket.socket) -> None:
        try:
            word = connection.recv(MAX_BYTES)
            if word == REPLACE:
                self._answer(connection)
                return
            if word == SERVING and connection is self._successor:
                self._replaced(connection)
            elif connection is self._successor:
                log.warning("this gateway goes on: its successor is gone")
        except OSError as error:
            log.warning("this gateway goes on: its successor cannot be spoken to: %s", error)
        self._drop(connection)

    def _answer(self, connection: socket.socket) -> None:
        why, now = "", asyncio.get_running_loop().time()
        if self._successor is not None and now - self._offered_at >= self._offer_s:
            log.warning("process %d was to replace this gateway, and takes too long", _pid_of(self._successor))
            self._withdraw(self._successor)
        if self._successor is not None:
            why = "another gateway is about to replace it already"
        elif os.getpid() == 1:
            why = "it is process 1 of a container, which ends with it: replace the container"
        if why:
            offer = HandoverOffer(pid=os.getpid(), lineage="", format="", sockets={}, refused=why)
            descriptors: list[int] = []
        else:
            self._successor, self._offered_at = connection, now
            offer, descriptors = self._offer()
            log.info("process %d is about to replace this gateway", _pid_of(connection))
        socket.send_fds(connection, [msgspec.json.encode(offer)], descriptors)

    def _withdraw(self, connection: socket.socket) -> None:
        """It stays open: closed with its "serving" unread, it would lose our word."""
        with suppress(OSError):
            connection.send(WITHDRAWN)
        self._successor = None

    def _replaced(self, connection: socket.socket) -> None:
        pid = _pid_of(connection)
        self.close_name()
        self._leave(pid)
        with suppress(OSError):  # a successor that is gone has taken over all the same
            connection.send(LEFT)

    def close_name(self) -> None:
        """Gives up the name. A successor that has an offer may still say that it serves."""
        listening, self._listening = self._listening, None
        if listening is not None:
            asyncio.get_running_loop().remove_reader(listening)
            listening.close()

    def _drop(self, connection: socket.socket) -> None:
        self._asking.discard(connection)
        if connection is self._successor:
            self._successor = None
        asyncio.get_running_loop().remove_reader(connection)
        connection.close()


def _user_of(connection: socket.socket) -> int:
    return _peer(connection)[1]


def _pid_of(connection: socket.socket) -> int:
    return _peer(connection)[0]


def _peer(connection: socket.socket) -> tuple[int, int, int]:
    process, user, group = UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, UCRED.size))
    return process, user, group
