"""How arguments become something to simulate: the site, the plan on trial, the requests."""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from membership.lines import BYTES_PER_S_PER_GBPS
from planner.commands.argument_types import MOST
from planner.commands.capacity.options import options_of, site_of
from planner.commands.rendering.output import remark
from planner.commands.rendering.progress import busy, watched
from planner.decisions.admission.overload import AdmissionPolicy
from planner.decisions.defaults import TRIAL_REQUESTS
from planner.decisions.views import ClusterKind
from planner.errors import InputError
from planner.model.fitting import workload_of
from planner.model.reading import GBPS, SECONDS, SHARE, Range, named, read_columns
from planner.model.sessions import at_factor
from planner.model.site import Site
from planner.model.traces import read_requests
from planner.model.workload import Trace
from planner.simulator.policies import Estimates
from planner.simulator.scenario import FlipTimes, Outage, Scenario
from planner.simulator.trials.hits import hits_of, pd_prefixes
from planner.simulator.trials.trial import (
    DEPLOYED_TRIAL,
    Source,
    Trial,
    TrialSetting,
    from_day,
    from_trace,
    from_workload,
    judged,
    read_plan,
)
from planner.solve.control.controller import ControllerConfig
from planner.solve.fleet import fleet_json, fleet_of, solve_fleet
from planner.solve.goals import SplitRule
from planner.solve.plan import outline

LOAD: Final = Range(0, 1e3)
UNTIL: Final = Range(0, float("inf"), "seconds")  # a link may never come back


def trial_of(args: argparse.Namespace) -> Trial:
    controller = ControllerConfig(rule=SplitRule(args.controller), tick_s=args.tick) if args.controller else None
    base = Trial() if args.ideal else DEPLOYED_TRIAL
    asked = {
        "cache_gb": args.cache_gb,
        "fetch_gbps": args.fetch_gbps,
        "eviction": args.eviction,
        "tail_share": args.tail_share,
        "increment_tokens": args.increment,
    }
    return replace(
        base,
        **{name: value for name, value in asked.items() if value is not None},
        placer=args.placement,
        admission=AdmissionPolicy(args.admission),
        cross_cluster_cache=args.cross_cluster_cache,
        estimates=Estimates(args.estimates),
        controller=controller,
        capacity=_link_trace(args.link_trace) if args.link_trace else None,
        outages=outages_of(args),
        flips=_flips(args),
        ttft_s=args.ttft,
        tbt_s=args.tbt,
    )


def outages_of(args: argparse.Namespace) -> tuple[Outage, ...]:
    """When links are down or thin."""
    return (
        *(_outage("link-down", text, 2) for text in args.link_down),
        *(_outage("link-thin", text, 3) for text in args.link_thin),
    )


def _link_trace(path: Path) -> list[tuple[float, float]]:
    with named(f"link trace {path}"):
        rows = read_columns(path, {"time_s": SECONDS, "capacity_gbps": GBPS})
    return [(time_s, gbps * BYTES_PER_S_PER_GBPS) for time_s, gbps in rows]


def _flips(args: argparse.Namespace) -> FlipTimes:
    measured = FlipTimes(failing=args.flip_failing)
    return measured if args.flip_s is None else replace(measured, median_s=args.flip_s, p90_s=args.flip_s)


def _outage(option: str, text: str, numbers: int) -> Outage:
    """That many numbers (from, until, and the share that is left), and maybe a link's ends, with colons between."""
    parts = text.split(":")
    if len(parts) not in (numbers, numbers + 2):
        form = ("FROM:UNTIL:SHARE" if numbers > 2 else "FROM:UNTIL") + "[:SOURCE:DESTINATION]"
        raise InputError(f"--{option} {text}: must have the form {form}, with times in seconds")
    allowed = (SECONDS, UNTIL, SHARE)[:numbers]
    with named(f"{option}={text!r}"):
        from_s, until_s, *share = (
            kind.of_text(name, part)
            for name, kind, part in zip(("from", "until", "share"), allowed, parts, strict=False)
        )
    source, destination = parts[numbers:] or ("", "")
    return Outage(
        from_s=from_s, until_s=until_s, share=share[0] if share else 0.0, source=source, destination=destination
    )  # fmt: skip


def trace_of(args: argparse.Namespace) -> Trace | None:
    """The trace, or as much of it as was asked for."""
    if args.trace is None:
        return None
    trace = read_requests(args.trace, args.begin_within)
    return trace if args.requests is None else trace.head(args.requests)


