import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid_cache.cache.events import BlocksRemoved, BlocksStored, CacheCleared, Medium
from hybrid_cache.cache.lookup import PrefixHit
from hybrid_cache.cache.prefix_cache import PrefixCache
from hybrid_cache.cache.reservation import NO_HINTS, Hints, Purpose
from hybrid_cache.errors import DuplicateReservation, OutOfPages, UnchainedHashes, UnknownReservation
from hybrid_cache.eviction.base import BEGIN_STEP
from hybrid_cache.eviction.choice import POLICIES, policy_named
from hybrid_cache.layout.spec import KVCacheSpec
from tests.hybrid_cache.builders import BLOCK, FULL, STATE, WINDOW, hashes_of, make_layout, prefill, reserve

PROMPT = list(range(18))  # four full blocks and a half
HASHES = hashes_of(PROMPT)


def make_cache(*specs, pages=400, **options):
    return PrefixCache(make_layout(*specs), pages, **options)


def test_cold_prefill_computes_everything():
    cache = make_cache()
    reservation = reserve(cache, "r", PROMPT)
    assert reservation.cached_tokens == 0
    assert len(reservation.blocks[0]) == 5
    assert all(len(pages) == cache.layout.pages_per_block(0) for pages in reservation.blocks[0])
    assert reservation.blocks[1] == ()
    assert list(reservation.states[1]) == [16, 18]
    cache.check_integrity()


def test_committed_prefix_is_hit_at_its_snapshot_only():
    cache = make_cache()
    prefill(cache, PROMPT)
    assert cache.match(HASHES, 18) == PrefixHit(16, 16)
    assert cache.match(HASHES, 15) == PrefixHit(0, 12)
    cache.check_integrity()


def test_nothing_is_matched_before_commit():
    cache = make_cache()
    reserve(cache, "r", PROMPT)
    assert cache.match(HASHES, 18) == PrefixHit(0, 0)
    cache.abort("r", 1.0)
    assert cache.match(HASHES, 18) == PrefixHit(0, 0)
    assert cache.report().pages_free == 400


def test_commit_takes_full_blocks_only():
    cache = make_cache()
    reserve(cache, "r", PROMPT)
    cache.commit("r", 11, 0.0)
    assert cache.match(HASHES, 18).attention_tokens == 8
    cache.commit("r", 18, 0.0)
    assert cache.match(HASHES, 18) == PrefixHit(16, 16)
    cache.check_integrity()


def test_hit_shares_pages():
    cache = make_cache()
    first = prefill(cache, PROMPT)
    second = reserve(cache, "again", [*PROMPT, 90, 91, 92])
    assert second.cached_tokens == 16
    assert second.blocks[0][:4] == first.blocks[0][:4]
    assert second.states[1][16] == first.states[1][16]
    assert sorted(second.states[1]) == [16, 20, 21]


def test_fully_cached_prompt_leaves_nothing_to_compute():
    cache = make_cache()
    prefill(cache, PROMPT[:16])
    again = reserve(cache, "again", PROMPT[:16])
    assert again.cached_tokens == again.num_tokens == 16
    assert list(again.states[1]) == [16]
    assert cache.report().pages_transfer == 0
    cache.commit("again", 16, 1.0)
    cache.release("again", 1.0)
    cache.check_integrity()


def test_branch_point_gets_a_snapshot():
    cache = make_cache()
    prefill(cache, PROMPT)
    other = PROMPT[:8] + [70] * 10
    assert reserve(cache, "b", other).states[1].keys() == {8, 16, 18}


def test_landing_needs_the_state_but_not_the_shared_attention():
    cache = make_cache(FULL, WINDOW, STATE)
    prefill(cache, PROMPT)
    landing = reserve(cache, "l", PROMPT[:8] + [70] * 10, purpose=Purpose.LANDING)
    assert landing.cached_tokens == 8
    assert landing.states[2].keys() == {18}
    assert [bool(pages) for pages in landing.blocks[1]] == [False, False, False, True, True]
    cache.commit("l", 18, 0.0)
    cache.release("l", 0.0)
    cache.check_integrity()


