"""`prfaas-plan`: plan capacity, judge plans by simulation, compare with what runs. Read-only: applying a plan is not its job.

Results go to stdout, remarks and warnings to stderr. Exit codes: 0 done (diff: no change), 1 wrong input, 2 usage (diff: a
change), 3 infeasible.
"""

import argparse
import csv
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from planner.admission import AdmissionPolicy
from planner.compare import POLICIES, compare, contenders_of
from planner.controller import ControllerConfig, Rule
from planner.differences import compare_plans
from planner.errors import Infeasible, InputError, PlannerError
from planner.fitting import fit, fit_metrics, hits_of, workload_of
from planner.fleet import fleet_json, fleet_of, solve_fleet
from planner.placement import PLACERS
from planner.plan import Objective, Options, Plan, make_plan, robust_report, tool_version
from planner.profile import calibrate, dump_curve, load_profile
from planner.progress import busy
from planner.report import html_report
from planner.robust import Worst
from planner.saturation import parse_slo, saturate
from planner.search import TieBreak
from planner.simulator.outcome import over_seeds
from planner.site import Site, load_site
from planner.sweeps import Sweep, heat_map, whatif
from planner.text import outcome_text, plan_text, table
from planner.trials import Setting, Source, Trial, from_day, from_trace, from_workload, judged, scenario_of
from planner.views import ClusterKind
from planner.workload import Trace, read_trace

