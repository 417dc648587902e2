"""Whether anything grows while a system serves for long: `python -m benchmarks.system.soak [--minutes N] [--share S] [--json]`.

Two clusters with emulated engines and a gateway of two workers, with tenants, limits and a request log. Conversations
begin, go on and end; some clients leave in mid-answer; long prompts cross the link. First it finds the system's
capacity: as many requests at once as there are decode slots, for half a minute. Then it offers a share of that, evenly.

Every half minute: resident memory, open files and threads of every process, and names in /dev/shm. Growth is the most
of the last fifth over that of the second fifth, as some memory fills and is emptied in turns; the first fifth is for
what fills up. To reach that by then, the nodes' pages and the memory of prompts and blocks are a fraction of their
defaults. Pages in use are resident in every process that has touched them. So memory of a process's own (`anon`) is
shown beside all of it.
"""

import argparse
import asyncio
import itertools
import json
import os
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, Final

import aiohttp
import numpy as np

from gateway.auth.keyring import digest_of
from prfaas.demo.client import RequestFailed, complete
from prfaas.errors import PrfaasError
from prfaas.system.models import ensure_model
from prfaas.system.system import System
from prfaas.system.topology import Topology, parse_topology

TENANTS: Final = ("acme", "beta", "gamma")
SLOTS: Final = 16  # of the decode node
TIMES: Final = (
    "--prefill-per-token-s",
    "0.00002",
    "--decode-step-s",
    "0.002",
)  # of the emulated engines: they, not this machine, are full
PROMPT_MEMORY_BYTES: Final = 4 << 20
PAGES_BYTES: Final = 24 << 20
HISTORY_BLOCKS: Final = 8192
FIND_S: Final = 30.0
SAMPLE_S: Final = 30.0
THRESHOLD: Final = 600  # tokens
CONVERSATIONS: Final = 64  # open at once; each ends after some turns, and another one begins
TURNS: Final = 8
LEAVES: Final = 0.03  # of clients, in mid-answer
FIFTHS: Final = 5


class Talk:
    """A conversation: what was said grows by a part each turn."""

    def __init__(self, number: int, rng: np.random.Generator) -> None:
        self.tenant = TENANTS[number % len(TENANTS)]
        self._rng = rng
        self._said = self._words(int(rng.integers(20, 400)))
        self.turns = 0

    def next(self) -> str:
        """The prompt of the next turn."""
        self.turns += 1
        self._said += self._words(int(self._rng.integers(5, 60)))
        return self._said

    def _words(self, count: int) -> str:
        return " ".join(f"{number:x}" for number in self._rng.integers(0, 1 << 16, count)) + " "


def topology(state_dir: Path) -> Topology:
    """One PrfaaS and one PD cluster, and a gateway of two workers."""
    tenants = {name: {"keys": [digest_of(name)], "tokens_per_minute": 100_000_000} for name in TENANTS}
    gateway = {
        "port": 0, "threshold_tokens": THRESHOLD, "workers": 2, "kept_records": 256, "tenants": tenants, "log_level": "warning",
        "prompt_memory_bytes": PROMPT_MEMORY_BYTES,
        "request_log": {"directory": str(state_dir / "requests"), "max_bytes": 16 << 20},
    }  # fmt: skip
    clusters = [
        {"name": "east", "kind": "prfaas", "nodes": [{"node_id": "far", "role": "prefill"}]},
        {
            "name": "west",
            "kind": "pd",
            "nodes": [{"node_id": "near", "role": "prefill"}, {"node_id": "decode", "role": "decode"}],
        },
    ]
    node = {
        "engine": "emulated", "engine_args": list(TIMES), "cache_bytes": PAGES_BYTES,
        "eviction_history_blocks": HISTORY_BLOCKS,
    }  # fmt: skip
    document = {"model": {"arch": "kimi_linear"}, "gateway": gateway, "node": node, "clusters": clusters}
    return parse_topology(document, state_dir)


class Clients:
    """The clients of the system."""

    def __init__(self, http: aiohttp.ClientSession, url: str, model: str, seed: int) -> None:
        self._http, self._url, self._model = http, url, model
        self._rng = np.random.default_rng(seed)
        self._numbers = itertools.count()
        self._talks = [Talk(next(self._numbers), self._rng) for _ in range(CONVERSATIONS)]
        self.outcomes: Counter[str] = Counter()

    async def turn(self) -> None:
        """One request of some conversation, to its end or until its client leaves."""
        index = int(self._rng.integers(CONVERSATIONS))
        talk = self._talks[index]
        if talk.turns >= TURNS:
            talk = self._talks[index] = Talk(next(self._numbers), self._rng)
        body = {"model": self._model, "prompt": talk.next(), "max_tokens": int(self._rng.integers(2, 40))}
        headers = {"Authorization": f"Bearer {talk.tenant}"}
        asking = asyncio.ensure_future(complete(self._http, self._url, body, f"soak-{next(self._numbers)}", headers))
        leaves_after = float(self._rng.random()) * 0.2 if self._rng.random() < LEAVES else None
        try:
            async with asyncio.timeout(leaves_after):
                await asking
            self.outcomes["answered"] += 1
        except TimeoutError:
            self.outcomes["left"] += 1
        except RequestFailed as error:
            self.outcomes[error.code or str(error.status or "broken")] += 1

    async def for_s(self, seconds: float) -> float:
        """As many at once as fit, for so long; answers per second."""
        began = time.monotonic()

        async def one_after_the_other() -> None:
            while time.monotonic() < began + seconds:
                await self.turn()

        await asyncio.gather(*(one_after_the_other() for _ in range(SLOTS)))
        return self.outcomes["answered"] / (time.monotonic() - began)

    async def at(self, rate: float, until: float) -> None:
        """So many a second, whatever becomes of them."""
        running: set[asyncio.Task[None]] = set()
        due = time.monotonic()
        while due < until:
            await asyncio.sleep(due - time.monotonic())
            task = asyncio.create_task(self.turn())
            running.add(task)
            task.add_done_callback(running.discard)
            due += float(self._rng.exponential(1 / rate))
        if running:
            await asyncio.wait(running)


