"""Several gateways add up what their tenants have used over a real etcd, whichever of them end, and however."""

import asyncio
import base64
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gateway.auth.keyring import digest_of
from gateway.fleet.usage.keeper import CYCLE_S, LATE_S
from tests.membership.etcd.servers import RealEtcd
from tests.prfaas.system.test_gateways_in_etcd import GATEWAY, KEY, OPERATOR, etcd, tell
from tests.prfaas.system.test_membership import node, process, said, until

__all__ = ["etcd", "tell"]  # fixtures
pytestmark = pytest.mark.e2e

PROMPT = [4, 5, 6]
ROOT = "/prfaas/gateways/usage/"


class Customer:
    """Asks as the tenant, and knows how many answers it had."""

    def __init__(self, http: aiohttp.ClientSession) -> None:
        self._http = http
        self.served = 0

    async def ask(self, url: str, times: int) -> None:
        left = times
        while left:
            body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 1}
            headers = {"Authorization": f"Bearer {KEY}"}
            async with self._http.post(f"{url}/v1/completions", json=body, headers=headers) as answer:
                assert answer.status in (200, 503), await answer.text()  # a worker may not have seen the node yet
                left -= answer.status == 200
        self.served += times

    async def table(self, url: str) -> tuple[str, str]:
        """Of the fleet, and whether it is complete."""
        headers = {"Authorization": f"Bearer {OPERATOR}"}
        async with self._http.get(f"{url}/prfaas/usage?format=csv", headers=headers) as answer:
            return await answer.text(), answer.headers["x-prfaas-usage-complete"]

    async def usage(self, url: str, query: str = "") -> Any:
        headers = {"Authorization": f"Bearer {OPERATOR}"}
        async with self._http.get(f"{url}/prfaas/usage{query}", headers=headers) as answer:
            assert answer.status == 200, await answer.text()
            return await answer.json()

    async def sees(self, url: str, complete: bool = True) -> Any:
        """Waits until a gateway tells all that was served."""
        report: Any = {}

        async def tells() -> bool:
            nonlocal report
            report = await self.usage(url)
            return report["complete"] is complete and self._served(report) == self.served

        try:
            await until(tells)
        except TimeoutError:
            raise AssertionError(f"{self.served} were served, and {url} tells of {report}") from None
        (acme,) = report["data"]
        assert acme["prompt_tokens"] == len(PROMPT) * self.served
        return report

    def _served(self, report: Any) -> int:
        return sum(int(each["requests"].get("200", 0)) for each in report["data"])


@asynccontextmanager
async def customer() -> AsyncIterator[Customer]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as http:
        yield Customer(http)


def written(directory: Path, name: str, etcd: RealEtcd, agent: str, workers: int = 1) -> tuple[str, ...]:
    """The command of a gateway."""
    path = directory / f"{name}.toml"
    path.write_text(
        GATEWAY.format(
            name=name,
            workers=workers,
            agent=agent,
            etcd=etcd.endpoint,
            operator=digest_of(OPERATOR),
            key=digest_of(KEY),
            per_minute=100_000,
        )
    )
    return ("prfaas", "gateway", "-c", str(path))


def keys(etcd: RealEtcd) -> list[str]:
    begin, end = (base64.b64encode(text.encode()).decode() for text in (ROOT, f"{ROOT[:-1]}0"))
    kept = etcd.ask("kv/range", key=begin, range_end=end, keys_only=True).get("kvs", [])
    return [base64.b64decode(each["key"]).decode().removeprefix(ROOT) for each in kept]


def runs(etcd: RealEtcd) -> int:
    return sum(key.startswith("runs/") for key in keys(etcd))


def test_usage_outlives_gateways_that_are_killed_replaced_and_ended(
    tmp_path: Path, etcd: RealEtcd, tell: Callable[[str], None]
) -> None:
    async def scenario() -> None:
        async with node(tmp_path, "d0") as (_, agent), customer() as acme:
            first = written(tmp_path, "g0", etcd, agent)
            second = written(tmp_path, "g1", etcd, agent, workers=2)
            async with process(*first) as killed, process(*second) as replaced:
                urls = [await said(each, r"gateway ready url=(\S+)") for each in (killed, replaced)]
                await acme.ask(urls[0], 5)
                await acme.ask(urls[1], 7)
                for url in urls:
                    assert (await acme.sees(url))["gateways"] == 2
                own = await acme.usage(urls[0], "?gateway=self")
                assert (own["gateway"], own["data"][0]["requests"]["200"]) == ("self", 5)
                table, is_complete = await acme.table(urls[0])
                assert is_complete == "true"
                assert "acme,requests_200,,,12" in table.splitlines()

                async with process(*second, "--replace") as successor:
                    assert await said(successor, r"gateway ready url=(\S+)") == urls[1]
                    await acme.ask(urls[1], 3)
                    await acme.sees(urls[0])
                    await replaced.communicate()
                    await acme.ask(urls[1], 2)
                    await acme.sees(urls[0])
                    assert runs(etcd) == 2

                    killed.kill()
                    await killed.communicate()
                    async with process(*first) as again:
                        urls[0] = await said(again, r"gateway ready url=(\S+)")
                        await acme.ask(urls[0], 4)
                        await acme.sees(urls[1])
                        assert runs(etcd) == 3
                        await acme.ask(urls[1], 6)
                        successor.terminate()
                        await successor.communicate()
                        await acme.sees(urls[0])
                        tell(f"served {acme.served}; in etcd: {keys(etcd)}")

                        async def is_folded() -> bool:
                            return "folded" in await asyncio.to_thread(keys, etcd)

                        await until(is_folded)
                        report = await acme.sees(urls[0])
                        tell(f"after a fold: {keys(etcd)}, since {report['since_unix_s']}")

    asyncio.run(scenario())


def test_usage_goes_on_without_etcd_and_heals_one_that_is_restored(tmp_path: Path, etcd: RealEtcd) -> None:
    data, backup = tmp_path / "data", tmp_path / "backup"

    async def scenario() -> None:
        async with node(tmp_path, "d0") as (_, agent), customer() as acme:
            commands = [written(tmp_path, f"g{number}", etcd, agent) for number in range(2)]
            async with process(*commands[0]) as one, process(*commands[1]) as two:
                urls = [await said(each, r"gateway ready url=(\S+)") for each in (one, two)]
                await acme.ask(urls[0], 3)
                await acme.sees(urls[1])
                etcd.kill()
                shutil.copytree(data, backup)
                await acme.ask(urls[1], 4)
                report = await acme.sees(urls[1], complete=False)
                assert report["frozen_since_unix_s"] > report["since_unix_s"] > 0
                await asyncio.sleep(CYCLE_S + LATE_S)
                await asyncio.to_thread(etcd.start)
                for url in urls:
                    await acme.sees(url)
                etcd.kill()
                shutil.rmtree(data)
                shutil.move(backup, data)
                await asyncio.to_thread(etcd.start)
                await acme.ask(urls[0], 1)
                for url in urls:
                    await acme.sees(url)

    asyncio.run(scenario())
