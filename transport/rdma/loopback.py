"""RDMA in memory: NICs of a made-up fabric, for tests and for machines without any.

Writes are copies between buffers of this process. Tests can inject the failures of a real fabric: `unplug` a NIC (its
own end notices at once, the far one after the retries), make it `swallow` packets (no end is told; the sender's retries
run out), `stick` it (it never says what became of a write), or `corrupt` a byte on the way. As with the real thing, any
failure ends the queue pair, posted work is flushed, and the far end learns nothing.
"""

import ctypes
import itertools
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Final

from transport.rdma.device import (
    PROOF,
    RECEIVE_DEPTH,
    SEND_DEPTH,
    Keys,
    QueuePair,
    QueuePairEnd,
    RdmaError,
    WorkCompletion,
)
from transport.rdma.rails import Posting, RailWrite
from transport.rdma.topology import ANY_NODE, Nic

MTU: Final = 4096
RETRIES_S: Final = 0.05  # until a sender gives up
SILENT_AFTER_S: Final = 0.5


COMMON: Final = 0  # the domain of what a device registers for all of its queue pairs


@dataclass(frozen=True, slots=True)
class _Memory:
    """Registered memory: the queue pairs of its domain reach it, and their far ends may write if it is open."""

    address: int
    length: int
    domain: int
    is_open: bool

    def covers(self, address: int, length: int) -> bool:
        return self.address <= address and address + length <= self.address + self.length


