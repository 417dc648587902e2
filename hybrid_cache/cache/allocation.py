"""The pages a request needs of its own, beyond the prefix it shares, and how they are dealt out."""

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import NamedTuple, TypeAlias

from hybrid_cache.cache.reservation import ReservedPages
from hybrid_cache.layout.layout import ModelLayout

Keys: TypeAlias = Sequence[tuple[int, int]]


class Need(NamedTuple):
    """Blocks [first, stop) of all full-attention groups, window blocks (group, block) and snapshots (group, length)."""

    first: int
    stop: int
    windows: Keys
    states: Keys

    def num_pages(self, layout: ModelLayout) -> int:
        full = (self.stop - self.first) * sum([layout.pages_per_block(group) for group in layout.full_groups])
        return full + sum([layout.pages_per_block(group) for keys in (self.windows, self.states) for group, _ in keys])


def need_of(layout: ModelLayout, hold: ReservedPages, cached: int, lengths: Iterable[int]) -> Need:
    """What a request needs after `cached` tokens that it shares, if its states are kept at `lengths`."""
    first, stop = cached // layout.block_size, -(-hold.num_tokens // layout.block_size)
    if not layout.companion_groups:
        return Need(first, stop, (), ())
    lengths = sorted(lengths)
    windows = []
    for group in layout.window_groups:
        # A landing takes its whole tail from the wire; a prefill finds what lies before `cached` locked.
        shared = {companion.index for companion in hold.companions if companion.group == group}
        tail = {index for length in lengths for index in layout.window_blocks(group, length)}
        windows += [(group, index) for index in sorted(tail - shared)]
    return Need(first, stop, windows, [(group, length) for group in layout.state_groups for length in lengths])


def deal(layout: ModelLayout, hold: ReservedPages, need: Need, pages: Sequence[int]) -> None:
    """Gives a request the pages that it needs."""
    hold.own_first = need.first
    hold.own = _by_block(layout, pages, need.stop - need.first)
    if layout.companion_groups:
        full = sum([layout.pages_per_block(group) for group in layout.full_groups])
        rest = iter(pages[(need.stop - need.first) * full :])
        hold.own_windows = {key: tuple(islice(rest, layout.pages_per_block(key[0]))) for key in need.windows}
        hold.own_states = {key: tuple(islice(rest, layout.pages_per_block(key[0]))) for key in need.states}


def _by_block(layout: ModelLayout, pages: Sequence[int], count: int) -> list[int]:
    """The first `pages`, dealt out to `count` blocks. Group after group, so that the blocks of one lie side by side."""
    width = sum([layout.pages_per_block(group) for group in layout.full_groups])
    if width <= 1:
        return list(pages[: count * width])
    dealt, start, place = [0] * (count * width), 0, 0
    for group in layout.full_groups:
        size = layout.pages_per_block(group)
        end = start + count * size
        for offset in range(size):
            dealt[place + offset :: width] = pages[start + offset : end : size]
        start, place = end, place + size
    return dealt
