"""Which blocks of prompts a server has probably cached: those that were sent there of late."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

DEFAULT_BLOCKS: Final = 31_250  # 4M tokens: of one server


class SentPrefixes:
    """The names of blocks that went to one server. The oldest are forgotten, of one prompt its end first."""

    def __init__(self, max_blocks: int = DEFAULT_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._names: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._names)

    def length(self, blocks: Sequence[int]) -> int:
        """How many of a prompt's first blocks are there: a block is never without those before it."""
        names, low, high = self._names, 0, len(blocks)
        while low < high:
            middle = (low + high) // 2
            if blocks[middle] in names:
                low = middle + 1
            else:
                high = middle
        return low

    def sent(self, blocks: Sequence[int]) -> None:
        """A prompt goes there. Its end is noted first, so that it is forgotten before its beginning."""
        names = self._names
        for name in reversed(blocks[: self._max_blocks]):
            names[name] = None
            names.move_to_end(name)
        while len(names) > self._max_blocks:
            names.popitem(last=False)

    def clear(self) -> None:
        """The server has begun anew."""
        self._names.clear()
