"""Real processes: a gateway, its nodes and the plan service, under traffic, while plans change and processes are killed."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from engine.model.emulated import emulated_tokens
from planner.commands.cli import main
from planner.decisions.offered import GatewayLoad, NodeSeen
from planner.decisions.views import Role
from planner.service.conversions import AgentConverter
from planner.service.status import Status
from prfaas.client import complete
from prfaas.models import ensure_model
from prfaas.system import System
from prfaas.topology import parse_topology
from tests.planner.conftest import CONFIGS

PATIENCE_S = 120.0
LONG, SHORT = 800, 100  # 51,200 and 6,400 tokens of the model
DOCUMENT: dict[str, Any] = {
    "model": {
        "profile": str(CONFIGS / "profiles" / "internal-1t.json"),
        "name": "m",
        "time_scale": 0.02,
        "token_scale": 1 / 64,
        "byte_scale": 0.001,
    },
    # At first nothing is long enough to leave.
    "gateway": {"port": 0, "threshold_tokens": 5000, "routing": {"increment_tokens": 0, "decode_slots": 20}},
    "plan": {"port": 0, "controller": {"tick_s": 0.25, "warmup_s": 0.0, "min_requests": 16}},
    "node": {"cache_bytes": 16 << 20, "block_size": 16},
    "links": [{"source": "east", "destination": "west", "capacity_gbps": 100}],
    "clusters": [
        {
            "name": "east", "kind": "prfaas", "hardware": "h200x8",
            "nodes": [{"node_id": "r0", "role": "prefill", "transport": "tcp"}],
        },
        {
            "name": "west", "kind": "pd", "hardware": "h20x8",
            "nodes": [{"node_id": "p0", "role": "prefill"}, *({"node_id": f"d{i}", "role": "decode"} for i in (0, 1))],
        },
    ],
}  # fmt: skip


class Stage:
    """The running system, and what is asked of it. Every answer is compared with the tokens that it must have."""

    def __init__(self, system: System, http: aiohttp.ClientSession) -> None:
        self.system = system
        self.http = http
        self.asked = 0

    async def ask(self, num_tokens: int) -> str:
        """One request, of a prompt that nobody has asked before; its id."""
        self.asked += 1
        name = f"request-{self.asked}"
        prompt = [4 + (self.asked * 31 + number * (1 + self.asked % 7)) % 240 for number in range(num_tokens)]
        body = {"model": "m", "prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
        answer = await complete(self.http, self.system.api_url, body, name)
        assert answer.token_ids == emulated_tokens(prompt, 4)
        return name

    async def ask_all(self, count: int, num_tokens: int) -> list[str]:
        return await asyncio.gather(*(self.ask(num_tokens) for _ in range(count)))

    @asynccontextmanager
    async def traffic(self) -> AsyncIterator[None]:
        """Requests come and are all answered while the block lasts, and at least one after another."""
        over, before = asyncio.Event(), self.asked

        async def client(num_tokens: int) -> None:
            while True:
                await self.ask(num_tokens)
                if over.is_set():
                    return

        clients = [asyncio.create_task(client(num_tokens)) for num_tokens in (SHORT, SHORT, LONG)]
        try:
            yield
        finally:
            over.set()
            await asyncio.gather(*clients)
        assert self.asked >= before + len(clients)

    async def records(self) -> dict[str, dict[str, Any]]:
        async with self.http.get(f"{self.system.api_url}/prfaas/requests") as answer:
            lines = (await answer.text()).splitlines()
        return {record["id"]: record for record in map(json.loads, lines)}

    async def load(self) -> GatewayLoad:
        async with self.http.get(f"{self.system.api_url}/prfaas/load") as answer:
            return msgspec.json.decode(await answer.read(), type=GatewayLoad)

    async def status(self) -> Status:
        async with self.http.get(f"{self.system.plan_url}/status") as answer:
            return msgspec.json.decode(await answer.read(), type=Status)

    async def until(self, holds: Callable[[], Awaitable[bool]]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                try:
                    if await holds():
                        return
                except aiohttp.ClientError:
                    pass  # it is being started again
                await asyncio.sleep(0.05)

    async def until_followed(self, version: int, after_term: int = 0) -> None:
        """Waits until the gateway follows this version, as a leader of a later term has it."""

        async def followed() -> bool:
            plan = (await self.load()).follows
            return plan is not None and plan.version == version and plan.term > after_term

        await self.until(followed)

    async def until_proposed(self) -> Status:
        async def proposed() -> bool:
            return (await self.status()).proposal is not None

        await self.until(proposed)
        return await self.status()

    async def command(self, *argv: str) -> int:
        return await asyncio.to_thread(main, [*argv, "--url", self.system.plan_url])

    async def node(self, node_id: str) -> NodeSeen:
        return next(node for node in (await self.load()).nodes if node.node_id == node_id)

    async def until_role(self, node_id: str, role: Role) -> None:
        async def held() -> bool:
            node = await self.node(node_id)
            return (node.role, node.state) == (role, "ready")

        await self.until(held)


async def changes_under_traffic(at: Stage) -> None:
    """A shift of the load → a proposal with its reason → applied → rolled back; nothing is lost on the way."""
    await at.until(lambda: _polled(at))
    names = await at.ask_all(24, LONG)
    records = await at.records()
    assert {records[name]["route"] for name in names} == {"local"}
    assert {records[name]["plan"] for name in names} == {0}
    status = await at.until_proposed()
    assert status.proposal is not None
    assert "binds" in status.proposal.reason
    assert status.proposal.setting.threshold_tokens == LONG  # all are of one length, and shared out
    assert 0 < status.proposal.setting.tie_share < 1
    async with at.traffic():
        assert await at.command("apply") == 0
        await at.until(lambda: _follows_something(at))
    followed = await at.load()
    assert followed.follows is not None
    assert followed.threshold_tokens == followed.follows.setting.threshold_tokens
    names = await at.ask_all(24, LONG)
    records = await at.records()
    assert "remote" in {records[name]["route"] for name in names}
    assert {records[name]["plan"] for name in names} == {followed.follows.version}


async def _polled(at: Stage) -> bool:
    """Whether the service has looked at the gateway: what comes from now on is new to it."""
    return any(answer.startswith("follows") for answer in (await at.status()).gateways.values())


async def _follows_something(at: Stage) -> bool:
    return (await at.load()).follows is not None


async def deaths(at: Stage) -> None:
    """Of the service: nobody notices, and it comes back with the same version. Of the gateway: it comes back with the plan."""
    plan = (await at.load()).follows
    assert plan is not None
    assert at.system.plan is not None
    assert at.system.gateway is not None
    async with at.traffic():
        os.kill(at.system.plan.pid, signal.SIGKILL)
        await at.ask_all(4, LONG)
        kept = (await at.load()).follows
        assert kept is not None
        assert kept.version == plan.version
        await at.until_followed(plan.version, plan.term)
    os.kill(at.system.gateway.pid, signal.SIGKILL)
    await at.until(lambda: _ready(at))
    await at.until_followed(plan.version, plan.term)
    names = await at.ask_all(4, SHORT)
    records = await at.records()
    assert {records[name]["plan"] for name in names} == {plan.version}


async def _ready(at: Stage) -> bool:
    async with at.http.get(f"{at.system.api_url}/health") as answer:
        return answer.status == 200 and (await answer.json())["nodes_ready"] == 4


async def back(at: Stage) -> None:
    """Another shift → another proposal; a rollback → what the gateway's file says holds again."""
    await at.until(lambda: _polled(at))

    async def shift_is_seen() -> bool:
        await at.ask_all(20, SHORT)
        status = await at.status()
        assert status.in_force is not None
        now, proposal = status.in_force.setting, status.proposal
        return proposal is not None and proposal.setting.threshold_tokens < now.threshold_tokens

    await at.until(shift_is_seen)
    async with at.traffic():
        assert await at.command("rollback") == 0
        plan = (await at.status()).in_force
        assert plan is not None
        await at.until_followed(plan.version)
    assert (await at.load()).threshold_tokens == 5000
    names = await at.ask_all(4, LONG)
    assert {(await at.records())[name]["route"] for name in names} == {"local"}


async def conversions(at: Stage) -> None:
    """A node changes its role and back under traffic, at the plan's word."""
    converter = AgentConverter(drain_timeout_s=PATIENCE_S)
    async with at.traffic():
        await converter.convert(await at.node("d1"), Role.PREFILL, 7)
        await at.until_role("d1", Role.PREFILL)
        await converter.convert(await at.node("d1"), Role.PREFILL, 7)  # the same again
        await converter.convert(await at.node("d1"), Role.DECODE, 3)  # of a service that has forgotten how far it was
        await at.until_role("d1", Role.DECODE)


def test_plans_are_followed_through_everything_that_dies(tmp_path: Path) -> None:
    topology = parse_topology(DOCUMENT, tmp_path)
    ensure_model(topology.model, tmp_path, print)
    system = System(topology, tmp_path / "run", lambda line: None)

    async def scenario() -> None:
        async with system, aiohttp.ClientSession() as http:
            keeping_up = asyncio.create_task(system.watch())
            at = Stage(system, http)
            for part in (changes_under_traffic, deaths, back, conversions):
                await part(at)
            keeping_up.cancel()
            await asyncio.wait([keeping_up])

    asyncio.run(scenario())
