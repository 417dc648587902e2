"""What each tenant has taken of its limits; `planner.decisions.admission.limits` says what follows from that.

Processes of one gateway share a file, in which a tenant has a row: its name (a digest), when its buckets will be full
again, its weight, and its claims: the places among the gateway's requests in flight that it holds or waits for. By process:
its requests under way, the tokens that it is about to have pinned, and its claims. The parent clears the columns of a
worker that has died: what it had under way is no more. One that starts clears its own, too. A gateway that replaces
another one has columns beside those of its predecessor, which ends its requests meanwhile.
"""

from collections.abc import Callable, Mapping
from hashlib import blake2b
from math import ceil
from pathlib import Path
from types import MappingProxyType
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gateway.auth.keyring import Tenant
from gateway.config.tenants import MAX_TENANTS
from gateway.errors import TenantLimited
from gateway.shared_array import CELL_BYTES, SharedArray
from planner.decisions.admission.limits import (
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
NAME, REQUESTS, TOKENS, WEIGHT, CLAIMS, OWN_CELLS = range(6)
BY_WORKER: Final = 3  # cells
NAME_BYTES: Final = 6  # as a number, exact in a float

MESSAGES: Final = {
    Limit.REQUESTS: "more requests per minute than its limit of {}",
    Limit.TOKENS: "more tokens per minute than its limit of {}",
    Limit.AT_ONCE: "more requests at once than its limit of {}",
}


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
        self._array = SharedArray(path, np.float64, num_cells=ROWS * width)
        # Column by column: a sum over all tenants takes microseconds.
        self._cells = self._array.cells.reshape(width, ROWS).T
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
        SharedArray.create(path, ROWS * (OWN_CELLS + BY_WORKER * workers))

    @staticmethod
    def places_in(path: Path) -> int:
        """For how many a file was created. Raises OSError."""
        return (path.stat().st_size // (CELL_BYTES * ROWS) - OWN_CELLS) // BY_WORKER

    def close(self) -> None:
        """Lets go of the file; it must not be asked any more."""
        del self._cells
        self._array.close()

    def enter(self, tenant: Tenant) -> TenantLimiter:
        """Lets a request of this tenant in. Raises TenantLimited."""
        if not tenant.limits.are_any:
            return UNLIMITED
        used, now = self.change(tenant, lambda used, now: entered(tenant.limits, used, now))
        return _Limited(self, tenant, headers_of(tenant.limits, used, now))

    def change(self, tenant: Tenant, change: Callable[[Used, float], Used | LimitRefusal]) -> tuple[Used, float]:
        """What the tenant has taken after `change` of what it had by now, and now. Raises TenantLimited."""
        now = self._clock()
        used, changed = self._written(tenant.name, change, now)
        if isinstance(changed, LimitRefusal):
            raise _refused(tenant.limits, changed, used, now)
        return changed, now

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

    def _written(
        self, tenant: str, change: Callable[[Used, float], Used | LimitRefusal], now: float
    ) -> tuple[Used, Used | LimitRefusal]:
        """Used before and after. A frame of its own: an exception would keep the map open for as long as it is kept."""
        with self._array.locked():
            row = self._cells[self._row(tenant, now)]
            used = Used(float(row[REQUESTS]), float(row[TOKENS]), int(row[OWN_CELLS : self._pins.start].sum()))
            changed = change(used, now)
            if isinstance(changed, Used):
                row[REQUESTS], row[TOKENS] = changed.requests_full_at, changed.tokens_full_at
                row[self._own] += changed.at_once - used.at_once
        return used, changed

    def _row(self, tenant: str, now: float) -> int:
        name = 1.0 + int.from_bytes(blake2b(tenant.encode(), digest_size=NAME_BYTES).digest())
        row = self._rows.get(tenant)
        if row is not None and self._cells[row, NAME] == name:
            return row
        names = self._cells[:, NAME]
        found = np.flatnonzero(names == name)
        if not len(found):
            full = (self._cells[:, REQUESTS] <= now) & (self._cells[:, TOKENS] <= now)
            found = np.flatnonzero((names == 0) | (full & ~self._cells[:, OWN_CELLS:].any(axis=1)))
            # If no row is free, the row of a tenant that a reload removed long ago is given up: it says least.
            self._cells[found[0] if len(found) else 0] = 0
            found = found if len(found) else np.zeros(1, np.intp)
            self._cells[found[0], NAME] = name
        if len(self._rows) >= ROWS:
            self._rows.clear()
        self._rows[tenant] = int(found[0])
        return int(found[0])


class _Limited(TenantLimiter):
    """That of a tenant with limits, which has entered."""

    def __init__(self, allowances: TenantLimiters, tenant: Tenant, headers: Mapping[str, str]) -> None:
        self.headers = headers
        self._allowances = allowances
        self._tenant = tenant
        self._places = 1

    def check(self) -> None:
        if self._tenant.limits.tokens:
            self._allowances.change(self._tenant, lambda used, now: solvent(self._tenant.limits, used, now))

    def read(self, tokens: int, answers: int) -> None:
        limits = self._tenant.limits
        used, now = self._allowances.change(self._tenant, lambda used, now: read(limits, used, tokens, answers, now))
        self._places = answers
        self.headers = headers_of(limits, used, now)

    def settle(self, tokens: int) -> None:
        limits = self._tenant.limits
        if limits.tokens and tokens:
            self._allowances.change(self._tenant, lambda used, now: settled(limits, used, tokens, now))

    def leave(self) -> None:
        places, self._places = self._places, 0
        self._allowances.change(self._tenant, lambda used, _: used._replace(at_once=used.at_once - places))


def headers_of(limits: TenantLimits, used: Used, now: float) -> dict[str, str]:
    """What is left of each bucket, in OpenAI's headers."""
    headers: dict[str, str] = {}
    if limits.requests:
        headers |= _told("requests", left(limits.requests, used.requests_full_at, now))
    if limits.tokens:
        headers |= _told("tokens", left(limits.tokens, used.tokens_full_at, now))
    return headers


def _told(what: str, bucket: Left) -> dict[str, str]:
    return {
        f"x-ratelimit-limit-{what}": str(bucket.limit),
        f"x-ratelimit-remaining-{what}": str(bucket.remaining),
        f"x-ratelimit-reset-{what}": span(bucket.full_in_s),
    }


def span(seconds: float) -> str:
    """As OpenAI writes it: 0s, 250ms, 6s, 1m30s."""
    if seconds < 1:
        return f"{ceil(1000 * seconds)}ms" if seconds > 0 else "0s"
    minutes, rest = divmod(ceil(seconds), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"


def _refused(limits: TenantLimits, refusal: LimitRefusal, used: Used, now: float) -> TenantLimited:
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
        headers_of(limits, used, now),
    )
