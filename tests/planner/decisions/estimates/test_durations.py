"""What is learned of prefills: the curve, its error, and that it forgets."""

import random
import tracemalloc
from copy import copy

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from planner.decisions.estimates.accuracy import ERRORS_KEPT, Accuracy
from planner.decisions.estimates.decoding import PrefillShare
from planner.decisions.estimates.durations import (
    BELIEVED,
    FRESH_S,
    AnswerEstimate,
    LearnedCost,
    MoveDelays,
    MoveEstimate,
    PrefillEstimate,
)
from planner.decisions.views import NodeView, PrefillCost
from tests.planner.worlds import link, pd_decode, policy, prfaas, request, route

PRIOR = (0.001, 0.05, 1e-6)
TRUTH = (0.46, 0.13, 2.89e-4)


def truth(computed: int, cached: int, coefficients=TRUTH) -> float:
    u, c = computed / 1000, cached / 1000
    a0, a1, a2 = coefficients
    return a0 + a1 * u + a2 * u * (2 * c + u)


def learned(samples: int, noise: float = 0.0, seed: int = 0) -> PrefillEstimate:
    rng, found = np.random.default_rng(seed), PrefillEstimate(PRIOR)
    for _ in range(samples):
        computed, cached = int(rng.lognormal(8, 1.2)) + 1, int(rng.integers(0, 2)) * int(rng.lognormal(10, 1))
        found.observe(computed, cached, truth(computed, cached) * float(np.exp(noise * rng.standard_normal())))
    return found


@pytest.mark.parametrize(("computed", "cached"), [(500, 0), (20_000, 0), (2_000, 100_000), (100_000, 0)])
def test_the_curve_is_found_in_both_directions(computed, cached):
    assert learned(200).seconds(computed, cached) == pytest.approx(truth(computed, cached), rel=0.03)


def test_before_any_sample_the_prior_holds():
    assert PrefillEstimate(PRIOR).seconds(8_000, 0) == pytest.approx(0.001 + 0.4, rel=1e-3)


def test_one_sample_moves_it_most_of_the_way():
    found = PrefillEstimate(PRIOR)
    found.observe(8_000, 0, 1.5)
    assert found.seconds(8_000, 0) == pytest.approx(1.5, rel=0.1)


def test_the_error_is_that_of_predictions_not_of_the_fit():
    noisy = learned(400, noise=0.1).error
    assert noisy.mean == pytest.approx(0.08, abs=0.03)
    assert noisy.mean < noisy.p90 < 0.3
    assert learned(1000).error.p90 < 0.01


class CountingEstimate(PrefillEstimate):
    """Knows how often it has solved its equations."""

    solved = 0

    def _solved(self, equations):
        self.solved += 1
        return super()._solved(equations)


@given(st.lists(st.tuples(st.integers(1, 50_000), st.integers(0, 50_000), st.booleans()), max_size=400))
def test_errors_are_those_of_predictions_made_before_each_sample(samples):
    found, accuracy = PrefillEstimate(PRIOR), Accuracy()
    for computed, cached, is_asked in samples:
        predicted = found.seconds(computed, cached) if is_asked else copy(found).seconds(computed, cached)
        accuracy.note(predicted, truth(computed, cached))
        found.observe(computed, cached, truth(computed, cached))
        if is_asked:
            assert found.error == accuracy.error
    assert found.error == accuracy.error


def test_each_sample_is_judged_once_however_often_the_error_is_read():
    found = CountingEstimate(PRIOR)
    for computed in range(1, 1_001):
        found.observe(computed, 0, truth(computed, 0))
    assert found.solved == 0  # until they are asked for
    once = found.error
    assert found.solved == ERRORS_KEPT == once.samples
    assert found.error == once
    found.observe(2_000, 0, truth(2_000, 0))
    assert found.error.samples == ERRORS_KEPT
    assert found.solved == ERRORS_KEPT + 1


def test_a_node_that_has_become_slower_is_believed():
    found = learned(500)
    for _ in range(250):
        found.observe(8_000, 0, 3 * truth(8_000, 0))
    # Relative errors are least for the short times that it took before, so those fade last.
    assert found.seconds(8_000, 0) == pytest.approx(3 * truth(8_000, 0), rel=0.1)


