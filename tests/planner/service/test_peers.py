"""Over mutual TLS: callers that read plans and change them, and servers that are told anything."""

import asyncio
import ssl
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from planner.commands.cli import main
from planner.errors import InputError
from planner.service.app import PlanEndpoints
from planner.service.gateways import Gateways
from planner.service.server import PlanService, leading
from planner.solve.control.readings import Readings, Units
from tests.planner.service.worlds import PATIENCE_S, SOON, FakeGateway, config_for, on_loop
from transport.control.certificates import Authority
from transport.path.holders import HolderPlaces
from transport.peers.name import PeerName, PeerRole
from transport.peers.rights import SERVE_LOAD, SERVE_PLAN
from transport.wire.asked_servers import AskedServers
from transport.wire.identity import Identity

HERE = "127.0.0.1"


class Site:
    """A certificate of each role, all good for this machine, and those of a stranger's authority."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._authority = Authority(folder)
        self.by_role = {role: self.issue(role) for role in PeerRole}
        self.nameless = self._authority.issue("nameless", [HERE])
        elsewhere = Authority(folder / "elsewhere")
        self.stranger = replace(
            elsewhere.issue("stranger", [HERE], peer=PeerName("prfaas", "any", PeerRole.PLANNER, "stranger")),
            authority=self.nameless.authority,
        )

    def issue(self, role: PeerRole) -> Identity:
        return self._authority.issue(role.value, [HERE], peer=PeerName("prfaas", "east", role, role.value))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    return Site(tmp_path_factory.mktemp("site"))


@asynccontextmanager
async def service(
    state_dir: Path, identity: Identity, holders: HolderPlaces[Any] | None = None, **fields: Any
) -> AsyncIterator[tuple[PlanService, str]]:
    """One that other machines reach, and where it answers on this one."""
    files = {key: getattr(identity, key) for key in ("certificate", "key", "authority")}
    config = config_for(state_dir, host="0.0.0.0", **files | fields)
    async with leading(replace(config, controller=SOON), holders=holders) as found:
        yield found, found.url.replace("0.0.0.0", HERE)


async def status_of(url: str, method: str, caller: Identity | None) -> int | str:
    """The status of an answer, or what ended the handshake."""
    trust: ssl.SSLContext | bool = False if caller is None else caller.client_context()
    try:
        async with aiohttp.ClientSession() as http, http.request(method, url, json={}, ssl=trust) as answer:
            return answer.status
    except (aiohttp.ClientError, OSError) as error:
        return type(error).__name__


@on_loop
async def test_the_right_to_read_and_to_change_plans_is_the_table_s(site: Site, tmp_path: Path) -> None:
    revoked = tmp_path / "revoked"
    await asyncio.to_thread(revoked.write_text, "")
    async with service(tmp_path / "s", site.by_role[PeerRole.PLANNER], revoked=revoked) as (found, url):
        assert found.url.startswith("https://")
        for role, caller in site.by_role.items():
            status = 200 if role in (PeerRole.GATEWAY, PeerRole.OPERATOR) else 403
            for method, path in (("GET", "/status"), ("GET", "/plan?after=0&term=0&wait_s=0"), ("POST", "/pause")):
                expected = 204 if status == 200 and path.startswith("/plan") else status
                assert (role, path, await status_of(f"{url}{path}", method, caller)) == (role, path, expected)
        assert await status_of(f"{url}/status", "GET", site.nameless) == 403
        for nobody in (site.stranger, None):
            assert isinstance(await status_of(f"{url}/health", "GET", nobody), str)
        assert isinstance(await status_of(f"{url}/health".replace("https", "http"), "GET", None), str)


@on_loop
async def test_gateways_with_many_connections_are_bounded_counted_and_keep_no_operator_out(
    site: Site, tmp_path: Path
) -> None:
    busy = site.by_role[PeerRole.GATEWAY].client_context()
    async with service(tmp_path / "s", site.by_role[PeerRole.PLANNER], HolderPlaces(in_all=4, of_holder=3)) as (_, url):
        port = int(url.rpartition(":")[2])
        crowd = []
        for _ in range(6):
            crowd.append(await asyncio.open_connection(HERE, port, ssl=busy, server_hostname=HERE))
        for reader, _ in crowd[:3]:
            assert await reader.read() == b""
        trust = site.by_role[PeerRole.OPERATOR].client_context()
        async with aiohttp.ClientSession() as http, http.get(f"{url}/status", ssl=trust) as answer:
            assert (await answer.json())["turned_away"] == {"crowded_holder": 3}
        for _, writer in crowd:
            writer.close()


@on_loop
async def test_who_is_revoked_reads_no_more_plans(site: Site, tmp_path: Path) -> None:
    revoked = tmp_path / "revoked"
    await asyncio.to_thread(revoked.write_text, "gateway\n")
    async with service(tmp_path / "s", site.by_role[PeerRole.PLANNER], revoked=revoked) as (_, url):
        assert await status_of(f"{url}/status", "GET", site.by_role[PeerRole.GATEWAY]) == 403
        assert await status_of(f"{url}/status", "GET", site.by_role[PeerRole.OPERATOR]) == 200


@on_loop
async def test_whose_connection_is_gone_has_no_rights(site: Site) -> None:
    async def never(http: web.Request) -> web.StreamResponse:
        raise AssertionError

    keeper: Any = None
    (frame,) = PlanEndpoints(keeper, "", site.by_role[PeerRole.PLANNER].guard()).app().middlewares
    request = make_mocked_request("POST", "/pause")
    request.protocol.transport = None
    answer = await frame(request, never)
    assert answer.status == 403


@on_loop
async def test_commands_show_an_operator_s_certificate(
    site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with service(tmp_path, site.by_role[PeerRole.PLANNER]) as (_, url):

        async def show(role: PeerRole) -> int:
            shown = site.by_role[role].certificate
            return await asyncio.to_thread(main, ("show", "--url", url, "--certificate", str(shown)))

        assert await show(PeerRole.OPERATOR) == 0
        assert await show(PeerRole.NODE) == 1
        assert "east/node/node may not plan.read" in capsys.readouterr().err
        assert await asyncio.to_thread(main, ("show", "--url", url)) == 1
        beside = site.folder / "revoked"
        await asyncio.to_thread(beside.write_text, "planner\n")
        assert await show(PeerRole.OPERATOR) == 1
        assert "east/planner/planner is revoked" in capsys.readouterr().err
        await asyncio.to_thread(beside.unlink)


@asynccontextmanager
async def answering(identity: Identity) -> AsyncIterator[tuple[str, Counter[str]]]:
    """A server over HTTPS, and how often it heard a key."""
    heard = Counter[str]()
    gateway = FakeGateway()

    async def answer(http: web.Request) -> web.StreamResponse:
        heard[http.headers.get("Authorization", "")] += 1
        return await gateway.answer(http)

    app = web.Application()
    app.router.add_get("/prfaas/load", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, HERE, 0, ssl_context=identity.page_context())
    await site.start()
    try:
        yield f"https://{HERE}:{runner.addresses[0][1]}", heard
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("role", list(PeerRole))
def test_the_service_tells_its_key_to_gateways_alone(role: PeerRole, site: Site) -> None:
    @on_loop
    async def asked() -> None:
        async with answering(site.by_role[role]) as (url, heard), aiohttp.ClientSession() as http:
            trusted = AskedServers(site.by_role[PeerRole.PLANNER], SERVE_LOAD)
            gateways = Gateways((url,), PATIENCE_S, "a-key", trusted)
            loads = await gateways.poll(http, Readings(Units(time=1.0, tokens=1.0, bytes=1.0)))
            is_gateway = role is PeerRole.GATEWAY
            assert (len(loads), heard["Bearer a-key"]) == ((1, 1) if is_gateway else (0, 0))
            assert is_gateway or f"may not {SERVE_LOAD}" in gateways.answers[url]

    asked()


@on_loop
async def test_nobody_without_a_planner_s_certificate_is_taken_for_the_service(site: Site) -> None:
    trusted = AskedServers(site.by_role[PeerRole.GATEWAY], SERVE_PLAN)
    for identity in (site.by_role[PeerRole.NODE], site.nameless, site.stranger):
        async with answering(identity) as (url, heard), aiohttp.ClientSession() as http:
            with pytest.raises(aiohttp.ClientConnectorError):
                await http.get(f"{url}/prfaas/load", ssl=trusted.context())
            assert not heard


def test_a_service_shows_a_planner_s_certificate(site: Site, tmp_path: Path) -> None:
    files = {key: getattr(site.by_role[PeerRole.GATEWAY], key) for key in ("certificate", "key", "authority")}
    config = config_for(tmp_path, host="0.0.0.0", **files)
    with pytest.raises(InputError, match="belongs to spiffe://prfaas/east/gateway/gateway, not to a planner"):
        config.peers()
    assert not replace(config, host=HERE).speaks_tls  # where only this machine asks
    assert replace(config, host=HERE).peers() is None
