"""What the benchmark sends to running systems and to the simulator, and how it judges them."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.system.case_study import CaseRun
from benchmarks.system.live_vs_simulated import (
    ComparedRun,
    about_documents,
    as_sent,
    in_bursts,
    scenarios,
    started_as,
    table,
    too_busy,
)
from planner.decisions.views import ClusterKind
from planner.model.workload import Trace
from planner.simulator.world import simulate
from prfaas.system.standin import Scale

SCALE = Scale(time=0.5, tokens=1 / 64, bytes=0.001)


@pytest.fixture(scope="module")
def compared(case_study):
    return scenarios(case_study, SCALE, 0)


def test_there_are_six_scenarios_and_two_of_them_are_unseen(compared) -> None:
    assert len({each.name for each in compared}) == 6
    assert sum(each.is_unseen for each in compared) == 2


def test_requests_are_the_same_each_time_and_take_less_than_a_minute(compared, case_study) -> None:
    for one, other in zip(compared, scenarios(case_study, SCALE, 0), strict=True):
        assert one.trace.arrival_s.tolist() == other.trace.arrival_s.tolist()
        assert one.trace.prompt_tokens.tolist() == other.trace.prompt_tokens.tolist()
        assert one.trace.blocks == other.trace.blocks
        assert one.trace.arrival_s[-1] * SCALE.time < 60
        assert simulate(one.scenario, one.trace, 0).report()["rejected"] == 0


def test_what_is_simulated_is_started(compared, tmp_path: Path) -> None:
    for each in compared:
        topology = started_as(each.scenario, SCALE, tmp_path)
        for pool in each.scenario.pools:
            roles = [node.role for node in topology.nodes if node.cluster == pool.name]
            assert (roles.count("prefill"), roles.count("decode")) == (pool.num_prefill, pool.num_decode)
        (wire,) = each.scenario.wires
        senders = sum(pool.num_prefill for pool in each.scenario.pools if pool.kind is ClusterKind.PRFAAS)
        budgets = [node.egress_bytes_per_s["pd"] for node in topology.nodes if node.cluster == "prfaas"]
        here = wire.capacity[0][1] * SCALE.bytes / SCALE.time
        assert len(budgets) == senders
        assert sum(budgets) == pytest.approx(here, rel=0.01)


def test_bursts_have_the_same_requests_at_the_same_mean_rate() -> None:
    steady = Trace(
        name="x", arrival_s=np.arange(300.0), prompt_tokens=np.arange(300.0), output_tokens=np.ones(300)
    )  # fmt: skip
    bursts = in_bursts(steady)
    assert bursts.prompt_tokens.tolist() == steady.prompt_tokens.tolist()
    assert (np.diff(bursts.arrival_s) > 0).all()
    assert bursts.arrival_s[-1] == pytest.approx(steady.arrival_s[-1], abs=5)
    assert (bursts.arrival_s % 30 < 10).mean() == pytest.approx(0.7, abs=0.02)


def test_questions_about_a_document_share_its_blocks_alone() -> None:
    trace = about_documents(200, 0)
    assert trace.blocks is not None
    first = {blocks[0] for blocks in trace.blocks}
    assert 1 < len(first) <= 10
    assert len({blocks[-1] for blocks in trace.blocks}) == 200


def test_requests_are_as_long_as_what_is_sent() -> None:
    trace = Trace(
        name="x", arrival_s=np.zeros(1), prompt_tokens=np.array([1000.0]), output_tokens=np.array([1024.0])
    )  # fmt: skip
    sent = as_sent(trace, SCALE)
    assert sent.prompt_tokens.tolist() == [16 * 64]  # 15.6 tokens of here
    assert sent.output_tokens.tolist() == [1 + 15 * 64]


def run(**simulated: float) -> ComparedRun:
    live = CaseRun(ttft_mean_s=2.0, ttft_p90_s=4.0, tbt_mean_s=0.025, egress_gbps=6.0, offloaded=0.5)
    return ComparedRun(
        name="half load", is_unseen=True, requests=9, live=live, simulated=replace(live, **simulated), wrong=(),
        late_p99_s=0.001, load_average=1.0,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("simulated", "agrees"),
    [
        ({}, (True, True, True)),
        ({"ttft_mean_s": 1.91, "ttft_p90_s": 4.39, "offloaded": 0.529}, (True, True, True)),
        ({"ttft_mean_s": 1.89}, (False, True, True)),
        ({"ttft_p90_s": 4.41}, (True, False, True)),
        ({"offloaded": 0.469}, (True, True, False)),
    ],
)
def test_the_bars_are_5_and_10_per_cent_and_3_points(simulated, agrees) -> None:
    found = run(**simulated)
    assert found.agrees == agrees
    assert found.holds == all(agrees)
    *_, row = table([found]).splitlines()
    assert row.count("(!)") == agrees.count(False)
    assert row.startswith("| half load (unseen) | 9 |")


def test_a_machine_that_is_too_busy_is_named() -> None:
    assert not too_busy([run()], SCALE.time)
    assert "late by 2.00 s" in too_busy([run(), replace(run(), late_p99_s=1.0)], SCALE.time)


def test_wrong_tokens_are_no_agreement() -> None:
    assert not replace(run(), wrong=("r1",)).holds