EXIT_INPUT, EXIT_INFEASIBLE = 1, 3


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code."""
    args = parser().parse_args(argv)
    try:
        return int(args.run(args) or 0)
    except Infeasible as exc:
        print(f"infeasible: {exc}", file=sys.stderr)
        return EXIT_INFEASIBLE
    except (PlannerError, OSError) as exc:
        print(f"error: {exc}", file=sys.stderr)
        return EXIT_INPUT
    except BrokenPipeError:
        return 0


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    top = argparse.ArgumentParser(prog="prfaas-plan", description="Capacity planning for PrfaaS-PD deployments.")
    top.add_argument("--version", action="version", version=f"prfaas-plan {tool_version()}")
    commands = top.add_subparsers(required=True, metavar="COMMAND")
    for name, text, arguments, run in COMMANDS:
        command = commands.add_parser(name, help=text, description=text)
        arguments(command)
        command.set_defaults(run=run)
    return top


def _site_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("-c", "--config", type=Path, required=True, help="site file (TOML)")
    command.add_argument("-w", "--workload", type=Path, help="workload written by fit, instead of the site's own")
    command.add_argument("--deployment", help="a [deployments.NAME] of the site file")
    command.add_argument("--as-in-paper", action="store_true", help="T(E[L]) and a 100-token grid, as in the paper")
    command.add_argument("--extrapolate", action="store_true", help="allow lengths outside the profile")
    command.add_argument("--tie-break", choices=list(TieBreak), default=TieBreak.EGRESS, help="second goal of ties")
    command.add_argument("--json", action="store_true", help="JSON on stdout")


def _objective_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("--objective", choices=list(Objective), default=Objective.THROUGHPUT)
    command.add_argument("--rate", type=float, help="req/s that a cost plan must carry")


def _trial_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("--trace", type=Path, help="requests to replay; without it, Poisson arrivals of the workload")
    command.add_argument("--rate-scale", type=float, default=1.0, help="replay the trace this much faster")
    command.add_argument("--load", type=float, default=0.8, help="without a trace: share of the plan's Λ")
    command.add_argument("--requests", type=int, default=20_000, help="without a trace: how many; else at most")
    command.add_argument("--seed", type=int, default=0)
    command.add_argument("--seeds", type=int, default=1, help="how many seeds; results carry 95 %% intervals")
    command.add_argument("--placement", choices=list(PLACERS), default="kvcache_centric")
    command.add_argument("--admission", choices=list(AdmissionPolicy), default=AdmissionPolicy.ACCEPT_ALL)
    command.add_argument("--cache-gb", type=float, help="prefix cache per prefill node")
    command.add_argument("--eviction", default="lru", help="of the caches; default is what nodes run")
    command.add_argument("--fetch-gbps", type=float, help="prefix transfers inside a cluster")
    command.add_argument("--tail-share", type=float, default=1.0, help="KVCache that leaves after the prefill (1: all)")
    command.add_argument("--day", help="without a trace: loads per bin, as shares of Λ, e.g. 0.3,0.6,0.9,0.5")
    command.add_argument("--bin", type=float, default=3600.0, help="seconds per bin of --day")
    command.add_argument("--controller", choices=list(Rule), help="let the long-timescale controller act")
    command.add_argument("--tick", type=float, default=60.0, help="seconds between the controller's decisions")
    command.add_argument("--ttft", type=float, help="TTFT that counts as good, seconds")
    command.add_argument("--tbt", type=float, help="TBT that counts as good, seconds")
    command.add_argument("--link-trace", type=Path, help="CSV of time_s,capacity_gbps")
    command.add_argument("--no-cache-in-plan", action="store_true", help="plan for whole prompts, not uncached tails")


def _options(args: argparse.Namespace) -> Options:
    options = Options.as_in_paper() if args.as_in_paper else Options()
    return replace(
        options,
        extrapolate=args.extrapolate,
        tie_break=TieBreak(args.tie_break),
        objective=Objective(getattr(args, "objective", Objective.THROUGHPUT)),
        rate_req_per_s=getattr(args, "rate", None),
    )


def _remark(text: str) -> None:
    print(text, file=sys.stderr)


def _emit(value: Any) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False, default=_number))


def _number(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{value!r} has no JSON form")


def _write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False, default=_number) + "\n")


def _warn(plan: Plan) -> None:
    for warning in plan.warnings:
        _remark(f"warning: {warning}")


# solve


def _solve_arguments(command: argparse.ArgumentParser) -> None:
    _site_arguments(command)
    _objective_arguments(command)
    command.add_argument("-o", "--output", type=Path, help="plan file to write")
    command.add_argument("--robust", action="store_true", help="best worst case over profile, links and slices")
    command.add_argument("--spread", type=float, default=0.1, help="how far profiles may be off (robust)")
    command.add_argument("--worst", choices=list(Worst), default=Worst.RATIO, help="what is best in the worst case")
    command.add_argument("--bins", type=int, default=60, help="length bins of a plan for several clusters")


def _solve(args: argparse.Namespace) -> int:
    site = load_site(args.config, args.workload)
    if len(site.of_kind(ClusterKind.PD)) > 1 or len(site.of_kind(ClusterKind.PRFAAS)) > 1:
        return _solve_fleet(args, site)
    options = _options(args)
    if args.robust:
        return _solve_robust(args, site, options)
    with busy("solving"):
        plan = make_plan(site, options, args.deployment)
    if args.output:
        _write(args.output, plan.to_json())
    if args.json:
        _emit(plan.to_json())
        return 0
    baseline = None
    if args.deployment is None and "homogeneous" in site.deployments:
        baseline = make_plan(site, replace(options, objective=Objective.THROUGHPUT), "homogeneous")
    print(plan_text(plan, baseline))
    _warn(plan)
    return 0


def _solve_fleet(args: argparse.Namespace, site: Site) -> int:
    if args.as_in_paper or args.objective != Objective.THROUGHPUT or args.robust:
        raise InputError("several clusters: only --objective throughput with E[T(L)] is there; drop the other options")
    fleet = fleet_of(site, args.bins, args.extrapolate)
    result = fleet_json(site, fleet, solve_fleet(fleet))
    if args.output:
        _write(args.output, result)
    if args.json:
        _emit(result)
        return 0
    print(f"Plan  site={site.name}  Λmax={result['lambda_max_req_per_s']:.3f} req/s  ({result['length_bins']} bins)")
    columns = ["name", "num_prefill", "num_decode", "threshold_tokens", "decoded_fraction", "offload_fraction"]
    print(table(result["pd_clusters"], columns))
    print(table(result["prfaas_clusters"], ["name", "instances", "utilisation"]))
    print(table(result["links"], ["source", "destination", "egress_gbps", "capacity_gbps"]))
    return 0


def _solve_robust(args: argparse.Namespace, site: Site, options: Options) -> int:
    result = robust_report(site, options, args.spread, Worst(args.worst), args.deployment)
    if args.output:
        _write(args.output, result)
    if args.json:
        _emit(result)
        return 0
    print(
        f"Robust plan: t={result['threshold_tokens']:.0f}, Np/Nd={result['num_prefill']}/{result['num_decode']}, "
        f"Λ={result['lambda_max_req_per_s']:.3f}; over {result['scenarios']} scenarios at least "
        f"{result['worst_ratio']:.1%} of the optimum and {result['worst_lambda_req_per_s']:.3f} req/s "
        f"(nominal plan: {result['plan_worst_ratio']:.1%}, {result['plan_worst_lambda_req_per_s']:.3f})"
    )
    print(table(result["regret"][:30], ["scenario", "optimum", "robust", "plan"]))
    return 0


# simulate


def _simulate_arguments(command: argparse.ArgumentParser) -> None:
    _site_arguments(command)
    command.add_argument("--plan", type=Path, help="plan file; without it the site is solved first")
    _trial_arguments(command)


def _trial(args: argparse.Namespace) -> Trial:
    controller = ControllerConfig(rule=Rule(args.controller), tick_s=args.tick) if args.controller else None
    return Trial(
        placer=args.placement,
        admission=AdmissionPolicy(args.admission),
        cache_gb=args.cache_gb,
        fetch_gbps=args.fetch_gbps,
        eviction=args.eviction,
        tail_share=args.tail_share,
        controller=controller,
        capacity=_link_trace(args.link_trace) if args.link_trace else None,
        ttft_s=args.ttft,
        tbt_s=args.tbt,
    )


def _link_trace(path: Path) -> list[tuple[float, float]]:
    try:
        with path.open() as text:
            return [(float(row["time_s"]), float(row["capacity_gbps"]) * 1.25e8) for row in csv.DictReader(text)]
    except (KeyError, ValueError) as exc:
        raise InputError(f"link trace {path}: needs columns time_s and capacity_gbps ({exc!r})") from exc


def _trace(args: argparse.Namespace) -> Trace | None:
    return read_trace(args.trace).head(args.requests if args.requests != 20_000 else 10**9) if args.trace else None


def _site_for_trial(args: argparse.Namespace, trace: Trace | None) -> Site:
    """The site; with a trace, solved for what the trace leaves uncached."""
    site = load_site(args.config, args.workload)
    if trace is None or args.workload:
        return site
    hits = hits_of(trace) if not args.no_cache_in_plan else np.zeros(len(trace))
    return replace(site, workload=workload_of(trace, hits))


def _settle(args: argparse.Namespace, site: Site, options: Options) -> tuple[Site, Setting, float]:
    """Site as deployed, setting, and its Λ."""
    if args.plan:
        table = json.loads(args.plan.read_text())
        setting = Setting(
            table["threshold_tokens"], table.get("tie_share", 0.0), table["num_prefill"], table["num_decode"]
        )
        return site, setting, table["lambda_max_req_per_s"]
    plan = make_plan(site, options, args.deployment)
    deployed = site.deployed(args.deployment)[0] if args.deployment else site
    return deployed, Setting.of(plan), plan.lambda_max


def _numbers(name: str, text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError as exc:
        raise InputError(f"{name}={text!r}: give numbers with commas between") from exc


def _source(args: argparse.Namespace, site: Site, trace: Trace | None, limit: float) -> Source:
    if trace is not None:
        return from_trace(trace, args.rate_scale)
    if args.day:
        return from_day(site, [share * limit for share in _numbers("day", args.day)], args.bin)
    return from_workload(site, args.load * limit, args.requests)


def _simulate(args: argparse.Namespace) -> int:
    trace = _trace(args)
    site = _site_for_trial(args, trace)
    deployed, setting, limit = _settle(args, site, _options(args))
    scenario = scenario_of(deployed, setting, _trial(args))
    seeds = range(args.seed, args.seed + args.seeds)
    report = judged(scenario, _source(args, deployed, trace, limit), seeds)
    report["setting"] = {
        "threshold_tokens": setting.threshold_tokens,
        "num_prefill": setting.num_prefill,
        "num_decode": setting.num_decode,
    }
    if args.json:
        _emit(report)
        return 0
    name = trace.name if trace is not None else f"{site.workload.name} at {args.load:.0%} of Λ={limit:.3f}"
    print(
        outcome_text(
            report,
            f"{name}: t={setting.threshold_tokens:.0f}, Np/Nd={setting.num_prefill}/{setting.num_decode}, "
            f"{args.placement}, admission {args.admission}, seeds {args.seed}–{args.seed + args.seeds - 1}",
        )
    )
    if "timeline" in report:
        print(table(_turning_points(report["timeline"]), ["at_s", "num_prefill", "num_decode", "threshold_tokens"]))
    return 0


def _turning_points(timeline: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Ticks at which the split differed from the one before; at most 20."""
    changed = [
        row for before, row in zip([None, *timeline], timeline, strict=False)
        if before is None or (before["num_prefill"], before["num_decode"]) != (row["num_prefill"], row["num_decode"])
    ]  # fmt: skip
    return changed[:20]


