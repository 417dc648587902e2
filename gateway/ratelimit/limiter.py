"""What each tenant has taken of its limits; `planner.decisions.admission.limits` says what follows from that.

Processes of one gateway share a file, in which a tenant has a row: its name (a digest), when its buckets will be full
again, its weight, and its claims: the places among the gateway's requests in flight that it holds or waits for. By process:
its requests under way, the tokens that it is about to have pinned, and its claims. The parent clears the columns of a
worker that has died: what it had under way is no more. One that starts clears its own, too. A gateway that replaces
another one has columns beside those of its predecessor, which ends its requests meanwhile.

Beside other gateways (`gateway.fleet`), a head says how this one stands among them, and a row which parts of the tenant's
limits are ours (0: none of its own; else 1 more than the part), by which parts its buckets are to be read, and what was asked
for since the row began.
"""

from collections.abc import Callable, Collection, Mapping
from hashlib import blake2b
from math import ceil, floor
from pathlib import Path
from types import MappingProxyType
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gateway.auth.keyring import Tenant
from gateway.config.tenants import MAX_TENANTS
from gateway.errors import TenantLimited
from gateway.ratelimit.parts import (
    LEAST_PART,
    LEAST_PARTS,
    WHOLE,
    Parts,
    Standing,
    larger,
    limits_of,
    places_elsewhere,
    refitted,
)
from gateway.shared_array import CELL_BYTES, SharedArray
from planner.decisions.admission.limits import (
    Bucket,
    Left,
    Limit,
    LimitRefusal,
    TenantLimits,
    Used,
    entered,
    left,
    read,
    settled,
    solvent,
)
from planner.decisions.admission.places import Entry, TenantPlaces
from planner.decisions.admission.waiting import TenantShare

ROWS: Final = 4 * MAX_TENANTS  # those of tenants that are no more are used again when they say nothing any more
HEAD_CELLS: Final = 8
AT_START, FAIR, RENEWED_AT, JOINED_AT = range(4)  # of the head; all 0 where there are no other gateways
NAME, REQUESTS, TOKENS, WEIGHT, CLAIMS, HELD, FIT, ASKED, OWN_CELLS = 0, 1, 2, 3, 4, 5, 8, 11, 16
HELD_CELLS, FIT_CELLS, ASKED_CELLS = slice(HELD, FIT), slice(FIT, ASKED), slice(ASKED, OWN_CELLS)
BY_WORKER: Final = 3  # cells
NAME_BYTES: Final = 6  # as a number, exact in a float

MESSAGES: Final = {
    Limit.REQUESTS: "more requests per minute than its limit of {}",
    Limit.TOKENS: "more tokens per minute than its limit of {}",
    Limit.AT_ONCE: "more requests at once than its limit of {}",
}


class Asked(NamedTuple):
    """What a tenant has asked this gateway for since its row began, granted or not; `at_once` is what it has under way."""

    requests: float
    tokens: float
    readings: float  # requests whose tokens are counted
    unread: float  # requests that were refused for tokens, before theirs were known
    unplaced: float  # requests that were refused for those under way
    at_once: int


class LimitsTaken(NamedTuple):
    """What a tenant has taken of these limits, by `now`."""

    limits: TenantLimits
    used: Used
    now: float


Change = Callable[[TenantLimits, Used, float], Used | LimitRefusal]


class TenantLimiter:
    """What a request may take, and has; to be left once, when the request is over."""

    headers: Mapping[str, str] = MappingProxyType({})  # for the client

    def check(self) -> None:
        """Raises TenantLimited while tokens are owed: a prompt need not be read then."""

    def read(self, tokens: int, answers: int) -> None:
        """Takes `tokens` of its prompts, and a place for each of its answers. Raises TenantLimited."""

    def settle(self, tokens: int) -> None:
        """So many more tokens, or fewer, than were taken."""

    def leave(self) -> None:
        """It is over."""


UNLIMITED: Final = TenantLimiter()


