"""Several gateways before one node share a real etcd: limits of tenants and drained links are those of all of them."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import pytest

from engine.byte_tokenizer import save_byte_tokenizer
from gateway.auth.keyring import digest_of
from tests.membership.etcd.servers import RealEtcd, needed_binary
from tests.prfaas.system.test_membership import PATIENCE_S, node, process, said, until

pytestmark = pytest.mark.e2e

PER_MINUTE = 240
KEY, OPERATOR = "sk-acme", "sk-operator"
MOST_OFF = 0.02  # of the limit, over a minute; what a bucket holds at once has been taken before
LEAST_ALONE = 0.95  # of the limit, at one of several gateways
CLIENTS, PAUSE_S, SETTLE_S, MEASURE_S, REPLACED_S = 6, 0.2, 20.0, 60.0, 20.0
LEAST_ASKED = 1.3 * PER_MINUTE
HEARD_S = 5.0  # that a drain may take; a third of a second on an idle machine
GATEWAY = """[gateway]
port = 0
workers = {workers}
tokenizer_dir = "tokenizer"
served_model = "tiny"
links = ["east:west"]
operator_keys = ["{operator}"]
nodes = [{{ agent = "{agent}" }}]

[gateway.fleet]
name = "{name}"
etcd = {{ endpoints = ["{etcd}"] }}

