"""What a node says of its cache to gateways far away: short names, and of attention blocks only every eighth.

Which blocks are named is decided by their hashes. So both ends agree on it, without a word about where in a prompt a block
lies. A short name is the beginning of a hash: two blocks may share one. That makes a gateway believe in a hit that is not
there, and costs that some tokens are computed. The node itself compares whole hashes, so no token can be wrong.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from hybrid_cache.cache.events import Medium
from hybrid_cache.hashing.block_hash import HASH_BYTES

NAME_BYTES: Final = 4
WHOLE_NAMES: Final = 16_384  # in one part of all that there is: some milliseconds
ONE_IN: Final = 8  # of the blocks of full attention; of all other groups each is named
_MASK: Final = ONE_IN - 1


@dataclass(frozen=True, slots=True)
class DigestPart:
    """Short names that a group of a node has got, and those that it has no longer.

    `medium` is the engine's own cache, whose blocks stay where they are, or MEMORY: whatever can be sent to other nodes.
    """

    group: int
    medium: Medium
    added: tuple[bytes, ...] = ()
    removed: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class DigestCleared:
    """What was said of the node before counts no more: what it has follows."""


DigestEvent = DigestPart | DigestCleared


def short_name(block_hash: bytes) -> bytes:
    return block_hash[:NAME_BYTES]


def named_at(hashes: Sequence[bytes], limit: int) -> list[int]:
    """Which of the first `limit` blocks of a prompt have names in digests, if they are of full attention."""
    last = np.frombuffer(b"".join(hashes[:limit]), np.uint8)[HASH_BYTES - 1 :: HASH_BYTES]
    named: list[int] = np.flatnonzero(last & _MASK == 0).tolist()
    return named


def split_names(data: bytes) -> list[bytes]:
    """Inverse of joining short names. Raises ValueError for a length that they cannot have."""
    if len(data) % NAME_BYTES:
        raise ValueError(f"{len(data)} bytes of names, which are of {NAME_BYTES} each")
    return [data[at : at + NAME_BYTES] for at in range(0, len(data), NAME_BYTES)]


class CacheDigest:
    """The short names of what a node has cached, and what of them has changed since `take`.

    Two blocks with one name count twice, and so does one in memory and on an SSD: the name goes with the last of them. A block
    that is said to be stored once more does not: a snapshot may have it before its event comes.
    """

    def __init__(self) -> None:
        self._held: dict[tuple[int, Medium], set[bytes]] = {}  # blocks with names
        self._counts: dict[tuple[int, Medium], Counter[bytes]] = {}  # of their names
        self._changed: dict[tuple[int, Medium], dict[bytes, bool]] = {}  # whether the name was there at the last `take`
        self._is_cleared = False

    def __len__(self) -> int:
        """Names, each once for each group and medium."""
        return sum(map(len, self._counts.values()))

    def stored(self, group: int, hashes: Iterable[bytes], medium: Medium, *, is_sampled: bool) -> None:
        """Blocks that can be matched from now on; `is_sampled` of full attention."""
        changed = self._changed.setdefault((group, _told_as(medium)), {})
        held = self._held.setdefault((group, medium), set())
        counts = self._counts.setdefault((group, medium), Counter())
        for block in _named(hashes, is_sampled):
            if block in held:
                continue
            held.add(block)
            name = block[:NAME_BYTES]
            changed.setdefault(name, self._has(group, medium, name))
            counts[name] += 1

    def removed(self, group: int, hashes: Iterable[bytes], medium: Medium, *, is_sampled: bool) -> None:
        """Blocks that cannot be matched any more."""
        changed = self._changed.setdefault((group, _told_as(medium)), {})
        held = self._held.get((group, medium), set())
        counts = self._counts.setdefault((group, medium), Counter())
        for block in _named(hashes, is_sampled):
            if block not in held:
                continue
            held.remove(block)
            name = block[:NAME_BYTES]
            changed.setdefault(name, True)
            counts[name] -= 1
            if not counts[name]:
                del counts[name]

    def clear(self, medium: Medium | None = None) -> None:
        """Nothing of that medium, or of any, can be matched."""
        if medium is None:
            self._held, self._counts, self._changed, self._is_cleared = {}, {}, {}, True
            return
        for key in [key for key in self._counts if key[1] is medium]:
            self._held.pop(key, None)
            changed = self._changed.setdefault((key[0], _told_as(medium)), {})
            for name in self._counts.pop(key):
                changed.setdefault(name, True)

    @property
    def num_changes(self) -> int:
        """Names that `take` has to look at."""
        return sum(map(len, self._changed.values()))

    def take(self) -> list[DigestEvent]:
        """What has changed since the last time, in all: what came and went meanwhile is not told."""
        told: list[DigestEvent] = [DigestCleared()] if self._is_cleared else []
        for (group, medium), changed in self._changed.items():
            has = {name: self._has(group, medium, name) for name in changed}
            added = tuple(name for name, was in changed.items() if has[name] and not was)
            removed = tuple(name for name, was in changed.items() if was and not has[name])
            if added or removed:
                told.append(DigestPart(group, medium, added, removed))
        self._changed, self._is_cleared = {}, False
        return told

    def whole(self, most_names: int = WHOLE_NAMES) -> Iterator[DigestEvent]:
        """All of it, for a new listener, in parts of so many names, each as of when it is asked for. What changes meanwhile,
        `take` says: a listener that hears of it after the parts that were made before knows all.

        Before each part is asked for, all who listen must have been told of what `take` says. Else what goes and comes again
        between two words is neither in a part nor told.
        """
        yield DigestCleared()
        for group, told_as in sorted({(group, _told_as(medium)) for group, medium in self._counts}):
            media = _TOLD_TOGETHER[told_as]
            # All at once, as names move from one medium to another: some milliseconds for a million.
            names = [list(self._counts.get((group, medium), ())) for medium in media]
            told: set[bytes] = set()
            for some in (each[at : at + most_names] for each in names for at in range(0, len(each), most_names)):
                part = tuple(name for name in some if name not in told and self._has(group, told_as, name))
                if len(names) > 1 and all(names):
                    told.update(part)
                if part:
                    yield DigestPart(group, told_as, part)

    def _has(self, group: int, medium: Medium, name: bytes) -> bool:
        return any(name in self._counts.get((group, each), ()) for each in _TOLD_TOGETHER[_told_as(medium)])


_TOLD_TOGETHER: Final = {Medium.MEMORY: (Medium.MEMORY, Medium.SSD), Medium.ENGINE: (Medium.ENGINE,)}


def _told_as(medium: Medium) -> Medium:
    return Medium.ENGINE if medium is Medium.ENGINE else Medium.MEMORY


def _named(hashes: Iterable[bytes], is_sampled: bool) -> Iterable[bytes]:
    """Those of them that have names."""
    return (each for each in hashes if not (is_sampled and each[-1] & _MASK))
