"""An accelerator that does nothing before it must: only what has been waited for has happened.

Its memory is the host's. A stream is a list of what it was given. Waiting for a mark does what leads to it, in that order,
and of other streams what the list waits for. All else happens as late as it can, so a wait that is missing shows.
"""

import threading
from collections.abc import Callable

import torch

from engine.vllm.worker_side.device import REGISTERING, ArenaMemory, CopyStream, Mark, Moves, move_now


class LazyStream:
    """Given work, by number; `done` of it has happened."""

    def __init__(self, device: "LazyDevice") -> None:
        self._device = device
        self._work: list[Callable[[], object]] = []
        self.done = 0

    def wait_for(self, mark: Mark) -> None:
        if self._device.keeps_order:
            self.run(mark.wait)

    def copy(self, moves: Moves) -> None:
        self.run(lambda: move_now(moves))

    def run(self, work: Callable[[], object]) -> None:
        with self._device.lock:
            self._work.append(work)

    def mark(self) -> Mark:
        with self._device.lock:
            return LazyMark(self, len(self._work))

    def do(self, until: int) -> None:
        """Whatever leads to a mark."""
        self._device.may_work.wait(60.0)
        with self._device.lock:
            while self.done < until:
                self.done += 1
                self._work[self.done - 1]()


class LazyMark:
    def __init__(self, stream: LazyStream, number: int) -> None:
        self._stream = stream
        self._number = number

    def is_over(self) -> bool:
        return self._stream.done >= self._number

    def wait(self) -> None:
        self._stream.do(self._number)


class LazyDevice:
    """`registers`: whether the arena can be; `keeps_order`: not, to show what a missing wait does."""

    def __init__(self, *, registers: bool = True, keeps_order: bool = True) -> None:
        self.lock = threading.RLock()
        self.may_work = threading.Event()  # else it hangs
        self.may_work.set()
        self.keeps_order = keeps_order
        self._registers = registers
        self.model = LazyStream(self)

    def stream(self) -> CopyStream:
        return LazyStream(self)

    def mark(self) -> Mark:
        return self.model.mark()

    def hold_model(self, mark: Mark) -> None:
        self.model.wait_for(mark)

    def host_rows(self, rows: int, row_bytes: int) -> torch.Tensor:
        return torch.empty((rows, row_bytes), dtype=torch.uint8)

    def adopt(self, memory: ArenaMemory) -> None:
        memory.unregistered_because = "" if self._registers else REGISTERING

    def close(self) -> None:
        return

    # As a model uses it

    def launch(self, work: Callable[[], object]) -> None:
        """An operator of the model."""
        self.model.run(work)

    def synchronize(self) -> None:
        """The model's stream, and what it waits for."""
        self.model.mark().wait()
