"""The plan services of a fleet: of two of them one leads, and what it wrote outlives it."""

import asyncio
import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import aiohttp
import msgspec
import tomli_w

from planner.service.status import Status
from tests.fleet.children import Child

LEADS_S: Final = 90.0  # a lease is over after ten
NAMES: Final = ("p0", "p1")
POLL_S: Final = 0.1
ANSWER_S: Final = 20.0
CONFIGS: Final = Path(__file__).resolve().parents[2] / "configs"
StartChild = Callable[..., Awaitable[Child]]


class PlanServices:
    """What runs, and how to change it."""

    def __init__(self, home: Path, etcd_table: Mapping[str, Any], start: StartChild, key: str) -> None:
        self._home, self._etcd, self._start, self._key = home, etcd_table, start, key
        self._running: dict[str, tuple[Child, str]] = {}

    async def start(self, gateways: Sequence[str]) -> None:
        key = self._home / "operator.key"
        key.write_text(self._key)
        key.chmod(0o600)
        for name in NAMES:
            table = {
                "gateways": [*gateways],
                "gateway_key_file": str(key),
                "state_dir": str(self._home / f"plan-{name}"),
                "profile": str(CONFIGS / "profiles" / "internal-1t.json"),
                "pd_hardware": "h20x8",
                "prfaas_hardware": "h200x8",
                "egress_gbps": 100.0,
                "port": 0,
                "etcd": self._etcd,
            }
            (self._home / f"{name}.toml").write_text(tomli_w.dumps({"plan": table}))
        await asyncio.gather(*map(self._start_one, NAMES))

    async def end(self) -> list[str]:
        return [each for each in await asyncio.gather(*(child.end() for child, _ in self._running.values())) if each]

    async def restart(self, name: str) -> list[str]:
        """Ends one and starts it again. Why it did not end as it should, if it did not; raises RuntimeError if none leads."""
        ended, _ = self._running.pop(name)
        said = await ended.end()
        await self._start_one(name)
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=ANSWER_S)) as http:
            await self._leader(http, *NAMES)
        return [said] if said else []

    async def kill_leader(self) -> str:
        """Kills it after a change; the other one must lead with that change. Raises RuntimeError if it does not."""
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=ANSWER_S)) as http:
            name, before = await self._leader(http, *NAMES)
            _, url = self._running[name]
            wanted = not before.paused
            async with http.post(f"{url}/{'pause' if wanted else 'resume'}", json={"by": "churn"}) as answer:
                if answer.status == 409:  # it led until a moment ago
                    return ""
                if answer.status != 200:
                    raise RuntimeError(f"{name} would not be paused: HTTP {answer.status}: {await answer.text()}")
            killed, _ = self._running.pop(name)
            await killed.end(signal.SIGKILL)
            other, after = await self._leader(http, *self._running)
            if after.paused != wanted or after.term <= before.term:
                raise RuntimeError(f"{other} leads in term {after.term} after {before.term}, paused: {after.paused}")
            await self._start_one(name)
            return f"{name}, {other} leads in term {after.term}"

    async def _leader(self, http: aiohttp.ClientSession, *names: str) -> tuple[str, Status]:
        said: dict[str, str] = {}
        try:
            async with asyncio.timeout(LEADS_S):
                while True:
                    for name in names:
                        status = await self._status(http, name)
                        if status is not None and not status.leads_at and not status.superseded:
                            return name, status
                        said[name] = "no answer" if status is None else f"{status.leads_at} leads"
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise RuntimeError(f"no plan service led within {LEADS_S:.0f} s: {said}") from None

    async def _status(self, http: aiohttp.ClientSession, name: str) -> Status | None:
        try:
            async with http.get(f"{self._running[name][1]}/status") as answer:
                return msgspec.json.decode(await answer.read(), type=Status)
        except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError):
            return None

    async def _start_one(self, name: str) -> None:
        child = await self._start(name, "planner", "serve", "-c", str(self._home / f"{name}.toml"))
        self._running[name] = child, await child.said(r"url=(\S+)")
