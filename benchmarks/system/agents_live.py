"""Coding agents' sessions through a running system, one way of serving them after the other: `benchmarks.system.agents --live`.

The case study's instances on this machine (`configs/case_study_live.toml`): engines that stand in for the model, with prefix
caches, all between them real. Later turns wait for answers and think times. Prompts have the sessions' prefixes: equal blocks are
equal tokens, and what goes on from an answer goes on from the tokens that came. Each way begins with empty caches and the same
sessions at the same times; the simulator is given the requests at the times at which they were sent live.

All figures are the model's: seconds, tokens and bytes of here over their scales.
"""

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from math import nan
from pathlib import Path
from typing import Any, Final, Self

import aiohttp
import numpy as np

from benchmarks.system.case_study import LAG_EVERY_S, Lag, live_document, say
from engine.byte_tokenizer import SPECIAL_TOKENS, VOCAB_SIZE
from engine.emulated.emulated import emulated_tokens
from membership.lines import BYTES_PER_S_PER_GBPS
from planner.decisions.views import ClusterKind
from planner.model.profile import Floats
from planner.model.sessions import BLOCK_TOKENS, ClosedLoop, DueTurn, Session, trace_of
from planner.simulator.scenario import Scenario, Targets
from planner.simulator.trials.hits import finite_cache_hits
from planner.simulator.world import simulate
from prfaas.demo.client import RequestFailed, complete
from prfaas.system.models import ensure_model
from prfaas.system.standin import Scale
from prfaas.system.system import System
from prfaas.system.topology import Topology, parse_topology

