"""Shared memory of an engine and its stages: which sequences are still wanted, and which may still write to pages.

A slot of shared memory belongs to one sequence at a time, and holds its number twice:

    slot     | number, while it is wanted | number, while its pages may be written | ...
    beats    | steps that stage 0 has taken | of stage 1 | ...

Numbers are never used twice, so an old one opens nothing in that slot. A stage writes with its lock held. To take pages
back, a caller clears the number, then takes and leaves each stage's lock. After that, writes under way have ended, and
no more come. Locks are those of POSIX on the file itself: they go with the process that holds them, however it ends.
"""

import contextlib
import fcntl
import mmap
import os
import threading
import time
from collections.abc import Iterator
from typing import Final

import numpy as np

SLOTS: Final = 4096
_WANTED: Final = 0
_PAGES: Final = 1
STUCK_S: Final = 2.0  # a stage holds its lock while it copies a layer of a chunk: milliseconds
_ASK_AGAIN_S: Final = 0.0002


class Permits:
    """The shared memory. `fd` is what other processes need of it."""

    def __init__(self, fd: int, stages: int) -> None:
        self.fd: Final = fd
        self._stages = stages
        self._changing = threading.RLock()  # a sequence may be let go of in the middle of anything, by this very thread
        memory = mmap.mmap(fd, _size(stages))
        numbers = np.frombuffer(memory, np.uint64)
        self._slots = numbers[: 2 * SLOTS].reshape(SLOTS, 2)
        self._beats = numbers[2 * SLOTS :]

    @classmethod
    def create(cls, stages: int) -> "Permits":
        fd = os.memfd_create("prfaas-stages", os.MFD_CLOEXEC)
        os.ftruncate(fd, _size(stages))
        return cls(fd, stages)

    def close(self) -> None:
        os.close(self.fd)

    # The engine's side

    def give(self, slot: int, number: int) -> None:
        self._slots[slot] = (number, 0)

    def give_pages(self, slot: int, number: int) -> None:
        self._slots[slot, _PAGES] = number

    def cancel(self, slot: int, number: int) -> None:
        """The sequence is not awaited any more. Any thread."""
        self._clear(slot, _WANTED, number)

    def withdraw_pages(self, slot: int, number: int, stuck_s: float = STUCK_S) -> list[int]:
        """Returns once no stage writes to them, but for those it names: they hold their lock, and must be ended. Any thread.

        A caller that finds them taken back asks all the same: the one that took them may still be waiting.
        """
        self._clear(slot, _PAGES, number)
        return [stage for stage in range(self._stages) if not self._passes(stage, time.monotonic() + stuck_s)]

    def _clear(self, slot: int, what: int, number: int) -> None:
        with self._changing:
            if int(self._slots[slot, what]) == number:  # the slot may be another sequence's by now
                self._slots[slot, what] = 0

    def _passes(self, stage: int, deadline_s: float) -> bool:
        while not self._try_lock(stage):
            if time.monotonic() > deadline_s:
                return False
            time.sleep(_ASK_AGAIN_S)
        fcntl.lockf(self.fd, fcntl.LOCK_UN, 1, stage)
        return True

    def _try_lock(self, stage: int) -> bool:
        try:
            fcntl.lockf(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, stage)
        except BlockingIOError:
            return False
        return True

    def beats(self, stage: int) -> int:
        return int(self._beats[stage])

    # A stage's side

    def beat(self, stage: int) -> None:
        self._beats[stage] += 1

    def wants(self, slot: int, number: int) -> bool:
        return int(self._slots[slot, _WANTED]) == number

    def has_pages(self, slot: int, number: int) -> bool:
        return int(self._slots[slot, _PAGES]) == number

    @contextlib.contextmanager
    def writing(self, stage: int) -> Iterator[None]:
        """Pages that are a sequence's now stay so inside."""
        fcntl.lockf(self.fd, fcntl.LOCK_EX, 1, stage)
        try:
            yield
        finally:
            fcntl.lockf(self.fd, fcntl.LOCK_UN, 1, stage)


def _size(stages: int) -> int:
    return (2 * SLOTS + stages) * np.dtype(np.uint64).itemsize
