"""State that a process shares with other workers: nothing in a single process (`SingleProcess`); a worker has a
`WorkerProcess`.
"""

import os
import signal
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from gateway.admission.slots import InFlightSlots, LocalInFlightSlots, LocalSlots, Slots
from gateway.auth.sessions import LocalSessions, SessionStore, SharedSessions
from gateway.cluster.drained_links import DrainedLinks, LocalDrainedLinks, SharedDrainedLinks
from gateway.cluster.node import ClusterNode
from gateway.ratelimit.limiter import TenantLimiters
from gateway.telemetry.load_report import KEPT, OfferedLoad
from gateway.telemetry.metrics import Metrics, keep_in
from gateway.telemetry.record_ring import RecordRing
from gateway.workers.peers import NumberedRing, WorkerPeers
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
METRICS: Final = "metrics"
TALLY: Final = "tally"
DRAINED: Final = "drained"
SESSIONS: Final = "sessions"
ALLOWANCES: Final = "allowances"
FIRST_CONFIG: Final = "gateway.toml"  # the file as it was when the gateway was started
VERDICT: Final = "verdict.json"  # what the parent has found out about the tokenizer's fast encoder
ORPHANED: Final = signal.SIGUSR1  # what a worker gets when its parent is gone


class SingleProcess:
    """A gateway of one process."""

    workers = 1
    parent: int | None = None  # the process that started it and its like
    port: int | None = None  # instead of the configuration's

    def __init__(self) -> None:
        self.metrics = Metrics()
        self.offered = OfferedLoad(uuid.uuid4().hex, SampleRing(KEPT), SampleRing(KEPT))
        self.in_flight: InFlightSlots = LocalInFlightSlots()
        self.places_wanted: Slots = LocalSlots()
        self.waiting: Slots = LocalSlots()
        self.drained: DrainedLinks = LocalDrainedLinks()
        self.sessions: SessionStore = LocalSessions()
        self._last_seq = 0

    def next_seq(self) -> int:
        """A number for a record that is kept."""
        self._last_seq += 1
        return self._last_seq

    def cursor(self, seq: int) -> int:
        """What follows number `seq` follows this one: 0 when `seq` was given out before this start, which counts anew."""
        return seq if seq <= self._last_seq else 0

    def allowances(self, clock: Callable[[], float]) -> TenantLimiters:
        """What tenants have taken of their limits."""
        return TenantLimiters(clock)

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
    """The seat of worker `number`, at a board that the parent has laid out in `directory`; `port` is the one they share."""

    def __init__(self, directory: Path, number: int, port: int) -> None:
        """To be taken once by a process, before anything else counts there. Raises OSError."""
        self.port = port
        self.parent: int | None = os.getppid()
        self._directory = directory
        self._number = number
        self._board = SharedCounters(directory / BOARD, number)
        self.workers = self._board.workers
        keep_in(directory / METRICS, number)
        self.metrics = Metrics(directory / METRICS)
        self.offered: OfferedLoad = SharedSamples(directory / TALLY)
        self.in_flight: InFlightSlots = SharedInFlightSlots(self._board)
        self.places_wanted: Slots = SharedSlots(self._board, PLACES_WANTED)
        self.waiting: Slots = SharedSlots(self._board, WAITING)
        self.next_seq: Callable[[], int] = self._board.next_seq
        self.drained: DrainedLinks = SharedDrainedLinks(directory / DRAINED)
        self.sessions: SessionStore = SharedSessions(directory / SESSIONS)

    def cursor(self, seq: int) -> int:
        return seq if seq <= self._board.last_seq() else 0

    def allowances(self, clock: Callable[[], float]) -> TenantLimiters:
        return TenantLimiters(clock, self._directory / ALLOWANCES, workers=self.workers, own=self._number)

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
