"""Every argument of every command.

Apart from the commands themselves, so that `--help` loads no number crunching. What is refused here is wrong for every site.
"""

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

from planner.commands.argument_types import above_zero, at_least_one, not_negative, share, whole
from planner.commands.profile_arguments import to_profile
from planner.commands.service_arguments import as_json, to_apply, to_ask, to_compare, to_look_back, to_serve
from planner.decisions.admission.overload import AdmissionPolicy
from planner.decisions.defaults import DEPLOYED, TRIAL_LOAD, TRIAL_REQUESTS
from planner.decisions.routing.placement import PLACERS
from planner.simulator.policies import POLICIES, Estimates
from planner.solve.goals import Objective, SplitRule, TieBreak, Worst


@dataclass(frozen=True, slots=True)
class PlannerCommand:
    """One command: `module` below `planner.commands` has its `run(args)`, which returns the exit status.

    `help` says in a line what it does, `more` whatever a user has to know besides; `example` is a whole command line.
    """

    module: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    help: str
    example: str
    more: str = ""

    @property
    def description(self) -> str:
        return f"{self.help[0].upper()}{self.help[1:]}. {self.more}".strip()

    @property
    def epilog(self) -> str:
        return f"Example: {self.example}"


def _inputs(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "-c", "--config", type=Path, required=True, metavar="FILE.toml", help="site file: clusters, links, workload"
    )
    command.add_argument(
        "-w", "--workload", type=Path, metavar="FILE", help="workload file, as fit writes it (default: the site's own)"
    )
    command.add_argument(
        "--target", action="append", default=[], metavar="KEY=VALUE,…",
        help="a TTFT target of some requests, beside the site's: ttft_s, share (0.9), category, above_tokens, up_to_tokens; "
        "such as ttft_s=2,up_to_tokens=8000; may be repeated",
    )  # fmt: skip
    command.add_argument("--extrapolate", action="store_true", help="allow prompt lengths outside the profile")
    command.add_argument(
        "--warm-caches", action="store_true",
        help="count on what decode nodes hold; after a start with empty caches such a plan may stay overloaded",
    )  # fmt: skip


def _site(command: argparse.ArgumentParser) -> None:
    _inputs(command)
    command.add_argument("--deployment", metavar="NAME", help="use [deployments.NAME] of the site file")
    command.add_argument(
        "--as-in-paper",
        action="store_true",
        help="use T(E[L]) and thresholds in steps of 100 tokens, as the paper does",
    )
    command.add_argument(
        "--tie-break", choices=list(TieBreak), default=TieBreak.EGRESS,
        help="what to minimise among equally good plans (default: %(default)s)",
    )  # fmt: skip
    as_json(command)


def _objective(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--objective", choices=list(Objective), default=Objective.THROUGHPUT,
        help="what to optimise: the rate, the price at --rate, or the rate within the site's SLO (default: %(default)s)",
    )  # fmt: skip
    command.add_argument(
        "--rate", type=above_zero, metavar="REQ/S", help="requests per second that the plan must carry"
    )


