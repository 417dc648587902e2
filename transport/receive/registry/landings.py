"""The transfers that a receiver expects, and their outcomes: the pure registry behind a listener.

    expect ──> waiting ──Open──> landing ──last chunk──> done
                  └───────┬─────────┘
           cancel, deadline, Abort, sender lost ──────> failed

A landing that ended settles only when no connection writes into its memory any more; its owner hears of it then, and
only then may give the memory away.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable
from typing import Final

from transport.errors import LocalProtocolError, PeerLost, RemoteProtocolError, TargetFailed
from transport.receive.registry.activity import Activity
from transport.receive.registry.landing import Claim, Ended, Landing, Notices, OnLanded, Rivals, SinkOf, few, places_of
from transport.receive.registry.segments import MAX_READS, READ_PREFIX, SEGMENT_PREFIX, Segments
from transport.wire.frames import Abort, Accept, Ack, Cancel, Code, Nack, Open, Refuse
from transport.wire.manifest import Inbox, Manifest, RangeViews
from transport.wire.outcome import MAX_REJECTED_CHUNKS, TransferOutcome
from transport.wire.sizes import RangeSizes

# Ended landings are remembered, so that a sender whose last acknowledgement was lost hears "complete", not "unknown".
MAX_REMEMBERED: Final = 4096
MAX_SLOTS: Final = 1 << 16
MAX_SLOTS_OF_TRANSFER: Final = 16  # of one connection: a sender has one, and leaves it before it opens another
MAX_ACTIVE: Final = 1 << 14
WRITE_DEADLINE_S: Final = 600.0
WRITE_ORPHAN_S: Final = 30.0
REVOKE_S: Final = 1.0  # for a sender to confirm that it writes no more; then its queue pairs are closed


class Landings:
    """All landings of one listener."""

    def __init__(
        self, *, max_active: int = MAX_ACTIVE, max_reads: int = MAX_READS, plain_from: frozenset[str] = frozenset()
    ) -> None:
        """Of `plain_from`, clusters, senders may come without a session where others need one."""
        self._max_active = max_active
        self._plain_from = plain_from
        self.segments = Segments(max_reads=max_reads)
        self.active: dict[str, Landing] = {}  # by id: those that have not ended
        self._ended: OrderedDict[str, Ended] = OrderedDict()
        self._slots: dict[int, dict[int, Landing]] = {}  # connection -> slot -> landing
        self._unsettled: list[Landing] = []
        self.places: dict[int, str] = {}  # connection -> CLUSTER/NAME of its sender, where it is known
        self.activity = Activity()
        self._grants: dict[int, set[Landing]] = {}  # connection -> landings that its sender may write into by itself
        self.counters: Counter[str] = Counter()

    # what the owner of the memory does

    def expect(
        self,
        transfer_id: str,
        secret: bytes,
        sizes: Iterable[int] | RangeSizes,
        targets: RangeViews,
        *,
        on_done: OnLanded | None,
        deadline: float,
        orphan_timeout_s: float = float("inf"),
        exact: bool = True,
        sender: str = "",
    ) -> Landing:
        if transfer_id in self.active:
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
            sender=sender,
        )
        self._ended.pop(transfer_id, None)
        self.active[transfer_id] = landing
        return landing

    def await_sender(self, transfer_id: str, now: float) -> None:
        """A sender has been promised: from now on the landing is an orphan as long as it has no sender."""
        landing = self.active.get(transfer_id)
        if landing is not None and not landing.senders:
            landing.orphaned_at = min(landing.orphaned_at, now)

    def is_settling(self, prefix: str) -> bool:
        """Whether something still writes for a landing that ended."""
        return any(landing.transfer_id.startswith(prefix) for landing in self._unsettled)

    def cancel(self, transfer_id: str, detail: str, now: float, code: Code = Code.CANCELLED) -> Notices:
        """Ends a landing; returns the message for each connection. Unknown or ended ids are fine."""
        landing = self.active.get(transfer_id)
        return [] if landing is None else self._end(landing, TransferOutcome(code, detail), now)

    def expire(self, now: float) -> Notices:
        """Ends what is past its deadline or has been without a sender for too long."""
        notices: Notices = []
        for landing in [x for x in self.active.values() if x.expires_at() <= now]:
            late = landing.deadline <= now
            outcome = TransferOutcome(Code.DEADLINE if late else Code.SENDER_LOST, "nothing more came in time")
            notices += self._end(landing, outcome, now)
        return notices

    def next_deadline(self) -> float:
        expiries = (x.expires_at() for x in self.active.values())
        return min((*expiries, *(x.revoke_at for x in self._unsettled)), default=float("inf"))

    def overdue(self, now: float) -> set[int]:
        """Connections whose senders were told that a landing ended, and have not confirmed it; each is named once."""
        late = [x for x in self._unsettled if x.revoke_at <= now]
        for landing in late:
            landing.revoke_at = float("inf")
        return {who for landing in late for who in landing.inbox.granted}

    def active_ids(self) -> list[str]:
        return list(self.active)

    def take_settled(self) -> list[Landing]:
        """Landings that ended and are not written to any more."""
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
        self.activity.gone(who)
        self.places.pop(who, None)
        for landing in self._grants.pop(who, set()):
            landing.inbox.granted.discard(who)
        for landing in set(self._slots.pop(who, {}).values()):
            landing.inbox.leave(who)
            landing.senders.discard(who)
            if not landing.senders:
                landing.orphaned_at = now

    def open(self, who: int, frame: Open, transcript: bytes, now: float) -> Accept | Refuse:
        """Binds a slot of a connection to a landing, if the sender can show the secret; or grants a read.

        Raises RemoteProtocolError for a slot that is bound already: the sender has not left it.
        """
        if frame.slot in self._slots[who]:
            raise RemoteProtocolError(f"slot {frame.slot} is opened again")
        is_plain = bool(self._plain_from) and who not in self.places
        if is_plain and frame.transfer_id.startswith((READ_PREFIX, SEGMENT_PREFIX)):
            return refused(self.counters, frame, Code.ACCESS)  # one-sided: nothing says whose they are
        if frame.transfer_id.startswith(READ_PREFIX):
            self.activity.opened(who, None, now)
            return self._read(frame, transcript)
        landing = self._landing_of(frame, transcript, now)
        if isinstance(landing, Landing) and landing.sender and self.places.get(who, landing.sender) != landing.sender:
            landing = Code.ACCESS  # the ticket is another's
        if is_plain and isinstance(landing, Landing) and not comes_from(self._plain_from, landing):
            landing = Code.ACCESS  # its sender must seal
        if isinstance(landing, Code):
            return refused(self.counters, frame, landing)
        if landing.outcome is not None and not landing.outcome.ok:
            return Refuse(slot=frame.slot, code=landing.outcome.code, detail=landing.outcome.detail)
        slots = self._slots[who]
        if len(slots) >= MAX_SLOTS:
            raise RemoteProtocolError(f"more than {MAX_SLOTS} transfers on one connection")
        if sum(other.transfer_id == frame.transfer_id for other in slots.values()) >= MAX_SLOTS_OF_TRANSFER:
            raise RemoteProtocolError(f"more than {MAX_SLOTS_OF_TRANSFER} slots for one transfer")
        slots[frame.slot] = landing
        landing.senders.add(who)
        landing.orphaned_at = float("inf")
        if landing.inbox.complete:
            self._end(landing, TransferOutcome(), now)
        self.activity.opened(who, landing, now)
        return Accept(slot=frame.slot, missing=few(landing.missing()))

    def bound(self, who: int, slot: int) -> Landing | None:
        """The landing that a slot of a connection is bound to."""
        return self._slots[who].get(slot)

    def abort(self, who: int, frame: Abort, now: float) -> Notices:
        """The sender has finished with a slot: with its part of the transfer, or with all of it."""
        landing = self._slots[who].pop(frame.slot, None)
        if landing is None:
            return []
        if landing not in self._slots[who].values():
            landing.senders.discard(who)
            self._revoke(who, landing)
            self.activity.ended([who], landing, now)
        if not landing.senders:
            landing.orphaned_at = now
        if frame.leave or landing.outcome is not None:
            return []
        return self._end(landing, TransferOutcome(Code.ABORTED, frame.detail), now)

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
        if self._plain_from and who not in self.places and not comes_from(self._plain_from, landing):  # any more
            return None
        if rivals := landing.inbox.rivals(start, stop, who):
            return Rivals(tuple(rivals))
        try:
            places = places_of(landing, start, stop, sink_of)
        except PeerLost:  # no memory for what has landed already: the connection ends, not the landing
            raise
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
        return [] if landing is None else self._end(landing, TransferOutcome(code, detail), now)

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
            self._end(landing, TransferOutcome(), now)
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

    def _landing_of(self, frame: Open, transcript: bytes, now: float) -> Landing | Code:
        """The landing that an Open names, or why it is refused; an ended one gives its outcome."""
        landing, ended = self.active.get(frame.transfer_id), self._ended.get(frame.transfer_id)
        if landing is None and ended is None and frame.transfer_id.startswith(SEGMENT_PREFIX):
            return self._expect_write(frame, transcript, now)
        known = Ended.of(landing, TransferOutcome()) if landing is not None else ended
        if known is None:
            return Code.UNKNOWN_TRANSFER
        return known.refusal(frame, transcript) or landing or known.complete_landing()

    def _expect_write(self, frame: Open, transcript: bytes, now: float) -> Landing | Code:
        """A one-sided write becomes a landing of its own, once everything in its Open is correct."""
        segment = self.segments.to_write(frame, transcript)
        if isinstance(segment, Code):
            return segment
        if len(self.active) >= self._max_active:
            return Code.TOO_MANY_LANDINGS
        return self.expect(
            frame.transfer_id,
            segment.secret,
            [length for _, length in frame.placement],
            [[segment.view[offset : offset + length]] for offset, length in frame.placement],
            on_done=None,
            deadline=now + WRITE_DEADLINE_S,
            orphan_timeout_s=WRITE_ORPHAN_S,
        )

    def _read(self, frame: Open, transcript: bytes) -> Accept | Refuse:
        """The read's own request needs no bytes: nothing is missing."""
        refusal = self.segments.read(frame, transcript)
        if refusal is not None:
            return refused(self.counters, frame, refusal)
        self.counters["reads"] += 1
        return Accept(slot=frame.slot, missing=())

    def _end(self, landing: Landing, outcome: TransferOutcome, now: float) -> Notices:
        if self.active.get(landing.transfer_id) is not landing:  # it has ended, and a later landing may have its id
            return []
        del self.active[landing.transfer_id]
        landing.outcome = outcome
        landing.done_at = now
        self._ended[landing.transfer_id] = Ended.of(landing, outcome)
        while len(self._ended) > MAX_REMEMBERED:
            self._ended.popitem(last=False)
        self._unsettled.append(landing)
        self.activity.ended(landing.senders, landing, now)
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


def refused(counters: Counter[str], frame: Open, code: Code) -> Refuse:
    """The answer to an Open that is refused, counted."""
    counters[f"refused:{code}"] += 1
    return Refuse(slot=frame.slot, code=code)


def comes_from(clusters: frozenset[str], landing: Landing) -> bool:
    """Whether its sender is a node of one of them."""
    return landing.sender.partition("/")[0] in clusters