def test_window_blocks_are_kept_before_snapshots_only():
    cache = make_cache(FULL, WINDOW)
    reservation = reserve(cache, "w", list(range(40)))
    assert [bool(pages) for pages in reservation.blocks[1]] == [False] * 8 + [True] * 2
    cache.commit("w", 40, 0.0)
    cache.release("w", 0.0)
    again = reserve(cache, "again", list(range(44)))
    assert again.cached_tokens == 40
    assert again.blocks[1][8:10] == reservation.blocks[1][8:10]


def test_two_prefills_of_one_prompt_keep_the_older_block():
    cache = make_cache()
    one, two = reserve(cache, "1", PROMPT), reserve(cache, "2", PROMPT)
    assert not {p for b in one.blocks[0] for p in b} & {p for b in two.blocks[0] for p in b}
    cache.commit("1", 18, 0.0)
    cache.commit("2", 18, 0.0)
    cache.release("1", 1.0)
    cache.check_integrity()
    cache.release("2", 2.0)
    assert reserve(cache, "3", PROMPT).blocks[0][:4] == one.blocks[0][:4]
    cache.check_integrity()


def test_locked_pages_never_leave():
    cache = make_cache(pages=60)
    prefill(cache, PROMPT)
    held = reserve(cache, "held", PROMPT)
    shared = {p for b in held.blocks[0][:4] for p in b} | set(held.states[1][16])
    for i in range(10):
        try:
            other = reserve(cache, f"o{i}", [100 + i] * 18)
        except OutOfPages:
            break
        assert not shared & {p for b in other.blocks[0] for p in b}
        cache.check_integrity()
    else:
        pytest.fail("the pool never filled")
    assert cache.match(HASHES, 18) == PrefixHit(16, 16)


def test_out_of_pages_changes_nothing():
    cache = make_cache(pages=20)
    before = cache.report()
    with pytest.raises(OutOfPages) as info:
        reserve(cache, "big", list(range(400)))
    assert info.value.available == 20
    assert cache.report() == before
    cache.check_integrity()


def test_eviction_takes_tails_first():
    cache = make_cache(FULL, pages=8)
    prefill(cache, PROMPT[:16])
    free = cache.report().pages_free
    reserve(cache, "more", [50] * 4 * (free + 2))
    assert cache.match(HASHES, 16).num_tokens == 8
    cache.check_integrity()


def test_extra_snapshots_yield_to_the_request_itself():
    layout = make_layout()
    state, block = layout.pages_per_block(1), layout.pages_per_block(0)
    cache = PrefixCache(layout, 5 * block + state)
    assert reserve(cache, "r", PROMPT).states[1].keys() == {18}


def test_what_has_ended_cannot_be_committed():
    cache = make_cache()
    reserve(cache, "a", PROMPT)
    cache.release("a", 1.0)
    assert cache.report().reservations == 0
    with pytest.raises(UnknownReservation, match="no reservation 'a'"):
        cache.commit("a", 4, 15.0)


def test_release_and_abort_are_idempotent():
    cache = make_cache()
    reserve(cache, "r", PROMPT)
    for _ in range(2):
        cache.release("r", 0.0)
        cache.abort("r", 0.0)
    cache.abort("never", 0.0)
    cache.check_integrity()


OTHER = hashes_of(list(range(100, 132)))
UNCHAINED = {
    "ours, then the middle of another one": HASHES[:2] + OTHER[3:6],
    "the middle of one": OTHER[3:6],
    "another beginning": HASHES[:1] + OTHER[1:4],
    "a block in the middle": [HASHES[0], OTHER[7], *HASHES[2:4]],
    "one prompt after the other": HASHES[:4] + OTHER[:4],
}


@pytest.mark.parametrize("hashes", UNCHAINED.values(), ids=UNCHAINED)
@pytest.mark.parametrize("pinned", [False, True])
def test_blocks_of_several_prompts_are_refused_and_nothing_is_held(hashes, pinned):
    cache = make_cache(FULL)
    prefill(cache, PROMPT)
    cache.reserve("other", OTHER, 32, now=0.0, purpose=Purpose.LANDING)
    cache.commit("other", 32, 0.0)
    cache.release("other", 0.0)
    before, tokens = cache.report(), len(hashes) * BLOCK
    if pinned := pinned and hashes[0] == HASHES[0]:
        assert list(cache.pin_steps("pin", hashes[:1], BLOCK, Purpose.LANDING, 1)) == []
    with pytest.raises(UnchainedHashes, match="not one after the other"):
        cache.reserve("r", hashes, tokens, now=1.0, purpose=Purpose.LANDING, pinned="pin" if pinned else "")
    cache.release("pin", 1.0)
    with pytest.raises(UnchainedHashes):
        cache.pin("r", hashes, tokens, Purpose.LANDING)
    with pytest.raises(UnchainedHashes):
        list(cache.pin_steps("steps", hashes, tokens, Purpose.LANDING, len(hashes)))
    cache.release("steps", 1.0)
    cache.check_integrity()
    assert cache.report() == before
    assert cache.shrink(cache.evictable_pages, 2.0) == before.pages_prefix


