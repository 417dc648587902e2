from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.decisions.routing.offload import ReadyNodes, route_among
from planner.decisions.routing.placement import PLACERS
from planner.decisions.routing.revisions import NeededRole, RevisionChoice, choose_revision, drawn_by, scarcer_shares
from planner.decisions.views import NodeView, PrefillCost
from planner.errors import NobodyPrefills, NoReadyNode
from tests.planner.worlds import link, pd_decode, pd_prefill, policy, prfaas, request

PLACE = PLACERS["kvcache_centric"]
LINKS = (link(),)
DRAWS = [number / 100 for number in range(100)]
ROLES = (NeededRole.DECODE, NeededRole.LOCAL, NeededRole.REMOTE)


def nodes(remote: int = 0, local: int = 0, decode: int = 0, **fields) -> list[NodeView]:
    return [
        *(prfaas(f"r{number}", **fields) for number in range(remote)),
        *(pd_prefill(f"p{number}", **fields) for number in range(local)),
        *(pd_decode(f"d{number}", **fields) for number in range(decode)),
    ]


def chosen(draw: float = 0.5, num_tokens: int = 30_000, links=LINKS, **revisions: list[NodeView]) -> RevisionChoice:
    ready = {name: ReadyNodes.among(each) for name, each in revisions.items()}
    return choose_revision(
        ready, request(num_tokens), links, policy(), draw=draw, place=PLACE, cost=PrefillCost(10_000)
    )


def drawn(num_tokens: int = 30_000, links=LINKS, **revisions: list[NodeView]) -> Counter[str]:
    return Counter(chosen(draw, num_tokens, links, **revisions).revision for draw in DRAWS)


def test_requests_follow_the_share_of_the_scarcer_role():
    # Long prompts need the remote cluster: a quarter of it has changed, and half of the decode nodes.
    assert drawn(a=nodes(3, 1, 1), b=nodes(1, 1, 1)) == {"a": 67, "b": 33}  # 1/2 to 1/4
    # Short ones do not.
    assert drawn(1_000, a=nodes(3, 1, 1), b=nodes(1, 1, 1)) == {"a": 50, "b": 50}


def test_a_revision_without_the_remote_cluster_gets_no_long_prompts():
    world = {"a": nodes(1, 1, 1), "b": nodes(0, 1, 1)}
    assert drawn(**world) == {"a": 100}
    assert set(drawn(1_000, **world)) == {"a", "b"}


def test_a_remote_cluster_that_no_link_reaches_counts_for_nothing():
    assert set(drawn(links=[link(up=False)], a=nodes(1, 1, 1), b=nodes(0, 1, 1))) == {"a", "b"}


def test_one_token_needs_no_prefill_node():
    assert drawn(1, a=nodes(1, 1, 1), b=nodes(0, 0, 1)) == {"a": 50, "b": 50}


def test_each_is_predicted_by_the_size_of_its_own_kvcache():
    ready = {name: ReadyNodes.among(nodes(1, 0, 1)) for name in ("a", "b")}
    links = [link(available_bytes_per_s=1e9)]
    found = choose_revision(
        ready,
        request(30_000, kv_bytes=lambda tokens: 1e6 * tokens),
        links,
        policy(),
        draw=0.5,
        place=PLACE,
        cost=PrefillCost(10_000),
        sizes={"b": lambda tokens: 1e3 * tokens},
    )
    by_name = {each.revision: each.ttft_s for each in found.weighed}
    assert by_name["a"] > 25.0  # 30 GB at 1 GB/s
    assert by_name["b"] < 5.0


def test_where_no_revision_has_all_roles_the_one_that_can_prefill_serves():
    found = chosen(a=nodes(1, 0, 0), b=nodes(0, 1, 1))
    assert (found.revision, found.roles) == ("b", (NeededRole.DECODE, NeededRole.PREFILL))
    found = chosen(a=nodes(1, 1, 0), b=nodes(0, 0, 1))
    assert (found.revision, found.roles) == ("b", (NeededRole.DECODE,))


