"""Runs of slabs against the rule that lists them one by one."""

import random
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid_cache.errors import LayoutError
from hybrid_cache.layout.layout import KVCacheGroup, ModelLayout
from hybrid_cache.layout.spec import FullAttention, KVCacheSpec, LinearState, SlidingWindow
from hybrid_cache.layout.transfers import GroupRanges, RangeKey, RangePlaces, TransferRanges, transfer_ranges
from tests.hybrid_cache.builders import STATE, WINDOW, make_layout

specs: st.SearchStrategy[KVCacheSpec] = st.one_of(
    st.builds(lambda size: FullAttention(size, 1), st.integers(1, 200)),
    st.builds(lambda window, size: SlidingWindow(window, size, 1), st.integers(1, 40), st.integers(1, 200)),
    st.builds(LinearState, st.integers(1, 4000)),
)


@st.composite
def layouts(draw: st.DrawFn) -> ModelLayout:
    groups, first = [], 0
    for spec in draw(st.lists(specs, min_size=1, max_size=4)):
        layers = draw(st.integers(1, 5))
        groups.append(KVCacheGroup(spec, tuple(range(first, first + layers))))
        first += layers
    return ModelLayout("any", "u8", draw(st.sampled_from([1, 3, 4, 16])), tuple(groups))


def listed(layout: ModelLayout, num_tokens: int, have_tokens: int) -> list[RangeKey]:
    """One by one."""
    keys = []
    for group, entry in enumerate(layout.groups):
        match entry.spec:
            case FullAttention():
                blocks: Sequence[int] = range(have_tokens // layout.block_size, -(-num_tokens // layout.block_size))
            case SlidingWindow():
                blocks = layout.window_blocks(group, num_tokens)
            case LinearState():
                blocks = (num_tokens,)
        keys += [RangeKey(group, layer, block) for layer in range(len(entry.layers)) for block in blocks]
    return keys


lengths = st.tuples(st.integers(0, 90), st.integers(0, 90)).map(sorted)


@given(layouts(), lengths)
def test_runs_are_the_slabs_of_the_rule_in_its_order(layout: ModelLayout, tokens: list[int]) -> None:
    have_tokens, num_tokens = tokens
    ranges, keys = transfer_ranges(layout, num_tokens, have_tokens), listed(layout, num_tokens, have_tokens)
    assert list(ranges) == keys
    assert len(ranges) == len(keys)
    assert [ranges[index] for index in range(len(keys))] == keys
    assert [ranges.group_of(index) for index in range(len(keys))] == [key.group for key in keys]
    assert ranges[1:5] == tuple(keys[1:5])
    assert [size for size, count in ranges.sizes(layout) for _ in range(count)] == [
        layout.slab_bytes(key.group) for key in keys
    ]


@given(layouts(), lengths, st.integers(-3, 95), st.integers(-3, 95))
def test_ranges_of_blocks_are_those_that_the_keys_name(
    layout: ModelLayout, tokens: list[int], start: int, stop: int
) -> None:
    have_tokens, num_tokens = tokens
    ranges, keys = transfer_ranges(layout, num_tokens, have_tokens), listed(layout, num_tokens, have_tokens)
    for group, entry in enumerate(layout.groups):
        part = ranges.of_group(group)
        asked = {index for index, key in enumerate(keys) if key.group == group and start <= key.block < stop}
        if part is None:
            assert not any(key.group == group for key in keys)
            continue
        assert sorted(index for found in part.in_blocks(range(start, stop)) for index in found) == sorted(asked)
        for layer in range(len(entry.layers)):
            of_layer = {index for index in asked if keys[index].layer_index == layer}
            assert set(part.of_layer(layer, range(start, stop))) == of_layer


@given(layouts(), lengths, st.integers(0, 2**32), st.booleans())
def test_places_are_those_of_each_slab(layout: ModelLayout, tokens: list[int], seed: int, side_by_side: bool) -> None:
    have_tokens, num_tokens = tokens
    rng = random.Random(seed)
    ranges = transfer_ranges(layout, num_tokens, have_tokens)
    free = list(range(10_000))
    if not side_by_side:
        rng.shuffle(free)
    pages = {
        (part.group, block): [free.pop(0) for _ in range(layout.pages_per_block(part.group))]
        for part in ranges.groups
        for block in part.blocks
    }
    asked: list[int] = []

    def pages_of(part: GroupRanges) -> list[list[int]]:
        asked.append(part.group)
        return [pages[part.group, block] for block in part.blocks]

    places = RangePlaces(layout, ranges, pages_of)
    first, stop = sorted((rng.randint(0, len(ranges)), rng.randint(0, len(ranges))))
    for a, b in ((first, stop), (0, len(ranges)), (first, min(first + 1, len(ranges)))):
        found = places.between(a, b)
        slabs = [
            segment
            for key in ranges[a:b]
            for segment in layout.segments(key.group, key.layer_index, pages[key.group, key.block])
        ]
        assert [byte for start, length in found for byte in range(start, start + length)] == [
            byte for segment in slabs for byte in range(segment.start, segment.start + segment.length)
        ]
        assert all(start + length != after for (start, length), (after, _) in pairwise(found))
    assert len(asked) == len(set(asked))


def test_a_deep_model_has_as_few_runs_as_groups() -> None:
    group = KVCacheGroup(FullAttention(4096, 2048), tuple(range(80)))
    layout = ModelLayout("deep", "bfloat16", 16, (group,))
    ranges = transfer_ranges(layout, 131_072, 0)
    assert len(ranges) == 80 * 8192
    assert ranges.groups == (GroupRanges(0, 80, range(8192), 0),)
    assert ranges.sizes(layout) == [(65_536, 80 * 8192)]


@pytest.mark.parametrize(("first", "stop"), [(-1, 1), (2, 1), (0, 100)])
def test_no_place_is_told_of_what_does_not_move(first: int, stop: int) -> None:
    layout = make_layout()
    places = RangePlaces(layout, transfer_ranges(layout, 8, 0), lambda part: [[0]] * len(part.blocks))
    with pytest.raises(IndexError, match=r"ranges \["):
        places.between(first, stop)


@pytest.mark.parametrize("pages", [[[0], []], [[0]], [[0], [1], [2]], [[0, 1], [2]]])
def test_a_block_without_its_pages_has_no_place(pages: list[list[int]]) -> None:
    layout = make_layout(WINDOW)
    places = RangePlaces(layout, transfer_ranges(layout, 8, 0), lambda part: pages)
    with pytest.raises(LayoutError, match="pages"):
        places.between(0, 1)


def test_nothing_moves_where_nothing_is_new() -> None:
    ranges = transfer_ranges(make_layout(FullAttention(8, 4)), 8, 8)
    assert (len(ranges), ranges.groups, list(ranges)) == (0, (), [])
    assert RangePlaces(make_layout(FullAttention(8, 4)), ranges, lambda part: []).between(0, 0) == []
    assert transfer_ranges(make_layout(FullAttention(8, 4), STATE), 8, 8).of_group(0) is None


def test_an_index_beyond_the_end_is_none() -> None:
    ranges = transfer_ranges(make_layout(), 8, 0)
    assert ranges[-1] == RangeKey(1, 0, 8)
    with pytest.raises(IndexError):
        _ = ranges[len(ranges)]
    with pytest.raises(IndexError):
        _ = TransferRanges([])[0]
