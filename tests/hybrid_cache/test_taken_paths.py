"""Ancestors that leave together are those that would leave one by one."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid_cache.cache.prefix_cache import PrefixCache
from hybrid_cache.cache.reservation import Hints, Purpose
from hybrid_cache.eviction.base import EvictionPolicy
from hybrid_cache.eviction.density import ReuseDensity
from hybrid_cache.eviction.ranked import LRU
from tests.hybrid_cache.builders import BLOCK, FULL, hashes_of, make_layout

PROMPTS = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 30), st.integers(0, 30)), min_size=1, max_size=20)


class OneByOneLRU(LRU):
    def take_path(self, keys, now):
        return 0


class OneByOneDensity(ReuseDensity):
    def take_path(self, keys, now):
        return 0


def victims(policy: EvictionPolicy, prompts: list[tuple[int, int, int]]) -> list[bytes]:
    """Prompts of a shared beginning and an end of their own; nothing is expected to use what comes after `useful`."""
    cache, gone = PrefixCache(make_layout(FULL), 70, eviction=policy), list[bytes]()
    cache.on_evict = lambda _, block_hash, pages: gone.append(block_hash)
    for number, (kind, blocks, useful) in enumerate(prompts):
        tokens = [kind] * BLOCK * blocks + [9 + number] * BLOCK * 2
        hints = Hints(useful_tokens=useful * BLOCK if kind else None)
        hashes, now = hashes_of(tokens), number * 0.4
        cache.reserve("r", hashes, len(tokens), now=now, purpose=Purpose.PREFILL, hints=hints)
        cache.commit("r", len(tokens), now)
        cache.release("r", now)
    cache.shrink(cache.evictable_pages, len(prompts) * 0.4)
    cache.check_integrity()
    return gone


@pytest.mark.parametrize(("together", "one_by_one"), [(LRU, OneByOneLRU), (ReuseDensity, OneByOneDensity)])
@given(prompts=PROMPTS)
def test_victims_are_the_same(
    together: Callable[[], EvictionPolicy],
    one_by_one: Callable[[], EvictionPolicy],
    prompts: list[tuple[int, int, int]],
) -> None:
    assert victims(together(), prompts) == victims(one_by_one(), prompts)


def test_under_lru_a_long_path_leaves_in_few_goes() -> None:
    """Else every block would cost a look at its ancestors that comes to nothing."""
    asked: list[int] = []

    class Counting(LRU):
        def take_path(self, keys, now):
            asked.append(super().take_path(keys, now))
            return asked[-1]

    cache = PrefixCache(make_layout(FULL), 2000, eviction=Counting())
    tokens = list(range(2000 * BLOCK))
    cache.reserve("r", hashes_of(tokens), len(tokens), now=0.0, purpose=Purpose.PREFILL)
    cache.commit("r", len(tokens), 0.0)
    cache.release("r", 0.0)
    cache.shrink(2000, 1.0)
    assert sum(asked) == 1999
    assert len(asked) < 12
