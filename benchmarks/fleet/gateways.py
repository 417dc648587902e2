"""What more gateways serve: `python -m benchmarks.fleet.gateways [--counts 1 2 4] [--rounds 3] [--json]`.

Real gateways, agents and emulated engines. With an etcd (ETCD_BINARY) gateways share limits and nodes register there. The
same conversations are held with each number of gateways, in turns. Each request goes to any gateway by chance: no load
balancer keeps a conversation at one. Counted is the CPU of all gateways together, less what they take while nothing is
asked. Each of them also hears what nodes store for the others, so a request costs more of it where there are more. What N
gateways serve, each on a core of its own, is N times what is left of an idle core, over that cost. Engines, agents and
clients are not counted. `hits` is the cached part of all prompts' tokens.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp

from tests.fleet.load import FIRST_TOKEN, LAST_TOKEN
from tests.fleet.system import FREE_KEY, Fleet
from tests.membership.etcd.servers import etcd_binary

NODES: Final = 8
CLIENTS: Final = 48
CACHE_BYTES: Final = 256 << 20  # of a node: no block is evicted
TURNS: Final = 6  # of a conversation
FIRST_TOKENS: Final = 600  # of its first prompt; each turn adds less
MORE_TOKENS: Final = 120
OUTPUT_TOKENS: Final = 16
READS_S: Final = (0.2, 1.0)  # a user, before the next turn
IDLE_S: Final = 10.0
PATIENCE_S: Final = 120.0


@dataclass(frozen=True, slots=True)
class Served:
    """A round with so many gateways. `idle` is the part of a core that one takes while nothing is asked."""

    gateways: int
    requests: int
    cpu_ms: float
    idle: float
    hits: float

    @property
    def most_per_s(self) -> float:
        """Requests that all gateways serve with a core each."""
        return self.gateways * (1.0 - self.idle) / self.cpu_ms * 1e3


@dataclass(frozen=True, slots=True)
class Scaling:
    """Medians over rounds. `throughput` is by that of one gateway."""

    gateways: int
    cpu_ms: float
    idle: float
    hits: float
    throughput: float


async def served_by(count: int, conversations: int, seed: int, etcd: str | None) -> Served:
    """One round: a fleet of its own, with empty caches."""
    with tempfile.TemporaryDirectory(prefix="gateways-") as home:
        fleet = Fleet(Path(home), NODES, count, etcd, CACHE_BYTES)
        try:
            await fleet.start()
            async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
                return await _round(fleet, http, count, conversations, random.Random(seed))
        finally:
            await fleet.end()


async def _round(
    fleet: Fleet, http: aiohttp.ClientSession, count: int, conversations: int, rng: random.Random
) -> Served:
    loop = asyncio.get_running_loop()
    urls = sorted(fleet.urls.values())
    idle_began, idle_cpu_s = loop.time(), _cpu_s(fleet)
    await asyncio.sleep(IDLE_S)
    idle = (_cpu_s(fleet) - idle_cpu_s) / (loop.time() - idle_began) / count
    await asyncio.gather(*(_ask(http, url, [FIRST_TOKEN] * 8) for url in urls for _ in range(4)))
    waiting = [(random.Random(rng.random()), random.Random(rng.random())) for _ in range(conversations)]
    began, before_s, found = loop.time(), _cpu_s(fleet), list[tuple[int, int]]()

    async def client() -> None:
        while waiting:
            says, goes = waiting.pop()
            prompt = says.choices(range(FIRST_TOKEN, LAST_TOKEN), k=FIRST_TOKENS)
            for _ in range(TURNS):
                answer = await _ask(http, goes.choice(urls), prompt)
                found.append(_counts(answer))
                await asyncio.sleep(says.uniform(*READS_S))
                prompt += says.choices(range(FIRST_TOKEN, LAST_TOKEN), k=MORE_TOKENS)

    async with asyncio.TaskGroup() as group:
        for _ in range(CLIENTS):
            group.create_task(client())
    taken_s = _cpu_s(fleet) - before_s - idle * count * (loop.time() - began)
    cached, prompted = map(sum, zip(*found, strict=True))
    return Served(count, len(found), taken_s / len(found) * 1e3, idle, cached / prompted)


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


def scaling(rounds: Sequence[Mapping[int, Served]]) -> Iterator[Scaling]:
    """Ratios are of each round, so that a slow minute of the machine is in both of their ends."""
    least = min(rounds[0])
    for count in sorted(rounds[0]):
        served = [each[count] for each in rounds]
        ratios = [each[count].most_per_s / each[least].most_per_s for each in rounds]
        yield Scaling(
            gateways=count,
            cpu_ms=statistics.median(each.cpu_ms for each in served),
            idle=statistics.median(each.idle for each in served),
            hits=statistics.median(each.hits for each in served),
            throughput=statistics.median(ratios),
        )


async def main(arguments: argparse.Namespace) -> None:
    rounds = []
    for number in range(arguments.rounds):
        order = arguments.counts if number % 2 == 0 else arguments.counts[::-1]
        found: dict[int, Served] = defaultdict()
        for count in order:
            found[count] = await served_by(count, arguments.conversations, number, etcd_binary())
        rounds.append(found)
    results = [*scaling(rounds)]
    if arguments.json:
        print(json.dumps([asdict(each) for each in results]))
        return
    print(f"{NODES} nodes; {arguments.conversations * TURNS} requests a round, {arguments.rounds} rounds; "
          f"etcd: {'yes' if etcd_binary() else 'no, nothing is shared'}")  # fmt: skip
    print("gateways  CPU ms/request  idle (core)   hits  throughput")
    for each in results:
        print(f"{each.gateways:8}  {each.cpu_ms:14.2f}  {each.idle:11.3f}  {each.hits:5.1%}  {each.throughput:9.2f}x")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fleet.gateways", description=__doc__)
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--conversations", type=int, default=240)
    parser.add_argument("--json", action="store_true")
    asyncio.run(main(parser.parse_args()))
