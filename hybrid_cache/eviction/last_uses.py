"""The last use of each of many blocks, stored a run of blocks at a time, and which of them were used least lately.

A run is what one request used together. Its blocks are listed in the order of their path, so from its end on they are the older
ones. A block that is used again is in a later run, too: what the earlier one lists is stale then. Stale entries are dropped when
they surface, or once they outnumber the others: then some runs are looked at with each new one.
"""

from collections import deque
from itertools import repeat
from typing import Final

from hybrid_cache.eviction.base import Key
from hybrid_cache.eviction.cohorts import Cohort

STALE_SHARE: Final = 2  # so many times the blocks may be listed until runs are looked at
SLACK: Final = 1024  # and so many more
LOOKED_AT: Final = 4  # for each new block: more than one, so that the stale ones grow fewer


class LastUse:
    """The last use of some blocks: its request, their class, and its number among the uses of each."""

    __slots__ = ("class_id", "cohort", "keys", "uses")

    def __init__(self, cohort: Cohort, class_id: int, uses: int, keys: list[Key]) -> None:
        self.cohort = cohort
        self.class_id = class_id
        self.uses = uses
        self.keys = keys  # in the order of their path


class LastUses:
    """By block."""

    def __init__(self) -> None:
        self._by_key: dict[Key, LastUse] = {}
        self._seen: deque[LastUse] = deque()  # the oldest runs, which have been looked at
        self._runs: deque[LastUse] = deque()  # the others, the oldest first
        self._listed = 0  # blocks of all runs
        self.get = self._by_key.get

    def __len__(self) -> int:
        return len(self._by_key)

    def __contains__(self, key: Key) -> bool:
        return key in self._by_key

    def put(self, run: LastUse) -> None:
        """These blocks were used now."""
        self._by_key.update(zip(run.keys, repeat(run)))
        self._runs.append(run)
        self._listed += len(run.keys)
        if self._listed > STALE_SHARE * len(self._by_key) + SLACK:
            self._drop_stale(LOOKED_AT * len(run.keys))

    def keep(self, most: int) -> None:
        """Forgets the blocks that were used least lately, but for so many."""
        while len(self._by_key) > most:
            runs = self._seen or self._runs
            run = runs[0]
            while run.keys and len(self._by_key) > most:
                key = run.keys.pop()
                self._listed -= 1
                if self._by_key.get(key) is run:
                    del self._by_key[key]
            if not run.keys:
                runs.popleft()

    def _drop_stale(self, looks: int) -> None:
        get = self._by_key.get
        while looks > 0 and self._runs:
            run = self._runs.popleft()
            before = len(run.keys)
            run.keys = [key for key in run.keys if get(key) is run]
            self._listed -= before - len(run.keys)
            looks -= before
            if run.keys:
                self._seen.append(run)
        if not self._runs:
            self._seen, self._runs = self._runs, self._seen
