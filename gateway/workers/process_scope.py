"""State that a process shares with other workers: nothing in a single process (`SingleProcess`); a worker has a
`WorkerProcess`.
"""

import os
import signal
import socket
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Final

import msgspec

from gateway.admission.slots import InFlightSlots, LocalInFlightSlots, LocalSlots, Slots
from gateway.auth.sessions import LocalSessions, SessionStore, SharedSessions
from gateway.cluster.drained_links import DrainedLinks, LocalDrainedLinks, SharedDrainedLinks
from gateway.cluster.node import ClusterNode
from gateway.fleet.usage.board import LocalUsageBoard, SharedUsageBoard, UsageBoard
from gateway.ratelimit.limiter import TenantLimiters
from gateway.telemetry.load_report import KEPT, OfferedLoad
from gateway.telemetry.metrics import Metrics, keep_in
from gateway.telemetry.record_ring import RecordRing
from gateway.workers.duty import Duty
from gateway.workers.lineage import ALLOWANCES, DRAINED, DUTY, METRICS, SESSIONS, TALLY, USAGE
from gateway.workers.peers import NumberedRing, WorkerPeers
from gateway.workers.ports import ListenerName, Sockets, taken
from gateway.workers.shared_counters import (
    PLACES_WANTED,
    WAITING,
    SharedCounters,
    SharedInFlightSlots,
    SharedSlots,
    WorkerState,
)
from gateway.workers.shared_samples import SharedSamples
from planner.decisions.plans.offered import SampleRing

BOARD: Final = "board"
FIRST_CONFIG: Final = "gateway.toml"  # the file as it was when the gateway was started
VERDICT: Final = "verdict.json"  # what the parent has found out about the tokenizer's fast encoder
UNWRITTEN: Final = 64  # samples of a kind that other processes do not see yet; also published a few times per second
ORPHANED: Final = signal.SIGUSR1  # what a worker gets when its parent is gone


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """What a process of a gateway shares with its other generations, and listens on.

    `number` is its place in the folder of the lineage; `sockets` are descriptors. The successor of a gateway must see a
    ready node within `ready_s` before it listens; None: it need not.
    """

    lineage: str
    number: int
    sockets: dict[ListenerName, list[int]]
    ready_s: float | None = None


class WorkerPlace(msgspec.Struct, frozen=True, kw_only=True):
    """The same of worker `number`, at a board that the parent has laid out in `directory`."""

    directory: str
    number: int
    place: Place


class SingleProcess:
    """A gateway of one process; with a place in a lineage, what it counts outlives it there."""

    workers = 1
    parent: int | None = None  # the process that started it and its like

    def __init__(self, place: Place | None = None) -> None:
        """With a place: to be taken once by a process, before anything else counts there. Raises OSError."""
        self.holder = uuid.uuid4().hex  # a name for what this process reserves: no other start's
        self._lineage = Path(place.lineage) if place is not None else None
        self._place = place.number if place is not None else 0
        self.sockets: Sockets = _sockets(place)
        self.ready_s = place.ready_s if place is not None else None
        self.in_flight: InFlightSlots = LocalInFlightSlots()
        self.places_wanted: Slots = LocalSlots()
        self.waiting: Slots = LocalSlots()
        self._last_seq = 0
        self.duty = Duty(self._lineage / DUTY if self._lineage is not None else None)
        if self._lineage is None:
            self.metrics = Metrics()
            self.offered = OfferedLoad(uuid.uuid4().hex, SampleRing(KEPT), SampleRing(KEPT))
            self.drained: DrainedLinks = LocalDrainedLinks()
            self.sessions: SessionStore = LocalSessions()
            self.usage: UsageBoard = LocalUsageBoard()
        else:
            keep_in(self._lineage / METRICS, self._place)
            self.metrics = Metrics(self._lineage / METRICS)
            self.offered = SharedSamples(self._lineage / TALLY, most_unwritten=UNWRITTEN)
            self.drained = SharedDrainedLinks(self._lineage / DRAINED)
            self.sessions = SharedSessions(self._lineage / SESSIONS)
            self.usage = SharedUsageBoard(self._lineage / USAGE)

    def offered_of(self, model: str) -> OfferedLoad:
        """What is asked for of one of several models, other than the default one."""
        if self._lineage is None:
            return OfferedLoad(uuid.uuid4().hex, SampleRing(KEPT), SampleRing(KEPT))
        return tally_of(self._lineage, model)

    def next_seq(self) -> int:
        """A number for a record that is kept."""
        self._last_seq += 1
        return self._last_seq

    def cursor(self, seq: int) -> int:
        """What follows number `seq` follows this one: 0 when `seq` was given out before this start, which counts anew."""
        return seq if seq <= self._last_seq else 0

    def allowances(self, clock: Callable[[], float]) -> TenantLimiters:
        """What tenants have taken of their limits."""
        if self._lineage is None:
            return TenantLimiters(clock)
        return TenantLimiters(clock, self._lineage / ALLOWANCES, own=self._place)

    def records(self, limit: int) -> RecordRing:
        """The book of what this process has served."""
        return RecordRing(limit, self.next_seq)

    @asynccontextmanager
    async def siblings(self, kept: Mapping[str, NumberedRing]) -> AsyncIterator[WorkerPeers | None]:
        """The other workers, which can ask this one inside the block; None: a single process."""
        yield None

    def join(self, nodes: Sequence[ClusterNode]) -> None:
        """Has others see what this process gives these nodes to do."""

    def leave(self, node: ClusterNode) -> None:
        """Others see no more of this process on a node that has left."""

    def catch_up(self, nodes: Sequence[ClusterNode]) -> None:
        """Sees what others have given these nodes."""

    def be(self, state: WorkerState) -> None:
        """Has others see what this process does."""

    def states(self) -> Mapping[WorkerState, int]:
        """How many processes do what."""
        return {}

    @property
    def restarts(self) -> int:
        """Processes that died and were started again."""
        return 0


