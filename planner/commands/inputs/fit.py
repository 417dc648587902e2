"""`prfaas-plan fit`: a workload from a trace, or from a gateway's metrics."""

import argparse
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from planner.commands.rendering.output import emit, write
from planner.commands.rendering.text import table
from planner.decisions.defaults import DEPLOYED
from planner.decisions.views import ClusterKind
from planner.model.demand.week import MEASURED_SHARE, load_not_exceeded, mean_load
from planner.model.fitting import FoundPrefixes, fit, fit_metrics
from planner.model.reading import named, read_text
from planner.model.site import Site, load_site
from planner.model.traces import read_requests
from planner.model.workload import Trace
from planner.simulator.trials.hits import hits_of, pd_prefixes

REUSE_TIMES: Final[Mapping[str, str]] = MappingProxyType({"reuse": "reuse_s", "life": "lifespan_s"})


def run(args: argparse.Namespace) -> int:
    if args.metrics:
        return _from_metrics(args)
    trace = read_requests(args.trace, args.begin_within)
    site = load_site(args.config) if args.config else None
    found = None if args.tokens == "total" else _found(trace, site, args.cache_gb)
    result = fit(trace, found)
    if site is not None and found is not None:
        pds = site.of_kind(ClusterKind.PD)
        result["caches_gb"] = {each.name: each.cache_gb if args.cache_gb is None else args.cache_gb for each in pds}
    if args.output:
        write(args.output, result)
    if args.json:
        emit(result)
        return 0
    rows = [{"": name.split("_")[0], **result[name]} for name in ("prompt_tokens", "uncached_tokens", "output_tokens")]
    known = "is not known" if result["hit_ratio"] is None else f"{result['hit_ratio']:.2%}"
    rate = f", {result['rate_req_per_s']:.3g} a second" if result["rate_req_per_s"] else ""
    print(f"{trace.name}: {len(trace)} requests over {trace.span_s:.0f} s{rate}; hit ratio {known}")
    print(table(rows, ["", "mean", "p50", "p90", "p99", "max"]))
    shares = [{"threshold": t, **share} for t, share in result["share_above_threshold"].items()]
    print(table(shares, ["threshold", "total", "uncached"]))
    bursts = ", ".join(f"{window} {index:.2f}" for window, index in result["burst_index"].items() if index)
    print(f"burst index (variance/mean of arrivals; Poisson is 1): {bursts}")
    print(_week_line(result["week_req_per_s"]))
    print("\n".join(_reuse_lines(result["block_reuse"])))
    return 0


def _week_line(week: Sequence[float]) -> str:
    """How loads differ from hour to hour."""
    if not week:
        return "shape of the week: not known of less than a day"
    within = load_not_exceeded(tuple(week), MEASURED_SHARE)
    return (
        f"{len(week)} hours: busiest hour {max(week):.3f} req/s, {mean_load(tuple(week)):.0%} of it in the mean, "
        f"{within:.0%} in the 95th percentile"
    )


def _reuse_lines(reuse: Mapping[str, Any] | None) -> list[str]:
    """When blocks are used again, by category."""
    if reuse is None:
        return ["reuse of blocks is not known: the trace names no blocks"]
    share = reuse["sampled_blocks_share"]
    of = "all blocks" if share == 1 else f"{share:.3g} of all blocks, sampled by hash"
    head = f"seconds between two uses of a block (reuse) and from its first to its last (life); {of}"
    rows = [
        {"category": row["category"], "requests": row["requests"], "reused": row["reused_share"]}
        | {f"{name} {at}": value for name in REUSE_TIMES for at, value in (row[REUSE_TIMES[name]] or {}).items()}
        for row in reuse["by_category"]
    ]
    columns = [
        "category",
        "requests",
        "reused",
        *(f"{name} {at}" for name in REUSE_TIMES for at in ("p50", "p90", "p99")),
    ]
    return [head, f"category: {reuse['categories_are']}", table(rows, columns)]


def _found(trace: Trace, site: Site | None, cache_gb: float | None) -> FoundPrefixes | None:
    if site is not None:
        return pd_prefixes(trace, site, DEPLOYED.increment_tokens, cache_gb)
    hits = hits_of(trace, None, cache_gb)
    return None if hits is None else FoundPrefixes.everywhere(trace, hits, DEPLOYED.increment_tokens)


def _from_metrics(args: argparse.Namespace) -> int:
    with named(f"metrics {args.metrics}"):
        text = read_text(args.metrics)
    result = fit_metrics(text, args.span)
    if args.output:
        write(args.output, result)
    if args.json or not args.output:
        emit(result)
    return 0
