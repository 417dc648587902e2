"""Do plans say what simulations find? `python -m benchmarks.planner.agreement FILE… [--requests N] [--half 2] [--json]`.

Each file of requests is fitted, solved and simulated as the commands do without flags, at shares of the plan's Λ. Requests of a
trace come as they did, only faster or slower; sessions of agents are cut where the profile ends, and there are more or fewer of
them. A row has what the plan says and what was simulated; `(!)` is where they do not agree: on the offloaded share within 5
points, on the egress within 10 %, on the mean TTFT within 15 %. A second table has the rate that a plan for the SLO promises,
beside what `saturate` finds; these agree within 3 %.
"""

import argparse
import json
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from planner.model.fitting import workload_of
from planner.model.sessions import at_factor, read_sessions, replay, within
from planner.model.site import Site, load_site
from planner.model.traces import read_requests
from planner.model.workload import Trace
from planner.simulator.trials.hits import pd_prefixes
from planner.simulator.trials.rehearsal import TraceRehearsal
from planner.simulator.trials.saturation import parse_slo, saturate
from planner.simulator.trials.trial import DEPLOYED_TRIAL, TrialSetting, scenario_of
from planner.simulator.world import simulate
from planner.solve.goals import Objective
from planner.solve.plan import outline
from planner.solve.problem import SolveOptions

CONFIG: Final = Path(__file__).parents[2] / "configs" / "case_study.toml"
CONTEXT_TOKENS: Final = 131_072  # as far as the profile goes
LOADS: Final = (0.5, 0.8)  # of Λ
POINTS, EGRESS, TTFT, PROMISE = 0.05, 0.10, 0.15, 0.03  # by which plan and simulation may differ
UPPER: Final = 1.5  # of Λ: the highest rate that is simulated for an SLO
TOLERANCE: Final = 0.01  # of that search
SESSIONS: Final = 700  # drawn, for about 12 requests per second
LEAST_RATE: Final = 1.0  # requests per second: a few sessions say nothing of all
SESSIONS_WITHIN_S: Final = 900.0  # sessions begin, and are cut
COLUMNS: Final = (
    ("on decode nodes", "{:.1f}", 100),
    ("offloaded", "{:.1f}", 100),
    ("egress", "{:.2f}", 1),
    ("ttft", "{:.2f}", 1),
)


