"""Twice what can be served, live: `python -m benchmarks.system.overload [--json] [--requests N] [--time-scale S] [--factor F]`.

A small PD cluster of engines that stand in for the case study's model (`prfaas.system.standin`), with a gateway that promises a
TTFT and a TBT. Each rejection policy of Mooncake (§4.3, §5) is sent the same requests at the same times, and the simulator, too:

    refused       requests turned away, by the stage that bound; after the prefill, only by the baseline
    wasted        prefill seconds computed for requests that got no answer
    goodput       requests per second within both SLOs
    swing         standard deviation of the requests in decode over time, from the first that ended to the last that came

Seconds are the model's.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp
import numpy as np

from engine.byte_tokenizer import SPECIAL_TOKENS, VOCAB_SIZE
from engine.emulated.emulated import emulated_tokens
from planner.decisions.admission.overload import AdmissionPolicy
from planner.decisions.routing.policy import RoutingPolicy
from planner.decisions.views import ClusterKind
from planner.model.profile import ModelProfile, load_profile
from planner.model.workload import Trace
from planner.simulator.outcome import SimulationOutcome
from planner.simulator.scenario import Pool, Scenario, Targets
from planner.simulator.world import simulate
from prfaas.demo.client import DemoCompletion, RequestFailed, complete
from prfaas.system.models import ensure_model
from prfaas.system.standin import Scale
from prfaas.system.system import System
from prfaas.system.topology import Topology, parse_topology

PROFILE: Final = Path(__file__).parents[2] / "configs" / "profiles" / "internal-1t.json"
HARDWARE: Final = "h20x8"
NUM_PREFILL: Final = 5
SLOTS: Final = 8  # of the decode node: few, so that a prefill is long beside the time between two that come free
PROMPT_TOKENS: Final = (12_800, 51_200)  # 5 s of prefill on average
ANSWER_TOKENS: Final = (4, 11)  # of here: 10 s of decode on average
TARGETS: Final = Targets(ttft_s=20.0, tbt_s=0.05)
POLICIES: Final = (AdmissionPolicy.BASELINE, AdmissionPolicy.EARLY, AdmissionPolicy.PREDICTION)
TOKEN_SCALE: Final = 1 / 64
BYTE_SCALE: Final = 0.001
WARM_UP: Final = 12  # requests, in pairs: the gateway learns what prefill and decode take
RECORDS_S: Final = 30.0
POLL_S: Final = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class OverloadRun:
    """One run, in seconds of the model."""

    requests: int
    refused: int
    refused_by_reason: Mapping[str, int]
    wasted_prefill_s: float
    goodput_req_per_s: float
    ttft_p90_s: float
    swing: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OverloadTrace:
    """The requests: `trace` in the model's units, and the answers' lengths in real tokens."""

    trace: Trace
    answers: Sequence[int]


def answer_tokens(here: int, scale: Scale) -> float:
    """Decode steps of an answer: the first token of here takes one, every other one as many as it stands for."""
    return 1 + (here - 1) / scale.tokens


def load_of(count: int, factor: float, scale: Scale, step_s: float, seed: int) -> OverloadTrace:
    """Evenly spread lengths in random order, at `factor` times the rate that the decode node can serve."""
    rng = np.random.default_rng(seed)
    shares = (np.arange(count) + 0.5) / count
    low, high = PROMPT_TOKENS
    shortest, longest = ANSWER_TOKENS
    answers = [int(each) for each in rng.permutation(shortest + np.arange(count) % (longest - shortest + 1))]
    outputs = np.array([answer_tokens(each, scale) for each in answers])
    rate = factor * SLOTS / (float(outputs.mean()) * step_s)
    trace = Trace(
        name=f"{count} requests",
        arrival_s=np.cumsum(rng.permutation(-np.log1p(-shares))) / rate,
        prompt_tokens=np.round(rng.permutation(low + shares * (high - low))),
        output_tokens=outputs,
    )
    return OverloadTrace(trace=trace, answers=answers)


def profile_in(directory: Path) -> Path:
    """The case study's profile with fewer slots."""
    document = json.loads(PROFILE.read_text())
    document["decode"][HARDWARE] |= {"max_running": SLOTS, "provenance": "derived: the case study's, with fewer slots"}
    path = directory / "overload-1t.json"
    path.write_text(json.dumps(document))
    return path


def topology_of(profile: Path, policy: AdmissionPolicy, scale: Scale, state_dir: Path) -> Topology:
    """One PD cluster whose default class is promised the targets; `warm-up` is promised nothing."""
    promised = {"ttft_s": TARGETS.ttft_s * scale.time, "tbt_ms": 1000 * TARGETS.tbt_s * scale.time / scale.tokens}
    nodes = [{"node_id": f"pd-p{number}", "role": "prefill"} for number in range(NUM_PREFILL)]
    document = {
        "model": {
            "profile": str(profile),
            "name": "overload-1t",
            "time_scale": scale.time,
            "token_scale": scale.tokens,
            "byte_scale": scale.bytes,
        },
        "gateway": {
            "port": 0,
            "log_level": "warning",
            "routing": {"prefill_tokens_per_s": 100.0 / scale.time, "decode_slots": SLOTS},
            "admission": {"policy": str(policy)},
            "classes": {"default": promised, "warm-up": {"priority": 1}},
        },
        "node": {"block_size": 16, "chunk_tokens": 128, "cache_bytes": 64 << 20},
        "clusters": [
            {
                "name": "pd",
                "kind": "pd",
                "hardware": HARDWARE,
                "nodes": [*nodes, {"node_id": "pd-d0", "role": "decode"}],
            }
        ],
    }
    return parse_topology(document, state_dir)


