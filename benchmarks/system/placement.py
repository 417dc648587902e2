"""Placements side by side:
`python -m benchmarks.system.placement [--json] [--trace FILE ...] [--no-live | --only-live] [--rounds N]`.

orderings   every placement on each trace, simulated: 8 prefill and 8 decode nodes with caches, prefixes fetched at 100 Gbit/s
balancing   Algorithm 1 with its balancing threshold fixed, and adapted, on the second half of each trace (the first was tuned on)
live        every placement on made-up conversations, in which 60 % of the blocks repeat: one gateway, three prefill and two
            decode nodes, engines that stand in for the model; the same requests at the same times, TTFT in seconds of the model;
            in several rounds, every other one backwards, since the machine has more influence on a run than some placements have
"""

import argparse
import asyncio
import json
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from benchmarks.planner.speed import cached_scenario, conversations
from benchmarks.system.case_study import LiveDeployment, say
from engine.byte_tokenizer import SPECIAL_TOKENS, VOCAB_SIZE
from planner.decisions.routing.placement import PLACERS
from planner.decisions.routing.policy import PlacementPolicy
from planner.model.workload import Trace, read_trace
from planner.simulator.scenario import Scenario
from planner.simulator.world import simulate
from prfaas.system.models import ensure_model
from prfaas.system.system import System
from prfaas.system.topology import Topology, parse_topology

ROOT: Final = Path(__file__).parents[2]
SHIPPED: Final = ROOT / "tests" / "planner" / "data" / "mooncake_conversation_400.jsonl.xz"
RATIOS: Final = (1.0, 1.5, 3.0, 10.0, None)  # None: adapted
SITUATIONS: Final = (
    (1.0, 100e9, 20),
    (1.3, 300e9, 100),
    (1.2, 200e9, 10),
    (1.0, 200e9, 5),
)  # speed, cache bytes, Gbit/s
GBPS: Final = 1e9 / 8
LIVE_REQ_PER_S: Final = 2.4  # a little more than three prefill nodes can compute with nothing cached
TIME_SCALE: Final = 0.2
TOKENS_PER_BLOCK: Final = 16  # here, of 512 in the trace
ANSWER_TOKENS: Final = 4


def cut(trace: Trace, start: int, stop: int, speed: float = 1.0) -> Trace:
    """Requests [start, stop), `speed` times as fast."""
    assert trace.blocks is not None
    return replace(
        trace,
        arrival_s=(trace.arrival_s[start:stop] - trace.arrival_s[start]) / speed,
        prompt_tokens=trace.prompt_tokens[start:stop],
        output_tokens=trace.output_tokens[start:stop],
        blocks=trace.blocks[start:stop],
    )


def scenario(placer: str, ratio: float | None, cache_bytes: float, fetch_gbps: float) -> Scenario:
    base = cached_scenario()
    placement = PlacementPolicy(balancing_ratio=ratio, fetch_bytes_per_s=fetch_gbps * GBPS)
    pools = [replace(pool, cache_bytes=cache_bytes) for pool in base.pools]
    return replace(base, placer=placer, pools=pools, routing=replace(base.routing, placement=placement))


def ttft_of(scene: Scenario, trace: Trace) -> dict[str, float]:
    report = simulate(scene, trace).report()
    return {key: round(report[key], 3) for key in ("ttft_mean_s", "ttft_p90_s", "hit_ratio")}


def orderings(trace: Trace) -> dict[str, dict[str, float]]:
    faster = cut(trace, 0, len(trace), 1.3)
    return {name: ttft_of(scenario(name, None, 300e9, 100), faster) for name in PLACERS}