# fit


def _fit_arguments(command: argparse.ArgumentParser) -> None:
    source = command.add_mutually_exclusive_group(required=True)
    source.add_argument("--trace", type=Path, help="Mooncake, Qwen or Azure trace, or a gateway's request log")
    source.add_argument("--metrics", type=Path, help="a gateway's /metrics, saved as text")
    command.add_argument("--span", type=float, help="seconds that the metrics cover, for the rate")
    command.add_argument("--tokens", choices=["incremental", "total"], default="incremental")
    command.add_argument("--cache-gb", type=float, help="a finite prefix cache (needs -c); else it never evicts")
    command.add_argument("-c", "--config", type=Path, help="site file, for S_kv")
    command.add_argument("-o", "--output", type=Path, help="workload file to write")
    command.add_argument("--json", action="store_true")


def _fit(args: argparse.Namespace) -> int:
    if args.metrics:
        return _fit_from_metrics(args)
    trace = read_trace(args.trace)
    kv = load_site(args.config).profile.kv_size() if args.config else None
    hits = np.zeros(len(trace)) if args.tokens == "total" else hits_of(trace, kv, args.cache_gb)
    result = fit(trace, hits)
    if args.output:
        _write(args.output, result)
    if args.json:
        _emit(result)
        return 0
    rows = [{"": name.split("_")[0], **result[name]} for name in ("prompt_tokens", "uncached_tokens", "output_tokens")]
    print(f"{trace.name}: {len(trace)} requests over {trace.span_s:.0f} s, hit ratio {result['hit_ratio']:.2%}")
    print(table(rows, ["", "mean", "p50", "p90", "p99", "max"]))
    shares = [{"threshold": t, **share} for t, share in result["share_above_threshold"].items()]
    print(table(shares, ["threshold", "total", "uncached"]))
    bursts = ", ".join(f"{window} {index:.2f}" for window, index in result["burst_index"].items() if index)
    print(f"burst index (variance/mean of arrivals; Poisson is 1): {bursts}")
    return 0


