"""The holders of each block of one group: a table in parts, each quick to grow and to scan.

A table of a million entries is copied whole when it grows, and a scan of it blocks all other work. Block hashes are
spread evenly, so parts by their first byte are of equal size, a 256th of the whole.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice

PARTS = 256


class HolderSets:
    """Sets of holders, as the bits of an int, by block hash. An empty set is no entry."""

    __slots__ = ("_alone", "_oldest", "_parts", "_size")

    def __init__(self) -> None:
        self._parts: tuple[dict[bytes, int], ...] = tuple({} for _ in range(PARTS))
        self._size = 0
        self._alone: dict[
            int, int
        ] = {}  # the int of each single holder: most blocks have one, and it may have many bytes
        self._oldest = 0  # the part from which a block is forgotten next

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[bytes]:
        for part in self._parts:
            yield from part

    @property
    def sets_bytes(self) -> int:
        """Size of the ints: those of neighbours are the same one."""
        return sum({id(some): sys.getsizeof(some) for part in self._parts for some in part.values()}.values())

    @property
    def table_bytes(self) -> int:
        """Size of the table, without the hashes in it."""
        return sum(map(sys.getsizeof, self._parts))

    def get(self, block_hash: bytes, default: int = 0) -> int:
        """The holders of a block."""
        return self._parts[block_hash[0]].get(block_hash, default)

    def of_all(self, hashes: Iterable[bytes]) -> list[int]:
        """The holders of each of these blocks."""
        parts = self._parts
        return [parts[each[0]].get(each, 0) for each in hashes]

    def add(self, hashes: Iterable[bytes], bit: int) -> None:
        """`bit` holds these blocks, too."""
        parts, same, together = self._parts, 0, 0
        bit = self._alone.setdefault(bit, bit)
        for each in hashes:
            part = parts[each[0]]
            before = part.get(each, 0)
            if not before:
                part[each] = bit
                self._size += 1
                continue
            if before is not same:  # neighbours mostly have the same holders
                same, together = before, before | bit
            part[each] = together

    def remove(self, hashes: Iterable[bytes], bit: int) -> None:
        """`bit` holds these blocks no longer."""
        parts, same, left = self._parts, 0, 0
        for each in hashes:
            part = parts[each[0]]
            before = part.get(each, 0)
            if before is not same:
                left = before & ~bit
                same, left = before, self._alone.get(left, left)
            if left:
                part[each] = left
            elif before:
                del part[each]
                self._size -= 1

    @property
    def parts(self) -> Sequence[Mapping[bytes, int]]:
        """The PARTS as they are now, by the first byte of a hash."""
        return self._parts

    def forget(self, count: int) -> None:
        """Forgets so many blocks, of each part those heard of first, all parts in turn."""
        while count and self._size:
            part = self._parts[self._oldest]
            self._oldest = (self._oldest + 1) % PARTS
            for block_hash in list(islice(part, 1)):
                del part[block_hash]
                self._size -= 1
                count -= 1
