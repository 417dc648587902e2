import pytest
from msgspec.structs import replace

from planner.decisions.routing.congestion import is_scarce, pressure
from planner.decisions.routing.offload import Reason, Route, Target
from planner.decisions.routing.policy import PlacementPolicy
from planner.decisions.routing.sides import ClusterWeighed
from planner.decisions.views import NodeView, PrefillCost
from planner.errors import NoReadyNode
from tests.planner.worlds import GB, link, pd_decode, pd_prefill, policy, prfaas, request, route

WORLD = [prfaas(), pd_prefill(), pd_decode()]
LINKS = [link()]


def decided(num_tokens: int, nodes=WORLD, links=LINKS, **fields) -> tuple[Target, Reason]:
    found = route(request(num_tokens), nodes, links, policy(**fields))
    return found.target, found.reason


def test_the_threshold_parts_short_from_long():
    assert decided(20_000) == (Target.LOCAL, Reason.SHORT)
    assert decided(20_001) == (Target.REMOTE, Reason.LONG)


def test_a_route_names_both_nodes_and_both_lengths():
    nodes = [prfaas(cached_tokens=512), pd_prefill(), pd_decode()]
    found = route(request(30_000), nodes, [link()], policy(), cost=PrefillCost(10_000))
    assert found == Route(
        target=Target.REMOTE,
        reason=Reason.LONG,
        decode_node="d0",
        prefill_node="r0",
        uncached_tokens=29_488,
        cached_tokens=512,
        threshold_tokens=20_000,
        ttft_s=2.9488,
        compute_s=2.9488,
        link_bytes=518_400_000.0,
        link_s=518_400_000.0 / 12.5e9,
        coded_bytes=518_400_000.0,
        considered=(ClusterWeighed(cluster="west", why_not="long"), ClusterWeighed(cluster="east")),
    )


def test_a_route_says_which_clusters_it_was_weighed_against():
    nodes = [prfaas(), prfaas(node_id="n0", cluster="north", queued_tokens=90_000), pd_prefill(), pd_decode()]
    links = [
        link(lines=("carrier-a", "carrier-b")),
        link(source="north", lines=("carrier-c",)),
        link(source="south", up=False, drained=True),
        link(source="far", up=False),
        link(source="gone"),
    ]
    found = route(request(30_000), nodes, links, policy(), cost=PrefillCost(10_000))
    assert found.prefill_node == "r0"
    home, best, slower, *others = found.considered
    assert home == ClusterWeighed(cluster="west", why_not="long")
    assert (best.cluster, best.why_not, best.delay_s, best.lines) == ("east", "", 3.0, ("carrier-a", "carrier-b"))
    assert (slower.cluster, slower.why_not, slower.delay_s) == ("north", "slower", 12.0)
    assert [(each.cluster, each.why_not) for each in others] == [
        ("south", "drained"),
        ("far", "down"),
        ("gone", "no_node"),
    ]
    stays = route(request(3_000), nodes, links, policy(), cost=PrefillCost(10_000))
    assert [(each.cluster, each.why_not) for each in stays.considered[:3]] == [
        ("west", ""),
        ("east", "short"),
        ("north", "slower"),
    ]


def test_scarce_bandwidth_counts_only_the_prefix_at_home():
    nodes = [prfaas(cached_tokens=25_000), pd_prefill(cached_tokens=5_000), pd_decode()]
    found = route(request(30_000), nodes, [link(utilisation=0.6)], policy(cross_cluster_cache=True))
    assert (found.target, found.cached_tokens) == (Target.REMOTE, 25_000)


def test_abundant_bandwidth_counts_the_longest_prefix_and_fetches_it():
    nodes = [prfaas(cached_tokens=25_000), pd_prefill(cached_tokens=5_000), pd_decode()]
    found = route(request(30_000), nodes, [link()], policy(cross_cluster_cache=True))
    assert (found.target, found.uncached_tokens, found.fetch_from) == (Target.LOCAL, 5_000, "r0")


def test_without_cache_transfer_between_clusters_abundance_changes_nothing():
    nodes = [prfaas(cached_tokens=25_000), pd_prefill(cached_tokens=5_000), pd_decode()]
    found = route(request(30_000), nodes, [link()], policy())
    assert (found.target, found.fetch_from) == (Target.REMOTE, None)


