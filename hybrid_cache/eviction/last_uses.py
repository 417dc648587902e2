"""The last use of each of many blocks, stored a run of blocks at a time, and which of them were used least lately.

A run is what one request used together, in the order of its path. Blocks are chained: who uses a block uses all before it. So
a run that is used again is so from its beginning on, and mostly as a whole: then nothing is done for each of its blocks.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import repeat, takewhile
from operator import is_
from typing import Final

from hybrid_cache.eviction.base import Key
from hybrid_cache.eviction.cohorts import Cohort

SLACK: Final = 1024  # entries of keys that are not chained, before they are looked for


class LastUse(list[Key]):
    """The last use of these blocks: its request, their class, and its number among the uses of each.

    It is a list, for the memory of a use of one block, and equal to none but itself.
    """

    __slots__ = ("class_id", "cohort", "newer", "older", "uses")
    __eq__ = object.__eq__
    __ne__ = object.__ne__

    def __init__(self, cohort: Cohort, class_id: int, uses: int, keys: Sequence[Key]) -> None:
        super().__init__(keys)
        self.cohort = cohort
        self.class_id = class_id
        self.uses = uses
        self.older = self.newer = self  # its neighbours in the order of use


class LastUses:
    """By block."""

    def __init__(self) -> None:
        self._by_key: dict[Key, LastUse] = {}
        self._ends = LastUse(Cohort(0.0), 0, 0, ())  # between the newest run and the oldest one
        self._listed = 0  # keys of all runs
        self.get = self._by_key.get

    def __len__(self) -> int:
        return len(self._by_key)

    def __contains__(self, key: Key) -> bool:
        return key in self._by_key

    def runs_of(self, path: Sequence[Key], most: int) -> Iterator[tuple[LastUse | None, int]]:
        """The last uses of a path's blocks, each with how many neighbours it is of, at most so many."""
        start = 0
        while start < len(path):
            run = self.get(path[start])
            if run is None:  # nor is what comes after it known
                yield from ((None, min(most, len(path) - at)) for at in range(start, len(path), most))
                return
            count = len(run)
            stop = start + count
            if stop > len(path) or run[0] != path[start] or run[-1] != path[stop - 1]:
                count = sum(1 for _ in takewhile(partial(is_, run), map(self.get, path[start : start + most])))
            yield run, count
            start += count

    def put(self, keys: Sequence[Key], cohort: Cohort, class_id: int, uses: int, before: LastUse | None) -> None:
        """These blocks were used now, `before` until now."""
        if before is not None:
            if len(before) == len(keys):
                before.cohort, before.class_id, before.uses = cohort, class_id, uses
                _unlink(before)
                _link(before, self._ends)
                return
            self._take(before, keys)
        run = LastUse(cohort, class_id, uses, keys)
        _link(run, self._ends)
        self._by_key.update(zip(run, repeat(run)))
        self._listed += len(keys)
        if self._listed > 2 * len(self._by_key) + SLACK:
            self._drop_stale()

    def take_end(self, run: LastUse, keys: Sequence[Key]) -> LastUse | None:
        """The last of some first blocks of a run is about to be put apart: returns what the others are of then."""
        if len(keys) == 1 or len(run) > len(keys) or run[-1] != keys[-1]:
            self._take(run, keys)
            return None
        run.pop()
        self._listed -= 1
        return run

    def num_alike(self, keys: Sequence[Key]) -> int:
        """How many of the first blocks have the same last use as the first one, in whatever order they are."""
        first = self.get(keys[0])
        if self.get(keys[-1]) is first and (uses := list(map(self.get, keys))).count(first) == len(uses):
            return len(uses)
        return sum(1 for _ in takewhile(partial(is_, first), map(self.get, keys)))

    def keep(self, most: int) -> None:
        """Forgets the blocks that were used least lately, but for so many: of a run, its end first."""
        while len(self._by_key) > most:
            run = self._ends.newer
            while run and len(self._by_key) > most:
                key = run.pop()
                self._listed -= 1
                if self.get(key) is run:
                    del self._by_key[key]
            if not run:
                _unlink(run)

    def _take(self, run: LastUse, keys: Sequence[Key]) -> None:
        if run[: len(keys)] == list(keys):
            del run[: len(keys)]
            self._listed -= len(keys)
            if not run:
                _unlink(run)

    def _drop_stale(self) -> None:
        """What was used again out of the middle of a run, which chained blocks are not."""
        self._listed, run = 0, self._ends.newer
        while run is not self._ends:
            run[:] = [key for key in run if self.get(key) is run]
            self._listed += len(run)
            if not run:
                _unlink(run)
            run = run.newer


def _link(run: LastUse, before: LastUse) -> None:
    run.older, run.newer = before.older, before
    run.older.newer = before.older = run


def _unlink(run: LastUse) -> None:
    """It goes on to know its neighbours."""
    run.older.newer, run.newer.older = run.newer, run.older
