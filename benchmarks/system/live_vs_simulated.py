"""The simulator beside running systems: `python -m benchmarks.system.live_vs_simulated [--only NAME …] [--json]`.

Six scenarios of the case study, each under a minute of requests. A system of processes is started, with engines that stand in
for the model; gateway, agents, pages, transfers and lines are real. It is sent the requests of a seeded trace at their times,
and the simulator is given the same ones. All processes read one clock, this machine's. Figures are in seconds of the model.

The simulator agrees where its mean TTFT is within 5 % of the live one, its P90 within 10 %. The share of requests that were
offloaded must be within 3 points. `(!)` is where it does not agree, and the command then ends with 1. Scenarios that are marked
as unseen were not looked at while simulator and scenarios were made to agree.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.system.agents_live import topology_of
from benchmarks.system.case_study import CONFIGS, TAIL_SHARE, CaseRun, LiveDeployment, requests_of, say, simulated
from engine.byte_tokenizer import SPECIAL_TOKENS, VOCAB_SIZE
from planner.decisions.views import ClusterKind, PrefillCost
from planner.model.sessions import BLOCK_TOKENS
from planner.model.site import Site, load_site
from planner.model.workload import Trace
from planner.simulator.scenario import Scenario
from planner.simulator.trials.trial import Trial, TrialSetting, scenario_of
from planner.solve.plan import outline
from planner.solve.problem import SolveOptions
from prfaas.system.models import ensure_model
from prfaas.system.standin import Scale
from prfaas.system.system import System
from prfaas.system.topology import Topology

TTFT_MEAN: Final = 0.05  # of the live figure
TTFT_P90: Final = 0.10
SHARE: Final = 0.03
LATE: Final = 0.05  # seconds of the model by which timers may be late at P99
OVER_S: Final = 35.0  # of here; the last answers take half a minute more
CACHE_GB: Final = 200.0
BURSTS_S: Final = (10.0, 30.0)  # of the model: so long a burst, every so often
IN_BURSTS: Final = 0.7  # of the requests
THIN_GBPS: Final = 8.0
DOCUMENTS: Final = 10
DOCUMENT_BLOCKS: Final = (8, 90)
QUESTION_BLOCKS: Final = (1, 16)
DOCUMENTS_SETTING: Final = TrialSetting(20_000.0, 0.0, 4, 4)
DOCUMENTS_RATE: Final = 2.4  # requests per second
TWO_SETTING: Final = TrialSetting(30_000.0, 0.0, 4, 4)
TWO_RATE: Final = 1.4
TRIAL: Final = Trial(cache_gb=CACHE_GB, fetch_gbps=100.0, tail_share=TAIL_SHARE)


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedScenario:
    """A system, and the requests that it is sent."""

    name: str
    is_unseen: bool
    scenario: Scenario
    trace: Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedRun:
    """The same requests, live and simulated."""

    name: str
    is_unseen: bool
    requests: int
    live: CaseRun
    simulated: CaseRun
    wrong: Sequence[str]
    late_p99_s: float
    load_average: float

    @property
    def off(self) -> tuple[float, float, float]:
        """By how much the simulator differs: mean and P90 TTFT as parts of the live ones, the share offloaded."""
        live, computed = self.live, self.simulated
        return (
            computed.ttft_mean_s / live.ttft_mean_s - 1,
            computed.ttft_p90_s / live.ttft_p90_s - 1,
            computed.offloaded - live.offloaded,
        )

    @property
    def agrees(self) -> tuple[bool, bool, bool]:
        mean, p90, share = (abs(each) for each in self.off)
        return mean <= TTFT_MEAN, p90 <= TTFT_P90, share <= SHARE

    @property
    def holds(self) -> bool:
        return all(self.agrees) and not self.wrong


def as_sent(trace: Trace, scale: Scale) -> Trace:
    """The requests as they are here: whole tokens of here, and an answer whose first token is one decode step."""
    tokens = np.array([scale.tokens_of(each) for each in trace.prompt_tokens]) / scale.tokens
    answers = np.array([scale.tokens_of(each) for each in trace.output_tokens])
    return replace(trace, prompt_tokens=tokens, output_tokens=1 + (answers - 1) / scale.tokens)


def in_bursts(trace: Trace) -> Trace:
    """The same requests, most of them in bursts."""
    burst_s, every_s = BURSTS_S
    whole, part = np.divmod(trace.arrival_s, every_s)
    early = part < IN_BURSTS * every_s
    within_s = np.where(
        early,
        part * burst_s / (IN_BURSTS * every_s),
        burst_s + (part - IN_BURSTS * every_s) * (every_s - burst_s) / ((1 - IN_BURSTS) * every_s),
    )
    return replace(trace, arrival_s=whole * every_s + within_s)


def about_documents(count: int, seed: int) -> Trace:
    """One request per second: a question after one of some documents; most are about a few of them."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(*DOCUMENT_BLOCKS, DOCUMENTS)
    weights = 1 / np.arange(1, DOCUMENTS + 1)
    asked = rng.choice(DOCUMENTS, count, p=weights / weights.sum())
    questions = rng.integers(*QUESTION_BLOCKS, count)
    first = 1000 * DOCUMENTS
    blocks = []
    for document, question in zip(asked.tolist(), questions.tolist(), strict=True):
        blocks.append(
            (*range(1000 * document, 1000 * document + int(sizes[document])), *range(first, first + question))
        )
        first += question
    return Trace(
        name=f"{count} questions",
        arrival_s=np.cumsum(rng.exponential(1.0, count)),
        prompt_tokens=np.array([float(BLOCK_TOKENS * len(each)) for each in blocks]),
        output_tokens=np.full(count, 512.0),
        blocks=tuple(blocks),
        block_size=BLOCK_TOKENS,
    )


