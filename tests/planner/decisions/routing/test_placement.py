import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.decisions.estimates.decoding import LearnedSteps
from planner.decisions.estimates.durations import LearnedCost
from planner.decisions.routing.placement import (
    PLACERS,
    able_to_decode,
    has_memory,
    longest_holder,
    place_kvcache_centric,
    soonest_s,
)
from planner.decisions.routing.policy import MOST_RATIO, PlacementPolicy
from planner.decisions.views import PrefillCost
from tests.planner.worlds import GB, pd_decode, pd_prefill, request

COST = PrefillCost(10_000)
POLICY = PlacementPolicy()


def placed(name: str, nodes, tie: float = 0.0):
    return PLACERS[name].prefill(request(20_000, tie=tie), nodes, nodes, POLICY, COST)


def test_random_follows_the_tie():
    nodes = [pd_prefill(f"p{i}") for i in range(4)]
    assert [placed("random", nodes, tie).node.node_id for tie in (0.0, 0.3, 0.6, 0.99)] == ["p0", "p1", "p2", "p3"]


def test_least_loaded_ignores_prefixes():
    nodes = [pd_prefill("p0", queue_s=1.0, cached_tokens=19_000), pd_prefill("p1")]
    assert placed("least_loaded", nodes).node.node_id == "p1"


def test_cache_aware_weighs_the_queue_against_the_prefix():
    cached = pd_prefill("p0", queue_s=1.0, cached_tokens=19_000)
    choice = placed("cache_aware", [cached, pd_prefill("p1")])
    assert (choice.node.node_id, choice.ttft_s) == ("p0", 1.1)
    busy = pd_prefill("p0", queue_s=2.0, cached_tokens=19_000)
    assert placed("cache_aware", [busy, pd_prefill("p1")]).node.node_id == "p1"


def test_kvcache_centric_fetches_a_much_longer_prefix_to_an_idle_node():
    nodes = [pd_prefill("p0", queue_s=2.0, cached_tokens=19_000), pd_prefill("p1")]
    policy = PlacementPolicy(fetch_bytes_per_s=100 * GB)
    choice = place_kvcache_centric(request(20_000), nodes, nodes, policy, COST)
    assert (choice.node.node_id, choice.fetch_from, choice.cached_tokens) == ("p1", "p0", 19_000)


def test_only_what_can_be_moved_is_fetched():
    own = pd_prefill("p0", queue_s=2.0, cached_tokens=19_000, immovable_tokens=19_000)
    nodes = [own, pd_prefill("p1"), pd_prefill("p2", queue_s=2.0, cached_tokens=12_000)]
    policy = PlacementPolicy(fetch_bytes_per_s=100 * GB)
    choice = place_kvcache_centric(request(20_000), nodes, nodes, policy, COST)
    assert (choice.node.node_id, choice.fetch_from, choice.cached_tokens) == ("p1", "p2", 12_000)


def test_a_slightly_longer_prefix_is_not_fetched():
    nodes = [pd_prefill("p0", queue_s=2.0, cached_tokens=19_000), pd_prefill("p1", cached_tokens=15_000)]
    policy = PlacementPolicy(fetch_bytes_per_s=100 * GB, balancing_ratio=1.5)
    assert place_kvcache_centric(request(20_000), nodes, nodes, policy, COST).fetch_from is None


def test_a_fetch_slower_than_computing_is_not_made():
    nodes = [pd_prefill("p0", queue_s=9.0, cached_tokens=19_000), pd_prefill("p1")]
    policy = PlacementPolicy(fetch_bytes_per_s=GB / 100)
    choice = place_kvcache_centric(request(20_000), nodes, nodes, policy, COST)
    assert (choice.node.node_id, choice.fetch_from) == ("p1", None)


def test_a_prefix_is_not_fetched_where_moves_are_feared_to_be_late():
    nodes = [pd_prefill("p0", queue_s=2.0, cached_tokens=19_000), pd_prefill("p1"), pd_prefill("p2", queue_s=0.5)]
    delays_s = {("p0", "p1"): 2.0, ("p2", "p0"): 9.0}
    policy = PlacementPolicy(balancing_ratio=1, fetch_bytes_per_s=100 * GB, fetch_delays_s=delays_s)
    choice = place_kvcache_centric(request(20_000), nodes, nodes, policy, COST)
    assert (choice.node.node_id, choice.fetch_from) == ("p2", "p0")
    policy = PlacementPolicy(
        balancing_ratio=1, fetch_bytes_per_s=100 * GB, fetch_delays_s=delays_s | {("p0", "p2"): 2.0}
    )
    choice = place_kvcache_centric(request(20_000), nodes, nodes, policy, COST)
    assert (choice.node.node_id, choice.fetch_from) == ("p1", None)


