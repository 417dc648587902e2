"""Three sites prefill for two that decode, by summaries over lines. One of either is lost under load, and nothing else is."""

import asyncio
import json
import random
import signal
from collections import Counter
from pathlib import Path
from typing import Any, Final

import aiohttp
import pytest
import tomli_w

from engine.byte_tokenizer import save_byte_tokenizer
from gateway.auth.keyring import digest_of
from tests.fleet.children import Child, marked
from tests.fleet.load import FIRST_TOKEN, LAST_TOKEN, Load
from tests.fleet.system import FREE_KEY, LISTENING, OPERATOR_KEY, STARTS_AT_ONCE, TIMES, VOCABULARY

PRFAAS: Final = ("east", "north", "south")
PD: Final = ("west", "coast")
CLIENTS: Final = 4
REQUESTS: Final = 72  # a third with all sites, a third without `east`, a third without `coast`, too
LONG: Final = 600  # tokens: beyond the threshold
THRESHOLD: Final = 300
PATIENCE_S: Final = 120.0


class Sites:
    """Five sites and a gateway, each process on its own."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.url = ""
        self.children: dict[str, list[Child]] = {}
        self.agents: list[str] = []
        self._starts = asyncio.Semaphore(STARTS_AT_ONCE)

    async def start(self) -> None:
        for folder in ("tmp", "logs", "tokenizer"):
            (self.home / folder).mkdir()
        save_byte_tokenizer(self.home / "tokenizer", VOCABULARY)
        nodes = [(site, "prefill") for site in PRFAAS] + [(site, role) for site in PD for role in ("prefill", "decode")]
        await asyncio.gather(*(self._start_node(*node) for node in nodes))
        lines = [
            {"source": source, "destination": destination, "name": f"{source}-{destination}", "capacity_gbps": 10}
            for source in PRFAAS
            for destination in PD
        ]
        gateway = {
            "port": 0,
            "tokenizer_dir": "tokenizer",
            "served_model": "tiny",
            "threshold_tokens": THRESHOLD,
            "near": [*PD],
            "lines": lines,
            "operator_keys": [digest_of(OPERATOR_KEY)],
            "tenants": {"free": {"keys": [digest_of(FREE_KEY)]}},
            "nodes": [{"agent": agent} for agent in self.agents],
        }
        child = await self._started("gateway", "prfaas", "gateway", tomli_w.dumps({"gateway": gateway}))
        self.children["gateway"] = [child]
        self.url = await child.said(r"gateway ready url=(\S+)")

    async def lose(self, site: str) -> None:
        """All processes of a site at once."""
        await asyncio.gather(*(child.end(signal.SIGKILL) for child in self.children.pop(site)))

    async def end(self) -> dict[int, str]:
        """What still runs afterwards."""
        await asyncio.gather(*(child.end() for some in self.children.values() for child in some))
        async with asyncio.timeout(PATIENCE_S):
            while left := marked(str(self.home / "tmp")):  # noqa: ASYNC110 engines of agents that were killed end soon
                await asyncio.sleep(0.2)
        return left

    async def _start_node(self, site: str, role: str) -> None:
        table: dict[str, Any] = {
            "node_id": f"{site}-{role}",
            "cluster": site,
            "cluster_kind": "prfaas" if site in PRFAAS else "pd",
            "role": role,
            "model": "llama",
            "served_model": "tiny",
            "engine": "emulated",
            "engine_args": [*TIMES],
            "cache_bytes": 8 << 20,
            "run_dir": str(self.home / "tmp" / "run"),
        }
        module = "prfaas_cluster" if site in PRFAAS else "pd_cluster"
        async with self._starts:
            child = await self._started(f"{site}-{role}", module, "", tomli_w.dumps({"node": table}))
            self.children.setdefault(site, []).append(child)
            self.agents.append(await child.said(LISTENING))
            await child.said(r"node (ready)")

    async def _started(self, name: str, module: str, command: str, settings: str) -> Child:
        path = self.home / f"{name}.toml"
        path.write_text(settings)
        words = (module, *([command] if command else []), "-c", str(path))
        environment = {"TMPDIR": str(self.home / "tmp"), "PYTHONUNBUFFERED": "1", "GRPC_VERBOSITY": "ERROR"}
        return await Child.start(words, self.home / "logs" / f"{name}.log", environment)

    async def told(self, http: aiohttp.ClientSession, path: str) -> str:
        """What the gateway tells operators."""
        async with http.get(f"{self.url}/{path}", headers={"authorization": f"Bearer {OPERATOR_KEY}"}) as answer:
            answer.raise_for_status()
            return await answer.text()

    async def records(self, http: aiohttp.ClientSession) -> list[dict[str, Any]]:
        """Of all requests so far. The last one may be counted after its client has its answer."""
        async with asyncio.timeout(PATIENCE_S):
            while json.loads(await self.told(http, "prfaas/console"))["in_flight"]:  # noqa: ASYNC110 in another process
                await asyncio.sleep(0.05)
        return [json.loads(line) for line in (await self.told(http, "prfaas/requests?since=0")).splitlines() if line]


async def loaded(
    load: Load, http: aiohttp.ClientSession, requests: int, rng: random.Random, lost: asyncio.Event
) -> None:
    """So many requests, several at a time; `lost` is set in their middle."""
    asked = 0

    async def client() -> None:
        nonlocal asked
        while asked < requests:
            asked += 1
            if asked == requests // 2:
                lost.set()
            prompt = rng.choices(range(FIRST_TOKEN, LAST_TOKEN), k=rng.choice((40, LONG, LONG)))
            await load.ask(http, prompt, rng.randint(8, 48))

    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    lost.set()


async def ready(sites: Sites, http: aiohttp.ClientSession, nodes: int) -> None:
    """The gateway has heard that so many nodes are ready."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            console = json.loads(await sites.told(http, "prfaas/console"))
            if sum(node["state"] == "ready" for node in console["nodes"]) == nodes:
                return
            await asyncio.sleep(0.1)


