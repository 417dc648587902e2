"""This gateway's usage, written for others to add, and theirs read: every few seconds, by one of its processes.

What is read lies on a board that all processes of this gateway see. So a page asks no registry, and has the last sums
where that is lost. What was counted since waits to be written: nothing of it is lost while this gateway lives.
"""

import asyncio
import logging
import threading
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Final, Protocol

import msgspec
import numpy as np

from gateway.fleet.errors import FleetFailed
from gateway.fleet.usage.board import SeenUsage, UsageBoard
from gateway.fleet.usage.counts import Counts, accounts_of, add, counts_of, joined
from gateway.fleet.usage.documents import FoldedUsage, RunUsage, folded_read, folded_written, run_read, run_written
from gateway.fleet.usage.runs import (
    ENDED_S,
    FOLD_S,
    RENEW_S,
    FoundUsage,
    OwnRun,
    RunSightings,
    next_state,
    resumed,
    with_folded,
)
from gateway.telemetry.tenant_usage import TenantUsage
from membership.backoff import Backoff
from transport.threads import in_daemon_thread

log = logging.getLogger("prfaas.gateway.fleet")

CYCLE_S: Final = 5.0
MOST_PAUSE_S: Final = 60.0
WRITTEN_BYTES_PER_S: Final = 16 << 10  # in the mean; etcd keeps all versions until it is compacted
READ_BYTES_PER_S: Final = 256 << 10
LATE_S: Final = 15.0  # after it was due, what was read is no longer that of now
FAREWELL_S: Final = 2.0
LOOK_S: Final = 0.05
ID_CHARS: Final = 16  # of a run's name
MOST_LOGGED: Final = 256
TRIES: Final = 4  # of the last write
MOST_AT_ONCE: Final = 64  # runs that are folded; etcd takes 128 changes at once
MOST_COUNTS: Final = 1 << 16  # of them together, or one run more


class UsageStore(Protocol):
    """Where usage lies. Every method may block, and raises FleetFailed."""

    def read(self, own: str) -> FoundUsage: ...

    def write(self, run: str, value: bytes, found: FoundUsage) -> bool: ...

    def fold(self, runs: Collection[str], folded: bytes, found: FoundUsage) -> bool: ...

    def close(self) -> None: ...


class UsageTelemetry(Protocol):
    """What hears how that goes."""

    def fleet_failed(self, about: str, reason: str) -> None: ...

    def usage_moved(self, way: str, size: int) -> None: ...

    def usage_read(self, runs: int, unix_s: float) -> None: ...