def test_a_fetch_is_worth_waiting_for_until_its_node_would_have_computed_as_much():
    nodes = [pd_prefill("p0", queue_s=3.0, cached_tokens=19_000), pd_prefill("p1", queue_s=0.5, cached_tokens=1_000)]
    policy = PlacementPolicy(fetch_bytes_per_s=100 * GB)
    choice = place_kvcache_centric(request(20_000), nodes, nodes, policy, COST)
    assert (choice.fetch_from, choice.fetch_limit_s) == ("p0", pytest.approx(0.5 + 1.8))


class Steps(PrefillCost):
    """Decode steps of `base_s` by node and 1 ms more per request."""

    def __init__(self, **base_s: float) -> None:
        super().__init__()
        self.base_s = base_s

    def step_s(self, node, running):
        return self.base_s[node.node_id] + 0.001 * running if node.node_id in self.base_s else 0.0


def decoded(nodes, cost: PrefillCost = COST, name: str = "kvcache_centric", policy: PlacementPolicy = POLICY, **fields):
    return PLACERS[name].decode(request(20_000, **fields), nodes, policy, cost).node_id


def test_decode_goes_where_tokens_come_soonest_whatever_the_number_of_requests():
    nodes = [pd_decode("d0", running=4), pd_decode("d1", running=8), pd_decode("d2", running=2)]
    assert decoded(nodes, Steps(d0=0.05, d1=0.02, d2=0.06)) == "d1"
    assert decoded(nodes, Steps(d0=0.05, d1=0.02)) == "d2"  # not known of all: the least load


def test_decode_takes_the_prefix_where_tokens_come_hardly_later():
    nodes = [pd_decode("d0"), pd_decode("d1", running=1, attention_tokens=9_000)]
    assert decoded(nodes, Steps(d0=0.02, d1=0.02)) == "d1"
    assert decoded(nodes, Steps(d0=0.02, d1=0.03)) == "d0"


def test_of_decode_nodes_as_quick_and_with_as_much_the_less_busy_one_is_taken():
    nodes = [pd_decode("d0", running=30), pd_decode("d1", running=28), pd_decode("d2", running=29)]
    assert decoded(nodes, Steps(d0=0.020, d1=0.022, d2=0.021)) == "d1"


def test_decode_nodes_without_a_place_or_memory_come_last():
    full = pd_decode("d0", running=20, attention_tokens=9_000)
    assert decoded([full, pd_decode("d1", running=19)], Steps(d0=0.01, d1=0.09)) == "d1"
    assert decoded([full], Steps(d0=0.01)) == "d0"
    small = pd_decode("d0", room_tokens=10_000, attention_tokens=9_000)
    assert decoded([small, pd_decode("d1", running=9, room_tokens=30_000)]) == "d1"
    assert decoded([small, pd_decode("d1", running=9)]) == "d1"
    assert decoded([pd_decode("d0", room_tokens=11_000, attention_tokens=9_000)]) == "d0"


DECODES = st.lists(st.tuples(st.integers(0, 6), st.none() | st.integers(0, 2_000)), min_size=1, max_size=5)


@given(DECODES)
def test_of_decode_nodes_memory_counts_first_and_a_place_next(states):
    nodes = [
        pd_decode(f"d{at}", running=running, max_running=4, room_tokens=room)
        for at, (running, room) in enumerate(states)
    ]
    asked = request(1_000)
    with_memory = [node for node in nodes if has_memory(node, asked)] or nodes
    expected = [node for node in with_memory if node.running < 4] or with_memory
    assert able_to_decode(asked, nodes) == expected


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=5))
def test_the_first_of_those_with_most_to_send_is_the_holder(prefixes):
    nodes = [
        pd_prefill(f"p{at}", cached_tokens=held + rest, immovable_tokens=rest)
        for at, (held, rest) in enumerate(prefixes)
    ]
    assert longest_holder(nodes) == max(nodes, key=lambda node: node.movable_tokens, default=None)