def test_an_unknown_bandwidth_is_scarce():
    assert is_scarce(link(available_bytes_per_s=None), policy())
    assert not is_scarce(link(), policy())


@pytest.mark.parametrize(
    ("signal", "expected"),
    [
        ({"utilisation": 0.85}, 0.0),
        ({"utilisation": 0.925}, 0.5),
        ({"utilisation": 1.2}, 1.0),
        ({"queued_bytes": int(37.5 * GB)}, 0.5),
        ({"retransmit_ratio": 0.055}, 0.5),
        ({"congested": True, "rtt_s": 0.11, "min_rtt_s": 0.04}, 0.5),
        ({"congested": True, "rtt_s": 0.4, "min_rtt_s": 0.04}, 1.0),
        ({"congested": True, "retransmit_ratio": 0.055}, 0.5),
        ({"rtt_s": 0.003, "min_rtt_s": 0.0001}, 0.0),  # its senders know that this is noise
    ],
)
def test_pressure_is_the_worst_signal(signal, expected):
    assert pressure(link(**signal), policy()) == pytest.approx(expected)


def test_congestion_raises_the_threshold():
    busy = [link(utilisation=0.925)]  # pressure 0.5: t is doubled
    assert decided(39_000, links=busy) == (Target.LOCAL, Reason.CONGESTED)
    assert decided(41_000, links=busy) == (Target.REMOTE, Reason.LONG)


def test_round_trips_that_grow_raise_the_threshold_before_anything_is_full():
    queue = [link(congested=True, rtt_s=0.11, min_rtt_s=0.04)]
    assert decided(39_000, links=queue) == (Target.LOCAL, Reason.CONGESTED)
    assert decided(41_000, links=queue) == (Target.REMOTE, Reason.LONG)
    assert is_scarce(queue[0], policy())


def test_predictions_that_were_wrong_before_count_for_less():
    certain = link(queued_bytes=12.5 * GB, rtt_s=0.1)
    assert certain.arrives_s(12.5 * GB) == pytest.approx(2.1)
    assert link(queued_bytes=12.5 * GB, rtt_s=0.1, estimate_error=0.5).arrives_s(12.5 * GB) == pytest.approx(3.15)
    assert link(estimate_error=9.0).arrives_s(12.5 * GB) == pytest.approx(2.0)
    nodes = [prfaas("r0"), prfaas("r1", cluster="north"), pd_prefill(queue_s=99.0), pd_decode()]
    slow = {"available_bytes_per_s": GB / 100}
    links = [link(**slow, estimate_error=0.8), link(**slow, source="north")]
    assert route(request(30_000), nodes, links, policy()).prefill_node == "r1"


def test_a_blocked_link_carries_nothing():
    assert decided(10**6, links=[link(utilisation=1.0)]) == (Target.LOCAL, Reason.CONGESTED)


def test_long_at_home_and_cached_remotely_has_a_reason_of_its_own():
    nodes = [prfaas(cached_tokens=29_990), pd_prefill(), pd_decode()]
    assert decided(30_000, nodes) == (Target.REMOTE, Reason.REMOTE_PREFIX)


def test_a_congested_link_is_better_than_a_longer_queue_at_home():
    nodes = [prfaas(), pd_prefill(queue_s=3.0), pd_decode()]
    assert decided(39_000, nodes, [link(utilisation=0.925)]) == (Target.REMOTE, Reason.LONG)
    crowded = [link(utilisation=0.925, queued_bytes=75 * GB)]  # six seconds to drain
    assert decided(39_000, nodes, crowded) == (Target.LOCAL, Reason.CONGESTED)


def test_a_surging_remote_queue_sends_requests_home():
    nodes = [prfaas(queue_s=12.0), pd_prefill(queue_s=1.0), pd_decode()]
    assert decided(30_000, nodes) == (Target.LOCAL, Reason.REMOTE_QUEUE)