def test_what_owns_no_pages_commits_none():
    """A block without its pages would give those of another one to whatever finds it."""
    cache = make_cache(FULL)
    reserve(cache, "ending", PROMPT)
    next(cache.release_steps("ending", 0.0, 1), None)
    reserve(cache, "r", PROMPT)
    steps = cache.release_steps("r", 0.0, 1)
    cache.commit("r", 8, 0.0)
    next(steps)
    with pytest.raises(ValueError, match="'r' has no pages of its own for block 3"):
        cache.commit("r", 16, 0.0)
    cache.check_integrity()
    assert cache.match(HASHES, 16).attention_tokens == 8


def test_bad_calls():
    cache = make_cache()
    reserve(cache, "r", PROMPT)
    with pytest.raises(DuplicateReservation):
        reserve(cache, "r", PROMPT)
    with pytest.raises(ValueError, match="num_tokens"):
        reserve(cache, "empty", [])


def test_blocks_without_a_hash_stay_private():
    cache = make_cache()
    cache.reserve("private", [], 18, now=0.0, purpose=Purpose.PREFILL)
    cache.commit("private", 18, 0.0)
    cache.release("private", 0.0)
    assert cache.report().pages_free == 400


def test_events_tell_what_can_be_matched():
    cache = make_cache(FULL, STATE)
    prefill(cache, PROMPT)
    assert cache.take_events() == [BlocksStored(0, tuple(HASHES)), BlocksStored(1, (HASHES[3],))]
    assert cache.take_events() == []
    assert cache.snapshot() == (BlocksStored(0, tuple(HASHES)), BlocksStored(1, (HASHES[3],)))
    cache.shrink(cache.evictable_pages, 1.0)
    assert cache.take_events() == [BlocksRemoved(1, (HASHES[3],)), BlocksRemoved(0, tuple(reversed(HASHES)))]


def test_absent_reader_gets_a_snapshot():
    cache = make_cache(FULL, event_limit=3)
    prefill(cache, PROMPT)
    assert cache.take_events() == [CacheCleared(Medium.MEMORY), BlocksStored(0, tuple(HASHES))]
    assert cache.take_events() == []


def test_report_adds_up():
    cache = make_cache()
    prefill(cache, PROMPT)
    reserve(cache, "r", PROMPT)
    report = cache.report()
    assert report.pages_free + report.pages_prefix + report.pages_transfer == report.pages_total
    assert report.pages_locked == report.pages_prefix > 0
    assert report.reservations == 1


def test_prompt_shorter_than_a_block_is_the_first_ever():
    cache = make_cache()
    cache.reserve("short", [], 3, now=0.0, purpose=Purpose.PREFILL)
    cache.commit("short", 3, 0.0)
    cache.release("short", 0.0)
    prefill(cache, PROMPT)
    cache.shrink(cache.evictable_pages, 0.0)
    assert cache.report().pages_free == 400


def test_what_nobody_filled_does_not_become_prefix_cache():
    cache = make_cache(FULL, WINDOW, STATE)
    held = reserve(cache, "r", PROMPT)
    windows = {(1, block) for block, pages in enumerate(held.blocks[1]) if pages}
    states = {(2, length) for length in held.states[2]}
    cache.commit("r", len(PROMPT), 0.0, windows | states)
    cache.release("r", 1.0)
    assert cache.match(HASHES, 18) == PrefixHit(0, 16)
    cache.check_integrity()