class WorkerProcess:
    """One of several processes: it has a seat at their board, and a place in their lineage."""

    def __init__(self, seat: WorkerPlace) -> None:
        """To be taken once by a process, before anything else counts there. Raises OSError."""
        self.parent: int | None = os.getppid()
        self.sockets: Sockets = _sockets(seat.place)
        self.ready_s = seat.place.ready_s
        self._directory = Path(seat.directory)
        board = blake2b(f"{socket.gethostname()} {seat.directory}".encode(), digest_size=8).hexdigest()
        self.holder = f"{board}.{uuid.uuid4().hex}"  # no worker's: nodes tell its gateway's by what is before the dot
        self._number = seat.number
        self._lineage, self._place = Path(seat.place.lineage), seat.place.number
        self._board = SharedCounters(self._directory / BOARD, seat.number)
        self.workers = self._board.workers
        keep_in(self._lineage / METRICS, self._place)
        self.metrics = Metrics(self._lineage / METRICS)
        self.offered: OfferedLoad = SharedSamples(self._lineage / TALLY, most_unwritten=UNWRITTEN)
        self.in_flight: InFlightSlots = SharedInFlightSlots(self._board)
        self.places_wanted: Slots = SharedSlots(self._board, PLACES_WANTED)
        self.waiting: Slots = SharedSlots(self._board, WAITING)
        self.next_seq: Callable[[], int] = self._board.next_seq
        self.drained: DrainedLinks = SharedDrainedLinks(self._lineage / DRAINED)
        self.sessions: SessionStore = SharedSessions(self._lineage / SESSIONS)
        self.usage: UsageBoard = SharedUsageBoard(self._lineage / USAGE)
        self.duty = Duty(self._lineage / DUTY)

    def offered_of(self, model: str) -> OfferedLoad:
        return tally_of(self._lineage, model)

    def cursor(self, seq: int) -> int:
        return seq if seq <= self._board.last_seq() else 0

    def allowances(self, clock: Callable[[], float]) -> TenantLimiters:
        return TenantLimiters(clock, self._lineage / ALLOWANCES, own=self._place)

    def records(self, limit: int) -> RecordRing:
        return RecordRing(limit, self.next_seq)

    @asynccontextmanager
    async def siblings(self, kept: Mapping[str, NumberedRing]) -> AsyncIterator[WorkerPeers | None]:
        siblings = WorkerPeers(self._directory, self._number, self._board, kept)
        await siblings.start()
        try:
            yield siblings
        finally:
            await siblings.close()

    def join(self, nodes: Sequence[ClusterNode]) -> None:
        self._board.join(nodes)

    def leave(self, node: ClusterNode) -> None:
        self._board.leave(node)

    def catch_up(self, nodes: Sequence[ClusterNode]) -> None:
        self._board.catch_up(nodes)

    def be(self, state: WorkerState) -> None:
        self._board.be(state)

    def states(self) -> Mapping[WorkerState, int]:
        return Counter(self._board.states())

    @property
    def restarts(self) -> int:
        return self._board.restarts


def tally_of(lineage: Path, model: str) -> SharedSamples:
    """That of a model, made by the first process that wants it. Raises OSError."""
    path = lineage / f"{TALLY}-{blake2b(model.encode(), digest_size=8).hexdigest()}"
    if not path.exists():
        new = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
        SharedSamples.create(new)
        try:
            os.link(new, path)  # whole at once: others may look for it
        except FileExistsError:
            pass
        finally:
            new.unlink()
    return SharedSamples(path, most_unwritten=UNWRITTEN)


def _sockets(place: Place | None) -> Sockets:
    if place is None:
        return {}
    return {name: [taken(fd) for fd in fds] for name, fds in place.sockets.items()}
