"""Pages that each tenant has reserved: a tenant with many requests leaves some pages to other tenants.

The rule binds only while another tenant is active: it holds pages, waits for some, or has asked within LATELY_S. Reservations
without a tenant are counted; the rule neither binds them nor counts them as another tenant. Pure: `now` is given, in seconds.
"""

from collections import Counter
from itertools import chain, islice

from transport.turns import LATELY_S, leaves_room

MAX_FLOWS = 1024  # with a remembered time of asking; beyond it, the oldest is dropped
NOBODY = ""
TENANTS_PART = "tenants_part"  # the reason of a refusal: there is room, but for others


class TenantPages:
    """Pages by tenant."""

    def __init__(self) -> None:
        self._reserved: dict[str, tuple[str, int]] = {}  # tenant and pages of each reservation
        self._held: Counter[str] = Counter()
        self._waiting: Counter[str] = Counter()  # in the order in which tenants began to wait
        self._asked_at: dict[str, float] = {}  # in the order of their last requests

    def held(self, tenant: str) -> int:
        """Pages that are reserved for a tenant."""
        return self._held[tenant]

    def ask(self, tenant: str, now: float) -> None:
        """The tenant wants pages."""
        if tenant != NOBODY:
            self._asked_at.pop(tenant, None)
            self._asked_at[tenant] = now
            if len(self._asked_at) > MAX_FLOWS:
                del self._asked_at[next(iter(self._asked_at))]

    def may_have(self, tenant: str, wanted: int, free: int, now: float) -> bool:
        """Whether `wanted` pages of those that are free, or could be, may be reserved for it."""
        if tenant == NOBODY or leaves_room(self._held[tenant], free, wanted):
            return True
        return not self._are_others_about(tenant, now)

    def has_its_part(self, tenant: str, wanted: int) -> bool:
        """Whether one that may not have `wanted` pages lets others pass.

        One that holds less than it wants does not: what becomes free would go to small requests of others, one by one.
        """
        return self._held[tenant] >= wanted

    def reserved(self, name: str, tenant: str, pages: int) -> None:
        """A reservation of that name holds so many."""
        self._reserved[name] = tenant, pages
        self._held[tenant] += pages

    def released(self, name: str) -> None:
        """It holds none any more, if it did."""
        tenant, pages = self._reserved.pop(name, (NOBODY, 0))
        self._held[tenant] -= pages
        if not self._held[tenant]:
            del self._held[tenant]

    def waits(self, tenant: str) -> None:
        """A request of the tenant waits for pages, until `goes`."""
        self._waiting[tenant] += 1

    def goes(self, tenant: str) -> None:
        """It waits no more."""
        self._waiting[tenant] -= 1
        if not self._waiting[tenant]:
            del self._waiting[tenant]

    def is_first(self, tenant: str) -> bool:
        """Whether no other tenant that waits comes first: the one that holds least does."""
        return min(self._waiting, key=self._held.__getitem__, default=tenant) == tenant

    def _are_others_about(self, tenant: str, now: float) -> bool:
        if any(other not in (tenant, NOBODY) for other in chain(self._held, self._waiting)):
            return True
        last = islice(reversed(self._asked_at.items()), 2)
        return any(other != tenant and now - asked_at <= LATELY_S for other, asked_at in last)
