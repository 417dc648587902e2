"""What a check finds, and that it judges what there was when it began."""

from itertools import pairwise

import pytest

from hybrid_cache.cache.blocks import BlockRun, Companion
from hybrid_cache.cache.integrity import IntegrityCheck
from hybrid_cache.cache.pool import PagePool
from hybrid_cache.cache.prefix_cache import PrefixCache
from hybrid_cache.cache.reservation import ReservedPages
from hybrid_cache.errors import IntegrityError
from tests.hybrid_cache.builders import FULL, STATE, make_layout, prefill, reserve


class Books:
    """Three blocks in a row, the last with a state; another block after two of them. A request holds the first block and two
    pages of its own.
    """

    def __init__(self) -> None:
        self.pool = PagePool(8)
        a, b, c, d, state, *own = self.pool.allocate(7)
        self.run = BlockRun([b"a", b"b", b"c"], [a, b, c], None, 0, 0)
        self.branch = BlockRun([b"d"], [d], self.run, 2, 0)
        self.run.holds, self.run.forks = {1: 1}, {2: 1}
        self.blocks = {b"a": self.run, b"b": self.run, b"c": self.run, b"d": self.branch}
        self.runs = [self.run, self.branch]
        self.state = Companion(self.run, 2, 1, (state,), 0)
        self.companions: list[dict[bytes, Companion]] = [{}, {b"c": self.state}]
        self.hold = ReservedPages("r", [b"a"], 4, [(self.run, 1)], 1, own=own)
        self.evictable = 4

    def check(self) -> None:
        check = IntegrityCheck(1, self.blocks, self.runs, self.companions, [self.hold], self.pool, self.evictable)
        for _ in check.run():
            pass


def test_books_that_balance() -> None:
    Books().check()


def test_a_lost_page() -> None:
    books = Books()
    books.hold.own.pop()
    with pytest.raises(IntegrityError, match="lost"):
        books.check()


def test_a_page_that_is_held_twice() -> None:
    books = Books()
    books.hold.own_states[1, 4] = (books.run.pages[0],)
    with pytest.raises(IntegrityError, match="held twice"):
        books.check()


def test_a_page_of_another_pool() -> None:
    books = Books()
    books.hold.own.append(8)
    with pytest.raises(IntegrityError, match="page 8 is not of this pool"):
        books.check()


def test_a_lock_of_no_request() -> None:
    books = Books()
    books.run.holds[1] += 1
    with pytest.raises(IntegrityError, match=r"index=0 .* is locked \+1 times more"):
        books.check()


def test_a_block_that_is_used_without_a_lock() -> None:
    books = Books()
    books.hold.path.append((books.branch, 1))
    books.hold.hashes += [b"b", b"d"]
    with pytest.raises(IntegrityError, match=r"index=2 .* is locked -1 times more"):
        books.check()


def test_a_block_that_is_used_and_not_cached() -> None:
    books = Books()
    books.hold.path[0] = BlockRun([b"a"], books.run.pages[:1], None, 0, 0), 1
    with pytest.raises(IntegrityError, match=r"in use but not cached|times more than it is used"):
        books.check()


def test_a_path_that_is_not_the_requests() -> None:
    books = Books()
    books.hold.hashes[0] = b"b"
    with pytest.raises(IntegrityError, match="locks a path that is not its own"):
        books.check()


def test_a_lock_of_more_blocks_than_there_are() -> None:
    books = Books()
    books.branch.holds[2] = 1
    with pytest.raises(IntegrityError, match="in use and not there"):
        books.check()


def test_pages_that_are_counted_wrong() -> None:
    books = Books()
    books.evictable = 5
    with pytest.raises(IntegrityError, match="4 pages are evictable, 5 were counted"):
        books.check()


def test_a_run_without_the_one_it_goes_on_from() -> None:
    books = Books()
    books.branch.parent = BlockRun([b"a", b"b"], [], None, 0, 0)
    with pytest.raises(IntegrityError, match=r"is not there and has orphans|counts \+1 runs more"):
        books.check()


def test_a_run_that_counts_wrong() -> None:
    books = Books()
    books.run.forks[2] = 2
    with pytest.raises(IntegrityError, match=r"index=0 .* counts \+1 runs more than go on after 2"):
        books.check()


def test_a_block_under_another_hash() -> None:
    books = Books()
    books.blocks[b"x"] = books.blocks.pop(b"c")
    with pytest.raises(IntegrityError, match="not under its hash"):
        books.check()


def test_a_block_of_no_run() -> None:
    books = Books()
    books.blocks[b"x"] = books.run
    with pytest.raises(IntegrityError, match="5 blocks and states are in runs, 6 are listed"):
        books.check()


def test_a_state_without_its_block() -> None:
    books = Books()
    books.state.run = books.branch
    with pytest.raises(IntegrityError, match="not its block's"):
        books.check()


class CountingTable(dict[bytes, BlockRun]):
    """Blocks that count how often they are looked for."""

    looked = 0

    def get(self, key, default=None):
        self.looked += 1
        return super().get(key, default)


@pytest.mark.parametrize("blocks", [1, 3, 100, 5000])
def test_no_step_looks_at_more_blocks_than_it_may(blocks: int) -> None:
    pool, table = PagePool(5000), CountingTable()
    runs = []
    for first in range(0, 5000, blocks):
        hashes = [number.to_bytes(4) for number in range(first, min(first + blocks, 5000))]
        runs.append(BlockRun(hashes, pool.allocate(len(hashes)), None, 0, 0))
        table.update(dict.fromkeys(hashes, runs[-1]))
    looked = [0]
    for _ in IntegrityCheck(1, table, runs, [], [], pool, 5000, step=256).run():
        looked.append(table.looked)
    assert table.looked == 5000
    assert max(after - before for before, after in pairwise(looked)) <= 256


def test_a_check_judges_what_there_was() -> None:
    cache = PrefixCache(make_layout(FULL, STATE), 100)
    prefill(cache, list(range(40)))
    steps = cache.integrity_steps(1)
    for step, _ in enumerate(steps):  # everything changes under it
        reserve(cache, f"r{step}", list(range(12)))
        cache.release(f"r{step - 2}", 0.0)
        prefill(cache, list(range(1000 * step, 1000 * step + 20)))
        if step % 3 == 0:
            cache.shrink(cache.evictable_pages, 0.0)
    cache.check_integrity()


def test_a_fault_is_found_whatever_happens_meanwhile() -> None:
    cache = PrefixCache(make_layout(FULL, STATE), 100)
    prefill(cache, list(range(40)))
    held = cache.held(0)
    next(iter(held.values())).move_hold(0, 1)  # type: ignore[attr-defined]
    steps = cache.integrity_steps(1)
    next(steps)
    reserve(cache, "r", list(range(12)))
    with pytest.raises(IntegrityError, match="evictable"):
        list(steps)


def test_a_check_that_is_given_up_leaves_room_for_another() -> None:
    cache = PrefixCache(make_layout(FULL), 100)
    steps = cache.integrity_steps()
    next(steps)
    steps.close()
    cache.check_integrity()


def test_short_runs_are_looked_at_in_steps_as_short_as_those_of_long_ones() -> None:
    step = 64

    def steps_of(prompts: list[list[int]]) -> int:
        cache = PrefixCache(make_layout(FULL), 1200)
        for tokens in prompts:
            prefill(cache, tokens)
        return sum(1 for _ in cache.integrity_steps(step))

    one, many = steps_of([list(range(2048))]), steps_of([[0, 0, 0, index] for index in range(512)])
    assert many >= 3 * one  # what a run has but once is looked at, too
