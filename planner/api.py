"""The planner in Python: `from planner import api`.

    site = api.fit(api.site("configs/case_study.toml"), "day.jsonl")
    plan = api.solve(site)
    run = api.simulate(site, plan, "day.jsonl")
    api.frame(run), api.plot(run)

Each function does what the command of its name does without flags, and raises the same errors (`PlannerError`). `rows`
needs nothing, `frame` needs pandas or polars, `plot` matplotlib, `buy` scipy: each is loaded when it is first asked for.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import numpy as np

from planner.decisions.defaults import DEPLOYED, TRIAL_LOAD, TRIAL_REQUESTS
from planner.errors import InputError, MissingExtra
from planner.model.fitting import workload_of
from planner.model.market import Market, load_market
from planner.model.site import Site, load_site
from planner.model.traces import read_requests
from planner.model.workload import Trace
from planner.simulator.outcome import SimulationOutcome
from planner.simulator.trials.hits import pd_prefixes
from planner.simulator.trials.rehearsal import TraceRehearsal
from planner.simulator.trials.trial import (
    DEPLOYED_TRIAL,
    Source,
    Trial,
    TrialSetting,
    from_trace,
    from_workload,
    run,
    scenario_of,
)
from planner.solve.buying.advice import Advice, advise
from planner.solve.goals import Objective
from planner.solve.plan import Plan, make_plan
from planner.solve.problem import SolveOptions

__all__ = ["Advised", "buy", "fit", "frame", "plot", "rows", "simulate", "site", "solve"]

FRAMES: Final = ("pandas", "polars")  # in the order in which they are looked for


@dataclass(frozen=True, slots=True)
class Advised:
    """What to buy, and the market that it is bought in."""

    market: Market
    advice: Advice


def site(path: str | Path, workload: str | Path | None = None) -> Site:
    """A site file, with its own workload or that of a file that `fit` wrote."""
    return load_site(Path(path), None if workload is None else Path(workload))


def fit(of: Site, trace: str | Path | Trace, *, requests: int | None = None, cache_gb: float | None = None) -> Site:
    """The site with the workload of a trace, or of its first requests: their lengths beside what its caches hold."""
    seen = _trace(trace, requests)
    return replace(of, workload=workload_of(seen, pd_prefixes(seen, of, DEPLOYED.increment_tokens, cache_gb)))


def solve(
    of: Site,
    *,
    objective: str = "throughput",
    rate_req_per_s: float | None = None,
    deployment: str | None = None,
    extrapolate: bool = False,
) -> Plan:
    """Threshold and split. `objective` is throughput, slo or cost."""
    options = SolveOptions(
        objective=Objective(objective), rate_req_per_s=rate_req_per_s, extrapolate=extrapolate
    )  # fmt: skip
    return make_plan(of, options, deployment, TraceRehearsal.of)


def simulate(
    of: Site,
    plan: Plan,
    trace: str | Path | Trace | None = None,
    *,
    requests: int | None = None,
    load: float = TRIAL_LOAD,
    seed: int = 0,
    trial: Trial = DEPLOYED_TRIAL,
) -> SimulationOutcome:
    """A plan in virtual time, under a trace, or under Poisson arrivals at a share of its Λ.

    Requests that arrive at random have the lengths of the site's workload, and nothing cached before them.
    """
    deployed = of.deployed(plan.deployment)[0] if plan.deployment in of.deployments else of
    lengths = of.workload.lengths
    of = replace(of, workload=replace(of.workload, lengths=lengths.alone() if lengths.held_share else lengths))
    source: Source = (
        from_workload(of, load * plan.lambda_max, requests or TRIAL_REQUESTS)
        if trace is None
        else from_trace(_trace(trace, requests))
    )
    return run(scenario_of(deployed, TrialSetting.of(plan), trial), source, [seed])[0]


def buy(of: Site, market: str | Path | Market, *, extrapolate: bool = False) -> Advised:
    """GPUs and lines, month by month, at least cost within the site's SLO."""
    offers = market if isinstance(market, Market) else load_market(Path(market))
    return Advised(offers, advise(of, offers, SolveOptions(extrapolate=extrapolate)))