def test_an_answer_shares_attention_and_brings_the_state_of_its_end():
    """Where a prompt landed, its attention is cached and its state is not."""
    cache = make_cache()
    reserve(cache, "l", PROMPT[:10], purpose=Purpose.LANDING)
    cache.commit("l", 10, 0.0)
    cache.release("l", 0.0)
    answer = reserve(cache, "a", PROMPT[:16], purpose=Purpose.ANSWER)
    assert answer.cached_tokens == 8
    assert [list(lengths) for lengths in answer.states if lengths] == [[16]]
    cache.commit("a", 16, 0.0)
    cache.release("a", 0.0)
    assert cache.match(hashes_of(PROMPT), 18).num_tokens == 16
    cache.check_integrity()


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_that_a_node_may_name_keeps_a_cache_going(name):
    layout = make_layout(FULL, WINDOW, STATE)
    cache = PrefixCache(layout, 100, eviction=policy_named(name, layout, 100))
    for number in range(60):
        prefill(cache, [number % 7] * 20 + [number] * 20, now=float(number))
        cache.check_integrity()
    assert cache.match(hashes_of([59 % 7] * 20 + [59] * 20), 40).num_tokens


@pytest.mark.parametrize("groups", [(FULL,), (FULL, WINDOW, STATE)])
def test_the_default_policy_remembers_as_many_blocks_as_it_is_told(groups):
    layout = make_layout(*groups)
    policy = policy_named("default", layout, 100, history_blocks=64)
    cache = PrefixCache(layout, 100, eviction=policy)
    for number in range(60):
        prefill(cache, [number] * 40, now=float(number))
    known = [sum(map(policy.knows, hashes_of([number] * 40))) for number in range(60)]
    assert sum(known) == 64
    assert known[:50] == [0] * 50, "the last ones"


def test_a_copy_is_given_up_from_its_end_down_to_what_is_of_use():
    cache = PrefixCache(make_layout(FULL), 100)
    tokens = list(range(40))
    prefill(cache, tokens, now=0.0)
    held = cache.match(hashes_of(tokens), 40).num_tokens
    reserve(cache, "running", tokens[:24], now=0.0)  # it finds 24 tokens, and holds them
    assert cache.drop(hashes_of(tokens), 8, unused_since=50.0, now=100.0) == 4
    assert (held, cache.match(hashes_of(tokens), 40).num_tokens) == (40, 24)
    cache.release("running", 100.0)
    assert cache.drop(hashes_of(tokens), 8, unused_since=-1.0, now=100.0) == 0  # found at 0 s: of late
    prefill(cache, [*tokens[:12], 99, 99, 99, 99], now=100.0)
    assert cache.drop(hashes_of(tokens), 8, unused_since=50.0, now=101.0) == 3  # something goes on from 12 tokens
    assert cache.match(hashes_of(tokens), 40).num_tokens == 12
    cache.check_integrity()


def test_a_state_is_kept_where_later_prompts_will_leave() -> None:
    cache = PrefixCache(make_layout(FULL, STATE), 200)
    prompt = list(range(32))
    hashes = hashes_of(prompt)
    hints = Hints(branch_tokens=(16, 17))  # no block ends at 17
    reservation = cache.reserve("r", hashes, 32, now=0.0, purpose=Purpose.PREFILL, hints=hints)
    assert set().union(*reservation.states) == {16, 32}
    cache.commit("r", 32, 0.0)
    cache.release("r", 0.0)
    assert cache.match(hashes_of([*prompt[:16], *range(70, 86)]), 32).num_tokens == 16
    cache.check_integrity()


def test_what_is_of_no_use_leaves_first_unless_others_use_it() -> None:
    cache = PrefixCache(make_layout(FULL), 40)
    old, useless, used = list(range(16)), list(range(100, 132)), list(range(200, 216))
    nothing = Hints(useful_tokens=0)

    def compute(name: str, prompt: list[int], hints: Hints) -> None:
        cache.reserve(name, hashes_of(prompt), len(prompt), now=float(len(name)), purpose=Purpose.PREFILL, hints=hints)
        cache.commit(name, len(prompt), float(len(name)))
        cache.release(name, float(len(name)))

    compute("a", old, Hints())
    compute("bb", used, nothing)
    compute("ccc", used, Hints())
    compute("dddd", useless, nothing)
    pages = cache.match(hashes_of(useless), 32).num_tokens // BLOCK
    cache.shrink(pages, 9.0)
    assert cache.match(hashes_of(useless), 32).num_tokens == 0
    assert cache.match(hashes_of(old), 16).num_tokens == 16
    assert cache.match(hashes_of(used), 16).num_tokens == 16


