"""vLLM's cache events, translated: our hashes, our groups, and a prefix only where all groups have it."""

import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid_cache.cache.events import BlocksRemoved, BlocksStored, CacheCleared, Medium
from hybrid_cache.hashing.block_hash import MEDIUM, Inset, block_hashes, model_salt, namespaced
from hybrid_cache.index.index import PrefixIndex
from hybrid_cache.layout.layout import KVCacheGroup, ModelLayout
from hybrid_cache.layout.spec import FullAttention, LinearState, SlidingWindow
from node.engine.prefix_cache import AllBlocksCleared, BlockRemoved, BlockStored, EngineCache, EngineEvent

BLOCK = 4
DENSE = ModelLayout(model="m", dtype="f", block_size=BLOCK, groups=(KVCacheGroup(FullAttention(64, 32), (0,)),))
HYBRID = ModelLayout(
    model="m",
    dtype="f",
    block_size=BLOCK,
    groups=(KVCacheGroup(FullAttention(64, 32), (3,)), KVCacheGroup(LinearState(512), (0, 1, 2))),
)
SALT = model_salt("m")
TOKENS = list(range(100, 100 + 6 * BLOCK))
OURS = block_hashes(TOKENS, BLOCK, SALT)
FULL, STATE, SECOND_STATE = 3, 0, 1  # vLLM's numbers of its groups


def engine_hash(number: int) -> int:
    """Block `number` of TOKENS as vLLM names it: its own affair."""
    return 7_000_000_000_000_000_000 + number


def stored(first: int, stop: int, group: int = FULL, kind: str = "full_attention", **more: Any) -> BlockStored:
    """Blocks [first, stop) of TOKENS."""
    values: dict[str, Any] = {
        "block_hashes": [engine_hash(number) for number in range(first, stop)],
        "parent_block_hash": engine_hash(first - 1) if first else None,
        "token_ids": TOKENS[first * BLOCK : stop * BLOCK],
        "block_size": BLOCK,
        "group_idx": group,
        "kv_cache_spec_kind": kind,
    }
    return BlockStored(**(values | more))


def told_by_sglang(first: int, stop: int, **more: Any) -> BlockStored:
    """The same in its words: no groups, no kinds, and a salt for all blocks of a request."""
    return stored(first, stop, group_idx=None, kv_cache_spec_kind=None, **more)


def state(number: int, group: int = STATE, since: int = 0) -> BlockStored:
    """The state after block `number`, in a step that computed blocks [since, number]: only the last is kept."""
    return stored(since, number + 1, group, "mamba", block_hashes=[engine_hash(number)])


def removed(*numbers: int, group: int = FULL) -> BlockRemoved:
    return BlockRemoved(block_hashes=[engine_hash(number) for number in numbers], group_idx=group)


def test_blocks_get_our_names() -> None:
    cache = EngineCache(DENSE, SALT)
    assert cache.apply([stored(0, 2)]) == [BlocksStored(0, tuple(OURS[:2]), Medium.ENGINE)]
    assert cache.apply([stored(2, 4)]) == [BlocksStored(0, tuple(OURS[2:4]), Medium.ENGINE)]
    assert cache.apply([removed(3)]) == [BlocksRemoved(0, (OURS[3],), Medium.ENGINE)]
    assert list(cache.snapshot(8)) == [BlocksStored(0, tuple(OURS[:3]), Medium.ENGINE)]
    assert [part.hashes for part in cache.snapshot(2)] == [tuple(OURS[:2]), (OURS[2],)]


def test_hashes_may_be_bytes_and_a_server_without_groups_has_one() -> None:
    cache = EngineCache(DENSE, SALT)
    event = BlockStored(
        block_hashes=[b"x"], parent_block_hash=None, token_ids=TOKENS[:BLOCK], block_size=BLOCK, group_idx=None
    )
    assert cache.apply([event]) == [BlocksStored(0, (OURS[0],), Medium.ENGINE)]


def test_a_state_is_named_by_the_attention_that_came_with_it() -> None:
    cache = EngineCache(HYBRID, SALT)
    # The state's group speaks first, and names only the block it kept.
    changes = cache.apply([state(2), stored(0, 3)])
    assert changes == [
        BlocksStored(0, tuple(OURS[:3]), Medium.ENGINE),
        BlocksStored(1, (OURS[2],), Medium.ENGINE),
    ]


