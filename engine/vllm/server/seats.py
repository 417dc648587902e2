"""Engines of several nodes in one server: their launches meet, and that of rank 0 becomes the server.

    prfaas node ... -- --data-parallel-size 2      moe-0: binds the ports of all, and becomes the server with both engines
                                                   moe-1: says where its agent is, and stays until its node ends it

The meeting place is a socket in a folder of the process that started the nodes. A launch that has met the server's keeps its
line to it, which breaks when the server ends: then it comes again. That all start and end together is the nodes' own affair
(`node.process.rank_group`).
"""

import contextlib
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn, Self

import msgspec

from transport.path.tcp import format_address, listen

SEAT_VARIABLE: Final = "PRFAAS_ENGINE_SEAT"  # of a launch: where it meets the others, its rank, their number
LISTENERS_VARIABLE: Final = "PRFAAS_RANK_LISTENERS"  # of a server: descriptors of the other ranks' ports
MEETING_PLACE: Final = "server.sock"  # in that folder
OTHER_RANKS: Final = "other_ranks"  # in the connector's configuration, in order
MEET_S: Final = 14400.0  # nodes may take their arenas' memory first; rank 0's ends a launch by `engine_start_timeout_s`
AGAIN_S: Final = 0.2
MAX_PLACE_BYTES: Final = 4096
BACKLOG: Final = 2048  # as uvicorn's


class SeatError(Exception):
    """The ranks of a server have not met."""


@dataclass(frozen=True, slots=True)
class Seat:
    """The rank of an engine in a server that nodes share."""

    meeting_place: Path
    rank: int
    count: int

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Self | None:
        """None: the engine has a server of its own."""
        said = environment.get(SEAT_VARIABLE)
        if said is None:
            return None
        path, rank, count = said.rsplit(":", 2)
        return cls(Path(path), int(rank), int(count))

    def environment(self) -> dict[str, str]:
        """What `of` reads."""
        return {SEAT_VARIABLE: f"{self.meeting_place}:{self.rank}:{self.count}"}


class RankPlace(msgspec.Struct, frozen=True):
    """Where a rank's agent is, and where its requests are to be taken."""

    rank: int
    agent_socket: str
    host: str
    port: int


@dataclass(frozen=True, slots=True)
class RankAtServer:
    """A rank of a server that another rank's launch becomes. `line` goes over into the server, as `listener` does."""

    agent_socket: str
    host: str  # as its node calls it
    listener: socket.socket
    line: socket.socket

    @property
    def http_url(self) -> str:
        """Where its requests are taken."""
        return f"http://{format_address(self.host, self.listener.getsockname()[1])}"

    def settings(self) -> dict[str, str]:
        """As the connector reads them."""
        return {"agent_socket": self.agent_socket, "http_url": self.http_url}


def settings_of_rank(extra: Mapping[str, Any], rank: int) -> Mapping[str, Any]:
    """A rank's `agent_socket` and `http_url` out of the connector's configuration. Raises ValueError."""
    others = extra.get(OTHER_RANKS) or []
    if not others or rank == 0:
        return extra
    if rank > len(others):
        raise ValueError(f"data parallel rank {rank}: {len(others) + 1} nodes share this server")
    own: Mapping[str, Any] = others[rank - 1]
    return own


def keep(seat: Seat, place: RankPlace) -> NoReturn:
    """Says where this rank is to whatever becomes the server, again and again."""
    while True:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as line:
            line.connect(str(seat.meeting_place))
            line.sendall(msgspec.json.encode(place) + b"\n")
            line.recv(1)  # until the server, or what would have become it, has ended
        time.sleep(AGAIN_S)


def meet(seat: Seat, within_s: float = MEET_S) -> list[RankAtServer]:
    """All other ranks, in order, once they have come. Raises SeatError, OSError."""
    seat.meeting_place.unlink(missing_ok=True)
    with contextlib.ExitStack() as opened:
        come = _come(seat, time.monotonic() + within_s, opened)
        ranks = [come[rank] for rank in range(1, seat.count)]
        met = [
            RankAtServer(place.agent_socket, place.host, opened.enter_context(_listening(place)), line)
            for place, line in ranks
        ]
        opened.pop_all()
    return met


def _come(seat: Seat, deadline: float, opened: contextlib.ExitStack) -> dict[int, tuple[RankPlace, socket.socket]]:
    """The launches that connect before the deadline, of the monotonic clock, and stay connected. Raises SeatError."""
    come: dict[int, tuple[RankPlace, socket.socket]] = {}
    with socket.socket(socket.AF_UNIX) as table:
        table.bind(str(seat.meeting_place))
        table.listen(seat.count)
        while missing := [rank for rank in range(1, seat.count) if rank not in come]:
            table.settimeout(_left_s(deadline))
            try:
                line, _ = table.accept()
            except TimeoutError:
                raise SeatError(f"ranks {missing} of this server have not come in time") from None
            if (place := _said(opened.enter_context(line), seat, deadline)) is None:
                line.close()
                continue
            if place.rank in come:  # another launch of it, which the node has started since
                come.pop(place.rank)[1].close()
            come[place.rank] = place, line
            for rank in [rank for rank, (_, line) in come.items() if _is_gone(line)]:
                come.pop(rank)[1].close()
    return come


def handed_over(ranks: Sequence[RankAtServer]) -> dict[str, str]:
    """Has what this process becomes inherit the sockets; the environment that tells it of them."""
    for rank in ranks:
        rank.listener.set_inheritable(True)
        rank.line.set_inheritable(True)
    return {LISTENERS_VARIABLE: ",".join(str(rank.listener.fileno()) for rank in ranks)} if ranks else {}


def taken_over(environment: Mapping[str, str]) -> list[socket.socket]:
    """In the server: where the other ranks' requests are taken, in order."""
    said = environment.get(LISTENERS_VARIABLE, "")
    listeners = [socket.socket(fileno=int(number)) for number in said.split(",") if number]
    for listener in listeners:
        listener.set_inheritable(False)
    return listeners


def _left_s(deadline: float) -> float:
    return max(deadline - time.monotonic(), 0.001)


def _said(line: socket.socket, seat: Seat, deadline: float) -> RankPlace | None:
    """What a launch says that has come; None if that is nothing to seat. All are needed, so a slow one is waited for: its line
    breaks if it ends."""
    line.settimeout(_left_s(deadline))
    said = b""
    try:
        while not said.endswith(b"\n") and len(said) < MAX_PLACE_BYTES and (part := line.recv(MAX_PLACE_BYTES)):
            said += part
        place = msgspec.json.decode(said, type=RankPlace)
        line.setblocking(False)
    except (OSError, msgspec.DecodeError):
        return None
    return place if 0 < place.rank < seat.count else None


def _is_gone(line: socket.socket) -> bool:
    try:
        return not line.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True


def _listening(place: RankPlace) -> socket.socket:
    """Raises OSError for a port that another process has."""
    try:
        return listen(place.host, place.port, BACKLOG)
    except OSError as error:
        address = format_address(place.host, place.port)
        raise OSError(error.errno, f"{address}, where rank {place.rank} is to be asked: {error.strerror}") from error
