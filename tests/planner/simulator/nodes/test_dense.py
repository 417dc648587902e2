"""A cache of counts finds, has room for and evicts what the real one does, under LRU and full attention."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.model.profile import KvSize, ProfileWindow
from planner.simulator.nodes.caches import NodeCache, cache_of, layout_of
from planner.simulator.nodes.dense import DenseCache
from tests.planner.simulator.nodes.test_endless import hashes_of

SIZE = 4
LAYOUT = layout_of(KvSize(bytes_per_token=8), SIZE)
PROMPTS = st.tuples(st.lists(st.integers(0, 1), min_size=0, max_size=7), st.integers(0, SIZE - 1))
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["begin", "expect", "fill", "end", "let_go"]),
        st.integers(0, 5),  # of the requests that there are, or one more of this name
        PROMPTS,
        st.sampled_from([0.0, 0.4, 1.0]),
    ),
    max_size=60,
)


@settings(max_examples=400, deadline=None)
@given(steps=STEPS, pages=st.integers(1, 14))
def test_it_is_the_real_cache_step_by_step(steps, pages):
    real = NodeCache(LAYOUT, pages * LAYOUT.page_bytes, "lru")
    dense = DenseCache(LAYOUT, pages)
    holds: dict[str, int] = {}
    seen = {hashes_of([0] * 7)}
    for now, (what, number, (path, more), share) in enumerate(steps):
        request_id, hashes, tokens = str(number), hashes_of(path), len(path) * SIZE + more
        seen.add(hashes)
        if what in ("begin", "expect"):
            if request_id in holds or not tokens:
                continue
            holds[request_id] = tokens
            arguments = (request_id, hashes, tokens, float(now))
            assert getattr(dense, what)(*arguments) == getattr(real, what)(*arguments)
        elif what == "let_go":
            holds.pop(request_id, None)
            dense.let_go(request_id, float(now))
            real.let_go(request_id, float(now))
        elif request_id in holds:
            filled = int(holds[request_id] * share)
            for cache in (dense, real):
                getattr(cache, what)(request_id, filled, float(now))
            if what == "end":
                del holds[request_id]
        assert [dense.room_tokens(held) for held in (0, 8)] == [real.room_tokens(held) for held in (0, 8)]
        for prompt in seen:
            assert dense.match(prompt, 99) == real.match(prompt, 99)
    real.cache.check_integrity()


@pytest.mark.parametrize(
    ("kv", "eviction", "is_dense"),
    [
        (KvSize(bytes_per_token=8), "lru", True),
        (KvSize(bytes_per_token=8), "default", False),
        (KvSize(bytes_per_token=8, fixed_bytes=40), "lru", False),
        (KvSize(bytes_per_token=8, windows=(ProfileWindow(bytes_per_token=8, window_tokens=7),)), "lru", False),
    ],
)
def test_it_stands_in_only_for_what_it_is_like(kv, eviction, is_dense):
    layout = layout_of(kv, SIZE)
    assert isinstance(cache_of(layout, 20 * layout.page_bytes, eviction), DenseCache) == is_dense
