"""Disturbs a running deployment, and measures how it recovers: `python -m benchmarks.system.disturbances [--only NAME
…] [--plots DIR]`.

The PrfaaS-PD deployment of the case study (`configs/case_study_live.toml`) under a steady load; its link goes through a relay
whose rate can be changed, and its plan service applies by itself what it finds better: threshold and roles of nodes. One
disturbance after the other, each between a calm before and a calm after:

    thin link       the line carries a tenth
    dead link       it carries nothing, silently
    burst           ten times as many requests
    dead node       kill -9 of a PrfaaS node, which its keeper starts again
    night to day    short prompts and few become long ones and many

Seconds are of here (the model's times `time_scale`). Of each: P90 TTFT before, in and after; how long after its end P90 was
near what it was before; what was refused with a reason, what failed although it was accepted, and wrong tokens; which plans
came into force, and how often the threshold went too far and came back. `--plots DIR` draws them, and the table is Markdown:
docs/results.md shows both.
"""

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, Final

import aiohttp
import msgspec
import numpy as np

from benchmarks.lib.processes import GreetingChild
from benchmarks.system.case_study import CONFIGS, SLO_TTFT_P90_S, contender, requests_of, say
from benchmarks.system.disturbance_plot import plot
from engine.byte_tokenizer import SPECIAL_TOKENS, VOCAB_SIZE
from engine.emulated.emulated import emulated_tokens
from planner.decisions.plans.offered import GatewayLoad, of_kind
from planner.decisions.views import ClusterKind, Role
from planner.model.site import Site, load_site
from planner.model.workload import Trace
from planner.solve.control.ledger import LedgerEntry, PlanEvent
from planner.solve.control.readings import Cursors
from prfaas.demo.client import RequestFailed, complete
from prfaas.errors import StartError
from prfaas.system.models import ensure_model
from prfaas.system.standin import Scale
from prfaas.system.system import System
from prfaas.system.topology import Topology
from tests.storm.system import free_port
from transport.control.settings import read_toml

