"""What copies need of the device that vLLM's tensors are on: streams, and points in them. On a host all is over at once.

An accelerator does later what it is given, and keeps the order within a stream. Two streams have none between them, unless
one waits for a mark of the other. So a copy out of vLLM's blocks waits for the operator that fills them. A copy into them
waits for all that has been launched before. And the model's next step waits for copies out of blocks that it may use again.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import torch

from engine.agent.block_copies import Bytes, Index

# Why the arena is not registered with the device
REGISTERING: Final = "registering"  # not yet
REFUSED: Final = "refused"  # the driver would not
NO_DRIVER: Final = "no_driver"  # there is no such call for this device, and a host needs none


@dataclass(frozen=True, slots=True)
class Moves:
    """Byte ranges to copy, by address."""

    sources: Index
    targets: Index
    sizes: Index


class Mark(Protocol):
    """A point in what a stream has been given. Any thread."""

    def is_over(self) -> bool:
        """Whether all before it has happened."""

    def wait(self) -> None:
        """Returns when all before it has happened."""


class CopyStream(Protocol):
    """Copies beside the model, in the order in which they are given."""

    def wait_for(self, mark: Mark) -> None:
        """What is given from now on happens after `mark`."""

    def copy(self, moves: Moves) -> None:
        """Between the device and registered memory."""

    def run(self, work: Callable[[], object]) -> None:
        """Operators on the device's tensors."""

    def mark(self) -> Mark:
        """What has been given so far."""


class ArenaMemory:
    """The page arena, mapped into this process."""

    def __init__(self, data: Bytes) -> None:
        self.data: Final = data
        self.unregistered_because = REGISTERING  # "": it is registered with the device, and needs no buffer for copies

    @property
    def is_registered(self) -> bool:
        """Whether the device copies from and to it without a buffer in between."""
        return not self.unregistered_because


class CopyDevice(Protocol):
    """Where KV tensors are."""

    def stream(self) -> CopyStream:
        """Another stream."""

    def mark(self) -> Mark:
        """What the model has launched so far. Model's thread."""

    def hold_model(self, mark: Mark) -> None:
        """What the model launches from now on happens after `mark`. Does not wait. Model's thread."""

    def host_rows(self, rows: int, row_bytes: int) -> torch.Tensor:
        """Host memory that the device copies to and from quickly."""

    def adopt(self, memory: ArenaMemory) -> None:
        """Begins to register the arena, in place of the one before. Does not wait."""

    def close(self) -> None:
        """Registers nothing any more, and lets go of what it has. No copies follow."""


class Over:
    """A mark that has been passed."""

    def is_over(self) -> bool:
        return True

    def wait(self) -> None:
        return


OVER: Final = Over()


class HostStream:
    """Does what it is given at once."""

    def wait_for(self, mark: Mark) -> None:
        mark.wait()

    def copy(self, moves: Moves) -> None:
        move_now(moves)

    def run(self, work: Callable[[], object]) -> None:
        work()

    def mark(self) -> Mark:
        return OVER


class HostDevice:
    """Tensors in host memory: an operator is over when it returns."""

    def stream(self) -> CopyStream:
        return HostStream()

    def mark(self) -> Mark:
        return OVER

    def hold_model(self, mark: Mark) -> None:
        return

    def host_rows(self, rows: int, row_bytes: int) -> torch.Tensor:
        return torch.empty((rows, row_bytes), dtype=torch.uint8)

    def adopt(self, memory: ArenaMemory) -> None:
        memory.unregistered_because = NO_DRIVER

    def close(self) -> None:
        return


def move_now(moves: Moves) -> None:
    """Copies between addresses of this process."""
    for source, target, size in zip(moves.sources.tolist(), moves.targets.tolist(), moves.sizes.tolist(), strict=True):
        ctypes.memmove(target, source, size)


def address_of(memory: Bytes) -> int:
    """Where an array begins."""
    address: int = memory.__array_interface__["data"][0]
    return address


def joined(moves: list[Moves]) -> Moves:
    """All of them as one."""
    return Moves(*(np.concatenate([getattr(each, name) for each in moves]) for name in ("sources", "targets", "sizes")))
