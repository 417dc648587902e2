"""Rails: pairs of NICs that carry the transfers to one peer side by side. Tracks which may be used, and the chunks on
each.

A rail is a reliable queue pair. It never comes back to life: a failed one is closed, and a new one, under the next
attempt number, is agreed on over the control connection.

    RESTING ──offer──► OFFERED ──answer──► PROVING ──proof──► UP
       ▲                  │                   │               │
       └────── fail ──────┴───────────────────┴───────────────┘         after each failure a longer rest

Any completion but success means that the rail is gone; a port's state means nothing, it stays ACTIVE while every packet
is lost. So a new queue pair must first carry a write of no bytes (PROVING) before any chunk depends on it. And no
completion at all, long after the NIC should have given up, means it as well: soft-RoCE at times keeps on trying for ever
when its own link goes down.

Everything here is pure: the time comes in, decisions go out.
"""

from array import array
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final, Generic, TypeVar

from transport.errors import LocalProtocolError
from transport.rdma.topology import RailPlan

REST_FIRST_S: Final = 0.05
REST_MAX_S: Final = 2.0
ANSWER_S: Final = 5.0  # for the peer to answer an offer, and for the first write to come through
MAX_WRITE_BYTES: Final = 1 << 30  # of one work request; the verbs allow 2^31

K = TypeVar("K")


class RailState(Enum):
    RESTING = auto()
    OFFERED = auto()
    PROVING = auto()
    UP = auto()


class RailEvent(Enum):
    OFFER = auto()
    ANSWER = auto()
    PROOF = auto()
    FAIL = auto()


TRANSITIONS: Final[dict[RailState, dict[RailEvent, RailState]]] = {
    RailState.RESTING: {RailEvent.OFFER: RailState.OFFERED},
    RailState.OFFERED: {RailEvent.ANSWER: RailState.PROVING, RailEvent.FAIL: RailState.RESTING},
    RailState.PROVING: {RailEvent.PROOF: RailState.UP, RailEvent.FAIL: RailState.RESTING},
    RailState.UP: {RailEvent.FAIL: RailState.RESTING},
}


