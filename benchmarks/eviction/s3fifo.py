"""S3-FIFO (Yang et al., SOSP'23): a small queue filters what is used once, a ghost queue remembers it."""

from collections import OrderedDict
from typing import Final

from benchmarks.eviction.parking import ParkingQueue
from hybrid_cache.eviction.base import EvictionPolicy, Key, Use

MAX_FREQUENCY: Final = 3
PROMOTE_FREQUENCY: Final = 2


class S3FIFO(EvictionPolicy):
    """Queues of 10 % and 90 % of `capacity` items; the ghost queue remembers as many keys as the main queue holds items."""

    def __init__(self, capacity: int) -> None:
        self._small_size = max(1, capacity // 10)
        self._ghost_size = capacity * 9 // 10
        self._small = ParkingQueue()
        self._main = ParkingQueue()
        self._ghost: OrderedDict[Key, None] = OrderedDict()
        self._frequency: dict[Key, int] = {}
        self._offered: set[Key] = set()

    def begin(self, use: Use) -> None:
        pass

    def touch(self, key: Key, now: float) -> None:
        if key in self._frequency:
            self._frequency[key] = min(MAX_FREQUENCY, self._frequency[key] + 1)
            return
        self._frequency[key] = 0
        if key in self._ghost:
            del self._ghost[key]
            self._main.append(key)
        else:
            self._small.append(key)

    def offer(self, key: Key, now: float) -> None:
        if key not in self._frequency:
            self.touch(key, now)
        self._offered.add(key)
        self._small.unpark(key)
        self._main.unpark(key)

    def withdraw(self, key: Key) -> None:
        self._offered.discard(key)

    def forget(self, key: Key) -> None:
        self._offered.discard(key)
        self._small.remove(key)
        self._main.remove(key)
        self._frequency.pop(key, None)

    def pop_victim(self, now: float, incoming: Key | None = None) -> Key:
        while True:
            from_small = len(self._small) >= self._small_size or not len(self._main)
            queues = (self._small, self._main) if from_small else (self._main, self._small)
            for queue in queues:
                key = queue.pop_offered(self._offered)
                if key is not None:
                    break
            assert key is not None, "nothing was offered"
            if self._leaves(key, queue is self._small):
                del self._frequency[key]
                self._offered.discard(key)
                return key
            self._main.append(key)

    def _leaves(self, key: Key, from_small: bool) -> bool:
        if from_small:
            if self._frequency[key] >= PROMOTE_FREQUENCY:
                self._frequency[key] = 0
                return False
            self._ghost[key] = None
            if len(self._ghost) > self._ghost_size:
                self._ghost.popitem(last=False)
            return True
        if self._frequency[key] >= 1:
            self._frequency[key] -= 1
            return False
        return True