[gateway.tenants.acme]
keys = ["{key}"]
requests_per_minute = {per_minute}
"""


class Answered(NamedTuple):
    """Requests, or requests by the minute."""

    asked: float
    let_in: float


class Asking:
    """A client of several gateways; keys go with every request."""

    def __init__(self, http: aiohttp.ClientSession) -> None:
        self._http = http

    async def measured(self, urls: Sequence[str], seconds: float) -> "Answered":
        """From one moment to another at which these gateways have nothing left: what has run in, however slow the machine is."""
        await self.ask(urls, SETTLE_S)
        await self.use_up(urls)
        began = time.monotonic()
        asked, let_in = await self.ask(urls, seconds)
        let_in += await self.use_up(urls)
        minutes = (time.monotonic() - began) / 60.0
        return Answered(asked / minutes, let_in / minutes)

    async def ask(self, urls: Sequence[str], seconds: float) -> "Answered":
        """How many requests clients that go to these gateways in turn make meanwhile, and how many are let in."""
        began = time.monotonic()

        async def client(number: int) -> tuple[int, int]:
            asked = let_in = 0
            while time.monotonic() < began + seconds:
                let_in += await self._is_let_in(urls[(number + asked) % len(urls)])
                asked += 1
                await asyncio.sleep(PAUSE_S)
            return asked, let_in

        return Answered(*map(sum, zip(*await asyncio.gather(*map(client, range(CLIENTS))), strict=True)))

    async def use_up(self, urls: Sequence[str]) -> int:
        """Takes what these gateways have left of a minute's requests, until all refuse; how many that were."""
        taken = found = 0
        async with asyncio.timeout(PATIENCE_S):
            while found > 0 or taken == 0:
                found = sum(await asyncio.gather(*map(self._is_let_in, urls)))
                taken += found
        return taken

    async def _is_let_in(self, url: str) -> bool:
        body = {"model": "tiny", "prompt": [4, 5, 6], "max_tokens": 1}
        headers = {"Authorization": f"Bearer {KEY}"}
        async with self._http.post(f"{url}/v1/completions", json=body, headers=headers) as answer:
            await answer.read()
            assert answer.status in (200, 429, 503), await answer.text()  # a worker may not have seen the node yet
            return answer.status == 200

    async def drain(self, url: str, is_drained: bool) -> None:
        body = {"source": "east", "destination": "west", "drained": is_drained}
        async with self._http.post(f"{url}/prfaas/links", json=body, headers=self._operator) as answer:
            assert answer.status == 200, await answer.text()

    async def is_drained(self, url: str) -> bool:
        async with self._http.get(f"{url}/prfaas/links", headers=self._operator) as answer:
            links: list[dict[str, Any]] = (await answer.json())["data"]
        return any(each["drained"] for each in links if each["source"] == "east")

    async def page(self, url: str) -> str:
        async with self._http.get(f"{url}/metrics", headers=self._operator) as answer:
            return await answer.text()

    @property
    def _operator(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {OPERATOR}"}


@asynccontextmanager
async def client() -> AsyncIterator[Asking]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as http:
        yield Asking(http)


@asynccontextmanager
async def gateway(directory: Path, name: str, etcd: RealEtcd, agent: str, workers: int = 1) -> AsyncIterator[str]:
    path = directory / f"{name}.toml"
    path.write_text(
        GATEWAY.format(
            name=name,
            workers=workers,
            agent=agent,
            etcd=etcd.endpoint,
            operator=digest_of(OPERATOR),
            key=digest_of(KEY),
            per_minute=PER_MINUTE,
        )
    )
    async with process("prfaas", "gateway", "-c", str(path)) as running:
        yield await said(running, r"gateway ready url=(\S+)")


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[RealEtcd]:
    server = RealEtcd(tmp_path, needed_binary())
    (tmp_path / "tokenizer").mkdir()
    save_byte_tokenizer(tmp_path / "tokenizer", 4096)
    try:
        server.start()
        yield server
    finally:
        server.close()


@pytest.fixture
def tell(capsys: pytest.CaptureFixture[str]) -> Callable[[str], None]:
    def tell(text: str) -> None:
        with capsys.disabled():
            print(text)

    return tell


def test_three_gateways_let_in_what_one_would(tmp_path: Path, etcd: RealEtcd, tell: Callable[[str], None]) -> None:
    async def scenario() -> None:
        async with AsyncExitStack() as held:
            _, agent = await held.enter_async_context(node(tmp_path, "d0"))
            asking = await held.enter_async_context(client())
            starting = [gateway(tmp_path, f"g{number}", etcd, agent, workers=1 + (number == 1)) for number in range(3)]
            urls = await asyncio.gather(*map(held.enter_async_context, starting))

            found = await asking.measured(urls, MEASURE_S)
            tell(f"through three gateways: {found.let_in:.1f} of {found.asked:.0f} requests a minute, for {PER_MINUTE}")
            assert found.asked > LEAST_ASKED, "this machine is too slow to ask for more than the limit"
            assert abs(found.let_in / PER_MINUTE - 1.0) <= MOST_OFF
            assert "prfaas_fleet_gateways 3.0" in await asking.page(urls[0])

            found = await asking.measured(urls[1:2], MEASURE_S)
            tell(f"through one of three: {found.let_in:.1f} of {found.asked:.0f} requests a minute")
            assert found.asked > LEAST_ASKED, "this machine is too slow to ask for more than the limit"
            assert LEAST_ALONE <= found.let_in / PER_MINUTE <= 1.0 + MOST_OFF
            for url in urls:
                assert 'reason="lapsed"' not in await asking.page(url)

    asyncio.run(scenario())


def test_a_gateway_with_workers_is_replaced_and_its_part_goes_on(
    tmp_path: Path, etcd: RealEtcd, tell: Callable[[str], None]
) -> None:
    async def scenario() -> None:
        async with AsyncExitStack() as held:
            _, agent = await held.enter_async_context(node(tmp_path, "d0"))
            asking = await held.enter_async_context(client())
            starting = [gateway(tmp_path, f"g{number}", etcd, agent, workers=1 + number) for number in range(2)]
            urls = await asyncio.gather(*map(held.enter_async_context, starting))
            await asking.use_up(urls)
            again = ("prfaas", "gateway", "-c", str(tmp_path / "g1.toml"), "--replace")
            successor = await held.enter_async_context(process(*again))
            assert await said(successor, r"gateway ready url=(\S+)") == urls[1]
            found = await asking.measured(urls, REPLACED_S)
            tell(f"after a replacement: {found.let_in:.1f} of {found.asked:.0f} requests a minute")
            waited_for = 2 * 60.0 / REPLACED_S  # one at each gateway
            assert found.let_in <= (1.0 + MOST_OFF) * PER_MINUTE + waited_for
            for url in urls:
                page = await asking.page(url)
                assert "prfaas_fleet_gateways 2.0" in page
                assert 'reason="same_name"' not in page

    asyncio.run(scenario())


def test_a_drain_holds_at_all_gateways_and_a_lost_etcd_is_told_of(
    tmp_path: Path, etcd: RealEtcd, tell: Callable[[str], None]
) -> None:
    async def scenario() -> None:
        async with AsyncExitStack() as held:
            _, agent = await held.enter_async_context(node(tmp_path, "d0"))
            asking = await held.enter_async_context(client())
            urls = [await held.enter_async_context(gateway(tmp_path, "g0", etcd, agent))]
            last = await held.enter_async_context(AsyncExitStack())
            urls.append(await last.enter_async_context(gateway(tmp_path, "g1", etcd, agent)))

            await asking.drain(urls[0], True)
            began = time.monotonic()
            await until(lambda: asking.is_drained(urls[1]))
            took_s = time.monotonic() - began
            tell(f"the other gateway has heard of a drain after {took_s:.2f} s")
            assert took_s < HEARD_S
            await last.aclose()
            urls[1] = await held.enter_async_context(gateway(tmp_path, "g1", etcd, agent))
            assert await asking.is_drained(urls[1])

            etcd.kill()
            await asking.drain(urls[1], False)
            lapsed = 'prfaas_fleet_failures_total{about="limits",reason="lapsed"}'

            async def has_lapsed() -> bool:
                return lapsed in await asking.page(urls[0])

            await until(has_lapsed)
            assert (await asking.ask(urls, 2.0)).let_in > 0
            assert await asking.is_drained(urls[0])
            await asyncio.to_thread(etcd.start)

            async def is_used() -> bool:
                return not await asking.is_drained(urls[0])

            await until(is_used)

    asyncio.run(scenario())