@pytest.mark.parametrize(
    ("num_tokens", "nodes", "links", "expected"),
    [
        (30_000, [pd_prefill(), pd_decode()], [link()], (Target.LOCAL, Reason.NO_PRFAAS)),
        (30_000, [prfaas(ready=False), pd_prefill(), pd_decode()], [link()], (Target.LOCAL, Reason.NO_PRFAAS)),
        (30_000, WORLD, [], (Target.LOCAL, Reason.LINK_DOWN)),
        (30_000, WORLD, [link(up=False)], (Target.LOCAL, Reason.LINK_DOWN)),
        (100, [prfaas(), pd_decode()], [link()], (Target.REMOTE, Reason.NO_LOCAL_PREFILL)),
        (100, [prfaas(), pd_decode()], [], (Target.DECODE, Reason.LINK_DOWN)),
        (30_000, [pd_decode()], [link()], (Target.DECODE, Reason.NO_PREFILL)),
        (1, WORLD, [link()], (Target.DECODE, Reason.SINGLE_TOKEN)),
    ],
)
def test_what_is_missing_is_replaced_and_named(num_tokens, nodes, links, expected):
    assert decided(num_tokens, nodes, links) == expected


def test_a_decode_node_that_no_sender_reaches_is_left_out_of_what_goes_remote():
    def chosen(*lost: tuple[str, str], d1: dict | None = None, num_tokens: int = 30_000) -> Route:
        nodes = [
            prfaas("r0"),
            prfaas("r1", queued_tokens=9),
            pd_prefill(),
            pd_decode("d0"),
            pd_decode("d1", **(d1 or {})),
        ]
        return route(request(num_tokens), nodes, [link(lost=lost)], policy())

    both = ("r0", "d0"), ("r1", "d0")
    assert (chosen().prefill_node, chosen().decode_node) == ("r0", "d0")
    assert (chosen(both[0]).prefill_node, chosen(both[0]).decode_node) == ("r1", "d0")
    assert (chosen(*both).prefill_node, chosen(*both).decode_node) == ("r0", "d1")
    assert chosen(*both, num_tokens=100).decode_node == "d0"  # short prompts know nothing of it
    for alone in (chosen(*both, d1={"running": 99}), chosen(*both, ("r0", "d1"), ("r1", "d1"))):
        assert (alone.target, alone.reason, alone.decode_node) == (Target.LOCAL, Reason.LINK_DOWN, "d0")


def held(fields: dict | None = None, links=LINKS, local: dict | None = None, **policy_fields) -> tuple[Target, Reason]:
    """A turn of 200 new tokens; the decode node holds the rest."""
    nodes = [
        prfaas(cached_tokens=29_000),
        pd_prefill(**(local or {})),
        pd_decode(cached_tokens=29_800, **(fields or {})),
    ]
    found = route(request(30_000), nodes, links, policy(**({"increment_tokens": 1_024} | policy_fields)))
    return found.target, found.reason


def test_a_short_increment_is_computed_where_the_rest_is_held():
    assert held() == (Target.DECODE, Reason.HELD)
    assert held(increment_tokens=0) == (Target.REMOTE, Reason.REMOTE_PREFIX)
    assert held(increment_tokens=199) == (Target.REMOTE, Reason.REMOTE_PREFIX)


def test_a_decode_node_that_is_busy_with_prompts_computes_no_more():
    assert held({"prefill_share": 0.3}) == (Target.REMOTE, Reason.REMOTE_PREFIX)
    assert held({"queue_s": 5.0}) == (Target.REMOTE, Reason.REMOTE_PREFIX)


def test_whoever_is_sooner_computes_the_increment():
    warm = {"cached_tokens": 29_900}
    assert held(local=warm) == (Target.LOCAL, Reason.SHORT)
    assert held(local=warm | {"queue_s": 1.0}) == (Target.DECODE, Reason.HELD)


def test_nothing_held_is_no_increment():
    nodes = [prfaas(), pd_prefill(queue_s=9.0), pd_decode()]
    found = route(request(200), nodes, LINKS, policy(increment_tokens=1_024))
    assert (found.target, found.reason) == (Target.LOCAL, Reason.SHORT)


def test_the_way_over_a_link_is_as_long_as_what_the_decode_node_lacks():
    slow = [link(available_bytes_per_s=17_280 * 1_000.0, utilisation=0.925)]  # a thousand tokens a second, pressed
    busy = pd_prefill(queue_s=5.0)
    cold = route(request(30_000), [prfaas(), busy, pd_decode()], slow, policy())
    warm = route(request(30_000), [prfaas(), busy, pd_decode(attention_tokens=29_000)], slow, policy())
    assert (cold.target, warm.target) == (Target.LOCAL, Target.REMOTE)
    assert (cold.held_tokens, warm.held_tokens) == (0, 29_000)


