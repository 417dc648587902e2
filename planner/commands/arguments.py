"""Every argument of every command.

Apart from the commands themselves, so that `--help` loads no number crunching; what is refused here needs no site file to
be known as wrong.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

from planner.decisions.admission.overload import AdmissionPolicy
from planner.decisions.defaults import DEPLOYED
from planner.decisions.routing.placement import PLACERS
from planner.model.reading import LEAST
from planner.simulator.policies import POLICIES, Estimates
from planner.solve.goals import Objective, SplitRule, TieBreak, Worst

LARGEST: Final = 1e9  # of gigabytes, seconds, factors: whatever is measured
MOST: Final = 10_000_000  # of whatever is counted: more requests than that do not fit into memory


@dataclass(frozen=True, slots=True)
class PlannerCommand:
    """One command: `module` below `planner.commands` has its `run(args)`, which returns the exit status."""

    module: str
    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]


def above_zero(text: str) -> float:
    """A number above 0."""
    value = float(text)
    if not LEAST <= value <= LARGEST:
        raise argparse.ArgumentTypeError(f"{text}: must be above 0, and at most {LARGEST:g}")
    return value


def not_negative(text: str) -> float:
    """A number that is at least 0."""
    value = float(text)
    if not 0 <= value <= LARGEST:
        raise argparse.ArgumentTypeError(f"{text}: must be at least 0, and at most {LARGEST:g}")
    return value


def whole(text: str) -> int:
    """A whole number of at least 0."""
    value = int(text)
    if not 0 <= value <= MOST:
        raise argparse.ArgumentTypeError(f"{text}: must be 0 to {MOST}")
    return value


def at_least_one(text: str) -> int:
    """A count."""
    value = int(text)
    if not 1 <= value <= MOST:
        raise argparse.ArgumentTypeError(f"{text}: must be 1 to {MOST}")
    return value


def share(text: str) -> float:
    """A part of something, above 0."""
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text}: must be in (0, 1]")
    return value


def _site(command: argparse.ArgumentParser) -> None:
    command.add_argument("-c", "--config", type=Path, required=True, help="site file (TOML)")
    command.add_argument("-w", "--workload", type=Path, help="workload written by fit, instead of the site's own")
    command.add_argument("--deployment", help="a [deployments.NAME] of the site file")
    command.add_argument("--as-in-paper", action="store_true", help="T(E[L]) and a 100-token grid, as in the paper")
    command.add_argument("--extrapolate", action="store_true", help="allow lengths outside the profile")
    command.add_argument(
        "--warm-caches", action="store_true",
        help="a Λ that counts on what decode nodes hold in the mean; a start with empty caches may never reach it",
    )  # fmt: skip
    command.add_argument("--tie-break", choices=list(TieBreak), default=TieBreak.EGRESS, help="second goal of ties")
    _json(command)


def _json(command: argparse.ArgumentParser) -> None:
    command.add_argument("--json", action="store_true", help="JSON on stdout")


def _objective(command: argparse.ArgumentParser) -> None:
    command.add_argument("--objective", choices=list(Objective), default=Objective.THROUGHPUT)
    command.add_argument("--rate", type=above_zero, help="req/s that the plan must carry")


def _trial(command: argparse.ArgumentParser) -> None:
    command.add_argument("--trace", type=Path, help="requests to replay; without it, Poisson arrivals of the workload")
    command.add_argument(
        "--requests", type=at_least_one, help="of a trace the first (default: all); else how many (20000)"
    )
    _begin_within(command)
    command.add_argument("--seed", type=whole, default=0)
    command.add_argument("--seeds", type=at_least_one, default=1, help="how many seeds; results carry 95 %% intervals")
    command.add_argument(
        "--ideal", action="store_true",
        help="the paper's assumptions instead of what deployments do: no prefix caches nor moves but those asked for, no "
        "prompts on decode nodes, KVCache that leaves after its prefill; plans for a cache that never evicts",
    )  # fmt: skip
    command.add_argument("--placement", choices=list(PLACERS), default=DEPLOYED.placement)
    command.add_argument("--admission", choices=list(AdmissionPolicy), default=AdmissionPolicy.ACCEPT_ALL)
    command.add_argument(
        "--cache-gb", type=not_negative, help="prefix cache per node (default: the site's, or one that never evicts)"
    )
    command.add_argument(
        "--increment", type=whole,
        help=f"uncached tokens that a decode node may compute itself (default: {DEPLOYED.increment_tokens}, as gateways)",
    )  # fmt: skip
    command.add_argument("--cross-cluster-cache", action="store_true", help="prefixes move between clusters, too")
    command.add_argument("--eviction", help='of the caches, such as lru (default: "default", what nodes run)')
    command.add_argument(
        "--fetch-gbps", type=not_negative, help="prefix transfers inside a cluster (default: the site's, or 8)"
    )
    command.add_argument(
        "--tail-share", type=share,
        help=f"KVCache that leaves after the prefill, 1: all (default: {DEPLOYED.tail_share:g}, layer by layer)",
    )  # fmt: skip
    command.add_argument(
        "--estimates", choices=list(Estimates), default=Estimates.LEARNED, help="of how long things take"
    )
    command.add_argument("--controller", choices=list(SplitRule), help="let the long-timescale controller act")
    command.add_argument("--tick", type=above_zero, default=60.0, help="seconds between the controller's decisions")
    command.add_argument(
        "--flip-s",
        type=above_zero,
        help="of a drained node that changes its role (default: measured, 27 ms in the median)",
    )
    command.add_argument("--flip-failing", type=not_negative, default=0.0, help="share of them that keep the old role")
    command.add_argument("--ttft", type=above_zero, help="TTFT that counts as good, seconds")
    command.add_argument("--tbt", type=above_zero, help="TBT that counts as good, seconds")
    command.add_argument("--link-trace", type=Path, help="CSV of time_s,capacity_gbps")
    command.add_argument(
        "--link-down", action="append", default=[], metavar="FROM:UNTIL[:SOURCE:DESTINATION]",
        help="seconds in which links (or one) carry nothing; repeatable",
    )  # fmt: skip
    command.add_argument(
        "--link-thin", action="append", default=[], metavar="FROM:UNTIL:SHARE[:SOURCE:DESTINATION]",
        help="seconds in which links (or one) have a share of their capacity; repeatable",
    )  # fmt: skip
    command.add_argument("--no-cache-in-plan", action="store_true", help="plan for whole prompts, not uncached tails")


def _begin_within(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--begin-within", type=above_zero, default=10_800.0, help="seconds within which agents' sessions begin (10800)"
    )


def _arrivals(command: argparse.ArgumentParser) -> None:
    command.add_argument("--rate-scale", type=above_zero, default=1.0, help="replay the trace this much faster")
    command.add_argument("--load", type=above_zero, default=0.8, help="without a trace: share of the plan's Λ")
    command.add_argument("--day", help="without a trace: loads per bin, as shares of Λ, e.g. 0.3,0.6,0.9,0.5")
    command.add_argument("--bin", type=above_zero, default=3600.0, help="seconds per bin of --day")


def _solve(command: argparse.ArgumentParser) -> None:
    _site(command)
    _objective(command)
    command.add_argument("-o", "--output", type=Path, help="plan file to write")
    command.add_argument("--robust", action="store_true", help="best worst case over profile, links and slices")
    command.add_argument("--spread", type=not_negative, default=0.1, help="how far profiles may be off (robust)")
    command.add_argument("--worst", choices=list(Worst), default=Worst.RATIO, help="what is best in the worst case")
    command.add_argument("--bins", type=at_least_one, default=60, help="length bins of a plan for several clusters")


def _simulate(command: argparse.ArgumentParser) -> None:
    _of_plan(command)
    _arrivals(command)


def _of_plan(command: argparse.ArgumentParser) -> None:
    _site(command)
    command.add_argument("--plan", type=Path, help="plan file; without it the site is solved first")
    _trial(command)


def _fit(command: argparse.ArgumentParser) -> None:
    source = command.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--trace", type=Path, help="Mooncake, Qwen or Azure trace, agents' sessions, or a gateway's request log"
    )
    source.add_argument("--metrics", type=Path, help="a gateway's /metrics, saved as text")
    _begin_within(command)
    command.add_argument("--span", type=above_zero, help="seconds that the metrics cover, for the rate")
    command.add_argument("--tokens", choices=["incremental", "total"], default="incremental")
    command.add_argument(
        "--cache-gb", type=above_zero, help="prefix cache per node of the PD clusters (needs -c; default: the site's)"
    )
    command.add_argument(
        "-c", "--config", type=Path,
        help="site file: its caches and S_kv count; without it, leading blocks seen before, states or not",
    )  # fmt: skip
    command.add_argument("-o", "--output", type=Path, help="workload file to write")
    _json(command)


def _profile(command: argparse.ArgumentParser) -> None:
    command.add_argument("action", choices=["show", "check", "calibrate", "import-aic"])
    command.add_argument("profile", type=Path, help="profile file (JSON)")
    command.add_argument("--hardware", help="which prefill curve (calibrate, import-aic)")
    command.add_argument("--points", type=Path, help="CSV of tokens,seconds measured on it (check, calibrate)")
    command.add_argument("--model-path", help="model name or directory for aiconfigurator (import-aic)")
    command.add_argument("--system", default="h200_sxm", help="aiconfigurator's name of the hardware (import-aic)")
    command.add_argument("-o", "--output", type=Path, help="profile file to write (calibrate, import-aic)")
    _json(command)


def _diff(command: argparse.ArgumentParser) -> None:
    command.add_argument("plan", type=Path, nargs="?", help="plan file; without it a running service's proposal")
    command.add_argument("--current", type=Path, help="JSON of what runs (the same keys)")
    _live(command)


def _live(command: argparse.ArgumentParser) -> None:
    command.add_argument("--url", default="http://127.0.0.1:8100", help="of the plan service (default: %(default)s)")
    command.add_argument("--token-file", type=Path, help="file with the service's secret, where it asks for one")
    _json(command)


def _serve(command: argparse.ArgumentParser) -> None:
    command.add_argument("-c", "--config", type=Path, required=True, metavar="FILE.toml", help="[plan]")
    command.add_argument(
        "--check", action="store_true", help="read the configuration, say whether it is right, and end"
    )


def _apply(command: argparse.ArgumentParser) -> None:
    command.add_argument("--version", type=at_least_one, help="only if the proposal is this one")
    _live(command)


def _history(command: argparse.ArgumentParser) -> None:
    command.add_argument("--limit", type=at_least_one, default=20, help="how many (default: %(default)s)")
    _live(command)


def _whatif(command: argparse.ArgumentParser) -> None:
    _site(command)
    command.add_argument(
        "--sweep", action="append", default=[],
        help="knob=low:high[:steps] or knob=a,b,c; repeatable. Knobs: b_out (Gbit/s), n_prfaas, n_pd, output_tokens, and "
        "factors: t_prfaas, t_pd (of times), decode_rate",
    )  # fmt: skip
    command.add_argument("--heat-map", action="store_true", help="Λ over threshold and N_p instead")
    command.add_argument("-o", "--output", type=Path, help="CSV file")


def _saturate(command: argparse.ArgumentParser) -> None:
    _of_plan(command)
    command.add_argument("--slo", default="ttft_p90<5,tbt_p99<0.1", help="clauses on the simulation's keys")
    command.add_argument("--tolerance", type=share, default=0.02, help="where bisection stops, relative")


def _compare(command: argparse.ArgumentParser) -> None:
    _site(command)
    command.add_argument("--plans", type=Path, nargs="*", default=[], help="plan files to compare")
    command.add_argument("--deployments", nargs="*", default=[], help="deployments of the site file to compare")
    command.add_argument("--policies", nargs="*", default=[], help=f"of {', '.join(POLICIES)}")
    _trial(command)
    _arrivals(command)
    command.add_argument("--arrivals", type=above_zero, help="req/s for all; default: 80 %% of the least Λ")


def _report(command: argparse.ArgumentParser) -> None:
    _site(command)
    _objective(command)
    _trial(command)
    _arrivals(command)
    command.add_argument("-o", "--output", type=Path, required=True, help="HTML file to write")


COMMANDS: Final = MappingProxyType[str, PlannerCommand](
    {
        "solve": PlannerCommand(
            "capacity.solve", "threshold and split of highest rate (or least cost, or within an SLO)", _solve
        ),
        "simulate": PlannerCommand("simulation.simulate", "run a plan in virtual time", _simulate),
        "fit": PlannerCommand("inputs.fit", "a workload from a trace", _fit),
        "profile": PlannerCommand("inputs.profile", "show, check, calibrate or import profiles", _profile),
        "diff": PlannerCommand(
            "service.diff",
            "plan against what runs, of files or of a running service: exit 0 same, 2 different, 3 infeasible",
            _diff,
        ),
        "whatif": PlannerCommand("capacity.whatif", "solve over ranges of inputs", _whatif),
        "saturate": PlannerCommand("simulation.saturate", "largest simulated rate that meets an SLO", _saturate),
        "compare": PlannerCommand("simulation.compare", "plans or policies side by side, simulated", _compare),
        "report": PlannerCommand("simulation.report", "one self-contained HTML page", _report),
        "serve": PlannerCommand(
            "service.serve", "watch running gateways, propose plans, publish the one in force", _serve
        ),
        "show": PlannerCommand("service.steer", "how a running plan service stands", _live),
        "apply": PlannerCommand("service.steer", "a running service's proposal comes into force", _apply),
        "rollback": PlannerCommand(
            "service.steer", "what was in force before is so again; then nothing changes by itself until resume", _live
        ),
        "history": PlannerCommand("service.steer", "the last changes of plans, with reasons", _history),
        "pause": PlannerCommand("service.steer", "a running service proposes and changes nothing by itself", _live),
        "resume": PlannerCommand("service.steer", "a running service goes on", _live),
    }
)
