"""How much of a prompt each of many nodes has cached, in one look at the prompt: sets of nodes are the bits of an int.

Nodes that agree so far are asked together, so a look costs what the prompt and the number of different answers cost, hardly
what the number of nodes does. Answers are those of `lookup.longest_common_hit`, node by node; a test holds them together.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import compress, repeat
from typing import Final

Holders = Mapping[bytes, int]  # of one group: which nodes hold a block
CHUNK_BLOCKS: Final = 512  # looked at in one go: a few dozen microseconds


def leading_blocks(
    groups: Sequence[Holders], nodes: int, hashes: Sequence[bytes], limit: int
) -> Iterator[tuple[int, int]]:
    """(length, nodes) for all of `nodes`, whose holdings must be prefix-closed: binary searches that part where answers do."""
    searches = [(0, limit, nodes)]  # [0, low) is held by all of them, block `high` by none (or it is the limit)
    while searches:
        low, high, some = searches.pop()
        while low < high:
            middle = (low + high) // 2
            held = some
            for holders in groups:
                held &= holders.get(hashes[middle], 0)
            if held == some:
                low = middle + 1
            elif not held:
                high = middle
            else:
                searches.append((low, middle, some ^ held))
                low, some = middle + 1, held
        yield low, some


def unbroken_blocks(
    groups: Sequence[Holders], nodes: Sequence[int], hashes: Sequence[bytes], limit: int
) -> dict[int, int]:
    """Leading blocks that each of `nodes` holds, by its bits (one per medium), whatever is missing behind them."""
    lengths = dict.fromkeys(nodes, limit)
    for holders in groups:
        alive = {bits for bits in nodes if lengths[bits]}
        for start in range(0, limit, CHUNK_BLOCKS):
            alive = {bits for bits in alive if lengths[bits] > start}
            if not alive:
                break
            held = list(map(holders.get, hashes[start : min(limit, start + CHUNK_BLOCKS)], repeat(0)))
            kinds = set(held)  # few: neighbours in a prompt have the same holders
            for bits in alive:
                if 0 in map(bits.__and__, kinds):
                    first = next(i for i, kind in enumerate(held) if not kind & bits)
                    lengths[bits] = min(lengths[bits], start + first)
    return lengths


class Snapshots:
    """Lengths, in blocks, at which any node has states of a prompt: found from the end on, as far as they are asked for."""

    def __init__(self, groups: Sequence[Holders], hashes: Sequence[bytes], limit: int) -> None:
        self._groups = groups
        self._hashes = hashes
        self._start = limit
        self._found: list[tuple[int, list[int]]] = []  # longest first, with who holds it of each group

    def longest(self, bits: int, limit: int) -> int:
        """The longest length at most `limit` of which a node holds the states of every group, in any of its media."""
        for length, held in self._from_the_end():
            if length <= limit and 0 not in map(bits.__and__, held):
                return length
        return 0

    def _from_the_end(self) -> Iterator[tuple[int, list[int]]]:
        at = 0
        while True:
            while at < len(self._found):
                yield self._found[at]
                at += 1
            if not self._start:
                return
            self._look_further()

    def _look_further(self) -> None:
        stop, self._start = self._start, max(0, self._start - CHUNK_BLOCKS)
        first, *others = self._groups
        held = list(map(first.get, self._hashes[self._start : stop], repeat(0)))
        for index in list(compress(range(len(held)), held))[::-1]:
            block = self._start + index
            of_others = [group.get(self._hashes[block], 0) for group in others]
            if all(of_others):
                self._found.append((block + 1, [held[index], *of_others]))