def balancing(trace: Trace) -> dict[str, dict[str, float]]:
    """Mean TTFT by situation and ratio, on the half of the trace that nothing was tuned on."""
    found: dict[str, dict[str, float]] = {}
    for speed, cache_bytes, gbps in SITUATIONS:
        half = cut(trace, len(trace) // 2, len(trace), speed)
        row = {
            str(ratio or "adapted"): ttft_of(scenario("kvcache_centric", ratio, cache_bytes, gbps), half)["ttft_mean_s"]
            for ratio in RATIOS
        }
        found[f"{speed} x, {cache_bytes / 1e9:.0f} GB, {gbps} Gbit/s"] = row
    return found


class Replayed(LiveDeployment):
    """Prompts made of the trace's blocks: what repeats there repeats here."""

    def prompt(self, trace: Trace, number: int) -> list[int]:
        assert trace.blocks is not None
        words = VOCAB_SIZE - len(SPECIAL_TOKENS)
        tokens: list[int] = []
        for block in trace.blocks[number]:
            # The block's number, in digits of this vocabulary, and a pattern that fills the block.
            digits = [block // words**place % words for place in range(4)]
            tokens += [len(SPECIAL_TOKENS) + each for each in (digits * TOKENS_PER_BLOCK)[:TOKENS_PER_BLOCK]]
        return [*tokens, len(SPECIAL_TOKENS)]


def topology(placement: str, state_dir: Path) -> Topology:
    names = {"prefill": 3, "decode": 2}
    nodes = [{"node_id": f"pd-{role[0]}{n}", "role": role} for role, count in names.items() for n in range(count)]
    return parse_topology(
        {
            "model": {
                "profile": str(ROOT / "configs" / "profiles" / "internal-1t.json"), "name": "internal-1t",
                "time_scale": TIME_SCALE, "token_scale": TOKENS_PER_BLOCK / 512, "byte_scale": 0.001,
            },
            "gateway": {
                "port": 0, "threshold_tokens": 1 << 20, "log_level": "warning",
                "routing": {"prefill_tokens_per_s": 1_000.0, "decode_slots": 20, "placement": placement},
            },
            "node": {"block_size": TOKENS_PER_BLOCK, "chunk_tokens": 256, "cache_bytes": 1 << 26},
            "clusters": [{"name": "pd", "kind": "pd", "hardware": "h20x8", "nodes": nodes}],
        },
        state_dir,
    )  # fmt: skip


async def live(trace: Trace, state_dir: Path, rounds: int) -> dict[str, Any]:
    """By placement: mean and P90 TTFT of each round, the mean of all, wrong answers."""
    seen: dict[str, list[dict[str, Any]]] = {name: [] for name in PLACERS}
    for number in range(rounds):
        for name in list(PLACERS)[:: -1 if number % 2 else 1]:
            seen[name].append(await once(name, trace, state_dir))
            say(f"  live {name}: {seen[name][-1]}")
    return {
        name: {
            "ttft_mean_s": round(statistics.mean(row["ttft_mean_s"] for row in rows), 3),
            "ttft_mean_s_of_each": [round(row["ttft_mean_s"], 3) for row in rows],
            "ttft_p90_s_of_each": [round(row["ttft_p90_s"], 3) for row in rows],
            "wrong": sum(row["wrong"] for row in rows),
            "timers_late_p99_s": max(row["timers_late_p99_s"] for row in rows),
        }
        for name, rows in seen.items()
    }


async def once(name: str, trace: Trace, state_dir: Path) -> dict[str, Any]:
    deployed = topology(name, state_dir)
    ensure_model(deployed.model, state_dir, say)
    async with System(deployed, state_dir / name, lambda line: None) as system:
        replayed = Replayed(system, deployed.model.scale, seed=0)
        seen = await replayed.run(trace)
    return {
        **seen.row(),
        "wrong": len(replayed.wrong),
        "timers_late_p99_s": round(replayed.late_p99_s, 3),
        "load_average": os.getloadavg()[0],
    }


def as_live(requests: int) -> Trace:
    """Conversations with short answers."""
    trace = conversations(requests, LIVE_REQ_PER_S)
    return replace(trace, output_tokens=trace.output_tokens * 0 + ANSWER_TOKENS * 512 / TOKENS_PER_BLOCK)


def table(result: Mapping[str, Any]) -> str:
    lines: list[str] = []
    for part in ("orderings", "balancing"):
        for trace, rows in result.get(part, {}).items():
            lines += [f"{part}, {trace}", *(f"  {name:28} {row}" for name, row in rows.items())]
    lines += [f"live {name:24} {row}" for name, row in result.get("live", {}).items()]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--json", action="store_true")
    arguments.add_argument(
        "--trace", type=Path, action="append", help="in Mooncake's format; default: the shipped slice"
    )
    which = arguments.add_mutually_exclusive_group()
    which.add_argument("--no-live", action="store_true")
    which.add_argument("--only-live", action="store_true")
    arguments.add_argument("--rounds", type=int, default=2, help="of live runs")
    arguments.add_argument("--requests", type=int, default=150, help="of a live run")
    arguments.add_argument("--state-dir", type=Path, default=Path.home() / ".cache" / "prfaas-placement")
    args = arguments.parse_args(argv)
    traces = {path.name.split(".")[0]: read_trace(path) for path in args.trace or [SHIPPED]}
    result: dict[str, Any] = {"load_average": os.getloadavg()[1]}
    if not args.only_live:
        result["orderings"] = {name: orderings(trace) for name, trace in traces.items()}
        result["balancing"] = {name: balancing(trace) for name, trace in traces.items()}
    if not args.no_live:
        result["live"] = asyncio.run(live(as_live(args.requests), args.state_dir, args.rounds))
    print(json.dumps(result, indent=2) if args.json else table(result))


if __name__ == "__main__":
    main()