def _fit_from_metrics(args: argparse.Namespace) -> int:
    result = fit_metrics(args.metrics.read_text(), args.span)
    if args.output:
        _write(args.output, result)
    if args.json or not args.output:
        _emit(result)
    return 0


# profile


def _profile_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("action", choices=["show", "check", "calibrate", "import-aic"])
    command.add_argument("profile", type=Path, help="profile file (JSON)")
    command.add_argument("--hardware", help="which prefill curve (calibrate, import-aic)")
    command.add_argument("--points", type=Path, help="CSV of tokens,seconds measured on it (check, calibrate)")
    command.add_argument("--model-path", help="model name or directory for aiconfigurator (import-aic)")
    command.add_argument("--system", default="h200_sxm", help="aiconfigurator's name of the hardware (import-aic)")
    command.add_argument("-o", "--output", type=Path, help="profile file to write (calibrate, import-aic)")
    command.add_argument("--json", action="store_true")


def _points(path: Path | None) -> list[tuple[float, float]]:
    if path is None:
        raise InputError("points: missing; give --points CSV with columns tokens,seconds")
    try:
        with path.open() as text:
            return [(float(row["tokens"]), float(row["seconds"])) for row in csv.DictReader(text)]
    except (KeyError, ValueError) as exc:
        raise InputError(f"points {path}: needs columns tokens and seconds ({exc!r})") from exc


