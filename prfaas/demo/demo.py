"""`prfaas demo`: both clusters on this machine, a slice of a real trace, and a check of everything that is claimed."""

import asyncio
import json
import random
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from prfaas.demo.client import RequestFailed, complete
from prfaas.demo.replay import ReplayRequest, read_rows, scaled
from prfaas.demo.summary import HEADER, DemoOutcome, Summary, summarise
from prfaas.system.system import System
from prfaas.system.topology import Topology
from transport.control.proto import node_pb2 as pb
from transport.control.proto import node_pb2_grpc as rpc

LENGTH_FACTOR = 16
SPEED = 30.0
MAX_IN_FLIGHT = 8
CHECKED_PER_ROUTE = 4
MAX_CHECKED_TOKENS = 2000
MIN_CHECKED_OUTPUT = 8
RECORD_POLL_S = 0.05
RECORD_TIMEOUT_S = 60.0
IDLE_TIMEOUT_S = 60.0
SEED = 20260421


class DemoRecords:
    """The gateway's records of finished requests, fetched as they appear."""

    def __init__(self) -> None:
        self._by_id: dict[str, Mapping[str, Any]] = {}
        self._seq = 0

    async def of(self, session: aiohttp.ClientSession, api_url: str, request_id: str) -> Mapping[str, Any]:
        """The record of a request, which the gateway writes right after the last byte. Raises RequestFailed."""
        deadline = time.monotonic() + RECORD_TIMEOUT_S
        while request_id not in self._by_id:
            if time.monotonic() > deadline:
                raise RequestFailed(f"{request_id}: the gateway has no record of it")
            await self._fetch(session, api_url)
            await asyncio.sleep(RECORD_POLL_S)
        return self._by_id[request_id]

    async def _fetch(self, session: aiohttp.ClientSession, api_url: str) -> None:
        async with session.get(f"{api_url}/prfaas/requests", params={"since": self._seq}) as answer:
            for line in (await answer.text()).splitlines():
                record = json.loads(line)
                self._by_id[record["id"]] = record
                self._seq = max(self._seq, record["seq"])


