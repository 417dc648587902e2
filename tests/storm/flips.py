"""`python -m tests.storm.flips --flips 200`: nodes change their roles under a real trace, and no request notices.

Two prefill and two decode nodes of a PD cluster beside one PrfaaS node, under the Mooncake conversation trace; every pass of it
asks for other text. Between flips some are made to fail: a drain that may not last, a verification that may not, either. It
passes if every request got its tokens, every flip ended in its role, and every failed one in the old role. After its flip each
node must find the prefix that it had before. Engines are emulated, which takes little CPU: their tokens follow from every byte of
KVCache that is read. `--engine embedded` has tiny real models, and the tokens of a plain transformers.generate.
"""

import argparse
import asyncio
import os
import random
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import aiohttp
import numpy as np

from engine.emulated.emulated import emulated_tokens
from engine.torch.tiny import build_model
from gateway.cluster.agent_client import AgentClient
from gateway.cluster.agent_values import ConversionStatus, NodeInfo
from planner.decisions.plans.conversions import NodeStanding, why_not
from planner.decisions.views import ClusterKind, Role
from prfaas.demo.client import RequestFailed, complete
from prfaas.demo.replay import ReplayRequest, TraceRow, read_rows, scaled
from prfaas.system.certificates import OPERATOR_NAME
from prfaas.system.system import System
from prfaas.system.topology import parse_topology
from tests.e2e import tls

ARCH: Final = "kimi_linear"
LENGTH_FACTOR: Final = 64
MAX_IN_FLIGHT: Final = 8
BLOCK: Final = 64
PROBE_TOKENS: Final = 3 * BLOCK + 1
FIRST_TOKEN, VOCABULARY = 4, 512
OTHER: Final = {Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL}
SHORT_S: Final = 0.001  # nothing drains or answers within it
LONG_ANSWER: Final = 200  # tokens of a stream that is sure to run still
EMULATED_TIMES: Final = ("--prefill-per-token-s", "0.0004", "--decode-step-s", "0.008")
PATIENCE_S: Final = 300.0
RPC_S: Final = 30.0
FRESH: Final = 1_000_000  # between the trace's block ids of one pass and the next


def document(model: Path, engine: str) -> dict[str, Any]:
    """The system, as a topology file would say it."""
    engines: dict[str, Any] = {"engine": engine, "engine_args": list(EMULATED_TIMES) if engine == "emulated" else []}
    roles = {"p0": "prefill", "p1": "prefill", "d0": "decode", "d1": "decode"}
    return {
        "model": {"path": str(model), "name": "tiny"},
        "gateway": {"port": 0, "threshold_tokens": 250, "routing": {"prefill_tokens_per_s": 1000.0}},
        "node": {"block_size": BLOCK, "chunk_tokens": 128, "cache_bytes": 96 << 20, "lease_s": 60.0, **engines},
        "clusters": [
            {"name": "east", "kind": "prfaas", "nodes": [{"node_id": "far", "role": "prefill", "transport": "tcp"}]},
            {"name": "west", "kind": "pd", "nodes": [{"node_id": n, "role": role} for n, role in roles.items()]},
        ],
    }


@dataclass(frozen=True, slots=True)
class Answered:
    """A request and the tokens that came back."""

    request: ReplayRequest
    token_ids: list[int]
    prompt_tokens: int
    cached_tokens: int


@dataclass(slots=True)
class Books:
    """What became of requests, by whether nodes changed roles meanwhile."""

    answered: list[Answered] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)

    @property
    def hit_ratio(self) -> float:
        """Prompt tokens that were not computed."""
        return sum(a.cached_tokens for a in self.answered) / max(1, sum(a.prompt_tokens for a in self.answered))