@dataclass(slots=True)
class LoopbackFabric:
    """All NICs, queue pairs and keys there are."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    numbers: "itertools.count[int]" = field(default_factory=lambda: itertools.count(0x100))
    queue_pairs: "dict[int, LoopbackQueuePair]" = field(default_factory=dict)
    unplugged: set[str] = field(default_factory=set)
    swallowing: set[str] = field(default_factory=set)
    stuck: set[str] = field(default_factory=set)  # NICs that take writes, and never say what became of them
    corrupt_writes: int = 0  # so many of the next writes arrive with a wrong byte
    lose_after: dict[str, int] = field(default_factory=dict)  # NIC -> writes until it starts to swallow

    def device(self, name: str, fabric: str = "loop", numa_node: int = ANY_NODE) -> "LoopbackDevice":
        return LoopbackDevice(self, Nic(name=name, fabric=fabric, numa_node=numa_node))

    def unplug(self, nic: str) -> None:
        with self.lock:
            self.unplugged.add(nic)

    def swallow(self, nic: str, after_writes: int = 0) -> None:
        """Loses all packets of a NIC, from its `after_writes`-th next write on."""
        with self.lock:
            if after_writes:
                self.lose_after[nic] = after_writes
            else:
                self.swallowing.add(nic)

    def stick(self, nic: str) -> None:
        """From now on the NIC reports no completion of any write."""
        with self.lock:
            self.stuck.add(nic)

    def mend(self, nic: str) -> None:
        with self.lock:
            self.unplugged.discard(nic)
            self.swallowing.discard(nic)
            self.stuck.discard(nic)
            self.lose_after.pop(nic, None)

    def count_write(self, nic: str) -> None:
        if nic in self.lose_after:
            self.lose_after[nic] -= 1
            if self.lose_after[nic] <= 0:
                del self.lose_after[nic]
                self.swallowing.add(nic)


class LoopbackDevice:
    """One made-up NIC."""

    def __init__(self, fabric: LoopbackFabric, nic: Nic) -> None:
        self.fabric = fabric
        self.nic = nic
        self.memory: dict[int, _Memory] = {}
        self.open_queue_pairs = 0
        self.registrations = 0

    @property
    def silent_after_s(self) -> float:
        return SILENT_AFTER_S

    def active(self) -> bool:
        return self.nic.name not in self.fabric.unplugged

    def register(self, address: int, length: int, *, open_to_peers: bool) -> Keys:
        key = self._enter(_Memory(address, length, COMMON, open_to_peers))
        return Keys(key, key)

    def _enter(self, memory: _Memory) -> int:
        with self.fabric.lock:
            key = next(self.fabric.numbers)
            self.memory[key] = memory
            self.registrations += 1
        return key

    def deregister(self, keys: Keys) -> None:
        with self.fabric.lock:
            self.memory.pop(keys.local, None)

    def queue_pair(self) -> QueuePair:
        return LoopbackQueuePair(self, COMMON, lets_write=False)

    def direct_queue_pair(self) -> QueuePair:
        return LoopbackQueuePair(self, COMMON, lets_write=True)

    def buffer_queue_pair(self, address: int, length: int) -> tuple[QueuePair, int]:
        domain = next(self.fabric.numbers)
        key = self._enter(_Memory(address, length, domain, is_open=True))
        return LoopbackQueuePair(self, domain, lets_write=True, own_key=key), key

    def close(self) -> None:
        with self.fabric.lock:
            self.memory.clear()


class LoopbackQueuePair:
    """One end of a made-up reliable connection."""

    def __init__(self, device: LoopbackDevice, domain: int, *, lets_write: bool, own_key: int | None = None) -> None:
        self.device = device
        self._domain = domain
        self._lets_write = lets_write  # its far end
        self._own_key = own_key
        self.broken = False
        self._fabric = device.fabric
        self._peer: QueuePairEnd | None = None
        self._completions: deque[tuple[float, WorkCompletion]] = deque()
        self._receives = 0
        self._in_queue = 0
        with self._fabric.lock:
            self.number = next(self._fabric.numbers)
            self._fabric.queue_pairs[self.number] = self
            device.open_queue_pairs += 1

    @property
    def end(self) -> QueuePairEnd:
        return QueuePairEnd(number=self.number, packet_number=0, gid=self.device.nic.name, mtu=MTU)

    def connect(self, peer: QueuePairEnd) -> None:
        self._peer = peer

    def write(self, posting: Posting, local_key: int, remote_key: int) -> None:
        with self._fabric.lock:
            if self._peer is None:
                raise RdmaError("not connected")
            if self._in_queue >= SEND_DEPTH + 2:
                raise RdmaError("the send queue is full")
            if posting.write.length:
                self._fabric.count_write(self.device.nic.name)
            self._in_queue += 1
            late, error = (0.0, "wr_flush_err") if self.broken else self._carry(posting, local_key, remote_key)
            self.broken = self.broken or bool(error)
            if posting.signalled or error:
                due = max(time.monotonic() + late, self._completions[-1][0] if self._completions else 0.0)
                self._completions.append((due, WorkCompletion(wr_id=posting.wr_id, error=error)))
            else:
                self._in_queue -= 1

    def prove(self) -> None:
        self.write(Posting(PROOF, RailWrite(0, 0, 0), True), 0, 0)

    def receive(self) -> None:
        with self._fabric.lock:
            if self._receives >= RECEIVE_DEPTH:
                raise RdmaError("the receive queue is full")
            self._receives += 1

    def poll(self) -> list[WorkCompletion]:
        done = []
        with self._fabric.lock:
            while self._completions and self._completions[0][0] <= time.monotonic():
                done.append(self._completions.popleft()[1])
                self._in_queue -= done[-1].number is None
        return done

    def close(self) -> None:
        with self._fabric.lock:
            if self._fabric.queue_pairs.pop(self.number, None) is not None:
                self.device.open_queue_pairs -= 1
            if self._own_key is not None:
                self.device.memory.pop(self._own_key, None)
            self.broken = True

    def _carry(self, posting: Posting, local_key: int, remote_key: int) -> tuple[float, str]:
        """(how long it takes, error) of a write that is posted now; the lock is held."""
        fabric, mine, peer = self._fabric, self.device.nic.name, self._peer
        assert peer is not None
        far = fabric.queue_pairs.get(peer.number)
        if mine in fabric.stuck:
            return float("inf"), ""
        if mine in fabric.unplugged:
            return 0.0, "loc_qp_op_err"
        if far is None or far.broken or {mine, far.device.nic.name} & (fabric.unplugged | fabric.swallowing):
            return RETRIES_S, "retry_exc_err"
        write = posting.write
        if not far._lets_write:
            far.broken = True
            return 0.0, "rem_inv_req_err"
        if write.length and not (
            self._reaches(local_key, write.source, write.length)
            and far._reaches(remote_key, write.target, write.length, of_peer=True)
        ):
            far.broken = True
            return 0.0, "rem_access_err"
        if posting.number is not None:
            if not far._receives:
                return RETRIES_S, "rnr_retry_exc_err"
            far._receives -= 1
        ctypes.memmove(write.target, write.source, write.length)
        if write.length and fabric.corrupt_writes:
            fabric.corrupt_writes -= 1
            ctypes.memset(write.target, (ctypes.c_ubyte.from_address(write.target).value + 1) & 0xFF, 1)
        if posting.number is not None:
            far._completions.append((0.0, WorkCompletion(wr_id=0, number=posting.number)))
        return 0.0, ""

    def _reaches(self, key: int, address: int, length: int, *, of_peer: bool = False) -> bool:
        memory = self.device.memory.get(key)
        if memory is None or memory.domain != self._domain or (of_peer and not memory.is_open):
            return False
        return memory.covers(address, length)