class UsageDuty(Protocol):
    """Whether this process does so for all of its gateway."""

    def __call__(self) -> bool: ...

    def give_up(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageClocks:
    """Of this machine: one that only goes on, the same in all its processes, and that of the day."""

    now: Callable[[], float]
    unix_s: Callable[[], float]


class UsageReport(msgspec.Struct, frozen=True, kw_only=True):
    """As operators see it. `complete`: the sums of the other gateways are at most seconds old, and none is left out."""

    gateway: str
    gateways: int
    complete: bool
    since_unix_s: int | None = None
    frozen_since_unix_s: int | None = None
    data: list[TenantUsage]


class FleetUsage:
    """Of the gateway `name`, whose own counters `counted` gives."""

    def __init__(
        self,
        name: str,
        store: UsageStore,
        board: UsageBoard,
        counted: Callable[[], Iterable[TenantUsage]],
        clocks: UsageClocks,
        telemetry: UsageTelemetry,
        duty: UsageDuty,
    ) -> None:
        self._name = name
        self._store = store
        self._board = board
        self._counted = counted
        self._clocks = clocks
        self._telemetry = telemetry
        self._duty = duty
        self._sightings = RunSightings()
        self._pauses = Backoff(np.random.default_rng(), CYCLE_S, MOST_PAUSE_S)
        self._stepping = threading.Lock()
        self._wrote_at = 0.0
        self._refused_at: float | None = None  # the first write since the last one that was taken
        self._latest: tuple[bytes, RunUsage] | None = None  # of our documents, and what it says
        self._latest_folds: tuple[bytes, int] | None = None  # of the sum
        self._go_on = dict[str, int]()  # revisions of runs that did not say they had ended
        self._is_failing = self._has_left = False
        self._unreadable = set[str]()  # runs that were logged

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:  # noqa: ASYNC110 time is what it waits for
            await asyncio.sleep(await self.look() if self._duty() else CYCLE_S)

    async def look(self) -> float:
        """Writes and reads once; returns after how many seconds to look again."""
        try:
            pause_s = await in_daemon_thread("usage", self.step)
        except (FleetFailed, OSError) as failure:
            self._failed(failure)
            return self._pauses.failed()
        self._is_failing = False
        self._pauses.succeeded()
        return pause_s

    async def farewell(self) -> None:
        """Writes what was counted last. The process that does so last for its gateway has counted all of it."""
        try:
            async with asyncio.timeout(FAREWELL_S):
                while not self._duty():  # noqa: ASYNC110 another process ends, too, or goes on and writes ours
                    await asyncio.sleep(LOOK_S)
                await in_daemon_thread("usage", lambda: self.step(has_ended=True))
        except (FleetFailed, OSError) as failure:  # among them the end of the time for it
            if self._duty():
                self._failed(failure)
        self._has_left = True
        self._telemetry.usage_read(0, 0.0)  # workers' values are added up
        self._duty.give_up()

    def close(self) -> None:
        """After `farewell`."""
        self._store.close()

    def step(self, has_ended: bool = False) -> float:
        """Reads, writes and folds once. Blocks. Raises FleetFailed, OSError."""
        with self._stepping:  # one thread of this process at a time
            for _ in range(TRIES if has_ended else 1):
                seen = self._board.seen()
                found = self._store.read(seen.own.id if seen is not None else "")
                self._telemetry.usage_moved("read", found.num_bytes)
                counted = counts_of(self._counted())
                own = self._own(seen, found, counted)
                size = self._written(own, found, counted, has_ended)
                if size is not None:
                    break
                self._telemetry.fleet_failed("usage", "contended")
            self._telemetry.usage_read(len(found.runs), self._clocks.unix_s())
            if found.is_cut:
                self._telemetry.fleet_failed("usage", "too_many")
            if not has_ended:
                self._fold(own.id, found)
            return pause_s(found.num_bytes, size or 0)

    def report(self) -> UsageReport:
        """What all gateways have counted together, as far as this one knows. Blocks."""
        ours = counts_of(self._counted())
        seen = self._seen()
        if seen is None:
            return UsageReport(gateway="all", complete=False, gateways=1, data=accounts_of(ours))
        ours = seen.own.counts(ours)
        if (written := self._run_of(seen, seen.own.id)) is not None:
            ours = joined(written.counts, ours)
        since_unix_s, gateways, is_whole, sums = seen.own.began_unix_s, 1, not seen.is_cut, dict(ours)
        for each in self._others(seen):
            if each is None:
                is_whole = False
                continue
            since_unix_s = min(since_unix_s, each.since_unix_s)
            gateways += isinstance(each, RunUsage) and not each.has_ended
            add(sums, each.counts)
        age_s = self._clocks.now() - seen.read_at
        is_fresh = bool(seen.read_at) and age_s <= seen.due_s + LATE_S and not seen.is_refused
        return UsageReport(
            gateway="all",
            since_unix_s=since_unix_s,
            complete=is_fresh and is_whole,
            frozen_since_unix_s=None if is_fresh or not seen.read_at else int(self._clocks.unix_s() - age_s),
            gateways=gateways,
            data=accounts_of(sums),
        )

    def own_report(self) -> UsageReport:
        """What this gateway has counted, all its workers together. Blocks."""
        seen = self._seen()
        return UsageReport(
            gateway="self",
            since_unix_s=seen.own.began_unix_s if seen is not None else None,
            complete=True,
            gateways=1,
            data=accounts_of(counts_of(self._counted())),
        )

    def _own(self, seen: SeenUsage | None, found: FoundUsage, counted: Counts) -> OwnRun:
        """This gateway's run, under another name from now on if it was folded meanwhile."""
        now_unix_s = int(self._clocks.unix_s())
        if seen is None:
            folds = self._folds(found, 0)
            return OwnRun(id=new_id(), began_unix_s=now_unix_s, since_unix_s=now_unix_s, folds=folds)
        again = resumed(seen.own, found, new_id(), now_unix_s, counted)
        if again is None:
            is_there = seen.own.id in found.runs
            return msgspec.structs.replace(seen.own, folds=self._folds(found, seen.own.folds)) if is_there else seen.own
        self._telemetry.fleet_failed("usage", "folded" if again.is_exact else "folded_unknown")
        log.warning("other gateways have taken this one for ended: its usage goes on under another name")
        return again.run

    def _written(self, own: OwnRun, found: FoundUsage, counted: Counts, has_ended: bool) -> int | None:
        """Writes our run where it is not as it should be: so many bytes. None: it has changed since it was read."""
        now = self._clocks.now()
        known = found.runs.get(own.id)
        seen = self._own_state(own.id, known.value) if known is not None else None
        state = next_state(self._name, own, seen, own.counts(counted), has_ended)
        is_due = not has_ended and (now - self._wrote_at >= RENEW_S or self._refused_at is not None)
        if seen is not None and not is_due and seen.counts == state.counts and seen.has_ended == has_ended:
            self._show(own, found, now, 0)
            return 0
        if seen is None and has_ended and not state.counts:
            return 0
        data = run_written(state)
        # Before it is sent: if no answer comes, it may have been taken, and folded.
        there = {seen.number: known.value} if seen is not None and known is not None else {}
        own = own.about_to_write(state.number, data, there)
        self._show(own, found, now, len(data))
        try:
            if not self._store.write(own.id, data, found):
                return None
        except FleetFailed:
            if self._refused_at is None:
                self._refused_at = now
                self._show(own, found, now, len(data))
            raise
        self._refused_at = None
        self._wrote_at, self._latest = now, (data, state)
        self._telemetry.usage_moved("written", len(data))
        return len(data)

    def _folds(self, found: FoundUsage, before: int) -> int:
        """How many runs the sum has; `before` where it cannot be read."""
        if not found.folded.revision:
            return 0
        if self._latest_folds is None or self._latest_folds[0] != found.folded.value:
            try:
                self._latest_folds = (found.folded.value, folded_read(found.folded.value).folds)
            except FleetFailed:  # it is told of where runs are folded
                return before
        return self._latest_folds[1]

    def _own_state(self, name: str, value: bytes) -> RunUsage | None:
        if self._latest is None or self._latest[0] != value:
            run = self._run(name, value)
            self._latest = (value, run) if run is not None else None
        return self._latest[1] if self._latest is not None else None

    def _show(self, own: OwnRun, found: FoundUsage, now: float, size: int) -> None:
        if self._has_left:  # this thread was late, and another process speaks for this gateway now
            raise FleetFailed("late", "another process writes what this one has counted")
        self._board.show(
            SeenUsage(
                own=own,
                folded=found.folded.value,
                runs={name: each.value for name, each in found.runs.items()},
                is_cut=found.is_cut,
                is_refused=self._refused_at is not None,
                read_at=now if self._refused_at is None else self._refused_at,
                due_s=pause_s(found.num_bytes, size),
            )
        )

    def _fold(self, own_id: str, found: FoundUsage) -> None:
        """Folds runs that have ended, if there are some and no other gateway is faster."""
        ended, num_counts = dict[str, RunUsage](), 0
        self._go_on = {name: each for name, each in self._go_on.items() if name in found.runs}
        for name, silent_s in self._sightings.silent(found.runs, self._clocks.now()).items():
            value, revision = found.runs[name]
            if name == own_id or silent_s < (FOLD_S if self._go_on.get(name) == revision else ENDED_S):
                continue
            run = self._run(name, value)
            if run is not None and silent_s < (ENDED_S if run.has_ended else FOLD_S):
                self._go_on[name] = revision
            elif run is not None:
                ended[name], num_counts = run, num_counts + len(run.counts)
                if len(ended) == MOST_AT_ONCE or num_counts > MOST_COUNTS:
                    break
        if not ended:
            return
        total = folded_read(found.folded.value) if found.folded.revision else None
        data, is_whole = folded_written(with_folded(total, ended))
        if self._store.fold(ended, data, found):
            self._telemetry.usage_moved("written", len(data))
            for name, run in ended.items():
                log.info("run %s of gateway %s has ended: its usage is folded", name, run.gateway)
            if not is_whole:
                self._telemetry.fleet_failed("usage", "too_many_tenants")

    def _others(self, seen: SeenUsage) -> Iterator[RunUsage | FoldedUsage | None]:
        """One after the other: all at once take far more memory. None: one that cannot be read."""
        for name in seen.runs:
            if name != seen.own.id:
                yield self._run_of(seen, name)
        if seen.folded:
            try:
                yield folded_read(seen.folded)
            except FleetFailed as failure:
                self._failed(failure)
                yield None

    def _run_of(self, seen: SeenUsage, name: str) -> RunUsage | None:
        return self._run(name, seen.runs[name]) if name in seen.runs else None

    def _run(self, name: str, value: bytes) -> RunUsage | None:
        """None: it cannot be read. It stays as it is, unless it is our own."""
        try:
            return run_read(name, value)
        except FleetFailed as failure:
            self._telemetry.fleet_failed("usage", failure.reason)
            if name not in self._unreadable and len(self._unreadable) < MOST_LOGGED:
                self._unreadable.add(name)
                log.warning("%s", failure)
            return None

    def _seen(self) -> SeenUsage | None:
        try:
            return self._board.seen()
        except (FleetFailed, OSError) as failure:
            self._failed(failure)
            return None

    def _failed(self, failure: FleetFailed | OSError) -> None:
        late = "late" if isinstance(failure, TimeoutError) else "not_shared"
        self._telemetry.fleet_failed("usage", failure.reason if isinstance(failure, FleetFailed) else late)
        if not self._is_failing:
            self._is_failing = True
            log.warning("tenants' usage cannot be added up with other gateways' now: %s", failure or "no answer")


def pause_s(read_bytes: int, written_bytes: int) -> float:
    """Until the next look, so that neither etcd nor this machine has much to do."""
    return min(MOST_PAUSE_S, max(CYCLE_S, read_bytes / READ_BYTES_PER_S, written_bytes / WRITTEN_BYTES_PER_S))


def new_id() -> str:
    """Of a run: no other one's."""
    return uuid.uuid4().hex[:ID_CHARS]
