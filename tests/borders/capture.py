"""What passes a place of a network: frames as they come, put together to what each end of a connection has said."""

import math
import socket
import struct
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from ipaddress import IPv4Address
from typing import Final, NamedTuple, Self

from tests.borders.network import Machine

ALL_PROTOCOLS: Final = 0x0003
SOL_PACKET: Final = 263
PACKET_STATISTICS: Final = 6
SO_RCVBUFFORCE: Final = 33
BUFFER_BYTES: Final = 256 << 20
FRAME_BYTES: Final = 1 << 17  # segments that a network card would cut are whole here
LOOK_S: Final = 0.2
REST_S: Final = 60.0  # for what waits at the end
ETHERNET, IPV4, TCP = 14, 0x0800, 6
SYN: Final = 0x02


class Flow(NamedTuple):
    """One direction of a connection."""

    source: str
    source_port: int
    target: str
    target_port: int


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of what it says."""

    flow: Flow
    number: int
    is_first: bool
    data: bytes


def segment_of(frame: bytes) -> Segment | None:
    """Of an Ethernet frame; None where it is no TCP over IPv4."""
    if len(frame) < ETHERNET + 20 or struct.unpack_from("!H", frame, 12)[0] != IPV4:
        return None
    packet = frame[ETHERNET:]
    head, total, protocol = 4 * (packet[0] & 0x0F), struct.unpack_from("!H", packet, 2)[0], packet[9]
    if protocol != TCP or len(packet) < head + 20:
        return None
    source, target = (str(IPv4Address(packet[at : at + 4])) for at in (12, 16))
    segment = packet[head : total or len(packet)]
    source_port, target_port, number = struct.unpack_from("!HHI", segment)
    is_first = bool(segment[13] & SYN)
    data = segment[4 * (segment[12] >> 4) :]
    return Segment(Flow(source, source_port, target, target_port), number + is_first, is_first, data)


def streams(segments: Iterable[Segment]) -> dict[Flow, list[bytes]]:
    """What each flow has said, in order, repeated parts once; one part for each stretch without a hole, in each connection."""
    parts: dict[tuple[Flow, int], dict[int, bytes]] = defaultdict(dict)
    starts: dict[Flow, int] = {}
    for segment in segments:
        if segment.is_first or segment.flow not in starts:
            starts[segment.flow] = segment.number
        if segment.data:
            start = starts[segment.flow]
            at = (segment.number - start) & 0xFFFFFFFF
            held = parts[segment.flow, start]
            held[at] = max(held.get(at, b""), segment.data, key=len)
    said: dict[Flow, list[bytes]] = defaultdict(list)
    for (flow, _), pieces in parts.items():
        said[flow] += _stretches(pieces)
    return said


def _stretches(pieces: Mapping[int, bytes]) -> Iterator[bytes]:
    whole, end = bytearray(), 0
    for at, data in sorted(pieces.items()):
        if at > end and whole:
            yield bytes(whole)
            whole.clear()
        if not whole:
            end = at
        whole += data[end - at :] if end < at + len(data) else b""
        end = max(end, at + len(data))
    if whole:
        yield bytes(whole)


class Capture:
    """Listens at every port of a machine, or at one, while the block lasts. What leaves again is counted where it came in.

    At the end it reads what waits: on a busy machine it may be far behind.
    """

    def __init__(self, machine: Machine, port: str = "") -> None:
        self.frames: list[bytes] = []
        self.dropped = 0
        self._socket = machine.inside(
            lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ALL_PROTOCOLS))
        )
        if port:
            self._socket.bind((port, ALL_PROTOCOLS))
        self._socket.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, BUFFER_BYTES)
        self._socket.settimeout(LOOK_S)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="capture")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._is_over.set()
        self._thread.join()
        self._socket.close()

    def _listen(self) -> None:
        deadline = math.inf
        while time.monotonic() < deadline:
            if deadline == math.inf and self._is_over.is_set():
                deadline = time.monotonic() + REST_S
            try:
                frame, (_, _, kind, *_) = self._socket.recvfrom(FRAME_BYTES)
            except TimeoutError:
                if deadline < math.inf:
                    break
                continue
            if kind != socket.PACKET_OUTGOING:
                self.frames.append(frame)
        told = self._socket.getsockopt(SOL_PACKET, PACKET_STATISTICS, 8)
        self.dropped += int(struct.unpack("II", told)[1])

    def said(self) -> dict[Flow, list[bytes]]:
        """All that was said over TCP; other frames, each as it was, under a flow without ends."""
        segments, others = list[Segment](), list[bytes]()
        for frame in self.frames:
            segment = segment_of(frame)
            if segment is None:
                others.append(frame)
            else:
                segments.append(segment)
        return {**streams(segments), Flow("", 0, "", 0): others}