def _trial(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--trace", type=Path, metavar="FILE", help="trace to replay (default: Poisson arrivals of the workload)"
    )
    command.add_argument(
        "--requests",
        type=at_least_one,
        metavar="N",
        help=f"replay the first N of the trace (default: all), or draw N arrivals (default: {TRIAL_REQUESTS})",
    )
    _begin_within(command)
    command.add_argument(
        "--seed", type=whole, default=0, metavar="N", help="seed of random arrivals (default: %(default)s)"
    )
    command.add_argument(
        "--seeds", type=at_least_one, default=1, metavar="N",
        help="simulate N seeds and print 95 %% confidence intervals (default: %(default)s)",
    )  # fmt: skip
    command.add_argument(
        "--processes", type=at_least_one, default=os.cpu_count() or 1, metavar="N",
        help="simulate so many seeds at once, if they have many requests (default: one for each core)",
    )  # fmt: skip
    command.add_argument(
        "--ideal", action="store_true",
        help="simulate the paper's assumptions instead of a deployment: decode nodes compute no prompts, KVCache leaves after "
        "its prefill, and prefixes are cached and moved only where other options ask for it",
    )  # fmt: skip
    command.add_argument(
        "--placement", choices=list(PLACERS), default=DEPLOYED.placement,
        help="how a node is chosen within a cluster (default: %(default)s)",
    )  # fmt: skip
    command.add_argument(
        "--admission", choices=list(AdmissionPolicy), default=AdmissionPolicy.ACCEPT_ALL,
        help="which requests are refused under overload (default: %(default)s)",
    )  # fmt: skip
    command.add_argument(
        "--cache-gb",
        type=not_negative,
        metavar="GB",
        help="prefix cache of a node, in GB (default: the site's, or a cache that never evicts)",
    )
    command.add_argument(
        "--increment", type=whole, metavar="TOKENS",
        help=f"uncached tokens that a decode node may compute itself (default: {DEPLOYED.increment_tokens}, as in gateways)",
    )  # fmt: skip
    command.add_argument("--cross-cluster-cache", action="store_true", help="let prefixes move between clusters, too")
    command.add_argument(
        "--eviction", metavar="NAME", help="eviction policy of the caches, such as lru (default: that of nodes)"
    )
    command.add_argument(
        "--fetch-gbps",
        type=not_negative,
        metavar="GBPS",
        help="rate of prefix transfers inside a cluster, in Gbit/s (default: the site's, or 8)",
    )
    command.add_argument(
        "--tail-share", type=share, metavar="SHARE",
        help="share of the KVCache that leaves after the prefill, 1 for all of it "
        f"(default: {DEPLOYED.tail_share:g}, as layers leave while others are computed)",
    )  # fmt: skip
    command.add_argument(
        "--estimates",
        choices=list(Estimates),
        default=Estimates.LEARNED,
        help="what routing expects of durations: learned as gateways do, or exact (default: %(default)s)",
    )
    command.add_argument(
        "--controller",
        choices=list(SplitRule),
        help="let this controller change thresholds and roles meanwhile (default: none)",
    )
    command.add_argument(
        "--tick", type=above_zero, default=60.0, metavar="S",
        help="seconds between the controller's decisions (default: %(default)s)",
    )  # fmt: skip
    command.add_argument(
        "--flip-s", type=above_zero, metavar="S",
        help="seconds that a drained node takes to change its role (default: as measured, 0.027 s in the median)",
    )  # fmt: skip
    command.add_argument(
        "--flip-failing", type=not_negative, default=0.0, metavar="SHARE",
        help="share of role changes that fail (default: %(default)s)",
    )  # fmt: skip
    command.add_argument("--ttft", type=above_zero, metavar="S", help="largest good time to first token, in seconds")
    command.add_argument("--tbt", type=above_zero, metavar="S", help="largest good time between tokens, in seconds")
    command.add_argument(
        "--link-trace", type=Path, metavar="FILE.csv", help="capacity of the links over time: time_s,capacity_gbps"
    )
    command.add_argument(
        "--link-down", action="append", default=[], metavar="FROM:UNTIL[:SOURCE:DESTINATION]",
        help="cut all links, or one, between these seconds; may be repeated",
    )  # fmt: skip
    command.add_argument(
        "--link-thin", action="append", default=[], metavar="FROM:UNTIL:SHARE[:SOURCE:DESTINATION]",
        help="leave all links, or one, SHARE of their capacity between these seconds; may be repeated",
    )  # fmt: skip
    command.add_argument(
        "--no-cache-in-plan", action="store_true", help="solve for whole prompts, as if no prefix were cached"
    )


def _begin_within(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--begin-within",
        type=above_zero,
        default=10_800.0,
        metavar="S",
        help="in traces of agents' sessions: seconds within which all sessions begin (default: %(default)g)",
    )


def _arrivals(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--rate-scale", type=above_zero, default=1.0, metavar="X", help="replay the trace X times as fast (default: 1)"
    )
    command.add_argument(
        "--load", type=above_zero, default=TRIAL_LOAD, metavar="SHARE",
        help="without a trace: arrivals as a share of the plan's largest rate, Λ (default: %(default)s)",
    )  # fmt: skip
    command.add_argument(
        "--day",
        metavar="SHARES",
        help="without a trace: a load for each --bin, as shares of Λ, such as 0.3,0.6,0.9,0.5",
    )
    command.add_argument(
        "--bin", type=above_zero, default=3600.0, metavar="S", help="seconds of a bin of --day (default: %(default)g)"
    )


def _solve(command: argparse.ArgumentParser) -> None:
    _site(command)
    _objective(command)
    command.add_argument("-o", "--output", type=Path, metavar="FILE", help="plan file to write")
    command.add_argument(
        "--robust",
        action="store_true",
        help="maximise the worst case over wrong profiles, cut links and slices of the workload",
    )
    command.add_argument(
        "--spread", type=not_negative, default=0.1, metavar="SHARE",
        help="with --robust: relative error of the profiles (default: %(default)s)",
    )  # fmt: skip
    command.add_argument(
        "--worst", choices=list(Worst), default=Worst.RATIO,
        help="with --robust: maximise the ratio to each case's optimum, or the rate (default: %(default)s)",
    )  # fmt: skip
    command.add_argument(
        "--bins", type=at_least_one, default=60, metavar="N",
        help="number of length bins in a plan for several clusters (default: %(default)s)",
    )  # fmt: skip


