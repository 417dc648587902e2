"""ARC (Megiddo and Modha, FAST'03): balances recency and frequency by what it has just evicted wrongly.

T1 used once, T2 used again (both resident); B1, B2 ghosts of what left them; p = target size of T1
"""

from collections import OrderedDict

from benchmarks.eviction.parking import ParkingQueue
from hybrid_cache.eviction.base import EvictionPolicy, Key, Use


class ARC(EvictionPolicy):
    """The textbook rules with an integer target, for `capacity` items."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.target = 0
        self._once = ParkingQueue()
        self._again = ParkingQueue()
        self._once_ghosts: OrderedDict[Key, None] = OrderedDict()
        self._again_ghosts: OrderedDict[Key, None] = OrderedDict()
        self._offered: set[Key] = set()
        self._adapted: Key | None = None  # whose ghost hit `pop_victim` has taken into account already

    def begin(self, use: Use) -> None:
        pass

    def touch(self, key: Key, now: float) -> None:
        if key in self._once or key in self._again:
            self._once.remove(key)
            self._again.append(key)
            return
        known = key in self._once_ghosts or key in self._again_ghosts
        if known and key != self._adapted:
            self._adapt(key)
        self._adapted = None
        self._once_ghosts.pop(key, None)
        self._again_ghosts.pop(key, None)
        (self._again if known else self._once).append(key)

    def offer(self, key: Key, now: float) -> None:
        if key not in self._once and key not in self._again:
            self.touch(key, now)
        self._offered.add(key)
        self._once.unpark(key)
        self._again.unpark(key)

    def withdraw(self, key: Key) -> None:
        self._offered.discard(key)

    def forget(self, key: Key) -> None:
        self._offered.discard(key)
        self._once.remove(key)
        self._again.remove(key)

    def pop_victim(self, now: float, incoming: Key | None = None) -> Key:
        keep_ghost = True
        if incoming in self._once_ghosts or incoming in self._again_ghosts:
            self._adapt(incoming)
            self._adapted = incoming
        else:
            keep_ghost = self._trim_ghosts()
        return self._replace(incoming in self._again_ghosts, keep_ghost)

    def _adapt(self, key: Key) -> None:
        once, again = len(self._once_ghosts), len(self._again_ghosts)
        if key in self._once_ghosts:
            self.target = min(self.capacity, self.target + max(again // once, 1))
        else:
            self.target = max(0, self.target - max(once // again, 1))

    def _trim_ghosts(self) -> bool:
        """Case IV: makes room in the directory; says whether the next victim leaves a ghost."""
        once = len(self._once) + len(self._once_ghosts)
        if once >= self.capacity:
            if not self._once_ghosts:
                return False
            self._once_ghosts.popitem(last=False)
        elif once + len(self._again) + len(self._again_ghosts) >= 2 * self.capacity and self._again_ghosts:
            self._again_ghosts.popitem(last=False)
        return True

    def _replace(self, again_hit: bool, keep_ghost: bool) -> Key:
        once = len(self._once)
        first = once > self.target or (again_hit and once == self.target) or not keep_ghost
        order = (self._once, self._again) if once and first else (self._again, self._once)
        for queue in order:
            key = queue.pop_offered(self._offered)
            if key is None:
                continue
            self._offered.discard(key)
            if queue is self._again:
                self._again_ghosts[key] = None
            elif keep_ghost:
                self._once_ghosts[key] = None
            return key
        raise AssertionError("nothing was offered")