def test_more_tokens_never_take_less_time_whatever_was_seen():
    rng = np.random.default_rng(1)
    for _ in range(50):
        found = PrefillEstimate(PRIOR)
        for _ in range(int(rng.integers(1, 40))):
            found.observe(int(rng.integers(1, 60_000)), int(rng.integers(0, 90_000)), float(rng.lognormal(0, 2)))
        assert min(found.coefficients) >= 0
        assert found.seconds(1_000, 0) <= found.seconds(2_000, 0) <= found.seconds(2_000, 5_000)


@pytest.mark.parametrize("glitch_s", [1e-12, 1e-9, 1e-6, 1e-3])
def test_a_time_that_cannot_be_does_not_end_all_predictions(glitch_s):
    """It outweighs the others by the square of what it is too short by, and leaves equations that nearly agree."""
    for seed in range(20):
        rng, found = np.random.default_rng(seed), PrefillEstimate(PRIOR)
        for _ in range(30):
            seconds = glitch_s if rng.random() < 0.2 else rng.uniform(0.05, 1e3)
            found.observe(int(rng.choice([1, 5, 1000, 30_000])), int(rng.choice([0, 64_000])), seconds)
            assert 0 <= found.seconds(1000, 0) < 1e6


def test_memory_does_not_grow_with_samples():
    found = learned(2_000)
    tracemalloc.start()
    try:
        for at in range(20_000):
            found.observe(1_000 + at % 7, 0, 0.5)
        grown, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert grown < 20_000


def test_every_node_has_its_own_and_a_new_one_its_clusters():
    cost = LearnedCost(20_000)
    quick, slow = prfaas("r0"), prfaas("r1", cluster="north")
    assert cost.prefill_s(quick, 10_000, 0) == pytest.approx(0.5)
    for _ in range(BELIEVED):
        cost.observe("r0", "east", 10_000, 0, 1.0)
        cost.observe("r1", "north", 10_000, 0, 20.0)
    assert cost.prefill_s(slow, 10_000, 0) > 15 * cost.prefill_s(quick, 10_000, 0)
    assert cost.prefill_s(prfaas("r9", cluster="north"), 10_000, 0) == cost.prefill_s(slow, 10_000, 0)
    assert cost.queue_s(prfaas("r1", cluster="north", queued_tokens=5_000)) == pytest.approx(10.0)
    assert cost.errors()["east"].samples == BELIEVED
    cost.forget("r1")
    cost.assume(1_000.0)  # what has been seen stays
    assert cost.prefill_s(prfaas("s0", cluster="south"), 1_000, 0) == pytest.approx(1.0)
    assert cost.prefill_s(slow, 10_000, 0) == pytest.approx(20.0, rel=0.1)


def test_long_prompts_go_to_the_cluster_that_has_proved_quick():
    """Two PrfaaS clusters, one twenty times as fast: with one rate for all, eleven of twelve went to the slow one."""
    cost, went = LearnedCost(20_000), []
    for _ in range(3):
        cost.observe("r0", "east", 5_000, 0, 10.0)
        cost.observe("r1", "north", 5_000, 0, 0.5)
    queued = {"r0": 0, "r1": 0}
    for _ in range(12):
        nodes = [
            prfaas("r0", cluster="east", queued_tokens=queued["r0"]),
            prfaas("r1", cluster="north", queued_tokens=queued["r1"]),
            pd_decode(),
        ]
        links = [link(source="east"), link(source="north")]
        found = route(request(5_000), nodes, links, policy(1_000), cost=cost)
        went.append(found.prefill_node)
        queued[found.prefill_node] += 5_000
    assert went == ["r1"] * 12


def test_a_move_takes_calls_and_bytes():
    found = MoveEstimate(1e9, 0.01)
    assert found.seconds(1e9) == pytest.approx(1.01)
    for at in range(200):
        num_bytes = 1e6 * (1 + at % 40)
        found.observe(num_bytes, 0.03 + num_bytes / 1e8)
    assert found.seconds(1e6) == pytest.approx(0.04, rel=0.05)
    assert found.seconds(4e7) == pytest.approx(0.43, rel=0.05)


@pytest.mark.parametrize("num_bytes", [10**8, 10**9])
def test_moves_of_one_size_say_nothing_absurd_of_others(num_bytes):
    found, chance = MoveEstimate(1e9), random.Random(0)
    for _ in range(1000):
        about = num_bytes * chance.uniform(0.98, 1.02)
        found.observe(about, (0.01 + about / 1e9) * chance.uniform(0.9, 1.1))
        assert found.seconds(20 * num_bytes) == pytest.approx(0.01 + 20 * num_bytes / 1e9, rel=0.2)


