"""How a simulation reports targets of some requests."""

from dataclasses import replace

import numpy as np
import pytest

from planner.errors import InputError
from planner.model.demand.slo import TtftTarget
from planner.model.trace_files.categories import CategorySource, RequestCategories
from planner.simulator.outcome import over_seeds
from planner.simulator.scenario import Targets
from planner.simulator.trials.trial import DEPLOYED_TRIAL, TrialSetting, from_workload, scenario_of
from planner.simulator.world import simulate

SETTING = TrialSetting(19_684.0, 0.0, 3, 5)
SHORT = TtftTarget(ttft_s=2.0, up_to_tokens=8000, share=0.8)
CHATS = TtftTarget(ttft_s=3.0, category="chat")


def scenario(site, *targets):
    return scenario_of(replace(site, slo=replace(site.slo, targets=targets)), SETTING, DEPLOYED_TRIAL)


def of_two_categories(trace):
    codes = (np.arange(len(trace)) % 2).astype(np.uint8)
    return replace(trace, categories=RequestCategories(("chat", "file"), codes, CategorySource.TRACE))


def test_each_target_counts_its_own_requests(case_study):
    trace = of_two_categories(from_workload(case_study, 2.4, 1000)(0))
    found = simulate(scenario(case_study, SHORT, CHATS), trace)
    report = found.report()
    assert report["ttft_mean_s"] == simulate(scenario(case_study), trace).report()["ttft_mean_s"]
    short, chats = trace.prompt_tokens <= 8000, np.arange(1000) % 2 == 0
    shares = []
    for target, own in ((SHORT, short), (CHATS, chats)):
        row = report["by_target"][target.name]
        shares.append(float((found.ttft_s[own] <= target.ttft_s).mean()) - target.share)
        assert row["requests"] == own.sum()
        assert row["share_in_time"] == pytest.approx(shares[-1] + target.share)
        assert row["ttft_s"] == pytest.approx(np.quantile(found.ttft_s[own], target.share))
    assert report["target_margin"] == pytest.approx(min(shares))
    least = np.where(short, 2.0, np.where(chats, 3.0, case_study.slo.ttft_p90_s))
    good = (found.ttft_s <= least) & (found.tbt_s <= case_study.slo.tbt_s)
    assert report["goodput_req_per_s"] == pytest.approx(good.sum() / found.horizon_s)
    assert over_seeds([report, report])["by_target"][SHORT.name] == report["by_target"][SHORT.name]


def test_refused_requests_are_late(case_study):
    trace = from_workload(case_study, 2.0, 50)(0)
    found = simulate(scenario(case_study, SHORT), trace)
    refused = replace(found, ttft_s=np.full(50, np.nan)).report()["by_target"][SHORT.name]
    assert (refused["share_in_time"], refused["goodput_req_per_s"], "ttft_s" in refused) == (0, 0, False)


def test_a_target_of_no_request_is_said_and_one_of_an_unknown_category_refused(case_study):
    trace = of_two_categories(from_workload(case_study, 2.0, 50)(0))
    report = simulate(scenario(case_study, replace(SHORT, up_to_tokens=1.0)), trace).report()
    assert report["by_target"]["up to 1 tokens"] == {"requests": 0, "target_s": 2.0, "asked_share": 0.8}
    assert report["target_margin"] is None
    with pytest.raises(InputError, match="'code': no request is of it; there are chat, file"):
        simulate(scenario(case_study, replace(CHATS, category="code")), trace)


def test_without_targets_there_are_no_keys(case_study):
    report = simulate(scenario(case_study), from_workload(case_study, 2.0, 20)(0)).report()
    assert not {"by_target", "target_margin"} & report.keys()
    assert Targets().some == ()