FETCH_GBPS: Final = 100.0  # of prefixes inside a cluster, until some have moved
ENDLESS_GB: Final = 1e5
RECORDS_S: Final = 30.0
HEADS: Final = (
    "goodput, req/s", "TTFT mean, s", "TTFT P90, s", "token hit", "offloaded", "egress per session, GB",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentsRow:
    """One run, live or simulated. Goodput is within the targets: TTFT, and TBT as the mean of an answer."""

    goodput_req_per_s: float
    ttft_mean_s: float
    ttft_p90_s: float
    hit_ratio: float
    offload_fraction: float
    egress_gb_per_session: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Requests:
    """Measurements by request: seconds (nan where there was no answer), tokens, whether it was offloaded."""

    ttft_s: Floats
    tbt_s: Floats
    prompt_tokens: Floats
    cached_tokens: Floats
    remote: Floats

    def row(self, targets: Targets, over_s: float, sent_bytes: float, sessions: int) -> AgentsRow:
        answered = self.ttft_s[~np.isnan(self.ttft_s)]
        good = (self.ttft_s <= targets.ttft_s) & (self.tbt_s <= targets.tbt_s)
        return AgentsRow(
            goodput_req_per_s=float(good.sum()) / over_s,
            ttft_mean_s=float(answered.mean()) if len(answered) else nan,
            ttft_p90_s=float(np.quantile(answered, 0.9)) if len(answered) else nan,
            hit_ratio=float(self.cached_tokens.sum() / self.prompt_tokens.sum()),
            offload_fraction=float(self.remote.mean()),
            egress_gb_per_session=sent_bytes / 1e9 / sessions,
        )


@dataclass(frozen=True, slots=True)
class EndedCall:
    """A call that has ended: when it was sent, and how, by the gateway's record; times are nan where there was no answer."""

    call: DueTurn
    sent_s: float
    ttft_s: float
    tbt_s: float
    request_id: str


class Script:
    """What agents send, in tokens of here: equal where the names of blocks are.

    A prompt that goes on from its agent's last one goes on from the answer to it, too; all else is chance.
    """

    def __init__(self, scale: Scale, seed: int) -> None:
        self._scale = scale
        self._rng = np.random.default_rng(seed)
        self._block = scale.tokens_of(BLOCK_TOKENS)
        self._blocks: dict[int, list[int]] = {}
        self._said: dict[tuple[int, str], tuple[tuple[int, ...], list[int]]] = {}  # by agent: whole blocks, all tokens

    def prompt(self, call: DueTurn) -> list[int]:
        """The tokens of a turn, and one more: the decode node computes a prompt's last one, which the model's length has not."""
        turn = call.turn
        whole, said = self._said.get((call.session, turn.agent), ((), []))
        if turn.blocks[: len(whole)] != whole:
            said = []
        tokens: list[int] = []
        for number, name in enumerate(turn.blocks):
            if name not in self._blocks:
                known = said[number * self._block : (number + 1) * self._block]
                self._blocks[name] = known + self._chance(self._block - len(known))
            tokens += self._blocks[name]
        length = self._scale.tokens_of(turn.prompt_tokens) + 1
        return tokens[:length] + self._chance(length - len(tokens))

    def answered(self, call: DueTurn, tokens: Sequence[int]) -> None:
        """Prompt and answer of a call, which its agent's next one may go on from."""
        whole = call.turn.blocks[: call.turn.prompt_tokens // BLOCK_TOKENS]
        self._said[call.session, call.turn.agent] = whole, list(tokens)

    def _chance(self, count: int) -> list[int]:
        found: list[int] = self._rng.integers(len(SPECIAL_TOKENS), VOCAB_SIZE, max(0, count)).tolist()
        return found


def topology_of(scenario: Scenario, scale: Scale, state_dir: Path) -> Topology:
    """The running system that `scenario` simulates. Blocks are the trace's."""
    prfaas = [pool for pool in scenario.pools if pool.kind is ClusterKind.PRFAAS]
    (pd,) = [pool for pool in scenario.pools if pool.kind is ClusterKind.PD]
    nodes = sum(pool.num_prefill for pool in prfaas), pd.num_prefill, pd.num_decode
    policy = scenario.routing
    document = live_document(scale, policy.threshold_tokens, nodes)
    document["gateway"]["routing"] |= {
        "tie_share": policy.tie_share,
        # As with the threshold, a prompt's last token comes on top.
        "increment_tokens": scale.tokens_of(policy.increment_tokens) + 1 if policy.increment_tokens else 0,
        "fetch_bytes_per_s": scale.bytes_per_s(FETCH_GBPS),
        "decode_load_slack": policy.placement.decode_load_slack,
        "by_total_length": policy.by_total_length,
    }
    cache_bytes = round(pd.cache_bytes * scale.bytes)
    for link in document["links"]:
        (wire,) = scenario.wires
        link["capacity_gbps"] = wire.capacity[0][1] / BYTES_PER_S_PER_GBPS
    document["node"] |= {"block_size": scale.tokens_of(BLOCK_TOKENS), "cache_bytes": cache_bytes}
    return parse_topology(document, state_dir)


class Agents:
    """The sessions of a closed loop, at work on a running system."""

    def __init__(self, system: System, scale: Scale, loop: ClosedLoop, seed: int) -> None:
        self._system = system
        self._scale = scale
        self._loop = loop
        self._script = Script(scale, seed)
        self.sent: list[EndedCall] = []
        self.wrong: list[str] = []

    async def work(self) -> list[dict[str, Any]]:
        """Until all have been answered. Returns the gateway's records."""
        begin = time.monotonic()
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
            async with asyncio.TaskGroup() as group:
                for call in self._loop.first():
                    group.create_task(self._one(group, http, begin, call))
            return await self._records(http)

    async def _one(self, group: asyncio.TaskGroup, http: aiohttp.ClientSession, begin: float, call: DueTurn) -> None:
        prompt = self._script.prompt(call)
        max_tokens = self._scale.tokens_of(call.turn.output_tokens) + 1  # the first takes one decode step alone
        body = {"model": self._system.topology.model.served_name, "prompt": prompt, "max_tokens": max_tokens}
        body |= {"temperature": 0, "ignore_eos": True}
        request_id = f"s{call.session}-{call.index}"
        await asyncio.sleep(max(0.0, begin + call.at_s * self._scale.time - time.monotonic()))
        sent_s = (time.monotonic() - begin) / self._scale.time
        ttft_s = tbt_s = nan
        tokens: list[int] | None = None
        try:
            answer = await complete(http, self._system.api_url, body, request_id)
        except RequestFailed as error:
            self.wrong.append(str(error))
        else:
            ttft_s = answer.ttft_s / self._scale.time
            tbt_s = (answer.e2e_s - answer.ttft_s) / self._scale.time / call.turn.output_tokens
            tokens = answer.token_ids
            self._script.answered(call, prompt + tokens)
        self.sent.append(EndedCall(call, sent_s, ttft_s, tbt_s, request_id))
        now_s = (time.monotonic() - begin) / self._scale.time
        for other in self._loop.answered(call, sent_s, now_s):
            group.create_task(self._one(group, http, begin, other))
        if tokens is not None and tokens != emulated_tokens(prompt, max_tokens):
            self.wrong.append(f"{request_id}: not the tokens of its prompt")

    async def _records(self, http: aiohttp.ClientSession) -> list[dict[str, Any]]:
        """One is written right after an answer's last byte."""
        async with asyncio.timeout(RECORDS_S):
            while True:
                async with http.get(f"{self._system.api_url}/prfaas/requests", params={"since": 0}) as answer:
                    records = [json.loads(line) for line in (await answer.text()).splitlines()]
                if len(records) >= len(self.sent):
                    return records
                await asyncio.sleep(LAG_EVERY_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingWay:
    """One way of serving them: live, beside what the simulator makes of the same requests."""

    name: str
    instances: tuple[int, int, int]
    threshold_tokens: float
    requests: int
    live: AgentsRow
    simulated: AgentsRow
    endless_hit_ratio: float
    routes: Mapping[str, int]
    routes_simulated: Mapping[str, int]
    fallbacks: Mapping[str, int]
    late_p99_s: float
    wrong: Sequence[str]

    @classmethod
    def of(
        cls, name: str, scenario: Scenario, agents: Agents, records: Sequence[Mapping[str, Any]], scale: Scale,
        over_s: float, sessions: int, late_p99_s: float,
    ) -> Self:  # fmt: skip
        sent = sorted(agents.sent, key=lambda each: each.sent_s)
        trace = trace_of([(each.sent_s, each.call.turn) for each in sent])
        by_id = {record["id"]: record for record in records}
        own = [by_id[each.request_id] for each in sent]
        is_remote = np.array([float(record["route"] == "remote") for record in own])
        seen = Requests(
            ttft_s=np.array([each.ttft_s for each in sent]),
            tbt_s=np.array([each.tbt_s for each in sent]),
            prompt_tokens=trace.prompt_tokens,
            cached_tokens=np.minimum([record["cached"] / scale.tokens for record in own], trace.prompt_tokens),
            remote=is_remote,
        )
        crossed = sum(record["bytes"] or 0 for record in own if record["route"] == "remote") / scale.bytes
        outcome = simulate(scenario, trace)
        computed = Requests(
            ttft_s=outcome.ttft_s,
            tbt_s=(outcome.e2e_s - outcome.ttft_s) / trace.output_tokens,
            prompt_tokens=trace.prompt_tokens,
            cached_tokens=outcome.cached_tokens,
            remote=outcome.remote,
        )
        prfaas = sum(pool.num_prefill for pool in scenario.pools if pool.kind is ClusterKind.PRFAAS)
        pd = next(pool for pool in scenario.pools if pool.kind is ClusterKind.PD)
        return cls(
            name=name,
            instances=(prfaas, pd.num_prefill, pd.num_decode),
            threshold_tokens=scenario.routing.threshold_tokens,
            requests=len(trace),
            live=seen.row(scenario.targets, over_s, crossed, sessions),
            simulated=computed.row(scenario.targets, over_s, outcome.sent_bytes, sessions),
            endless_hit_ratio=float(
                finite_cache_hits(trace, scenario.kv, ENDLESS_GB).sum() / trace.prompt_tokens.sum()
            ),
            routes=_counted([f"{record['target']} {record['reason']}" for record in own]),
            routes_simulated=outcome.routes,
            fallbacks=_counted([reason for record in own for reason in record["fallbacks"]]),
            late_p99_s=late_p99_s,
            wrong=agents.wrong,
        )


def _counted(names: Sequence[str]) -> dict[str, int]:
    return {name: names.count(name) for name in sorted(set(names))}


async def serve(
    name: str, scenario: Scenario, begun: Sequence[tuple[float, Session]], over_s: float, scale: Scale, state_dir: Path,
    seed: int,
) -> ServingWay:  # fmt: skip
    """Starts the system that `scenario` simulates, has the sessions work on it, and ends it."""
    topology = topology_of(scenario, scale, state_dir)
    ensure_model(topology.model, state_dir, say)
    lag = Lag()
    async with System(topology, state_dir / "agents", lambda line: None) as system:
        agents = Agents(system, scale, ClosedLoop(begun, over_s), seed)
        watch = asyncio.create_task(lag.watch())
        records = await agents.work()
        watch.cancel()
    late_p99_s = float(np.quantile(lag.late_s, 0.99))
    way = ServingWay.of(name, scenario, agents, records, scale, over_s, len(begun), late_p99_s)
    say(f"{name}: {way.requests} requests, timers late by {1e3 * late_p99_s:.0f} ms at P99, {len(way.wrong)} wrong")
    say(f"  live {asdict(way.live)}\n  simulated {asdict(way.simulated)}")
    say(f"  live {way.routes}, {way.fallbacks}\n  simulated {way.routes_simulated}")
    return way


def table(ways: Sequence[ServingWay]) -> str:
    """Markdown, live / simulated."""
    lines = ["| live / simulated | requests | " + " | ".join(HEADS) + " |", "|---" * (len(HEADS) + 2) + "|"]
    for way in ways:
        cells = [_cell(each.name, way) for each in fields(AgentsRow)]
        lines.append(f"| {way.name}, {_instances(way)} | {way.requests} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(key: str, way: ServingWay) -> str:
    live, computed = getattr(way.live, key), getattr(way.simulated, key)
    if key in ("hit_ratio", "offload_fraction"):
        return f"{live:.1%} / {computed:.1%}"
    return f"{live:.2f} / {computed:.2f}"


def _instances(way: ServingWay) -> str:
    prfaas, prefill, decode = way.instances
    return f"{prfaas} + {prefill} / {decode}" if prfaas else f"{prefill} / {decode}"


def bars(ours: ServingWay, planned_share: float, planned_gb_per_session: float) -> list[str]:
    """Compares ours with its plan, and with a cache that never evicts."""
    row = ours.live
    egress = row.egress_gb_per_session / planned_gb_per_session if planned_gb_per_session else float("nan")
    return [
        f"offloaded {row.offload_fraction:.1%} live, {planned_share:.1%} by the plan "
        f"({100 * (row.offload_fraction - planned_share):+.1f} points)",
        f"egress {row.egress_gb_per_session:.2f} GB per session live, {planned_gb_per_session:.2f} by the plan "
        f"(×{egress:.2f})",
        f"token hit {row.hit_ratio:.1%} live, {ours.endless_hit_ratio:.1%} in a cache that never evicts "
        f"({100 * (row.hit_ratio - ours.endless_hit_ratio):+.1f} points)",
    ]
