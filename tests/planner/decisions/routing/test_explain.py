"""An explanation is the decision itself, and a word for everybody who was not chosen."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.decisions.routing.explain import WORDS, Explanation, explain_among
from planner.decisions.routing.offload import ReadyNodes, Reason, Target
from planner.decisions.routing.placement import PLACERS
from planner.decisions.views import ClusterKind, LinkView, NodeView, PrefillCost, Role, RouteRequest
from planner.errors import NoReadyNode
from tests.planner.worlds import GB, link, pd_decode, pd_prefill, policy, prfaas, request, route

WORLD = [prfaas(), prfaas("r1", queue_s=2.0), pd_prefill(), pd_decode(), pd_decode("d1", running=20)]
LINKS = [link()]


def explained(
    asked: RouteRequest, nodes: list[NodeView] = WORLD, links: list[LinkView] = LINKS, **fields
) -> Explanation:
    rules = policy(**fields)
    place = PLACERS["kvcache_centric"]
    return explain_among(ReadyNodes.among(nodes), asked, links, rules, place=place, cost=PrefillCost())


def why_not(found: Explanation) -> dict[str, str]:
    return {each.node: each.why_not for each in (*found.prefills, *found.decodes)}


def test_every_reason_has_words():
    assert set(WORDS) == set(Reason)


def test_a_long_prompt_goes_away_and_everybody_else_is_told_why_not():
    found = explained(request(30_000))
    assert (found.route.target, found.route.prefill_node) == (Target.REMOTE, "r0")
    assert found.words == "30000 tokens to compute at home are above the threshold of 20000: prefill goes to east"
    assert why_not(found) == {
        "r0": "",
        "r1": "first token in 4.25 s, price of computing included; r0 in 2.25 s",
        "p0": found.words,
        "d0": "",
        "d1": "no place free: 20 of 20 taken",
    }
    chosen = next(each for each in found.prefills if each.is_chosen)
    assert chosen.arrives_s == found.predicted_ttft_s == max(chosen.ttft_s, chosen.transfer_s) > 0
    assert chosen.link_bytes == 17_280 * 30_000
    assert [(each.source, each.pressure, each.is_scarce) for each in found.links] == [("east", 0.0, False)]


@pytest.mark.parametrize(("landing_s", "is_shared"), [(0.1, True), (1_000.0, False)])
def test_what_lands_for_others_is_told_as_it_was_decided(landing_s: float, is_shared: bool):
    decode = msgspec.structs.replace(pd_decode(), landing_tokens=20_000, landing_s=landing_s)
    found = explained(request(30_000), [prfaas(), pd_prefill(), decode])
    chosen = next(each for each in found.prefills if each.is_chosen)
    assert found.route.target is Target.REMOTE
    assert (found.route.shared_tokens > 0) == is_shared
    assert (chosen.link_bytes, chosen.transfer_s) == (found.route.link_bytes, found.route.link_s)
    assert (chosen.ttft_s, chosen.arrives_s) == (found.route.ttft_s, found.route.arrives_s)


def test_a_link_that_is_down_is_why_nobody_there_computes():
    found = explained(request(30_000), links=[link(up=False)])
    assert found.route.reason is Reason.LINK_DOWN
    assert why_not(found)["r0"] == "the link from east to west is down"
    assert not next(each for each in found.prefills if each.node == "r0").is_reachable
    drained = explained(request(30_000), links=[link(up=False, drained=True)])
    assert why_not(drained)["r0"] == "the link from east to west is drained: nothing new is to go over it"
    assert (
        explained(request(30_000), links=[]).words
        == "PrfaaS nodes are ready, but no link from them to west carries anything"
    )


def test_a_sender_that_is_cut_off_is_told_from_one_that_is_slow():
    found = explained(request(30_000), links=[link(cut_off=("r0",))])
    assert found.route.prefill_node == "r1"
    assert why_not(found)["r0"] == "it does not reach d0 over the link, though others do"


def test_pressure_and_the_threshold_that_it_leaves_are_told():
    found = explained(request(41_000), links=[link(utilisation=0.925)])
    assert "above the threshold of 40000, which the link's pressure has raised from 20000" in found.words
    assert found.links[0].pressure == pytest.approx(0.5)
    hardly = explained(request(41_000), links=[link(utilisation=0.850001)])
    assert hardly.words == "41000 tokens to compute at home are above the threshold of 20000: prefill goes to east"
    assert "or would be later than home" in explained(request(39_000), links=[link(utilisation=0.925)]).words


@pytest.mark.parametrize("strained", [{"utilisation": 1.0}, {"utilisation": 0.925}])
def test_a_busy_link_that_is_sooner_than_home_is_told_so(strained: dict[str, float]):
    nodes = [prfaas(), pd_prefill(queue_s=60.0), pd_decode()]
    found = explained(request(30_000), nodes, [link(**strained)])
    assert found.route.target is Target.REMOTE
    assert found.words == (
        "30000 tokens to compute at home are above the threshold of 20000, and the link from east is busy, "
        "but home would be later still: prefill goes to east"
    )


def test_just_at_the_threshold_the_draw_is_told():
    found = explained(request(20_000, tie=0.5), tie_share=0.25)
    assert found.words.endswith("(just at it, 25% of such requests stay, and this one drew 0.50)")


def test_a_prefix_that_is_moved_first_is_told():
    nodes = [prfaas(cached_tokens=25_000), pd_prefill(cached_tokens=5_000), pd_decode()]
    found = explained(request(30_000), nodes, cross_cluster_cache=True)
    assert found.words.endswith("prefill stays in west; r0 hands over the first 25000 tokens")
    assert found.compared_tokens == 5_000


def test_without_a_decode_node_there_is_nothing_to_explain():
    with pytest.raises(NoReadyNode):
        explained(request(10), [prfaas()])


nodes_of_a_world = st.builds(
    lambda cached, **fields: NodeView(cached_tokens=cached, attention_tokens=cached, **fields),
    cached=st.integers(0, 40_000),
    node_id=st.uuids().map(str),
    cluster=st.sampled_from(["west", "south"]),
    kind=st.just(ClusterKind.PD),
    role=st.sampled_from(Role),
    queue_s=st.floats(0, 20),
    running=st.integers(0, 20),
    max_running=st.just(16),
    prefill_share=st.floats(0, 0.5),
    room_tokens=st.none() | st.integers(0, 50_000),
    steps=st.sampled_from([(), ((1.0, 0.01), (16.0, 0.04))]),
)
remote_nodes = nodes_of_a_world.map(
    lambda node: msgspec.structs.replace(
        node, kind=ClusterKind.PRFAAS, role=Role.PREFILL, cluster={"west": "east", "south": "north"}[node.cluster]
    )
)
some_links = st.builds(
    link,
    source=st.sampled_from(["east", "north"]),
    destination=st.sampled_from(["west", "south"]),
    up=st.booleans(),
    utilisation=st.floats(0, 1.1),
    queued_bytes=st.floats(0, 100 * GB),
    available_bytes_per_s=st.none() | st.floats(GB / 100, 12 * GB),
)


@given(
    st.lists(nodes_of_a_world, min_size=1, max_size=6, unique_by=lambda node: node.node_id),
    st.lists(remote_nodes, max_size=4, unique_by=lambda node: node.node_id),
    st.lists(some_links, max_size=4, unique_by=lambda way: (way.source, way.destination)),
    st.builds(request, st.integers(1, 60_000), tie=st.floats(0, 0.99), home=st.sampled_from([None, "west"])),
    st.sampled_from(sorted(PLACERS)),
    st.booleans(),
)
def test_whatever_the_world_the_decision_explained_is_the_decision(at_home, away, links, asked, placement, shares):
    nodes = [*at_home, *away]
    rules = policy(cross_cluster_cache=shares, increment_tokens=1_024)
    place, cost = PLACERS[placement], PrefillCost()
    if not any(node.role is Role.DECODE for node in nodes):
        return
    found = explain_among(ReadyNodes.among(nodes), asked, links, rules, place=place, cost=cost)
    assert found.route == route(asked, nodes, links, rules, place=place, cost=cost)
    assert {each.node for each in found.decodes if not each.why_not} == {found.route.decode_node}
    assert [each.node for each in found.prefills if not each.why_not] == [
        node for node in (found.route.prefill_node,) if node is not None
    ]
    assert len(found.prefills) + len(found.decodes) == len(nodes)
    msgspec.json.encode(found)


def test_a_decode_node_that_computes_no_prompts_is_told_of():
    nodes = [prfaas(), pd_decode("d0", cluster="south", prefills_alone=False), pd_decode("d1", prefills_alone=False)]
    told = explained(request(1), nodes)
    assert told.words == "a prompt of one token is not worth a link, and d1 computes none: r0 does"
    assert why_not(told) == {"r0": "", "d0": "it computes no prompts, and no prefill node is ready for it", "d1": ""}
