"""What all workers of a gateway were asked for together: a file of rings that every one of them has mapped.

    head    the life of the gateway (two numbers at random) · requests refused unread
    rings   of uncached lengths, of lengths of answers: the last sample's number · the last `KEPT` samples, each at its number

A sample is added under a lock of the file, held for microseconds, which goes with its process; it stays when its worker has died.
"""

import fcntl
import mmap
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import numpy as np

from gateway.telemetry.load_report import KEPT, Offered
from gateway.workers.shared_counters import CELL_BYTES
from planner.decisions.offered import Samples

HEAD_CELLS: Final = 3
BOOT, UNREAD = slice(0, 2), 2
RING_CELLS: Final = 1 + KEPT
LAST_SEQ, SAMPLES = 0, slice(1, None)


class Tally(Offered):
    """The file, as a worker sees it."""

    def __init__(self, path: Path) -> None:
        """Maps a tally that has been created. Raises OSError."""
        self._fd = os.open(path, os.O_RDWR)
        self._map = mmap.mmap(self._fd, 0)
        cells = np.frombuffer(self._map, np.int64)
        self._head = cells[:HEAD_CELLS]
        uncached, outputs = cells[HEAD_CELLS:].reshape(2, RING_CELLS)
        super().__init__(self._head[BOOT].tobytes().hex(), _Ring(self._fd, uncached), _Ring(self._fd, outputs))

    @staticmethod
    def create(path: Path) -> None:
        """One without samples, of a new life. Raises OSError."""
        with path.open("xb") as file:
            file.write(secrets.token_bytes(2 * CELL_BYTES))
            file.truncate(CELL_BYTES * (HEAD_CELLS + 2 * RING_CELLS))

    def close(self) -> None:
        """Lets go of the file; it must not be asked any more."""
        del self._head, self.uncached, self.outputs
        self._map.close()
        os.close(self._fd)

    def refused_unread(self) -> None:
        with _locked(self._fd):
            self._head[UNREAD] += 1

    @property
    def unread(self) -> int:
        return int(self._head[UNREAD])


class _Ring:
    def __init__(self, fd: int, cells: np.ndarray[tuple[int], np.dtype[np.int64]]) -> None:
        self._fd = fd
        self._cells = cells
        self._samples = cells[SAMPLES]

    def add(self, value: int) -> None:
        with _locked(self._fd):
            seq = int(self._cells[LAST_SEQ]) + 1
            self._samples[seq % KEPT] = value
            self._cells[LAST_SEQ] = seq

    def after(self, seq: int) -> Samples:
        with _locked(self._fd):
            last_seq = int(self._cells[LAST_SEQ])
            samples = self._samples.copy()
        new = last_seq - seq if 0 <= seq <= last_seq else last_seq
        kept = min(new, KEPT)
        values = samples[np.arange(last_seq - kept + 1, last_seq + 1) % KEPT]
        return Samples(values=tuple(values.tolist()), last_seq=last_seq, missed=new - kept)


@contextmanager
def _locked(fd: int) -> Iterator[None]:
    fcntl.lockf(fd, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.lockf(fd, fcntl.LOCK_UN)