LINE_GBPS: Final = 100.0
BEFORE_S: Final = 20.0
AFTER_S: Final = 30.0
LOAD: Final = 0.5  # of what the deployment can carry
WINDOW_S: Final = 5.0
RECOVERED: Final = 1.5  # P90 of a window over that of the calm before
SAMPLE_EVERY_S: Final = 0.25
REFUSED: Final = ("HTTP 429", "HTTP 503")
ENTRIES: Final = 200  # of the plan service's history: a course has some dozens
# Seconds of here. A window of 20 s is 100 of the model, so that a shift shows within a minute; a quarter of an hour is
# usual; what 150 requests leave open, the controller's own test of its gains keeps it from believing.
PLAN_SERVICE: Final = {
    "port": 0,
    "mode": "auto",
    "conversions": True,
    "drain_timeout_s": 20.0,
    "controller": {"tick_s": 1.0, "warmup_s": 2.0, "window_s": 20.0, "min_requests": 60, "cooldown_s": 20.0},
    "limits": {"settle_s": 4.0},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrivalPhase:
    """Arrivals for some time: `rate` over the steady one, prompts `length` times as long."""

    seconds: float
    rate: float = 1.0
    length: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Disturbance:
    """A disturbance and the requests meanwhile. `strike` begins it and returns the function that ends it."""

    name: str
    phase: ArrivalPhase
    strike: "Callable[[DisturbedSystem], Awaitable[Callable[[], Awaitable[None]]]]"
    before: ArrivalPhase = ArrivalPhase(seconds=BEFORE_S)
    after: ArrivalPhase = ArrivalPhase(seconds=AFTER_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class DisturbedRequest:
    """One request. `at_s`: of its arrival after the start; `outcome` is a route, `refused`, `failed` or `wrong`."""

    at_s: float
    ttft_s: float
    outcome: str
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySample:
    """A sample of the gateway: its link, the requests under way, the version of its plan (0: none), and nodes by
    role."""

    at_s: float
    under_way: int
    up: bool
    available_bytes_per_s: float
    behind_bytes: float
    version: int
    threshold_tokens: float
    num_prefill: int
    num_decode: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """One disturbance, from calm to calm."""

    name: str
    begin_s: float
    end_s: float
    calm_p90_s: float  # of the steady load
    answers: Sequence[DisturbedRequest]
    samples: Sequence[GatewaySample]
    not_converted: Sequence[str] = ()  # node and reason

    def changes(self) -> list[GatewaySample]:
        """The first sample, and the first of every plan after."""
        return [next(same) for _, same in groupby(self.samples, lambda each: each.version)]

    def splits(self) -> list[str]:
        """Prefill and decode nodes that were ready, as they were one after the other."""
        return [split for split, _ in groupby(f"{each.num_prefill}/{each.num_decode}" for each in self.samples)]

    def overshoots(self) -> int:
        """How often the threshold went too far and came back, before, in or after the disturbance, whichever is most."""
        spans = pairwise((0.0, self.begin_s, self.end_s, float("inf")))
        return max(turns(self.thresholds(since_s, until_s)) for since_s, until_s in spans)

    def thresholds(self, since_s: float, until_s: float) -> list[float]:
        """The one that held at first, and those that followed."""
        before = [each for each in self.samples if each.at_s < since_s][-1:]
        then = [each for each in self.samples if since_s <= each.at_s < until_s]
        return [each.threshold_tokens for each in (*before, *then)]

    def p90_s(self, since_s: float, until_s: float) -> float:
        """Of the requests that arrived then and had a token."""
        found = [each.ttft_s for each in self.answers if since_s <= each.at_s < until_s and np.isfinite(each.ttft_s)]
        return float(np.quantile(found, 0.9)) if found else float("nan")

    def recovered_s(self) -> float:
        """How long after the end P90 was high, at most; inf if it stayed so."""
        last = self.answers[-1].at_s
        starts = np.arange(self.end_s, last - WINDOW_S, WINDOW_S / 5)
        high = [start for start in starts if self.p90_s(start, start + WINDOW_S) > RECOVERED * self.calm_p90_s]
        if not high:
            return 0.0
        return float("inf") if high[-1] == starts[-1] else float(high[-1] + WINDOW_S / 5 - self.end_s)

    def row(self) -> dict[str, Any]:
        """As JSON."""
        counts = {word: sum(each.outcome == word for each in self.answers) for word in ("refused", "failed", "wrong")}
        under_way = [each.under_way for each in self.samples]
        return {
            "name": self.name,
            "requests": len(self.answers),
            **counts,
            "ttft_p90_before_s": _known(self.p90_s(0.0, self.begin_s)),
            "ttft_p90_during_s": _known(self.p90_s(self.begin_s, self.end_s)),
            "ttft_p90_after_s": _known(self.p90_s(self.end_s, float("inf"))),
            "recovered_after_s": _known(self.recovered_s()),
            "most_under_way": max(under_way, default=0),
            "under_way_at_the_end": under_way[-1] if under_way else 0,
            "plans": [
                {"at_s": round(each.at_s, 1), "version": each.version, "threshold_tokens": each.threshold_tokens}
                for each in self.changes()
            ],
            "overshoots": self.overshoots(),
            "splits": self.splits(),
            "not_converted": list(self.not_converted),
            "failures": sorted({each.detail for each in self.answers if each.outcome in ("failed", "wrong")})[:5],
        }


def _known(value: float) -> float | None:
    """For JSON: nothing is said of no request, or of what did not come back."""
    return value if np.isfinite(value) else None


def turns(course: Sequence[float]) -> int:
    """How often it went one way after the other."""
    steps = [after - before for before, after in pairwise(course) if after != before]
    return sum((step > 0) != (following > 0) for step, following in pairwise(steps))


class DisturbedSystem:
    """The running system, its line, and who sends requests."""

    def __init__(self, system: System, line: GreetingChild, scale: Scale, steady: Trace, seed: int) -> None:
        self.system = system
        self.line = line
        self.scale = scale
        self._steady = steady
        self._rng = np.random.default_rng(seed)
        self._under_way = 0
        self._courses = 0
        self._calm_p90_s = 0.0

    @property
    def line_bytes_per_s(self) -> float:
        return self.scale.bytes_per_s(LINE_GBPS)

    async def course(self, disturbance: Disturbance) -> Course:
        """Calm, disturbance, calm."""
        self._courses += 1
        phases = (disturbance.before, disturbance.phase, disturbance.after)
        begin_s = phases[0].seconds
        end_s = begin_s + phases[1].seconds
        start, began_at = time.monotonic(), datetime.now(UTC).timestamp()
        samples: list[GatewaySample] = []
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            sampling = asyncio.create_task(self._sample(session, start, samples))
            async with asyncio.TaskGroup() as group:
                group.create_task(self._disturb(disturbance, start + begin_s, start + end_s))
                sent = [
                    group.create_task(self._one(session, f"d{self._courses}-{number}", start, *arrival))
                    for number, arrival in enumerate(self._arrivals(phases))
                ]
            sampling.cancel()
            entries = await self._history(session, began_at)
        answers = sorted((task.result() for task in sent), key=lambda each: each.at_s)
        course = Course(
            name=disturbance.name,
            begin_s=begin_s,
            end_s=end_s,
            calm_p90_s=0.0,
            answers=answers,
            samples=samples,
            not_converted=[entry.reason for entry in entries if entry.change is PlanEvent.NOT_CONVERTED],
        )
        self._calm_p90_s = self._calm_p90_s or course.p90_s(0.0, begin_s)
        return replace(course, calm_p90_s=self._calm_p90_s)

    async def _disturb(self, disturbance: Disturbance, begin: float, end: float) -> None:
        await asyncio.sleep(begin - time.monotonic())
        mend = await disturbance.strike(self)
        try:
            await asyncio.sleep(end - time.monotonic())
        finally:
            await mend()

    def _arrivals(self, phases: Sequence[ArrivalPhase]) -> list[tuple[float, int, int]]:
        """When (seconds of here), prompt and answer in tokens of here."""
        found, phase_at_s = [], 0.0
        for phase in phases:
            mean_s = self._steady.span_s / len(self._steady) * self.scale.time / phase.rate
            at_s = np.sort(self._rng.uniform(0.0, phase.seconds, round(phase.seconds / mean_s))) + phase_at_s
            for moment, which in zip(at_s, self._rng.integers(len(self._steady), size=len(at_s)), strict=True):
                length = self.scale.tokens_of(self._steady.prompt_tokens[which] * phase.length) + 1
                found.append((float(moment), length, self.scale.tokens_of(self._steady.output_tokens[which])))
            phase_at_s += phase.seconds
        return found

    async def _one(
        self, session: aiohttp.ClientSession, name: str, start: float, at_s: float, length: int, max_tokens: int
    ) -> DisturbedRequest:
        prompt = self._rng.integers(len(SPECIAL_TOKENS), VOCAB_SIZE, length).tolist()
        await asyncio.sleep(max(0.0, start + at_s - time.monotonic()))
        body = {"model": self.system.topology.model.served_name, "prompt": prompt, "max_tokens": max_tokens}
        body |= {"temperature": 0, "ignore_eos": True}
        self._under_way += 1
        try:
            done = await complete(session, self.system.api_url, body, name)
        except RequestFailed as error:
            refused = any(status in str(error) for status in REFUSED)
            return DisturbedRequest(
                at_s=at_s, ttft_s=float("inf"), outcome="refused" if refused else "failed", detail=str(error)
            )
        finally:
            self._under_way -= 1
        right = done.token_ids == emulated_tokens(prompt, max_tokens)
        return DisturbedRequest(
            at_s=at_s, ttft_s=done.ttft_s, outcome=done.route.partition(";")[0] if right else "wrong"
        )

    async def _sample(self, session: aiohttp.ClientSession, start: float, samples: list[GatewaySample]) -> None:
        cursors = Cursors()
        while True:
            with suppress(aiohttp.ClientError, ValueError, IndexError):
                async with session.get(f"{self.system.api_url}/prfaas/links") as answer:
                    link = (await answer.json(content_type=None))["data"][0]
                async with session.get(f"{self.system.api_url}/prfaas/load", params=cursors.query()) as answer:
                    load = msgspec.json.decode(await answer.read(), type=GatewayLoad)
                cursors.new(load)
                prefills, decodes = (of_kind(load.nodes, ClusterKind.PD, role) for role in (Role.PREFILL, Role.DECODE))
                samples.append(
                    GatewaySample(
                        at_s=time.monotonic() - start,
                        under_way=self._under_way,
                        up=link["up"],
                        available_bytes_per_s=link["available_bytes_per_s"] or 0.0,
                        behind_bytes=link["queued_bytes"] + link["promised_bytes"],
                        version=load.follows.version if load.follows is not None else 0,
                        threshold_tokens=load.threshold_tokens,
                        num_prefill=len(prefills),
                        num_decode=len(decodes),
                    )
                )
            await asyncio.sleep(SAMPLE_EVERY_S)

    async def _history(self, session: aiohttp.ClientSession, since: float) -> list[LedgerEntry]:
        """The plan service's audit entries since then (seconds since the epoch)."""
        async with session.get(f"{self.system.plan_url}/history", params={"limit": ENTRIES}) as answer:
            entries = msgspec.json.decode(await answer.read(), type=list[LedgerEntry])
        return [entry for entry in entries if entry.at >= since]


async def _thin(stage: DisturbedSystem) -> Callable[[], Awaitable[None]]:
    return await _line_at(stage, stage.line_bytes_per_s / 10)


async def _dead(stage: DisturbedSystem) -> Callable[[], Awaitable[None]]:
    return await _line_at(stage, 0.0)


async def _line_at(stage: DisturbedSystem, bytes_per_s: float) -> Callable[[], Awaitable[None]]:
    await asyncio.to_thread(stage.line.ask, bytes_per_s=bytes_per_s)

    async def mend() -> None:
        await asyncio.to_thread(stage.line.ask, bytes_per_s=stage.line_bytes_per_s)

    return mend


async def _kill(stage: DisturbedSystem) -> Callable[[], Awaitable[None]]:
    victim = next(node for node in stage.system.nodes.values() if node.config.cluster_kind == "prfaas")
    os.kill(victim.process.pid, signal.SIGKILL)
    return _nothing


async def _only_load(stage: DisturbedSystem) -> Callable[[], Awaitable[None]]:
    return _nothing


async def _nothing() -> None:
    """The end of what ends by itself."""


CALM: Final = Disturbance(
    name="calm", phase=ArrivalPhase(seconds=1.0), strike=_only_load, after=ArrivalPhase(seconds=1.0)
)
# Long enough to be planned for.
NIGHT: Final = ArrivalPhase(seconds=2 * BEFORE_S, rate=0.6, length=0.5)
DAY: Final = ArrivalPhase(seconds=2 * AFTER_S)
DISTURBANCES: Final = (
    Disturbance(name="thin link", phase=ArrivalPhase(seconds=30.0), strike=_thin),
    Disturbance(name="dead link", phase=ArrivalPhase(seconds=30.0), strike=_dead),
    Disturbance(name="burst", phase=ArrivalPhase(seconds=20.0, rate=10.0), strike=_only_load),
    Disturbance(name="dead node", phase=ArrivalPhase(seconds=15.0), strike=_kill),
    # A shift takes no time, and does not end.
    Disturbance(name="night to day", before=NIGHT, phase=ArrivalPhase(seconds=0.0), after=DAY, strike=_only_load),
)


def deployment(site: Site, scale: Scale, state_dir: Path) -> tuple[Topology, dict[str, int]]:
    """The case study's with its SLO as a promise, and the ports at which its PD nodes really listen for the line: all of them,
    as any may come to decode."""
    promised = {"default": {"ttft_s": SLO_TTFT_P90_S * scale.time}}
    topology = contender(site, "PrfaaS-PD", scale, state_dir, PLAN_SERVICE).topology.replace_gateway(classes=promised)
    ports = {node.node_id: free_port() for node in topology.nodes if node.cluster_kind == "pd"}
    return topology, ports


def behind_line(topology: Topology, ports: dict[str, int], relays: dict[str, int]) -> Topology:
    """PD nodes are reached from the other cluster through the relay only."""
    nodes = [
        replace(node, transfer_port=ports[node.node_id], transfer_advertise=f"127.0.0.1:{relays[node.node_id]}")
        if node.node_id in ports
        else node
        for node in topology.nodes
    ]
    return replace(topology, nodes=tuple(nodes))


async def run(args: argparse.Namespace) -> tuple[dict[str, Any], list[Course]]:
    site = load_site(CONFIGS / "case_study.toml")
    document = read_toml(CONFIGS / "case_study_live.toml")["model"]
    scale = Scale(time=document["time_scale"], tokens=document["token_scale"], bytes=document["byte_scale"])
    state_dir = Path(args.state_dir)
    ours = contender(site, "PrfaaS-PD", scale, state_dir)
    topology, ports = deployment(site, scale, state_dir)
    ensure_model(topology.model, state_dir, say)
    rate = args.load * ours.plan.lambda_max
    steady = requests_of(site, 1000, args.seed).faster(rate)
    begin, courses = time.monotonic(), []
    line = GreetingChild(
        [sys.executable, "-m", "benchmarks.lib.line", str(scale.bytes_per_s(LINE_GBPS)), *map(str, ports.values())]
    )
    try:
        relays = dict(zip(ports, line.greeting["ports"], strict=True))
        async with System(behind_line(topology, ports, relays), state_dir / "disturbed", lambda _: None) as system:
            say(
                f"{len(system.nodes)} instances up after {time.monotonic() - begin:.0f} s; {rate:.2f} req/s of the model"
            )
            keeper = asyncio.create_task(_keep(system))
            stage = DisturbedSystem(system, line, scale, steady, args.seed)
            await stage.course(CALM)
            for disturbance in DISTURBANCES:
                if not args.only or disturbance.name in args.only:
                    courses.append(await stage.course(disturbance))
                    say(json.dumps(courses[-1].row()))
            keeper.cancel()
    finally:
        line.close()
    result = {
        "load": args.load,
        "rate_req_per_s": rate / scale.time,
        "time_scale": scale.time,
        "courses": [course.row() for course in courses],
        "load_average": os.getloadavg()[1],
        "seconds": time.monotonic() - begin,
    }
    return result, courses


async def _keep(system: System) -> None:
    """As `prfaas up` does."""
    try:
        await system.watch()
    except StartError as error:
        say(f"given up: {error}")


COLUMNS: Final = ("", "requests", "refused", "failed", "wrong", "P90 TTFT before, in, after (s)", "back to normal after (s)",
                  "under way at most, at the end", "plans applied", "overshoots", "prefill/decode nodes")  # fmt: skip


def table(result: dict[str, Any]) -> str:
    """One line per disturbance, in Markdown."""
    lines = [_line(COLUMNS), _line(["---"] * len(COLUMNS))]
    for row in result["courses"]:
        p90s = ", ".join(_seconds(row[f"ttft_p90_{when}_s"]) for when in ("before", "during", "after"))
        counts = [row[name] for name in ("requests", "refused", "failed", "wrong")]
        under_way = f"{row['most_under_way']}, {row['under_way_at_the_end']}"
        plans = [len(row["plans"]) - 1, row["overshoots"], " → ".join(row["splits"])]
        lines.append(_line([row["name"], *counts, p90s, _seconds(row["recovered_after_s"], 0), under_way, *plans]))
    about = f"{result['load']:.0%} of what the deployment can carry, {result['rate_req_per_s']:.1f} requests/s"
    return "\n".join([*lines, "", f"{about}; load average {result['load_average']:.1f} on {os.cpu_count()} cores."])


def _seconds(value: float | None, digits: int = 2) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _line(cells: Sequence[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", nargs="+", choices=[each.name for each in DISTURBANCES], metavar="NAME")
    parser.add_argument(
        "--load", type=float, default=LOAD, help="of what the deployment can carry (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plots", type=Path, help="directory for a picture of each; it is made if it is not there")
    parser.add_argument("--state-dir", help="directory for files (default: a temporary one)")
    args = parser.parse_args()
    if args.plots:  # now: a directory that cannot be made costs eight minutes later on
        args.plots.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as directory:
        args.state_dir = args.state_dir or directory
        result, courses = asyncio.run(run(args))
    for course in courses if args.plots else ():
        plot(course, args.plots / f"disturbance-{course.name.replace(' ', '-')}.png")
    print(json.dumps(result, indent=2) if args.json else table(result))


if __name__ == "__main__":
    main()
