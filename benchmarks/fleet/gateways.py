"""What more gateways serve: `python -m benchmarks.fleet.gateways [--counts 1 2 4] [--nodes 8] [--clients 16 56] [--json]`.

Real gateways, agents and emulated engines. With an etcd (ETCD_BINARY) gateways share limits and nodes register there. The
same conversations are held with each number of gateways, by fewer and by more clients. Each request goes to any gateway by
chance: no load balancer keeps a conversation at one. Counted is the CPU of all gateways together. A line through its rates
parts what a request costs, and what a gateway takes by time alone: reports of nodes, registries. Each gateway also hears
what nodes store for the others, so a request costs more where there are more. What N gateways serve is N times what is left
of a core, over the cost of a request: each is taken to have a core of its own. Engines, agents and clients are not counted.
`hits` is the cached part of all prompts' tokens.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import aiohttp
import numpy as np

from tests.fleet.load import FIRST_TOKEN, LAST_TOKEN
from tests.fleet.system import FREE_KEY, Fleet
from tests.membership.etcd.servers import etcd_binary

CACHE_BYTES: Final = 256 << 20  # of a node
CONVERSATIONS: Final = 4  # of a client, one after the other
TURNS: Final = 6  # of a conversation
FIRST_TOKENS: Final = 600  # of its first prompt; each turn adds less
MORE_TOKENS: Final = 120
OUTPUT_TOKENS: Final = 16
READS_S: Final = (0.2, 1.0)  # a user, before the next turn
PATIENCE_S: Final = 120.0
LEAST_APART: Final = 1.5  # the greatest rate by the least: a line through rates that are nearer says nothing


@dataclass(frozen=True, slots=True)
class ServedRound:
    """A round with so many gateways. `cores` is what they all took of the CPU."""

    gateways: int
    per_s: float
    cores: float
    hits: float


@dataclass(frozen=True, slots=True)
class Scaling:
    """Over all rounds. `idle` is the part of a core that a gateway takes by time; `throughput` is by that of one."""

    gateways: int
    cpu_ms: float
    idle: float
    hits: float
    throughput: float = 1.0

    @property
    def most_per_s(self) -> float:
        """Requests that all gateways serve with a core each."""
        return self.gateways * (1.0 - self.idle) / self.cpu_ms * 1e3


async def served_by(count: int, nodes: int, clients: int, seed: int, etcd: str | None) -> ServedRound:
    """One round: a fleet of its own, with empty caches."""
    with tempfile.TemporaryDirectory(prefix="gateways-") as home:
        fleet = Fleet(Path(home), nodes, count, etcd, cache_bytes=CACHE_BYTES)
        try:
            await fleet.start()
            async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
                return await _round(fleet, http, clients, random.Random(seed))
        finally:
            await fleet.end()


async def _round(fleet: Fleet, http: aiohttp.ClientSession, clients: int, rng: random.Random) -> ServedRound:
    loop = asyncio.get_running_loop()
    urls = sorted(fleet.urls.values())
    await asyncio.gather(*(_ask(http, url, [FIRST_TOKEN] * 8) for url in urls for _ in range(4)))
    waiting = [(random.Random(rng.random()), random.Random(rng.random())) for _ in range(clients * CONVERSATIONS)]
    began, before_s, found = loop.time(), _cpu_s(fleet), list[tuple[int, int]]()

    async def client() -> None:
        while waiting:
            says, goes = waiting.pop()
            prompt = says.choices(range(FIRST_TOKEN, LAST_TOKEN), k=FIRST_TOKENS)
            for _ in range(TURNS):
                found.append(_counts(await _ask(http, goes.choice(urls), prompt)))
                await asyncio.sleep(says.uniform(*READS_S))
                prompt += says.choices(range(FIRST_TOKEN, LAST_TOKEN), k=MORE_TOKENS)

    async with asyncio.TaskGroup() as group:
        for _ in range(clients):
            group.create_task(client())
    took_s = loop.time() - began
    cached, prompted = map(sum, zip(*found, strict=True))
    return ServedRound(len(urls), len(found) / took_s, (_cpu_s(fleet) - before_s) / took_s, cached / prompted)


async def _ask(http: aiohttp.ClientSession, url: str, prompt: Sequence[int]) -> Mapping[str, Any]:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": OUTPUT_TOKENS, "temperature": 0, "ignore_eos": True}
    headers = {"authorization": f"Bearer {FREE_KEY}"}
    async with (
        asyncio.timeout(PATIENCE_S),
        http.post(f"{url}/v1/completions", json=body, headers=headers, raise_for_status=True) as answer,
    ):
        said: Mapping[str, Any] = await answer.json()
    return said


def _counts(answer: Mapping[str, Any]) -> tuple[int, int]:
    """Cached tokens of the prompt, and all of it."""
    usage = answer["usage"]
    return (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0), usage["prompt_tokens"]


def _cpu_s(fleet: Fleet) -> float:
    """Of the gateways' processes so far, ended threads included."""
    ticks = 0
    for child in fleet.gateways.values():
        fields = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def scaling(rounds: Sequence[ServedRound]) -> Iterator[Scaling]:
    """The least number of gateways first."""
    least: Scaling | None = None
    for count in sorted({each.gateways for each in rounds}):
        served = [each for each in rounds if each.gateways == count]
        rates = [each.per_s for each in served]
        if max(rates) < LEAST_APART * min(rates):
            raise SystemExit(f"{count} gateways: {min(rates):.0f} to {max(rates):.0f} requests/s are too near together: "
                             "give --clients fewer and more of them, or a faster machine")  # fmt: skip
        cost_s, by_time = np.polyfit(rates, [each.cores for each in served], 1)
        hits = statistics.fmean(each.hits for each in served)
        found = Scaling(gateways=count, cpu_ms=float(cost_s) * 1e3, idle=float(by_time) / count, hits=hits)
        least = least or found
        yield replace(found, throughput=found.most_per_s / least.most_per_s)


async def main(arguments: argparse.Namespace) -> None:
    rounds = []
    for number in range(arguments.rounds):
        # Each round begins at the other end, so that no number of gateways alone has a slow minute of the machine.
        for count in arguments.counts if number % 2 == 0 else arguments.counts[::-1]:
            for clients in arguments.clients:
                rounds.append(await served_by(count, arguments.nodes, clients, number, etcd_binary()))
                print(f"round {number}: {rounds[-1]}", file=sys.stderr, flush=True)
    results = [*scaling(rounds)]
    if arguments.json:
        print(json.dumps([asdict(each) for each in results]))
        return
    rates = [each.per_s for each in rounds]
    print(f"{arguments.nodes} nodes; {min(rates):.0f} to {max(rates):.0f} requests/s, {arguments.rounds} rounds; "
          f"etcd: {'yes' if etcd_binary() else 'no, nothing is shared'}")  # fmt: skip
    print("gateways  CPU ms/request  by time (core)   hits  throughput")
    for each in results:
        print(f"{each.gateways:8}  {each.cpu_ms:14.2f}  {each.idle:14.3f}  {each.hits:5.1%}  {each.throughput:9.2f}x")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fleet.gateways", description=__doc__)
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--nodes", type=int, default=8, help="a node tells each gateway at most 10 messages/s, so few "
                        "nodes under a load show what many show under a greater one")  # fmt: skip
    parser.add_argument("--clients", type=int, nargs="+", default=[16, 56])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    asyncio.run(main(parser.parse_args()))
