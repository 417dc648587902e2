"""One request's KVCache on its way: its ranges, what may leave, what has arrived.

The ranges of a transfer (a layer's slab of one block, a state snapshot) are laid end to end into one line of bytes:

    range     0          1               2
    offset    [0 ........|...............|.......total)
    chunk          [--------------)                         may begin and end anywhere, may span many ranges

Both ends compute the same line from the same sizes, so chunks need no names but an offset.
"""

import hashlib
import hmac
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TypeAlias

from transport.errors import RemoteProtocolError
from transport.wire.frames import MAX_RANGES, MAX_TRANSFER_BYTES
from transport.wire.ranges import RangeSet

RangeViews: TypeAlias = Callable[[int], Sequence[memoryview]] | Sequence[Sequence[memoryview]]
"""Where range i lies in memory: byte views (format "B") that together are as long as the range."""


class Manifest:
    """The sizes of a transfer's ranges, in bytes, in order."""

    def __init__(self, sizes: Iterable[int]) -> None:
        self.sizes = tuple(sizes)
        if any(size < 0 for size in self.sizes):
            raise ValueError("a range of negative size")
        self._ends = list(accumulate(self.sizes))
        self.total_bytes = self._ends[-1] if self._ends else 0
        if self.total_bytes > MAX_TRANSFER_BYTES or len(self.sizes) > MAX_RANGES:
            raise ValueError(f"transfer too large: {self.total_bytes} bytes in {len(self.sizes)} ranges")
        self.digest = _digest_of(self.sizes)

    def bounds(self, index: int) -> tuple[int, int]:
        """Range `index` as `[start, stop)` of the line."""
        stop = self._ends[index]
        return stop - self.sizes[index], stop

    def pieces(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """`[start, stop)` of the line as (range, first byte in it, number of bytes)."""
        index = bisect_right(self._ends, start)
        while start < stop:
            begin, end = self.bounds(index)
            length = min(stop, end) - start
            if length:
                yield index, start - begin, length
            start += length
            index += 1

    def views(self, of_range: RangeViews, start: int, stop: int) -> list[memoryview]:
        """The memory of `[start, stop)`, given the memory of whole ranges."""
        resolve = of_range if callable(of_range) else of_range.__getitem__
        views: list[memoryview] = []
        for index, skip, length in self.pieces(start, stop):
            views += cut(resolve(index), skip, length)
        return views


def cut(views: Iterable[memoryview], skip: int, length: int) -> list[memoryview]:
    """`length` bytes of a list of views, after the first `skip`."""
    parts: list[memoryview] = []
    for view in views:
        size = len(view)
        if skip >= size:
            skip -= size
            continue
        part = view[skip : skip + length]
        parts.append(part)
        skip, length = 0, length - len(part)
        if not length:
            return parts
    if length:
        raise ValueError(f"the memory of a range is {length} bytes short")
    return parts


def _digest_of(sizes: Sequence[int]) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for size in sizes:
        digest.update(size.to_bytes(8, "little"))
    return digest.digest()


def proof_of(secret: bytes, transfer_id: str, manifest_digest: bytes, transcript: bytes) -> bytes:
    """Shows that the sender knows the one-time secret; good for one connection only, and only if both of its ends have
    seen the same greetings.
    """
    return hmac.digest(secret, transcript + manifest_digest + transfer_id.encode(), "sha256")


@dataclass(frozen=True, slots=True, kw_only=True)
class PushStats:
    """A push so far. Bytes are payload bytes."""

    bytes_total: int
    bytes_ready: int  # offered by ready(), wherever they are now
    bytes_sent: int  # handed to the kernel, resends included
    bytes_acked: int  # landed and verified at the receiver (or there before we came)
    bytes_resumed: int  # of those acked: landed before this sender sent anything
    bytes_resent: int
    chunks: int
    rejected_chunks: int  # the receiver found a wrong checksum, or could not decode it
    bytes_saved: int = 0  # of those sent: by which coding made them smaller
    bytes_by_codec: Mapping[str, int] = field(default_factory=dict)  # of those sent, where coding was allowed


class Outbox:
    """Sender side of a transfer: which bytes may leave, which are on their way, which have arrived.

    A byte moves from waiting to queued, to in flight (on one lane), to acked. It goes back from in flight to queued when
    its lane is lost or the receiver rejects the chunk. Queued bytes leave in the order in which they became ready: that is
    layer order.
    """

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self.accepted = False  # the receiver told what it misses
        self.acked = RangeSet()
        self._ready = RangeSet()
        self._queue: deque[tuple[int, int]] = deque()
        self._in_flight: dict[int, dict[int, int]] = {}  # lane -> {start: stop}
        self.bytes_queued = 0
        self.bytes_sent = 0
        self.bytes_resumed = 0
        self.bytes_resent = 0
        self.chunks = 0
        self.rejected_chunks = 0
        self.bytes_saved = 0
        self.bytes_by_codec: Counter[str] = Counter()

    @property
    def complete(self) -> bool:
        return self.accepted and self.acked.num_bytes == self.manifest.total_bytes

    @property
    def bytes_ready(self) -> int:
        return self._ready.num_bytes

    @property
    def bytes_in_flight(self) -> int:
        return sum(self.in_flight().values())

    def in_flight(self) -> dict[int, int]:
        """Bytes that were taken and not answered yet, by lane."""
        return {lane: sum(stop - start for start, stop in chunks.items()) for lane, chunks in self._in_flight.items()}

    def ready(self, indexes: Iterable[int]) -> None:
        """These ranges may leave now. Saying it twice changes nothing."""
        for index in indexes:
            start, stop = self.manifest.bounds(index)
            for gap in self._ready.gaps(start, stop):
                self._ready.add(*gap)
                self._enqueue(*gap)

    def accept(self, missing: Iterable[tuple[int, int]]) -> None:
        """The receiver names what it misses: the rest need not travel. Raises RemoteProtocolError."""
        landed = RangeSet([(0, self.manifest.total_bytes)])
        for start, stop in missing:
            if stop > self.manifest.total_bytes:
                raise RemoteProtocolError(f"misses [{start}, {stop}) of {self.manifest.total_bytes} bytes")
            landed.subtract(start, stop)
        for chunks in self._in_flight.values():  # ours: it is acknowledged in its own time
            for start, stop in chunks.items():
                landed.subtract(start, stop)
        gained = sum(self.acked.add(start, stop) for start, stop in landed)
        if not self.accepted:
            self.bytes_resumed = gained
        self.accepted = True

    def take(self, limit: int, lane: int) -> tuple[int, int] | None:
        """The next chunk `[start, stop)` of at most `limit` bytes; it is in flight on `lane` from now on."""
        while self._queue:
            start, stop = self._queue.popleft()
            self.bytes_queued -= stop - start
            gaps = self.acked.gaps(start, stop)
            if not gaps:
                continue
            (start, gap_stop), rest = gaps[0], gaps[1:]
            for gap in reversed(rest):
                self._enqueue_first(*gap)
            if gap_stop - start > limit:
                self._enqueue_first(start + limit, gap_stop)
                gap_stop = start + limit
            self._in_flight.setdefault(lane, {})[start] = gap_stop
            self.bytes_sent += gap_stop - start
            self.chunks += 1
            return start, gap_stop
        return None

    def on_acked(self, lane: int, start: int, stop: int) -> None:
        """`[start, stop)` has landed. Raises RemoteProtocolError when it was never sent there."""
        self._arrived(lane, start, stop)
        self.acked.add(start, stop)

    def on_rejected(self, lane: int, start: int, stop: int) -> None:
        """The receiver got the chunk but could not verify it: it leaves again, first."""
        self._arrived(lane, start, stop)
        self.rejected_chunks += 1
        self._resend(start, stop)

    def _arrived(self, lane: int, start: int, stop: int) -> None:
        if self._in_flight.get(lane, {}).pop(start, None) != stop:
            raise RemoteProtocolError(f"[{start}, {stop}) is answered but was not sent")

    def hand_over(self, start: int, stop: int, lane: int, to: int) -> None:
        """Another lane carries the replies for the bytes on their way over `lane`."""
        self._arrived(lane, start, stop)
        self._in_flight.setdefault(to, {})[start] = stop

    def split(self, lane: int, start: int, at: int) -> None:
        """The chunk from `start` that is in flight on `lane` is answered in two parts, unless it ends at `at`."""
        chunks = self._in_flight.get(lane, {})
        stop = chunks.get(start, at)
        if stop > at:
            chunks[start], chunks[at] = at, stop
            self.chunks += 1

    def on_lane_lost(self, lane: int) -> None:
        """Bytes on their way over `lane` may not have arrived: they leave again, first."""
        for start, stop in sorted(self._in_flight.pop(lane, {}).items(), reverse=True):
            self._resend(start, stop)

    def stats(self) -> PushStats:
        return PushStats(
            bytes_total=self.manifest.total_bytes,
            bytes_ready=self._ready.num_bytes,
            bytes_sent=self.bytes_sent,
            bytes_acked=self.acked.num_bytes,
            bytes_resumed=self.bytes_resumed,
            bytes_resent=self.bytes_resent,
            chunks=self.chunks,
            rejected_chunks=self.rejected_chunks,
            bytes_saved=self.bytes_saved,
            bytes_by_codec=dict(self.bytes_by_codec),
        )

    def _resend(self, start: int, stop: int) -> None:
        self.bytes_resent += stop - start
        self._enqueue_first(start, stop)

    def _enqueue_first(self, start: int, stop: int) -> None:
        self._queue.appendleft((start, stop))
        self.bytes_queued += stop - start

    def _enqueue(self, start: int, stop: int) -> None:
        self.bytes_queued += stop - start
        if self._queue and self._queue[-1][1] == start:
            start, _ = self._queue.pop()
        self._queue.append((start, stop))


class Inbox:
    """Receiver side of a transfer: what has landed, and which connection writes where.

    A byte counts as landed only after its chunk was verified, and is never written again: a repeated chunk is read
    past. Two connections may carry the same bytes (the sender gave one up that we still hear): the later one has to
    wait until the earlier writer has left, because an unverified write over a verified one would go unnoticed.
    """

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self.landed = RangeSet()
        self.granted: set[int] = set()  # connections whose sender may write what is missing by itself (RDMA)
        self._writers: dict[int, tuple[int, int]] = {}  # connection -> chunk
        self.chunks = 0
        self.duplicate_bytes = 0
        self.rejected_chunks = 0

    @property
    def complete(self) -> bool:
        return self.landed.num_bytes == self.manifest.total_bytes

    @property
    def num_writers(self) -> int:
        return len(self._writers.keys() | self.granted)

    def missing(self) -> list[tuple[int, int]]:
        return self.landed.gaps(0, self.manifest.total_bytes)

    def rivals(self, start: int, stop: int, who: int) -> list[int]:
        """Connections other than `who` that write into `[start, stop)`, or may do so at any moment."""
        writing = {other for other, (a, b) in self._writers.items() if a < stop and start < b}
        return sorted((writing | self.granted) - {who})

    def begin(self, who: int, start: int, stop: int) -> None:
        assert who not in self._writers
        assert not self.rivals(start, stop, who)
        self._writers[who] = (start, stop)

    def finish(self, who: int, verified: bool) -> None:
        """The writer has left its chunk; `verified` says whether it now counts."""
        start, stop = self._writers.pop(who)
        self.chunks += 1
        if not verified:
            self.rejected_chunks += 1
            return
        self.duplicate_bytes += stop - start - self.landed.add(start, stop)

    def leave(self, who: int) -> None:
        """The writer is gone in mid-chunk."""
        self._writers.pop(who, None)