class Demo:
    """One run: replay, summary, checks."""

    def __init__(
        self,
        topology: Topology,
        model_dir: Path,
        state_dir: Path,
        num_requests: int,
        console: Console,
        system: Callable[[Topology, Path, Callable[[str], None]], System] = System,
    ) -> None:
        """`model_dir` holds the model that the topology names; `system` makes what is started in a directory."""
        self._system = system
        self._topology = topology
        self._model_dir = model_dir
        self._state_dir = state_dir
        self._console = console
        self._requests = scaled(read_rows()[:num_requests], LENGTH_FACTOR, SPEED, np.random.default_rng(SEED))
        self._outcomes: list[DemoOutcome] = []
        self._failures: list[str] = []
        self._records = DemoRecords()

    async def run(self) -> bool:
        """True if everything that was claimed held."""
        say = self._console.print
        async with self._system(self._topology, self._state_dir / "demo", say) as system:
            say(
                f"replaying {len(self._requests)} requests of the Mooncake conversation trace:"
                f" lengths / {LENGTH_FACTOR}, time / {SPEED:.0f}, prefix sharing kept",
                highlight=False,
            )
            say(HEADER, highlight=False)
            started_at = time.monotonic()
            await self._replay(system.api_url, started_at)
            seconds = time.monotonic() - started_at
            problems = self._failures + await _leaks(system)
        if not self._outcomes:
            say("[red]no request finished[/red]")
            return False
        summary = summarise(self._outcomes, seconds)
        for line in summary.lines():
            say(line, highlight=False)
        problems += await self._check_tokens(self._model_dir)
        problems += _missing_claims(summary)
        for problem in problems:
            say(f"[red]FAILED[/red]  {problem}", highlight=False)
        if not problems:
            say(
                "[green]all checks passed[/green]: tokens equal, every request answered, no page or reservation left behind"
            )
        return not problems

    async def _replay(self, api_url: str, started_at: float) -> None:
        columns = (TextColumn("replay"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        slots = asyncio.Semaphore(MAX_IN_FLIGHT)
        async with aiohttp.ClientSession() as session:
            with Progress(*columns, console=self._console, transient=True) as progress:
                bar = progress.add_task("replay", total=len(self._requests))

                async def one(request: ReplayRequest) -> None:
                    await asyncio.sleep(max(0.0, started_at + request.at_s - time.monotonic()))
                    async with slots:
                        await self._send(session, api_url, request, started_at)
                    progress.advance(bar)

                async with asyncio.TaskGroup() as group:
                    for request in self._requests:
                        group.create_task(one(request))

    async def _send(
        self, session: aiohttp.ClientSession, api_url: str, request: ReplayRequest, started_at: float
    ) -> None:
        body = {
            "model": self._topology.model.served_name,
            "prompt": request.prompt,
            "max_tokens": request.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        try:
            done = await complete(session, api_url, body, request.name)
            record = await self._records.of(session, api_url, request.name)
        except RequestFailed as exc:
            self._failures.append(str(exc))
            self._console.print(f"[red]{exc}[/red]", highlight=False)
            return
        outcome = DemoOutcome(
            name=request.name,
            prompt=request.prompt,
            max_tokens=request.max_tokens,
            token_ids=tuple(done.token_ids),
            ttft_s=done.ttft_s,
            record=record,
        )
        self._outcomes.append(outcome)
        self._console.print(outcome.line(time.monotonic() - started_at), highlight=False)

    async def _check_tokens(self, model_dir: Path) -> list[str]:
        sample = _sample(self._outcomes)
        self._console.print(
            f"checking {len(sample)} requests against a plain transformers.generate, one process, no cache ..."
        )
        wrong = await asyncio.to_thread(_unequal, model_dir, sample)
        routes = {route: sum(o.route == route for o in sample) for route in sorted({o.route for o in sample})}
        distinct = min((len(set(outcome.token_ids)) for outcome in sample), default=0)
        if not wrong:
            parts = ", ".join(f"{count} {route}" for route, count in routes.items())
            self._console.print(
                f"token equality    {len(sample)} of {len(sample)} equal ({parts}; at least {distinct} distinct tokens each)",
                highlight=False,
            )
        return wrong


def _sample(outcomes: Sequence[DemoOutcome]) -> list[DemoOutcome]:
    """A few of each route, those with a prefix hit first: they have more ways to be wrong."""
    rng = random.Random(SEED)
    sample = []
    for route in sorted({outcome.route for outcome in outcomes}):
        short = [o for o in outcomes if o.route == route and _is_telling(o)]
        rng.shuffle(short)
        short.sort(key=lambda outcome: outcome.record["cached"] == 0)
        sample += short[: CHECKED_PER_ROUTE // 2] + short[CHECKED_PER_ROUTE // 2 :][-CHECKED_PER_ROUTE // 2 :]
    return sample


def _is_telling(outcome: DemoOutcome) -> bool:
    return outcome.record["total"] <= MAX_CHECKED_TOKENS and outcome.max_tokens >= MIN_CHECKED_OUTPUT


def _unequal(model_dir: Path, outcomes: Sequence[DemoOutcome]) -> list[str]:
    from engine.torch.embedded import load_model
    from engine.torch.reference import reference_tokens
    from prompts.tokens.tokenizer import TextTokenizer

    model, tokenizer = load_model(model_dir), TextTokenizer.load(model_dir)
    wrong = []
    for outcome in outcomes:
        expected = reference_tokens(model, tokenizer.encode(outcome.prompt).tolist(), outcome.max_tokens)
        if list(outcome.token_ids) != expected:
            wrong.append(f"{outcome.name} ({outcome.route}): tokens differ from transformers.generate")
    return wrong


def _missing_claims(summary: Summary) -> list[str]:
    missing = [f"no request went {route}" for route in ("local", "remote") if not summary.by_route.get(route)]
    if not summary.hit_ratio:
        missing.append("no prefix was reused")
    return missing


async def _leaks(system: System) -> list[str]:
    """What the nodes still hold once nothing runs, and what their integrity checks say."""
    problems = []
    for name in system.nodes:
        async with system.agent_channel(name) as channel:
            stub = rpc.NodeAgentStub(channel)  # type: ignore[no-untyped-call]
            deadline = time.monotonic() + IDLE_TIMEOUT_S
            description = await stub.Describe(pb.DescribeRequest())
            while description.pool.reservations and time.monotonic() < deadline:
                await asyncio.sleep(RECORD_POLL_S)
                description = await stub.Describe(pb.DescribeRequest())
            description = await stub.Describe(pb.DescribeRequest(check_integrity=True))
        if description.integrity_error:
            problems.append(f"{description.node_id}: {description.integrity_error}")
        if description.pool.reservations:
            problems.append(f"{description.node_id}: {description.pool.reservations} reservations left")
    return problems
