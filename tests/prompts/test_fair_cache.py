"""Tenants share a cache fairly."""

from hypothesis import given
from hypothesis import strategies as st

from prompts.fair_cache import ENTRY_BYTES, FairCache

SIZE = 1000
COST = SIZE + ENTRY_BYTES


def test_a_tenant_who_fills_the_cache_pushes_out_nobody_but_himself() -> None:
    cache = FairCache(10 * COST)
    for number in range(4):
        cache.put(b"modest", number, number, SIZE)
    for number in range(100):
        cache.put(b"greedy", number, number, SIZE)
    assert [cache.get(b"modest", number) for number in range(4)] == [0, 1, 2, 3]
    assert [number for number in range(100) if cache.get(b"greedy", number) is not None] == [94, 95, 96, 97, 98, 99]


def test_who_comes_later_gets_an_equal_share() -> None:
    cache = FairCache(10 * COST)
    for number in range(10):
        cache.put(b"first", number, number, SIZE)
    for number in range(20):
        cache.put(b"second", number, number, SIZE)
    assert cache.held_by(b"first") == cache.held_by(b"second") == 5 * COST


def test_what_was_used_lately_stays() -> None:
    cache = FairCache(2 * COST)
    cache.put(b"", "old", 1, SIZE)
    cache.put(b"", "older", 2, SIZE)
    assert cache.get(b"", "old") == 1
    cache.put(b"", "new", 3, SIZE)
    assert (cache.get(b"", "old"), cache.get(b"", "older"), cache.get(b"", "new")) == (1, None, 3)


def test_what_is_too_large_is_not_kept_and_pushes_nothing_out() -> None:
    cache = FairCache(2 * COST)
    cache.put(b"", 1, 1, SIZE)
    cache.put(b"", 2, 2, 3 * SIZE)
    assert (cache.get(b"", 1), cache.get(b"", 2)) == (1, None)
    cache.drop(b"", 1)
    assert len(cache) == cache.held_bytes == 0


@given(st.lists(st.tuples(st.sampled_from([b"a", b"b", b"c"]), st.integers(0, 9), st.integers(0, 4000))))
def test_the_bound_holds_and_nobody_below_an_equal_share_loses_anything(puts: list[tuple[bytes, int, int]]) -> None:
    cache, wanted = FairCache(6000), dict[tuple[bytes, int], int]()
    most = dict.fromkeys((b"a", b"b", b"c"), 0)
    for tenant, key, size in puts:
        cache.put(tenant, key, size, size)
        wanted[tenant, key] = size + ENTRY_BYTES
        most[tenant] = max(most[tenant], sum(size for (of, _), size in wanted.items() if of == tenant))
        assert cache.held_bytes == sum(map(cache.held_by, (b"a", b"b", b"c"))) <= 6000
    for tenant in (b"a", b"b", b"c"):
        if most[tenant] <= 6000 // 3:  # at every moment, not only in the end
            assert all(cache.get(tenant, key) is not None for of, key in wanted if of == tenant)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3), st.integers(0, 900), st.booleans()), max_size=300))
def test_room_is_made_by_who_holds_the_most(steps: list[tuple[int, int, int, bool]]) -> None:
    cache = FairCache(9000)
    names = [bytes([number]) for number in range(6)]
    for tenant, key, size, drops in steps:
        before = {name: cache.held_by(name) for name in names}
        if drops:
            cache.drop(names[tenant], key)
            continue
        cache.put(names[tenant], key, None, size)
        for loser in names:
            if loser != names[tenant] and cache.held_by(loser) < before[loser]:
                # Before its last loss no tenant held more.
                assert cache.held_by(loser) + 900 + ENTRY_BYTES >= max(map(cache.held_by, names))
