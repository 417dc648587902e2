"""Memory that a peer with its secret may write into, or read, without being expected: one-sided access (see batch)."""

import hmac
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final

from transport.wire.frames import MAX_TRANSFER_BYTES, Code, Open
from transport.wire.manifest import Manifest, proof_of

SEGMENT_PREFIX: Final = "segment:"
READ_PREFIX: Final = "read:"
REPLY_PREFIX: Final = "reply:"
MAX_READS: Final = 1024  # asked for, and not yet taken up by their server
MAX_REMEMBERED: Final = 4096


@dataclass(frozen=True, slots=True, eq=False)
class RemoteSegment:
    """Memory that a peer with the secret may write into, or read, without being expected."""

    view: memoryview
    secret: bytes = field(repr=False)
    readable: bool = False
    writable: bool = True


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """A one-sided read that was granted: `views` are to be pushed to `address`, where a landing `reply_id` waits."""

    name: str
    segment: RemoteSegment = field(repr=False)
    reply_id: str
    secret: bytes = field(repr=False)
    address: str
    views: tuple[memoryview, ...]


class Segments:
    """The registered segments, and the granted reads."""

    def __init__(self, *, max_reads: int = MAX_READS) -> None:
        self._max_reads = max_reads
        self._by_name: dict[str, RemoteSegment] = {}
        self._reads: list[ReadRequest] = []
        self._granted: OrderedDict[str, None] = OrderedDict()  # reads, by id: one that is asked for again is one

    def register(self, name: str, segment: RemoteSegment) -> None:
        self._by_name[name] = segment

    def unregister(self, name: str) -> None:
        """It must not be read or written any more; what was granted and has not begun is forgotten."""
        self._by_name.pop(name, None)
        self._reads = [read for read in self._reads if read.name != name]

    def __contains__(self, segment: RemoteSegment) -> bool:
        return segment in self._by_name.values()

    def take_reads(self) -> list[ReadRequest]:
        """Reads that were granted since the last time."""
        reads, self._reads = self._reads, []
        return reads

    def to_write(self, frame: Open, transcript: bytes) -> RemoteSegment | Code:
        """Where a one-sided write goes, once secret, bounds and manifest are right."""
        segment = self._by_name.get(segment_of(frame.transfer_id))
        if segment is None:
            return Code.UNKNOWN_TRANSFER
        return _refusal(segment, frame, transcript, allowed=segment.writable) or segment

    def read(self, frame: Open, transcript: bytes) -> Code | None:
        """Grants a read, which leaves as a transfer of its own; or why not."""
        name, reply_id, address = parse_read_id(frame.transfer_id)
        segment = self._by_name.get(name)
        if segment is None:
            return Code.UNKNOWN_TRANSFER
        if refusal := _refusal(segment, frame, transcript, allowed=segment.readable):
            return refusal
        if frame.transfer_id in self._granted:  # asked again because the answer was lost
            return None
        if len(self._reads) >= self._max_reads:
            return Code.TOO_MANY_READS
        self._granted[frame.transfer_id] = None
        if len(self._granted) > MAX_REMEMBERED:
            self._granted.popitem(last=False)
        views = tuple(segment.view[offset : offset + length] for offset, length in frame.placement)
        secret = reply_secret(segment.secret, reply_id)
        self._reads.append(ReadRequest(name, segment, reply_id, secret, address, views))
        return None


def _refusal(segment: RemoteSegment, frame: Open, transcript: bytes, *, allowed: bool) -> Code | None:
    expected = proof_of(segment.secret, frame.transfer_id, frame.manifest_digest, transcript)
    if not hmac.compare_digest(expected, frame.proof):
        return Code.BAD_SECRET
    if not allowed:
        return Code.ACCESS
    sizes = [length for _, length in frame.placement]
    if sum(sizes) > MAX_TRANSFER_BYTES or any(
        offset + length > len(segment.view) for offset, length in frame.placement
    ):
        return Code.OUT_OF_BOUNDS
    manifest = Manifest(sizes)
    stated = (frame.manifest_digest, frame.num_ranges, frame.total_bytes)
    return None if stated == (manifest.digest, len(sizes), manifest.total_bytes) else Code.MANIFEST


def write_id(segment: str, unique: str) -> str:
    """The transfer id of a one-sided write."""
    return f"{SEGMENT_PREFIX}{segment}:{unique}"


def segment_of(transfer_id: str) -> str:
    return transfer_id.removeprefix(SEGMENT_PREFIX).rpartition(":")[0]


def read_id(segment: str, unique: str, reply_to: str) -> str:
    """The transfer id under which a read is asked for; the bytes come as transfer `reply_id` to address `reply_to`."""
    return f"{READ_PREFIX}{segment}:{unique}@{reply_to}"


def parse_read_id(transfer_id: str) -> tuple[str, str, str]:
    """Segment, reply id and reply address of a read."""
    segment, _, rest = transfer_id.removeprefix(READ_PREFIX).partition(":")
    unique, _, reply_to = rest.partition("@")
    return segment, f"{REPLY_PREFIX}{segment}:{unique}", reply_to


def reply_secret(segment_secret: bytes, reply_id: str) -> bytes:
    """The secret of the transfer that answers a read: known to both sides, never on the wire, good for one read."""
    return hmac.digest(segment_secret, reply_id.encode(), "sha256")
