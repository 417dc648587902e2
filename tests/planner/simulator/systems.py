"""Small systems to simulate."""

from typing import Any

import numpy as np

from planner.decisions.routing.policy import RoutingPolicy
from planner.decisions.views import ClusterKind
from planner.model.profile import DecodeProfile, Floats, KvSize, PrefillCurve
from planner.model.site import Site
from planner.model.workload import Trace
from planner.simulator.scenario import Pool, Scenario, Wire
from planner.simulator.trials.trial import Trial, TrialSetting, scenario_of

PUBLISHED = TrialSetting(19_400, 0.0, 3, 5)
FOREVER = 1e9


def case_study_scenario(site: Site, setting: TrialSetting = PUBLISHED, **trial: Any) -> Scenario:
    return scenario_of(site, setting, Trial(**trial))


def queue_of(servers: int, **fields: Any) -> Scenario:
    """One PD cluster whose prefill takes one second per 1000 tokens; decode is immediate."""
    pool = Pool(
        name="pd",
        kind=ClusterKind.PD,
        num_prefill=servers,
        num_decode=1,
        prefill=PrefillCurve(coefficients=(0.0, 1e-3, 0.0), valid_tokens=(0, FOREVER)),
        decode=DecodeProfile(max_running=10**6, step_s=1e-9),
    )
    defaults: dict[str, Any] = {
        "pools": [pool], "kv": KvSize(bytes_per_token=1), "routing": RoutingPolicy(threshold_tokens=FOREVER)
    }  # fmt: skip
    return Scenario(**defaults | fields)


def with_link(capacity: list[tuple[float, float]], **fields: Any) -> Scenario:
    """A PrfaaS cluster of one node that prefills in no time, and a link of bytes per second."""
    quick = PrefillCurve(coefficients=(1e-9, 0.0, 0.0), valid_tokens=(0, FOREVER))
    pools = [
        Pool(name="far", kind=ClusterKind.PRFAAS, num_prefill=1, prefill=quick),
        Pool(
            name="pd", kind=ClusterKind.PD, num_prefill=0, num_decode=1, prefill=quick,
            decode=DecodeProfile(max_running=100, step_s=1e-9),
        ),
    ]  # fmt: skip
    wires = [Wire(source="far", destination="pd", capacity=capacity)]
    policy = RoutingPolicy(threshold_tokens=0)
    return Scenario(**{"pools": pools, "wires": wires, "kv": KvSize(bytes_per_token=1), "routing": policy} | fields)


def arrivals(times: Floats, prompts: Floats | float, outputs: Floats | float = 1.0) -> Trace:
    size = len(times)
    return Trace(
        name="test",
        arrival_s=np.asarray(times, dtype=np.float64),
        prompt_tokens=np.broadcast_to(np.asarray(prompts, dtype=np.float64), size).copy(),
        output_tokens=np.broadcast_to(np.asarray(outputs, dtype=np.float64), size).copy(),
    )
