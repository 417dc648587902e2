"""What a check finds, and that it judges what there was when it began."""

from itertools import pairwise

import pytest

from hybrid_cache.cache.blocks import BlockNode, Companion
from hybrid_cache.cache.integrity import IntegrityCheck
from hybrid_cache.cache.pool import PagePool
from hybrid_cache.cache.prefix_cache import PrefixCache
from hybrid_cache.cache.reservation import ReservedPages
from hybrid_cache.errors import IntegrityError
from tests.hybrid_cache.builders import FULL, STATE, make_layout, prefill, reserve


class Books:
    """Three blocks in a row, the last with a state, and a request that holds the first of them and two pages of its own."""

    def __init__(self) -> None:
        self.pool = PagePool(8)
        pages = self.pool.allocate(6)
        a = BlockNode(b"a", None, (pages[0],), 0)
        b = BlockNode(b"b", b"a", (pages[1],), 0, index=1, locks=0)
        c = BlockNode(b"c", b"b", (pages[2],), 0, index=2, locks=0)
        a.children = b.children = 1
        self.a, self.b, self.c = a, b, c
        self.nodes = {each.hash: each for each in (a, b, c)}
        self.state = Companion(c, 1, (pages[3],), 0)
        self.companions: list[dict[bytes, Companion]] = [{}, {b"c": self.state}]
        self.hold = ReservedPages("r", [b"a"], 4, [a], own_blocks=[(pages[4],), (pages[5],)])
        self.evictable = 3

    def check(self) -> None:
        check = IntegrityCheck(1, self.nodes, self.companions, [self.hold], self.pool, self.evictable)
        for _ in check.run():
            pass


def test_books_that_balance() -> None:
    Books().check()


def test_a_lost_page() -> None:
    books = Books()
    books.hold.own_blocks.pop()
    with pytest.raises(IntegrityError, match="lost"):
        books.check()


def test_a_page_that_is_held_twice() -> None:
    books = Books()
    books.hold.own_states[1, 4] = books.a.pages
    with pytest.raises(IntegrityError, match="held twice"):
        books.check()


def test_a_page_of_another_pool() -> None:
    books = Books()
    books.hold.own_blocks.append((8,))
    with pytest.raises(IntegrityError, match="page 8 is not of this pool"):
        books.check()


def test_a_lock_of_no_request() -> None:
    books = Books()
    books.a.locks += 1
    with pytest.raises(IntegrityError, match=r"index=0 .* is locked \+1 times more"):
        books.check()


def test_a_block_that_is_used_without_a_lock() -> None:
    books = Books()
    books.hold.nodes.append(books.b)
    books.hold.hashes.append(b"b")
    with pytest.raises(IntegrityError, match=r"index=1 .* is locked -1 times more"):
        books.check()


def test_a_block_that_is_used_and_not_cached() -> None:
    books = Books()
    books.hold.nodes[0] = BlockNode(b"a", None, books.a.pages, 0)
    with pytest.raises(IntegrityError, match=r"in use but not cached|times more than it is used"):
        books.check()


def test_a_path_that_is_not_the_requests() -> None:
    books = Books()
    books.hold.hashes[0] = b"b"
    with pytest.raises(IntegrityError, match="locks a path that is not its own"):
        books.check()


def test_pages_that_are_counted_wrong() -> None:
    books = Books()
    books.evictable = 4
    with pytest.raises(IntegrityError, match="3 pages are evictable, 4 were counted"):
        books.check()


def test_a_block_without_its_parent() -> None:
    books = Books()
    del books.nodes[b"b"]
    books.hold.own_blocks.append(books.b.pages)
    books.evictable = 2
    with pytest.raises(IntegrityError, match=r"block 62 is not there and has orphans|counts \+1 children more"):
        books.check()


def test_a_parent_that_counts_wrong() -> None:
    books = Books()
    books.b.children = 2
    with pytest.raises(IntegrityError, match=r"index=1 .* counts \+1 children more"):
        books.check()


def test_a_block_under_another_hash() -> None:
    books = Books()
    books.nodes[b"x"] = books.nodes.pop(b"c")
    with pytest.raises(IntegrityError, match="not under its hash"):
        books.check()


def test_a_state_without_its_block() -> None:
    books = Books()
    books.state.node = BlockNode(b"c", None, (), 0)
    with pytest.raises(IntegrityError, match="not its node's"):
        books.check()


def test_no_step_looks_at_more_blocks_than_it_may() -> None:
    cache = PrefixCache(make_layout(FULL, STATE), 20_000)
    prefill(cache, list(range(4 * 5000)))
    looked = [0]
    for _ in cache.integrity_steps(256):
        looked.append(sum(node.stamp for node in cache.held(0).values()))  # type: ignore[attr-defined]
    assert looked[-1] == 5000
    assert max(after - before for before, after in pairwise(looked)) == 256


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
    next(iter(held.values())).locks += 1  # type: ignore[attr-defined]
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
