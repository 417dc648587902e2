import pytest

from planner.decisions.placement import PLACERS, PlacementPolicy, choose_decode, place_kvcache_centric
from planner.decisions.views import PrefillCost
from tests.planner.worlds import GB, pd_decode, pd_prefill, request

COST = PrefillCost(10_000)
POLICY = PlacementPolicy()


def placed(name: str, nodes, tie: float = 0.0):
    return PLACERS[name](request(20_000, tie=tie), nodes, nodes, POLICY, COST)


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
    policy = PlacementPolicy(fetch_bytes_per_s=100 * GB, fetch_delays_s=delays_s)
    choice = place_kvcache_centric(request(20_000), nodes, nodes, policy, COST)
    assert (choice.node.node_id, choice.fetch_from) == ("p2", "p0")
    policy = PlacementPolicy(fetch_bytes_per_s=100 * GB, fetch_delays_s=delays_s | {("p0", "p2"): 2.0})
    choice = place_kvcache_centric(request(20_000), nodes, nodes, policy, COST)
    assert (choice.node.node_id, choice.fetch_from) == ("p1", None)


def test_a_fetch_is_worth_waiting_for_until_its_node_would_have_computed_as_much():
    nodes = [pd_prefill("p0", queue_s=3.0, cached_tokens=19_000), pd_prefill("p1", queue_s=0.5, cached_tokens=1_000)]
    policy = PlacementPolicy(fetch_bytes_per_s=100 * GB)
    choice = place_kvcache_centric(request(20_000), nodes, nodes, policy, COST)
    assert (choice.fetch_from, choice.fetch_limit_s) == ("p0", pytest.approx(0.5 + 1.8))


def test_decode_prefers_the_prefix_among_the_less_busy():
    idle, warm = pd_decode("d0"), pd_decode("d1", running=2, attention_tokens=5_000)
    assert choose_decode([idle, warm], POLICY).node_id == "d1"
    assert choose_decode([idle, pd_decode("d1", running=3, attention_tokens=5_000)], POLICY).node_id == "d0"
    assert choose_decode([pd_decode("d0", running=1), pd_decode("d1")], POLICY).node_id == "d1"
