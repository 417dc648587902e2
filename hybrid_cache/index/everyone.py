"""Finds how much of a prompt each of many nodes has cached, in one pass over the prompt. Sets of nodes are the bits of
an int.

Nodes that agree so far are asked together. So the cost depends on the prompt and on the number of different answers,
and hardly on the number of nodes. Answers are those of `lookup.longest_common_hit`, node by node; a test holds them
together.
"""

from collections.abc import Iterator, Sequence
from itertools import compress
from typing import Final

from hybrid_cache.index.holders import HolderSets

CHUNK_BLOCKS: Final = 256  # looked at in one go: some ten microseconds


def leading_blocks(
    groups: Sequence[HolderSets], nodes: int, hashes: Sequence[bytes], limit: int
) -> Iterator[tuple[int, int]]:
    """(length, nodes) for all of `nodes`, whose holdings must be prefix-closed: binary searches that part where answers do."""
    parts, others = groups[0].parts, groups[1:]
    searches = [(0, limit, nodes)]  # [0, low) is held by all of them, block `high` by none (or it is the limit)
    while searches:
        low, high, some = searches.pop()
        while low < high:
            middle = (low + high) // 2
            at = hashes[middle]
            held = some & parts[at[0]].get(at, 0)  # the innermost step of a decision: no call more than needed
            for holders in others:
                held &= holders.get(at)
            if held == some:
                low = middle + 1
            elif not held:
                high = middle
            else:
                searches.append((low, middle, some ^ held))
                low, some = middle + 1, held
        yield low, some


def unbroken_blocks(groups: Sequence[HolderSets], bits: int, hashes: Sequence[bytes], start: int, limit: int) -> int:
    """Leading blocks that a node holds in any of its media, whatever is missing behind them; [0, `start`) it does hold."""
    while start < limit:
        stop = min(limit, start + CHUNK_BLOCKS)
        for holders in groups:
            held = map(bits.__and__, holders.of_all(hashes[start:stop]))
            stop = next((at for at, some in enumerate(held, start) if not some), stop)
        if stop < min(limit, start + CHUNK_BLOCKS):
            return stop
        start = stop
    return limit


class SnapshotLengths:
    """Lengths, in blocks, at which any node has states of a prompt: looked for only when asked."""

    def __init__(self, groups: Sequence[HolderSets], hashes: Sequence[bytes], known: int) -> None:
        """Keeps the bits of `known` nodes only."""
        self._groups = groups
        self._hashes = hashes
        self._known = known
        self._chunks: dict[int, _Chunk] = {}
        self._ends: dict[int, list[int]] = {}  # the holders of each group's state, by length

    def longest(self, bits: int, limit: int) -> int:
        """The longest length, at most `limit`, whose states of every group a node holds, in any of its media."""
        if not limit:
            return 0
        # Where its attention ends, a prompt ended; so there it mostly has a state, too. And many end where others do.
        held = self._ends.get(limit) or self._held_at(limit)
        if 0 not in map(bits.__and__, held):
            return limit
        for number in range((limit - 1) // CHUNK_BLOCKS, -1, -1):
            chunk = self._chunks.get(number) or self._look_at(number)
            if bits & chunk.anybody:
                for length, held in chunk.found:
                    if length <= limit and 0 not in map(bits.__and__, held):
                        return length
        return 0

    def split(self, nodes: int, limit: int, plane: int = 0) -> Iterator[tuple[int, int]]:
        """(length, nodes): the same of each of `nodes`, which may have it at their own bit or, if not 0, `plane` above it."""
        if limit:
            held = self._ends.get(limit) or self._held_at(limit)
            if some := _held_by_all(held, nodes, plane):
                yield limit, some
                nodes ^= some
            for number in range((limit - 1) // CHUNK_BLOCKS, -1, -1) if nodes else ():
                chunk = self._chunks.get(number) or self._look_at(number)
                if not nodes & (chunk.anybody | chunk.anybody >> plane):
                    continue
                for length, held in chunk.found:
                    if length < limit and (some := _held_by_all(held, nodes, plane)):
                        yield length, some
                        nodes ^= some
                if not nodes:
                    return
        if nodes:
            yield 0, nodes

    def _held_at(self, length: int) -> list[int]:
        held = self._ends[length] = [holders.get(self._hashes[length - 1]) & self._known for holders in self._groups]
        return held

    def _look_at(self, number: int) -> "_Chunk":
        start = number * CHUNK_BLOCKS
        some = self._hashes[start : start + CHUNK_BLOCKS]
        first, *others = self._groups
        chunk = self._chunks[number] = _Chunk()
        by_first = first.of_all(some)
        for at in list(compress(range(len(by_first)), by_first))[::-1]:
            held = [by_first[at] & self._known]
            for group in others:
                held.append(group.get(some[at]) & self._known)
            if 0 not in held:
                chunk.found.append((start + at + 1, held))
                chunk.anybody |= held[0]
        return chunk


def _held_by_all(held: Sequence[int], nodes: int, plane: int) -> int:
    """The `nodes` that are in every one of `held`, by either bit."""
    for some in held:
        nodes &= some | some >> plane
    return nodes


class _Chunk:
    """Some of a prompt's blocks: lengths with states, the longest first, with the holders for each group."""

    __slots__ = ("anybody", "found")

    def __init__(self) -> None:
        self.anybody = 0  # holders of any of them
        self.found: list[tuple[int, list[int]]] = []
