"""A plan's copies are those of the rule that makes them one by one, for any layout, pages and tables."""

import random
from collections.abc import Iterable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.agent.block_copies import BlockCopies
from engine.vllm.copy_plan import CopyPlan, PagesIndex
from engine.vllm.layout import CacheLayer, LayerKind, Table, VllmLayout, vllm_layout
from hybrid_cache.errors import LayoutError
from hybrid_cache.layout.spec import LinearState
from tests.engine.vllm.builders import BLOCK, full, layout_of, pages_for, state, tables_for
from tests.engine.vllm.copy_oracle import BlockCopy, attention_copies, state_copy
from tests.properties import examples
from transport.control.messages import JobPages

Moves = dict[int, tuple[int, int]]
"""Byte of the arena to (vLLM's block, its byte)."""


def moves_of(copies: Sequence[BlockCopies]) -> Moves:
    found: Moves = {}
    for each in copies:
        for piece in each.pieces:
            for row, start in zip(each.rows.tolist(), piece.starts.tolist(), strict=True):
                for at in range(piece.length):
                    assert start + at not in found, "no byte is copied twice"
                    found[start + at] = (row, piece.offset + at)
    return found


def moves_one_by_one(copies: Iterable[BlockCopy]) -> Moves:
    found: Moves = {}
    for copy in copies:
        places = [at for part in copy.segments for at in range(part.start, part.start + part.length)]
        found |= {at: (copy.block_id, byte) for byte, at in enumerate(places)}
    return found


def random_layout(rng: random.Random) -> VllmLayout:
    ranks = rng.choice([1, 2, 4])
    layers = []
    for number in range(rng.randint(1, 6)):
        kind = rng.choice(list(LayerKind)) if number else LayerKind.FULL
        parts = rng.choice([parts for parts in (1, 2, 4) if ranks % parts == 0])
        block_tokens = BLOCK if kind is LayerKind.STATE else rng.choice([BLOCK // 4, BLOCK // 2, BLOCK])
        # Blocks of vLLM's are of one size whatever their tokens, and states of any.
        part_bytes = rng.choice([52, 300]) if kind is LayerKind.STATE else BLOCK * rng.choice([8, 24]) // parts
        layers.append(
            CacheLayer(
                name=f"l.{number}", table=rng.randrange(3), kind=kind, block_tokens=block_tokens,
                part_bytes=part_bytes, parts=parts, window=rng.choice([BLOCK, 2 * BLOCK + 1]),
            )
        )  # fmt: skip
    return vllm_layout(layers, model="m", dtype="int8", block_tokens=BLOCK, ranks=ranks)


def random_pages(rng: random.Random, layout: VllmLayout, num_tokens: int) -> JobPages:
    """Blocks in any order in the arena, some of them missing, and states at any lengths."""
    free = list(range(4096))
    rng.shuffle(free)

    def some(group: int) -> tuple[int, ...]:
        return tuple(free.pop() for _ in range(layout.model.pages_per_block(group)))

    blocks, states = [], []
    for group, entry in enumerate(layout.model.groups):
        is_state = isinstance(entry.spec, LinearState)
        count = 0 if is_state else -(-num_tokens // BLOCK)
        blocks.append(tuple(some(group) if rng.random() < 0.8 else () for _ in range(count)))
        lengths = {rng.randint(1, num_tokens) for _ in range(2)} | {num_tokens} if is_state else set()
        states.append({length: some(group) if rng.random() < 0.8 else () for length in lengths})
    return JobPages(job="j", num_tokens=num_tokens, cached_tokens=0, blocks=tuple(blocks), states=tuple(states))


def random_table(rng: random.Random, num_tokens: int) -> Table:
    ids = rng.sample(range(1, 1000), rng.randint(0, 4 * (num_tokens // BLOCK + 2)))
    return tuple(block if rng.random() < 0.8 else 0 for block in ids)


@given(st.integers(0, 1 << 32))
@settings(max_examples=examples(60), deadline=None)
def test_a_plan_is_what_the_rule_says_block_by_block(seed: int) -> None:
    rng = random.Random(seed)
    layout, num_tokens = random_layout(rng), rng.randint(1, 7 * BLOCK)
    pages = random_pages(rng, layout, num_tokens)
    tables = tuple(random_table(rng, num_tokens) for _ in range(3))
    start = rng.randint(0, num_tokens)
    stop = rng.randint(start, num_tokens + BLOCK)
    for rank in range(layout.ranks):
        plan = CopyPlan(layout, rank, PagesIndex(layout.model, pages), tables, start, stop)
        for place in layout.places:
            part, table = layout.part(place, rank), tables[place.layer.table]
            if place.layer.kind is LayerKind.STATE:
                for length in (*pages.states[place.group], stop):
                    one = state_copy(layout.model, place, part, pages, table, length)
                    assert moves_of(plan.state(place, length)) == moves_one_by_one(() if one is None else (one,))
                assert moves_of(plan.of(place)) == moves_of(plan.state(place, stop))
            else:
                copies = attention_copies(layout.model, place, part, pages, table, start, stop)
                assert moves_of(plan.of(place)) == moves_one_by_one(copies)


def test_layers_that_have_their_blocks_in_common_share_one_look() -> None:
    layout, length = layout_of(*(full(f"l.{number}") for number in range(80))), 64 * BLOCK
    pages = pages_for(layout, length)
    plan = CopyPlan(layout, 0, PagesIndex(layout.model, pages), tables_for(layout, length), 0, length)
    copies = [plan.attention(place) for place in layout.places]
    assert {len(each) for each in copies} == {1}, "one call for each layer"
    assert {id(each[0].rows) for each in copies} == {id(copies[0][0].rows)}


def test_page_lists_that_no_block_has_are_refused() -> None:
    layout = layout_of(full("a"), state("s", table=1))
    pages = pages_for(layout, 2 * BLOCK)
    wrong = JobPages(
        job="j", num_tokens=2 * BLOCK, cached_tokens=0,
        blocks=((pages.blocks[0][0], (*pages.blocks[0][1], 7)), ()), states=({}, {2 * BLOCK: (1,) * 9}),
    )  # fmt: skip
    plan = CopyPlan(layout, 0, PagesIndex(layout.model, wrong), tables_for(layout, 2 * BLOCK), 0, 2 * BLOCK)
    for place in layout.places:
        with pytest.raises(LayoutError, match="pages"):
            plan.of(place)


def test_rows_are_whole_numbers_for_torch() -> None:
    layout = layout_of(full("a"))
    plan = CopyPlan(layout, 0, PagesIndex(layout.model, pages_for(layout, BLOCK)), ((3,),), 0, BLOCK)
    assert plan.attention(layout.places[0])[0].rows.dtype == np.int64