def scenario_of(profile: ModelProfile, policy: AdmissionPolicy) -> Scenario:
    """The same system for the simulator."""
    pool = Pool(
        name="pd",
        kind=ClusterKind.PD,
        num_prefill=NUM_PREFILL,
        num_decode=1,
        prefill=profile.prefill_on(HARDWARE),
        decode=profile.decode_on(HARDWARE),
    )
    routing = RoutingPolicy(threshold_tokens=float("inf"))
    return Scenario(pools=[pool], kv=profile.kv_size(), routing=routing, admission=policy, targets=TARGETS)


@dataclass(frozen=True, slots=True)
class OverloadRequest:
    """One request; times after its arrival in seconds of the model, nan where it was refused."""

    ttft_s: float = float("nan")
    e2e_s: float = float("nan")
    tbt_s: float = float("nan")
    refused: str = ""


class OverloadedSystem:
    """A running system under a load."""

    def __init__(self, system: System, scale: Scale, seed: int) -> None:
        self._system = system
        self._scale = scale
        self._rng = np.random.default_rng(seed)
        self.wrong: list[str] = []

    async def run(self, load: OverloadTrace) -> OverloadRun:
        """Sends every request at its time and waits for all answers."""
        trace = load.trace
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            for number in range(0, WARM_UP, 2):
                await asyncio.gather(*(self._one(session, load, number + each, None) for each in range(2)))
            begin = time.monotonic()
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._one(session, load, number, begin)) for number in range(len(trace))]
            records = await self._records(session, WARM_UP + len(trace))
        answered = [task.result() for task in tasks]
        return seen(
            trace,
            np.array([each.ttft_s for each in answered]),
            np.array([each.tbt_s for each in answered]),
            np.array([each.e2e_s for each in answered]),
            Counter(each.refused for each in answered if each.refused),
            sum(record["wasted_prefill_s"] for record in records) / self._scale.time,
        )

    async def _one(
        self, session: aiohttp.ClientSession, load: OverloadTrace, number: int, begin: float | None
    ) -> OverloadRequest:
        # The decode node computes the last token of a prompt, which the model's length has not.
        length = self._scale.tokens_of(load.trace.prompt_tokens[number]) + 1
        prompt = self._rng.integers(len(SPECIAL_TOKENS), VOCAB_SIZE, length).tolist()
        body = {"model": self._system.topology.model.served_name, "prompt": prompt, "max_tokens": load.answers[number]}
        body |= {"temperature": 0, "ignore_eos": True}
        name = f"warm-{number}" if begin is None else f"r-{number}"
        if begin is not None:
            await asyncio.sleep(max(0.0, begin + load.trace.arrival_s[number] * self._scale.time - time.monotonic()))
        try:
            answer = await complete(
                session, self._system.api_url, body, name, {"x-prfaas-class": "warm-up"} if begin is None else {}
            )
        except RequestFailed as error:
            if error.status != 429:
                self.wrong.append(str(error))
            return OverloadRequest(refused=error.code or "failed")
        if answer.token_ids != emulated_tokens(prompt, load.answers[number]):
            self.wrong.append(f"{name}: not the tokens of its prompt")
        return self._answered(answer, load.trace.output_tokens[number])

    def _answered(self, answer: DemoCompletion, steps: float) -> OverloadRequest:
        ttft_s, e2e_s = answer.ttft_s / self._scale.time, answer.e2e_s / self._scale.time
        return OverloadRequest(ttft_s=ttft_s, e2e_s=e2e_s, tbt_s=(e2e_s - ttft_s) / max(1.0, steps - 1))

    async def _records(self, session: aiohttp.ClientSession, count: int) -> list[dict[str, Any]]:
        """The gateway's, which writes one right after an answer's last byte."""
        async with asyncio.timeout(RECORDS_S):
            while True:
                async with session.get(f"{self._system.api_url}/prfaas/requests") as answer:
                    records = [json.loads(line) for line in (await answer.text()).splitlines()]
                if len(records) >= count:
                    return records
                await asyncio.sleep(POLL_S)


def simulated(profile: ModelProfile, policy: AdmissionPolicy, load: OverloadTrace, seed: int) -> OverloadRun:
    """The same requests in the simulator."""
    found: SimulationOutcome = simulate(scenario_of(profile, policy), load.trace, seed)
    return seen(load.trace, found.ttft_s, found.tbt_s, found.e2e_s, found.rejects, found.wasted_prefill_s)