@example([(9_756_194_756, 1.8817294120590304), (9_756_194_759, 7924.0), (9_756_194_759, 243.0)])
@given(st.lists(st.tuples(st.integers(0, 10**12), st.floats(0, 1e4)), max_size=60))
def test_whatever_moves_took_more_bytes_never_take_less_and_none_no_time(moves):
    found = MoveEstimate(1e9)
    for num_bytes, seconds in moves:
        found.observe(num_bytes, seconds)
    assert 0 <= found.seconds(0) <= found.seconds(10**6) <= found.seconds(10**9) < float("inf")


def test_a_move_that_fails_is_feared_to_be_late_again_for_some_time():
    delays = MoveDelays()
    delays.failed("a", "b", 0.1, 5.0, now=100.0)
    assert delays.at(100.0) == {("a", "b"): 10.0}  # not b to a, and no other pair
    assert delays.at(160.0) == {("a", "b"): pytest.approx(5.0)}
    delays.failed("a", "b", 0.1, 2.0, now=160.0)
    assert delays.at(160.0) == {("a", "b"): pytest.approx(10.2)}  # twice what was expected
    assert delays.at(160.0 + 3600.0) == {}
    assert not delays


def test_moves_that_fail_together_tell_of_one_trouble():
    delays = MoveDelays()
    for at in range(4):
        delays.failed("a", "b", 0.1, 5.0, now=100.0 + 0.01 * at)
    assert delays.at(100.03)["a", "b"] == pytest.approx(10.0)


def test_moves_that_fail_in_a_steady_stream_double_it_once_in_a_move():
    delays = MoveDelays()
    for second in range(5, 21):  # each began 5 s before
        delays.failed("a", "b", 0.0, 5.0, now=float(second))
    assert delays.at(20.0)["a", "b"] == pytest.approx(80.0, rel=0.25)  # at 5, 10, 15 and 20 s


def test_a_move_that_arrives_ends_the_fear_of_its_pair():
    delays = MoveDelays()
    for source in "ac":
        delays.failed(source, "b", 0.1, 5.0, now=0.0)
    delays.arrived("a", "b")
    assert list(delays.at(0.0)) == [("c", "b")]
    delays.keep({"a", "b"})
    assert not delays


FAILURES = st.tuples(st.sampled_from("abc"), st.floats(0, 1e4), st.floats(0, 1e4), st.floats(0, 1e5))


@given(st.lists(FAILURES, max_size=60))
def test_a_delay_is_at_least_twice_what_a_failure_took_and_never_for_ever(failures):
    delays, now = MoveDelays(), 0.0
    for source, expected_s, seconds, later_s in failures:
        now += later_s
        delays.failed(source, "d", expected_s, seconds, now)
        assert 600.0 >= delays.at(now).get((source, "d"), 0.0) >= min(2.0 * max(expected_s, seconds) - 1e-3, 600.0)
    assert len(delays) <= 3
    assert delays.at(now + 3600.0) == {}


def test_a_share_fades():
    share = PrefillShare()
    share.add(1.0, 100.0)
    assert share.at(100.0) == pytest.approx(0.1)
    assert share.at(110.0) == pytest.approx(0.1 / 2.718, rel=1e-3)


def test_answers_are_taken_to_be_as_long_as_late_ones_and_no_longer_than_allowed():
    estimate = AnswerEstimate()
    for _ in range(400):
        estimate.observe(500.0)
    assert estimate.tokens() == pytest.approx(500.0)
    assert estimate.tokens(limit=100) == 100.0
    assert estimate.error.mean == 0.0
    estimate.observe(1000.0)
    assert estimate.error.mean > 0.0


def two_clusters(cost: LearnedCost, now: float) -> str:
    """Where a long prompt goes, and it goes there."""
    cost.as_of(now)
    nodes = [prfaas("r0", cluster="east"), prfaas("r1", cluster="north"), pd_decode()]
    found = route(request(5_000), nodes, [link(source="east"), link(source="north")], policy(1_000), cost=cost)
    assert found.prefill_node is not None
    cost.tried(found.prefill_node, {"r0": "east", "r1": "north"}[found.prefill_node])
    return found.prefill_node


def seen(cost: LearnedCost, node: str, seconds: float) -> None:
    cost.observe(node, {"r0": "east", "r1": "north"}[node], 5_000, 0, seconds)


