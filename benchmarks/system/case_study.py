"""The paper's case study, live: `python -m benchmarks.system.case_study [--json] [--time-scale S] [--requests N]`.

Three deployments run one after the other on this machine, as `configs/case_study_live.toml` has the first: engines that stand in
for the model, all between them real. Each is sent the same requests at the same times, and the simulator, too.

at the same load    TTFT, egress at shares of what homogeneous PD can carry
throughput at SLO   the highest rate tried whose P90 TTFT is within the SLO; between it and the lowest that is not, where a
                    straight line crosses
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp
import numpy as np

from engine.byte_tokenizer import SPECIAL_TOKENS, VOCAB_SIZE
from engine.emulated.emulated import emulated_tokens
from planner.model.site import Site, load_site
from planner.model.workload import Trace
from planner.simulator.scenario import Scenario
from planner.simulator.trials.trial import Trial, TrialSetting, scenario_of
from planner.simulator.world import simulate
from planner.solve.plan import Plan, outline
from planner.solve.problem import SolveOptions
from prfaas.demo.client import DemoCompletion, RequestFailed, complete
from prfaas.system.models import ensure_model
from prfaas.system.standin import Scale
from prfaas.system.system import System
from prfaas.system.topology import Topology, parse_topology
from transport.control.settings import read_toml

CONFIGS: Final = Path(__file__).parents[2] / "configs"
DEPLOYMENTS: Final = {"PrfaaS-PD": None, "homogeneous PD": "homogeneous", "naive heterogeneous": "naive"}
BASELINE: Final = "homogeneous PD"
LOADS: Final = (0.5, 0.8)  # of what the baseline can carry
LOAD_REQUESTS: Final = 200  # of a run at one of these; a rate at the SLO takes more to be found
SLO_TTFT_P90_S: Final = 15.0  # our choice: about 1.5 times the homogeneous deployment's unloaded P90
RATE_STEPS: Final = (
    1.05,
    0.95,
)  # after a rate that held, after one that did not; the first is what the simulator finds
MAX_TRIED: Final = 3
TAIL_SHARE: Final = 0.25  # of a remote KVCache that leaves after the prefill: a stand-in has four layers
RATE_STEP: Final = 0.01
LAG_EVERY_S: Final = 0.02
RECORDS_S: Final = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseDeployment:
    """A deployment: its plan, how the simulator has it, how it is started."""

    name: str
    plan: Plan
    scenario: Scenario
    topology: Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseRun:
    """One run, in seconds and bytes of the model."""

    ttft_mean_s: float
    ttft_p90_s: float
    tbt_mean_s: float
    egress_gbps: float
    offloaded: float

    def row(self) -> dict[str, float]:
        """As JSON."""
        return {name: round(value, 4) for name, value in asdict(self).items()}


class Lag:
    """Measures how late timers of this process are: a machine that is too busy for the scale shows here first."""

    def __init__(self) -> None:
        self.late_s: list[float] = []

    async def watch(self) -> None:
        while True:
            due = time.monotonic() + LAG_EVERY_S
            await asyncio.sleep(LAG_EVERY_S)
            self.late_s.append(time.monotonic() - due)


def requests_of(site: Site, count: int, seed: int) -> Trace:
    """One request per second: the quantiles of the law of lengths, and of exponential gaps, each in random order.

    So a run of some hundreds has the mix, the tail and the rate that a plan is made for. Chance only decides which
    requests meet.
    """
    rng = np.random.default_rng(seed)
    shares = (np.arange(count) + 0.5) / count
    lengths = np.array([site.workload.lengths.quantile(share) for share in shares])
    return Trace(
        name=f"{count} requests",
        arrival_s=np.cumsum(rng.permutation(-np.log1p(-shares))),
        prompt_tokens=np.maximum(1.0, np.round(rng.permutation(lengths))),
        output_tokens=np.full(count, site.workload.output_tokens),
    )


def contender(
    site: Site, name: str, scale: Scale, state_dir: Path, plan_service: Mapping[str, Any] | None = None
) -> CaseDeployment:
    """Its plan is the one that E[T(L)] gives; with a `plan_service` ([plan] of a topology) it may change while it runs."""
    deployment = DEPLOYMENTS[name]
    plan = outline(site, SolveOptions(), deployment)
    deployed = site.deployed(deployment)[0] if deployment else site
    scenario = scenario_of(deployed, TrialSetting.of(plan), Trial(tail_share=TAIL_SHARE))
    return CaseDeployment(
        name=name, plan=plan, scenario=scenario, topology=_topology(plan, scale, state_dir, plan_service)
    )


def _topology(plan: Plan, scale: Scale, state_dir: Path, plan_service: Mapping[str, Any] | None) -> Topology:
    document = live_document(scale, plan.threshold_tokens, (plan.num_prfaas, plan.num_prefill, plan.num_decode))
    document |= {"plan": plan_service} if plan_service is not None else {}
    return parse_topology(document, state_dir)


def live_document(scale: Scale, threshold_tokens: float, nodes: tuple[int, int, int]) -> dict[str, Any]:
    """`configs/case_study_live.toml` with another threshold, so many PrfaaS, prefill and decode nodes, and no plan service."""
    document = read_toml(CONFIGS / "case_study_live.toml")
    del document["plan"]
    scales = {"time_scale": scale.time, "token_scale": scale.tokens, "byte_scale": scale.bytes}
    document["model"] |= {"profile": str(CONFIGS / document["model"]["profile"]), **scales}
    # A prompt's last token, which the decode node computes, comes on top.
    threshold = scale.tokens_of(threshold_tokens) + 1 if threshold_tokens else 0
    document["gateway"] |= {"port": 0, "threshold_tokens": threshold, "log_level": "warning"}
    num_prfaas, num_prefill, num_decode = nodes
    prfaas, pd = document["clusters"]
    prfaas["nodes"] = prfaas["nodes"][:num_prfaas]
    counts = {"prefill": num_prefill, "decode": num_decode}
    pd["nodes"] = [
        {"node_id": f"pd-{role[0]}{number}", "role": role} for role, count in counts.items() for number in range(count)
    ]
    if not num_prfaas:
        document["clusters"], document["links"] = [pd], []
    return document


class LiveDeployment:
    """A running deployment that requests are sent to."""

    def __init__(self, system: System, scale: Scale, seed: int) -> None:
        self._system = system
        self.scale = scale
        self._rng = np.random.default_rng(seed)
        self._seq = 0
        self._runs = 0
        self.wrong: list[str] = []
        self.late_p99_s = 0.0

    async def run(self, trace: Trace) -> CaseRun:
        """Sends every request at its time and waits for all answers."""
        lag, self._runs = Lag(), self._runs + 1
        watch = asyncio.create_task(lag.watch())
        begin = time.monotonic()
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._one(session, trace, number, begin)) for number in range(len(trace))]
            records = await self._records(session, len(trace))
        watch.cancel()
        self.late_p99_s = max(self.late_p99_s, float(np.quantile(lag.late_s, 0.99)))
        return self._seen(trace, [task.result() for task in tasks], records)

    def prompt(self, trace: Trace, number: int) -> list[int]:
        """Tokens of a request: chance, so that nothing is cached. The decode node computes the last one, which the model's
        length has not.
        """
        length = self.scale.tokens_of(trace.prompt_tokens[number]) + 1
        tokens: list[int] = self._rng.integers(len(SPECIAL_TOKENS), VOCAB_SIZE, length).tolist()
        return tokens

    async def _one(
        self, session: aiohttp.ClientSession, trace: Trace, number: int, begin: float
    ) -> DemoCompletion | None:
        prompt = self.prompt(trace, number)
        max_tokens = self.scale.tokens_of(trace.output_tokens[number])
        name = f"r{self._runs}-{number}"
        await asyncio.sleep(max(0.0, begin + trace.arrival_s[number] * self.scale.time - time.monotonic()))
        body = {"model": self._system.topology.model.served_name, "prompt": prompt, "max_tokens": max_tokens}
        body |= {"temperature": 0, "ignore_eos": True}
        try:
            answer = await complete(session, self._system.api_url, body, name)
        except RequestFailed as error:
            self.wrong.append(str(error))
            return None
        if answer.token_ids != emulated_tokens(prompt, max_tokens):
            self.wrong.append(f"{name}: not the tokens of its prompt")
        return answer

    async def _records(self, session: aiohttp.ClientSession, count: int) -> list[dict[str, Any]]:
        """The gateway's, of this run: it writes one right after an answer's last byte."""
        records: list[dict[str, Any]] = []
        async with asyncio.timeout(RECORDS_S):
            while len(records) < count:
                params = {"since": self._seq}
                async with session.get(f"{self._system.api_url}/prfaas/requests", params=params) as answer:
                    new = [json.loads(line) for line in (await answer.text()).splitlines()]
                records += new
                self._seq = max((record["seq"] for record in new), default=self._seq)
                await asyncio.sleep(LAG_EVERY_S)
        return records

    def _seen(
        self, trace: Trace, answers: Sequence[DemoCompletion | None], records: Sequence[Mapping[str, Any]]
    ) -> CaseRun:
        ttft = np.array([answer.ttft_s if answer else np.inf for answer in answers]) / self.scale.time
        steps = max(1.0, (trace.output_tokens[0] - 1 / self.scale.tokens))
        tbt = [(answer.e2e_s - answer.ttft_s) / self.scale.time / steps for answer in answers if answer]
        remote = [record for record in records if record["route"] == "remote"]
        sent = sum(record["bytes"] or 0 for record in remote) / self.scale.bytes
        return CaseRun(
            ttft_mean_s=float(ttft.mean()),
            ttft_p90_s=float(np.quantile(ttft, 0.9)),
            tbt_mean_s=float(np.mean(tbt)),
            egress_gbps=sent * 8e-9 / trace.span_s,
            offloaded=len(remote) / len(trace),
        )


def simulated(scenario: Scenario, trace: Trace, seed: int) -> CaseRun:
    """The same requests in the simulator."""
    outcome = simulate(scenario, trace, seed)
    report = outcome.report()
    return CaseRun(
        ttft_mean_s=report["ttft_mean_s"],
        ttft_p90_s=report["ttft_p90_s"],
        tbt_mean_s=report["tbt_mean_s"],
        egress_gbps=outcome.sent_bytes * 8e-9 / trace.span_s,
        offloaded=report["offload_fraction"],
    )


def simulated_rate(scenario: Scenario, trace: Trace, seed: int) -> float:
    """The highest rate within the SLO, by bisection."""
    low, high = 0.1, 10.0
    while high - low > RATE_STEP:
        middle = (low + high) / 2
        held = simulated(scenario, trace.faster(middle), seed).ttft_p90_s <= SLO_TTFT_P90_S
        low, high = (middle, high) if held else (low, middle)
    return low


def rate_at_slo(tried: Mapping[float, float]) -> float:
    """Where the line through the last rate that held (rate → P90) and the first that did not crosses the SLO."""
    held = [rate for rate, p90 in tried.items() if p90 <= SLO_TTFT_P90_S]
    broke = [rate for rate, p90 in tried.items() if p90 > SLO_TTFT_P90_S]
    if not held or not broke or min(broke) < max(held):
        return max(held, default=0.0)
    low, high = max(held), min(broke)
    return low + (high - low) * (SLO_TTFT_P90_S - tried[low]) / (tried[high] - tried[low])


async def measure(
    contender: CaseDeployment, site: Site, loads: Sequence[float], args: argparse.Namespace
) -> dict[str, Any]:
    """All runs of one deployment."""
    few, many = (requests_of(site, count, args.seed) for count in (LOAD_REQUESTS, args.requests))
    seed, scenario = args.seed, contender.scenario
    state_dir, scale = Path(args.state_dir), contender.topology.model.scale
    ensure_model(contender.topology.model, state_dir, say)
    expected = simulated_rate(scenario, many, seed)
    begin = time.monotonic()
    async with System(contender.topology, state_dir / "case-study", lambda line: None) as system:
        say(f"{contender.name}: {len(system.nodes)} instances up after {time.monotonic() - begin:.0f} s")
        live = LiveDeployment(system, scale, seed)

        async def pair(base: Trace, rate: float) -> dict[str, Any]:
            trace = base.faster(rate)
            seen, computed = await live.run(trace), simulated(scenario, trace, seed)
            say(f"  {rate:5.2f} req/s  live {seen.row()}  simulated {computed.row()}")
            return {"rate_req_per_s": rate, "live": seen.row(), "simulated": computed.row()}

        same = [await pair(few, rate) for rate in loads]
        tried: list[dict[str, Any]] = []
        rate = expected
        while len(tried) < MAX_TRIED and len(set(map(_held, tried))) < 2:
            tried.append(await pair(many, rate))
            rate *= RATE_STEPS[not _held(tried[-1])]
    p90s = {run["rate_req_per_s"]: run["live"]["ttft_p90_s"] for run in tried}
    return {
        "name": contender.name,
        "threshold_tokens": contender.plan.threshold_tokens,
        "instances": [contender.plan.num_prfaas, contender.plan.num_prefill, contender.plan.num_decode],
        "lambda_max_req_per_s": contender.plan.lambda_max,
        "same_load": same,
        "at_slo": tried,
        "throughput_at_slo": {"live": rate_at_slo(p90s), "simulated": expected},
        "timers_late_p99_s": live.late_p99_s,
        "wrong": live.wrong,
    }


def _held(run: Mapping[str, Any]) -> bool:
    return bool(run["live"]["ttft_p90_s"] <= SLO_TTFT_P90_S)


def ratios(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The first over each of the others: throughput, and TTFT at each common load."""
    ours, *others = rows
    return {other["name"]: _ratios(ours, other) for other in others}


