from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.agent.block_copies import BlockCopies
from engine.vllm.copy_plan import CopyPlan, PagesIndex
from engine.vllm.layout import (
    NULL_BLOCK,
    CacheLayer,
    LayerKind,
    Table,
    VllmLayout,
    block_range,
    state_block,
    unfilled,
    unloadable,
    vllm_layout,
)
from hybrid_cache.errors import LayoutError
from tests.engine.vllm.builders import BLOCK, full, layout_of, pages_for, state, tables_for, window


def test_layers_of_one_kind_are_one_group_however_vllm_groups_them():
    layers = [state(f"l.{i}.mixer", table=i) for i in (0, 1, 2)] + [
        full("l.3.attn", table=3),
        full("l.10.attn", table=3),
    ]
    layout = layout_of(*layers)
    assert [group.layers for group in layout.model.groups] == [(3, 4), (0, 1, 2)]
    assert [place.layer.name for place in layout.places] == [
        "l.0.mixer",
        "l.1.mixer",
        "l.2.mixer",
        "l.3.attn",
        "l.10.attn",
    ]


def test_a_layer_may_be_attention_and_state_at_once():
    layout = layout_of(full("l.0.attn", table=0), state("l.0.mamba", table=1))
    assert [group.layers for group in layout.model.groups] == [(0,), (1,)]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_attention_alone_has_the_same_layout_for_any_number_of_ranks(ranks):
    heads = 4
    alone = layout_of(full("a", part_bytes=heads * 64 * BLOCK, parts=1), ranks=1)
    shared = layout_of(full("a", part_bytes=heads // ranks * 64 * BLOCK, parts=ranks), ranks=ranks)
    assert shared.model.fingerprint == alone.model.fingerprint


def test_states_cut_for_other_numbers_of_ranks_are_another_layout():
    alone = layout_of(full("a"), state("s", part_bytes=800, parts=1), ranks=1)
    shared = layout_of(
        full("a", part_bytes=full("a").part_bytes // 2, parts=2), state("s", part_bytes=400, parts=2), ranks=2
    )
    assert shared.model.slab_bytes(1) == alone.model.slab_bytes(1)
    assert shared.model.fingerprint != alone.model.fingerprint


def test_stages_are_no_part_of_a_layout_and_their_ranks_hold_the_same_parts():
    layers = full("l.0", part_bytes=32 * BLOCK, parts=2), state("l.1", part_bytes=150, parts=2)
    alone, staged = layout_of(*layers, ranks=2), layout_of(*layers, ranks=2, stages=3)
    assert staged.model.fingerprint == alone.model.fingerprint
    assert (alone.workers, staged.workers) == (2, 6)
    for place in staged.places:
        assert [staged.part(place, rank) for rank in range(6)] == 3 * [alone.part(place, rank) for rank in range(2)]


@given(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4, 8]))
def test_parts_of_all_ranks_tile_a_slab_and_each_has_one_writer(ranks, heads):
    parts = min(ranks, heads)
    layout = layout_of(full("a", part_bytes=heads // parts * 8 * BLOCK, parts=parts), ranks=ranks)
    place = layout.places[0]
    all_parts = [layout.part(place, rank) for rank in range(ranks)]
    written = [part for part in all_parts if part.writes]
    assert written[0].start == 0
    assert all(left.stop == right.start for left, right in pairwise(written))
    assert written[-1].stop == layout.model.slab_bytes(0)
    assert {(part.start, part.stop) for part in all_parts} == {(part.start, part.stop) for part in written}
    assert layout.num_writers(place) == len(written)


def test_what_cannot_be_paged_is_refused():
    with pytest.raises(LayoutError, match="evenly"):
        layout_of(full("a", parts=3), ranks=4)
    with pytest.raises(LayoutError, match="blocks of 8 tokens among"):
        vllm_layout(
            [CacheLayer(name="a", table=0, kind=LayerKind.FULL, block_tokens=8, part_bytes=64, parts=1)],
            model="m", dtype="float32", block_tokens=20, ranks=1,
        )  # fmt: skip
    with pytest.raises(LayoutError, match="whole number"):
        layout_of(full("a", part_bytes=BLOCK * 8 + 1))


@given(st.integers(0, 40), st.integers(0, 40))
def test_block_range_covers_the_tokens(start, length):
    blocks = block_range(start, start + length, BLOCK)
    touched = {token // BLOCK for token in range(start, start + length)}
    assert touched <= set(blocks)


def test_attention_is_copied_where_both_sides_have_the_block():
    layout = layout_of(full("a", table=0), window("w", tokens=BLOCK + 1, table=1))
    pages = pages_for(layout, 3 * BLOCK + 1)
    tables = ((1, 2, 3, 4), (NULL_BLOCK, NULL_BLOCK, 7, 8))
    attention, sliding = layout.places
    index = PagesIndex(layout.model, pages)
    (copies,) = CopyPlan(layout, 0, index, tables, BLOCK, 3 * BLOCK + 1).attention(attention)
    assert copies.rows.tolist() == [2, 3, 4]
    (copies,) = CopyPlan(layout, 0, index, tables, 0, 3 * BLOCK + 1).attention(sliding)
    assert copies.rows.tolist() == [7, 8]


def halves(ranks: int = 1) -> VllmLayout:
    """As vLLM cuts layers when some have twice the bytes per token: `b` has two blocks where `a` has one."""
    parts = min(ranks, 2)
    small = CacheLayer(
        name="b", table=1, kind=LayerKind.FULL, block_tokens=BLOCK // 2, part_bytes=64 * BLOCK // parts, parts=parts
    )
    return layout_of(full("a", part_bytes=64 * BLOCK // parts, parts=parts), small, ranks=ranks)


def copied(
    layout: VllmLayout, tables: tuple[Table, ...], rank: int, start: int, stop: int
) -> dict[int, tuple[int, int]]:
    """For each byte of the arena, the block of `b` and the byte in it."""
    place, pages = layout.places[1], pages_for(layout, stop)
    part = layout.part(place, rank)
    found: dict[int, tuple[int, int]] = {}
    for each in CopyPlan(layout, rank, PagesIndex(layout.model, pages), tables, start, stop).attention(place):
        assert each.row_bytes == place.layer.part_bytes, "each copy is a whole block of the rank's"
        for piece in each.pieces:
            for row, begin in zip(each.rows.tolist(), piece.starts.tolist(), strict=True):
                bytes_of = range(begin, begin + piece.length)
                assert found.keys().isdisjoint(bytes_of)
                found.update({at: (row, piece.offset + offset + part.start) for offset, at in enumerate(bytes_of)})
    return found


def test_smaller_blocks_lie_in_slabs_one_after_the_other():
    layout, length = halves(), 2 * BLOCK + 1
    assert [group.spec.bytes_per_token for group in layout.model.groups] == [64, 128]
    tables = ((1, 2, 3), (10, 11, 12, 13, 14))
    found = copied(layout, tables, 0, 0, length)
    assert {block for block, _ in found.values()} == {10, 11, 12, 13, 14}
    assert {block for block, _ in copied(layout, tables, 0, BLOCK + 1, length).values()} == {12, 13, 14}
    assert unloadable(layout, pages_for(layout, length), tables, 0, length) == ""
    assert "vLLM has no block 3 for b" in unloadable(
        layout, pages_for(layout, length), (tables[0], (10, 11, 12, 0, 14)), 0, length
    )


def test_smaller_blocks_find_their_bytes_whatever_the_number_of_ranks():
    alone, shared = halves(), halves(2)
    assert alone.model.fingerprint == shared.model.fingerprint
    tables, length = ((1, 2), (10, 11, 12, 13)), 2 * BLOCK
    together = [copied(shared, tables, rank, 0, length) for rank in range(2)]
    assert together[0].keys().isdisjoint(together[1])
    assert together[0] | together[1] == copied(alone, tables, 0, 0, length)


def test_blocks_of_other_sizes_are_another_layout():
    as_one = layout_of(full("a"), full("b", part_bytes=128 * BLOCK))
    assert as_one.model.groups == halves().model.groups
    assert as_one.model.fingerprint != halves().model.fingerprint


def test_a_window_that_has_left_a_part_of_a_block_has_not_the_block():
    small = CacheLayer(
        name="w", table=1, kind=LayerKind.WINDOW, block_tokens=BLOCK // 2, part_bytes=64 * BLOCK, parts=1, window=BLOCK
    )
    layout = layout_of(full("a"), small)
    pages = pages_for(layout, 2 * BLOCK)
    assert unfilled(layout, pages, ((1, 2), (0, 0, 12, 13)), BLOCK, 2 * BLOCK) == set()
    assert unfilled(layout, pages, ((1, 2), (0, 0, 0, 13)), BLOCK, 2 * BLOCK) == {(1, 1)}


def test_state_lies_in_the_block_of_its_last_token():
    assert state_block((0, 0, 9), 3 * BLOCK, BLOCK) == 9
    assert state_block((0, 0, 9), 2 * BLOCK + 1, BLOCK) == 9
    assert state_block((0, 0, 9), 2 * BLOCK, BLOCK) == NULL_BLOCK
    assert state_block((5,), 1000, 4096) == 5, "without prefix caching there is one block"
    assert state_block((), 1, BLOCK) == NULL_BLOCK


def test_no_state_is_copied_that_one_side_lacks():
    layout = layout_of(full("a", table=0), state("s", table=1))
    pages = pages_for(layout, 2 * BLOCK + 1)
    place = layout.places[1]

    def copies(table: Table, length: int) -> Sequence[BlockCopies]:
        return CopyPlan(layout, 0, PagesIndex(layout.model, pages), ((), table), 0, length).state(place, length)

    assert [each.rows.tolist() for each in copies((0, 0, 3), 2 * BLOCK + 1)] == [[3]]
    assert copies((0, 0, 3), 2 * BLOCK) == ()
    assert copies((0, 0, 0), 2 * BLOCK + 1) == ()


def test_every_live_block_must_have_bytes_to_be_loaded():
    layout = layout_of(full("a", table=0), state("s", table=1))
    n = 2 * BLOCK + 1
    pages, tables = pages_for(layout, n), tables_for(layout, n)
    assert unloadable(layout, pages, tables, 0, n) == ""
    assert "vLLM has no block 1" in unloadable(layout, pages, ((1, 0, 3), tables[1]), 0, n)
    assert "no state" in unloadable(layout, pages, (tables[0], (0, 4, 3)), 0, n - 1)
    assert "no block for the state" in unloadable(layout, pages, (tables[0], (0, 0, 0)), 0, n)


def test_windows_that_moved_on_are_named():
    layout = layout_of(full("a", table=0), window("w", tokens=BLOCK + 2, table=1))
    pages = pages_for(layout, 3 * BLOCK)
    assert unfilled(layout, pages, ((1, 2, 3), (NULL_BLOCK, 5, 6)), 0, 3 * BLOCK) == set()
    assert unfilled(layout, pages, ((1, 2, 3), (NULL_BLOCK, NULL_BLOCK, 6)), 0, 3 * BLOCK) == {(1, 1)}