def test_a_prompt_that_shares_nothing_is_computed_where_it_is_decoded():
    nodes = [prfaas(), pd_prefill(), pd_decode(cached_tokens=8_000)]
    chosen = route(request(30_000, unshared=True), nodes, [link()], policy())
    assert (chosen.target, chosen.reason, chosen.prefill_node) == (Target.DECODE, Reason.UNSHARED, None)
    assert (chosen.cached_tokens, chosen.uncached_tokens) == (0, 30_000)


def test_without_a_decode_node_nobody_answers():
    with pytest.raises(NoReadyNode):
        route(request(10), [prfaas(), pd_decode(ready=False)], [link()], policy())


def test_a_budget_is_the_rate_at_which_its_queue_drains():
    assert link(queued_bytes=5 * GB, budget_bytes_per_s=GB).drain_s == 5.0
    assert link(available_bytes_per_s=None, budget_bytes_per_s=GB, queued_bytes=GB).drain_s == 1.0
    assert link(queued_bytes=5 * GB, available_bytes_per_s=GB / 2, budget_bytes_per_s=GB).drain_s == 10.0
    assert pressure(link(queued_bytes=3 * GB, budget_bytes_per_s=GB), policy()) == 0.5
    assert not is_scarce(link(available_bytes_per_s=None, budget_bytes_per_s=GB), policy())


def test_long_prompts_stay_at_home_once_a_budget_has_been_promised_away():
    """Six at once, over a budget that takes 1.2 s for each: while home is done sooner, nothing goes remote."""
    size, went, promised, busy_s = 6_000, [], 0.0, 0.0
    for _ in range(6):
        nodes = [prfaas(), pd_prefill(queue_s=busy_s), pd_decode()]
        line = link(budget_bytes_per_s=0.5e6, promised_bytes=promised)
        asked = request(size, kv_bytes=lambda n: 100.0 * n)
        found = route(asked, nodes, [line], policy(1_000), cost=PrefillCost(20_000))
        went.append((found.target, found.reason))
        promised += size * 100.0 if found.target is Target.REMOTE else 0.0
        busy_s += size / 20_000 if found.target is Target.LOCAL else 0.0
    home, away = (Target.LOCAL, Reason.CONGESTED), (Target.REMOTE, Reason.LONG)
    assert went == [home, home, home, away, home, home]  # the fourth, when home is as busy as the budget is slow


def test_what_is_promised_at_the_pace_of_compute_is_no_pressure():
    busy = [prfaas(queue_s=3.0), pd_prefill(), pd_decode()]
    line = link(promised_bytes=3.0 * 12.5 * GB / 10)
    found = route(request(30_000), busy, [line], policy(), cost=PrefillCost(10_000))
    assert (found.target, found.reason) == (Target.REMOTE, Reason.LONG)


def test_an_atom_at_the_threshold_is_split_by_the_tie():
    def target(tie: float) -> Target:
        return route(request(20_000, tie=tie), WORLD, [link()], policy(tie_share=0.25)).target

    assert route(request(20_000, tie=0.9), WORLD, [link()], policy(tie_share=0.25)).reason is Reason.LONG
    assert [target(0.0), target(0.24), target(0.25), target(0.9)] == [Target.LOCAL] * 2 + [Target.REMOTE] * 2


def test_home_decodes_unless_nothing_there_is_ready():
    elsewhere = pd_decode("d1", cluster="south", attention_tokens=100)
    nodes = [*WORLD, elsewhere]
    assert route(request(100, home="south"), nodes, [link()], policy()).decode_node == "d1"
    assert route(request(100, home="north"), nodes, [link()], policy()).decode_node == "d1"
    assert route(request(100, home="west"), nodes, [link()], policy()).decode_node == "d0"


def test_the_remote_cluster_that_is_done_first_is_taken():
    nodes = [prfaas("r0", queue_s=5.0), prfaas("r1", cluster="north"), pd_prefill(), pd_decode()]
    links = [link(), link(source="north", available_bytes_per_s=GB)]
    assert route(request(30_000), nodes, links, policy()).prefill_node == "r1"
    slow = [link(), link(source="north", available_bytes_per_s=GB / 100)]
    assert route(request(30_000), nodes, slow, policy()).prefill_node == "r0"