class TraceLoad:
    """The trace, again and again, each time with text of its own."""

    def __init__(self, session: aiohttp.ClientSession, api_url: str, rate: float, seed: int) -> None:
        self._session = session
        self._api_url = api_url
        self._rows = read_rows()
        self._rng = np.random.default_rng(seed)
        span_s = max(row.timestamp_ms for row in self._rows) / 1000.0
        self._speed = span_s * rate / len(self._rows)
        self._passes = 0

    async def one_pass(self, books: Books, stop: asyncio.Event) -> None:
        """Sends every request at its time, unless it is stopped, and waits for the answers to those sent."""
        clock = asyncio.get_running_loop().time
        started_at, slots = clock(), asyncio.Semaphore(MAX_IN_FLIGHT)
        requests = scaled(self._fresh(), LENGTH_FACTOR, self._speed, self._rng)
        async with asyncio.TaskGroup() as group:
            for request in requests:
                await _sleep_or_stop(started_at + request.at_s - clock(), stop)
                await slots.acquire()
                if stop.is_set():
                    break
                group.create_task(self._send(request, books, slots))

    def _fresh(self) -> list[TraceRow]:
        shift = FRESH * self._passes
        self._passes += 1
        return [replace(row, hash_ids=tuple(block + shift for block in row.hash_ids)) for row in self._rows]

    async def _send(self, request: ReplayRequest, books: Books, slots: asyncio.Semaphore) -> None:
        name = f"{self._passes}-{request.name}"
        body = {"model": "tiny", "prompt": request.prompt, "max_tokens": request.max_tokens}
        try:
            done = await complete(self._session, self._api_url, body | {"temperature": 0, "ignore_eos": True}, name)
            prompt_tokens = int(done.usage["prompt_tokens"])
            books.answered.append(Answered(request, done.token_ids, prompt_tokens, done.cached_tokens))
        except RequestFailed as exc:
            books.lost.append(str(exc))
        finally:
            slots.release()


async def _sleep_or_stop(seconds: float, stop: asyncio.Event) -> None:
    try:
        async with asyncio.timeout(max(0.0, seconds)):
            await stop.wait()
    except TimeoutError:
        return


@dataclass(frozen=True, slots=True)
class Flip:
    """One command and how it ended, with what the node found of its prefix before and after."""

    node: str
    wanted: Role
    conversion: ConversionStatus
    held_tokens: int
    found_tokens: int


class Commander:
    """Has one node after the other change its role, never the last one of it."""

    def __init__(self, agents: Sequence[AgentClient], session: aiohttp.ClientSession, seed: int) -> None:
        self._agents = agents
        self._session = session
        self._rng = random.Random(seed)
        self._prompts = np.random.default_rng(seed)

    async def flip(self, *, verify_timeout_s: float = 60.0) -> Flip:
        """Of a node that may, to its other role."""
        agent, info = await self._choose()
        wanted = OTHER[Role(info.role)]
        prompt = [int(token) for token in self._prompts.integers(FIRST_TOKEN, VOCABULARY, PROBE_TOKENS)]
        await self._probe(info, prompt)
        held = await self._probe(info, prompt)
        conversion = await agent.convert(
            info.role_epoch + 1,
            wanted,
            drain_timeout_s=PATIENCE_S,
            verify_timeout_s=verify_timeout_s,
            wait_s=PATIENCE_S,
        )
        return Flip(info.node_id, wanted, conversion, held, await self._probe(info, prompt))

    async def flip_too_soon(self) -> Flip:
        """Of a node that has a long answer to give, and no time for it."""
        agent, info = await self._choose()
        wanted, body = OTHER[Role(info.role)], {"model": "tiny", "prompt": [FIRST_TOKEN], "temperature": 0}
        options = {"max_tokens": LONG_ANSWER, "ignore_eos": True}
        answer = asyncio.create_task(complete(self._session, info.engine_url, body | options, "long"))
        while not ((await agent.describe())[1].running or answer.done()):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        conversion = await agent.convert(info.role_epoch + 1, wanted, drain_timeout_s=SHORT_S, wait_s=PATIENCE_S)
        await answer
        return Flip(info.node_id, wanted, conversion, 0, 0)

    async def _choose(self) -> tuple[AgentClient, NodeInfo]:
        asked = [(agent, (await agent.describe())[0]) for agent in self._agents]
        standings = [_standing(info) for _, info in asked]
        return self._rng.choice(
            [each for each in asked if not why_not(each[1].node_id, OTHER[Role(each[1].role)], standings)]
        )

    async def _probe(self, info: NodeInfo, prompt: Sequence[int]) -> int:
        """Cached tokens of a prompt that one node's engine is asked for directly."""
        body = {"model": "tiny", "prompt": list(prompt), "max_tokens": 1, "temperature": 0}
        return (await complete(self._session, info.engine_url, body, "probe")).cached_tokens


def _standing(info: NodeInfo) -> NodeStanding:
    return NodeStanding(
        node_id=info.node_id,
        cluster=info.cluster,
        kind=ClusterKind(info.cluster_kind),
        role=Role(info.role),
        is_ready=info.state == "ready",
    )