class ScaledTrace:
    """The requests of a file, at any rate."""

    def __init__(self, path: Path, count: int, half: int) -> None:
        """The first `count` requests of a trace, or as many after them."""
        self.name = path.name.split(".")[0]
        trace = read_requests(path)
        count = min(count, len(trace) // half)
        first = (half - 1) * count
        part = trace.part(slice(first, first + count))
        self._trace = replace(part, arrival_s=part.arrival_s - part.arrival_s[0])

    def at(self, rate: float, seed: int) -> Trace:
        """The same ones, faster or slower; `seed` spreads the ticks of a trace's clock."""
        trace = self._trace
        return trace.spread(np.random.default_rng(seed)).faster(rate * trace.span_s / len(trace))


class ScaledSessions(ScaledTrace):
    """Sessions of agents: at a higher rate there are more of them, each as fast as it was."""

    def __init__(self, path: Path, count: int, half: int) -> None:
        self.name = path.name.split(".")[0]
        sessions = within(read_sessions(path), CONTEXT_TOKENS)
        middle = len(sessions) // 2
        self._sessions = sessions[:middle] if half == 1 else sessions[middle:]
        self._drawn: dict[int, Trace] = {}  # by seed

    def at(self, rate: float, seed: int) -> Trace:
        """As many sessions as make that rate, or LEAST_RATE, of those drawn for the highest one."""
        if seed not in self._drawn:
            self._drawn[seed] = replay(self._sessions, SESSIONS, SESSIONS_WITHIN_S, seed)
        drawn = self._drawn[seed]
        rate = max(rate, LEAST_RATE)
        return replace(at_factor(drawn, rate * drawn.span_s / len(drawn), seed), name=self.name)


def requests_of(path: Path, count: int, half: int) -> ScaledTrace:
    return (ScaledSessions if "session" in path.name else ScaledTrace)(path, count, half)


def rows_of(site: Site, seed: int, requests: ScaledTrace) -> list[dict[str, Any]]:
    """A row for each of LOADS."""
    return [row_of(site, requests, load, seed) for load in LOADS]


def _fitted(site: Site, trace: Trace) -> Site:
    return replace(site, workload=workload_of(trace, pd_prefixes(trace, site, DEPLOYED_TRIAL.increment_tokens)))


def _at_load(site: Site, requests: ScaledTrace, load: float, seed: int) -> Trace:
    """The requests at that share of what a plan for them carries."""
    limit = outline(_fitted(site, requests.at(1.0, seed)), SolveOptions(extrapolate=True)).lambda_max
    return requests.at(load * limit, seed)


def row_of(site: Site, requests: ScaledTrace, load: float, seed: int) -> dict[str, Any]:
    options = SolveOptions(extrapolate=True)
    trace = _at_load(site, requests, load, seed)
    fitted = _fitted(site, trace)
    rate = len(trace) / trace.span_s
    plan = outline(fitted, replace(options, rate_req_per_s=rate), rehearse=TraceRehearsal.of)
    scenario = scenario_of(fitted, TrialSetting.of(plan), DEPLOYED_TRIAL)
    found = simulate(scenario, trace, seed).report()
    assert plan.asked_ttft_mean_s is not None
    assert plan.asked_offload_fraction is not None
    assert plan.asked_egress_gbps is not None
    offloaded, egress_gbps = plan.asked_offload_fraction, plan.asked_egress_gbps
    held = found["routes"].get("decode held", 0) / len(trace)
    return {
        "trace": requests.name,
        "load": rate / plan.lambda_max,
        "rate_req_per_s": rate,
        "threshold_tokens": plan.threshold_tokens,
        "split": f"{plan.num_prefill}/{plan.num_decode}",
        "hits": (fitted.workload.hit_ratio, found["hit_ratio"]),
        "on decode nodes": (plan.asked_held_fraction, held),
        "offloaded": (offloaded, found["offload_fraction"]),
        "egress": (egress_gbps, found["egress_mean_gbps"]),
        "ttft": (plan.asked_ttft_mean_s, found["ttft_mean_s"]),
        "busy": {
            stage: (plan.utilisation[stage] * rate / plan.lambda_max, busy)
            for stage, busy in found["utilisation"].items()
        },
        "agrees": {
            "offloaded": abs(offloaded - found["offload_fraction"]) <= POINTS,
            "egress": abs(egress_gbps - found["egress_mean_gbps"]) <= EGRESS * found["egress_mean_gbps"],
            "ttft": abs(plan.asked_ttft_mean_s - found["ttft_mean_s"]) <= TTFT * found["ttft_mean_s"],
        },
    }


def promise_of(site: Site, seed: int, requests: ScaledTrace) -> dict[str, Any]:
    """The rate that a plan for an SLO promises, beside the largest simulated one that keeps it."""
    assert site.slo.ttft_p90_s is not None
    fitted = _fitted(site, _at_load(site, requests, 1.0, seed))
    plan = outline(fitted, SolveOptions(extrapolate=True, objective=Objective.SLO), rehearse=TraceRehearsal.of)
    scenario = scenario_of(fitted, TrialSetting.of(plan), DEPLOYED_TRIAL)
    found = saturate(
        lambda rate: simulate(scenario, requests.at(rate, seed), seed).report(),
        parse_slo(f"ttft_p90<={site.slo.ttft_p90_s}"),
        upper=UPPER * plan.lambda_max,
        tolerance=TOLERANCE,
    )
    assert plan.lambda_slo is not None
    return {
        "trace": requests.name,
        "threshold_tokens": plan.threshold_tokens,
        "split": f"{plan.num_prefill}/{plan.num_decode}",
        "lambda_max_req_per_s": plan.lambda_max,
        "promised_req_per_s": plan.lambda_slo,
        "saturated_req_per_s": found.rate_req_per_s,
        "agrees": abs(plan.lambda_slo - found.rate_req_per_s) <= PROMISE * found.rate_req_per_s,
    }


def promises_text(rows: Sequence[dict[str, Any]]) -> str:
    """Promised / saturated; what does not agree is marked."""
    lines = ["| trace | t | split | Λ | promised / saturated, req/s | off by |", "|---|---|---|---|---|---|"]
    for row in rows:
        promised, found = row["promised_req_per_s"], row["saturated_req_per_s"]
        mark = "" if row["agrees"] else " (!)"
        lines.append(
            f"| {row['trace']} | {row['threshold_tokens']:,.0f} | {row['split']} | {row['lambda_max_req_per_s']:.2f} "
            f"| {promised:.2f} / {found:.2f} | {promised / found - 1:+.1%}{mark} |"
        )
    return "\n".join(lines)


def text_of(rows: Sequence[dict[str, Any]]) -> str:
    """Plan / simulated; what does not agree is marked."""
    lines = [
        "| trace | load | t | split | on decode nodes, % | offloaded, % | egress, Gbit/s | TTFT mean, s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = [
            " / ".join(form.format(value * scale) for value in row[key])
            + ("" if row["agrees"].get(key, True) else " (!)")
            for key, form, scale in COLUMNS
        ]
        threshold = f"{row['threshold_tokens']:,.0f}"
        lines.append(f"| {row['trace']} | {row['load']:.0%} | {threshold} | {row['split']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    arguments.add_argument("files", type=Path, nargs="+", metavar="FILE", help="traces, or sessions of agents")
    arguments.add_argument("--requests", type=int, default=4_000, help="of each file (default: %(default)s)")
    arguments.add_argument("--half", type=int, choices=(1, 2), default=1, help="the first so many, or those after them")
    arguments.add_argument("--seed", type=int, default=0, help="by which ticks of a trace are spread")
    arguments.add_argument("--processes", type=int, default=1)
    arguments.add_argument("--json", action="store_true")
    args = arguments.parse_args()
    site = load_site(CONFIG)
    with ProcessPoolExecutor(args.processes) as pool:
        traces = pool.map(partial(requests_of, count=args.requests, half=args.half), args.files)
        known = list(traces)
        rows = [row for found in pool.map(partial(rows_of, site, args.seed), known) for row in found]
        promises = list(pool.map(partial(promise_of, site, args.seed), known))
    print(json.dumps({"loads": rows, "promises": promises}, indent=2) if args.json else text_of(rows))
    if not args.json:
        print(f"\n{promises_text(promises)}")


if __name__ == "__main__":
    main()
