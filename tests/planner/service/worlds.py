"""Builders: a gateway that says what it is told to, nodes that convert or do not, and a keeper before them on a virtual clock."""

import asyncio
import functools
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np
from aiohttp import web

from planner.decisions.plans.live_plan import LivePlan
from planner.decisions.plans.offered import GatewayLoad, NodeReport, SampleRing
from planner.decisions.views import ClusterKind, Role
from planner.service.announcement import AnnouncedLedger
from planner.service.config import ServiceConfig
from planner.service.conversions import ConversionFailed
from planner.service.gateways import Gateways
from planner.service.keeper import Keeper
from planner.service.store import Store
from planner.solve.control.controller import ControllerConfig
from planner.solve.control.ledger import PlanLimits
from tests.planner.conftest import CONFIGS

PATIENCE_S = 120.0
SOON = ControllerConfig(tick_s=1.0, warmup_s=0.0, min_requests=200, cooldown_s=10.0)
LAW = np.exp(np.random.default_rng(0).normal(9.9, 1.0, 4000)).clip(128, 131_072)


def on_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Runs an async test on a loop of its own."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        async def main() -> None:
            async with asyncio.timeout(2 * PATIENCE_S):
                await test(*args, **kwargs)

        asyncio.run(main())

    return run


def config_for(state_dir: Path, **fields: Any) -> ServiceConfig:
    base = ServiceConfig(
        state_dir=state_dir,
        profile=CONFIGS / "profiles" / "internal-1t.json",
        pd_hardware="h20x8",
        prfaas_hardware="h200x8",
        egress_gbps=100.0,
        port=0,
        controller=SOON,
        limits=PlanLimits(settle_s=5.0),
    )
    return replace(base, **fields)


class FakeGateway:
    """Serves /prfaas/load. `ask` has requests offered; nodes are those of the case study unless told otherwise."""

    def __init__(self, threshold_tokens: float = 60_000.0, num_prefill: int = 3) -> None:
        self.threshold_tokens = threshold_tokens
        self.follows: LivePlan | None = None
        self.status = 200
        self.roles = {f"n{i}": Role.PREFILL if i < num_prefill else Role.DECODE for i in range(8)}
        self.url = ""
        self._uncached, self._outputs = SampleRing(8192), SampleRing(8192)

    def ask(self, lengths: Sequence[float], output: int = 1024) -> None:
        for length in lengths:
            self._uncached.add(int(length))
            self._outputs.add(output)

    async def answer(self, http: web.Request) -> web.Response:
        known = http.query["boot"] == "b"
        nodes = [NodeReport(node_id=f"r{i}", agent="", cluster="e", kind=ClusterKind.PRFAAS, role=Role.PREFILL,
                          state="ready") for i in range(4)]  # fmt: skip
        nodes += [
            NodeReport(node_id=name, agent="", cluster="w", kind=ClusterKind.PD, role=role, state="ready", slots=20)
            for name, role in self.roles.items()
        ]
        load = GatewayLoad(
            boot="b",
            uncached=self._uncached.after(int(http.query["uncached"]) if known else 0),
            outputs=self._outputs.after(int(http.query["outputs"]) if known else 0),
            threshold_tokens=self.threshold_tokens,
            nodes=tuple(nodes),
            follows=self.follows,
        )
        return web.Response(body=msgspec.json.encode(load), status=self.status)


@asynccontextmanager
async def fake_gateway(**fields: Any) -> AsyncIterator[FakeGateway]:
    gateway = FakeGateway(**fields)
    app = web.Application()
    app.router.add_get("/prfaas/load", gateway.answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    gateway.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield gateway
    finally:
        await runner.cleanup()


class Nodes:
    """Converts nodes of a fake gateway, or refuses those of `unwilling`; `on_asked` is called meanwhile."""

    def __init__(self, gateway: FakeGateway) -> None:
        self.unwilling: dict[str, str] = {}
        self.on_asked: Callable[[], None] = lambda: None
        self.asked: list[tuple[str, Role, int]] = []
        self.under_way = 0
        self._gateway = gateway

    async def convert(self, node: NodeReport, role: Role, plan: LivePlan) -> None:
        self.on_asked()
        self.asked.append((node.node_id, role, plan.version))
        self.under_way += 1
        assert self.under_way == 1
        await asyncio.sleep(0)
        self.under_way -= 1
        if node.node_id in self.unwilling:
            raise ConversionFailed(self.unwilling[node.node_id])
        self._gateway.roles[node.node_id] = role


@dataclass
class Watch:
    """A clock that moves when it is told to."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Desk:
    """A keeper before one gateway; `look` lets a second pass and has it look once."""

    keeper: Keeper
    gateway: FakeGateway
    nodes: Nodes
    watch: Watch
    http: aiohttp.ClientSession
    announced: AnnouncedLedger

    async def look(self, lengths: Sequence[float] = ()) -> None:
        self.gateway.ask(lengths)
        self.watch.now += 1.0
        await self.keeper.tick(self.http)

    def follow(self) -> None:
        """The gateway does as the plan in force says."""
        plan = self.keeper.ledger.in_force
        if plan is not None:
            self.gateway.follows, self.gateway.threshold_tokens = plan, plan.setting.threshold_tokens


@asynccontextmanager
async def desk(state_dir: Path, gateway: FakeGateway, leader: str = "a", **fields: Any) -> AsyncIterator[Desk]:
    """A leader with what `state_dir` remembers."""
    config = config_for(state_dir, gateways=(gateway.url,), **fields)
    os.makedirs(state_dir, exist_ok=True)
    store, watch, nodes = Store(state_dir, config.log_bytes), Watch(), Nodes(gateway)
    before = store.read()
    ledger, entry = before.led(before.term + 1, 0.0, "controller", leader)
    store.write(ledger, entry)
    announced = AnnouncedLedger(ledger)
    keeper = Keeper(config, store, announced, Gateways(config.gateways, PATIENCE_S), nodes, watch, watch)
    converting = asyncio.create_task(keeper.convert_nodes())
    async with aiohttp.ClientSession() as http:
        yield Desk(keeper, gateway, nodes, watch, http, announced)
        converting.cancel()
        await asyncio.wait([converting])