def _buy(command: argparse.ArgumentParser) -> None:
    _inputs(command)
    command.add_argument("-m", "--market", type=Path, required=True, metavar="FILE.toml", help="demand and prices")
    command.add_argument("-o", "--output", type=Path, metavar="FILE.html", help="page with charts (extra plots)")
    command.add_argument(
        "--pareto", action="store_true",
        help="systems that no other one beats in cost a month, rate and P90 TTFT, around the demand and the target",
    )  # fmt: skip
    as_json(command)


def _emit(command: argparse.ArgumentParser) -> None:
    command.add_argument("plan", type=Path, metavar="PLAN.json", help="plan file, as solve -o writes it")
    _inputs(command)
    command.add_argument(
        "--as", choices=["values", "gateway", "init"], default="values", dest="form",
        help="values of the Helm chart, keys of a gateway's file, or the call of prfaas init that writes a file for each node "
        "(default: %(default)s)",
    )  # fmt: skip
    command.add_argument(
        "--cluster", metavar="NAME", help="with --as values: whose values (default: those of the only PD cluster)"
    )
    command.add_argument(
        "--engine", choices=["vllm", "sglang", "embedded", "emulated"], default="vllm",
        help="with --as values: the engine of its nodes (default: %(default)s)",
    )  # fmt: skip
    command.add_argument(
        "--hosts", action="append", default=[], metavar="CLUSTER=HOST,…",
        help="with --as init: the machines of a cluster, one for each node; may be repeated",
    )  # fmt: skip
    command.add_argument("-o", "--output", type=Path, metavar="FILE", help="file to write (default: print)")


def _simulate(command: argparse.ArgumentParser) -> None:
    _of_plan(command)
    _arrivals(command)


def _of_plan(command: argparse.ArgumentParser) -> None:
    _site(command)
    command.add_argument("--plan", type=Path, metavar="FILE", help="plan file (default: solve the site first)")
    _trial(command)


def _fit(command: argparse.ArgumentParser) -> None:
    source = command.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="trace of Mooncake, Qwen, Azure or BurstGPT, agents' sessions, or a gateway's request log",
    )
    source.add_argument("--metrics", type=Path, metavar="FILE", help="page /metrics of a gateway, saved as text")
    _begin_within(command)
    command.add_argument(
        "--span", type=above_zero, metavar="S", help="with --metrics: seconds that they cover, for the rate"
    )
    command.add_argument(
        "--tokens", choices=["incremental", "total"], default="incremental",
        help="prompt lengths without cached prefixes, or whole (default: %(default)s)",
    )  # fmt: skip
    command.add_argument(
        "--cache-gb",
        type=above_zero,
        metavar="GB",
        help="prefix cache of a PD cluster's node, in GB; needs -c (default: the site's)",
    )
    command.add_argument(
        "-c", "--config", type=Path, metavar="FILE.toml",
        help="site file, whose caches decide which prefixes are cached (default: every leading block seen before)",
    )  # fmt: skip
    command.add_argument("-o", "--output", type=Path, metavar="FILE", help="workload file to write")
    as_json(command)


def _whatif(command: argparse.ArgumentParser) -> None:
    _site(command)
    command.add_argument(
        "--sweep", action="append", default=[],
        metavar="KNOB=VALUES",
        help="values low:high[:steps] or a,b,c; may be repeated. Knobs: b_out (Gbit/s), n_prfaas, n_pd, output_tokens, and "
        "the factors t_prfaas, t_pd (of prefill times) and decode_rate",
    )  # fmt: skip
    command.add_argument(
        "--heat-map", action="store_true", help="compute Λ over threshold and prefill instances instead"
    )
    command.add_argument("-o", "--output", type=Path, metavar="FILE.csv", help="CSV file to write")


def _saturate(command: argparse.ArgumentParser) -> None:
    _of_plan(command)
    command.add_argument(
        "--slo", metavar="CLAUSES",
        help="limits on keys of the simulation's report, times in seconds, such as ttft_p90<5,tbt_p99<0.1 "
        "(default: the site's SLO)",
    )  # fmt: skip
    command.add_argument(
        "--tolerance", type=share, default=0.02, metavar="SHARE",
        help="relative width at which bisection stops (default: %(default)s)",
    )  # fmt: skip


def _compare(command: argparse.ArgumentParser) -> None:
    _site(command)
    command.add_argument("--plans", type=Path, nargs="*", default=[], metavar="FILE", help="plan files to compare")
    command.add_argument(
        "--deployments", nargs="*", default=[], metavar="NAME", help="deployments of the site file to compare"
    )
    command.add_argument(
        "--policies", nargs="*", default=[], metavar="NAME", help=f"policies to compare: {', '.join(POLICIES)}"
    )
    _trial(command)
    _arrivals(command)
    command.add_argument(
        "--arrivals", type=above_zero, metavar="REQ/S",
        help="requests per second for all (default: 80 %% of the lowest Λ)",
    )  # fmt: skip