def _profile(args: argparse.Namespace) -> int:
    actions = {
        "show": _profile_show, "check": _profile_check, "calibrate": _profile_calibrate, "import-aic": _profile_import
    }  # fmt: skip
    return actions[args.action](args)


def _profile_show(args: argparse.Namespace) -> int:
    profile = load_profile(args.profile)
    quoted = dict(profile.kv_throughput_gbps)
    rows: list[dict[str, Any]] = []
    for hardware, curve in profile.prefill.items():
        for tokens in (1_000, 8_000, 32_000, 128_000):
            size = profile.kv(tokens) if profile.kv else None
            rows.append(
                {
                    "hardware": hardware,
                    "tokens": tokens,
                    "T_prefill_s": curve(tokens),
                    "S_kv_MiB": size / 2**20 if size else None,
                    "kv_throughput_gbps": size * 8e-9 / curve(tokens) if size else None,
                    "quoted_gbps": quoted.get(tokens) if hardware == profile.kv_throughput_hardware else None,
                }
            )
    provenance = {f"T_prefill {hw}": c.provenance for hw, c in profile.prefill.items()}
    provenance |= {f"decode {hw}": d.provenance for hw, d in profile.decode.items()}
    if profile.kv:
        provenance["S_kv"] = profile.kv.provenance
    if args.json:
        _emit({"model": profile.model, "rows": rows, "quoted_gbps": quoted, "provenance": provenance})
        return 0
    print(f"{profile.model}\n{profile.notes}".rstrip())
    if rows:
        columns = ["hardware", "tokens", "T_prefill_s", "S_kv_MiB", "kv_throughput_gbps", "quoted_gbps"]
        print(table(rows, columns))
    else:
        print(table([{"tokens": n, "quoted_gbps": g} for n, g in quoted.items()], ["tokens", "quoted_gbps"]))
    for what, text in provenance.items():
        print(f"  {what}: {text}")
    return 0


def _residuals(points: Sequence[tuple[float, float]], curve: Callable[[float], float]) -> list[dict[str, float]]:
    return [
        {"tokens": n, "measured_s": s, "profile_s": curve(n), "error_s": curve(n) - s, "error": curve(n) / s - 1}
        for n, s in points
    ]


def _profile_check(args: argparse.Namespace) -> int:
    profile = load_profile(args.profile)
    if args.points is None:
        print(f"{profile.model}: readable; prefill {', '.join(profile.prefill) or 'none'}")
        return 0
    rows = _residuals(_points(args.points), profile.prefill_on(args.hardware or next(iter(profile.prefill))))
    _emit(rows) if args.json else print(table(rows, list(rows[0])))
    return 0


def _profile_calibrate(args: argparse.Namespace) -> int:
    profile = load_profile(args.profile)
    hardware = args.hardware or next(iter(profile.prefill))
    points = _points(args.points)
    result = calibrate(profile.prefill_on(hardware), points)
    rows = _residuals(points, result.curve)
    if args.output:
        raw = json.loads(args.profile.read_text())
        raw["prefill"][hardware] = dump_curve(result.curve)
        _write(args.output, raw)
    if args.json:
        _emit({"hardware": hardware, "curve": dump_curve(result.curve), "residuals": rows})
        return 0
    print(f"{hardware}: overhead_s={result.curve.overhead_s:.4f} scale={result.curve.scale:.4f}")
    print(table(rows, list(rows[0])))
    return 0