def processes(root: int) -> Iterator[tuple[str, int]]:
    """What runs below `root`: by what it is, and its process id."""
    for child in Path(f"/proc/{root}/task/{root}/children").read_text().split():
        pid = int(child)
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
        name = next((word for word in words if word in ("gateway", "pd_cluster", "prfaas_cluster", "engine")), "other")
        yield f"{name} {pid}", pid
        yield from processes(pid)


def held(pid: int) -> dict[str, int]:
    """What a process holds."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {
        "rss_kib": int(status["VmRSS"].split()[0]),
        "anon_kib": int(status["RssAnon"].split()[0]),
        "threads": int(status["Threads"]),
        "files": len(os.listdir(f"/proc/{pid}/fd")),
    }


async def every(seconds: float, until: float, what: Callable[[], Awaitable[None]]) -> None:
    while time.monotonic() < until:
        await what()
        await asyncio.sleep(max(0.0, min(seconds, until - time.monotonic())))


async def soak(minutes: float, share: float, seed: int, state_dir: Path) -> dict[str, Any]:
    """Serves, and watches."""
    system = topology(state_dir)
    ensure_model(system.model, state_dir, lambda _: None)
    samples: dict[str, list[dict[str, int]]] = defaultdict(list)
    names: list[int] = []
    async with (
        System(system, state_dir / "run", lambda _: None) as running,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http,
    ):
        clients = Clients(http, running.api_url, system.model.served_name, seed)
        capacity = await clients.for_s(FIND_S)
        clients.outcomes.clear()
        until = time.monotonic() + 60 * minutes

        async def look() -> None:
            for name, pid in processes(os.getpid()):
                samples[name].append(held(pid))
            names.append(len(os.listdir("/dev/shm")))

        await asyncio.gather(clients.at(share * capacity, until), every(SAMPLE_S, until, look))
        log_bytes = sum(path.stat().st_size for path in (state_dir / "requests").iterdir())
    return {
        "minutes": minutes,
        "capacity_req_per_s": round(capacity, 1),
        "offered_req_per_s": round(share * capacity, 1),
        "outcomes": dict(clients.outcomes),
        "processes": {name: grown(found) for name, found in sorted(samples.items()) if len(found) > len(names) // 2},
        "names_in_shm": [names[0], names[-1]],
        "request_log_bytes": log_bytes,
    }


def grown(found: list[dict[str, int]]) -> dict[str, float]:
    """Most memory in MiB in the last fifth, its growth since the second, the same of its own; growth of files and threads."""
    fifth = max(1, len(found) // FIFTHS)
    before, after = found[fifth : 2 * fifth], found[-fifth:]
    rss, anon = ([max(each[name] for each in part) for part in (before, after)] for name in ("rss_kib", "anon_kib"))
    return {
        "rss_mib": round(rss[1] / 1024, 1),
        "growth": round(rss[1] / rss[0] - 1, 4),
        "anon_mib": round(anon[1] / 1024, 1),
        "anon_growth": round(anon[1] / anon[0] - 1, 4),
        "files": max(each["files"] for each in after) - max(each["files"] for each in before),
        "threads": max(each["threads"] for each in after) - max(each["threads"] for each in before),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--share", type=float, default=0.7, help="of what it carries (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        try:
            found = asyncio.run(soak(args.minutes, args.share, args.seed, Path(directory)))
        except PrfaasError as error:
            raise SystemExit(f"soak: {error}") from error
    found["load_average"] = round(os.getloadavg()[0], 1)
    if args.json:
        print(json.dumps(found))
        return
    print(f"{found['minutes']:g} minutes at {found['offered_req_per_s']} of {found['capacity_req_per_s']} requests/s, "
          f"load average {found['load_average']}: {found['outcomes']}")  # fmt: skip
    for name, each in found["processes"].items():
        print(f"  {name:24} {each['rss_mib']:8.1f} MiB  {each['growth']:+8.2%}  own {each['anon_mib']:8.1f} MiB  "
              f"{each['anon_growth']:+8.2%}  files {each['files']:+d}  threads {each['threads']:+d}")  # fmt: skip
    print(f"  names in /dev/shm {found['names_in_shm']}, request log {found['request_log_bytes'] / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