def _report(command: argparse.ArgumentParser) -> None:
    _site(command)
    _objective(command)
    _trial(command)
    _arrivals(command)
    command.add_argument("-o", "--output", type=Path, required=True, metavar="FILE.html", help="HTML file to write")


SITE: Final = "configs/case_study.toml"
COMMANDS: Final = MappingProxyType[str, PlannerCommand](
    {
        "solve": PlannerCommand(
            "capacity.solve",
            _solve,
            "find the threshold and the prefill/decode split of a site",
            f"prfaas-plan solve -c {SITE} -o plan.json",
            "By default it maximises the request rate Λ; --objective cost minimises the price, and slo keeps an SLO.",
        ),
        "buy": PlannerCommand(
            "capacity.buy",
            _buy,
            "find what GPUs and lines to buy and rent over the months, or that offloading does not pay",
            f"prfaas-plan buy -c {SITE} -m configs/market.toml",
            "PrfaaS, the same hardware at home, PD alone and colocated nodes are compared within the site's SLO.",
        ),
        "emit": PlannerCommand(
            "capacity.emit",
            _emit,
            "print a plan as what deployments read: Helm values, a gateway's keys, or a call of prfaas init",
            f"prfaas-plan emit plan.json -c {SITE} --as values -o values-plan.yaml",
        ),
        "simulate": PlannerCommand(
            "simulation.simulate",
            _simulate,
            "simulate a plan in virtual time, and report latencies, rates and egress",
            f"prfaas-plan simulate -c {SITE} --requests 2000 --load 0.8",
        ),
        "fit": PlannerCommand(
            "inputs.fit",
            _fit,
            "fit a workload (lengths, cached prefixes, rate) to a trace or to a gateway's metrics",
            f"prfaas-plan fit --trace conversation.jsonl -c {SITE} -o workload.json",
        ),
        "profile": PlannerCommand(
            "inputs.profile",
            to_profile,
            "make, show, check, calibrate or import a model's profile of prefill and decode times",
            "prfaas-plan profile from-config config.json --benchmark result.json --gpu H200 -o profile.json",
        ),
        "diff": PlannerCommand(
            "service.diff",
            to_compare,
            "compare a plan with what runs, from files or at a running service",
            "prfaas-plan diff plan.json --current running.json",
            "Exit status: 0 no difference, 1 a difference, 2 wrong input or no answer, 3 infeasible.",
        ),
        "whatif": PlannerCommand(
            "capacity.whatif",
            _whatif,
            "solve a site again and again over ranges of its inputs",
            f"prfaas-plan whatif -c {SITE} --sweep b_out=10:200:5",
        ),
        "saturate": PlannerCommand(
            "simulation.saturate",
            _saturate,
            "find the largest simulated request rate that keeps an SLO",
            f"prfaas-plan saturate -c {SITE} --requests 2000 --slo 'ttft_p90<5'",
        ),
        "compare": PlannerCommand(
            "simulation.compare",
            _compare,
            "simulate several plans, deployments or policies side by side",
            f"prfaas-plan compare -c {SITE} --deployments homogeneous naive --requests 2000",
        ),
        "report": PlannerCommand(
            "simulation.report",
            _report,
            "write one self-contained HTML page with plan, sensitivities and simulation",
            f"prfaas-plan report -c {SITE} -o report.html",
        ),
        "serve": PlannerCommand(
            "service.serve",
            to_serve,
            "run the plan service: watch gateways, propose plans, publish the plan in force",
            "prfaas-plan serve -c plan.toml",
        ),
        "show": PlannerCommand(
            "service.steer",
            to_ask,
            "show the plan in force, the proposal and the gateways of a running plan service",
            "prfaas-plan show --url http://127.0.0.1:8100",
        ),
        "apply": PlannerCommand(
            "service.steer",
            to_apply,
            "put the proposal of a running plan service into force",
            "prfaas-plan apply --version 3",
        ),
        "rollback": PlannerCommand(
            "service.steer",
            to_ask,
            "put the previous plan back into force",
            "prfaas-plan rollback",
            "The service then changes nothing by itself until `prfaas-plan resume`.",
        ),
        "history": PlannerCommand(
            "service.steer",
            to_look_back,
            "show the last changes of plans, with their reasons",
            "prfaas-plan history --limit 5",
        ),
        "pause": PlannerCommand(
            "service.steer",
            to_ask,
            "stop a running plan service from proposing and applying plans by itself",
            "prfaas-plan pause",
            "The plan in force stays. `prfaas-plan resume` ends the pause.",
        ),
        "resume": PlannerCommand(
            "service.steer", to_ask, "let a paused plan service propose and apply plans again", "prfaas-plan resume"
        ),
    }
)
