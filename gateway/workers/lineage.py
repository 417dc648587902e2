"""What generations of one gateway share while one replaces another: a folder that goes from each to its successor.

    allowances    what tenants have taken of their limits        sessions    of operators' browsers
    metrics       what has been counted, usage too               drained     links that operators have drained
    tally         what was asked for                             places-N    of a generation: its places N, N+1 …, locked
    duty          locked by the process that speaks for this gateway with others
    usage         what other gateways of its fleet have counted, and the name of this one's counters

Every process has a place of its own: no other process writes to its columns or its metrics files. A
generation whose lock can be had has ended, with its workers, however that went. The one in charge clears its places then, for
those to come.
"""

import fcntl
import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import Final, Self

from gateway.ratelimit.limiter import ROWS, TenantLimiters
from gateway.telemetry.load_report import KEPT
from gateway.telemetry.metrics import forget_gauges
from gateway.workers.shared_samples import SharedSamples
from node.process.owned_names import OwnedDirectory, create_file

log = logging.getLogger("prfaas.gateway.lineage")

FORMAT: Final = f"2.{ROWS}.{KEPT}"  # of the files: generations of another one share nothing
METRICS: Final = "metrics"
TALLY: Final = "tally"
DRAINED: Final = "drained"
SESSIONS: Final = "sessions"
DUTY: Final = "duty"
USAGE: Final = "usage"
ALLOWANCES: Final = "allowances"
PLACES: Final = "places-"
SPARE_PLACES: Final = 12  # beside four generations' of the first one's size


class Lineage:
    """The folder. The last generation that was in charge removes it."""

    def __init__(self, owned: OwnedDirectory) -> None:
        self.path = owned.path
        self._owned = owned
        self._held: dict[Path, int] = {}
        self._is_ours = False

    @classmethod
    def begun(cls, parent: Path, workers: int) -> Self:
        """That of a first generation of so many processes. Raises OSError."""
        owned = OwnedDirectory(parent)
        try:
            (owned.path / METRICS).mkdir()
            SharedSamples.create(owned.path / TALLY)
            TenantLimiters.create(owned.path / ALLOWANCES, 4 * workers + SPARE_PLACES)
        except BaseException:
            owned.close()
            raise
        lineage = cls(owned)
        lineage.take_over()
        return lineage

    @classmethod
    def joined(cls, path: Path, lock: int) -> Self:
        """That of a generation which goes on beside us; `lock` is its lock on the folder. Raises OSError."""
        os.stat(path / ALLOWANCES)
        return cls(OwnedDirectory.joined(path, lock))

    @property
    def lock(self) -> int:
        """The descriptor that says the folder is in use."""
        return self._owned.lock

    @property
    def locks(self) -> list[int]:
        """The locks of our places. Workers keep them, and may outlive their parent."""
        return list(self._held.values())

    def take(self, number: int) -> int | None:
        """Takes `number` places for as long as this process lives. Returns the first; None: too few are free. Raises OSError."""
        taken = set[int]()
        for file in self._generations():
            taken |= set(_places(file))
        places = TenantLimiters.places_in(self.path / ALLOWANCES)
        free = (first for first in range(places - number + 1) if taken.isdisjoint(range(first, first + number)))
        first = next(free, None)
        if first is not None:
            file = self.path / f"{PLACES}{first}-{number}"
            self._held[file] = create_file(file)
        return first

    def sweep(self, allowances: TenantLimiters) -> None:
        """Clears the places of generations that have ended; they are free then."""
        for file in self._generations():
            if file not in self._held and _is_unlocked(file):
                log.info("the generation before has ended: %s", file.name)
                for place in _places(file):
                    self.clear(allowances, place)
                file.unlink(missing_ok=True)

    def clear(self, allowances: TenantLimiters, place: int) -> None:
        """The process in this place has ended: what it had under way counts no more."""
        allowances.clear(place)
        forget_gauges(self.path / METRICS, place)

    def take_over(self) -> None:
        """We are in charge of the folder from now on."""
        self._is_ours = True

    def hand_on(self) -> None:
        """Another generation is in charge, or is about to join."""
        self._is_ours = False

    def close(self) -> None:
        """This generation has ended."""
        for fd in self._held.values():  # first: of two that end at once, each would leave the folder to the other
            os.close(fd)
        self._held.clear()
        if self._is_ours and not self._has_others():
            self._owned.close()
        else:
            self._owned.let_go()

    def _has_others(self) -> bool:
        with suppress(FileNotFoundError):  # another one is removing it
            return any(not _is_unlocked(file) for file in self._generations())
        return False

    def _generations(self) -> list[Path]:
        return sorted(self.path.glob(f"{PLACES}*"))


def _places(file: Path) -> range:
    first, _, number = file.name.removeprefix(PLACES).partition("-")
    return range(int(first), int(first) + int(number))


def _is_unlocked(file: Path) -> bool:
    try:
        fd = os.open(file, os.O_RDWR)
    except OSError:
        return False
    try:
        with suppress(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        return False
    finally:
        os.close(fd)
