"""Speed of the planner: `python -m benchmarks.planner.speed [--json] [--requests N] [--trace FILE]`.

solve_s             200,000 lengths × 9 splits, everything a plan says (after import)
search_s            the search alone
trace_s             a trace of 24K requests with 12 blocks each through 8 + 8 nodes, prefix caches included
uncached_s          one million requests through the case study, no caches
events_per_s        of the latter
peak_mib            growth of the resident set during the latter
"""

import argparse
import json
import resource
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from planner.decisions.routing.policy import PlacementPolicy, RoutingPolicy
from planner.decisions.views import ClusterKind
from planner.model.profile import DecodeProfile, KvSize, PrefillCurve
from planner.model.site import load_site
from planner.model.workload import Trace, poisson, read_trace
from planner.simulator.outcome import SimulationOutcome
from planner.simulator.scenario import Pool, Scenario
from planner.simulator.trials.trial import Trial, TrialSetting, scenario_of
from planner.simulator.world import simulate
from planner.solve.plan import make_plan
from planner.solve.problem import SolveOptions, best_cut, pose

CONFIG = Path(__file__).parents[2] / "configs" / "case_study.toml"


def conversations(requests: int, rate_req_per_s: float, seed: int = 0) -> Trace:
    """Sessions whose prompts grow by a few blocks per turn, as in the public traces: about 60 % of the blocks repeat."""
    rng = np.random.default_rng(seed)
    history: list[tuple[int, ...]] = []
    blocks, next_id = [], 1
    for _ in range(requests):
        goes_on = bool(history) and rng.random() < 0.6
        base = history[int(rng.integers(max(0, len(history) - 300), len(history)))] if goes_on else (0,)
        grown = int(rng.geometric(0.18))
        ids = (*base, *range(next_id, next_id + grown))
        next_id += grown
        history.append(ids[:200])
        blocks.append(ids[:200])
    return Trace(
        name="conversations",
        arrival_s=np.cumsum(rng.exponential(1 / rate_req_per_s, requests)),
        prompt_tokens=np.array([len(ids) * 512.0 for ids in blocks]),
        output_tokens=np.full(requests, 180.0),
        blocks=tuple(blocks),
    )


def cached_scenario() -> Scenario:
    """Eight prefill and eight decode nodes with 500 GB of cache each."""
    pool = Pool(
        name="pd",
        kind=ClusterKind.PD,
        num_prefill=8,
        num_decode=8,
        prefill=PrefillCurve(coefficients=(0.05, 1.13e-4, 1.05e-9), valid_tokens=(1, 200_000)),
        decode=DecodeProfile(max_running=128, step_s=0.02, step_s_per_request=0.0035),
        cache_bytes=500e9,
    )
    routing = RoutingPolicy(threshold_tokens=1e9, placement=PlacementPolicy(fetch_bytes_per_s=25e9))
    return Scenario(pools=[pool], kv=KvSize(bytes_per_token=327_680), routing=routing)


def timed(action: Callable[[], object], repeat: int = 1) -> tuple[float, float]:
    """Least wall and CPU seconds of `repeat` runs."""
    walls, cpus = [], []
    for _ in range(repeat):
        wall, cpu = time.perf_counter(), time.process_time()
        action()
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
    return min(walls), min(cpus)


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--json", action="store_true")
    arguments.add_argument("--requests", type=int, default=1_000_000, help="of the run without caches")
    arguments.add_argument("--trace", type=Path, help="replay this instead of the made-up conversations")
    args = arguments.parse_args()
    site = load_site(CONFIG)
    problem = pose(site, SolveOptions())
    results: dict[str, float] = {}
    results["solve_s"], results["solve_cpu_s"] = timed(lambda: make_plan(site, SolveOptions()), 3)
    results["search_s"], _ = timed(lambda: best_cut(problem, SolveOptions()), 3)
    trace = read_trace(args.trace) if args.trace else conversations(24_000, 8.0)
    results["trace_requests"] = len(trace)
    results["trace_blocks"] = sum(len(ids) for ids in trace.blocks or ())
    results["trace_s"], results["trace_cpu_s"] = timed(lambda: simulate(cached_scenario(), trace))
    many = poisson(site.workload.lengths, 1024, 0.8 * 3.24, args.requests, np.random.default_rng(0))
    scenario = scenario_of(site, TrialSetting(19_400, 0.0, 3, 5), Trial())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    outcomes: list[SimulationOutcome] = []
    results["uncached_requests"] = args.requests
    results["uncached_s"], results["uncached_cpu_s"] = timed(lambda: outcomes.append(simulate(scenario, many)))
    results["events_per_s"] = outcomes[0].events / results["uncached_s"]
    results["peak_mib"] = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    if args.json:
        print(json.dumps(results, indent=2))
    else:
        print("  ".join(f"{name}={value:.4g}" for name, value in results.items()))


if __name__ == "__main__":
    main()