def rows(of: Plan | SimulationOutcome | Advised) -> list[dict[str, Any]]:
    """A table with units in its names: a plan's stages, a simulation's requests, or what is there in each month."""
    match of:
        case Plan():
            return [{"stage": stage, "busy_at_lambda_max": busy} for stage, busy in of.utilisation.items()]
        case SimulationOutcome():
            return _requests(of)
        case Advised():
            return _months(of.advice)
    raise InputError(f"{type(of).__name__}: has no table; give a plan, a simulation or what to buy")


def frame(of: Plan | SimulationOutcome | Advised) -> Any:
    """`rows` as a pandas frame, or as one of polars where only that is installed."""
    for name in FRAMES:
        try:
            library = import_module(name)
        except ModuleNotFoundError:
            continue
        return library.DataFrame(rows(of))
    raise MissingExtra("frames need pandas or polars: pip install pandas; api.rows gives plain dictionaries")


def plot(of: Plan | SimulationOutcome | Advised) -> Any:
    """A figure of matplotlib: how busy stages are, how many requests have waited how long, or instances by month."""
    try:
        figure = import_module("matplotlib.figure").Figure(figsize=(7, 4), layout="constrained")
    except ModuleNotFoundError as exc:
        raise MissingExtra("plots need matplotlib: pip install 'prfaas[plots]'") from exc
    axes = figure.subplots()
    match of:
        case Plan():
            table = rows(of)
            axes.barh([row["stage"] for row in table], [row["busy_at_lambda_max"] for row in table])
            axes.set(xlim=(0, 1), xlabel="busy at Λmax", title=f"{of.site}: {of.lambda_max:.3f} req/s")
        case SimulationOutcome():
            waits = np.sort(of.ttft_s[~np.isnan(of.ttft_s)])
            axes.step(waits, np.arange(1, len(waits) + 1) / max(1, len(waits)), where="post")
            axes.set(xlabel="TTFT, s", ylabel="share of requests", ylim=(0, 1), title=f"{len(waits):,} requests")
        case Advised():
            table = rows(of)
            for name in ("num_prfaas", "num_prefill", "num_decode"):
                axes.step([row["month"] for row in table], [row[name] for row in table], where="mid", label=name)
            axes.set(xlabel="month", ylabel="instances", title=str(of.advice.best))
            axes.legend()
    return figure


def _trace(trace: str | Path | Trace, requests: int | None) -> Trace:
    whole = trace if isinstance(trace, Trace) else read_requests(Path(trace))
    return whole if requests is None else whole.head(requests)


def _requests(of: SimulationOutcome) -> list[dict[str, Any]]:
    columns: Mapping[str, Any] = {
        "arrival_s": of.arrival_s,
        "prompt_tokens": of.prompt_tokens,
        "cached_tokens": of.cached_tokens,
        "is_offloaded": of.remote > 0,
        "prefill_wait_s": of.prefill_wait_s,
        "ttft_s": of.ttft_s,
        "tbt_s": of.tbt_s,
        "e2e_s": of.e2e_s,
    }
    lists = [column.tolist() for column in columns.values()]
    return [dict(zip(columns, values, strict=True)) for values in zip(*lists, strict=True)]


def _months(advice: Advice) -> list[dict[str, Any]]:
    bought = advice.purchases
    return [
        {
            "month": month,
            "rate_req_per_s": rate,
            "num_prfaas": system.num_prfaas,
            "num_prefill": system.num_prefill,
            "num_decode": system.num_decode,
            "threshold_tokens": system.threshold_tokens,
            "line_gbps": system.line.gbps if system.line is not None else 0.0,
            "busiest": max(busy for _, busy in system.busy),
            "cash": cash,
        }
        for month, (rate, system, cash) in enumerate(zip(advice.rates, bought.systems, bought.cash, strict=True), 1)
    ]