def _ratios(ours: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {"lambda_max": ours["lambda_max_req_per_s"] / other["lambda_max_req_per_s"]}
    pairs = list(zip(ours["same_load"], other["same_load"], strict=True))
    for kind in ("live", "simulated"):
        found[f"throughput_at_slo_{kind}"] = _over(ours["throughput_at_slo"][kind], other["throughput_at_slo"][kind])
        for key in ("ttft_mean_s", "ttft_p90_s"):
            found[f"{key}_{kind}"] = [mine[kind][key] / its[kind][key] for mine, its in pairs]
    return found


def _over(ours: float, other: float) -> float:
    """nan where nothing that was tried held."""
    return ours / other if other else float("nan")


def table(result: Mapping[str, Any]) -> str:
    """Live / simulated."""
    lines = [f"{'':22} {'req/s':>6} {'TTFT mean s':>15} {'P90 s':>15} {'egress Gbit/s':>15} offloaded"]
    for row in result["deployments"]:
        for run in (*row["same_load"], *row["at_slo"]):
            live, computed = run["live"], run["simulated"]
            cells = [f"{live[key]:6.2f} /{computed[key]:6.2f}" for key in ("ttft_mean_s", "ttft_p90_s", "egress_gbps")]
            lines.append(f"{row['name']:22} {run['rate_req_per_s']:6.2f} {' '.join(f'{cell:>15}' for cell in cells)}"
                         f" {live['offloaded']:6.0%}")  # fmt: skip
        at_slo = row["throughput_at_slo"]
        lines.append(f"{'':22} at SLO {at_slo['live']:.2f} / {at_slo['simulated']:.2f}, by E[T(L)] "
                     f"{row['lambda_max_req_per_s']:.2f} req/s; {len(row['wrong'])} wrong answers")  # fmt: skip
    for name, found in result["ratios"].items():
        lines.append(f"over {name}: throughput {found['throughput_at_slo_live']:.2f} / "
                     f"{found['throughput_at_slo_simulated']:.2f}, by E[T(L)] {found['lambda_max']:.2f}")  # fmt: skip
        for key in ("ttft_mean_s", "ttft_p90_s"):
            cells = [f"{live - 1:+.0%} / {computed - 1:+.0%}"
                     for live, computed in zip(found[f"{key}_live"], found[f"{key}_simulated"], strict=True)]  # fmt: skip
            lines.append(f"  {key} at the same loads: {', '.join(cells)}")
    return "\n".join(lines)


def say(line: str) -> None:
    """Progress, beside the result."""
    print(line, file=sys.stderr, flush=True)


async def run(args: argparse.Namespace) -> dict[str, Any]:
    site = load_site(CONFIGS / "case_study.toml")
    document = read_toml(CONFIGS / "case_study_live.toml")["model"]
    scale = Scale(
        time=args.time_scale or document["time_scale"], tokens=document["token_scale"], bytes=document["byte_scale"]
    )
    contenders = [contender(site, name, scale, Path(args.state_dir)) for name in DEPLOYMENTS]
    baseline = next(each for each in contenders if each.name == BASELINE)
    loads = [share * baseline.plan.lambda_max for share in LOADS]
    begin = time.monotonic()
    rows = [await measure(each, site, loads, args) for each in contenders]
    return {
        "requests": args.requests,
        "seed": args.seed,
        "time_scale": scale.time,
        "token_scale": scale.tokens,
        "byte_scale": scale.bytes,
        "slo_ttft_p90_s": SLO_TTFT_P90_S,
        "deployments": rows,
        "ratios": ratios(rows),
        "load_average": os.getloadavg()[1],
        "seconds": time.monotonic() - begin,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--requests", type=int, default=480, help="of a run at the SLO (default: %(default)s)")
    parser.add_argument("--time-scale", type=float, help="instead of that of configs/case_study_live.toml")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--state-dir", help="directory for files (default: a temporary one)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        args.state_dir = args.state_dir or directory
        result = asyncio.run(run(args))
    print(json.dumps(result, indent=2) if args.json else table(result))


if __name__ == "__main__":
    main()
