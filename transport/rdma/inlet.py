"""The receiving ends of one connection's rails: what a sender's NIC may write into, and until when.

That is a buffer for each rail, with a key of its own, which only the queue pair of that rail takes. The receiver copies
chunks from it into their place. A queue pair that is closed takes its key along, so a sender need not be trusted to
stop: whatever it does, it reaches neither the memory of a landing nor the buffer of another peer. In direct mode the
key is that of all registered memory instead.

The receiver does nothing for a chunk to arrive, and hears of none by itself: Written, on the connection, says that one
has. The chunk's last write carries its number, which is waited for here (it is there already, or nearly): it tells that
the bytes before it are visible to the processor. What then counts is the checksum, as on every other path.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, Protocol

from transport.errors import RemoteProtocolError
from transport.path.shm import merge_extents
from transport.rdma.device import (
    PLACES,
    RDMA_CHUNK_BYTES,
    RECEIVE_DEPTH,
    MemoryRegion,
    QueuePair,
    QueuePairEnd,
    RdmaDevices,
    RdmaError,
    address_of,
)
from transport.rdma.peer_memory import BUFFER_BYTES, PeerMemory
from transport.rdma.topology import MAX_RAILS, format_nics
from transport.wire.frames import (
    MAX_LIST,
    Grant,
    LandingBuffers,
    Nics,
    RailAnswer,
    RailBuffer,
    RailClosed,
    RailOffer,
    Written,
)

log = logging.getLogger(__name__)

NUMBER_S: Final = 1.0  # for a chunk's number to show up, after the sender's NIC has seen it acknowledged
NAP_S: Final = 50e-6
MAX_EXTENTS: Final = 1 << 20  # of one transfer's memory


class PeerRoom(Protocol):
    """The bytes that the buffers of one peer may take."""

    def lend(self, num_bytes: int) -> bool:
        """At once, or not."""

    def give_back(self, num_bytes: int) -> None: ...


@dataclass(slots=True)
class _RailEnd:
    attempt: int
    queue_pair: QueuePair
    memory: PeerMemory | None  # None: direct
    broken: bool = False  # the queue pair is closed; what lies in the memory may still be announced
    arrived: set[int] = field(default_factory=set)  # numbers that Written has not named yet


class RailEnds:
    """All rails of one connection, at its receiver. Used by the connection's thread only."""

    def __init__(
        self,
        devices: RdmaDevices | None,
        room: PeerRoom,
        count: Callable[[str], None],
        *,
        number_s: float = NUMBER_S,
    ) -> None:
        self.asked = False
        self.direct = devices is not None and devices.direct
        self._room = room
        self._may_offer = False
        self._number_s = number_s
        self._devices = devices
        self._count = count
        self._told = False
        self._ends: dict[int, _RailEnd] = {}

    def introduction(self, region: MemoryRegion | None, *, knows_buffers: bool) -> list[LandingBuffers | Nics]:
        """The NICs here, for memory in that region; said once, to a sender that has shown a secret. One that cannot use
        them hears of none.
        """
        if self._told:
            return []
        self._told = True
        usable = region is not None if self.direct else knows_buffers
        if self._devices is None or not usable:
            return [Nics(nics="")]
        self._may_offer = True
        nics = Nics(nics=format_nics(self._devices.nics_for(region)))
        return [nics] if self.direct else [LandingBuffers(places=PLACES, place_bytes=RDMA_CHUNK_BYTES), nics]

    def region_of(self, view: memoryview) -> MemoryRegion | None:
        """The registered memory that it lies in, if any."""
        return self._devices.find(address_of(view), len(view)) if self._devices is not None else None

    def locate(self, views: Iterable[memoryview]) -> tuple[MemoryRegion, list[tuple[int, int]]] | None:
        """Where a landing's memory lies, as (address, length); None when it cannot be written by RDMA."""
        extents = merge_extents((address_of(view), len(view)) for view in views if len(view))
        if self._devices is None or not extents or len(extents) > MAX_EXTENTS:
            return None
        region = self._devices.find(*extents[0])
        if region is None or not all(region.covers(*extent) for extent in extents):
            return None
        return region, extents

    def grants(self, slot: int, region: MemoryRegion, extents: list[tuple[int, int]]) -> Iterator[Grant]:
        assert self._devices is not None
        keys = tuple((place, region.keys[nic.name].remote) for place, nic in enumerate(self._devices.nics))
        for first in range(0, len(extents), MAX_LIST):
            part = extents[first : first + MAX_LIST]
            offsets = tuple((address - region.address, length) for address, length in part)
            yield Grant(slot=slot, address=region.address, keys=keys, extents=offsets)

    def offer(self, frame: RailOffer) -> list[RailBuffer | RailAnswer | RailClosed]:
        """Makes the other end of a queue pair. Raises RemoteProtocolError for a peer that may not ask."""
        if not self._may_offer or self._devices is None or frame.rail >= MAX_RAILS:
            raise RemoteProtocolError(f"rail {frame.rail} without a grant")
        self._close(frame.rail)
        try:
            opened = self._open(self._devices, frame)
        except RdmaError as exc:
            self._count("rail_refused")
            log.warning("rail %d refused: %s", frame.rail, exc)
            return [RailClosed(rail=frame.rail, attempt=frame.attempt, reason=str(exc)[:200])]
        self._count("rail_opened")
        return opened

    def _open(self, devices: RdmaDevices, frame: RailOffer) -> list[RailBuffer | RailAnswer | RailClosed]:
        nics = devices.nics
        if frame.nic >= len(nics):
            raise RemoteProtocolError(f"NIC {frame.nic} of {len(nics)}")
        device = devices.device(nics[frame.nic].name)
        said: list[RailBuffer | RailAnswer | RailClosed] = []
        memory = None if self.direct else self._make_memory()
        try:
            if memory is None:
                queue_pair = device.direct_queue_pair()
            else:
                queue_pair, key = device.buffer_queue_pair(memory.address, BUFFER_BYTES)
                said.append(RailBuffer(rail=frame.rail, attempt=frame.attempt, address=memory.address, key=key))
            made = _RailEnd(frame.attempt, queue_pair, memory)
        except BaseException:
            self._drop_memory(memory)
            raise
        try:
            end = queue_pair.end
            queue_pair.connect(
                QueuePairEnd(number=frame.queue_pair, packet_number=frame.packet_number, gid=frame.gid, mtu=frame.mtu)
            )
            for _ in range(RECEIVE_DEPTH):
                queue_pair.receive()
        except BaseException:
            self._close_end(made)
            raise
        self._ends[frame.rail] = made
        answer = RailAnswer(
            rail=frame.rail, attempt=frame.attempt, queue_pair=end.number, packet_number=end.packet_number,
            gid=end.gid, mtu=end.mtu, depth=RECEIVE_DEPTH,
        )  # fmt: skip
        return [*said, answer]

    def _make_memory(self) -> PeerMemory:
        if not self._room.lend(BUFFER_BYTES):
            raise RdmaError(f"no room for a buffer of {BUFFER_BYTES} bytes")
        try:
            return PeerMemory()
        except OSError as exc:
            self._room.give_back(BUFFER_BYTES)
            raise RdmaError(f"no memory for a buffer: {exc}") from exc

    def _drop_memory(self, memory: PeerMemory | None) -> None:
        """No queue pair may reach it any more."""
        if memory is not None:
            memory.close()
            self._room.give_back(BUFFER_BYTES)

    def has_arrived(self, frame: Written) -> bool:
        """Waits for a chunk's number. False when it does not come; a rail that is closed by now tells nothing. Raises
        RemoteProtocolError when there are numbers that Written should have named long ago.
        """
        give_up_at = time.monotonic() + self._number_s
        while (end := self._ends.get(frame.rail)) is not None and end.attempt == frame.attempt and not end.broken:
            if frame.number in end.arrived:
                end.arrived.discard(frame.number)
                return True
            if not self._reap(frame.rail, end) or time.monotonic() > give_up_at:
                self._count("rail_lost")
                end.queue_pair.close()
                end.broken = True
            elif frame.number not in end.arrived:
                time.sleep(NAP_S)
        return False

    def _reap(self, rail: int, end: _RailEnd) -> bool:
        """Takes what has come over a rail; False when it is broken."""
        with suppress(RdmaError):
            for completion in end.queue_pair.poll():
                if completion.error:
                    log.info("rail %d broke: %s", rail, completion.error)
                    return False
                if completion.number is not None:
                    end.arrived.add(completion.number)
                    end.queue_pair.receive()
            # A sender waits for answers when as many are out as there are receives, and each answer is to a Written.
            if len(end.arrived) > RECEIVE_DEPTH:
                raise RemoteProtocolError(f"more than {RECEIVE_DEPTH} chunks on rail {rail} without an announcement")
            return True
        return False

    def written(self, frame: Written) -> tuple[int, int]:
        """Where the bytes of a chunk lie: a file, and the offset in it. Raises RemoteProtocolError for a chunk that no
        buffer has.
        """
        end = self._ends.get(frame.rail)
        if end is None or end.attempt != frame.attempt or end.memory is None:
            raise RemoteProtocolError(f"a chunk of rail {frame.rail}, which is not open")
        if not 0 < frame.length <= RDMA_CHUNK_BYTES:
            raise RemoteProtocolError(f"a chunk of {frame.length} bytes: 1 to {RDMA_CHUNK_BYTES}")
        return end.memory.fd, end.memory.place_of(frame.number)

    def closed(self, frame: RailClosed) -> None:
        """The sender writes no more over this queue pair; after this, nothing late can arrive either."""
        end = self._ends.get(frame.rail)
        if end is not None and end.attempt == frame.attempt:
            self._count("rail_closed")
            self._close(frame.rail)

    def _close(self, rail: int) -> None:
        end = self._ends.pop(rail, None)
        if end is not None:
            self._close_end(end)

    def _close_end(self, end: _RailEnd) -> None:
        end.queue_pair.close()
        self._drop_memory(end.memory)

    def close(self) -> None:
        """From here on no sender of this connection can write into any memory."""
        for rail in list(self._ends):
            self._close(rail)
