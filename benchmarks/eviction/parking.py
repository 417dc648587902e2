"""A queue whose items may be out of reach for a while."""

from collections import OrderedDict

from hybrid_cache.eviction.base import Key


class ParkingQueue:
    """Oldest first. An item that is due but not offered is parked, and is the next one due once it is offered again."""

    def __init__(self) -> None:
        self._queue: OrderedDict[Key, None] = OrderedDict()
        self._parked: set[Key] = set()

    def __len__(self) -> int:
        return len(self._queue) + len(self._parked)

    def __contains__(self, key: Key) -> bool:
        return key in self._queue or key in self._parked

    def append(self, key: Key) -> None:
        self._parked.discard(key)
        self._queue[key] = None
        self._queue.move_to_end(key)

    def unpark(self, key: Key) -> None:
        if key in self._parked:
            self._parked.remove(key)
            self._queue[key] = None
            self._queue.move_to_end(key, last=False)

    def remove(self, key: Key) -> None:
        self._parked.discard(key)
        self._queue.pop(key, None)

    def pop_offered(self, offered: set[Key]) -> Key | None:
        """The oldest offered item, or None if none of this queue is offered."""
        while self._queue:
            key, _ = self._queue.popitem(last=False)
            if key in offered:
                return key
            self._parked.add(key)
        return None
