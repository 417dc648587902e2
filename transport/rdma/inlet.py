"""The receiving ends of one connection's rails: they exist so that a sender can write into memory that it was granted.

The receiver does nothing for a chunk to arrive, and hears of none by itself: Written, on the connection, says that one
has. The chunk's last write carries its number, which is waited for here (it is there already, or nearly): it tells that
the bytes before it are visible to the processor. What then counts is the checksum, as on every other path.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from transport.errors import RemoteProtocolError
from transport.path.shm import merge_extents
from transport.rdma.device import (
    RECEIVE_DEPTH,
    MemoryRegion,
    QueuePair,
    QueuePairEnd,
    RdmaDevices,
    RdmaError,
    address_of,
)
from transport.rdma.topology import MAX_RAILS, format_nics
from transport.wire.frames import MAX_LIST, Grant, Nics, RailAnswer, RailClosed, RailOffer, Written

log = logging.getLogger(__name__)

NUMBER_S: Final = 1.0  # for a chunk's number to show up, after the sender's NIC has seen it acknowledged
NAP_S: Final = 50e-6
MAX_EXTENTS: Final = 1 << 20  # of one transfer's memory


@dataclass(slots=True)
class _RailEnd:
    attempt: int
    queue_pair: QueuePair
    arrived: set[int] = field(default_factory=set)  # numbers that Written has not named yet


class RailEnds:
    """All rails of one connection, at its receiver. Used by the connection's thread only."""

    def __init__(
        self, devices: RdmaDevices | None, count: Callable[[str], None], *, number_s: float = NUMBER_S
    ) -> None:
        self.asked = False
        self._number_s = number_s
        self._devices = devices
        self._count = count
        self._told = False
        self._ends: dict[int, _RailEnd] = {}

    def nics(self, region: MemoryRegion | None) -> list[Nics]:
        """The NICs here; sent once, to a sender that has shown a secret."""
        if self._told:
            return []
        self._told = True
        nics = () if self._devices is None or region is None else self._devices.nics_for(region)
        return [Nics(nics=format_nics(nics))]

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

    def offer(self, frame: RailOffer) -> RailAnswer | RailClosed:
        """Makes the other end of a queue pair. Raises RemoteProtocolError for a peer that may not ask."""
        if not self._told or self._devices is None or frame.rail >= MAX_RAILS:
            raise RemoteProtocolError(f"rail {frame.rail} without a grant")
        self._close(frame.rail)
        try:
            end = self._open(self._devices, frame)
        except RdmaError as exc:
            self._count("rail_refused")
            log.warning("rail %d refused: %s", frame.rail, exc)
            return RailClosed(rail=frame.rail, attempt=frame.attempt, reason=str(exc)[:200])
        self._count("rail_opened")
        return RailAnswer(
            rail=frame.rail, attempt=frame.attempt, queue_pair=end.number, packet_number=end.packet_number,
            gid=end.gid, mtu=end.mtu, depth=RECEIVE_DEPTH,
        )  # fmt: skip

    def _open(self, devices: RdmaDevices, frame: RailOffer) -> QueuePairEnd:
        nics = devices.nics
        if frame.nic >= len(nics):
            raise RemoteProtocolError(f"NIC {frame.nic} of {len(nics)}")
        queue_pair = devices.device(nics[frame.nic].name).queue_pair()
        try:
            end = queue_pair.end
            queue_pair.connect(
                QueuePairEnd(number=frame.queue_pair, packet_number=frame.packet_number, gid=frame.gid, mtu=frame.mtu)
            )
            for _ in range(RECEIVE_DEPTH):
                queue_pair.receive()
        except BaseException:
            queue_pair.close()
            raise
        self._ends[frame.rail] = _RailEnd(frame.attempt, queue_pair)
        return end

    def has_arrived(self, frame: Written) -> bool:
        """Waits for a chunk's number. False when it does not come; a rail that is closed by now tells nothing. Raises
        RemoteProtocolError when there are numbers that Written should have named long ago.
        """
        give_up_at = time.monotonic() + self._number_s
        while (end := self._ends.get(frame.rail)) is not None and end.attempt == frame.attempt:
            if frame.number in end.arrived:
                end.arrived.discard(frame.number)
                return True
            if not self._reap(frame.rail, end) or time.monotonic() > give_up_at:
                self._count("rail_lost")
                self._close(frame.rail)
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

    def closed(self, frame: RailClosed) -> None:
        """The sender writes no more over this queue pair; after this, nothing late can arrive either."""
        end = self._ends.get(frame.rail)
        if end is not None and end.attempt == frame.attempt:
            self._count("rail_closed")
            self._close(frame.rail)

    def _close(self, rail: int) -> None:
        end = self._ends.pop(rail, None)
        if end is not None:
            end.queue_pair.close()

    def close(self) -> None:
        """From here on no sender of this connection can write into any memory."""
        for rail in list(self._ends):
            self._close(rail)
