"""Does offloading pay for coding agents? `python -m benchmarks.system.agents [--live] [--json] [--sessions FILE] [--seed N]`.

Real sessions (prfaas/data/agent_sessions.jsonl, or a larger file of the same kind) are replayed through the simulated case study:
sessions are drawn by seed and begin at times uniform over the run. Thresholds and splits are solved on the same requests.

ours            incremental length against the solved t, short increments on the decode node, prefixes fetched inside the cluster
total length    the same t, against whole prompts
never           the same nodes, PrfaaS left alone
always          every prompt to PrfaaS, all PD nodes decode
colocated       no PrfaaS cluster and no prefill nodes: twelve PD instances compute and decode, prompts in the way of answers

Then ours against never where offloading should pay less: little load, short increments, a thin link.

With `--live` the sessions run through a running system instead, one way after the other, later turns waiting for answers
(`benchmarks.system.agents_live`).
"""

import argparse
import asyncio
import json
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from benchmarks.system.agents_live import ENDLESS_GB, bars, serve, table
from benchmarks.system.case_study import TAIL_SHARE
from planner.decisions.routing.policy import RoutingPolicy
from planner.model.fitting import workload_of
from planner.model.sessions import (
    ClosedLoop,
    Session,
    drawn,
    in_virtual_time,
    read_sessions,
    replay,
    trace_of,
    within,
)
from planner.model.site import Site, load_site
from planner.model.workload import Trace
from planner.simulator.scenario import Scenario
from planner.simulator.trials.hits import finite_cache_hits
from planner.simulator.trials.trial import Trial, TrialSetting, scenario_of
from planner.simulator.world import simulate
from planner.solve.plan import outline
from planner.solve.problem import SolveOptions
from prfaas.system.standin import Scale
from transport.control.settings import read_toml

ROOT: Final = Path(__file__).parents[2]
CONFIG: Final = ROOT / "configs" / "case_study.toml"
SESSIONS: Final = ROOT / "prfaas" / "data" / "agent_sessions.jsonl"
CACHE_GB: Final = 800.0
SHORT_TOKENS: Final = 20_000  # a session of short increments has no more than these uncached in any request
TRIAL: Final = Trial(cache_gb=CACHE_GB, fetch_gbps=100.0, increment_tokens=1024)
COUNT: Final = 200
HOURS: Final = 1.0
# Live: what 80 s of this machine have room for, at the scales of configs/case_study_live.toml.
LIVE_COUNT: Final = 150
LIVE_HOURS: Final = 400 / 3600
LIVE_STARTS: Final = 0.75  # of the time; who begins later has hardly a second turn
LIVE_TRIAL: Final = replace(TRIAL, cache_gb=200.0, tail_share=TAIL_SHARE)
LIVE_TTFT_S: Final = 1.0  # that plans take for granted
CONTEXT_TOKENS: Final = 131_072  # as far as the profile goes
PD_HARDWARE: Final = "h20x8"
COLUMNS: Final = (
    "goodput_req_per_s",
    "ttft_mean_s",
    "ttft_p90_s",
    "hit_ratio",
    "offload_fraction",
    "egress_gb_per_session",
)


@dataclass(frozen=True, slots=True)
class AgentsArena:
    """Requests, and the site solved for them."""

    site: Site
    trace: Trace
    sessions: int

    @classmethod
    def of(cls, site: Site, trace: Trace, sessions: int) -> "AgentsArena":
        """Solved for what nodes' caches find that never evict. A state serves one length: who goes back finds none there."""
        hits = finite_cache_hits(trace, site.profile.kv_size(), ENDLESS_GB)
        return cls(replace(site, workload=workload_of(trace, hits)), trace, sessions)

    @classmethod
    def open(cls, site: Site, sessions: Sequence[Session], count: int, over_s: float, seed: int) -> "AgentsArena":
        return cls.of(site, replay(sessions, count, over_s, seed), count)

    def solved(self, deployment: str | None = None) -> tuple[Site, TrialSetting]:
        plan = outline(self.site, SolveOptions(extrapolate=True), deployment)
        return (self.site.deployed(deployment)[0] if deployment else self.site), TrialSetting.of(plan)

    def row(self, name: str, scenario: Scenario) -> dict[str, Any]:
        outcome = simulate(scenario, self.trace)
        return {"name": name, **outcome.report(), "egress_gb_per_session": outcome.sent_bytes / 1e9 / self.sessions}


def contenders(arena: AgentsArena, trial: Trial = TRIAL) -> dict[str, Scenario]:
    site, plan = arena.solved()
    ours = scenario_of(site, plan, trial)
    never = replace(plan, threshold_tokens=1e12)
    always_site, always = arena.solved("naive")
    twelve, _ = arena.solved("homogeneous")
    colocated = scenario_of(twelve, TrialSetting(1e12, 1.0, 0, 12), trial)
    return {
        "ours": ours,
        "total length": replace(ours, routing=replace(ours.routing, by_total_length=True)),
        "never": scenario_of(site, _split_at_home(arena, never), trial),
        "always": scenario_of(always_site, always, replace(trial, increment_tokens=0)),
        "colocated": replace(colocated, routing=_loyal(colocated.routing)),
    }


def _loyal(routing: RoutingPolicy) -> RoutingPolicy:
    """Prompts delay its steps, by which conversations would be scattered; of 0.1, 0.3, 1 and 3 this suits it best."""
    return replace(routing, placement=replace(routing.placement, decode_load_slack=3.0))


