"""The prefix tree of cached blocks.

A block stands for its tokens after all blocks before it. Blocks that follow one another are one run, from where they leave
another run, if they do. A run holds the full-attention pages of its blocks. Where a request stored them a block has
companions: the snapshot of a linear state at its end, a block of a sliding window.

    A ── B ── C ── D ── E      holds: how many reservations use it up to a block, and all before that
              │    └ state     forks: how many runs go on after a block, and are worth nothing without it
              └── F ── G

So a request locks a prompt of a million tokens, and gives it back, with work for a few runs.
"""

from typing import TypeAlias

Pages: TypeAlias = tuple[int, ...]


class BlockRun:
    """Blocks that follow one another. Its last block is evictable when it has neither holds nor forks. Blocks join and leave
    at the end; a run without any is no longer in the tree.
    """

    __slots__ = ("at", "first", "forks", "hashes", "holds", "last_fork", "pages", "parent", "stamp")

    def __init__(self, hashes: list[bytes], pages: list[int], parent: "BlockRun | None", at: int, stamp: int) -> None:
        """It goes on after `at` blocks of `parent`."""
        self.hashes = hashes
        self.pages = pages  # block after block, of each those of all full-attention groups
        self.parent = parent
        self.at = at
        self.first: int = 0 if parent is None else parent.first + at  # its first block's place in a prompt
        self.holds: dict[int, int] = {}  # by how many of its blocks they use
        self.forks: dict[int, int] = {}  # by how many of its blocks come before them
        self.last_fork = 0  # the greatest of those numbers
        self.stamp = stamp  # the last check of the cache that has seen it (integrity.py)

    @property
    def locked(self) -> int:
        """How many of its blocks some request uses: the first ones."""
        return max(self.holds, default=0)

    @property
    def kept(self) -> int:
        """How many of its blocks cannot leave."""
        return max(self.locked, self.last_fork)

    @property
    def is_tail_free(self) -> bool:
        """Whether its last block can leave."""
        return len(self.hashes) > self.kept

    def move_hold(self, old: int, new: int) -> int:
        """A request uses `new` of its blocks, `old` until now. Returns how many more are locked now."""
        before = self.locked
        _count(self.holds, old, -1)
        _count(self.holds, new, 1)
        return self.locked - before

    def add_fork(self, at: int, number: int) -> None:
        """So many more runs go on after `at` of its blocks."""
        _count(self.forks, at, number)
        if at > self.last_fork:
            self.last_fork = at
        elif at == self.last_fork and at not in self.forks:
            self.last_fork = _greatest_below(at, self.forks)

    def __repr__(self) -> str:
        name = self.hashes[0][:4].hex() if self.hashes else "empty"
        return f"Run({name} index={self.first} blocks={len(self.hashes)} holds={self.holds} forks={self.forks})"


class Companion:
    """A snapshot or window block of a block. Evictable when it has no locks; leaves with its block at the latest."""

    __slots__ = ("group", "index", "key", "locks", "pages", "run", "stamp")

    def __init__(self, run: BlockRun, index: int, group: int, pages: Pages, stamp: int) -> None:
        """`index` is its block's place in a prompt."""
        self.run = run
        self.index = index
        self.group = group
        self.key = (group, run.hashes[index - run.first])
        self.stamp = stamp
        self.pages = pages
        self.locks = 0

    def __repr__(self) -> str:
        return f"Companion(group={self.group} index={self.index} locks={self.locks})"


Item = BlockRun | Companion


def _count(numbers: dict[int, int], at: int, more: int) -> None:
    """Nothing is counted at 0. Most runs are idle: an empty dictionary takes less room than an emptied one."""
    if not at:
        return
    if number := numbers.get(at, 0) + more:
        numbers[at] = number
    elif len(numbers) > 1:
        del numbers[at]
    else:
        numbers.clear()


def _greatest_below(limit: int, numbers: dict[int, int]) -> int:
    """The greatest of the numbers, which are all below a limit: mostly one that is near. 0 without any."""
    near = range(limit - 1, max(0, limit - 1 - len(numbers)), -1)
    return next((number for number in near if number in numbers), None) or max(numbers, default=0)
