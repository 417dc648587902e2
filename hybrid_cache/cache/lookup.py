"""Finds how much of a prompt is cached: the longest hit of each group, and the longest that all groups serve.

Positions are counted in blocks here. A group serves some lengths and not others:

    full attention   every length up to the first missing block (prefix-closed, so a binary search finds it)
    sliding window   lengths that the last ceil((window - 1) / block_size) blocks before them are held for
    linear state     lengths with a snapshot

Agreement is vLLM's fixed point: each group keeps the length or shortens it, until none objects.
"""

from collections.abc import Container, Hashable, Sequence

import msgspec

from hybrid_cache.layout.layout import ModelLayout
from hybrid_cache.layout.spec import FullAttention, LinearState, SlidingWindow

Hashes = Sequence[Hashable]


class PrefixHit(msgspec.Struct, frozen=True, gc=False):
    """Cached lengths in tokens, both multiples of the block size.

    `num_tokens`: all groups agree, a prefill can continue from here. `attention_tokens`: full attention alone, what a
    landing need not receive; the difference is a shared prefix without a state (a branch point worth a snapshot).
    """

    num_tokens: int
    attention_tokens: int


MISS = PrefixHit(0, 0)


def longest_common_hit(
    layout: ModelLayout, held: Sequence[Container[Hashable]], hashes: Hashes, num_tokens: int
) -> PrefixHit:
    """The hit of a prompt of `num_tokens` tokens with these block hashes; `held[g]` is what group g holds."""
    block_size = layout.block_size
    attention = num_tokens // block_size
    if attention > len(hashes):
        attention = len(hashes)
    for group in layout.full_groups:
        # Most nodes hold nothing of most prompts, and are asked about all of them.
        if not attention or hashes[0] not in held[group]:
            return MISS
        attention = full_hit(held[group], hashes, attention)
    if not attention:
        return MISS
    agreed = attention
    if layout.companion_groups:
        while agreed and (shorter := _shorten(layout, held, hashes, agreed)) < agreed:
            agreed = shorter
        if not layout.full_groups:
            attention = agreed  # nothing to transfer by block, so nothing to save either
    return PrefixHit(agreed * block_size, attention * block_size)


def _shorten(layout: ModelLayout, held: Sequence[Container[Hashable]], hashes: Hashes, limit: int) -> int:
    for group, entry in enumerate(layout.groups):
        match entry.spec:
            case FullAttention():
                pass  # prefix-closed: what served a longer length serves this one
            case SlidingWindow(window=window):
                limit = window_hit(held[group], hashes, limit, run_blocks(window, layout.block_size))
            case LinearState():
                limit = state_hit(held[group], hashes, limit)
    return limit


def run_blocks(window: int, block_size: int) -> int:
    """Blocks that must be held before an aligned length for a sliding window to continue there."""
    return -(-(window - 1) // block_size)


def full_hit(held: Container[Hashable], hashes: Hashes, limit: int) -> int:
    """Leading blocks that are held, at most `limit`. Needs a prefix-closed `held`."""
    low, high = 0, limit  # [0, low) is held, block `high` is not (or is the limit)
    while low < high:
        middle = (low + high) // 2
        if hashes[middle] in held:
            low = middle + 1
        else:
            high = middle
    return low


def window_hit(held: Container[Hashable], hashes: Hashes, limit: int, run: int) -> int:
    """The longest length at most `limit` whose last `run` blocks (or all, if fewer) are held."""
    if run == 0:
        return limit
    end, length = limit, 0
    for index in range(limit - 1, -1, -1):
        if hashes[index] not in held:
            end, length = index, 0
            continue
        length += 1
        if length == run:
            return end
    return end


def state_hit(held: Container[Hashable], hashes: Hashes, limit: int) -> int:
    """The longest length at most `limit` with a snapshot."""
    return next((length for length in range(limit, 0, -1) if hashes[length - 1] in held), 0)