@pytest.mark.timeout(900)  # eleven processes start, and ask each other
def test_a_lost_region_costs_no_request(tmp_path: Path) -> None:
    async def scenario() -> None:
        rng, sites = random.Random(0), Sites(tmp_path)
        load = Load(lambda: [sites.url], set(), rng)
        try:
            async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
                await sites.start()
                await ready(sites, http, len(PRFAAS) + 2 * len(PD))
                await loaded(load, http, REQUESTS // 3, rng, asyncio.Event())
                before = len(await sites.records(http))
                for site in ("east", "coast"):
                    in_the_middle = asyncio.Event()
                    async with asyncio.TaskGroup() as tasks:
                        tasks.create_task(loaded(load, http, REQUESTS // 3, rng, in_the_middle))
                        await in_the_middle.wait()
                        await sites.lose(site)
                await ready(sites, http, len(PRFAAS) - 1 + 2)
                lost_at = len(await sites.records(http))
                await loaded(load, http, REQUESTS // 3, rng, asyncio.Event())
                records = await sites.records(http)
                links = json.loads(await sites.told(http, "prfaas/links"))["data"]
        finally:
            assert await sites.end() == {}
        assert load.outcomes == Counter(right=4 * (REQUESTS // 3)), (load.outcomes, load.reasons, load.wrong)
        first, last = records[:before], records[lost_at:]
        assert {record["revision"] for record in records} == {records[0]["revision"]}
        remote = {record["prefill_node"] for record in first if record["route"] == "remote"}
        assert remote  # sites prefill for others
        assert {record["decode_node"] for record in last} == {"west-decode"}
        far = {record["prefill_node"] for record in last if record["route"] == "remote"}
        assert far <= {"north-prefill", "south-prefill"}
        assert far
        # Each record says which sites were weighed, and why the others were not chosen.
        long = [record for record in last if record["route"] == "remote"]
        for record in long:
            why_not = {each["cluster"]: each["why_not"] for each in record["considered"]}
            assert [cluster for cluster, why in why_not.items() if not why] == [
                record["prefill_node"].partition("-")[0]
            ]
            assert why_not.keys() >= {"west", "north", "south"}
            assert why_not.get("east", "down") in ("down", "no_node")
        named = {line for record in long for each in record["considered"] for line in each["lines"]}
        assert named >= {"north-west", "south-west"}
        up = {(link["source"], link["destination"]) for link in links if link["up"]}
        assert up >= {("north", "west"), ("south", "west")}
        assert not {ends for ends in up if ends[0] == "east"}

    asyncio.run(scenario())