@dataclass(slots=True)
class Results:
    """Everything that a run has to show."""

    calm: Books = field(default_factory=Books)
    flipping: Books = field(default_factory=Books)
    flips: list[Flip] = field(default_factory=list)
    quiet: list[Flip] = field(default_factory=list)  # without requests
    rollbacks: list[Flip] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    in_clear: list[str] = field(default_factory=list)  # what speaks so though the run is for TLS
    fallbacks: Counter[str] = field(default_factory=Counter)

    def failures(self) -> list[str]:
        """What should not have been, one line each."""
        lost = [f"lost: {line}" for line in (*self.calm.lost, *self.flipping.lost)]
        bad = [
            f"{f.node} did not become {f.wanted}: {f.conversion}" for f in (*self.flips, *self.quiet) if not _is_done(f)
        ]
        kept = [f"{f.node} has lost its prefix: {f}" for f in self.flips if f.found_tokens < f.held_tokens]
        stuck = [f"not rolled back: {f}" for f in self.rollbacks if not _is_restored(f)]
        return [*lost, *self.wrong, *bad, *kept, *stuck, *self.in_clear]

    def rolled_back(self, outcome: str) -> int:
        """How many conversions were given up for that reason."""
        return sum(f.conversion.outcome == outcome for f in self.rollbacks)

    def lines(self) -> list[str]:
        """For people."""
        done = [f.conversion for f in self.flips]
        control, drain = ([getattr(c, name) for c in done] for name in ("control_s", "drain_s"))
        quiet = [f.conversion.control_s for f in self.quiet]
        held, found = sum(f.held_tokens for f in self.flips), sum(f.found_tokens for f in self.flips)
        checked = len(self.calm.answered) + len(self.flipping.answered)
        return [
            f"flips          {sum(map(_is_done, self.flips))} of {len(self.flips)} in their new role",
            f"requests       {checked} answered, {len(self.flipping.lost) + len(self.calm.lost)} lost,"
            f" {len(self.wrong)} with wrong tokens",
            f"control part   median {_ms(control, 50)}, P90 {_ms(control, 90)}, P99 {_ms(control, 99)},"
            f" max {_ms(control, 100)}; while nobody asks median {_ms(quiet, 50)}, P90 {_ms(quiet, 90)}"
            f"  (wall clock; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores)",
            f"draining       median {_ms(drain, 50)}, max {_ms(drain, 100)}",
            f"prefix cache   {found} of {held} tokens found after their flip;"
            f" hit ratio of requests {self.calm.hit_ratio:.1%} without flips, {self.flipping.hit_ratio:.1%} with them",
            f"rollback       {self.rolled_back('drain_timeout')} by drain timeout,"
            f" {self.rolled_back('verify_failed')} by verification",
            f"elsewhere      {', '.join(f'{n} {r}' for r, n in sorted(self.fallbacks.items())) or 'no request'}",
        ]


def _is_done(flip: Flip) -> bool:
    return flip.conversion.outcome == "converted" and flip.conversion.role == flip.wanted


def _is_restored(flip: Flip) -> bool:
    given_up = flip.conversion.outcome in ("drain_timeout", "verify_failed")
    return given_up and flip.conversion.role == OTHER[flip.wanted]


