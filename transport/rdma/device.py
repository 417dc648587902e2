"""RDMA NICs as this package sees them, and the memory that is registered with them.

`Device` and `QueuePair` are what a driver must offer: `rdma.verbs` does with NICs, `rdma.loopback` in memory. A queue pair
belongs to one thread; devices and registrations are shared by all connections of a process.
"""

import os
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import numpy as np

from transport.errors import TransportError
from transport.rdma.rails import Posting
from transport.rdma.topology import ANY_NODE, Nic, judged, numa_node_of

# Receives that a receiver keeps posted on a rail, and so the chunks that may be under way or unanswered on it.
RECEIVE_DEPTH: Final = 32
SEND_DEPTH: Final = 256
RDMA_CHUNK_BYTES: Final = 1 << 20  # what a lost rail costs, and what one checksum covers
PLACES: Final = 16  # for chunks, in the buffer of a rail
PROOF: Final = (1 << 63) - 1  # the wr_id of the write of no bytes that shows that a new rail works
NUMA_MAPS: Final = Path("/proc/self/numa_maps")


class RdmaError(TransportError):
    """The device refused, or is gone; whatever it carried must go another way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuePairEnd:
    """What the other end must know about a queue pair."""

    number: int
    packet_number: int  # the first one that it sends
    gid: str
    mtu: int  # bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkCompletion:
    """A work request that is over. `error` is empty, or the name of a verbs status."""

    wr_id: int
    error: str = ""
    number: int | None = None  # a receive: the immediate value


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of registered memory at one device."""

    local: int
    remote: int


class QueuePair(Protocol):
    """A reliable connection between two NICs, with a completion queue of its own. Every call may raise RdmaError."""

    @property
    def end(self) -> QueuePairEnd: ...

    def connect(self, peer: QueuePairEnd) -> None: ...

    def write(self, posting: Posting, local_key: int, remote_key: int) -> None: ...

    def prove(self) -> None:
        """Writes no bytes at all, as `PROOF`."""

    def receive(self) -> None:
        """Takes one more immediate value."""

    def poll(self) -> list[WorkCompletion]: ...

    def close(self) -> None:
        """Nothing is sent or taken in by it from here on; a key of its own opens nothing more. Idempotent, and raises
        nothing.
        """


class Device(Protocol):
    """One port of an RDMA device. Every call may raise RdmaError."""

    @property
    def nic(self) -> Nic: ...

    @property
    def silent_after_s(self) -> float:
        """By then a write has completed, or failed, if it ever will."""

    def active(self) -> bool: ...

    def register(self, address: int, length: int, *, open_to_peers: bool) -> Keys:
        """For our own queue pairs; with `open_to_peers` for the far ends of direct ones, too."""

    def deregister(self, keys: Keys) -> None:
        """Raises nothing."""

    def queue_pair(self) -> QueuePair:
        """A sender's: its far end can neither read nor write anything here."""

    def direct_queue_pair(self) -> QueuePair:
        """Its far end may write into all memory that is open to peers."""

    def buffer_queue_pair(self, address: int, length: int) -> tuple[QueuePair, int]:
        """Its far end may write into this memory and nothing else; with the key, which no other queue pair takes and
        which is void once this one is closed.
        """

    def close(self) -> None:
        """Gives back all registrations. Idempotent, and raises nothing."""


@dataclass(frozen=True, slots=True)
class MemoryRegion:
    """Memory that every device of the process may read and write."""

    address: int
    length: int
    numa_node: int
    keys: dict[str, Keys]  # by NIC

    def covers(self, address: int, length: int) -> bool:
        return self.address <= address and address + length <= self.address + self.length


class RdmaDevices:
    """The NICs of this process. Memory is registered once with all of them, and stays so until close().

    In direct mode peers write into all of it. Else their NICs reach the buffers of their own rails only.
    """

    def __init__(
        self,
        devices: Iterable[Device],
        *,
        direct: bool = False,
        numa_maps: Callable[[], str] = lambda: _read(NUMA_MAPS),
    ) -> None:
        self.direct = direct
        self._devices = {device.nic.name: device for device in devices}
        self._numa_maps = numa_maps
        self._regions: list[MemoryRegion] = []
        self._lock = threading.Lock()

    @property
    def nics(self) -> tuple[Nic, ...]:
        """All NICs; their places in it are what Grant and RailOffer speak of."""
        return tuple(device.nic for device in self._devices.values())

    def nics_for(self, region: MemoryRegion | None) -> tuple[Nic, ...]:
        """The same, marked as preferred or not for this memory."""
        return judged(self.nics, ANY_NODE if region is None else region.numa_node)

    def device(self, name: str) -> Device:
        return self._devices[name]

    def register(self, memory: memoryview) -> MemoryRegion:
        """Pins the memory and opens it to our NICs; what is registered already is found. Raises RdmaError.

        The memory must stay where it is until close(). Pinning takes a moment per GiB, and needs the right to lock as
        much (RLIMIT_MEMLOCK).
        """
        address = address_of(memory)
        with self._lock:
            found = self._find(address, memory.nbytes)
            if found is not None:
                return found
            keys = self._register_with_all(address, memory.nbytes)
            # Only now: untouched pages lie nowhere.
            node = numa_node_of(address, self._numa_maps())
            self._regions.append(MemoryRegion(address, memory.nbytes, node, keys))
            return self._regions[-1]

    def _register_with_all(self, address: int, length: int) -> dict[str, Keys]:
        keys: dict[str, Keys] = {}
        try:
            for name, device in self._devices.items():
                keys[name] = device.register(address, length, open_to_peers=self.direct)
        except RdmaError:
            for name, registered in keys.items():
                self._devices[name].deregister(registered)
            raise
        return keys

    def find(self, address: int, length: int) -> MemoryRegion | None:
        """The registered memory that these bytes lie in."""
        with self._lock:
            return self._find(address, length)

    def _find(self, address: int, length: int) -> MemoryRegion | None:
        return next((region for region in self._regions if region.covers(address, length)), None)

    def close(self) -> None:
        """Deregisters all memory and closes the devices; no queue pair may be left. Idempotent."""
        with self._lock:
            self._regions.clear()
            for device in self._devices.values():
                device.close()


def address_of(memory: memoryview) -> int:
    """Where a buffer lies."""
    address: int = np.frombuffer(memory, np.uint8).__array_interface__["data"][0] if memory.nbytes else 0
    return address


def random_packet_number() -> int:
    """24 bits that no earlier connection between the same queue pairs is likely to have used."""
    return int.from_bytes(os.urandom(3), "little")


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
