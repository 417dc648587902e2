"""Decode nodes that compute no prompts are never left alone with one, whatever there is."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from planner.decisions.routing.offload import Reason, Route, Target
from planner.decisions.routing.placement import PLACERS
from planner.decisions.routing.policy import PlacementPolicy
from planner.decisions.views import LinkView, NodeView, PrefillCost, RouteRequest
from planner.errors import NobodyPrefills, NoReadyNode
from tests.planner.worlds import link, pd_decode, pd_prefill, policy, prfaas, request, route

CLUSTERS = ("west", "south")
SOURCES = ("east", "north")

tokens = st.integers(0, 40_000)


@st.composite
def worlds(draw: st.DrawFn) -> list[NodeView]:
    """Nodes of two PD and two PrfaaS clusters; decode nodes compute no prompts."""

    def some(make, name: str, homes: tuple[str, ...], **fields) -> list[NodeView]:
        return [
            make(
                f"{name}{number}",
                cluster=draw(st.sampled_from(homes)),
                ready=draw(st.booleans()),
                queued_tokens=draw(tokens),
                cached_tokens=(cached := draw(tokens)),
                attention_tokens=cached,
                running=draw(st.integers(0, 25)),
                **fields,
            )
            for number in range(draw(st.integers(0, 3)))
        ]

    return [
        *some(prfaas, "r", SOURCES),
        *some(pd_prefill, "p", CLUSTERS),
        *some(pd_decode, "d", CLUSTERS, prefills_alone=False),
    ]


@st.composite
def links(draw: st.DrawFn) -> list[LinkView]:
    return [
        link(
            source=source,
            destination=destination,
            up=draw(st.booleans()),
            congested=draw(st.booleans()),
            utilisation=draw(st.floats(0, 1.2)),
            cut_off=tuple(draw(st.sets(st.sampled_from(("r0", "r1", "r2"))))),
            lost=tuple(draw(st.sets(st.tuples(st.sampled_from(("r0", "r1")), st.sampled_from(("d0", "d1")))))),
        )
        for source in SOURCES
        for destination in CLUSTERS
        if draw(st.booleans())
    ]


requests = st.builds(
    lambda num_tokens, tie, home, unshared: request(num_tokens, tie=tie, home=home, unshared=unshared),
    st.one_of(st.integers(0, 2), tokens),
    st.floats(0, 1, exclude_max=True),
    st.sampled_from((None, *CLUSTERS)),
    st.booleans(),
)


def reaches(prefill: NodeView, decode: NodeView, ways: list[LinkView]) -> bool:
    """Whether KVCache gets from one node to the other."""
    if prefill.cluster == decode.cluster:
        return True
    return prefill.kind.value == "prfaas" and any(
        way.up
        and (way.source, way.destination) == (prefill.cluster, decode.cluster)
        and way.carries(prefill.node_id, decode.node_id)
        for way in ways
    )


@given(worlds(), links(), requests, st.sampled_from(sorted(PLACERS)), st.integers(0, 4096), st.booleans())
def test_every_route_has_a_prefill_node_that_reaches_its_decode_node(nodes, ways, asked, placer, increment, shares):
    setting = policy(
        increment_tokens=increment,
        cross_cluster_cache=shares,
        placement=PlacementPolicy(fetch_bytes_per_s=1e9 if shares else 0.0),
    )
    ready = {node.node_id: node for node in nodes if node.ready}
    decodes = [node for node in ready.values() if node.role == "decode"]
    prefills = [node for node in ready.values() if node.role == "prefill"]
    pairs = {(a.node_id, b.node_id) for a in prefills for b in decodes if reaches(a, b, ways)}
    try:
        found = route(asked, nodes, ways, setting, place=PLACERS[placer])
    except NobodyPrefills:
        assert decodes
        assert not pairs
        return
    except NoReadyNode:
        assert not decodes
        return
    assert (found.prefill_node, found.decode_node) in pairs
    is_home = ready[str(found.prefill_node)].cluster == ready[found.decode_node].cluster
    assert found.target is (Target.LOCAL if is_home else Target.REMOTE)
    if asked.unshared or asked.num_tokens <= 1:
        at_home = {node.cluster for node in prefills}
        assert is_home == (ready[found.decode_node].cluster in at_home)
        assert found.fetch_from is None


@given(worlds(), links(), requests)
def test_nodes_that_prefill_alone_go_where_they_went(nodes, ways, asked):
    """What decode nodes cannot do changes nothing for a world of those that can, nor for one with a prefill node at home."""
    able = [_able(node) for node in nodes]
    alone, paired = _found(asked, able, ways), _found(asked, nodes, ways)
    if alone is not None and alone.prefill_node is not None and paired is not None:
        fed = {node.cluster for node in nodes if node.ready and node.role == "prefill"}
        if {node.cluster for node in nodes if node.role == "decode"} <= fed:
            assert paired == alone


def _able(node: NodeView) -> NodeView:
    return replace(node, prefills_alone=True)


def _found(asked: RouteRequest, nodes: list[NodeView], ways: list[LinkView]) -> Route | None:
    try:
        return route(asked, nodes, ways, policy(), cost=PrefillCost(10_000))
    except NoReadyNode:
        return None


@pytest.mark.parametrize(
    ("num_tokens", "fields", "reason"),
    [(1, {}, Reason.SINGLE_TOKEN), (30_000, {"unshared": True}, Reason.UNSHARED)],
)
def test_what_others_do_alone_is_done_at_home(num_tokens, fields, reason):
    nodes = [prfaas(), pd_prefill(), pd_decode(prefills_alone=False)]
    found = route(request(num_tokens, **fields), nodes, [link()], policy())
    assert (found.target, found.reason, found.prefill_node) == (Target.LOCAL, reason, "p0")
    assert (found.uncached_tokens, found.link_bytes) == (num_tokens, 0.0)


def test_and_remotely_where_nobody_is_at_home():
    nodes = [prfaas(), pd_decode(prefills_alone=False)]
    found = route(request(1), nodes, [link()], policy())
    assert (found.target, found.prefill_node, found.link_bytes) == (Target.REMOTE, "r0", 17_280.0)


def test_a_held_prefix_is_still_prefilled_by_another_node():
    nodes = [pd_prefill(), pd_decode(prefills_alone=False, cached_tokens=900, attention_tokens=900)]
    found = route(request(1000), nodes, [], policy(increment_tokens=512))
    assert (found.target, found.prefill_node) == (Target.LOCAL, "p0")


def test_a_decode_node_with_nobody_is_passed_over():
    nodes = [prfaas(), pd_decode("d0", cluster="south", prefills_alone=False), pd_decode("d1", prefills_alone=False)]
    assert route(request(500, home="south"), nodes, [link()], policy()).decode_node == "d1"


@pytest.mark.parametrize("ways", [[], [link(up=False)], [link(cut_off=("r0",))], [link(lost=(("r0", "d0"),))]])
def test_there_is_no_route_without_a_way(ways):
    with pytest.raises(NobodyPrefills):
        route(request(30_000), [prfaas(), pd_decode(prefills_alone=False)], ways, policy())
