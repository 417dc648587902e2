"""What a receiver expects, and what becomes of it: the pure registry behind a listener.

    expect ──> waiting ──Open──> landing ──last chunk──> done
                  └───────┬─────────┘
           cancel, deadline, Abort, sender lost ──────> failed

A landing that ended settles only when no connection writes into its memory any more; its owner hears of it then, and
only then may give the memory away.
"""

import hmac
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from transport.errors import LocalProtocolError, RemoteProtocolError, TargetFailed
from transport.frames import MAX_LIST, Abort, Accept, Ack, Cancel, Code, Nack, Open, Refuse
from transport.lanes import MAX_REJECTED_CHUNKS, Outcome
from transport.transfer import Inbox, Manifest, RangeViews, proof_of

# Ended landings are remembered, so that a sender whose last acknowledgement was lost hears "complete", not "unknown".
MAX_REMEMBERED: Final = 4096
MAX_SLOTS: Final = 1 << 16
MAX_ACTIVE: Final = 1 << 14
SEGMENT_PREFIX: Final = "segment:"
READ_PREFIX: Final = "read:"
REPLY_PREFIX: Final = "reply:"
MAX_READS: Final = 1024  # asked for, and not yet taken up by whoever serves them
WRITE_DEADLINE_S: Final = 600.0
WRITE_ORPHAN_S: Final = 30.0
REVOKE_S: Final = 1.0  # for a sender to confirm that it writes no more; then its queue pairs are closed


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
    lossy_bytes: int = 0
    broken_seals: int = 0
    outcome: Outcome | None = None
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
        """What has not landed, as offsets of the transfer's line of bytes."""
        return self.inbox.missing()

    def expires_at(self) -> float:
        return min(self.deadline, self.orphaned_at + self.orphan_timeout_s)

    def tell_owner(self) -> None:
        """Calls on_done, and lets go of whoever it belongs to."""
        on_done, self.on_done = self.on_done, None
        if on_done is not None:
            on_done(self.result())

    def result(self) -> LandingResult:
        outcome = self.outcome or Outcome()
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
    """What is remembered of a landing: enough for a sender that comes late."""

    transfer_id: str
    secret: bytes = field(repr=False)
    manifest_digest: bytes
    num_ranges: int
    total_bytes: int
    outcome: Outcome

    @classmethod
    def of(cls, landing: Landing, outcome: Outcome) -> "Ended":
        manifest = landing.inbox.manifest
        sizes = len(manifest.sizes), manifest.total_bytes
        return cls(landing.transfer_id, landing.secret, manifest.digest, *sizes, outcome)

    def complete_landing(self) -> Landing:
        """What a late sender's slot is bound to: nothing is missing, and what it has sent already is read past."""
        inbox = Inbox(Manifest([self.total_bytes]))
        inbox.landed.add(0, self.total_bytes)
        return Landing(
            transfer_id=self.transfer_id,
            secret=self.secret,
            inbox=inbox,
            targets=None,
            on_done=None,
            deadline=float("inf"),
            orphan_timeout_s=float("inf"),
            exact=False,
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


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """Memory that whoever knows the secret may write into, or read, without being expected."""

    view: memoryview
    secret: bytes = field(repr=False)
    readable: bool = False
    writable: bool = True


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """A one-sided read that was granted: `views` are to be pushed to `address`, where a landing `reply_id` waits."""

    name: str
    segment: Segment = field(repr=False)
    reply_id: str
    secret: bytes = field(repr=False)
    address: str
    views: tuple[memoryview, ...]


class Landings:
    """All landings of one listener."""

    def __init__(self) -> None:
        self.segments: dict[str, Segment] = {}
        self._active: dict[str, Landing] = {}
        self._ended: OrderedDict[str, Ended] = OrderedDict()
        self._slots: dict[int, dict[int, Landing]] = {}  # connection -> slot -> landing
        self._unsettled: list[Landing] = []
        self._reads: list[ReadRequest] = []
        self._granted: OrderedDict[str, None] = OrderedDict()  # reads, by id: one that is asked for again is one
        self._grants: dict[int, set[Landing]] = {}  # connection -> landings that its sender may write into by itself
        self.counters: Counter[str] = Counter()

    # what the owner of the memory does

    def expect(
        self,
        transfer_id: str,
        secret: bytes,
        sizes: Iterable[int],
        targets: RangeViews,
        *,
        on_done: OnLanded | None,
        deadline: float,
        orphan_timeout_s: float = float("inf"),
        exact: bool = True,
    ) -> Landing:
        if transfer_id in self._active:
            raise LocalProtocolError(f"transfer {transfer_id} is expected already")
        landing = Landing(
            transfer_id=transfer_id,
            secret=secret,
            inbox=Inbox(Manifest(sizes)),
            targets=targets,
            on_done=on_done,
            deadline=deadline,
            orphan_timeout_s=orphan_timeout_s,
            exact=exact,
        )
        self._ended.pop(transfer_id, None)
        self._active[transfer_id] = landing
        return landing

    def await_sender(self, transfer_id: str, now: float) -> None:
        """Somebody has promised to send: from now on the landing is an orphan as long as it has no sender."""
        landing = self._active.get(transfer_id)
        if landing is not None and not landing.senders:
            landing.orphaned_at = min(landing.orphaned_at, now)

    def unregister(self, name: str) -> None:
        """Nobody may read or write there any more; what was granted and has not begun is forgotten."""
        self.segments.pop(name, None)
        self._reads = [read for read in self._reads if read.name != name]

    def is_settling(self, prefix: str) -> bool:
        """Whether something still writes for a landing that ended."""
        return any(landing.transfer_id.startswith(prefix) for landing in self._unsettled)

    def take_reads(self) -> list[ReadRequest]:
        """Reads that were granted since the last time."""
        reads, self._reads = self._reads, []
        return reads

    def cancel(self, transfer_id: str, detail: str, now: float, code: Code = Code.CANCELLED) -> Notices:
        """Ends a landing; returns what to tell which connection. Unknown or ended ids are fine."""
        landing = self._active.get(transfer_id)
        return [] if landing is None else self._end(landing, Outcome(code, detail), now)

    def expire(self, now: float) -> Notices:
        """Ends what is past its deadline or has been without a sender for too long."""
        notices: Notices = []
        for landing in [x for x in self._active.values() if x.expires_at() <= now]:
            late = landing.deadline <= now
            outcome = Outcome(Code.DEADLINE if late else Code.SENDER_LOST, "nothing more came in time")
            notices += self._end(landing, outcome, now)
        return notices

    def next_deadline(self) -> float:
        expiries = (x.expires_at() for x in self._active.values())
        return min((*expiries, *(x.revoke_at for x in self._unsettled)), default=float("inf"))

    def overdue(self, now: float) -> set[int]:
        """Connections whose senders were told that a landing ended, and have not confirmed it; each is named once."""
        late = [x for x in self._unsettled if x.revoke_at <= now]
        for landing in late:
            landing.revoke_at = float("inf")
        return {who for landing in late for who in landing.inbox.granted}

    def active_ids(self) -> list[str]:
        return list(self._active)

    def take_settled(self) -> list[Landing]:
        """Landings that ended and into which nobody writes any more."""
        settled = [x for x in self._unsettled if not x.inbox.num_writers]
        self._unsettled = [x for x in self._unsettled if x.inbox.num_writers]
        for landing in settled:
            landing.targets = None
        return settled

    # what connections do

    def connected(self, who: int) -> None:
        self._slots[who] = {}

    def disconnected(self, who: int, now: float) -> None:
        """The connection is gone: what it was writing does not count."""
        for landing in self._grants.pop(who, set()):
            landing.inbox.granted.discard(who)
        for landing in set(self._slots.pop(who, {}).values()):
            landing.inbox.leave(who)
            landing.senders.discard(who)
            if not landing.senders:
                landing.orphaned_at = now

    def open(self, who: int, frame: Open, nonces: bytes, now: float) -> Accept | Refuse:
        """Binds a slot of a connection to a landing, if the sender can show the secret; or grants a read.

        Raises RemoteProtocolError for a slot that is bound already: the sender has not left it.
        """
        if frame.slot in self._slots[who]:
            raise RemoteProtocolError(f"slot {frame.slot} is opened again")
        if frame.transfer_id.startswith(READ_PREFIX):
            return self._read(frame, nonces)
        landing = self._landing_of(frame, nonces, now)
        if isinstance(landing, Code):
            self.counters[f"refused:{landing}"] += 1
            return Refuse(slot=frame.slot, code=landing)
        if landing.outcome is not None and not landing.outcome.ok:
            return Refuse(slot=frame.slot, code=landing.outcome.code, detail=landing.outcome.detail)
        slots = self._slots[who]
        if len(slots) >= MAX_SLOTS:
            raise RemoteProtocolError(f"more than {MAX_SLOTS} transfers on one connection")
        slots[frame.slot] = landing
        landing.senders.add(who)
        landing.orphaned_at = float("inf")
        if landing.inbox.complete:
            self._end(landing, Outcome(), now)
        return Accept(slot=frame.slot, missing=_few(landing.missing()))

    def bound(self, who: int, slot: int) -> Landing | None:
        """The landing that a slot of a connection is bound to."""
        return self._slots[who].get(slot)

    def abort(self, who: int, frame: Abort, now: float) -> Notices:
        """The sender is through with a slot: with its part of the transfer, or with all of it."""
        landing = self._slots[who].pop(frame.slot, None)
        if landing is None:
            return []
        if landing not in self._slots[who].values():
            landing.senders.discard(who)
            self._revoke(who, landing)
        if not landing.senders:
            landing.orphaned_at = now
        if frame.leave or landing.outcome is not None:
            return []
        return self._end(landing, Outcome(Code.ABORTED, frame.detail), now)

    def begin(self, who: int, slot: int, start: int, stop: int, sink_of: SinkOf, now: float) -> Claim | Rivals | None:
        """A chunk is about to come in: where it goes. None: nowhere, read past it.

        Parts that have landed before go into `sink_of(length of the chunk)`. Raises TargetFailed when the landing's owner
        does not say where the others belong.
        """
        landing = self._slots[who].get(slot)
        if landing is None or (landing.targets is None and not landing.inbox.complete):
            return None
        if stop > landing.bytes_total:
            raise RemoteProtocolError(f"chunk ends at {stop} of {landing.bytes_total} bytes")
        if landing.outcome is not None and not landing.outcome.ok:
            return None
        if rivals := landing.inbox.rivals(start, stop, who):
            return Rivals(tuple(rivals))
        try:
            places = _places(landing, start, stop, sink_of)
        except Exception as exc:
            raise TargetFailed(f"target: {exc!r}") from exc
        landing.inbox.begin(who, start, stop)
        landing.first_byte_at = landing.first_byte_at or now
        return Claim(landing, who, slot, start, stop, places)

    def takes(self, who: int, slot: int, *, lossy: bool) -> bool:
        """Whether a coded chunk may come in: into an exact landing only what decodes to what was sent."""
        landing = self._slots[who].get(slot)
        return landing is None or not (lossy and landing.exact)

    def reject(self, who: int, slot: int, start: int, length: int, code: Code) -> Nack | None:
        """A chunk that is not even written: it does not decode, or not to what is taken here."""
        self.counters[f"rejected:{code}"] += 1
        landing = self._slots[who].get(slot)
        if landing is None or (landing.outcome is not None and not landing.outcome.ok):
            return None
        landing.inbox.chunks += 1
        landing.inbox.rejected_chunks += 1
        return Nack(slot=slot, offset=start, length=length, code=code)

    def fail(self, who: int, slot: int, code: Code, detail: str, now: float) -> Notices:
        """Ends the landing that a slot is bound to, for a reason that another try will not cure."""
        landing = self._slots[who].get(slot)
        return [] if landing is None else self._end(landing, Outcome(code, detail), now)

    def break_seal(self, who: int, slot: int, now: float) -> Notices:
        """A chunk was not authentic, which ends its connection; too often, and it ends the landing."""
        landing = self._slots[who].get(slot)
        if landing is None:
            return []
        landing.broken_seals += 1
        if landing.broken_seals <= MAX_REJECTED_CHUNKS:
            return []
        return self.fail(who, slot, Code.SEAL, f"{landing.broken_seals} chunks were not authentic", now)

    def finish(self, claim: Claim, verified: bool, now: float, lossy_bytes: int = 0) -> Ack | Nack | None:
        """The chunk is in its place (or, not verified, it is as if it had never come)."""
        landing = claim.landing
        if landing.outcome is not None and not landing.outcome.ok:
            landing.inbox.leave(claim.who)
            return None
        landing.inbox.finish(claim.who, verified)
        if not verified:
            self.counters["rejected:checksum"] += 1
            return Nack(slot=claim.slot, offset=claim.start, length=claim.stop - claim.start, code=Code.CHECKSUM)
        landing.lossy_bytes += lossy_bytes
        if landing.inbox.complete:
            self._end(landing, Outcome(), now)
        return Ack(slot=claim.slot, ranges=((claim.start, claim.stop),))

    def grant(self, who: int, slot: int) -> Landing | Rivals | None:
        """The sender may from now on write by itself what is missing, until it lets go of the slot, or its connection
        is gone: the memory is not free before. None: there is nothing (any more) to write into.
        """
        landing = self._slots[who].get(slot)
        if landing is None or landing.outcome is not None:
            return None
        if rivals := landing.inbox.rivals(0, landing.bytes_total, who):
            return Rivals(tuple(rivals))
        landing.inbox.granted.add(who)
        self._grants.setdefault(who, set()).add(landing)
        return landing

    def is_granted(self, who: int, slot: int) -> bool:
        return self._slots[who].get(slot) in self._grants.get(who, ())

    def revoke(self, who: int, slot: int) -> None:
        """Nothing was, or will be, written by the sender itself."""
        landing = self._slots[who].get(slot)
        if landing is not None:
            self._revoke(who, landing)

    def _revoke(self, who: int, landing: Landing) -> None:
        landing.inbox.granted.discard(who)
        self._grants.get(who, set()).discard(landing)

    def withdraw(self, claim: Claim) -> None:
        """The chunk did not come to its end."""
        claim.landing.inbox.leave(claim.who)

    # inside

    def _landing_of(self, frame: Open, nonces: bytes, now: float) -> Landing | Code:
        """The landing that is asked for, or why it is not to be had; one that ended has its outcome."""
        landing, ended = self._active.get(frame.transfer_id), self._ended.get(frame.transfer_id)
        if landing is None and ended is None and frame.transfer_id.startswith(SEGMENT_PREFIX):
            expected = self._expect_write(frame, nonces, now)
            if isinstance(expected, Code):
                return expected
            landing = expected
        known = Ended.of(landing, Outcome()) if landing is not None else ended
        if known is None:
            return Code.UNKNOWN_TRANSFER
        return _refusal(known, frame, nonces) or landing or known.complete_landing()

    def _expect_write(self, frame: Open, nonces: bytes, now: float) -> Landing | Code:
        """A one-sided write into a segment becomes a landing of its own, once secret and bounds are right."""
        segment = self.segments.get(segment_of(frame.transfer_id))
        if segment is None:
            return Code.UNKNOWN_TRANSFER
        if refusal := _segment_refusal(segment, frame, nonces, allowed=segment.writable):
            return refusal
        if len(self._active) >= MAX_ACTIVE:
            return Code.TOO_MANY
        targets = [[segment.view[offset : offset + length]] for offset, length in frame.placement]
        return self.expect(
            frame.transfer_id,
            segment.secret,
            [length for _, length in frame.placement],
            targets,
            on_done=None,
            deadline=now + WRITE_DEADLINE_S,
            orphan_timeout_s=WRITE_ORPHAN_S,
        )

    def _read(self, frame: Open, nonces: bytes) -> Accept | Refuse:
        """What is read leaves as a transfer of its own; of the request itself nothing is missing."""
        name, reply_id, address = parse_read_id(frame.transfer_id)
        segment = self.segments.get(name)
        if segment is None:
            refusal: Code | None = Code.UNKNOWN_TRANSFER
        else:
            refusal = _segment_refusal(segment, frame, nonces, allowed=segment.readable)
        if refusal is None and frame.manifest_digest != Manifest(length for _, length in frame.placement).digest:
            refusal = Code.MANIFEST
        if refusal is None and len(self._reads) >= MAX_READS:
            refusal = Code.TOO_MANY
        if refusal is not None or segment is None:
            code = refusal or Code.UNKNOWN_TRANSFER
            self.counters[f"refused:{code}"] += 1
            return Refuse(slot=frame.slot, code=code)
        if frame.transfer_id not in self._granted:  # else it was asked again because the answer was lost
            self._granted[frame.transfer_id] = None
            if len(self._granted) > MAX_REMEMBERED:
                self._granted.popitem(last=False)
            views = tuple(segment.view[offset : offset + length] for offset, length in frame.placement)
            secret = reply_secret(segment.secret, reply_id)
            self._reads.append(ReadRequest(name, segment, reply_id, secret, address, views))
            self.counters["reads"] += 1
        return Accept(slot=frame.slot, missing=())

    def _end(self, landing: Landing, outcome: Outcome, now: float) -> Notices:
        if self._active.get(landing.transfer_id) is not landing:  # over already; the id may be another one's by now
            return []
        del self._active[landing.transfer_id]
        landing.outcome = outcome
        landing.done_at = now
        self._ended[landing.transfer_id] = Ended.of(landing, outcome)
        while len(self._ended) > MAX_REMEMBERED:
            self._ended.popitem(last=False)
        self._unsettled.append(landing)
        if outcome.ok:  # the last chunk was announced: none of its writes, nor of those before it, is under way
            for who in set(landing.inbox.granted):
                self._revoke(who, landing)
        elif landing.inbox.granted:
            landing.revoke_at = now + REVOKE_S
        self.counters["landed" if outcome.ok else f"failed:{outcome.code}"] += 1
        if outcome.ok:
            return []
        return [
            (who, Cancel(slot=slot, code=outcome.code, detail=outcome.detail))
            for who, slots in self._slots.items()
            for slot, bound in slots.items()
            if bound is landing
        ]


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
    """What the pushed bytes of a read show themselves with: known to both sides, never on the wire, good for one read."""
    return hmac.digest(segment_secret, reply_id.encode(), "sha256")


def _segment_refusal(segment: Segment, frame: Open, nonces: bytes, *, allowed: bool) -> Code | None:
    expected = proof_of(segment.secret, frame.transfer_id, frame.manifest_digest, nonces)
    if not hmac.compare_digest(expected, frame.proof):
        return Code.BAD_SECRET
    if not allowed:
        return Code.ACCESS
    if any(offset + length > len(segment.view) for offset, length in frame.placement):
        return Code.OUT_OF_BOUNDS
    return None


def _refusal(known: Ended, frame: Open, nonces: bytes) -> Code | None:
    expected = proof_of(known.secret, frame.transfer_id, frame.manifest_digest, nonces)
    if not hmac.compare_digest(expected, frame.proof):
        return Code.BAD_SECRET
    stated = (frame.manifest_digest, frame.num_ranges, frame.total_bytes)
    if stated != (known.manifest_digest, known.num_ranges, known.total_bytes):
        return Code.MANIFEST
    return None


def _places(landing: Landing, start: int, stop: int, sink_of: SinkOf) -> list[memoryview]:
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


def _few(missing: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
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