def _ms(seconds: Sequence[float], percentile: float) -> str:
    return f"{np.percentile(seconds, percentile) * 1e3:.1f} ms" if seconds else "-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a run does: a pass of the trace before the first flip if it is `calm`, and `quiet` flips after the last request.

    `rate` is in requests/s; `pause_s` is between two flips, so that there is something to drain.
    """

    flips: int
    rate: float
    seed: int
    rollback_every: int
    engine: str = "emulated"
    pause_s: float = 1.0
    calm: bool = True
    quiet: int = 20
    has_tls: bool = False


@asynccontextmanager
async def system_and_agents(
    model: Path, home: Path, engine: str, certificates: Path | None = None
) -> AsyncIterator[tuple[System, list[AgentClient]]]:
    """The system, and clients of all nodes that may change their roles."""
    async with AsyncExitStack() as stack:
        table = document(model, engine)
        who = None
        if certificates is not None:
            table, who = tls.secured(table, certificates), tls.identity(certificates, OPERATOR_NAME)
        system = System(parse_topology(table, home), home / "flips", lambda line: None)
        await stack.enter_async_context(system)
        agents = [
            AgentClient(node.agent_address, RPC_S, who, node.config.node_id)
            for node in system.nodes.values()
            if node.config.cluster_kind == "pd"
        ]  # fmt: skip
        for agent in agents:
            stack.push_async_callback(agent.close)
        yield system, agents


async def flip_under_load(model: Path, home: Path, plan: Plan) -> Results:
    """All of it."""
    results, certificates = Results(), home / "certificates" if plan.has_tls else None
    async with AsyncExitStack() as stack:
        system, agents = await stack.enter_async_context(system_and_agents(model, home, plan.engine, certificates))
        who = tls.identity(certificates) if certificates is not None else None
        session = await stack.enter_async_context(tls.client_session(who))
        load = TraceLoad(session, system.api_url, plan.rate, plan.seed)
        if plan.calm:
            await load.one_pass(results.calm, asyncio.Event())
        stop = asyncio.Event()
        asking = asyncio.create_task(_ask(load, results.flipping, stop))
        commander = Commander(agents, session, plan.seed)
        try:
            await _flip_all(commander, results, plan)
        finally:
            stop.set()
            await asking
        results.quiet = [await commander.flip() for _ in range(plan.quiet)]
        results.fallbacks = await _fallbacks(session, system.api_url)
        if certificates is not None:
            results.in_clear = await asyncio.to_thread(tls.faults_of, system, certificates)
    answered = [*results.calm.answered, *results.flipping.answered]
    results.wrong = await asyncio.to_thread(unequal, reference(model, plan.engine), answered)
    return results


async def _ask(load: TraceLoad, books: Books, stop: asyncio.Event) -> None:
    while not stop.is_set():
        await load.one_pass(books, stop)


async def _flip_all(commander: Commander, results: Results, plan: Plan) -> None:
    for number in range(1, plan.flips + 1):
        results.flips.append(await commander.flip())
        await asyncio.sleep(plan.pause_s)
        if number % plan.rollback_every == 0:
            results.rollbacks.append(await commander.flip_too_soon())
            results.rollbacks.append(await commander.flip(verify_timeout_s=SHORT_S))


async def _fallbacks(session: aiohttp.ClientSession, api_url: str) -> Counter[str]:
    """What the gateway has counted, by reason."""
    async with session.get(f"{api_url}/metrics") as answer:
        lines = [line for line in (await answer.text()).splitlines() if line.startswith("prfaas_fallbacks_total{")]
    return Counter({line.split('"')[1]: int(float(line.rsplit(" ", 1)[1])) for line in lines})


Reference = Callable[[ReplayRequest], list[int]]


def reference(model: Path, engine: str) -> Reference:
    """What one process comes to that has neither caches nor other nodes."""
    from prompts.tokens.tokenizer import TextTokenizer

    tokenizer = TextTokenizer.load(model)
    if engine == "emulated":
        return lambda request: emulated_tokens(tokenizer.encode(request.prompt).tolist(), request.max_tokens)
    import torch

    from engine.torch.embedded import load_model
    from engine.torch.reference import reference_tokens

    torch.set_num_threads(1)  # threads that wait for each other take five times as long for so little
    loaded = load_model(model)
    return lambda request: reference_tokens(loaded, tokenizer.encode(request.prompt).tolist(), request.max_tokens)


def unequal(expected: Reference, answered: Sequence[Answered]) -> list[str]:
    """Answers of other tokens, one line each."""
    return [
        f"wrong tokens: {each.request.name}: {each.token_ids} instead of {right}"
        for each in answered
        if each.token_ids != (right := expected(each.request))
    ]


async def main(arguments: argparse.Namespace) -> int:
    home = Path(arguments.home or tempfile.mkdtemp(prefix="flips-"))
    model = home / "model"
    build_model(ARCH, model, report=lambda line: None)
    print(f"{arguments.flips} flips under the conversation trace at {arguments.rate:g}/s; logs in {home}", flush=True)
    plan = Plan(
        flips=arguments.flips, rate=arguments.rate, seed=arguments.seed, rollback_every=20, engine=arguments.engine,
        has_tls=arguments.tls,
    )  # fmt: skip
    results = await flip_under_load(model, home, plan)
    for line in results.lines():
        print(line)
    failures = results.failures()
    for failure in failures:
        print("FAILED:", failure)
    return 1 if failures else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.storm.flips", description=__doc__)
    parser.add_argument("--flips", type=int, default=200)
    parser.add_argument("--rate", type=float, default=3.0, help="requests per second")
    parser.add_argument("--engine", choices=["emulated", "embedded"], default="emulated")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tls", action="store_true", default=tls.is_wanted(), help="mutual TLS on every hop")
    parser.add_argument("--home", help="where logs are kept (default: a new temporary directory)")
    sys.exit(asyncio.run(main(parser.parse_args())))