def test_a_prompt_goes_where_its_prefix_is_while_that_is_sooner():
    held = nodes(1, 1, 1, cached_tokens=29_000)
    assert drawn(a=held, b=nodes(1, 1, 1)) == {"a": 100}
    assert [chosen(draw, a=held, b=nodes(1, 1, 1)).is_held for draw in (0.1, 0.9)] == [False, True]
    busy = nodes(1, 1, 1, cached_tokens=29_000, queue_s=60.0)
    assert drawn(a=busy, b=nodes(1, 1, 1)) == {"a": 50, "b": 50}


def test_a_prefix_in_a_revision_without_a_needed_role_draws_nothing():
    assert drawn(a=nodes(1, 1, 1), b=nodes(0, 1, 1, cached_tokens=5_000)) == {"a": 100}


def test_without_a_revision_that_can_serve_it_says_why():
    with pytest.raises(NoReadyNode):
        chosen(a=nodes(1, 1, 0), b=[])
    with pytest.raises(NobodyPrefills):
        chosen(a=nodes(0, 0, 1, prefills_alone=False), b=nodes(1, 1, 0))


COUNTS = st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 3))
FLEETS = st.dictionaries(st.sampled_from("abcd"), COUNTS, min_size=1)


@given(FLEETS, st.floats(0, 1, exclude_max=True), st.sampled_from([1, 100, 30_000]), st.booleans(), st.booleans())
def test_the_revision_chosen_can_always_serve(fleet, draw, num_tokens, is_up, alone):
    ready = {name: ReadyNodes.among(nodes(*counts, prefills_alone=alone)) for name, counts in fleet.items()}
    links, cost = [link(up=is_up)], PrefillCost(10_000)
    asked = request(num_tokens)
    try:
        found = choose_revision(ready, asked, links, policy(), draw=draw, place=PLACE, cost=cost)
    except (NoReadyNode, NobodyPrefills):
        for each in ready.values():
            with pytest.raises((NoReadyNode, NobodyPrefills)):
                route_among(each, asked, links, policy(), place=PLACE, cost=cost)
        return
    route_among(ready[found.revision], asked, links, policy(), place=PLACE, cost=cost)  # it does not raise
    shares = scarcer_shares(ready, found.roles, links)
    assert shares[found.revision] > 0  # so each role that counted has a node there
    assert [each.revision for each in found.weighed if each.is_chosen] == [found.revision]
    assert {each.revision for each in found.weighed} == set(ready)


@given(FLEETS, st.floats(0, 1, exclude_max=True))
def test_the_order_of_revisions_changes_nothing(fleet, draw):
    ready = {name: nodes(*counts) for name, counts in fleet.items()}
    try:
        found = chosen(draw, **ready)
    except NoReadyNode:
        return
    assert chosen(draw, **dict(reversed(ready.items()))) == found


@given(
    st.dictionaries(st.sampled_from("abcd"), st.integers(0, 5), min_size=1).filter(lambda shares: any(shares.values()))
)
def test_draws_converge_to_the_shares(shares):
    number = 1_000
    counts = Counter(drawn_by(shares, (at + 0.5) / number) for at in range(number))
    for name, share in shares.items():
        assert counts[name] == pytest.approx(number * share / sum(shares.values()), abs=1.5)


@given(st.integers(1, 4), st.integers(1, 4))
def test_a_rollout_of_every_role_hands_over_node_by_node(number, moved):
    moved = min(number, moved)
    old, new = nodes(*[number - moved] * 3), nodes(*[moved] * 3)
    shares = scarcer_shares({"a": ReadyNodes.among(old), "b": ReadyNodes.among(new)}, ROLES, [link()])
    assert shares == pytest.approx({"a": 1 - moved / number, "b": moved / number})