def scenarios(site: Site, scale: Scale, seed: int) -> list[ComparedScenario]:
    """Four that were looked at, and two that were not."""
    plan = outline(site, SolveOptions())
    case = _as_started(scenario_of(site, TrialSetting.of(plan), TRIAL))
    thin_wires = [replace(wire, capacity=((0.0, THIN_GBPS * 1.25e8),)) for wire in case.wires]
    documents = _as_started(scenario_of(site, DOCUMENTS_SETTING, replace(TRIAL, increment_tokens=1024)))

    clusters = [replace(each, instances=2) if each.kind is ClusterKind.PRFAAS else each for each in site.clusters]
    two = scenario_of(replace(site, clusters=clusters), TWO_SETTING, TRIAL)

    def compared(
        name: str, scenario: Scenario, requests: Callable[[int], Trace], rate: float, *, is_unseen: bool = False
    ) -> ComparedScenario:
        trace = requests(round(rate * OVER_S / scale.time)).faster(rate)
        trace = in_bursts(trace) if name == "bursts" else trace
        return ComparedScenario(name=name, is_unseen=is_unseen, scenario=scenario, trace=as_sent(trace, scale))

    def law(count: int, more: int = 0) -> Trace:
        return requests_of(site, count, seed + more)

    half, most = 0.5 * plan.lambda_max, 0.8 * plan.lambda_max
    return [
        compared("half load", case, law, half),
        compared("high load", case, law, most),
        compared(
            "documents", documents, lambda count: about_documents(count, seed),
            DOCUMENTS_RATE,
        ),
        compared("bursts", case, lambda count: law(count, 1), half, is_unseen=True),
        compared("thin line", replace(case, wires=thin_wires), lambda count: law(count, 2), half),
        compared("two senders", _as_started(two), lambda count: law(count, 3), TWO_RATE, is_unseen=True),
    ]  # fmt: skip


def _as_started(scenario: Scenario) -> Scenario:
    """First tokens take a decode step, and every sender has its part of the line."""
    senders = sum(pool.num_prefill for pool in scenario.pools if pool.kind is ClusterKind.PRFAAS)
    wires = [replace(wire, senders=senders) for wire in scenario.wires]
    return replace(scenario, wires=wires, counts_first_step=True)


class ComparedDeployment(LiveDeployment):
    """Prompts with the blocks of the trace, where it has some: equal ones are equal tokens."""

    def prompt(self, trace: Trace, number: int) -> list[int]:
        if trace.blocks is None:
            return super().prompt(trace, number)
        size = self.scale.tokens_of(BLOCK_TOKENS)
        tokens: list[int] = []
        for block in trace.blocks[number]:
            rng = np.random.default_rng((block, 1))
            tokens += rng.integers(len(SPECIAL_TOKENS), VOCAB_SIZE, size).tolist()
        return [*tokens, len(SPECIAL_TOKENS)]  # the last one, which the decode node computes


def started_as(scenario: Scenario, scale: Scale, state_dir: Path) -> Topology:
    """The system that is simulated; its gateway begins with the speed of prefill that a simulated one begins with."""
    topology = topology_of(scenario, scale, state_dir)
    routing = {
        **topology.gateway["routing"], "prefill_tokens_per_s": PrefillCost().tokens_per_s * scale.tokens / scale.time,
        "share_egress": any(wire.shares_egress for wire in scenario.wires),
    }  # fmt: skip
    return replace(topology, gateway={**topology.gateway, "routing": routing})


