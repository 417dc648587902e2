import pytest

from hybrid_cache.cache.prefix_cache import PrefixCache
from hybrid_cache.errors import DuplicateReservation, OutOfPages, UnknownReservation
from hybrid_cache.pinning import MAX_OF_OWNER, ContextCache, NotCached, OverBudget, TooManyContexts
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
    context, added = contexts.create("c", hashes_of(PROMPT), 16, now=0.0, ttl_s=10.0)
    assert (context.num_tokens, added) == (16, 16)
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
    other = [*range(50, 66)]
    prefill(cache, other)
    for prompt, owner in ((PROMPT, "somebody else"), (other, "")):
        with pytest.raises(DuplicateReservation):
            contexts.create("c", hashes_of(prompt), 16, now=0.0, ttl_s=10.0, owner=owner)
    with pytest.raises(UnknownReservation):
        contexts.extend("c", now=0.0, ttl_s=1.0, owner="somebody else")
    reserve(cache, "r", [*PROMPT, 1, 2])
    contexts.delete("c", 1.0)
    cache.check_integrity()


def test_a_context_lives_on_whenever_it_is_used():
    cache, contexts = make()
    prefill(cache, PROMPT)
    contexts.create("c", hashes_of(PROMPT), 16, now=0.0, ttl_s=10.0)
    assert contexts.use(hashes_of(PROMPT)[:-1], 5.0) == []  # a part of it only
    assert [context.expires_at for context in contexts.use(hashes_of([*PROMPT, *range(90, 98)]), 5.0)] == [15.0]
    again, added = contexts.create("c", hashes_of(PROMPT), 16, now=6.0, ttl_s=2.0)
    assert (again.expires_at, again.ttl_s, added) == (15.0, 10.0, 0)  # asking for less takes nothing away
    assert contexts.expire(14.9) == []
    assert contexts.expire(15.0) == ["c"]


def test_an_owner_keeps_what_is_allowed_and_each_block_counts_once():
    cache, contexts = make()
    longer = [*PROMPT, *range(70, 78)]
    prefill(cache, PROMPT)
    prefill(cache, longer)
    hashes = hashes_of(longer)
    options = {"now": 0.0, "ttl_s": 10.0, "owner": "acme", "budget_tokens": 24}
    contexts.create("short", hashes[: 16 // cache.layout.block_size], 16, **options)
    contexts.create("long", hashes, 24, **options)
    assert contexts.owned_tokens("acme") == 24
    other = [*range(50, 66)]
    prefill(cache, other)
    with pytest.raises(OverBudget):
        contexts.create("other", hashes_of(other), 16, **options)
    contexts.create("other", hashes_of(other), 16, now=0.0, ttl_s=10.0, owner="another", budget_tokens=16)
    contexts.delete("long", 0.0)
    assert contexts.owned_tokens("acme") == 16
    contexts.delete("short", 0.0)
    assert contexts.owned_tokens("acme") == 0
    contexts.delete("other", 0.0)
    assert cache.report().pages_locked == 0
    cache.check_integrity()


def test_an_owner_leaves_others_as_much_as_it_may_have_and_keeps_what_fits():
    cache, contexts = make(200, max_share=0.2)
    block = cache.layout.block_size
    prompts = [[*range(100 * owner, 100 * owner + 96)] for owner in (1, 2)]
    for prompt in prompts:
        for end in range(block, 97, block):  # a state at each block's end
            prefill(cache, prompt[:end])
    options = {"now": 0.0, "ttl_s": 10.0}
    first, added = contexts.create("a", hashes_of(prompts[0]), 96, owner="acme", **options)
    assert 0 < first.num_tokens == added < 96
    pages = cache.report().pages_locked
    assert pages <= 20  # half of a fifth
    again, added = contexts.create("a", hashes_of(prompts[0]), 96, owner="acme", **options)
    assert (again.num_tokens, added) == (first.num_tokens, 0)
    second, _ = contexts.create("b", hashes_of(prompts[1]), 96, owner="another", **options)
    assert second.num_tokens == first.num_tokens
    with pytest.raises(OverBudget, match="acme"):
        contexts.create("c", hashes_of(prompts[1]), 96, owner="acme", **options)
    contexts.delete("a", 0.0)
    assert contexts.create("c", hashes_of(prompts[1]), 96, owner="acme", **options)[0].num_tokens == first.num_tokens
    cache.check_integrity()


def test_who_is_nobody_has_all_that_may_be_kept():
    cache, contexts = make(200, max_share=0.2)
    block, prompt = cache.layout.block_size, [*range(96)]
    for end in range(block, 97, block):
        prefill(cache, prompt[:end])
    named, _ = contexts.create("a", hashes_of(prompt), 96, now=0.0, ttl_s=10.0, owner="acme")
    contexts.delete("a", 0.0)
    nobodys, _ = contexts.create("a", hashes_of(prompt), 96, now=0.0, ttl_s=10.0)
    assert nobodys.num_tokens > named.num_tokens


def test_a_context_grows_when_more_of_its_prompt_is_cached():
    cache, contexts = make()
    longer = [*PROMPT, *range(70, 78)]
    prefill(cache, PROMPT)
    context, added = contexts.create("c", hashes_of(longer), 24, now=0.0, ttl_s=10.0)
    assert (context.num_tokens, added) == (16, 16)
    prefill(cache, longer)
    context, added = contexts.create("c", hashes_of(longer), 24, now=0.0, ttl_s=10.0)
    assert (context.num_tokens, added) == (24, 8)
    fill(cache)
    assert cache.match(hashes_of(longer), 24).num_tokens == 24
    cache.check_integrity()


def test_an_owner_has_so_many_contexts_at_most():
    cache, contexts = make(200)
    prefill(cache, PROMPT)
    for number in range(MAX_OF_OWNER):
        try:
            contexts.create(f"{number}", hashes_of(PROMPT), 16, now=0.0, ttl_s=10.0)
        except (OverBudget, TooManyContexts):
            break
    else:
        with pytest.raises(OverBudget):
            contexts.create("more", hashes_of(PROMPT), 16, now=0.0, ttl_s=10.0)