def _profile_import(args: argparse.Namespace) -> int:
    from planner.aiconfigurator import import_curve  # an optional tool of 850 MB

    raw = json.loads(args.profile.read_text())
    curve = import_curve(args.model_path, args.system)
    hardware = args.hardware or args.system
    raw.setdefault("prefill", {})[hardware] = dump_curve(curve)
    if args.output:
        _write(args.output, raw)
    _emit(dump_curve(curve))
    return 0


# diff


def _diff_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("plan", type=Path, help="plan file")
    command.add_argument("--current", type=Path, required=True, help="JSON of what runs (the same keys)")
    command.add_argument("--json", action="store_true")


def _diff(args: argparse.Namespace) -> int:
    try:
        plan, current = json.loads(args.plan.read_text()), json.loads(args.current.read_text())
        found = compare_plans(plan, current)
    except (KeyError, ValueError) as exc:
        raise InputError(f"diff {args.plan} {args.current}: {exc!r}") from exc
    if args.json:
        _emit(
            {
                "verdict": found.verdict.name.lower(),
                "changes": {c.name: {"current": c.current, "planned": c.planned} for c in found.changes},
                "obstacles": list(found.obstacles),
            }
        )
        return int(found.verdict)
    for change in found.changes:
        print(f"{change.name:<20} {change.current!s:>12} -> {change.planned}")
    for obstacle in found.obstacles:
        print(f"infeasible: {obstacle}")
    if not found.changes and not found.obstacles:
        print("no change")
    return int(found.verdict)


# whatif


def _whatif_arguments(command: argparse.ArgumentParser) -> None:
    _site_arguments(command)
    command.add_argument("--sweep", action="append", default=[], help="knob=low:high[:steps] or knob=a,b,c; repeatable")
    command.add_argument("--heat-map", action="store_true", help="Λ over threshold and N_p instead")
    command.add_argument("-o", "--output", type=Path, help="CSV file")


def _whatif(args: argparse.Namespace) -> int:
    site = load_site(args.config, args.workload)
    if args.deployment:
        site = site.deployed(args.deployment)[0]
    if args.heat_map:
        grid = heat_map(site, _options(args))
        rows = [
            {"threshold_tokens": t, "num_prefill": split, "lambda_max_req_per_s": line[at]}
            for split, line in zip(grid["num_prefill"], grid["rates"], strict=True)
            for at, t in enumerate(grid["thresholds_tokens"])
        ]
    elif args.sweep:
        rows = whatif(site, _options(args), [Sweep.parse(text) for text in args.sweep])
    else:
        raise InputError("whatif: give --sweep knob=low:high or --heat-map")
    if args.json:
        _emit(rows)
        return 0
    if args.output:
        with args.output.open("w", newline="") as file:
            _csv(file, rows)
        _remark(f"{len(rows)} rows to {args.output}")
        return 0
    _csv(sys.stdout, rows)
    return 0


def _csv(file: Any, rows: Sequence[dict[str, Any]]) -> None:
    writer = csv.DictWriter(file, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)


# saturate


def _saturate_arguments(command: argparse.ArgumentParser) -> None:
    _simulate_arguments(command)
    command.add_argument("--slo", default="ttft_p90<5,tbt_p99<0.1", help="clauses on the simulation's keys")
    command.add_argument("--tolerance", type=float, default=0.02, help="where bisection stops, relative")


def _saturate(args: argparse.Namespace) -> int:
    trace = _trace(args)
    site = _site_for_trial(args, trace)
    deployed, setting, limit = _settle(args, site, _options(args))
    scenario = scenario_of(deployed, setting, _trial(args))
    seeds = range(args.seed, args.seed + args.seeds)

    def report_at(rate: float) -> dict[str, Any]:
        source = from_workload(deployed, rate, args.requests)
        if trace is not None:
            source = from_trace(trace, rate * trace.span_s / len(trace))
        _remark(f"trying {rate:.3f} req/s")
        return judged(scenario, source, seeds)

    found = saturate(report_at, parse_slo(args.slo), upper=1.5 * limit, tolerance=args.tolerance)
    if args.json:
        _emit(
            {
                "rate_req_per_s": found.rate_req_per_s,
                "broken_at_req_per_s": found.broken_at_req_per_s,
                "broken": list(found.broken),
                "lambda_max_req_per_s": limit,
                "steps": found.steps,
                "report": found.report,
            }
        )
        return 0
    print(
        f"{found.rate_req_per_s:.3f} req/s meets {args.slo} ({found.rate_req_per_s / limit:.0%} of Λ={limit:.3f}); "
        f"{found.broken_at_req_per_s:.3f} breaks {', '.join(found.broken) or 'nothing'}"
    )
    print(outcome_text(found.report, "at that rate:"))
    return 0


