"""Counters that only grow: in whatever order states are joined and sums made, they come to the same."""

from collections.abc import Mapping
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from gateway.fleet.usage.counts import (
    MOST,
    OTHER,
    Counts,
    Series,
    accounts_of,
    beyond,
    counts_of,
    joined,
    largest,
    of_the_largest,
    summed,
)
from gateway.telemetry.tenant_usage import SentBytes, TenantUsage

NAMES = st.sampled_from(["acme", "rival", "third", "other"])
PLAIN = st.tuples(NAMES, st.sampled_from(["requests_200", "requests_429", "prompt_tokens", "cached_tokens"]))
SENT = st.tuples(NAMES, st.sampled_from(["kv_bytes_move", "kv_bytes_request"]), NAMES, NAMES)
SERIES: st.SearchStrategy[Series] = PLAIN.map(lambda two: (*two, "", "")) | SENT
COUNTS: st.SearchStrategy[Counts] = st.dictionaries(SERIES, st.integers(1, 10**12), max_size=12)


@given(COUNTS, COUNTS, COUNTS)
def test_joining_is_commutative_associative_and_idempotent(one: Counts, two: Counts, three: Counts) -> None:
    assert joined(one, two) == joined(two, one)
    assert joined(joined(one, two), three) == joined(one, joined(two, three))
    assert joined(one, one) == one
    assert joined(joined(one, two), two) == joined(one, two)


@given(st.lists(COUNTS, max_size=5), st.randoms(use_true_random=False))
def test_a_sum_is_the_same_in_any_order(runs: list[Counts], random: Random) -> None:
    turned = list(runs)
    random.shuffle(turned)
    assert summed(turned) == summed(runs) == summed([summed(runs[:2]), summed(runs[2:])])


@given(COUNTS, COUNTS)
def test_what_was_counted_since_is_the_rest(base: Counts, more: Counts) -> None:
    assert beyond(summed([base, more]), base) == more
    assert beyond(base, base) == {}


@given(COUNTS)
def test_accounts_and_counts_say_the_same(counts: Mapping[Series, int]) -> None:
    assert counts_of(accounts_of(counts)) == counts


def test_an_account_as_counts() -> None:
    sent = [SentBytes("east", "west", "move", 7)]
    account = TenantUsage(tenant="acme", requests={"200": 2}, prompt_tokens=5, kv_bytes=sent)
    assert counts_of([account]) == {
        ("acme", "requests_200", "", ""): 2,
        ("acme", "prompt_tokens", "", ""): 5,
        ("acme", "kv_bytes_move", "east", "west"): 7,
    }


@given(COUNTS, st.integers(0, 4))
def test_beyond_so_many_tenants_the_smallest_are_one(counts: Counts, most: int) -> None:
    fewer = of_the_largest(counts, most)
    assert sum(fewer.values()) == sum(counts.values())
    assert len({series[0] for series in fewer} - {OTHER}) <= most


@given(COUNTS, st.integers(0, 4))
def test_the_largest_come_first_and_nothing_is_lost(counts: Counts, most: int) -> None:
    found = largest(accounts_of(counts), most)
    named = [each for each in found if each.tenant != OTHER]
    assert len(named) <= most
    assert [each.tenant for each in found] == [*(each.tenant for each in named), *([OTHER] * (len(found) - len(named)))]
    tokens = [each.prompt_tokens + each.completion_tokens for each in named]
    assert tokens == sorted(tokens, reverse=True)
    assert sum(counts_of(found).values()) == sum(counts.values())


def test_a_sum_has_an_end() -> None:
    series = ("acme", "kv_bytes_move", "east", "west")
    assert summed([{series: MOST}, {series: 5}]) == {series: MOST}
