"""Which block lies in which slot of a group's file, and which was used last. Nothing of it is as large as the file.

Millions of blocks are read in parts, by their slots, and put in order by numpy, which lets other threads run meanwhile.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

TAIL_BYTES: Final = 8  # of a hash: what a saved order has of it
TAIL: Final = np.dtype("<u8")


class Uses(NamedTuple):
    """Of each slot, when it was used, as a number, 0: it is free; and the end of its block's hash."""

    at: NDArray[np.int64]
    tails: NDArray[np.uint64]

    def order(self) -> bytes:
        """The tails, the least recently used first."""
        taken = np.flatnonzero(self.at)
        return self.tails[taken[np.argsort(self.at[taken])]].tobytes()


class SlotTable:
    """The slots of one group. Its owner serialises calls."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._slot_of: OrderedDict[bytes, int] = OrderedDict()  # the least recently used first
        self._block_in: list[bytes | None] = []  # as far as slots have ever been taken
        self._free: list[int] = []  # of those
        self._last_use = 0
        self._used_at = np.zeros(num_slots, np.int64)  # memory comes with use
        self._tails = np.zeros(num_slots, TAIL)

    def __len__(self) -> int:
        return len(self._slot_of)

    def __iter__(self) -> Iterator[bytes]:
        """The blocks, the least recently used first."""
        return iter(self._slot_of)

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._slot_of

    @property
    def num_taken(self) -> int:
        """Slots below it may have blocks."""
        return len(self._block_in)

    def slot_of(self, block_hash: bytes) -> int | None:
        return self._slot_of.get(block_hash)

    def blocks_in(self, start: int, stop: int) -> list[bytes]:
        """The blocks of some slots."""
        return [block for block in self._block_in[start:stop] if block is not None]

    def take(self) -> tuple[int, bytes | None]:
        """A slot to be written; and the block that has to leave it, if all were in use."""
        if self._free:
            return self._free.pop(), None
        if len(self._block_in) < self.num_slots:
            self._block_in.append(None)
            return len(self._block_in) - 1, None
        block_hash, slot = self._slot_of.popitem(last=False)
        self._empty(slot)
        return slot, block_hash

    def give_back(self, slot: int) -> None:
        """What was to lie in a slot that was taken does not."""
        self._free.append(slot)

    def place(self, block_hash: bytes, slot: int) -> None:
        """A block lies in a slot that was taken."""
        self._slot_of[block_hash] = slot
        self._block_in[slot] = block_hash
        self._tails[slot] = int.from_bytes(block_hash[-TAIL_BYTES:], "little")
        self._use(slot)

    def used(self, block_hash: bytes) -> None:
        """A block of the table was used just now."""
        self._slot_of.move_to_end(block_hash)
        self._use(self._slot_of[block_hash])

    def forget(self, block_hash: bytes) -> None:
        """A block of the table is gone: its slot is free."""
        slot = self._slot_of.pop(block_hash)
        self._empty(slot)
        self._free.append(slot)

    def uses(self) -> Uses:
        """As they are now."""
        taken = self.num_taken
        return Uses(self._used_at[:taken].copy(), self._tails[:taken].copy())

    def recover(self, blocks: Sequence[bytes | None], order: bytes) -> int:
        """An empty table takes up what lies in its slots, the least recently used first; returns how many blocks.

        `order` is that of `Uses`. Blocks that it does not have have come since.
        """
        assert not self._block_in
        found: dict[bytes, int] = {}
        for slot, block in enumerate(blocks):
            if block is not None:
                found.setdefault(block, slot)
        self._block_in = [None] * len(blocks)
        self._free = [slot for slot, block in enumerate(blocks) if block is None or found[block] != slot][::-1]
        names, slots = list(found), list(found.values())
        tails = np.frombuffer(b"".join([name[-TAIL_BYTES:] for name in names]), TAIL)
        for at in np.argsort(_ranks(tails, np.frombuffer(order, TAIL)), kind="stable").tolist():
            self.place(names[at], slots[at])
        return len(names)

    def _use(self, slot: int) -> None:
        self._last_use += 1
        self._used_at[slot] = self._last_use

    def _empty(self, slot: int) -> None:
        self._block_in[slot] = None
        self._used_at[slot] = 0


def _ranks(tails: NDArray[np.uint64], order: NDArray[np.uint64]) -> NDArray[np.int64]:
    """The place of each tail in an order; behind all others for one that it does not have."""
    if not order.size:
        return np.zeros(tails.size, np.int64)
    by_tail = np.argsort(order, kind="stable")
    sorted_order = order[by_tail]
    at = np.minimum(np.searchsorted(sorted_order, tails), order.size - 1)
    return np.where(sorted_order[at] == tails, by_tail[at], order.size)