class TenantLimiters:
    """Those of all tenants: in this process alone, or in a file that has been created for several, as `own` sees it."""

    def __init__(self, clock: Callable[[], float], path: Path | None = None, *, own: int | None = 0) -> None:
        """None of it is its `own` for one who clears what others had. Raises OSError."""
        self._clock = clock
        self._rows: dict[str, int] = {}
        self._own = OWN_CELLS + (own or 0)
        self._workers = workers = 1 if path is None else self.places_in(path)
        self._pins = slice(OWN_CELLS + workers, OWN_CELLS + 2 * workers)
        width = OWN_CELLS + BY_WORKER * workers
        self._array = SharedArray(path, np.float64, num_cells=HEAD_CELLS + ROWS * width)
        self._head = self._array.cells[:HEAD_CELLS]
        # Column by column: a sum over all tenants takes microseconds.
        self._cells = self._array.cells[HEAD_CELLS:].reshape(width, ROWS).T
        if own is not None:
            self.clear(own)

    def clear(self, worker: int) -> None:
        """What this worker had under way is no more."""
        columns = [OWN_CELLS + number * self._workers + worker for number in range(BY_WORKER)]
        with self._array.locked():
            self._cells[:, columns] = 0
            # Summed anew: it may have been killed when it had written one of a claim's two numbers.
            self._cells[:, CLAIMS] = self._cells[:, self._pins.stop :].sum(axis=1)

    @staticmethod
    def create(path: Path, workers: int) -> None:
        """A file for so many. Raises OSError."""
        SharedArray.create(path, HEAD_CELLS + ROWS * (OWN_CELLS + BY_WORKER * workers))

    @staticmethod
    def places_in(path: Path) -> int:
        """For how many a file was created. Raises OSError."""
        return (path.stat().st_size // (CELL_BYTES * ROWS) - OWN_CELLS) // BY_WORKER

    def close(self) -> None:
        """Lets go of the file; it must not be asked any more."""
        del self._cells, self._head
        self._array.close()

    def enter(self, tenant: Tenant) -> TenantLimiter:
        """Lets a request of this tenant in. Raises TenantLimited."""
        if not tenant.limits.are_any:
            return UNLIMITED
        granted = self.change(tenant, entered, _Asking(requests=1))
        return _Limited(self, tenant, headers_of(tenant.limits, granted))

    def change(self, tenant: Tenant, change: Change, asking: "_Asking | None" = None) -> LimitsTaken:
        """Applies `change` to the tenant's counts as of now, and returns the new counts. Raises TenantLimited."""
        now = self._clock()
        before, changed = self._written(tenant, change, asking, now)
        if isinstance(changed, LimitRefusal):
            raise _refused(tenant.limits, changed, before)
        return before._replace(used=changed)

    @property
    def are_shared(self) -> bool:
        """Whether there may be other processes."""
        return self._workers > 1

    def about_to_pin(self, tenant: str, tokens: int) -> int:
        """This worker is about to have so many more tokens kept for a tenant, or fewer; returns what others are about to."""
        with self._array.locked():
            row = self._cells[self._row(tenant, self._clock())]
            row[self._own + self._workers] += tokens
            return int(row[self._pins].sum() - row[self._own + self._workers])

    def claim(self, share: TenantShare, decide: Callable[[TenantPlaces], Entry]) -> Entry:
        """What `decide` says of one more request of a tenant with these claims; meanwhile no other process decides.

        Unless it is refused, the tenant has another claim, to be given up once.
        """
        with self._array.locked():
            row = self._cells[self._row(share.flow, self._clock())]
            row[WEIGHT] = share.weight
            decision = decide(self._claims(row))
            if decision is not Entry.REFUSED:
                self._add_claims(row, 1)
        return decision

    def claims(self, share: TenantShare) -> TenantPlaces:
        """Those of a tenant."""
        with self._array.locked():
            row = self._cells[self._row(share.flow, self._clock())]
            row[WEIGHT] = share.weight
            return self._claims(row)

    def give_up(self, share: TenantShare) -> None:
        """A claim of the tenant is no more."""
        with self._array.locked():
            self._add_claims(self._cells[self._row(share.flow, self._clock())], -1)

    def _claims(self, row: NDArray[np.float64]) -> TenantPlaces:
        own, weight = int(row[CLAIMS]), float(row[WEIGHT])
        weights = float(self._cells[:, WEIGHT] @ (self._cells[:, CLAIMS] > 0))
        return TenantPlaces(own, weight, max(0.0, weights - weight) if own else weights)

    def _add_claims(self, row: NDArray[np.float64], by: int) -> None:
        row[CLAIMS] += by
        row[self._own + 2 * self._workers] += by

    # Beside other gateways

    def stand(self, standing: Standing | None) -> None:
        """How this gateway stands among others from now on; None: there are no others."""
        with self._array.locked():
            self._head[:] = 0
            if standing is not None:
                self._head[AT_START], self._head[FAIR] = standing.at_start, standing.fair
                self._head[RENEWED_AT], self._head[JOINED_AT] = standing.renewed_at, standing.joined_at

    @property
    def standing(self) -> Standing | None:
        """As all workers know it."""
        at_start, fair, renewed_at, joined_at = self._head[: JOINED_AT + 1].tolist()
        if not at_start:
            return None
        return Standing(at_start=at_start, fair=fair, renewed_at=renewed_at, joined_at=joined_at)

    def hold(self, held: Mapping[str, Parts], renewed_at: float | None, fair: float) -> None:
        """These tenants have parts of their own, and no others do. None: the claim was not renewed."""
        with self._array.locked():
            now = self._clock()
            self._refit(now)
            self._head[FAIR] = fair
            if renewed_at is not None:
                self._head[RENEWED_AT] = renewed_at
            rows = {self._row(name, now): parts for name, parts in held.items()}
            others = np.ones(ROWS, np.bool_)
            others[list(rows)] = False
            self._cells[others, HELD_CELLS] = 0
            for row, parts in rows.items():
                self._cells[row, HELD_CELLS] = [1.0 + part for part in parts]
            self._refit(now)

    def refit(self) -> None:
        """Has buckets fill by the parts that hold now. To be called now and then: time alone may change them."""
        with self._array.locked():
            self._refit(self._clock())

    def asked(self, tenants: Collection[str]) -> dict[str, Asked]:
        """What those of these tenants have asked for that have come here."""
        with self._array.locked():
            rows = np.flatnonzero(self._cells[:, NAME])
            names = dict(zip(self._cells[rows, NAME].tolist(), rows.tolist(), strict=True))
            found = {tenant: names[key] for tenant in tenants if (key := _digest(tenant)) in names}
            return {tenant: self._asked(row) for tenant, row in found.items()}

    def at_once(self, tenant: str) -> int:
        """Its requests under way here."""
        with self._array.locked():
            return self._under_way(self._cells[self._row(tenant, self._clock())])

    def _asked(self, row: int) -> Asked:
        requests, tokens, readings, unread, unplaced = self._cells[row, ASKED_CELLS].tolist()
        return Asked(requests, tokens, readings, unread, unplaced, self._under_way(self._cells[row]))

    def _under_way(self, row: NDArray[np.float64]) -> int:
        return int(row[OWN_CELLS : self._pins.start].sum())

    def _refit(self, now: float) -> None:
        standing = self.standing
        if standing is None:
            return
        rows = np.flatnonzero(self._cells[:, NAME])
        held = self._cells[rows, HELD_CELLS] - 1.0
        parts = np.empty((len(rows), len(WHOLE)))
        parts[:] = standing.parts(None, now)
        has_own = held[:, 0] >= 0.0
        if standing.has_lapsed_to_fair(now):
            has_own[:] = False
        elif standing.is_lapsed(now):
            held = np.minimum(held, parts)
        parts[has_own] = held[has_own]
        parts = np.maximum(parts, LEAST_PART)
        fit = self._cells[rows, FIT_CELLS]
        fit[fit == 0.0] = 1.0
        for number, column in enumerate((REQUESTS, TOKENS)):
            before, after, full_at = fit[:, number], parts[:, number], self._cells[rows, column]
            moved = refitted(full_at, before, after, now)
            self._cells[rows, column] = np.where(before == after, full_at, moved)
        self._cells[rows, FIT_CELLS] = parts

    def _parts(self, row: NDArray[np.float64], now: float) -> Parts:
        if (standing := self.standing) is None:
            return WHOLE
        held = Parts(*(row[HELD_CELLS] - 1.0).tolist()) if row[HELD] else None
        return standing.parts(held, now)

    def _written(
        self, tenant: Tenant, change: Change, asking: "_Asking | None", now: float
    ) -> tuple[LimitsTaken, Used | LimitRefusal]:
        """Before and after. A frame of its own: an exception would keep the map open for as long as it is kept."""
        with self._array.locked():
            row = self._cells[self._row(tenant.name, now)]
            limits, used = self._granted(row, tenant.limits, now)
            changed = change(limits, used, now)
            if isinstance(changed, Used):
                row[REQUESTS], row[TOKENS] = changed.requests_full_at, changed.tokens_full_at
                row[self._own] += changed.at_once - used.at_once
            if asking is not None and self._head[AT_START]:
                row[ASKED_CELLS] += asking.cells(changed)
        return LimitsTaken(limits, used, now), changed

    def _granted(self, row: NDArray[np.float64], limits: TenantLimits, now: float) -> tuple[TenantLimits, Used]:
        """What this gateway may give of the limits now, and has given."""
        parts = WHOLE
        if self._head[AT_START]:
            parts = self._parts(row, now)
            self._fit(row, parts, now)
        # Places that only others may give count as taken.
        at_once = self._under_way(row) + places_elsewhere(limits, parts)
        return limits_of(limits, parts), Used(float(row[REQUESTS]), float(row[TOKENS]), at_once)

    @staticmethod
    def _fit(row: NDArray[np.float64], parts: Parts, now: float) -> None:
        after = larger(parts, LEAST_PARTS)
        before = Parts(*row[FIT_CELLS].tolist()) if row[FIT] else WHOLE
        if before == after:
            return
        for column, old, new in ((REQUESTS, before.requests, after.requests), (TOKENS, before.tokens, after.tokens)):
            if old != new:
                row[column] = refitted(row[column], old, new, now)
        row[FIT_CELLS] = after

    def _row(self, tenant: str, now: float) -> int:
        name = _digest(tenant)
        row = self._rows.get(tenant)
        if row is not None and self._cells[row, NAME] == name:
            return row
        names = self._cells[:, NAME]
        found = np.flatnonzero(names == name)
        if not len(found):
            full = (self._cells[:, REQUESTS] <= now) & (self._cells[:, TOKENS] <= now)
            is_used = self._cells[:, OWN_CELLS:].any(axis=1) | (self._cells[:, HELD] > 0)
            found = np.flatnonzero((names == 0) | (full & ~is_used))
            # If no row is free, the row of a tenant that a reload removed long ago is given up: it says least.
            self._cells[found[0] if len(found) else 0] = 0
            found = found if len(found) else np.zeros(1, np.intp)
            self._begin(self._cells[found[0]], name, now)
        if len(self._rows) >= ROWS:
            self._rows.clear()
        self._rows[tenant] = int(found[0])
        return int(found[0])

    def _begin(self, row: NDArray[np.float64], name: float, now: float) -> None:
        row[NAME] = name
        if (standing := self.standing) is not None:
            row[REQUESTS] = row[TOKENS] = standing.full_at(now)
            row[FIT_CELLS] = larger(standing.parts(None, now), LEAST_PARTS)


class _Asking(NamedTuple):
    """What a change asks for."""

    requests: float = 0.0
    tokens: float = 0.0
    readings: float = 0.0

    def cells(self, changed: Used | LimitRefusal) -> tuple[float, float, float, float, float]:
        """What it adds to a row's."""
        refused = changed.limit if isinstance(changed, LimitRefusal) else None
        unread = not self.readings and refused is Limit.TOKENS
        return self.requests, self.tokens, self.readings, float(unread), float(refused is Limit.AT_ONCE)


def _digest(tenant: str) -> float:
    return 1.0 + int.from_bytes(blake2b(tenant.encode(), digest_size=NAME_BYTES).digest())


class _Limited(TenantLimiter):
    """That of a tenant with limits, which has entered."""

    def __init__(self, allowances: TenantLimiters, tenant: Tenant, headers: Mapping[str, str]) -> None:
        self.headers = headers
        self._allowances = allowances
        self._tenant = tenant
        self._places = 1

    def check(self) -> None:
        if self._tenant.limits.tokens:
            self._allowances.change(self._tenant, solvent)

    def read(self, tokens: int, answers: int) -> None:
        granted = self._allowances.change(
            self._tenant,
            lambda limits, used, now: read(limits, used, tokens, answers, now),
            _Asking(tokens=tokens, readings=1),
        )
        self._places = answers
        self.headers = headers_of(self._tenant.limits, granted)

    def settle(self, tokens: int) -> None:
        if self._tenant.limits.tokens and tokens:
            self._allowances.change(
                self._tenant, lambda limits, used, now: settled(limits, used, tokens, now), _Asking(tokens=tokens)
            )

    def leave(self) -> None:
        places, self._places = self._places, 0
        self._allowances.change(self._tenant, lambda _, used, __: used._replace(at_once=used.at_once - places))


def headers_of(whole: TenantLimits, granted: LimitsTaken) -> dict[str, str]:
    """What is left of each bucket, in OpenAI's headers: of the whole limit, what this gateway may give."""
    headers: dict[str, str] = {}
    limits, used, now = granted
    if whole.requests and limits.requests:
        headers |= _told("requests", whole.requests, left(limits.requests, used.requests_full_at, now))
    if whole.tokens and limits.tokens:
        headers |= _told("tokens", whole.tokens, left(limits.tokens, used.tokens_full_at, now))
    return headers


def _told(what: str, whole: Bucket, bucket: Left) -> dict[str, str]:
    return {
        f"x-ratelimit-limit-{what}": str(floor(whole.per_minute)),
        f"x-ratelimit-remaining-{what}": str(bucket.remaining),
        f"x-ratelimit-reset-{what}": span(bucket.full_in_s),
    }


def span(seconds: float) -> str:
    """As OpenAI writes it: 0s, 250ms, 6s, 1m30s."""
    if seconds < 1:
        return f"{ceil(1000 * seconds)}ms" if seconds > 0 else "0s"
    minutes, rest = divmod(ceil(seconds), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"


def _refused(limits: TenantLimits, refusal: LimitRefusal, granted: LimitsTaken) -> TenantLimited:
    allowed = {
        Limit.REQUESTS: limits.requests and limits.requests.per_minute,
        Limit.TOKENS: limits.tokens and limits.tokens.per_minute,
        Limit.AT_ONCE: limits.at_once,
    }
    what = MESSAGES[refusal.limit].format(f"{allowed[refusal.limit]:.0f}")
    return TenantLimited(
        f"Your organisation has sent {what}. Please retry.",
        refusal.limit,
        refusal.wait_s,
        headers_of(limits, granted),
    )
