"""What may leave, as runs, against the rule that looks at every slab."""

import time
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid_cache.cache.prefix_cache import PrefixCache
from hybrid_cache.cache.reservation import Purpose, Reservation
from hybrid_cache.layout.layout import KVCacheGroup, ModelLayout
from hybrid_cache.layout.spec import FullAttention, LinearState, SlidingWindow
from hybrid_cache.layout.transfers import RangeKey, transfer_ranges
from node.config import NodeConfig
from node.control.broadcast import Broadcast
from node.kvcache.arena import Arena
from node.kvcache.pages import ArenaPages
from prfaas_cluster.outgoing import OutgoingRanges
from transport.wire.manifest import Manifest

BLOCK = 4
LAYOUT = ModelLayout(
    model="test",
    dtype="u8",
    block_size=BLOCK,
    groups=(
        KVCacheGroup(FullAttention(bytes_per_token=24, k_bytes_per_token=16), (2, 5, 6)),
        KVCacheGroup(SlidingWindow(window=7, bytes_per_token=16, k_bytes_per_token=8), (1, 4)),
        KVCacheGroup(LinearState(bytes_per_snapshot=300), (0, 3)),
    ),
)
ATTENTION = ((0, 2), (0, 5), (0, 6), (1, 1), (1, 4))
STATES = ((2, 0), (2, 3))


@pytest.fixture(scope="module")
def arena(tmp_path_factory: pytest.TempPathFactory) -> Iterable[Arena]:
    with Arena(tmp_path_factory.mktemp("arena") / "arena", 64 * LAYOUT.page_bytes) as arena:
        yield arena


def pages_in(arena: Arena) -> ArenaPages:
    config = NodeConfig(
        node_id="n", cluster="c", cluster_kind="pd", role="decode", model="m", run_dir=str(Path(arena.path).parent)
    )
    return ArenaPages(LAYOUT, arena, config, Broadcast(), time.monotonic)


def reserved(cache: PrefixCache, num_tokens: int, cached_blocks: int) -> Reservation:
    """A prefill with so many cached blocks."""
    hashes = [bytes([number]) * 32 for number in range(num_tokens // BLOCK)]
    if cached := cached_blocks * BLOCK:
        cache.reserve("before", hashes[:cached_blocks], cached, now=0.0, purpose=Purpose.PREFILL)
        cache.commit("before", cached, 0.0)
        cache.release("before", 0.0)
    return cache.reserve("now", hashes, num_tokens, now=1.0, purpose=Purpose.PREFILL)


class EverySlab:
    """The rule, slab by slab."""

    def __init__(self, reservation: Reservation, have_tokens: int) -> None:
        self.reservation = reservation
        self.keys = list(transfer_ranges(LAYOUT, reservation.num_tokens, have_tokens))
        self.index = {key: number for number, key in enumerate(self.keys)}
        self.computed: dict[tuple[int, int], int] = {}

    def cached(self) -> list[int]:
        tokens = self.reservation.cached_tokens
        return [
            number
            for number, key in enumerate(self.keys)
            if (key.block == tokens if key.group == 2 else key.block < tokens // BLOCK)
        ]

    def layer_done(self, group: int, layer: int, num_tokens: int) -> list[int]:
        layer_index = LAYOUT.groups[group].layers.index(layer)
        total = self.reservation.num_tokens
        num_tokens = min(num_tokens, total)
        complete = -(-num_tokens // BLOCK) if num_tokens >= total else num_tokens // BLOCK
        first = self.computed.get((group, layer_index), self.reservation.cached_tokens // BLOCK)
        self.computed[group, layer_index] = max(first, complete)
        return self.present(RangeKey(group, layer_index, block) for block in range(first, complete))

    def state_done(self, group: int, layer: int, num_tokens: int) -> list[int]:
        return self.present([RangeKey(group, LAYOUT.groups[group].layers.index(layer), num_tokens)])

    def present(self, keys: Iterable[RangeKey]) -> list[int]:
        return [self.index[key] for key in keys if key in self.index]


said = st.lists(
    st.one_of(
        st.tuples(st.just("layer_done"), st.sampled_from(ATTENTION), st.integers(0, 45)),
        st.tuples(st.just("state_done"), st.sampled_from(STATES), st.integers(0, 45)),
    ),
    max_size=30,
)


@given(st.integers(1, 40), st.integers(0, 10), st.integers(0, 40), said)
def test_what_may_leave_is_what_the_rule_says_slab_by_slab(
    arena: Arena, num_tokens: int, cached_blocks: int, have_tokens: int, said: list[tuple[str, tuple[int, int], int]]
) -> None:
    pages = pages_in(arena)
    reservation = reserved(pages.cache, num_tokens, min(cached_blocks, num_tokens // BLOCK))
    have_tokens = min(have_tokens, num_tokens)
    ranges, rule = OutgoingRanges(pages, reservation, have_tokens), EverySlab(reservation, have_tokens)
    assert [index for run in ranges.cached() for index in run] == rule.cached()
    for what, (group, layer), tokens in said:
        done: Callable[[int, int, int], list[range]] = getattr(ranges, what)
        expected: Callable[[int, int, int], list[int]] = getattr(rule, what)
        assert [index for run in done(group, layer, tokens) for index in run] == expected(group, layer, tokens)


@given(st.integers(1, 40), st.integers(0, 10), st.integers(0, 40), st.data())
def test_the_bytes_of_any_part_of_the_line_are_those_of_its_slabs(
    arena: Arena, num_tokens: int, cached_blocks: int, have_tokens: int, data: st.DataObject
) -> None:
    pages = pages_in(arena)
    reservation = reserved(pages.cache, num_tokens, min(cached_blocks, num_tokens // BLOCK))
    ranges = OutgoingRanges(pages, reservation, min(have_tokens, num_tokens))
    manifest = Manifest(ranges.sizes)
    line = []
    for key in ranges.ranges:
        held = reservation.states if key.group == 2 else reservation.blocks
        for segment in LAYOUT.segments(key.group, key.layer_index, held[key.group][key.block]):
            line += range(segment.start, segment.start + segment.length)
    assert len(line) == manifest.total_bytes
    start, stop = sorted(data.draw(st.integers(0, len(line))) for _ in range(2))
    extents = ranges.source.extents(*manifest.covering(start, stop), stop - start)
    assert [byte for at, size in extents for byte in range(at, at + size)] == line[start:stop]
    lengths = [len(view) for view in manifest.views(ranges.source, start, stop)]
    assert lengths == [size for _, size in extents]


def test_pages_beyond_the_arena_are_no_memory(arena: Arena) -> None:
    pages = pages_in(arena)
    reservation = PrefixCache(LAYOUT, 4096).reserve("r", [], 1000, now=0.0, purpose=Purpose.LANDING)
    ranges = OutgoingRanges(pages, reservation, 0)
    with pytest.raises(ValueError, match="the memory of ranges"):
        Manifest(ranges.sizes).views(ranges.source, 0, ranges.sizes.total_bytes)