@given(seed=st.integers(0, 1000), most=st.integers(1, 3))
def test_a_snapshot_in_parts_and_the_events_behind_it_are_what_is_held(seed: int, most: int) -> None:
    rng, cache = random.Random(seed), make_cache(FULL, STATE)

    def change() -> None:
        prefill(
            cache, list(range(1000 * rng.randrange(4), 1000 * rng.randrange(1, 5))[: 4 * rng.randrange(1, 8)]) or [1]
        )
        if rng.random() < 0.3:
            cache.shrink(cache.evictable_pages, 0.0)

    for _ in range(4):
        change()
    cache.take_events()  # the reader hears of what comes now
    told = [set(), set()]
    queued = []
    for part in cache.snapshot_parts(most):
        assert 0 < len(part.hashes) <= most
        told[part.group].update(part.hashes)
        change()
        queued += cache.take_events()
    for event in queued:
        (told[event.group].update if isinstance(event, BlocksStored) else told[event.group].difference_update)(
            event.hashes
        )
    assert told == [set(stored.hashes) for stored in cache.snapshot()]


@pytest.mark.parametrize("groups", [(FULL,), (FULL, STATE)])
def test_a_request_that_begins_in_steps_teaches_what_one_teaches_that_begins_at_once(
    groups: tuple[KVCacheSpec, ...],
) -> None:
    """Though another one begins before it is through."""
    layout = make_layout(*groups)
    long = list(range(3 * BEGIN_STEP * layout.block_size))
    gone = []
    for in_steps in (False, True):
        cache = PrefixCache(layout, 8 * BEGIN_STEP)
        for turn, tokens in enumerate([long, long[: 2 * len(long) // 3]]):
            now, hashes, short = float(turn), hashes_of(tokens), [turn] * 64
            cache.reserve("long", hashes, len(tokens), now=now, purpose=Purpose.PREFILL, begins=not in_steps)
            steps = cache.begin_steps("long", Purpose.PREFILL, NO_HINTS, now) if in_steps else iter(())
            assert next(steps, "over") == (None if in_steps else "over")
            reserve(cache, "short", short, now=now)
            assert next(steps, "over") == "over"
            for name, length in (("long", len(tokens)), ("short", len(short))):
                cache.commit(name, length, now)
                cache.release(name, now)
        cache.take_events()
        cache.shrink(4 * BEGIN_STEP, 100.0)
        gone.append(cache.take_events())
        cache.check_integrity()
    assert gone[0] == gone[1]
    assert gone[0]


def one_by_one(policy):
    """The same policy, which takes no block before it was offered."""
    kind = type(policy)

    class OneByOne(kind):
        def take_path(self, keys, now):
            return 0

    policy.__class__ = OneByOne
    return policy


@pytest.mark.parametrize("specs", [(FULL,), (FULL, WINDOW), (FULL, STATE), (FULL, WINDOW, STATE)])
@pytest.mark.parametrize("seed", range(3))
def test_ancestors_that_leave_together_leave_in_the_order_in_which_they_would_alone(specs, seed):
    layout = make_layout(*specs)
    left: list[list[tuple[int, bytes]]] = []
    for change in (lambda policy: policy, one_by_one):
        drawn, gone = random.Random(seed), list[tuple[int, bytes]]()
        cache = PrefixCache(layout, 90, eviction=change(policy_named("default", layout, 90)))
        cache.on_evict = lambda group, block_hash, pages, gone=gone: gone.append((group, block_hash))
        now = 0.0
        for number in range(100):
            now += drawn.choice((0.0, 0.5, 20.0))
            tokens = [drawn.randrange(3)] * 12 + [drawn.randrange(4)] * 4 * drawn.randint(1, 12)
            useful = drawn.choice((None, 8))
            try:
                cache.reserve(
                    f"r{number}", hashes_of(tokens), len(tokens), now=now, purpose=Purpose.PREFILL,
                    hints=Hints(useful_tokens=useful),
                )  # fmt: skip
            except OutOfPages:
                pass
            else:
                cache.commit(f"r{number}", len(tokens), now)
            cache.release(f"r{number - drawn.randint(0, 1)}", now)
            cache.release(f"r{number - 1}", now)
            if not drawn.randrange(8):
                cache.shrink(drawn.randint(1, 60), now)
        cache.check_integrity()
        left.append(gone)
    assert left[0] == left[1]
    assert len(left[0]) > 80
