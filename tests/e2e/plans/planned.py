"""A running system with a plan service, of real processes: what is asked of it, and what it says of itself."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from engine.emulated.emulated import emulated_tokens
from gateway.cluster.agent_client import AgentClient
from planner.commands.cli import main
from planner.decisions.plans.offered import GatewayLoad, NodeReport
from planner.decisions.views import Role
from planner.service.status import Status
from planner.solve.control.ledger import LedgerEntry
from prfaas.demo.client import complete
from prfaas.system.certificates import OPERATOR_NAME
from prfaas.system.models import ensure_model
from prfaas.system.system import System
from prfaas.system.topology import parse_topology
from tests.e2e import tls
from tests.planner.conftest import CONFIGS

PATIENCE_S = 120.0
LONG, SHORT = 800, 100  # 51,200 and 6,400 tokens of the model


def document(roles: Mapping[str, str], threshold_tokens: float, **plan: Any) -> dict[str, Any]:
    """A topology: r0, a PrfaaS node; a PD cluster of nodes with these roles; a plan service that looks four times a second."""
    controller = {"tick_s": 0.25, "warmup_s": 0.0, "min_requests": 16, "cooldown_s": 1.0}
    return {
        "model": {
            "profile": str(CONFIGS / "profiles" / "internal-1t.json"),
            "name": "m",
            "time_scale": 0.02,
            "token_scale": 1 / 64,
            "byte_scale": 0.001,
        },
        "gateway": {
            "port": 0,
            "threshold_tokens": threshold_tokens,
            "routing": {"increment_tokens": 0, "decode_slots": 20},
        },
        "plan": {"port": 0, "controller": controller, **plan},
        "node": {"cache_bytes": 16 << 20, "block_size": 16},
        "links": [{"source": "east", "destination": "west", "capacity_gbps": 100}],
        "clusters": [
            {
                "name": "east", "kind": "prfaas", "hardware": "h200x8",
                "nodes": [{"node_id": "r0", "role": "prefill", "transport": "tcp"}],
            },
            {
                "name": "west", "kind": "pd", "hardware": "h20x8",
                "nodes": [{"node_id": name, "role": role} for name, role in roles.items()],
            },
        ],
    }  # fmt: skip


@asynccontextmanager
async def running(table: Mapping[str, Any], directory: Path) -> AsyncIterator["Stage"]:
    """The system of a topology, kept up while the block lasts."""
    certificates = tls.folder_for(table, directory)
    who = None
    if certificates is not None:
        table, who = tls.secured(table, certificates), tls.identity(certificates)
    topology = parse_topology(table, directory)
    await asyncio.to_thread(ensure_model, topology.model, directory, print)
    system = System(topology, directory / "run", lambda line: None)
    async with system, tls.client_session(who) as http:
        keeping_up = asyncio.create_task(system.watch())
        try:
            yield Stage(system, http, certificates)
            if certificates is not None:
                in_clear = await asyncio.to_thread(tls.faults_of, system, certificates)
                assert not in_clear, "\n".join(in_clear)
        finally:
            keeping_up.cancel()
            await asyncio.wait([keeping_up])


class Stage:
    """The running system, and what is asked of it. Every answer is compared with the tokens that it must have."""

    def __init__(self, system: System, http: aiohttp.ClientSession, certificates: Path | None) -> None:
        self.system = system
        self.certificates = certificates
        self.http = http
        self.asked = 0

    async def ask(self, num_tokens: int, max_tokens: int = 4) -> str:
        """One request, of a prompt that was never sent before; its id."""
        self.asked += 1
        name = f"request-{self.asked}"
        prompt = [4 + (self.asked * 31 + number * (1 + self.asked % 7)) % 240 for number in range(num_tokens)]
        body = {"model": "m", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        answer = await complete(self.http, self.system.api_url, body, name)
        assert answer.token_ids == emulated_tokens(prompt, max_tokens)
        return name

    async def ask_all(self, count: int, num_tokens: int, max_tokens: int = 4) -> list[str]:
        return await asyncio.gather(*(self.ask(num_tokens, max_tokens) for _ in range(count)))

    @asynccontextmanager
    async def traffic(self, lengths: Sequence[int] = (SHORT, SHORT, LONG), max_tokens: int = 4) -> AsyncIterator[None]:
        """Requests come and are all answered while the block lasts, and at least one after another: of each length one."""
        over, before = asyncio.Event(), self.asked

        async def client(num_tokens: int) -> None:
            while True:
                await self.ask(num_tokens, max_tokens)
                if over.is_set():
                    return

        clients = [asyncio.create_task(client(num_tokens)) for num_tokens in lengths]
        try:
            yield
        finally:
            over.set()
            await asyncio.gather(*clients)
        assert self.asked >= before + len(clients)

    async def records(self, names: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Those of requests that have been answered: a gateway writes them after the last byte."""
        found: dict[str, dict[str, Any]] = {}

        async def written() -> bool:
            async with self.http.get(f"{self.system.api_url}/prfaas/requests") as answer:
                lines = (await answer.text()).splitlines()
            found.update((record["id"], record) for record in map(json.loads, lines))
            return found.keys() >= set(names)

        await self.until(written)
        return found

    async def load(self) -> GatewayLoad:
        async with self.http.get(f"{self.system.api_url}/prfaas/load") as answer:
            return msgspec.json.decode(await answer.read(), type=GatewayLoad)

    async def status(self) -> Status:
        async with self.http.get(f"{self.system.plan_url}/status") as answer:
            return msgspec.json.decode(await answer.read(), type=Status)

    async def history(self) -> list[LedgerEntry]:
        async with self.http.get(f"{self.system.plan_url}/history", params={"limit": 1000}) as answer:
            return msgspec.json.decode(await answer.read(), type=list[LedgerEntry])

    async def until(self, holds: Callable[[], Awaitable[bool]]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                try:
                    if await holds():
                        return
                except aiohttp.ClientError:
                    pass  # it is being started again
                await asyncio.sleep(0.05)

    async def until_status(self, holds: Callable[[Status], bool]) -> Status:
        """The service's status as soon as something holds of it."""
        found: list[Status] = []

        async def held() -> bool:
            found[:] = [await self.status()]
            return holds(found[0])

        await self.until(held)
        return found[0]

    async def until_polled(self) -> None:
        """Waits until the service has looked at the gateway: what comes from now on is new to it."""

        async def polled() -> bool:
            return any(answer.startswith("follows") for answer in (await self.status()).gateways.values())

        await self.until(polled)

    async def until_followed(self, version: int, after_term: int = 0) -> None:
        """Waits until the gateway follows this version, as a leader of a later term has it."""

        async def followed() -> bool:
            plan = (await self.load()).follows
            return plan is not None and plan.version == version and plan.term > after_term

        await self.until(followed)

    async def command(self, *argv: str) -> int:
        shown = [] if self.certificates is None else ["--certificate", str(self.certificates / f"{OPERATOR_NAME}.pem")]
        return await asyncio.to_thread(main, [*argv, "--url", self.system.plan_url, *shown])

    def agent(self, node_id: str) -> AgentClient:
        """A node's agent, for its operator."""
        who = None if self.certificates is None else tls.identity(self.certificates, OPERATOR_NAME)
        return AgentClient(self.system.nodes[node_id].agent_address, PATIENCE_S, who, node_id)

    async def node(self, node_id: str) -> NodeReport:
        return next(node for node in (await self.load()).nodes if node.node_id == node_id)

    async def until_role(self, node_id: str, role: Role) -> None:
        async def held() -> bool:
            node = await self.node(node_id)
            return (node.role, node.state) == (role, "ready")

        await self.until(held)