def _split_at_home(arena: AgentsArena, setting: TrialSetting) -> TrialSetting:
    """The best split of the same PD nodes where nothing is offloaded."""
    _, twelve = arena.solved("homogeneous")
    nodes = setting.num_prefill + setting.num_decode
    prefill = min(nodes - 1, max(1, round(nodes * twelve.num_prefill / (twelve.num_prefill + twelve.num_decode))))
    return replace(setting, num_prefill=prefill, num_decode=nodes - prefill)


def pair(arena: AgentsArena) -> dict[str, Scenario]:
    both = contenders(arena)
    return {name: both[name] for name in ("ours", "never")}


def conditions(site: Site, sessions: Sequence[Session], count: int, over_s: float, seed: int) -> dict[str, AgentsArena]:
    """Where offloading should pay less, and what it is compared with."""
    short = [each for each in sessions if _longest_increment(each) <= SHORT_TOKENS]
    thin = replace(site, links=tuple(replace(link, capacity_gbps=1.0) for link in site.links))
    found = {
        "a quarter of the load": AgentsArena.open(site, sessions, count // 4, over_s, seed),
        "a link of 1 Gbit/s": AgentsArena.open(thin, sessions, count, over_s, seed),
    }
    if short:
        found["short increments only"] = AgentsArena.open(site, short, count, over_s, seed)
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


async def live(
    site: Site, sessions: Sequence[Session], count: int, over_s: float, args: argparse.Namespace
) -> dict[str, Any]:
    """The ways of `contenders`, each in a running system; plans are solved as if no turn waited for an answer."""
    document = read_toml(CONFIG.with_name("case_study_live.toml"))["model"]
    scale = Scale(
        time=args.time_scale or document["time_scale"], tokens=document["token_scale"], bytes=document["byte_scale"]
    )
    begun = drawn(within(sessions, CONTEXT_TOKENS), count, LIVE_STARTS * over_s, args.seed)
    step_s = site.profile.decode_on(PD_HARDWARE).step_s
    calls = in_virtual_time(ClosedLoop(begun, over_s), lambda turn: LIVE_TTFT_S + step_s * turn.output_tokens)
    arena = AgentsArena.of(site, trace_of([(call.at_s, call.turn) for call in calls]), count)
    plan = outline(arena.site, SolveOptions(extrapolate=True))
    scenarios = {
        name: scenario for name, scenario in contenders(arena, LIVE_TRIAL).items() if name in (args.only or [name])
    }
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        state_dir = Path(args.state_dir or directory)
        ways = [
            await serve(name, scenario, begun, over_s, scale, state_dir, args.seed)
            for name, scenario in scenarios.items()
        ]
    per_request_gb = plan.egress_gbps / 8 / plan.lambda_max
    return {
        "sessions": count,
        "over_s": over_s,
        "time_scale": scale.time,
        "token_scale": scale.tokens,
        "byte_scale": scale.bytes,
        "plan": {
            "threshold_tokens": plan.threshold_tokens,
            "offload_fraction": plan.offload_fraction,
            "egress_gb_per_session": per_request_gb * len(arena.trace) / count,
            "requests": len(arena.trace),
        },
        "ways": [asdict(way) for way in ways],
        "table": table(ways).splitlines(),
        "bars": [
            line
            for way in ways
            if way.name == "ours"
            for line in bars(way, plan.offload_fraction, per_request_gb * way.requests / count)
        ],
        "verdicts": _live_verdicts({way.name: asdict(way.live) for way in ways}),
        "load_average": os.getloadavg()[1],
        "seconds": time.monotonic() - begin,
    }


def _live_verdicts(rows: Mapping[str, Mapping[str, Any]]) -> list[str]:
    return [verdict("live, this load", rows["ours"], rows["never"])] if {"ours", "never"} <= rows.keys() else []


def _print_live(result: Mapping[str, Any]) -> None:
    print(
        f"{result['sessions']} sessions within {result['over_s']:.0f} s of the model, t = "
        f"{result['plan']['threshold_tokens']:.0f}; load average {result['load_average']:.1f}, {result['seconds']:.0f} s, "
        f"{sum(len(way['wrong']) for way in result['ways'])} wrong of {sum(way['requests'] for way in result['ways'])}\n"
    )
    print("\n".join([*result["table"], "", *(f"- {line}" for line in [*result["bars"], *result["verdicts"]])]))


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    arguments.add_argument("--json", action="store_true")
    arguments.add_argument("--sessions", type=Path, default=SESSIONS, help="file of sessions")
    arguments.add_argument("--count", type=int, help=f"sessions that begin (default: {COUNT}; live {LIVE_COUNT})")
    arguments.add_argument(
        "--hours", type=float, help=f"they begin, and are cut, within these (default: {HOURS:g}; live {LIVE_HOURS:.2f})"
    )
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--live", action="store_true", help="through a running system, later turns after answers")
    arguments.add_argument("--only", action="append", help="live: only this way; may be given several times")
    arguments.add_argument("--time-scale", type=float, help="live: instead of that of configs/case_study_live.toml")
    arguments.add_argument("--state-dir", help="live; default: a temporary directory")
    args = arguments.parse_args()
    args.count = args.count or (LIVE_COUNT if args.live else COUNT)
    over_s = 3600 * (args.hours or (LIVE_HOURS if args.live else HOURS))
    site, sessions = load_site(CONFIG), read_sessions(args.sessions)
    if args.live:
        result = asyncio.run(live(site, sessions, args.count, over_s, args))
        if args.json:
            print(json.dumps(result, indent=2))
        else:
            _print_live(result)
        return
    arena = AgentsArena.open(site, sessions, args.count, over_s, args.seed)
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
