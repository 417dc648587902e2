import pytest

from hybrid_cache.contexts import ContextCache, NotCached, TooManyContexts
from hybrid_cache.errors import DuplicateReservation, OutOfPages, UnknownReservation
from hybrid_cache.prefix_cache import PrefixCache
from tests.hybrid_cache.builders import FULL, STATE, hashes_of, make_layout, prefill, reserve

PROMPT = list(range(16))


def make(pages=60, **options):
    cache = PrefixCache(make_layout(FULL, STATE), pages)
    return cache, ContextCache(cache, **options)


def fill(cache):
    for number in range(100, 130):
        try:
            prefill(cache, [number] * 20, now=5.0)
        except OutOfPages:
            return


def test_context_outlives_pressure_until_it_expires():
    cache, contexts = make()
    prefill(cache, PROMPT)
    context = contexts.create("c", hashes_of(PROMPT), 16, now=0.0, ttl_s=10.0)
    assert context.num_tokens == 16
    fill(cache)
    assert cache.match(hashes_of(PROMPT), 16).num_tokens == 16
    contexts.extend("c", now=5.0, ttl_s=20.0)
    assert contexts.expire(11.0) == []
    assert contexts.expire(25.0) == ["c"]
    fill(cache)
    cache.check_integrity()
    assert contexts.list() == ()


def test_contexts_leave_room_for_requests():
    cache, contexts = make(max_share=0.1)
    prefill(cache, PROMPT)
    with pytest.raises(TooManyContexts):
        contexts.create("c", hashes_of(PROMPT), 16, now=0.0, ttl_s=10.0)
    assert cache.report().pages_locked == 0


def test_bad_contexts():
    cache, contexts = make()
    with pytest.raises(NotCached):
        contexts.create("c", hashes_of(PROMPT), 16, now=0.0, ttl_s=10.0)
    with pytest.raises(UnknownReservation):
        contexts.extend("c", now=0.0, ttl_s=1.0)
    contexts.delete("c", 0.0)
    prefill(cache, PROMPT)
    contexts.create("c", hashes_of(PROMPT), 16, now=0.0, ttl_s=10.0)
    with pytest.raises(DuplicateReservation):
        contexts.create("c", hashes_of(PROMPT), 16, now=0.0, ttl_s=10.0)
    reserve(cache, "r", [*PROMPT, 1, 2])
    contexts.delete("c", 1.0)
    cache.check_integrity()