def pairs_of_clusters(**queued: int) -> list[NodeView]:
    """Two PrfaaS clusters and two PD clusters."""
    return [
        prfaas("r0", cluster="east", queue_s=queued.get("r0", 0)),
        prfaas("r1", cluster="north", queue_s=queued.get("r1", 0)),
        *[pd_prefill(f"p-{name}", cluster=name, queue_s=1.0) for name in ("west", "south")],
        *[pd_decode(f"d-{name}", cluster=name) for name in ("west", "south")],
    ]


@pytest.mark.parametrize(("home", "by"), [("west", "r0"), ("south", "r1")])
def test_each_pair_of_clusters_goes_by_its_own_link(home, by):
    slow, fast = 1e-2 * GB, 10.0 * GB
    links = [
        link(source=source, destination=to, available_bytes_per_s=fast if (source, to) in FAST else slow)
        for source in ("east", "north")
        for to in ("west", "south")
    ]
    found = route(request(60_000, home=home), pairs_of_clusters(), links, policy())
    assert (found.prefill_node, found.decode_node) == (by, f"d-{home}")
    down = [replace(each, up=False) if (each.source, each.destination) in FAST else each for each in links]
    other = route(request(60_000, home=home), pairs_of_clusters(), down, policy())
    assert other.prefill_node == f"p-{home}"  # over the slow link it would come later


FAST = {("east", "west"), ("north", "south")}


def test_coding_is_counted_where_the_link_binds():
    nodes = [prfaas(), pd_prefill(queue_s=1.0), pd_decode()]
    size = 30_000 * 17_280.0
    plain = link(available_bytes_per_s=size / 4)
    assert route(request(30_000), nodes, [plain], policy()).target is Target.LOCAL  # 4 s over the link, 2.5 s at home
    found = route(request(30_000), nodes, [replace(plain, coded_ratio=0.5)], policy())
    assert (found.target, found.link_bytes, found.coded_bytes) == (Target.REMOTE, size, size / 2)
    assert found.link_s == 2.0


def test_a_prefix_on_a_decode_node_counts_only_when_it_can_be_fetched():
    nodes = [prfaas(), pd_prefill(), pd_decode(cached_tokens=25_000)]
    assert route(request(30_000), nodes, [link()], policy()).target is Target.REMOTE
    fetching = policy(placement=PlacementPolicy(fetch_bytes_per_s=100.0 * GB))
    found = route(request(30_000), nodes, [link()], fetching)
    assert (found.target, found.fetch_from) == (Target.LOCAL, "d0")


def test_what_cannot_be_moved_counts_only_where_it_is():
    fetching = policy(placement=PlacementPolicy(fetch_bytes_per_s=100.0 * GB), cross_cluster_cache=True)
    nodes = [prfaas(), pd_prefill(), pd_decode(cached_tokens=25_000, immovable_tokens=24_000)]
    assert route(request(30_000), nodes, [link()], fetching).target is Target.REMOTE
    nodes = [prfaas(cached_tokens=25_000, immovable_tokens=24_000), pd_prefill(), pd_decode()]
    found = route(request(30_000), nodes, [link()], fetching)
    assert (found.target, found.cached_tokens, found.fetch_from) == (Target.REMOTE, 25_000, None)
    nodes = [prfaas(), pd_prefill(cached_tokens=25_000, immovable_tokens=25_000), pd_decode()]
    found = route(request(30_000), nodes, [link()], fetching)
    assert (found.target, found.cached_tokens, found.fetch_from) == (Target.LOCAL, 25_000, None)


def test_a_prefix_of_the_other_cluster_stays_while_moves_are_feared_to_be_late():
    nodes = [prfaas(cached_tokens=25_000), pd_prefill("p0"), pd_decode()]
    for delay_s, fetch_from in ((0.0, "r0"), (1.0, "r0"), (100.0, None)):
        placement = PlacementPolicy(fetch_delays_s={("r0", "p0"): delay_s})
        found = route(request(30_000), nodes, [link()], policy(cross_cluster_cache=True, placement=placement))
        assert (found.target, found.fetch_from) == (Target.LOCAL, fetch_from)
        expected_s = PrefillCost().prefill_s(nodes[1], 25_000, 0) if fetch_from else 0.0
        assert found.fetch_limit_s == pytest.approx(expected_s)


def test_a_policy_refuses_limits_in_the_wrong_order():
    with pytest.raises(ValueError, match=r"congested_drain_s=9\.0"):
        policy(congested_drain_s=9.0)
