"""Seeds of a trial, one after the other and at once."""

import numpy as np
import pytest

from benchmarks.planner.equality import digest
from planner.model.site import Site
from planner.simulator.trials.trial import Trial, TrialSetting, from_workload, run, scenario_of


@pytest.mark.timeout(120)
def test_seeds_over_processes_find_the_same_as_one_after_the_other(case_study: Site):
    scenario = scenario_of(case_study, TrialSetting(19_400, 0.0, 3, 5), Trial())
    source = from_workload(case_study, 2.0, 200)
    alone = run(scenario, source, [3, 4])
    together = run(scenario, source, [3, 4], processes=2, worth=1)
    assert [digest(outcome) for outcome in together] == [digest(outcome) for outcome in alone]
    assert not np.array_equal(alone[0].ttft_s, alone[1].ttft_s)