# compare


def _compare_arguments(command: argparse.ArgumentParser) -> None:
    _site_arguments(command)
    command.add_argument("--plans", type=Path, nargs="*", default=[], help="plan files to compare")
    command.add_argument("--deployments", nargs="*", default=[], help="deployments of the site file to compare")
    command.add_argument("--policies", nargs="*", default=[], help=f"of {', '.join(POLICIES)}")
    _trial_arguments(command)
    command.add_argument("--arrivals", type=float, help="req/s for all; default: 80 %% of the least Λ")


def _compare(args: argparse.Namespace) -> int:
    trace = _trace(args)
    site = _site_for_trial(args, trace)
    usual = [] if args.plans or args.deployments else ["homogeneous", "naive", "prfaas"]
    contenders = contenders_of(
        site,
        _options(args),
        _trial(args),
        policies=args.policies or usual,
        plans=args.plans,
        deployments=args.deployments,
        base=args.deployment,
    )
    least = min(contender.lambda_max for contender in contenders)
    source: Source = (
        from_trace(trace, args.rate_scale)
        if trace is not None
        else from_workload(site, args.arrivals or args.load * least, args.requests)
    )
    rows = compare(contenders, source, range(args.seed, args.seed + args.seeds))
    if args.json:
        _emit(rows)
        return 0
    columns = [
        "name", "lambda_max", "ttft_mean_s", "ttft_p90_s", "ttft_p99_s", "tbt_p99_s", "goodput_req_per_s", "rejected",
        "hit_ratio", "egress_mean_gbps",
    ]  # fmt: skip
    print(table(rows, columns))
    return 0


# report


def _report_arguments(command: argparse.ArgumentParser) -> None:
    _site_arguments(command)
    _objective_arguments(command)
    _trial_arguments(command)
    command.add_argument("-o", "--output", type=Path, required=True, help="HTML file to write")


def _report(args: argparse.Namespace) -> int:
    site = load_site(args.config, args.workload)
    options = _options(args)
    plan = make_plan(site, options, args.deployment)
    usual = [name for name in ("homogeneous", "naive") if name in site.deployments]
    contenders = contenders_of(site, options, _trial(args), policies=[*usual, "prfaas"])
    least = min(contender.lambda_max for contender in contenders)
    source = from_workload(site, args.load * least, args.requests)
    seeds = range(args.seed, args.seed + args.seeds)
    outcomes = {contender.name: contender.run(source, seeds) for contender in contenders}
    args.output.write_text(html_report(site, options, plan, outcomes))
    _remark(f"wrote {args.output}")
    summary = {name: over_seeds([outcome.report() for outcome in runs]) for name, runs in outcomes.items()}
    if args.json:
        _emit({"plan": plan.to_json(), "simulated": summary})
    return 0


COMMANDS = (
    ("solve", "threshold and split of highest rate (or least cost, or within an SLO)", _solve_arguments, _solve),
    ("simulate", "run a plan in virtual time", _simulate_arguments, _simulate),
    ("fit", "a workload from a trace", _fit_arguments, _fit),
    ("profile", "show, check, calibrate or import profiles", _profile_arguments, _profile),
    ("diff", "plan against what runs: exit 0 same, 2 different, 3 infeasible", _diff_arguments, _diff),
    ("whatif", "solve over ranges of inputs", _whatif_arguments, _whatif),
    ("saturate", "largest simulated rate that meets an SLO", _saturate_arguments, _saturate),
    ("compare", "plans or policies side by side, simulated", _compare_arguments, _compare),
    ("report", "one self-contained HTML page", _report_arguments, _report),
)
