"""What all workers of a gateway were asked for together: a file of rings that every one of them has mapped.

    head    the life of the gateway (two numbers at random) · requests refused unread
    rings   of uncached lengths, of lengths of answers: the last sample's number · the last `KEPT` samples, each at its number

Samples are written under a lock of the file, held for microseconds, which goes with its process. What is written stays when its
worker has died. The lock's two system calls cost more than the rest of a sample, so a worker writes several samples at once:
when it is told to (`publish`), when it reads, and when it has `most_unwritten` of a kind.
"""

import secrets
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gateway.shared_array import CELL_BYTES, SharedArray
from gateway.telemetry.load_report import KEPT, OfferedLoad
from planner.decisions.plans.offered import Samples

HEAD_CELLS: Final = 3
BOOT, UNREAD = slice(0, 2), 2
RING_CELLS: Final = 1 + KEPT
LAST_SEQ, SAMPLES = 0, slice(1, None)


class SharedSamples(OfferedLoad):
    """The file, as a worker sees it."""

    def __init__(self, path: Path, *, most_unwritten: int = 1) -> None:
        """Maps a tally that has been created. Raises OSError."""
        self._array = array = SharedArray(path, np.int64)
        self._head, rings = np.split(array.cells, [HEAD_CELLS])
        uncached, outputs = rings.reshape(2, RING_CELLS)
        self._rings = _Ring(array, uncached, most_unwritten), _Ring(array, outputs, most_unwritten)
        super().__init__(self._head[BOOT].tobytes().hex(), *self._rings)

    @staticmethod
    def create(path: Path) -> None:
        """One without samples, of a new life. Raises OSError."""
        SharedArray.create(path, HEAD_CELLS + 2 * RING_CELLS, secrets.token_bytes(2 * CELL_BYTES))

    def close(self) -> None:
        """Lets go of the file; it must not be asked any more."""
        self.publish()
        del self._head, self._rings, self.uncached, self.outputs
        self._array.close()

    def publish(self) -> None:
        for ring in self._rings:
            ring.write()

    def refused_unread(self) -> None:
        with self._array.locked():
            self._head[UNREAD] += 1

    @property
    def unread(self) -> int:
        return int(self._head[UNREAD])


class _Ring:
    def __init__(self, array: SharedArray, cells: NDArray[np.int64], most_unwritten: int) -> None:
        self._array = array
        self._cells = cells
        self._samples = cells[SAMPLES]
        self._most_unwritten = min(most_unwritten, KEPT)
        self._unwritten: list[int] = []

    def add(self, value: int) -> None:
        self._unwritten.append(value)
        if len(self._unwritten) >= self._most_unwritten:
            self.write()

    def write(self) -> None:
        """Has others see what was added."""
        if not self._unwritten:
            return
        values, self._unwritten = self._unwritten, []
        with self._array.locked():
            seq = int(self._cells[LAST_SEQ]) + 1
            self._samples[np.arange(seq, seq + len(values)) % KEPT] = values
            self._cells[LAST_SEQ] = seq + len(values) - 1

    def after(self, seq: int) -> Samples:
        self.write()
        with self._array.locked():
            last_seq = int(self._cells[LAST_SEQ])
            samples = self._samples.copy()
        new = last_seq - seq if 0 <= seq <= last_seq else last_seq
        kept = min(new, KEPT)
        values = samples[np.arange(last_seq - kept + 1, last_seq + 1) % KEPT]
        return Samples(values=tuple(values.tolist()), last_seq=last_seq, missed=new - kept)
