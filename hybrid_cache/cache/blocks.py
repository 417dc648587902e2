"""The prefix tree of cached blocks.

A node stands for one full block of tokens, after all blocks before it. It holds the full-attention pages of that block.
Where a request stored them it has companions: the snapshot of a linear state at its end, a block of a sliding window.

    root ── A ── B ── C          locks: reservations that use the node; a lock of a node locks all before it
                 │    └ state    children: nodes that are worth nothing without it
                 └── D
"""

import msgspec

Pages = tuple[int, ...]


class BlockNode(msgspec.Struct, eq=False, gc=False):
    """One full block of a prefix. Evictable when it has neither locks nor children. Made in C: there are a million.

    It refers to no other one, so no collector of cycles need look at it, and a long path is not freed block in block. Blocks of
    a path that were stored together are one run: the last one leaves first, and is then the last of the list.
    """

    hash: bytes
    parent: bytes | None  # the hash of the block before it
    pages: Pages  # of all full-attention groups, one group after the other
    stamp: int  # the last check of the cache that has seen it (integrity.py)
    index: int = 0
    children: int = 0
    locks: int = 1  # of the request that stores it
    run: list[bytes] = msgspec.field(default_factory=list)  # stored with it, as far as they are still there

    @property
    def key(self) -> bytes:
        return self.hash

    def __repr__(self) -> str:
        return f"Node({self.hash[:4].hex()} index={self.index} locks={self.locks} children={self.children})"


class Companion:
    """A snapshot or window block of a node. Evictable when it has no locks; leaves with its node at the latest."""

    __slots__ = ("group", "key", "locks", "node", "pages", "stamp")

    def __init__(self, node: BlockNode, group: int, pages: Pages, stamp: int) -> None:
        self.node = node
        self.group = group
        self.key = (group, node.hash)
        self.stamp = stamp
        self.pages = pages
        self.locks = 0

    def __repr__(self) -> str:
        return f"Companion(group={self.group} locks={self.locks} of {self.node!r})"


Item = BlockNode | Companion
ItemKey = bytes | tuple[int, bytes]
