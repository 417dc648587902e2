"""A cache of bounded size that tenants share fairly: the tenant that fills it loses its own entries.

The least recently used entry of the tenant with the most bytes goes first. So no tenant with less than an equal share
loses anything to others. Shared by threads.
"""

from collections import OrderedDict
from collections.abc import Hashable
from heapq import heapify, heappop, heappush, heapreplace
from threading import Lock
from typing import Any, Final

DEFAULT_BYTES: Final = 128 << 20
SPARE_SIZES: Final = 64
ENTRY_BYTES: Final = 256  # of an entry beside what it says it holds: its key, and its places in tables


class _Shelf:
    """One tenant's entries."""

    __slots__ = ("entries", "held_bytes")

    def __init__(self) -> None:
        self.entries: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()
        self.held_bytes = 0


class FairCache:
    """Values by tenant and key; `max_bytes` for all together."""

    def __init__(self, max_bytes: int = DEFAULT_BYTES) -> None:
        self.max_bytes = max_bytes
        self.held_bytes = 0
        self.hits = 0
        self.misses = 0
        self._shelves: dict[bytes, _Shelf] = {}
        # The fullest first: what each tenant holds, as a negative number, or held some time ago, if that was more.
        self._by_size: list[tuple[int, bytes]] = []
        self._lock = Lock()

    def __len__(self) -> int:
        return sum(len(shelf.entries) for shelf in self._shelves.values())

    def held_by(self, tenant: bytes) -> int:
        """Bytes that a tenant holds."""
        shelf = self._shelves.get(tenant)
        return shelf.held_bytes if shelf else 0

    def get(self, tenant: bytes, key: Hashable) -> Any:
        """The value; None if it is missing or gone."""
        with self._lock:
            shelf = self._shelves.get(tenant)
            found = shelf.entries.get(key) if shelf else None
            if shelf is None or found is None:
                self.misses += 1
                return None
            self.hits += 1
            shelf.entries.move_to_end(key)
            return found[0]

    def put(self, tenant: bytes, key: Hashable, value: Any, num_bytes: int) -> None:
        """Keeps a value, instead of the one before under the same key; too large a one is not kept at all."""
        num_bytes += ENTRY_BYTES
        with self._lock:
            self._remove(tenant, key)
            if num_bytes > self.max_bytes:
                return
            shelf = self._shelves.setdefault(tenant, _Shelf())
            shelf.entries[key] = value, num_bytes
            shelf.held_bytes += num_bytes
            self.held_bytes += num_bytes
            self._has_grown(tenant, shelf)
            while self.held_bytes > self.max_bytes:
                fullest = self._fullest(tenant)
                self._remove(fullest, next(iter(self._shelves[fullest].entries)))

    def drop(self, tenant: bytes, key: Hashable) -> None:
        """Forgets a value, if it is there."""
        with self._lock:
            self._remove(tenant, key)

    def _fullest(self, newcomer: bytes) -> bytes:
        own = self._shelves[newcomer].held_bytes
        if own * len(self._shelves) >= self.held_bytes:  # an equal share or more: no other need be looked at
            return newcomer
        while True:
            size, tenant = self._by_size[0]
            shelf = self._shelves.get(tenant)
            if shelf is None:
                heappop(self._by_size)
            elif shelf.held_bytes != -size:
                heapreplace(self._by_size, (-shelf.held_bytes, tenant))
            else:
                return tenant

    def _has_grown(self, tenant: bytes, shelf: _Shelf) -> None:
        heappush(self._by_size, (-shelf.held_bytes, tenant))
        if len(self._by_size) > 2 * len(self._shelves) + SPARE_SIZES:
            self._by_size = [(-each.held_bytes, name) for name, each in self._shelves.items()]
            heapify(self._by_size)

    def _remove(self, tenant: bytes, key: Hashable) -> None:
        shelf = self._shelves.get(tenant)
        if shelf is None or key not in shelf.entries:
            return
        _, num_bytes = shelf.entries.pop(key)
        shelf.held_bytes -= num_bytes
        self.held_bytes -= num_bytes
        if not shelf.entries:
            del self._shelves[tenant]