def test_memory_is_for_the_prompt_and_its_predicted_answer():
    nodes = [pd_decode("d0", room_tokens=20_500), pd_decode("d1", running=9, room_tokens=30_000)]
    assert decoded(nodes) == "d0"
    assert decoded(nodes, answer_tokens=1_000.0) == "d1"
    assert decoded(nodes[:1], answer_tokens=1_000.0) == "d0"  # no other node can


def test_steps_that_nodes_report_stand_for_those_not_seen_yet():
    slow = pd_decode("d0", steps=((1.0, 0.05), (16.0, 0.08)))
    quick = pd_decode("d1", running=3, steps=((1.0, 0.01), (4.0, 0.02)))
    assert decoded([slow, quick]) == "d1"
    assert decoded([slow, pd_decode("d1", running=3)]) == "d0"  # not known of all: the least load
    nothing_learned = LearnedCost(steps=LearnedSteps())
    assert decoded([slow, quick], nothing_learned) == "d1"


def test_netkv_decodes_where_least_must_be_sent():
    nodes = [pd_decode("d0", running=1), pd_decode("d1", running=9, attention_tokens=18_000)]
    slow = PlacementPolicy(fetch_bytes_per_s=GB)
    assert decoded(nodes, name="netkv", policy=slow) == "d1"
    assert decoded(nodes, name="netkv", policy=PlacementPolicy(fetch_bytes_per_s=1e6 * GB)) == "d0"
    assert decoded(nodes, name="least_loaded") == "d0"


def test_chance_names_every_decode_node():
    nodes = [pd_decode(f"d{i}") for i in range(3)]
    assert {decoded(nodes, name="random", tie=tie / 50) for tie in range(50)} == {"d0", "d1", "d2"}


def test_a_prompt_waits_for_its_prefix_where_computing_it_again_would_keep_others_waiting():
    own = pd_prefill("p0", queue_s=2.3, cached_tokens=19_000)
    idle = [pd_prefill(f"p{number}") for number in range(1, 8)]
    assert placed("kvcache_centric", [own, *idle]).node.node_id == "p1"
    busy = [own, pd_prefill("p1", queue_s=0.05), pd_prefill("p2", queue_s=0.3)]
    assert placed("kvcache_centric", busy).node.node_id == "p0"
    assert placed("cache_aware", busy).node.node_id == "p1"
    choice = placed("kvcache_centric", busy)
    assert choice.ttft_s == pytest.approx(2.4)  # the price is in no prediction


@given(st.lists(st.floats(0, 100), min_size=1, max_size=9), st.floats(0, 100))
def test_the_balance_is_bounded(queues_s, error):
    policy = PlacementPolicy(fetch_lateness=error)
    assert 1 <= policy.ratio <= MOST_RATIO
    assert 0 <= policy.compute_price(queues_s) <= 1
    fixed = PlacementPolicy(balancing_ratio=2.0, fetch_lateness=error)
    assert (fixed.ratio, fixed.compute_price(queues_s)) == (2.0, 0.0)


def test_the_less_moves_are_as_predicted_the_longer_a_prefix_elsewhere_must_be():
    nodes = [pd_prefill("p0", queue_s=2.0, cached_tokens=19_000), pd_prefill("p1", cached_tokens=12_000)]
    trusted = PlacementPolicy(fetch_bytes_per_s=100 * GB)
    assert place_kvcache_centric(request(20_000), nodes, nodes, trusted, COST).fetch_from == "p0"
    doubtful = PlacementPolicy(fetch_bytes_per_s=100 * GB, fetch_lateness=0.8)
    assert place_kvcache_centric(request(20_000), nodes, nodes, doubtful, COST).fetch_from is None


def test_decode_prefers_the_prefix_among_the_less_busy():
    idle, warm = pd_decode("d0"), pd_decode("d1", running=2, attention_tokens=5_000)
    assert decoded([idle, warm]) == "d1"
    assert decoded([idle, pd_decode("d1", running=3, attention_tokens=5_000)]) == "d0"
    assert decoded([pd_decode("d0", running=1), pd_decode("d1")]) == "d1"


@given(st.lists(st.tuples(st.floats(0, 10), st.integers(0, 20_000)), min_size=1, max_size=12))
def test_nodes_that_are_not_looked_at_would_not_have_been_sooner(nodes):
    views = [pd_prefill(f"p{at}", queue_s=queue_s, cached_tokens=held) for at, (queue_s, held) in enumerate(nodes)]
    plain = [COST.queue_s(node) + COST.prefill_s(node, 20_000, node.cached_tokens) for node in views]
    assert soonest_s(request(20_000), views, COST) == min(plain)
