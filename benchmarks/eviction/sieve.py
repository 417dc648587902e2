"""SIEVE (Zhang et al., NSDI'24): one queue, one bit, a hand that stays where it stopped."""

from hybrid_cache.eviction.base import EvictionPolicy, Key, Use


class SIEVE(EvictionPolicy):
    """New items enter at the head; the hand moves from tail to head, clears bits and takes the first unvisited item.

    Items that are not offered are passed over. The hand then walks, so it suits pools with few locked blocks.
    """

    def __init__(self) -> None:
        self._visited: dict[Key, bool] = {}
        self._newer: dict[Key, Key | None] = {}
        self._older: dict[Key, Key | None] = {}
        self._head: Key | None = None
        self._tail: Key | None = None
        self._hand: Key | None = None
        self._offered: set[Key] = set()

    def begin(self, use: Use) -> None:
        pass

    def touch(self, key: Key, now: float) -> None:
        if key in self._visited:
            self._visited[key] = True
            return
        self._visited[key] = False
        self._newer[key], self._older[key] = None, self._head
        if self._head is None:
            self._tail = key
        else:
            self._newer[self._head] = key
        self._head = key

    def offer(self, key: Key, now: float) -> None:
        if key not in self._visited:
            self.touch(key, now)
        self._offered.add(key)

    def withdraw(self, key: Key) -> None:
        self._offered.discard(key)

    def forget(self, key: Key) -> None:
        if key in self._visited:
            self._unlink(key)

    def pop_victim(self, now: float, incoming: Key | None = None) -> Key:
        at = self._tail if self._hand is None else self._hand
        while at not in self._offered or self._visited[at]:
            if at in self._offered:
                self._visited[at] = False
            at = self._tail if at is None or self._newer[at] is None else self._newer[at]
        self._hand = at
        self._unlink(at)
        return at

    def _unlink(self, key: Key) -> None:
        newer, older = self._newer.pop(key), self._older.pop(key)
        if newer is None:
            self._head = older
        else:
            self._older[newer] = older
        if older is None:
            self._tail = newer
        else:
            self._newer[older] = newer
        if self._hand == key:
            self._hand = newer
        del self._visited[key]
        self._offered.discard(key)
