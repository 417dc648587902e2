"""Prefixes that move between clusters: when it pays, over a link that is shared, and never for longer than a request waits."""

from dataclasses import replace

import numpy as np
import pytest

from planner.model.workload import Trace
from planner.simulator.scenario import Outage, Scenario
from planner.simulator.world import World, simulate
from tests.planner.simulator.systems import case_study_scenario

SIZES = [15_000, 60_000]  # the first is computed at home (t = 19,400), what is new of the second is not


def turns(sizes: list[int] = SIZES, times: int = 1, block: int = 250) -> Trace:
    """One conversation, with its last turn asked as often as that, a second apart."""
    prompts = [*sizes[:-1], *[sizes[-1]] * times]
    return Trace(
        name="turns",
        arrival_s=np.array(
            [60.0 * turn for turn in range(len(sizes) - 1)] + [60.0 * len(sizes) + n for n in range(times)]
        ),
        prompt_tokens=np.array(prompts, dtype=np.float64),
        output_tokens=np.full(len(prompts), 10.0),
        blocks=tuple(tuple(range(n // block)) for n in prompts),
        block_size=block,
    )


def system(case_study, *outages: Outage, **trial) -> Scenario:
    return case_study_scenario(case_study, cache_gb=50.0, outages=outages, **trial)


def test_a_prompt_that_goes_on_elsewhere_takes_its_prefix_along(case_study):
    kv = case_study.profile.kv_size()
    stays = simulate(system(case_study), turns())
    found = simulate(system(case_study, cross_cluster_cache=True), turns())
    assert stays.routes == found.routes == {"local short": 1, "remote long": 1}
    assert stays.cached_tokens.tolist() == [0, 0]
    assert found.cached_tokens.tolist() == [0, 15_000]
    assert found.moved_bytes == {"pd to prfaas": pytest.approx(kv(15_000), rel=1e-6)}
    assert found.ttft_s[1] < stays.ttft_s[1]
    assert found.fallbacks == {}
    assert found.report()["moved_bytes"] == found.moved_bytes
    assert stays.moved_bytes == {}


def test_nobody_waits_for_a_prefix_longer_than_computing_it_would_take(case_study):
    thin = Outage(from_s=0.0, until_s=1e6, share=0.03)
    slow = simulate(system(case_study, thin, cross_cluster_cache=True), turns())
    assert slow.routes == {"local short": 1, "remote long": 1}
    assert slow.fallbacks == {"fetch_late": 1}
    assert slow.cached_tokens.tolist() == [0, 0]
    thinner = simulate(system(case_study, replace(thin, share=0.01), cross_cluster_cache=True), turns())
    assert thinner.moved_bytes == {}  # all of it stays at home


def test_a_prefix_is_no_longer_waited_for_when_its_link_fails(case_study):
    scenario = system(case_study, Outage(from_s=119.0, until_s=1e6), cross_cluster_cache=True)
    world = World(replace(scenario, peer_timeout_s=0.05), turns())
    found = world.run()
    assert found.fallbacks["fetch_peer_lost"] == 1
    assert found.fallbacks["prefill_peer_lost"] == 1
    assert np.isfinite(found.e2e_s).all()
    assert found.cached_tokens[1] == 15_000  # at home, in the end


def test_one_move_serves_all_that_follow_and_answers_come_home_with_their_prefix(case_study):
    kv = case_study.profile.kv_size()
    found = simulate(system(case_study, cross_cluster_cache=True), turns(times=6))
    assert np.isfinite(found.e2e_s).all()
    assert found.moved_bytes["pd to prfaas"] == pytest.approx(kv(15_000), rel=1e-6)
    # What was added has moved home once, less what was held there, and is what all the others go on from.
    assert found.moved_bytes["prfaas to pd"] == pytest.approx(kv(60_000) - kv.bytes_per_token * 15_000, rel=1e-6)
    assert found.routes == {"local short": 4, "remote long": 1, "remote remote_prefix": 2}
