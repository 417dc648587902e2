"""SIEVE eviction (Zhang et al., NSDI 2024): which of many endpoints to close.

Entries stand in order of arrival. The hand goes from the oldest to the newest. It spares, once, an entry that was used
since it last came by. It takes the first that was not. One bit an entry, no move on use, and scans do not wash out what
is used often.
"""

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class Sieve(Generic[K]):
    def __init__(self) -> None:
        self._used: dict[K, bool] = {}  # oldest first
        self._hand: K | None = None  # where the next search begins

    def __len__(self) -> int:
        return len(self._used)

    def touch(self, key: K) -> None:
        """`key` is used; it is added when it is new."""
        self._used[key] = key in self._used

    def remove(self, key: K) -> None:
        if key == self._hand:
            self._hand = self._after(key)
        self._used.pop(key, None)

    def evict(self, may_go: Callable[[K], bool] = lambda _: True) -> K | None:
        """Removes and returns an entry; None when none may go."""
        keys = list(self._used)
        start = keys.index(self._hand) if self._hand in self._used else 0
        order = keys[start:] + keys[:start]
        for key in order + order:  # the second round finds what the first one spared
            if not may_go(key):
                continue
            if self._used[key]:
                self._used[key] = False
                continue
            self._hand = self._after(key)
            del self._used[key]
            return key
        return None

    def _after(self, key: K) -> K | None:
        keys = list(self._used)
        following = keys[keys.index(key) + 1 :] if key in self._used else []
        return following[0] if following else None
