"""One request's KVCache on its way: its ranges, what may leave, what has arrived.

The ranges of a transfer (a layer's slab of one block, a state snapshot) are laid end to end into one line of bytes:

    range     0          1               2
    offset    [0 ........|...............|.......total)
    chunk          [--------------)                         may begin and end anywhere, may span many ranges

Both ends compute the same line from the same sizes, so chunks need no names but an offset.
"""

import hmac
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias, runtime_checkable

from transport.errors import RemoteProtocolError
from transport.wire.frames import MAX_RANGES, MAX_TRANSFER_BYTES
from transport.wire.ranges import RangeSet
from transport.wire.sizes import RangeSizes, consecutive


@runtime_checkable
class RunViews(Protocol):
    """The memory of many ranges at a time."""

    def between(self, first: int, stop: int) -> Sequence[memoryview]:
        """Byte views of ranges `[first, stop)`, in order; together they are as long as those."""
        ...


RangeViews: TypeAlias = RunViews | Callable[[int], Sequence[memoryview]] | Sequence[Sequence[memoryview]]
"""Where range i lies in memory: byte views (format "B") that together are as long as the range."""


class Manifest:
    """The sizes of a transfer's ranges, in bytes, in order."""

    def __init__(self, sizes: Iterable[int] | RangeSizes) -> None:
        """Raises ValueError for more than a transfer may be."""
        self.sizes = RangeSizes.of(sizes)
        self.num_ranges = self.sizes.num_ranges
        self.total_bytes = self.sizes.total_bytes
        if self.total_bytes > MAX_TRANSFER_BYTES or self.num_ranges > MAX_RANGES:
            raise ValueError(f"transfer too large: {self.total_bytes} bytes in {self.num_ranges} ranges")

    @property
    def digest(self) -> bytes:
        """What both ends compare; computed when first asked for."""
        return self.sizes.digest

    def bounds(self, index: int) -> tuple[int, int]:
        """Range `index` as `[start, stop)` of the line."""
        return self.span(range(index, index + 1))

    def span(self, indexes: range) -> tuple[int, int]:
        """Consecutive ranges as `[start, stop)` of the line."""
        return self.sizes.offset(indexes.start), self.sizes.offset(indexes.stop)

    def covering(self, start: int, stop: int) -> tuple[int, int, int]:
        """The ranges `[first, last)` that `[start, stop)` of the line lies in, and the bytes before it in the first."""
        if start >= stop:
            return 0, 0, 0
        first = self.sizes.at(start)
        return first, self.sizes.at(stop - 1) + 1, start - self.sizes.offset(first)

    def pieces(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """`[start, stop)` of the line as (range, first byte in it, number of bytes)."""
        first, last, skip = self.covering(start, stop)
        for index, size in enumerate(self.sizes.between(first, last), first):
            if length := min(size - skip, stop - start):
                yield index, skip, length
            start, skip = start + length, 0

    def views(self, of_range: RangeViews, start: int, stop: int) -> list[memoryview]:
        """The memory of `[start, stop)`, given the memory of whole ranges."""
        if isinstance(of_range, RunViews):
            first, last, skip = self.covering(start, stop)
            begin, end = self.span(range(first, last))
            return _cut_whole(of_range.between(first, last), skip, stop - start, end - begin)
        resolve = of_range if callable(of_range) else of_range.__getitem__
        views: list[memoryview] = []
        for index, skip, length in self.pieces(start, stop):
            views += cut(resolve(index), skip, length)
        return views


def _cut_whole(views: Sequence[memoryview], skip: int, length: int, whole: int) -> list[memoryview]:
    """`length` bytes of views that are `whole` bytes together, after the first `skip`. Raises ValueError if they are not."""
    found = sum(map(len, views))
    if found != whole:
        raise ValueError(f"the memory of ranges of {whole} bytes has {found}")
    parts = list(views)
    _drop(parts, skip, last=False)
    _drop(parts, whole - skip - length, last=True)
    return parts


def _drop(views: list[memoryview], size: int, *, last: bool) -> None:
    """Takes `size` bytes off one end of a list of views."""
    while size:
        view = views.pop() if last else views.pop(0)
        if size < len(view):
            views.insert(len(views) if last else 0, view[: len(view) - size] if last else view[size:])
        size -= min(size, len(view))


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

    def ready(self, indexes: Iterable[int | range]) -> None:
        """These ranges may leave now. Saying it twice changes nothing."""
        for run in consecutive(indexes):
            start, stop = self.manifest.span(run)
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
