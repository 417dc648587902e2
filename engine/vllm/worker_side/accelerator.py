"""The device port on accelerators, by PyTorch's streams and events.

CUDA and ROCm copy straight between blocks and the arena once its memory is registered with the driver, many ranges by
one call. Until then, where that fails, and on other accelerators, copies go through pinned buffers.
"""

import ctypes
import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch

from engine.vllm.worker_side.device import (
    NO_DRIVER,
    REFUSED,
    REGISTERING,
    ArenaMemory,
    CopyDevice,
    CopyStream,
    HostDevice,
    Mark,
    Moves,
    address_of,
)

log = logging.getLogger(__name__)

CHUNK_BYTES: Final = 256 << 20  # the driver keeps launches waiting while it registers one
POPULATE_WRITE: Final = 23  # MADV_POPULATE_WRITE
CLOSE_TIMEOUT_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class DirectCopies:
    """A driver's way to copy between device and host memory without a buffer.

    `batch_copy` queues copies on the current stream: addresses of sources, of targets, and sizes. `register` makes
    `size` bytes at an address known to the driver, and says whether it could; `unregister` undoes it.
    """

    batch_copy: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]
    register: Callable[[int, int], bool]
    unregister: Callable[[int], object]


def device_of(device: torch.device, direct: DirectCopies | None = None) -> CopyDevice:
    """The port of a tensor's device."""
    return HostDevice() if device.type == "cpu" else AcceleratorDevice(device, direct)


class EventMark:
    """A PyTorch event that was recorded. `keeps`: what must not go before it is over."""

    def __init__(self, event: Any, keeps: tuple[torch.Tensor, ...] = ()) -> None:
        self.event: Final = event
        self.keeps: Final = keeps

    def is_over(self) -> bool:
        over: bool = self.event.query()
        return over

    def wait(self) -> None:
        self.event.synchronize()


class AcceleratorStream:
    """A PyTorch stream."""

    def __init__(self, device: torch.device, direct: DirectCopies | None) -> None:
        self._device = device
        self._direct = direct
        self._stream = torch.Stream(device)
        self._lists: tuple[torch.Tensor, ...] = ()  # of addresses and sizes, since the last mark

    def wait_for(self, mark: Mark) -> None:
        if isinstance(mark, EventMark):
            self._stream.wait_event(mark.event)

    def copy(self, moves: Moves) -> None:
        assert self._direct is not None
        lists = tuple(map(torch.from_numpy, (moves.sources, moves.targets, moves.sizes)))
        self._lists = (*self._lists, *lists)
        torch.accelerator.set_device_index(self._device)  # of this thread, for a driver that asks for it
        with self._stream:
            self._direct.batch_copy(*lists)

    def run(self, work: Callable[[], object]) -> None:
        with self._stream:
            work()

    def mark(self) -> Mark:
        lists, self._lists = self._lists, ()
        return _recorded(self._device, self._stream, lists)


class AcceleratorDevice:
    """A GPU, or another device that PyTorch has streams for."""

    def __init__(self, device: torch.device, direct: DirectCopies | None) -> None:
        self._device = device
        self._direct = direct
        self._registered: ArenaMemory | None = None
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def stream(self) -> CopyStream:
        return AcceleratorStream(self._device, self._direct)

    def mark(self) -> Mark:
        return _recorded(self._device, torch.accelerator.current_stream(self._device))

    def hold_model(self, mark: Mark) -> None:
        if isinstance(mark, EventMark):
            torch.accelerator.current_stream(self._device).wait_event(mark.event)

    def host_rows(self, rows: int, row_bytes: int) -> torch.Tensor:
        return torch.empty((rows, row_bytes), dtype=torch.uint8, pin_memory=self._device.type == "cuda")

    def adopt(self, memory: ArenaMemory) -> None:
        if self._direct is None:
            memory.unregistered_because = NO_DRIVER
            return
        arguments = (memory, self._direct, self._thread)
        self._thread = threading.Thread(target=self._register, args=arguments, name="prfaas-register", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        if self._thread is not None:
            self._thread.join(CLOSE_TIMEOUT_S)
            if not self._thread.is_alive():
                self._let_go()

    # The registering thread

    def _register(self, memory: ArenaMemory, direct: DirectCopies, before: threading.Thread | None) -> None:
        if before is not None:
            before.join()
        self._let_go()  # of an agent that is gone, with whose pages nothing is copied any more
        torch.accelerator.set_device_index(self._device)
        address, size = address_of(memory.data), memory.data.size
        if register_in_chunks(address, size, direct, stop=self._closing.is_set):
            self._registered = memory
            memory.unregistered_because = ""
        else:
            memory.unregistered_because = REFUSED
            log.warning("the page arena cannot be registered with the device: copies go through buffers")

    def _let_go(self) -> None:
        memory, self._registered = self._registered, None
        if memory is not None and self._direct is not None:
            memory.unregistered_because = REGISTERING  # and nothing is copied from or to it any more
            for start, _ in chunks(address_of(memory.data), memory.data.size):
                self._direct.unregister(start)


def register_in_chunks(
    address: int,
    size: int,
    direct: DirectCopies,
    *,
    stop: Callable[[], bool] = lambda: False,
    populate: Callable[[int, int], object] | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> bool:
    """Registers memory piece by piece: all of it, or, where one piece fails or it is told to stop, nothing."""
    done: list[int] = []
    for start, length in chunks(address, size, chunk_bytes):
        (populate or populate_now)(start, length)
        if stop() or not direct.register(start, length):
            for each in reversed(done):
                direct.unregister(each)
            return False
        done.append(start)
    return True


def chunks(address: int, size: int, chunk_bytes: int = CHUNK_BYTES) -> Iterator[tuple[int, int]]:
    """(address, bytes) of the pieces in which memory is registered."""
    for start in range(0, size, chunk_bytes):
        yield address + start, min(chunk_bytes, size - start)


def populate_now(address: int, size: int) -> None:
    """Pages are there before the driver asks for each of them. Kernels before 5.14 refuse; then the driver does ask."""
    ctypes.CDLL(None).madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), POPULATE_WRITE)


def _recorded(device: torch.device, stream: Any, keeps: tuple[torch.Tensor, ...] = ()) -> EventMark:
    event = torch.Event(device, blocking=True)
    stream.record_event(event)
    return EventMark(event, keeps)