def test_a_block_is_held_when_every_group_of_its_kind_holds_it() -> None:
    cache = EngineCache(HYBRID, SALT)
    cache.apply([stored(0, 3), state(2), state(2, SECOND_STATE)])
    assert cache.apply([removed(2, group=SECOND_STATE)]) == [BlocksRemoved(1, (OURS[2],), Medium.ENGINE)]
    assert cache.apply([state(2, SECOND_STATE)]) == [BlocksStored(1, (OURS[2],), Medium.ENGINE)]


def test_a_group_that_is_heard_of_later_takes_back_what_it_does_not_hold() -> None:
    cache = EngineCache(HYBRID, SALT)
    cache.apply([stored(0, 4), state(1), state(3)])
    assert cache.apply([state(3, SECOND_STATE)]) == [BlocksRemoved(1, (OURS[1],), Medium.ENGINE)]


def test_windows_are_told_apart_by_their_size() -> None:
    groups = tuple(KVCacheGroup(SlidingWindow(window, 64, 32), (window,)) for window in (8, 16))
    layout = ModelLayout(model="m", dtype="f", block_size=BLOCK, groups=groups)
    event = stored(0, 1, 0, "sliding_window", kv_cache_spec_sliding_window=16)
    assert EngineCache(layout, SALT).apply([event]) == [BlocksStored(1, (OURS[0],), Medium.ENGINE)]


@pytest.mark.parametrize(
    "more",
    [
        {"lora_id": 3},
        {"lora_name": "terse"},
        {"extra_keys": [("salted",), None]},
        {"parent_block_hash": 12345},
        {"block_size": 2 * BLOCK},
        {"token_ids": TOKENS[:BLOCK]},
    ],
)
def test_what_has_no_name_here_is_passed_over_with_all_that_follows(more: dict[str, Any]) -> None:
    cache = EngineCache(DENSE, SALT)
    assert cache.apply([stored(0, 2, **more)]) == []
    assert cache.apply([stored(2, 4)]) == []


def test_sglangs_blocks_of_a_namespace_are_named_so_and_those_of_other_salts_are_not() -> None:
    cache = EngineCache(DENSE, SALT)
    theirs = tuple(block_hashes(TOKENS, BLOCK, namespaced(SALT, "prfaas-acme")))
    assert cache.apply([told_by_sglang(0, 2, cache_salt="prfaas-acme")]) == [BlocksStored(0, theirs[:2], Medium.ENGINE)]
    assert cache.apply([told_by_sglang(2, 4, cache_salt="prfaas-acme")]) == [
        BlocksStored(0, theirs[2:4], Medium.ENGINE)
    ]
    cache.clear()
    assert cache.apply([told_by_sglang(0, 2, cache_salt="a client's own")]) == []
    assert cache.apply([told_by_sglang(0, 2)]) == [BlocksStored(0, tuple(OURS[:2]), Medium.ENGINE)]


def test_blocks_of_a_namespace_have_the_names_that_its_gateway_looks_for() -> None:
    cache = EngineCache(DENSE, SALT)
    named = namespaced(SALT, "prfaas-acme")
    theirs = block_hashes(TOKENS, BLOCK, named)
    assert cache.apply([stored(0, 2, extra_keys=[("prfaas-acme",), None])]) == [
        BlocksStored(0, tuple(theirs[:2]), Medium.ENGINE)
    ]
    assert cache.apply([stored(2, 3)]) == [BlocksStored(0, tuple(theirs[2:3]), Medium.ENGINE)]  # theirs, too
    other = EngineCache(DENSE, SALT)
    assert other.apply([stored(0, 2, extra_keys=[("image", "prfaas-acme"), None])]) == []


def test_after_a_rotation_what_begins_has_new_names_and_what_goes_on_has_its_own() -> None:
    cache, rotated = EngineCache(DENSE, SALT), model_salt("rotated")
    cache.apply([stored(0, 2)])
    cache.rename(rotated)
    assert cache.apply([stored(2, 3)]) == [BlocksStored(0, (OURS[2],), Medium.ENGINE)]
    begun = stored(0, 1, block_hashes=[engine_hash(9)], token_ids=TOKENS[BLOCK : 2 * BLOCK])
    names = tuple(block_hashes(TOKENS[BLOCK : 2 * BLOCK], BLOCK, rotated))
    assert cache.apply([begun]) == [BlocksStored(0, names, Medium.ENGINE)]