@dataclass(slots=True, eq=False)
class Rail:
    """One pair of NICs over time."""

    index: int
    plan: RailPlan
    state: RailState = RailState.RESTING
    attempt: int = 0
    failures: int = 0  # since it last carried something
    rest_until: float = 0.0
    due_by: float = float("inf")  # answer, proof, or the next completion
    bytes_carried: int = 0
    failed: Counter[str] = field(default_factory=Counter)  # by reason
    times_up: int = 0

    def enter(self, event: RailEvent) -> None:
        """Raises LocalProtocolError when the state forbids it."""
        try:
            self.state = TRANSITIONS[self.state][event]
        except KeyError:
            raise LocalProtocolError(f"{event.name} on a rail that is {self.state.name}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class RailReport:
    """A rail as operators see it."""

    peer: str
    local: str
    remote: str
    fabric: str
    tier: int  # 0 = preferred at both ends
    up: bool
    times_up: int
    bytes_total: int
    failures: Mapping[str, int]  # by reason


class RailTable:
    """All rails to one peer."""

    def __init__(self, plans: Sequence[RailPlan]) -> None:
        self.rails = [Rail(index, plan) for index, plan in enumerate(plans)]

    def plan(self, plans: Sequence[RailPlan]) -> None:
        """Sets the pairs of NICs; if they are unchanged, rails keep their counts."""
        if [rail.plan for rail in self.rails] != list(plans):
            self.rails = [Rail(index, plan) for index, plan in enumerate(plans)]

    def restart(self) -> None:
        """The connection that agreed on the rails is gone, and so are the rails."""
        for rail in self.rails:
            rail.state, rail.failures, rail.rest_until, rail.due_by = RailState.RESTING, 0, 0.0, float("inf")

    def reports(self, peer: str) -> list[RailReport]:
        return [
            RailReport(
                peer=peer,
                local=rail.plan.local,
                remote=rail.plan.remote,
                fabric=rail.plan.fabric,
                tier=rail.plan.tier,
                up=rail.state is RailState.UP,
                times_up=rail.times_up,
                bytes_total=rail.bytes_carried,
                failures=dict(rail.failed),
            )
            for rail in list(self.rails)
        ]

    def find(self, index: int, attempt: int) -> Rail | None:
        """The rail that a frame names; None when that attempt is over."""
        rail = self.rails[index] if index < len(self.rails) else None
        return rail if rail is not None and rail.attempt == attempt and rail.state is not RailState.RESTING else None

    def due(self, now: float) -> list[Rail]:
        """Rails to offer now: preferred pairs always, the others while no preferred one is up."""
        return [rail for rail in self._wanted() if rail.rest_until <= now]

    def _wanted(self) -> list[Rail]:
        preferred_up = any(rail.state is RailState.UP and rail.plan.tier == 0 for rail in self.rails)
        return [r for r in self.rails if r.state is RailState.RESTING and not (r.plan.tier and preferred_up)]

    def late(self, now: float) -> list[Rail]:
        """Rails whose answer, proof or next completion did not come in time."""
        return [rail for rail in self.rails if rail.state is not RailState.RESTING and rail.due_by <= now]

    def carriers(self) -> list[Rail]:
        """Rails that chunks may be put on: those that are up, of the best tier that has any."""
        up = [rail for rail in self.rails if rail.state is RailState.UP]
        best = min((rail.plan.tier for rail in up), default=0)
        return [rail for rail in up if rail.plan.tier == best]

    @property
    def exhausted(self) -> bool:
        """Nothing is up and every pair has failed since it last worked: time for TCP, until one is up again."""
        return all(rail.state is not RailState.UP and rail.failures for rail in self.rails)

    def next_timer(self) -> float:
        """When due() or late() may have something new."""
        rests = (rail.rest_until for rail in self._wanted())
        deadlines = (rail.due_by for rail in self.rails if rail.state is not RailState.RESTING)
        return min((*rests, *deadlines), default=float("inf"))

    def offered(self, rail: Rail, now: float) -> None:
        rail.enter(RailEvent.OFFER)
        rail.attempt += 1
        rail.due_by = now + ANSWER_S

    def answered(self, rail: Rail, now: float) -> None:
        rail.enter(RailEvent.ANSWER)
        rail.due_by = now + ANSWER_S

    def proved(self, rail: Rail) -> None:
        rail.enter(RailEvent.PROOF)
        rail.times_up += 1
        rail.due_by = float("inf")

    def watch(self, rail: Rail, now: float, silent_after_s: float, *, busy: bool, moved: bool) -> None:
        """A NIC that reports nothing about a rail's chunks for longer than it may try has lost them."""
        if rail.state is not RailState.UP:
            return
        if not busy:
            rail.due_by = float("inf")
        elif moved or rail.due_by == float("inf"):
            rail.due_by = now + silent_after_s

    def carried(self, rail: Rail, num_bytes: int) -> None:
        """Bytes of a chunk have arrived over it."""
        rail.failures = 0
        rail.bytes_carried += num_bytes

    def fail(self, rail: Rail, reason: str, now: float) -> None:
        rail.enter(RailEvent.FAIL)
        rail.failed[reason] += 1
        rail.rest_until = now + min(REST_MAX_S, REST_FIRST_S * 2 ** min(rail.failures, 10))
        rail.failures += 1
        rail.due_by = float("inf")


@dataclass(frozen=True, slots=True)
class RailWrite:
    """One work request: `length` bytes from an address of ours to one of the peer's."""

    source: int
    target: int
    length: int


def plan_writes(sources: Iterable[tuple[int, int]], targets: Iterable[tuple[int, int]]) -> list[RailWrite]:
    """The fewest writes that carry one list of (address, length) into another, of the same length in all."""
    writes: list[RailWrite] = []
    left = deque(pair for pair in targets if pair[1])
    for source, size in sources:
        while size:
            if not left:
                raise LocalProtocolError("more bytes than there is room for")
            target, room = left.popleft()
            take = min(size, room, MAX_WRITE_BYTES)
            writes.append(RailWrite(source, target, take))
            source, size = source + take, size - take
            if room > take:
                left.appendleft((target + take, room - take))
    if left:
        raise LocalProtocolError("more room than there are bytes")
    return writes


class MemoryPlacement:
    """Where the line of a transfer's bytes lies in one end's memory: (address, length) pairs, in order, 16 bytes each."""

    def __init__(self, extents: Iterable[tuple[int, int]] = ()) -> None:
        self._addresses = array("Q")
        self._ends = array("Q")
        self.add(extents)

    @property
    def num_bytes(self) -> int:
        return self._ends[-1] if self._ends else 0

    @property
    def num_extents(self) -> int:
        return len(self._ends)

    def add(self, extents: Iterable[tuple[int, int]]) -> None:
        """Appends extents. Raises OverflowError for bytes that lie in no memory."""
        end = self.num_bytes
        for address, length in extents:
            if length:
                end += length
                self._addresses.append(address)
                self._ends.append(end)

    def slice(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Where `[start, stop)` of the line lies."""
        if not 0 <= start <= stop <= self.num_bytes:
            raise LocalProtocolError(f"[{start}, {stop}) of {self.num_bytes} bytes")
        found: list[tuple[int, int]] = []
        index = bisect_right(self._ends, start)
        while start < stop:
            skip = start - (self._ends[index - 1] if index else 0)
            take = min(self._ends[index], stop) - start
            found.append((self._addresses[index] + skip, take))
            start, index = start + take, index + 1
        return found


@dataclass(frozen=True, slots=True)
class Posting:
    """A write as it goes onto the queue pair. The last one of a chunk carries the chunk's number."""

    wr_id: int
    write: RailWrite
    signalled: bool
    number: int | None = None


class SendQueue(Generic[K]):
    """The work of one queue pair: chunks, cut into writes that are posted as the queue has room.

    Of each chunk only the last write is signalled (and some in between, so that a long chunk frees its room): on a
    reliable queue pair its completion says that all before it have arrived. At most `max_unanswered` chunks are out,
    which is how many receives the peer keeps posted.
    """

    def __init__(self, *, room: int, max_unanswered: int) -> None:
        self._room = room
        self._max_unanswered = max_unanswered
        self._waiting: deque[tuple[Posting, K]] = deque()
        self._posted: deque[Posting] = deque()
        self._chunks: dict[int, K] = {}  # number -> chunk whose last write has not completed
        self._unanswered = 0
        self._next_wr_id = 0
        self._next_number = 0

    @property
    def wants_more(self) -> bool:
        """Whether the next chunk's writes could go out soon."""
        return not self._waiting and self.chunks_free > 0 and len(self._posted) < self._room

    @property
    def chunks_free(self) -> int:
        """Chunks that the peer has receives for, besides those that are out."""
        return self._max_unanswered - self._unanswered

    @property
    def next_number(self) -> int:
        """Of the chunk that is put next."""
        return self._next_number

    @property
    def busy(self) -> bool:
        """Whether any chunk has not completed."""
        return bool(self._chunks)

    @property
    def pending(self) -> list[K]:
        """Chunks that have not completed, oldest first."""
        return list(self._chunks.values())

    def put(self, chunk: K, writes: Sequence[RailWrite]) -> None:
        number = self._next_number
        self._next_number = (number + 1) & 0xFFFFFFFF
        self._chunks[number] = chunk
        self._unanswered += 1
        for i, write in enumerate(writes):
            last = i == len(writes) - 1
            signalled = last or (i + 1) % max(1, self._room // 2) == 0
            self._waiting.append((Posting(self._next_wr_id, write, signalled, number if last else None), chunk))
            self._next_wr_id += 1

    def take_postings(self) -> list[tuple[Posting, K]]:
        """The writes that may be posted now, each with its chunk."""
        postings = []
        while self._waiting and len(self._posted) < self._room:
            postings.append(self._waiting.popleft())
            self._posted.append(postings[-1][0])
        return postings

    def completed(self, wr_id: int) -> list[tuple[int, K]]:
        """This write, and with it all before it, is done; returns the chunks that are, with their numbers."""
        chunks = []
        while self._posted and self._posted[0].wr_id <= wr_id:
            number = self._posted.popleft().number
            if number is not None:
                chunks.append((number, self._chunks.pop(number)))
        return chunks

    def answered(self) -> None:
        """The peer has dealt with a completed chunk: its receive is posted anew."""
        assert self._unanswered
        self._unanswered -= 1
