"""What becomes of the counters of runs: a gateway writes those of its own, and folds those of runs that have ended into one sum.

    runs/ID     a run's counters, since it began or was folded. It writes them whole, whatever lies there.
    folded      the sum of runs that have ended, and the names of the latest

At each moment what a run has written is in one of the two, never in both: one transaction moves it. A run may be folded
while it lives, if it is cut off for long. Then it goes on under another name, with what it has counted beyond that.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import msgspec

from gateway.fleet.usage.counts import Counts, Series, beyond, joined, summed
from gateway.fleet.usage.documents import MOST_FOLDED, FoldedUsage, RunUsage, folded_read, run_read, run_written

RENEW_S: Final = 120.0  # without a change
FOLD_S: Final = 600.0  # without a sign of a run, and it is folded
ENDED_S: Final = 60.0  # of one that says it has ended: another process of it may take that back
GAP_S: Final = 150.0  # without a look: what was silent may have been as lost as we were


class StoredValue(NamedTuple):
    """The value of a key, and the revision of its last change; 0 and nothing where there is no such key."""

    value: bytes = b""
    revision: int = 0


NOTHING: Final = StoredValue()


@dataclass(frozen=True, slots=True)
class FoundUsage:
    """All that lies in the registry at one moment."""

    folded: StoredValue = NOTHING
    runs: Mapping[str, StoredValue] = field(default_factory=dict)
    is_cut: bool = False  # there are more runs than are read

    @property
    def num_bytes(self) -> int:
        return len(self.folded.value) + sum(len(each.value) for each in self.runs.values())


class OwnRun(msgspec.Struct, frozen=True, kw_only=True):
    """This gateway's run, for the process that speaks for it, and the one that does so next.

    `base` is what earlier names of it had counted, as a document; `written` are those of its documents that may lie in the
    registry, by number. When `folds` runs had been folded, it was not among them.
    """

    id: str
    began_unix_s: int
    since_unix_s: int
    folds: int = 0
    base: bytes = b""
    written: dict[int, bytes] = {}

    def about_to_write(self, number: int, data: bytes, known: Mapping[int, bytes]) -> "OwnRun":
        """It may be taken or not, and folded, before that is heard: in the registry is this, or what is `known` to lie there."""
        return msgspec.structs.replace(self, written={**known, number: data})

    def counts(self, counted: Counts) -> dict[tuple[str, str, str, str], int]:
        """What is to be written, of all that this gateway has counted."""
        return beyond(counted, run_read(self.id, self.base).counts) if self.base else dict(counted)


class Resumed(NamedTuple):
    """A run that was folded, under its next name; not exact where it is not known which write of it was."""

    run: OwnRun
    is_exact: bool


def resumed(own: OwnRun, found: FoundUsage, new_id: str, now_unix_s: int, counted: Counts) -> Resumed | None:
    """The run under another name, if it has been folded. Raises FleetFailed."""
    if own.id in found.runs or not found.folded.revision:
        return None
    total = folded_read(found.folded.value)
    number = total.folded.get(own.id)
    if number is None and not (own.written and total.folds - own.folds > MOST_FOLDED):  # its name may be forgotten
        return None
    known = own.written.get(number) if number is not None else None
    # Nothing is counted twice: what was folded is at most the latest that may have been taken.
    documents = [known] if known is not None else own.written.values()
    states = [run_read(own.id, data).counts for data in documents] or [own.counts(counted)]
    was = functools.reduce(joined, states, dict[Series, int]())
    before = run_read(own.id, own.base).counts if own.base else {}
    base = run_written(
        RunUsage(gateway="", since_unix_s=own.since_unix_s, number=number or 0, counts=summed([before, was]))
    )
    run = OwnRun(id=new_id, began_unix_s=own.began_unix_s, since_unix_s=now_unix_s, folds=total.folds, base=base)
    return Resumed(run, known is not None)


def next_state(gateway: str, own: OwnRun, seen: RunUsage | None, counts: Counts, has_ended: bool) -> RunUsage:
    """What the run should have in the registry, where it has `seen` now."""
    numbers = [*own.written, seen.number if seen is not None else 0]
    return RunUsage(
        gateway=gateway,
        since_unix_s=own.since_unix_s,
        number=max(numbers) + 1,
        counts=joined(seen.counts, counts) if seen is not None else counts,
        has_ended=has_ended,
    )


def with_folded(total: FoldedUsage | None, runs: Mapping[str, RunUsage]) -> FoldedUsage:
    """The sum with more runs."""
    since_unix_s = min(run.since_unix_s for run in runs.values())
    if total is None:
        total = FoldedUsage(since_unix_s=since_unix_s)
    folded = [*total.folded.items(), *((name, run.number) for name, run in runs.items())][-MOST_FOLDED:]
    return FoldedUsage(
        since_unix_s=min(total.since_unix_s, since_unix_s),
        folds=total.folds + len(runs),
        folded=dict(folded),
        counts=summed([total.counts, *(run.counts for run in runs.values())]),
    )


class RunSightings:
    """Since when runs have been silent, by our own clock."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[int, float]] = {}  # the revision of a run, and when we saw it first
        self._looked_at = 0.0

    def silent(self, runs: Mapping[str, StoredValue], now: float) -> dict[str, float]:
        """For how many seconds each has been."""
        if now - self._looked_at > GAP_S:
            self._seen.clear()
        self._looked_at = now
        before = self._seen
        self._seen = {
            name: before[name] if before.get(name, (0, 0.0))[0] == each.revision else (each.revision, now)
            for name, each in runs.items()
        }
        return {name: now - since for name, (_, since) in self._seen.items()}
