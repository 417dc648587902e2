"""One expected transfer: its state, its memory after the end, and the right to write one chunk of it."""

import hmac
from collections.abc import Callable
from dataclasses import dataclass, field

from transport.wire.frames import MAX_LIST, Cancel, Code, Open
from transport.wire.manifest import Inbox, Manifest, RangeViews, proof_of
from transport.wire.outcome import TransferOutcome
from transport.wire.sizes import RangeSizes, SizesOutline


@dataclass(frozen=True, slots=True, kw_only=True)
class LandingResult:
    """How a landing ended."""

    transfer_id: str
    ok: bool
    reason: str  # empty, or a frames.Code
    detail: str
    bytes_total: int
    bytes_landed: int
    duplicate_bytes: int
    chunks: int
    rejected_chunks: int
    lossy_bytes: int  # quantised on the way: what landed is close to what was sent, but not the same
    first_byte_at: float  # on the clock of the listener (time.monotonic); 0 = nothing came
    done_at: float


OnLanded = Callable[[LandingResult], None]
SinkOf = Callable[[int], memoryview]
Notices = list[tuple[int, Cancel]]  # connections, and what each is to be told


@dataclass(slots=True, eq=False, kw_only=True)
class Landing:
    """One expected transfer. `bytes_landed` and `missing()` may be read at any time."""

    transfer_id: str
    secret: bytes = field(repr=False)
    inbox: Inbox
    targets: RangeViews | None
    on_done: OnLanded | None
    deadline: float
    orphan_timeout_s: float
    exact: bool = True  # quantised chunks are refused
    sender: str = ""  # who alone may open it, of those whose names are known; empty: any
    lossy_bytes: int = 0
    broken_seals: int = 0
    outcome: TransferOutcome | None = None
    senders: set[int] = field(default_factory=set)  # connections that opened it
    orphaned_at: float = float("inf")
    first_byte_at: float = 0.0
    done_at: float = 0.0
    revoke_at: float = float("inf")

    @property
    def bytes_total(self) -> int:
        return self.inbox.manifest.total_bytes

    @property
    def bytes_landed(self) -> int:
        return self.inbox.landed.num_bytes

    def missing(self) -> list[tuple[int, int]]:
        """The missing ranges, as offsets of the transfer's line of bytes."""
        return self.inbox.missing()

    def expires_at(self) -> float:
        return min(self.deadline, self.orphaned_at + self.orphan_timeout_s)

    def tell_owner(self) -> None:
        """Calls on_done, and lets go of its owner."""
        on_done, self.on_done = self.on_done, None
        if on_done is not None:
            on_done(self.result())

    def result(self) -> LandingResult:
        outcome = self.outcome or TransferOutcome()
        return LandingResult(
            transfer_id=self.transfer_id,
            ok=outcome.ok,
            reason=outcome.code,
            detail=outcome.detail,
            bytes_total=self.bytes_total,
            bytes_landed=self.bytes_landed,
            duplicate_bytes=self.inbox.duplicate_bytes,
            chunks=self.inbox.chunks,
            rejected_chunks=self.inbox.rejected_chunks,
            lossy_bytes=self.lossy_bytes,
            first_byte_at=self.first_byte_at,
            done_at=self.done_at,
        )


@dataclass(frozen=True, slots=True)
class Ended:
    """The record of an ended landing: enough for a late sender."""

    transfer_id: str
    secret: bytes = field(repr=False)
    sizes: RangeSizes | SizesOutline
    outcome: TransferOutcome
    sender: str

    @classmethod
    def of(cls, landing: Landing, outcome: TransferOutcome) -> "Ended":
        sizes = landing.inbox.manifest.sizes.kept()
        return cls(landing.transfer_id, landing.secret, sizes, outcome, landing.sender)

    def refusal(self, frame: Open, transcript: bytes) -> Code | None:
        """The reason why an Open may not bind to it."""
        expected = proof_of(self.secret, frame.transfer_id, frame.manifest_digest, transcript)
        if not hmac.compare_digest(expected, frame.proof):
            return Code.BAD_SECRET
        stated = (frame.manifest_digest, frame.num_ranges, frame.total_bytes)
        if stated != (self.sizes.digest, self.sizes.num_ranges, self.sizes.total_bytes):
            return Code.MANIFEST
        return None

    def complete_landing(self) -> Landing:
        """What a late sender's slot is bound to: nothing is missing, and what it has sent already is read past."""
        inbox = Inbox(Manifest([self.sizes.total_bytes]))
        inbox.landed.add(0, self.sizes.total_bytes)
        return Landing(
            transfer_id=self.transfer_id,
            secret=self.secret,
            inbox=inbox,
            targets=None,
            on_done=None,
            deadline=float("inf"),
            orphan_timeout_s=float("inf"),
            exact=False,
            sender=self.sender,
            outcome=self.outcome,
        )


@dataclass(frozen=True, slots=True)
class Claim:
    """The right of one connection to write one chunk, into `views`."""

    landing: Landing
    who: int
    slot: int
    start: int
    stop: int
    views: list[memoryview]

    @property
    def void(self) -> bool:
        """The landing failed while the chunk was coming in."""
        return self.landing.outcome is not None and not self.landing.outcome.ok


@dataclass(frozen=True, slots=True)
class Rivals:
    """These connections write into the same place; end them, then ask again."""

    who: tuple[int, ...]


def places_of(landing: Landing, start: int, stop: int, sink_of: SinkOf) -> list[memoryview]:
    """Memory for `[start, stop)`: the landing's own where bytes are missing, the sink where they have landed."""
    manifest, landed = landing.inbox.manifest, landing.inbox.landed
    gaps = landed.gaps(start, stop)
    if gaps == [(start, stop)] and landing.targets is not None:
        return manifest.views(landing.targets, start, stop)
    views: list[memoryview] = []
    sink = sink_of(stop - start)
    at = start
    for begin, end in [*gaps, (stop, stop)]:
        if at < begin:
            views.append(sink[at - start : begin - start])
        if begin < end and landing.targets is not None:
            views += manifest.views(landing.targets, begin, end)
        at = end
    return views


def few(missing: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """At most MAX_LIST ranges that cover all that is missing: the smallest gaps between them are closed first."""
    if len(missing) <= MAX_LIST:
        return tuple(missing)
    gaps = sorted(range(1, len(missing)), key=lambda i: missing[i][0] - missing[i - 1][1])
    joined = set(gaps[: len(missing) - MAX_LIST])
    few: list[tuple[int, int]] = []
    for i, (start, stop) in enumerate(missing):
        if i in joined:
            few[-1] = (few[-1][0], stop)
        else:
            few.append((start, stop))
    return tuple(few)
