"""State that a process shares with other workers: nothing in a single process (`Alone`); a worker has a `Seat`."""

import os
import signal
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from gateway.admission.slots import OwnPlaces, Places
from gateway.cluster.drained_links import Drained, OwnDrained, SharedDrained
from gateway.cluster.node import Node
from gateway.ratelimit.limiter import Allowances
from gateway.telemetry.load_report import KEPT, Offered
from gateway.telemetry.metrics import Metrics, keep_in
from gateway.telemetry.record_ring import Records
from gateway.workers.peers import Kept, Siblings
from gateway.workers.shared_counters import IN_FLIGHT, WAITING, Board, SharedPlaces, State
from gateway.workers.shared_samples import Tally
from planner.decisions.offered import SampleRing

BOARD: Final = "board"
METRICS: Final = "metrics"
TALLY: Final = "tally"
DRAINED: Final = "drained"
ALLOWANCES: Final = "allowances"
FIRST_CONFIG: Final = "gateway.toml"  # the file as it was when the gateway was started
VERDICT: Final = "verdict.json"  # what the parent has found out about the tokenizer's fast encoder
ORPHANED: Final = signal.SIGUSR1  # what a worker gets when its parent is gone


class Alone:
    """A gateway of one process."""

    workers = 1
    parent: int | None = None  # the process that started it and its like
    port: int | None = None  # instead of the configuration's

    def __init__(self) -> None:
        self.metrics = Metrics()
        self.offered = Offered(uuid.uuid4().hex, SampleRing(KEPT), SampleRing(KEPT))
        self.in_flight: Places = OwnPlaces()
        self.waiting: Places = OwnPlaces()
        self.drained: Drained = OwnDrained()
        self._last_seq = 0

    def next_seq(self) -> int:
        """A number for a record that is kept."""
        self._last_seq += 1
        return self._last_seq

    def cursor(self, seq: int) -> int:
        """What follows number `seq` follows this one: 0 when `seq` was given out before this start, which counts anew."""
        return seq if seq <= self._last_seq else 0

    def allowances(self, clock: Callable[[], float]) -> Allowances:
        """What tenants have taken of their limits."""
        return Allowances(clock)

    def records(self, limit: int) -> Records:
        """The book of what this process has served."""
        return Records(limit, self.next_seq)

    @asynccontextmanager
    async def siblings(self, kept: Mapping[str, Kept]) -> AsyncIterator[Siblings | None]:
        """The other workers, which can ask this one inside the block; None: a single process."""
        yield None

    def join(self, nodes: Sequence[Node]) -> None:
        """Has others see what this process gives these nodes to do."""

    def catch_up(self, nodes: Sequence[Node]) -> None:
        """Sees what others have given these nodes."""

    def be(self, state: State) -> None:
        """Has others see what this process does."""

    def states(self) -> Mapping[State, int]:
        """How many processes do what."""
        return {}

    @property
    def restarts(self) -> int:
        """Processes that died and were started again."""
        return 0


class Seat:
    """The seat of worker `number`, at a board that the parent has laid out in `directory`; `port` is the one they share."""

    def __init__(self, directory: Path, number: int, port: int) -> None:
        """To be taken once by a process, before anything else counts there. Raises OSError."""
        self.port = port
        self.parent: int | None = os.getppid()
        self._directory = directory
        self._number = number
        self._board = Board(directory / BOARD, number)
        self.workers = self._board.workers
        keep_in(directory / METRICS, number)
        self.metrics = Metrics(directory / METRICS)
        self.offered: Offered = Tally(directory / TALLY)
        self.in_flight: Places = SharedPlaces(self._board, IN_FLIGHT)
        self.waiting: Places = SharedPlaces(self._board, WAITING)
        self.next_seq: Callable[[], int] = self._board.next_seq
        self.drained: Drained = SharedDrained(directory / DRAINED)

    def cursor(self, seq: int) -> int:
        return seq if seq <= self._board.last_seq() else 0

    def allowances(self, clock: Callable[[], float]) -> Allowances:
        return Allowances(clock, self._directory / ALLOWANCES, workers=self.workers, own=self._number)

    def records(self, limit: int) -> Records:
        return Records(limit, self.next_seq)

    @asynccontextmanager
    async def siblings(self, kept: Mapping[str, Kept]) -> AsyncIterator[Siblings | None]:
        siblings = Siblings(self._directory, self._number, self._board, kept)
        await siblings.start()
        try:
            yield siblings
        finally:
            await siblings.close()

    def join(self, nodes: Sequence[Node]) -> None:
        self._board.join(nodes)

    def catch_up(self, nodes: Sequence[Node]) -> None:
        self._board.catch_up(nodes)

    def be(self, state: State) -> None:
        self._board.be(state)

    def states(self) -> Mapping[State, int]:
        return Counter(self._board.states())

    @property
    def restarts(self) -> int:
        return self._board.restarts
