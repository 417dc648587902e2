"""Links that fail and come back: what it costs, who hears of it, and that deciders have only what gateways have."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.decisions.routing.policy import RoutingPolicy
from planner.decisions.views import ClusterKind
from planner.errors import InputError
from planner.model.profile import DecodeProfile, KvSize, PrefillCurve
from planner.simulator.outcome import SimulationOutcome
from planner.simulator.policies import Estimates
from planner.simulator.scenario import Outage, Pool, Scenario, Wire
from planner.simulator.world import World, simulate
from tests.planner.simulator.systems import FOREVER, arrivals, with_link

CURVE = PrefillCurve(coefficients=(0.0, 1e-3, 0.0), valid_tokens=(0, FOREVER))  # a second for 1000 tokens
DOWN = Outage(from_s=60.0, until_s=90.0)
RATE = 4000.0  # of the link, in bytes/s; a token is a byte


def pair(outages: list[Outage], far: int = 2, near: int = 1, decodes: int = 2, **fields) -> Scenario:
    """A PrfaaS cluster ten times as fast as the prefill nodes at home, and a link between."""
    quick = PrefillCurve(coefficients=(0.0, 1e-4, 0.0), valid_tokens=(0, FOREVER))
    pools = [
        Pool(name="far", kind=ClusterKind.PRFAAS, num_prefill=far, prefill=quick),
        Pool(
            name="pd", kind=ClusterKind.PD, num_prefill=near, num_decode=decodes, prefill=CURVE,
            decode=DecodeProfile(max_running=100, step_s=1e-9),
        ),
    ]  # fmt: skip
    wire = Wire(source="far", destination="pd", capacity=[(0.0, RATE)])
    for outage in outages:
        wire = wire.with_outage(outage)
    defaults = {
        "routing": RoutingPolicy(threshold_tokens=500), "kv": KvSize(bytes_per_token=1), "estimates": Estimates.EXACT
    }  # fmt: skip
    return Scenario(pools=pools, wires=[wire], **{**defaults, **fields})


def every(seconds: float, until: float) -> SimulationOutcome:
    return arrivals(np.arange(0.0, until, seconds), 1000.0)


def test_a_dead_link_costs_one_request_its_patience_and_then_nobody_until_it_is_back():
    trace = every(8.0, 160.0)
    found = simulate(pair([DOWN]), trace)
    at, ttft = found.arrival_s, found.ttft_s
    hurt = at[ttft > 2.0]
    assert hurt.tolist() == [64.0]
    # The prefill, the peer timeout, and all of it again at home.
    assert ttft[at == 64.0] == pytest.approx([0.1 + 5.0 + 1.0], abs=0.01)
    assert found.fallbacks == {"prefill_peer_lost": 1}
    assert found.link_failures == {"far to pd": 1}
    assert found.routes["local link_down"] == 3  # at 72, 80 and 88
    # Failed at 69.1, probes one after the other for up to half a minute: back at 90, and used from the next request on.
    assert found.remote[at >= 96.0].all()
    assert found.remote[at < 60.0].all()
    assert not found.remote[(at >= 64.0) & (at < 90.0)].any()


def test_what_is_under_way_when_a_link_fails_is_lost_together_and_all_of_it_is_answered():
    trace = arrivals(np.arange(59.9, 64.0, 0.5), 1000.0)
    found = simulate(pair([DOWN], near=4), trace)
    assert found.fallbacks["prefill_peer_lost"] >= 3
    assert found.link_failures == {"far to pd": 1}
    assert np.isfinite(found.e2e_s).all()
    assert found.ttft_s.max() < 12.0


def test_a_link_that_never_comes_back_ends_nothing_but_itself():
    found = simulate(pair([Outage(from_s=60.0, until_s=float("inf"))]), every(8.0, 400.0))
    assert np.isfinite(found.ttft_s).all()
    assert found.fallbacks == {"prefill_peer_lost": 1}
    assert not found.remote[found.arrival_s > 64.0].any()


def test_with_nobody_else_to_compute_the_decode_node_does():
    found = simulate(pair([DOWN], near=0), every(8.0, 160.0))
    assert found.fallbacks == {"prefill_peer_lost": 1, "recompute_no_prefill": 1}
    assert found.routes["decode link_down"] == 3
    assert np.isfinite(found.ttft_s).all()


def test_a_blink_shorter_than_the_patience_is_no_failure():
    found = simulate(pair([Outage(from_s=0.1, until_s=4.5)]), arrivals([0.0], 1000.0))
    assert (found.fallbacks, found.link_failures) == ({}, {})
    assert found.ttft_s == pytest.approx([4.5 + 0.25], abs=0.01)


def test_a_thin_link_is_no_dead_one_and_prompts_stay_at_home():
    thin = simulate(pair([replace(DOWN, share=0.1)]), every(4.0, 160.0))
    assert thin.link_failures == {}
    during = (thin.arrival_s >= 60.0) & (thin.arrival_s < 90.0)
    assert not thin.remote[during].any()
    assert thin.routes["local congested"] == during.sum()
    assert thin.remote[~during].mean() == 1.0


def test_layers_that_left_before_a_link_failed_are_sent_again():
    scenario = pair([Outage(from_s=0.05, until_s=60.0)], tail_share=0.5)
    found = simulate(scenario, arrivals([0.0], 1000.0))
    assert found.fallbacks == {"prefill_peer_lost": 1}
    assert found.ttft_s == pytest.approx([5.05 + 1.0], abs=0.01)


outages = st.builds(
    lambda at, length, share: Outage(from_s=at, until_s=at + length, share=share),
    st.floats(0.0, 60.0), st.floats(0.1, 40.0), st.sampled_from([0.0, 0.0, 0.1]),
)  # fmt: skip


@given(
    st.lists(outages, max_size=3), st.integers(0, 2), st.integers(1, 2), st.sampled_from([1.0, 0.3]),
    st.lists(st.tuples(st.floats(0.0, 80.0), st.integers(2, 4_000)), min_size=1, max_size=25),
)  # fmt: skip
def test_whatever_links_do_every_request_ends_once_and_what_was_promised_is_taken_back(
    down: list[Outage], near: int, decodes: int, tail_share: float, asked: list[tuple[float, int]]
) -> None:
    asked.sort()
    trace = arrivals([at for at, _ in asked], np.array([float(prompt) for _, prompt in asked]))
    world = World(pair(down, near=near, decodes=decodes, tail_share=tail_share), trace)
    found = world.run()
    assert np.isfinite(found.e2e_s).all()
    assert (found.ttft_s < 400.0).all()
    (link,) = world.links.views(world.loop.now)
    assert (link.queued_bytes, link.promised_bytes) == (0.0, pytest.approx(0.0, abs=1e-6))
    assert all(not node.queued_tokens for node in (*world.roles.prefills.values(), *world.roles.decodes.values()))
    assert all(not node.assigned for node in world.roles.decodes.values())


def test_half_a_round_trip_is_part_of_the_way():
    near = with_link([(0.0, 100.0)])
    far = replace(near, wires=[replace(near.wires[0], rtt_s=0.4)])
    trace = arrivals([0.0], 50.0)
    assert simulate(far, trace).ttft_s == pytest.approx(simulate(near, trace).ttft_s + 0.2)


def test_outages_are_steps_of_the_capacity():
    wire = Wire(source="far", destination="pd", capacity=[(0.0, 10.0), (70.0, 20.0)])
    assert wire.with_outage(DOWN).capacity == [(0.0, 10.0), (60.0, 0.0), (70.0, 0.0), (90.0, 20.0)]
    assert wire.with_outage(replace(DOWN, source="else", destination="pd")) is wire
    with pytest.raises(InputError, match="from 90 s until 60 s"):
        Outage(from_s=90.0, until_s=60.0)