@pytest.mark.parametrize("size", [BLOCK, BLOCK // 2])
def test_what_is_told_again_after_a_rotation_keeps_the_name_that_it_is_dropped_by(size: int) -> None:
    """As by requests of one beginning that vLLM computes at once."""

    def told(stop: int) -> BlockStored:
        hashes = [engine_hash(number) for number in range(stop * BLOCK // size)]
        return stored(0, stop, block_hashes=hashes, block_size=size)

    cache = EngineCache(DENSE, SALT)
    cache.apply([told(2)])
    cache.rename(model_salt("rotated"))
    assert cache.apply([told(3)]) == [BlocksStored(0, (OURS[2],), Medium.ENGINE)]
    cache.apply([removed(*range(3 * BLOCK // size))])
    assert (list(cache.snapshot(8)), cache.remembered) == ([], 0)


def test_what_a_group_stores_again_after_a_rotation_is_what_the_others_still_hold() -> None:
    cache = EngineCache(HYBRID, SALT)
    cache.apply([stored(0, 3), state(2)])
    cache.apply([removed(0, 1, 2)])
    cache.rename(model_salt("rotated"))
    cache.apply([stored(0, 3)])
    cache.apply([removed(0, 1, 2), removed(2, group=STATE)])
    assert (list(cache.snapshot(8)), cache.remembered) == ([], 0)


def image(number: int) -> str:
    return f"{MEDIUM}{number}"


def test_blocks_with_images_are_named_by_them_where_they_begin() -> None:
    insets = [Inset(2, image(1)), Inset(BLOCK + 3, image(2))]
    ours = block_hashes(TOKENS, BLOCK, SALT, insets=insets)
    assert not set(ours) & set(OURS)
    cache = EngineCache(DENSE, SALT)
    # The second begins in the second block and reaches into the third and fourth.
    keys = [[[image(1), 2]], [[image(2), 3]], [[image(2), -1]], [[image(2), -5]], None]
    assert cache.apply([stored(0, 2, extra_keys=keys[:2])]) == [BlocksStored(0, tuple(ours[:2]), Medium.ENGINE)]
    assert cache.apply([stored(2, 5, extra_keys=keys[2:])]) == [BlocksStored(0, tuple(ours[2:5]), Medium.ENGINE)]


def test_a_namespace_and_an_image_may_be_of_one_block() -> None:
    ours = block_hashes(TOKENS, BLOCK, namespaced(SALT, "prfaas-acme"), insets=[Inset(1, image(1))])
    cache = EngineCache(DENSE, SALT)
    assert cache.apply([stored(0, 1, extra_keys=[[[image(1), 1], "prfaas-acme"]])]) == [
        BlocksStored(0, (ours[0],), Medium.ENGINE)
    ]


@pytest.mark.parametrize("keys", [[["logo", 1]], [[image(1), 1], "salted"], [[image(1), 1], b"embeds"], [[image(1)]]])
def test_blocks_with_what_is_not_named_by_its_contents_are_passed_over(keys: list[Any]) -> None:
    cache = EngineCache(DENSE, SALT)
    assert cache.apply([stored(0, 2, extra_keys=[None, keys])]) == [BlocksStored(0, (OURS[0],), Medium.ENGINE)]
    assert cache.apply([stored(2, 4)]) == []


def test_cleared_is_cleared_and_what_comes_after_it_counts() -> None:
    cache = EngineCache(DENSE, SALT)
    cache.apply([stored(0, 3)])
    assert cache.apply([AllBlocksCleared(), stored(0, 1)]) == [
        CacheCleared(Medium.ENGINE),
        BlocksStored(0, (OURS[0],), Medium.ENGINE),
    ]
    assert cache.clear() == [CacheCleared(Medium.ENGINE)]
    assert list(cache.snapshot(8)) == []


@st.composite
def histories(draw: st.DrawFn) -> list[list[EngineEvent]]:
    """Batches of events about six blocks, in any order but one: attention comes from its beginning and goes from its end.

    That is how vLLM keeps it, and what the index builds on (`hybrid_cache.index.index`); states come and go as they like.
    """
    numbers = st.integers(0, 5)
    kinds = st.sampled_from(["attention stored", "attention removed", "state stored", "state removed", "cleared"])
    batches: list[list[EngineEvent]] = []
    attention = 0  # blocks
    for size in draw(st.lists(st.integers(1, 4), max_size=12)):
        batch: list[EngineEvent] = []
        for _ in range(size):
            number, group = draw(numbers), draw(st.sampled_from([STATE, SECOND_STATE]))
            match draw(kinds):
                case "attention stored":
                    first, attention = draw(st.integers(0, min(number, attention))), max(attention, number + 1)
                    batch.append(stored(first, number + 1))
                case "attention removed":
                    attention = min(attention, number)
                    batch.append(removed(*range(number, 6)))
                case "state stored":
                    batch.append(state(number, group))
                case "state removed":
                    batch.append(removed(number, group=group))
                case _:
                    attention = 0
                    batch.append(AllBlocksCleared())
        batches.append(batch)
    return batches


@given(histories())
def test_a_gateway_never_believes_in_more_than_the_engine_said(history: Sequence[Sequence[EngineEvent]]) -> None:
    cache, index = EngineCache(HYBRID, SALT), PrefixIndex(HYBRID)
    truth: dict[int, set[int]] = {}
    for batch in history:
        for event in batch:
            match event:
                case BlockStored():
                    truth.setdefault(event.group_idx or 0, set()).update(map(int, event.block_hashes))
                case BlockRemoved():
                    truth.get(event.group_idx or 0, set()).difference_update(map(int, event.block_hashes))
                case AllBlocksCleared():
                    truth = {group: set() for group in truth}
        for change in cache.apply(batch):
            index.apply("n", change)
    hit = index.match("n", OURS, len(TOKENS)).num_tokens // BLOCK
    held = {number: {group for group, blocks in truth.items() if engine_hash(number) in blocks} for number in range(6)}
    assert all(FULL in held[number] for number in range(hit))
    assert not hit or {STATE, SECOND_STATE} & set(truth) <= held[hit - 1]
    fresh = PrefixIndex(HYBRID)
    for change in cache.snapshot(8):
        fresh.apply("n", change)
    assert fresh.match("n", OURS, len(TOKENS)) == index.match("n", OURS, len(TOKENS))


def test_blocks_before_one_that_a_state_still_holds_have_names_again() -> None:
    cache, index = EngineCache(HYBRID, SALT), PrefixIndex(HYBRID)
    batches = [[stored(0, 4)], [state(3, STATE)], [removed(*range(6))], [stored(0, 4)]]
    for batch in batches:
        for change in cache.apply(batch):
            index.apply("n", change)
    assert index.match("n", OURS, len(TOKENS)).num_tokens == 4 * BLOCK


# Gemma 4's way: heads of full attention are larger, so its blocks have half the tokens. A window's are ours.
HALF = BLOCK // 2
HALVES = ModelLayout(
    model="m",
    dtype="f",
    block_size=BLOCK,
    groups=(KVCacheGroup(FullAttention(64, 32), (0,)), KVCacheGroup(SlidingWindow(8, 64, 32), (1,))),
)
WINDOW = 1


def half(number: int) -> int:
    """As vLLM names the prefix that ends after so many halves and one more; `engine_hash`, where a block ends with it."""
    return engine_hash(number // 2) if number % 2 else 8_000_000_000_000_000_000 + number


def halves(first: int, stop: int, **more: Any) -> BlockStored:
    """Halves [first, stop) of the blocks of TOKENS, of full attention."""
    values: dict[str, Any] = {
        "block_hashes": [half(number) for number in range(first, stop)],
        "parent_block_hash": half(first - 1) if first else None,
        "token_ids": TOKENS[first * HALF : stop * HALF],
        "block_size": HALF,
    }
    return stored(0, 1, **(values | more))


def window(*numbers: int) -> BlockStored:
    """Blocks that a window still needs: it names fewer than it has tokens of."""
    return stored(0, 6, WINDOW, "sliding_window", block_hashes=[engine_hash(n) for n in numbers])


def halves_removed(*numbers: int) -> BlockRemoved:
    return BlockRemoved(block_hashes=[half(number) for number in numbers], group_idx=FULL)


def test_a_block_is_held_once_all_pieces_of_it_are_and_as_long() -> None:
    cache = EngineCache(HALVES, SALT)
    assert cache.apply([halves(0, 1)]) == []
    assert cache.apply([halves(1, 3)]) == [BlocksStored(0, (OURS[0],), Medium.ENGINE)]
    assert cache.apply([halves(3, 4), window(1)]) == [
        BlocksStored(0, (OURS[1],), Medium.ENGINE),
        BlocksStored(1, (OURS[1],), Medium.ENGINE),  # a window's block has the name of the last piece
    ]
    assert cache.apply([halves_removed(2)]) == [BlocksRemoved(0, (OURS[1],), Medium.ENGINE)]
    assert cache.apply([halves_removed(3)]) == []
    assert cache.apply([halves_removed(1)]) == [BlocksRemoved(0, (OURS[0],), Medium.ENGINE)]
    assert cache.apply([halves(0, 2)]) == [BlocksStored(0, (OURS[0],), Medium.ENGINE)]


def test_two_blocks_that_begin_alike_share_a_piece() -> None:
    cache = EngineCache(HALVES, SALT)
    cache.apply([halves(0, 2)])
    fork = [*TOKENS[:HALF], 7, 7]
    (name,) = block_hashes(fork, BLOCK, SALT)
    other = halves(1, 2, block_hashes=[99], token_ids=fork[HALF:])
    assert cache.apply([other]) == [BlocksStored(0, (name,), Medium.ENGINE)]
    assert cache.apply([BlockRemoved(block_hashes=[99], group_idx=FULL)]) == [BlocksRemoved(0, (name,), Medium.ENGINE)]
    assert cache.apply([other, halves_removed(0)]) == [BlocksRemoved(0, (OURS[0],), Medium.ENGINE)]


def test_pieces_of_a_namespace_have_its_names() -> None:
    cache = EngineCache(HALVES, SALT)
    theirs = block_hashes(TOKENS, BLOCK, namespaced(SALT, "prfaas-acme"))
    cache.apply([halves(0, 1, extra_keys=[("prfaas-acme",)])])
    assert cache.apply([halves(1, 4)]) == [BlocksStored(0, tuple(theirs[:2]), Medium.ENGINE)]


def test_pieces_with_an_image_in_them_are_passed_over() -> None:
    cache = EngineCache(HALVES, SALT)
    assert cache.apply([halves(0, 4, extra_keys=[None, None, None, ("image",)])]) == [
        BlocksStored(0, (OURS[0],), Medium.ENGINE)
    ]


def test_a_group_that_told_a_part_of_its_block_first_has_whole_ones_after_all() -> None:
    cache = EngineCache(DENSE, SALT)
    assert cache.apply([halves(0, 1)]) == []
    assert cache.apply([stored(0, 2)]) == [BlocksStored(0, tuple(OURS[:2]), Medium.ENGINE)]
    assert cache.apply([halves(4, 5)]) == []
    assert cache.apply([removed(1)]) == [BlocksRemoved(0, (OURS[1],), Medium.ENGINE)]


@st.composite
def histories_of_halves(draw: st.DrawFn) -> list[EngineEvent]:
    """Events about twelve halves, in any order: a chain may begin anywhere and lose any piece of it."""
    events: list[EngineEvent] = []
    for _ in range(draw(st.integers(0, 14))):
        first = draw(st.integers(0, 11))
        stop = draw(st.integers(first + 1, 12))
        some = draw(st.sets(st.integers(0, 5), max_size=3))
        kinds = [halves(first, stop), halves_removed(*range(first, stop)), halves_removed(first), window(*some)]
        events.append(draw(st.sampled_from([*kinds, AllBlocksCleared()])))
    return events


@given(histories_of_halves(), st.integers(1, 4))
def test_a_block_is_never_believed_to_be_held_without_a_piece_of_it(history: list[EngineEvent], batch: int) -> None:
    cache = EngineCache(HALVES, SALT)
    truth: dict[int, set[int]] = {FULL: set(), WINDOW: set()}
    for start in range(0, len(history), batch):
        for event in history[start : start + batch]:
            match event:
                case BlockStored():
                    truth[event.group_idx or 0].update(map(int, event.block_hashes))
                case BlockRemoved():
                    truth[event.group_idx or 0].difference_update(map(int, event.block_hashes))
                case AllBlocksCleared():
                    truth = {group: set() for group in truth}
        cache.apply(history[start : start + batch])
        for held in cache.snapshot(8):
            numbers = [OURS.index(name) for name in held.hashes]
            if held.group == 0:
                assert all({half(2 * n), half(2 * n + 1)} <= truth[FULL] for n in numbers)
            else:
                assert all(engine_hash(n) in truth[WINDOW] for n in numbers)


@given(st.lists(st.tuples(st.integers(0, 11), st.integers(1, 12)), max_size=10))
def test_nothing_is_remembered_of_pieces_that_nobody_holds(ranges: list[tuple[int, int]]) -> None:
    cache = EngineCache(HALVES, SALT)
    for first, stop in ranges:
        cache.apply([halves(first, max(stop, first + 1))])
    cache.apply([halves_removed(*range(12))])
    assert cache.remembered == 0


def test_what_is_cleared_is_not_gone_through_block_by_block() -> None:
    cache = EngineCache(DENSE, SALT)
    tokens = list(range(1000 * BLOCK))
    cache.apply([stored(0, 1000, block_hashes=list(range(1000)), token_ids=tokens)])
    assert cache.remembered == 1000
    calls = Counter[str]()
    sys.setprofile(lambda frame, event, arg: calls.update([event]))
    try:
        cache.apply([AllBlocksCleared()])
    finally:
        sys.setprofile(None)
    assert cache.remembered == 0
    assert calls.total() < 200
