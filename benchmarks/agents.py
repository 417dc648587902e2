"""Does offloading pay for coding agents? `python -m benchmarks.agents [--json] [--sessions FILE] [--seed N]`.

Real sessions (prfaas/data/agent_sessions.jsonl, or a larger file of the same kind) are replayed through the simulated case study:
sessions are drawn by seed and begin at times uniform over the run. Thresholds and splits are solved on the same requests.

ours            incremental length against the solved t, short increments on the decode node, prefixes fetched inside the cluster
total length    the same t, against whole prompts
never           the same nodes, PrfaaS left alone
always          every prompt to PrfaaS, all PD nodes decode
colocated       no PrfaaS cluster and no prefill nodes: twelve PD instances compute and decode, prompts in the way of answers

Then ours against never where offloading should pay less: little load, short increments, a thin link.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from planner.decisions.routing import RoutingPolicy
from planner.model.fitting import workload_of
from planner.model.sessions import Session, read_sessions, replay
from planner.model.site import Site, load_site
from planner.model.workload import Trace
from planner.simulator.hits import hits_of
from planner.simulator.scenario import Scenario
from planner.simulator.trials import Setting, Trial, scenario_of
from planner.simulator.world import simulate
from planner.solve.plan import outline
from planner.solve.problem import Options

ROOT: Final = Path(__file__).parents[1]
CONFIG: Final = ROOT / "configs" / "case_study.toml"
SESSIONS: Final = ROOT / "prfaas" / "data" / "agent_sessions.jsonl"
CACHE_GB: Final = 800.0
SHORT_TOKENS: Final = 20_000  # a session of short increments has no more than these uncached in any request
TRIAL: Final = Trial(cache_gb=CACHE_GB, fetch_gbps=100.0, increment_tokens=1024)
COLUMNS: Final = (
    "goodput_req_per_s",
    "ttft_mean_s",
    "ttft_p90_s",
    "hit_ratio",
    "offload_fraction",
    "egress_gb_per_session",
)


@dataclass(frozen=True, slots=True)
class Arena:
    """Requests, and the site solved for them."""

    site: Site
    trace: Trace
    sessions: int

    @classmethod
    def of(cls, site: Site, sessions: Sequence[Session], count: int, over_s: float, seed: int) -> "Arena":
        trace = replay(sessions, count, over_s, seed)
        return cls(replace(site, workload=workload_of(trace, hits_of(trace))), trace, count)

    def solved(self, deployment: str | None = None) -> tuple[Site, Setting]:
        plan = outline(self.site, Options(extrapolate=True), deployment)
        return (self.site.deployed(deployment)[0] if deployment else self.site), Setting.of(plan)

    def row(self, name: str, scenario: Scenario) -> dict[str, Any]:
        report = simulate(scenario, self.trace).report()
        sent_gb = report["egress_mean_gbps"] / 8 * report["horizon_s"]
        return {"name": name, **report, "egress_gb_per_session": sent_gb / self.sessions}


def contenders(arena: Arena) -> dict[str, Scenario]:
    site, plan = arena.solved()
    ours = scenario_of(site, plan, TRIAL)
    never = replace(plan, threshold_tokens=1e12)
    always_site, always = arena.solved("naive")
    twelve, _ = arena.solved("homogeneous")
    colocated = scenario_of(twelve, Setting(1e12, 1.0, 0, 12), TRIAL)
    return {
        "ours": ours,
        "total length": replace(ours, routing=replace(ours.routing, by_total_length=True)),
        "never": scenario_of(site, _split_at_home(arena, never), TRIAL),
        "always": scenario_of(always_site, always, replace(TRIAL, increment_tokens=0)),
        "colocated": replace(colocated, routing=_loyal(colocated.routing)),
    }


def _loyal(routing: RoutingPolicy) -> RoutingPolicy:
    """Prompts delay its steps, by which conversations would be scattered; of 0.1, 0.3, 1 and 3 this suits it best."""
    return replace(routing, placement=replace(routing.placement, decode_load_slack=3.0))


def _split_at_home(arena: Arena, setting: Setting) -> Setting:
    """The best split of the same PD nodes where nothing is offloaded."""
    _, twelve = arena.solved("homogeneous")
    nodes = setting.num_prefill + setting.num_decode
    prefill = min(nodes - 1, max(1, round(nodes * twelve.num_prefill / (twelve.num_prefill + twelve.num_decode))))
    return replace(setting, num_prefill=prefill, num_decode=nodes - prefill)


def pair(arena: Arena) -> dict[str, Scenario]:
    both = contenders(arena)
    return {name: both[name] for name in ("ours", "never")}


def conditions(site: Site, sessions: Sequence[Session], count: int, over_s: float, seed: int) -> dict[str, Arena]:
    """Where offloading should pay less, and what it is compared with."""
    short = [each for each in sessions if _longest_increment(each) <= SHORT_TOKENS]
    thin = replace(site, links=tuple(replace(link, capacity_gbps=1.0) for link in site.links))
    found = {
        "a quarter of the load": Arena.of(site, sessions, count // 4, over_s, seed),
        "a link of 1 Gbit/s": Arena.of(thin, sessions, count, over_s, seed),
    }
    if short:
        found["short increments only"] = Arena.of(site, short, count, over_s, seed)
    return found


def _longest_increment(session: Session) -> float:
    seen: set[int] = set()
    longest = 0.0
    for turn in session:
        held = next((i for i, block in enumerate(turn.blocks) if block not in seen), len(turn.blocks))
        longest = max(longest, turn.prompt_tokens - held * 512)
        seen.update(turn.blocks)
    return longest


def verdict(name: str, ours: Mapping[str, Any], never: Mapping[str, Any]) -> str:
    goodput = ours["goodput_req_per_s"] / max(never["goodput_req_per_s"], 1e-9)
    ttft = ours["ttft_mean_s"] / never["ttft_mean_s"]
    pays = goodput > 1.05 or ttft < 0.9
    return f"{name}: offloading {'pays' if pays else 'does not pay'}: goodput ×{goodput:.2f}, mean TTFT ×{ttft:.2f}"


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    arguments.add_argument("--json", action="store_true")
    arguments.add_argument("--sessions", type=Path, default=SESSIONS, help="file of sessions")
    arguments.add_argument("--count", type=int, default=200, help="sessions that begin")
    arguments.add_argument("--hours", type=float, default=1.0, help="they begin, and are cut, within these")
    arguments.add_argument("--seed", type=int, default=0)
    args = arguments.parse_args()
    site, sessions, over_s = load_site(CONFIG), read_sessions(args.sessions), args.hours * 3600
    arena = Arena.of(site, sessions, args.count, over_s, args.seed)
    rows = [arena.row(name, scenario) for name, scenario in contenders(arena).items()]
    verdicts = [verdict("this load", rows[0], rows[2])]
    for name, other in conditions(site, sessions, args.count, over_s, args.seed).items():
        ours, never = (other.row(each, scenario) for each, scenario in pair(other).items())
        verdicts.append(verdict(name, ours, never))
    if args.json:
        print(json.dumps({"requests": len(arena.trace), "rows": rows, "verdicts": verdicts}, indent=2))
        return
    print(f"{len(arena.trace)} requests of {args.count} sessions, {len(arena.trace) / over_s:.2f}/s")
    print("| | " + " | ".join(COLUMNS) + " |\n|---" + "|---" * len(COLUMNS) + "|")
    for row in rows:
        print(f"| {row['name']} | " + " | ".join(f"{row[column]:.3f}" for column in COLUMNS) + " |")
    print("\n".join(verdicts))


if __name__ == "__main__":
    main()
