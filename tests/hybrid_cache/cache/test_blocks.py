"""What keeps the blocks of a run, and what a run costs."""

import time

from hypothesis import given
from hypothesis import strategies as st

from hybrid_cache.cache.blocks import BlockRun
from tests.hybrid_cache.sizes import size_of

BLOCKS = 12
STEPS = st.lists(st.tuples(st.booleans(), st.integers(1, BLOCKS)), max_size=40)


def run_of(blocks: int) -> BlockRun:
    return BlockRun([index.to_bytes(16) for index in range(blocks)], list(range(blocks)), None, 0, 0)


@given(holds=STEPS, forks=STEPS)
def test_holds_and_forks_keep_what_is_before_the_last_of_them(
    holds: list[tuple[bool, int]], forks: list[tuple[bool, int]]
) -> None:
    run, held, forked = run_of(BLOCKS), list[int](), list[int]()
    for comes, at in holds:
        if comes:
            run.move_hold(0, at)
            held.append(at)
        elif at in held:
            run.move_hold(at, 0)
            held.remove(at)
        assert run.locked == max(held, default=0)
    for comes, at in forks:
        if comes:
            run.add_fork(at, 1)
            forked.append(at)
        elif at in forked:
            run.add_fork(at, -1)
            forked.remove(at)
        assert run.kept == max([*held, *forked], default=0)
        assert run.is_tail_free == (run.kept < BLOCKS)
    assert sum(run.forks.values()) == len(forked)


def test_runs_that_have_left_before_it_cost_a_run_nothing() -> None:
    run = run_of(1)
    before = size_of(run)
    run.move_hold(0, 1)
    run.add_fork(1, 1)
    run.move_hold(1, 0)
    run.add_fork(1, -1)
    assert size_of(run) <= before + 64  # numbers that are counted are objects, too


def test_a_run_is_left_from_its_end_on_without_a_look_at_all_that_leave_it() -> None:
    forks = 40_000
    run = run_of(forks)
    for at in range(1, forks + 1):
        run.add_fork(at, 1)
    began_s = time.process_time()
    for at in range(forks, 0, -1):
        assert run.kept == at
        run.add_fork(at, -1)
    assert time.process_time() - began_s < 2.0  # it took 15 s
    assert not run.kept
