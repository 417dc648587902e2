"""How the live benchmark of coding agents makes prompts, deployments and its table."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.system.agents import CONFIG, LIVE_TRIAL, AgentsArena, contenders
from benchmarks.system.agents_live import AgentsRow, Requests, Script, ServingWay, bars, table, topology_of
from planner.model.sessions import DueTurn, Turn, trace_of
from planner.model.site import load_site
from planner.simulator.scenario import Targets
from prfaas.system.standin import Scale

SCALE = Scale(time=0.2, tokens=1 / 64, bytes=0.001)
BLOCK = 8  # 512 tokens of the model


def call(blocks: tuple[int, ...], prompt_tokens: int, output_tokens: int = 640, agent: str = "1") -> DueTurn:
    return DueTurn(0.0, 0, 0, Turn(0.0, prompt_tokens, output_tokens, blocks, agent))


def test_equal_blocks_are_equal_tokens_and_partial_ones_their_own() -> None:
    script = Script(SCALE, 0)
    first, second = script.prompt(call((0, 1, 2), 1100)), script.prompt(call((0, 1, 3, 4), 2048, agent="1.1"))
    assert (len(first), len(second)) == (1100 // 64 + 1, 2048 // 64 + 1)
    assert first[: 2 * BLOCK] == second[: 2 * BLOCK]
    assert first[2 * BLOCK :] != second[2 * BLOCK : len(first)]


def test_a_prompt_that_goes_on_from_an_answer_has_its_tokens() -> None:
    script = Script(SCALE, 0)
    began = call((0, 1, 2), 1100)
    said = script.prompt(began) + list(range(100, 110))
    script.answered(began, said)
    assert script.prompt(call((0, 1, 3, 4, 5), 2500))[: len(said)] == said


def test_a_prompt_that_goes_back_has_nothing_of_the_answer() -> None:
    script = Script(SCALE, 0)
    began = call((0, 1, 2), 1100)
    said = script.prompt(began) + list(range(100, 110))
    script.answered(began, said)
    again = script.prompt(call((0, 9, 10, 11), 2048))
    assert again[:BLOCK] == said[:BLOCK]
    assert again[BLOCK : len(said)] != said[BLOCK:]


@pytest.fixture(scope="module")
def arena() -> AgentsArena:
    turns = [(float(at), Turn(0.0, 40_000, 512, tuple(range(100 * at, 100 * at + 79)))) for at in range(20)]
    return AgentsArena.of(load_site(CONFIG), trace_of(turns), 20)


def test_every_way_can_be_started_as_it_is_simulated(arena: AgentsArena, tmp_path: Path) -> None:
    for name, scenario in contenders(arena, LIVE_TRIAL).items():
        topology = topology_of(scenario, SCALE, tmp_path)
        pools = {pool.name: pool for pool in scenario.pools}
        for cluster, pool in pools.items():
            roles = [node.role for node in topology.nodes if node.cluster == cluster]
            assert (roles.count("prefill"), roles.count("decode")) == (pool.num_prefill, pool.num_decode)
        assert {node.cluster for node in topology.nodes} == set(pools)
        assert {(node.block_size, node.cache_bytes) for node in topology.nodes} == {(BLOCK, 200_000_000)}
        routing = topology.gateway["routing"]
        assert routing["by_total_length"] == (name == "total length")
        assert routing["increment_tokens"] == (0 if name == "always" else 17)
        assert (topology.gateway["threshold_tokens"] == 0) == (name == "always")


def test_what_was_not_answered_is_no_goodput() -> None:
    seen = Requests(
        ttft_s=np.array([1.0, 6.0, np.nan, 2.0]), tbt_s=np.array([0.02, 0.02, np.nan, 0.2]),
        prompt_tokens=np.full(4, 100.0), cached_tokens=np.array([50.0, 0.0, 0.0, 30.0]), remote=np.array([1.0, 0, 0, 1]),
    )  # fmt: skip
    row = seen.row(Targets(ttft_s=5.0, tbt_s=0.05), over_s=10.0, sent_bytes=4e9, sessions=2)
    assert (row.goodput_req_per_s, row.hit_ratio, row.offload_fraction, row.egress_gb_per_session) == (0.1, 0.2, 0.5, 2)
    assert row.ttft_mean_s == 3.0


def way(offloaded: float = 0.25) -> ServingWay:
    row = AgentsRow(
        goodput_req_per_s=1.0, ttft_mean_s=2.0, ttft_p90_s=3.0, hit_ratio=0.7, offload_fraction=offloaded,
        egress_gb_per_session=1.5,
    )  # fmt: skip
    return ServingWay(
        name="ours", instances=(4, 5, 3), threshold_tokens=1e4, requests=9, live=row,
        simulated=replace(row, ttft_mean_s=1.9), endless_hit_ratio=0.71, routes={}, routes_simulated={}, fallbacks={},
        late_p99_s=0.0, wrong=(),
    )  # fmt: skip


def test_the_table_is_markdown_with_live_beside_simulated() -> None:
    head, rule, row = table([way()]).splitlines()
    assert {line.count("|") for line in (head, rule, row)} == {9}
    assert (
        row
        == "| ours, 4 + 5 / 3 | 9 | 1.00 / 1.00 | 2.00 / 1.90 | 3.00 / 3.00 | 70.0% / 70.0% | 25.0% / 25.0% | 1.50 / 1.50 |"
    )


def test_ours_is_set_beside_its_plan() -> None:
    share, egress, hit = bars(way(), planned_share=0.2, planned_gb_per_session=1.2)
    assert share.endswith("(+5.0 points)")
    assert egress.endswith("(×1.25)")
    assert hit.endswith("(-1.0 points)")