def site_for_trial(args: argparse.Namespace, trace: Trace | None) -> Site:
    """The site; with a trace, solved for what the trace leaves uncached; without, for what can be simulated of lengths alone."""
    site = site_of(args)
    if trace is None:
        return _of_lengths(site)
    if args.workload:
        return site
    if args.no_cache_in_plan:
        return replace(site, workload=workload_of(trace, None))
    if args.ideal:
        return replace(site, workload=workload_of(trace, hits_of(trace)))
    # The sooner a turn comes, the fewer answers it finds.
    trace = at_factor(trace, getattr(args, "rate_scale", 1.0), args.seed)
    found = pd_prefixes(trace, site, trial_of(args).increment_tokens, args.cache_gb)
    return replace(site, workload=workload_of(trace, found))


def _of_lengths(site: Site) -> Site:
    workload = site.workload
    if named := [target.name for target in site.slo.targets if target.category is not None]:
        remark(
            f"requests are made up of lengths and are of no category: targets {', '.join(named)} are left out; see --trace"
        )
        site = replace(site, slo=replace(site.slo, targets=tuple(t for t in site.slo.targets if t.category is None)))
    if not workload.lengths.held_share:
        return site
    remark(
        f"workload {workload.name}: requests are made up of its lengths, without what is cached before them, so decode nodes "
        "compute none, in the plan neither; --trace simulates them"
    )
    return replace(site, workload=replace(workload, lengths=workload.lengths.alone()))


def settle(args: argparse.Namespace, site: Site) -> tuple[Site, TrialSetting, float]:
    """Site as deployed, setting, and its Λ."""
    if args.plan:
        return site, *read_plan(args.plan)
    if len(site.of_kind(ClusterKind.PD)) > 1 or len(site.of_kind(ClusterKind.PRFAAS)) > 1:
        return _settle_fleet(args, site)
    plan = outline(site, options_of(args), args.deployment)
    deployed = site.deployed(args.deployment)[0] if args.deployment else site
    return deployed, TrialSetting.of(plan), plan.lambda_max


def _settle_fleet(args: argparse.Namespace, site: Site) -> tuple[Site, TrialSetting, float]:
    if args.deployment or args.as_in_paper:
        raise InputError("several clusters: --deployment and --as-in-paper are not supported")
    fleet = fleet_of(site, extrapolate=args.extrapolate, survives_cold=not args.warm_caches)
    table = fleet_json(site, fleet, solve_fleet(fleet, watched))
    return site, TrialSetting.of_fleet(table), table["one_threshold"]["lambda_max_req_per_s"]


def source_of(args: argparse.Namespace, site: Site, trace: Trace | None, limit: float) -> Source:
    return disturbed(args, _source_of(args, site, trace, limit))


def disturbed(args: argparse.Namespace, source: Source) -> Source:
    """The same requests; raises InputError for an outage that would begin after the last of them."""
    outages = outages_of(args)

    def checked(seed: int) -> Trace:
        trace = source(seed)
        last_s = float(trace.arrival_s[-1]) if len(trace) else 0.0
        for outage in outages:
            if outage.from_s > last_s:
                raise InputError(
                    f"link-down or link-thin from {outage.from_s:g} s: the last request comes at {last_s:.6g} s; "
                    "let it begin earlier, or send more requests"
                )
        return trace

    return checked if outages else source


def _source_of(args: argparse.Namespace, site: Site, trace: Trace | None, limit: float) -> Source:
    if trace is not None:
        return from_trace(trace, args.rate_scale)
    if args.day:
        return from_day(site, [share * limit for share in _shares(args.day, limit * args.bin)], args.bin)
    return from_workload(site, args.load * limit, args.requests or TRIAL_REQUESTS)


def _shares(text: str, most_per_bin: float) -> list[float]:
    """The loads of --day, as shares of Λ, which sends `most_per_bin` requests in one bin."""
    with named(f"day={text!r}"):
        shares = [LOAD.of_text("load", part) for part in text.split(",")]
    if not sum(shares) * most_per_bin <= MOST:
        raise InputError(f"day={text!r}: about {sum(shares) * most_per_bin:.3g} requests; at most {MOST} are simulated")
    if not sum(shares):
        raise InputError(f"day={text!r}: at least one load must be above 0")
    return shares


def seeds_of(args: argparse.Namespace) -> Sequence[int]:
    return range(args.seed, args.seed + args.seeds)


def judged_watched(scenario: Scenario, source: Source, seeds: Sequence[int], processes: int = 1) -> dict[str, Any]:
    with busy("simulating"):
        return judged(scenario, source, seeds, processes)