async def measure(compared: ComparedScenario, scale: Scale, state_dir: Path, seed: int) -> ComparedRun:
    topology = started_as(compared.scenario, scale, state_dir)
    ensure_model(topology.model, state_dir, say)
    async with System(topology, state_dir / "compared", lambda line: None) as system:
        live = ComparedDeployment(system, scale, seed)
        seen = await live.run(compared.trace)
    run = ComparedRun(
        name=compared.name,
        is_unseen=compared.is_unseen,
        requests=len(compared.trace),
        live=seen,
        simulated=simulated(compared.scenario, compared.trace, seed),
        wrong=live.wrong,
        late_p99_s=live.late_p99_s,
        load_average=os.getloadavg()[0],
    )
    say(f"{run.name}: live {run.live.row()}\n  simulated {run.simulated.row()}")
    return run


def table(runs: Sequence[ComparedRun]) -> str:
    """Markdown, live / simulated."""
    lines = [
        "| scenario | requests | TTFT mean, s | off by | TTFT P90, s | off by | offloaded, % | off by, points | load |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for run in runs:
        name = f"{run.name} (unseen)" if run.is_unseen else run.name
        mean, p90, share = (
            text + ("" if good else " (!)")
            for text, good in zip(_differences(run), run.agrees, strict=True)
        )  # fmt: skip
        live, computed = run.live, run.simulated
        lines.append(
            f"| {name} | {run.requests} | {live.ttft_mean_s:.2f} / {computed.ttft_mean_s:.2f} | {mean} "
            f"| {live.ttft_p90_s:.2f} / {computed.ttft_p90_s:.2f} | {p90} "
            f"| {100 * live.offloaded:.1f} / {100 * computed.offloaded:.1f} | {share} | {run.load_average:.1f} |"
        )
    return "\n".join(lines)


def _differences(run: ComparedRun) -> tuple[str, str, str]:
    mean, p90, share = run.off
    return f"{mean:+.1%}", f"{p90:+.1%}", f"{100 * share:+.1f}"


def too_busy(runs: Sequence[ComparedRun], time_scale: float) -> str:
    """Why nothing follows from these runs; "": timers were in time, as the simulator's are."""
    late_s = max(run.late_p99_s for run in runs)
    if late_s <= LATE * time_scale:
        return ""
    return f"timers were late by {late_s / time_scale:.2f} s of the model: this machine was too busy for a comparison"


def summary(result: Mapping[str, Any], runs: Sequence[ComparedRun]) -> str:
    wrong = sum(len(run.wrong) for run in runs)
    return (
        f"{sum(run.holds for run in runs)} of {len(runs)} agree; {wrong} wrong answers of "
        f"{sum(run.requests for run in runs)}; timers late by at most {1e3 * max(run.late_p99_s for run in runs):.0f} ms at "
        f"P99; seconds × {result['time_scale']:g}, seed {result['seed']}, {result['seconds']:.0f} s"
    )


async def run_all(args: argparse.Namespace) -> tuple[dict[str, Any], list[ComparedRun]]:
    scale = Scale(time=args.time_scale, tokens=1 / 64, bytes=0.001)
    begin = time.monotonic()
    chosen = [
        each
        for each in scenarios(load_site(CONFIGS / "case_study.toml"), scale, args.seed)
        if not args.only or each.name in args.only
    ]
    if not chosen:
        raise SystemExit(f"--only {args.only}: no scenario has that name")
    runs = [await measure(each, scale, Path(args.state_dir), args.seed) for each in chosen]
    result = {
        "seed": args.seed, "time_scale": scale.time, "runs": [asdict(each) for each in runs],
        "seconds": time.monotonic() - begin,
    }  # fmt: skip
    return result, runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", action="append", metavar="NAME", help="this scenario; may be given several times")
    parser.add_argument("--time-scale", type=float, default=1.0, help="seconds of here for one of the model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--state-dir", help="directory for files (default: a temporary one)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        args.state_dir = args.state_dir or directory
        result, runs = asyncio.run(run_all(args))
    print(json.dumps(result, indent=2) if args.json else f"{table(runs)}\n\n{summary(result, runs)}")
    if busy := too_busy(runs, args.time_scale):
        say(busy)
    sys.exit(0 if all(run.holds for run in runs) else 1)


if __name__ == "__main__":
    main()