def seen(
    trace: Trace, ttft_s: Any, tbt_s: Any, e2e_s: Any, refused: Mapping[str, int], wasted_prefill_s: float
) -> OverloadRun:
    """The measures of both kinds of run."""
    done = ~np.isnan(ttft_s)
    good = done & (ttft_s <= TARGETS.ttft_s) & (tbt_s <= TARGETS.tbt_s)
    arrival_s = trace.arrival_s - trace.arrival_s[0]
    starts, ends = (np.sort((arrival_s + times)[done]) for times in (ttft_s, e2e_s))
    moments = np.arange(ends[0], arrival_s[-1], 0.25) if len(ends) else np.zeros(1)
    held = np.searchsorted(starts, moments) - np.searchsorted(ends, moments)
    return OverloadRun(
        requests=len(trace),
        refused=sum(refused.values()),
        refused_by_reason=dict(sorted(refused.items())),
        wasted_prefill_s=float(wasted_prefill_s),
        goodput_req_per_s=float(good.sum()) / trace.span_s,
        ttft_p90_s=float(np.quantile(ttft_s[done], 0.9)) if done.any() else float("nan"),
        swing=float(held.std()),
    )


async def measure(
    policy: AdmissionPolicy, load: OverloadTrace, scale: Scale, args: argparse.Namespace
) -> dict[str, Any]:
    """One policy, live and simulated."""
    state_dir = Path(args.state_dir)
    path = profile_in(state_dir)
    topology = topology_of(path, policy, scale, state_dir)
    ensure_model(topology.model, state_dir, say)
    async with System(topology, state_dir / "overload", lambda line: None) as system:
        live = OverloadedSystem(system, scale, args.seed)
        found = await live.run(load)
    computed = simulated(load_profile(path), policy, load, args.seed)
    say(f"{policy}: live {asdict(found)}")
    say(f"{policy}: simulated {asdict(computed)}")
    return {"policy": str(policy), "live": asdict(found), "simulated": asdict(computed), "wrong": live.wrong}


def orderings(rows: Sequence[Mapping[str, Any]], kind: str) -> dict[str, bool]:
    """What is published of the policies, as far as it holds here."""
    baseline, early, prediction = (row[kind] for row in rows)
    return {
        "early wastes less than the baseline": early["wasted_prefill_s"] < baseline["wasted_prefill_s"],
        "prediction wastes less than the baseline": prediction["wasted_prefill_s"] < baseline["wasted_prefill_s"],
        "prediction refuses no more than early": prediction["refused"] <= early["refused"],
        "prediction swings no more than early": prediction["swing"] <= early["swing"],
        "prediction serves as many within the SLOs as early": prediction["goodput_req_per_s"]
        >= early["goodput_req_per_s"],
    }


def table(result: Mapping[str, Any]) -> str:
    """Live / simulated."""
    columns = {"refused": "refused", "wasted_prefill_s": "wasted s", "goodput_req_per_s": "goodput req/s"}
    columns |= {"ttft_p90_s": "TTFT P90 s", "swing": "swing"}
    lines = [f"{'':12}" + "".join(f"{title:>18}" for title in columns.values())]
    for row in result["policies"]:
        cells = [f"{row['live'][key]:.2f} / {row['simulated'][key]:.2f}" for key in columns]
        lines.append(f"{row['policy']:12}" + "".join(f"{cell:>18}" for cell in cells))
        lines.append(f"{'':12}  {row['live']['refused_by_reason']}; {len(row['wrong'])} wrong or failed")
    for name, holds in result["orderings"]["live"].items():
        lines.append(
            f"{name}: {'yes' if holds else 'no'} (simulated: {'yes' if result['orderings']['simulated'][name] else 'no'})"
        )
    return "\n".join(lines)


def say(line: str) -> None:
    """Progress, beside the result."""
    print(line, file=sys.stderr, flush=True)


async def run(args: argparse.Namespace) -> dict[str, Any]:
    scale = Scale(time=args.time_scale, tokens=TOKEN_SCALE, bytes=BYTE_SCALE)
    step_s = load_profile(PROFILE).decode_on(HARDWARE).step_s
    load = load_of(args.requests, args.factor, scale, step_s, args.seed)
    begin = time.monotonic()
    rows = [await measure(policy, load, scale, args) for policy in POLICIES]
    return {
        "requests": args.requests,
        "factor": args.factor,
        "seed": args.seed,
        "time_scale": scale.time,
        "slo": asdict(TARGETS),
        "policies": rows,
        "orderings": {kind: orderings(rows, kind) for kind in ("live", "simulated")},
        "load_average": os.getloadavg()[1],
        "seconds": time.monotonic() - begin,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--requests", type=int, default=480)
    parser.add_argument(
        "--factor", type=float, default=2.0, help="of the decode node's capacity (default: %(default)s)"
    )
    parser.add_argument("--time-scale", type=float, default=0.2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--state-dir", help="directory for files (default: a temporary one)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        args.state_dir = args.state_dir or directory
        result = asyncio.run(run(args))
    print(json.dumps(result, indent=2) if args.json else table(result))


if __name__ == "__main__":
    main()
