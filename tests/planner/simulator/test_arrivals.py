"""Prompts that come together have what they share sent once, as gateways have it."""

from dataclasses import replace

import numpy as np
import pytest

from planner.model.workload import Trace
from planner.simulator.scenario import Outage, Scenario
from planner.simulator.world import World, simulate
from tests.planner.simulator.systems import case_study_scenario

BLOCK = 250
PROMPT = 40_000  # above the threshold: it crosses the link
TAIL = 4 * BLOCK


def fan_out(count: int, *, tails: bool, apart_s: float = 0.01) -> Trace:
    shared = range((PROMPT - TAIL) // BLOCK)
    ends = [range(1_000_000 * (1 + number * tails), 1_000_000 * (1 + number * tails) + 4) for number in range(count)]
    return Trace(
        name="fan out",
        arrival_s=60.0 + apart_s * np.arange(count),
        prompt_tokens=np.full(count, float(PROMPT)),
        output_tokens=np.full(count, 10.0),
        blocks=tuple((*shared, *end) for end in ends),
        block_size=BLOCK,
    )


def one_decode_node(case_study) -> Scenario:
    scenario = case_study_scenario(case_study, cache_gb=50.0)
    return replace(scenario, pools=[replace(pool, num_decode=min(1, pool.num_decode)) for pool in scenario.pools])


def test_answers_to_one_prompt_have_it_sent_once(case_study):
    kv, scenario = case_study.profile.kv_size(), one_decode_node(case_study)
    found = simulate(scenario, fan_out(8, tails=False))
    assert found.routes == {"remote long": 1, "remote remote_prefix": 7}
    assert found.fallbacks == {}
    assert found.sent_bytes == pytest.approx(kv(PROMPT) + 7 * kv(0), rel=0.01)
    alone = simulate(scenario, fan_out(1, tails=False))
    assert found.ttft_s[0] == pytest.approx(alone.ttft_s[0], rel=0.01)  # the first waits for no other


def test_prompts_that_part_wait_where_that_makes_them_hardly_later(case_study):
    kv, scenario = case_study.profile.kv_size(), one_decode_node(case_study)
    found = simulate(scenario, fan_out(8, tails=True))
    assert found.fallbacks == {}
    assert (
        0.3 < found.sent_bytes / (8 * kv(PROMPT)) < 0.75
    )  # idle prefill nodes compute at once what they would wait for


def test_everybody_ends_when_the_transfer_that_is_waited_for_fails(case_study):
    scenario = case_study_scenario(case_study, cache_gb=50.0, outages=(Outage(from_s=60.5, until_s=1e6),))
    found = simulate(scenario, fan_out(8, tails=True))
    assert np.isfinite(found.ttft_s).all()


def test_a_prompt_that_waits_is_work_of_its_prefill_node(case_study):
    """Decisions count it there, as a gateway books it, and a node that has such work does not change its role."""
    scenario = one_decode_node(case_study)
    scenario = replace(scenario, routing=replace(scenario.routing, threshold_tokens=1e9))
    world, seen = World(scenario, fan_out(9, tails=True)), {}

    def look(now: float, _: None) -> None:
        seen.update({name: node.num_jobs for name, node in world.roles.prefills.items() if node.num_jobs})
        assert all(world.roles.prefills[name].queued_tokens for name in seen)

    world.loop.at(60.5, look, None)
    found = world.run()
    assert seen == {"pd-p0": 3, "pd-p1": 3, "pd-p2": 3}
    assert found.fallbacks == {}
    assert not any(node.num_jobs or node.queued_tokens for node in world.roles.prefills.values())