def test_a_cluster_that_has_got_better_is_found_out():
    cost, took_s = LearnedCost(20_000), {"r0": 10.0, "r1": 0.5}
    for _ in range(100):
        for node, seconds in took_s.items():
            seen(cost, node, seconds)
    took_s["r0"] = 0.3
    went = []
    for now in range(0, 1_200, 5):
        went.append(two_clusters(cost, float(now)))
        seen(cost, went[-1], took_s[went[-1]])
    first = went.index("r0")
    assert went[:first] == ["r1"] * first
    assert 5 * first > FRESH_S
    assert went[first:].count("r0") > 0.9 * len(went[first:])


def test_a_cluster_that_is_still_slow_is_asked_seldom_and_by_one_prompt_at_a_time():
    cost, took_s = LearnedCost(20_000), {"r0": 10.0, "r1": 0.5}
    for _ in range(20):
        for node, seconds in took_s.items():
            seen(cost, node, seconds)
    tried = []
    for now in range(0, 3_600, 5):
        went = [
            two_clusters(cost, float(now)) for _ in range(4)
        ]  # at once: none has been seen when the next one is routed
        assert went.count("r0") <= 1
        tried += went
        for node in went:
            seen(cost, node, took_s[node])
    assert 1 <= tried.count("r0") <= 3_600 / FRESH_S / 3


def test_a_cluster_that_is_tried_in_vain_for_days_is_what_was_assumed_of_it():
    cost = LearnedCost(tokens_per_s=1000.0)
    for _ in range(20):
        seen(cost, "r0", 5.0)
    estimate = cost.estimate(prfaas("r0", cluster="east"))
    assert estimate is not None
    for minute in range(3, 3000, 3):
        cost.as_of(60.0 * minute)
        cost.tried("r0", "east")
        assert estimate.seconds_per_token > 1e-4
        assert 0.1 < estimate.seconds(1000, 0) < 10.0


class Plain(LearnedCost):
    """The same, with nothing kept from one question to the next."""

    def prefill_s(self, node: NodeView, num_tokens: int, cached_tokens: int) -> float:
        if (known := self.estimate(node)) is None:
            return PrefillCost.prefill_s(self, node, num_tokens, cached_tokens)
        seconds = known.seconds(num_tokens - cached_tokens, cached_tokens)
        trust = self._trust(node.node_id if self._nodes.get(node.node_id) is known else node.cluster)
        hoped_s = PrefillCost.prefill_s(self, node, num_tokens, cached_tokens)
        return min(seconds, trust * seconds + (1.0 - trust) * hoped_s) if trust < 1 else seconds

    def queue_s(self, node: NodeView) -> float:
        if node.queue_s is not None or (known := self.estimate(node)) is None:
            return PrefillCost.queue_s(self, node)
        return node.queued_tokens * known.seconds_per_token


NODES = st.sampled_from([("r0", "east"), ("r1", "east"), ("r2", "north"), ("r0", "north")])
LENGTHS = st.integers(0, 100_000)


@given(
    st.lists(
        st.one_of(
            st.tuples(NODES, st.integers(1, 12), LENGTHS, LENGTHS, st.floats(1e-3, 100.0)),  # so many prompts are seen
            st.tuples(NODES),  # one is tried
            st.tuples(st.floats(0.0, 200.0)),  # time goes by
            st.sampled_from(["r0", "r1"]),  # a node is forgotten
            st.sampled_from([100.0, 1e5]),  # another prior
        ),
        max_size=12,
    ),
    LENGTHS,
    LENGTHS,
)
def test_what_is_kept_between_questions_changes_no_answer(events, computed, cached):
    costs, now = (LearnedCost(), Plain()), 0.0
    asked = [prfaas(name, cluster=cluster, queued_tokens=700) for name, cluster in (("r0", "east"), ("r0", "north"))]
    asked += [prfaas(name, cluster=cluster, queued_tokens=0) for name, cluster in (("r1", "east"), ("r2", "north"))]
    for event in events:
        for cost in costs:
            match event:
                case str():
                    cost.forget(event)
                case float():
                    cost.assume(event)
                case ((str() as name, str() as cluster), times, num_computed, num_cached, seconds):
                    for _ in range(times):
                        cost.observe(name, cluster, num_computed, num_cached, seconds)
                case ((str() as name, str() as cluster),):
                    cost.tried(name, cluster)
                case (float() as passed,):
                    cost.as_of(now + passed)
        if isinstance(event, tuple) and isinstance(event[0], float):
            now += event[0]
        kept, plain = (
            [(cost.queue_s(node), cost.prefill_s(node, computed + cached, cached)) for node in asked] for cost in costs
        )
        assert kept == plain
