"""A node serves whatever its machine's clock says: after a boot, after 43 days, after years without a request."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_cache.cache.events import BlocksStored
from hybrid_cache.cache.prefix_cache import PrefixCache
from hybrid_cache.cache.reservation import Hints, Purpose
from hybrid_cache.eviction import POLICIES
from hybrid_cache.eviction.base import Key, Use
from hybrid_cache.eviction.choice import policy_named
from hybrid_cache.eviction.ranked import LRU
from hybrid_cache.eviction.reuse import HALF_LIFE_S, ReuseModel
from hybrid_cache.eviction.workload import ReuseFit, ReuseStatistics, WorkloadAware, reuse_priority
from hybrid_cache.index.index import PrefixIndex
from hybrid_cache.index.store import PrefixStore
from tests.clocks import YEAR_S, leaping_times, times
from tests.hybrid_cache.builders import FULL, STATE, WINDOW, hashes_of, make_layout
from tests.properties import examples

LAYOUTS = {"dense": (FULL,), "hybrid": (FULL, STATE), "windows": (FULL, WINDOW), "all": (FULL, WINDOW, STATE)}
PROMPTS = st.tuples(st.integers(0, 3), st.integers(0, 8), st.sampled_from(["", "chat", "agent"]))


def serve(cache: PrefixCache, now: float, prompt: tuple[int, int, str]) -> None:
    """A whole prefill at one moment."""
    first, second, category = prompt
    tokens = [first] * 12 + [second] * 12
    cache.reserve("r", hashes_of(tokens), len(tokens), now=now, purpose=Purpose.PREFILL, hints=Hints(category=category))
    cache.commit("r", len(tokens), now)
    cache.release("r", now)


@pytest.mark.parametrize("specs", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=examples(20))
@given(data=st.data(), clock=st.one_of(times(max_size=12), leaping_times(max_size=12)))
def test_a_cache_serves_whatever_the_clock_says(specs, name, data, clock):
    layout = make_layout(*specs)
    cache = PrefixCache(layout, 60, eviction=policy_named(name, layout, 60, 1000))
    for now in clock:
        serve(cache, now, data.draw(PROMPTS))
    cache.check_integrity()
    report = cache.report()
    assert (report.reservations, report.pages_transfer, report.pages_locked) == (0, 0, 0)


@given(clock=times(min_size=3))
def test_reuse_that_was_learned_is_forgotten_and_never_more_than_all(clock):
    model = ReuseModel(100)
    for now in clock:
        model.observe(Use(now, [b"a", b"b"]))
        while not model.refresh():
            pass
    at, class_id = model.class_of(b"a", clock[-1])
    assert at == clock[-1]
    assert 0.0 <= model.density(class_id, 0) < float("inf")


def test_what_was_learned_years_ago_weighs_nothing_beside_what_is_seen_now():
    learned, fresh = ReuseModel(1000), ReuseModel(1000)
    for now in range(100):
        learned.observe(Use(float(now), [b"a"]))
    later = 99.0 + 2000 * HALF_LIFE_S
    for model in (learned, fresh):
        for number in range(50):
            model.observe(Use(later + number, [b"x%d" % number]))
        while not model.refresh():
            pass
    of_both = [model.density(model.class_of(b"x49", later)[1], 3) for model in (learned, fresh)]
    assert of_both[0] == pytest.approx(of_both[1], rel=0.02)


def test_a_category_whose_uses_have_left_the_window_while_reuses_are_in_it():
    policy = WorkloadAware()
    blocks = [b"%d" % index for index in range(1000)]
    policy.begin(Use(0.0, blocks, "first"))
    policy.begin(Use(700.0, blocks, "second"))
    policy.begin(Use(740.0, [b"other"], "third"))
    for block in blocks:
        policy.offer(block, 740.0)
    assert policy.pop_victim(741.0) in blocks


@given(clock=st.one_of(times(2, 12), leaping_times(2, 12)), window_s=st.sampled_from([60.0, 600.0, float("inf")]))
def test_fits_of_recorded_uses_are_rates_and_probabilities(clock, window_s):
    statistics = ReuseStatistics(window_s)
    for number, now in enumerate(clock):
        statistics.record(Use(now, [b"%d" % index for index in range(20)]), "ab"[number % 2])
        for fit in statistics.fits().values():
            assert 0.0 <= fit.rate <= 1 / ReuseStatistics.MIN_REUSE_S
            assert 0.0 <= fit.probability < 1.0


@given(rate=st.floats(0.0, 10.0), probability=st.floats(0.0, 1.0), age=st.floats(-1e9, 1e9), conditional=st.booleans())
def test_priorities_of_any_age_are_probabilities(rate, probability, age, conditional):
    priority = reuse_priority(ReuseFit(rate, probability), age, 60.0, conditional=conditional)
    assert 0.0 <= priority <= 1.0 + 1e-9


@given(clock=times(), probability=st.sampled_from([0.0, 0.5, 1.0]))
def test_a_block_that_is_surely_used_again_may_leave_at_any_age(clock, probability):
    policy = WorkloadAware(fits={"chat": ReuseFit(1.0, probability)})
    for number, now in enumerate(clock):
        policy.begin(Use(now, [b"%d" % number], "chat"))
        policy.offer(b"%d" % number, now)
    for _ in clock:
        policy.pop_victim(clock[-1] + YEAR_S)


@pytest.mark.parametrize("conditional", [True, False])
@given(clock=leaping_times(min_size=2), data=st.data())
def test_blocks_leave_one_by_one_whatever_leaps_the_clock_makes(conditional, clock, data):
    rates = st.sampled_from([0.0, 1e-9, 1 / 300, 1.0, 1 / ReuseStatistics.MIN_REUSE_S])
    fits = {name: ReuseFit(data.draw(rates), data.draw(st.floats(0.0, 1.0))) for name in "abc"}
    policy, offered = WorkloadAware(fits=fits, conditional=conditional), set[bytes]()
    for number, now in enumerate(clock):
        block = b"%d" % number
        policy.begin(Use(now, [block], "abc"[number % 3]))
        policy.offer(block, now)
        offered.add(block)
        if data.draw(st.booleans()):
            offered.remove(policy.pop_victim(data.draw(st.sampled_from(clock))))
    while offered:
        offered.remove(policy.pop_victim(data.draw(st.sampled_from(clock))))


def test_a_clock_that_was_set_back_by_years_does_not_end_what_is_learned():
    policy = WorkloadAware()
    policy.begin(Use(YEAR_S, [b"x"], "once"))
    blocks = [b"%d" % index for index in range(1000)]
    for now in (0.0, 100.0, 200.0):
        policy.begin(Use(now, blocks, "chat"))
    for block in [*blocks, b"x"]:
        policy.offer(block, 201.0)
    assert policy.pop_victim(202.0) == b"x"  # nothing is known of it, and chats come again


def test_what_was_counted_before_a_clock_was_set_back_leaves_the_window():
    statistics = ReuseStatistics(600.0)
    statistics.record(Use(YEAR_S, [b"x"], "before"), "before")
    for now in (0.0, 500.0, 1000.0):
        statistics.record(Use(now, [b"y"], "after"), "after")
    assert statistics.counts["before"].accesses == 0
    assert statistics.counts["after"].accesses == 2


@given(clock=times(min_size=2))
def test_copies_of_a_prefix_follow_a_demand_that_fades(clock):
    layout = make_layout(FULL)
    store = PrefixStore(PrefixIndex(layout))
    hashes, loads = hashes_of([1] * 12), {"a": 0.0, "b": 1.0}
    store.index.apply("a", BlocksStored(0, tuple(hashes)))
    for now in clock:
        store.get(hashes, 12, loads, now=now)
        for wanted in store.replicate(loads, now=now):
            store.copied(wanted, 0, now=now)
        store.cold(loads, now=now)
        store.rebalance(loads, now=now)


class Failing(LRU):
    """A policy that fails where it is told to, after some calls that went well."""

    def __init__(self, fails_after: int = 0) -> None:
        super().__init__()
        self.fails_at = ""
        self._left = fails_after

    def begin(self, use: Use) -> None:
        self._fail("begin")

    def pop_victim(self, now: float, incoming: Key | None = None) -> Key:
        self._fail("pop_victim")
        return super().pop_victim(now, incoming)

    def take_path(self, keys: Sequence[Key], now: float) -> int:
        """None: victims leave one by one."""
        return 0

    def _fail(self, where: str) -> None:
        if where != self.fails_at:
            return
        if not self._left:
            raise OverflowError(where)
        self._left -= 1


def test_a_reservation_that_an_error_ends_holds_nothing():
    policy = Failing()
    cache = PrefixCache(make_layout(FULL), 12, eviction=policy)
    serve(cache, 0.0, (1, 2, ""))
    before = cache.report()
    policy.fails_at = "begin"
    with pytest.raises(OverflowError):
        serve(cache, 1.0, (1, 3, ""))
    cache.check_integrity()
    assert cache.report() == before
    policy.fails_at = ""
    serve(cache, 2.0, (1, 3, ""))


def test_pages_that_left_before_an_error_are_free():
    policy = Failing(fails_after=2)
    cache = PrefixCache(make_layout(FULL), 12, eviction=policy)
    left: list[bytes] = []
    cache.on_evict = lambda group, block_hash, pages: left.append(block_hash)
    serve(cache, 0.0, (1, 2, ""))
    serve(cache, 1.0, (3, 4, ""))
    policy.fails_at = "pop_victim"
    with pytest.raises(OverflowError):
        serve(cache, 2.0, (5, 6, ""))
    cache.check_integrity()
    report = cache.report()
    assert (len(left), report.reservations, report.pages_transfer, report.pages_locked) == (2, 0, 0, 0)
