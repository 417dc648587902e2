"""Prefixes that a node does not hold yet, but will when what was sent to it has been computed.

Prompts of one conversation, or of one agent and its sub-agents, come faster than they are computed. One that is sent elsewhere
computes again what the first one is computing just now; one that is sent after it finds it done.

Of a prompt that is on its way only its end is promised: with linear states a node can go on from there and from nowhere before.
"""

from collections.abc import Hashable, Sequence


class Promises:
    """The prompts that are on their way to one node, by the hash of their last full block."""

    def __init__(self) -> None:
        self._blocks: dict[Hashable, int] = {}  # how many full blocks a prompt has
        self._count: dict[Hashable, int] = {}  # prompts with that end

    def __len__(self) -> int:
        return len(self._blocks)

    def add(self, hashes: Sequence[Hashable]) -> None:
        """A prompt with these full blocks will be computed here."""
        if hashes:
            end = hashes[-1]
            self._blocks[end] = len(hashes)
            self._count[end] = self._count.get(end, 0) + 1

    def remove(self, hashes: Sequence[Hashable]) -> None:
        """It has been, or will not be."""
        if hashes and (end := hashes[-1]) in self._count:
            self._count[end] -= 1
            if not self._count[end]:
                del self._count[end], self._blocks[end]

    def longest(self, hashes: Sequence[Hashable], held: int) -> int:
        """Blocks of a prompt with these full blocks that will be there; `held` are already."""
        for end, blocks in self._blocks.items():
            if held < blocks <= len(hashes) and hashes[blocks - 1] == end:
                held = blocks
        return held
