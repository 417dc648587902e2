"""Several plan services with one etcd: one leads, the others tell who, and its plans outlive it."""

import asyncio
import signal
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import aiohttp
import msgspec
import pytest

from membership.etcd.client import EtcdClient
from membership.etcd.settings import EtcdConfig
from planner.commands.cli import main
from planner.decisions.plans.live_plan import LivePlan
from planner.service.announcement import AnnouncedLedger
from planner.service.etcd_store import PlansInEtcd
from planner.service.fleet import PlanMember
from planner.service.gateways import Gateways
from planner.service.keeper import Keeper
from planner.service.server import FleetPlanService, taking_part
from planner.service.status import Status
from planner.service.store import Store
from planner.solve.control.ledger import Ledger
from tests.membership.etcd.servers import RealEtcd, needed_binary
from tests.planner.service.test_process import config_file, started
from tests.planner.service.worlds import LAW, PATIENCE_S, SOON, FakeGateway, Nodes, config_for, fake_gateway, on_loop

pytestmark = pytest.mark.long
LEASE_S = 6.0
CALL_S = 3.0


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[RealEtcd]:
    server = RealEtcd(tmp_path, needed_binary())
    try:
        server.start()
        yield server
    finally:
        server.close()


@asynccontextmanager
async def service(etcd: RealEtcd, folder: Path, gateway: FakeGateway, name: str) -> AsyncIterator[FleetPlanService]:
    asked = EtcdConfig(endpoints=(etcd.endpoint,))
    config = config_for(folder / name, gateways=(gateway.url,), etcd=asked)
    store = PlansInEtcd(asked, name, EtcdClient(asked, call_s=CALL_S), LEASE_S)
    async with taking_part(replace(config, controller=replace(SOON, tick_s=0.05)), store=store) as found:
        yield found


async def leader_of(*services: FleetPlanService) -> tuple[FleetPlanService, Keeper]:
    """The one that leads, once one does."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            for each in services:
                if isinstance(each.member.desk, Keeper):
                    return each, each.member.desk
            await asyncio.sleep(0.02)


async def status_of(http: aiohttp.ClientSession, found: FleetPlanService) -> Status:
    async with http.get(f"{found.url}/status") as answer:
        return msgspec.json.decode(await answer.read(), type=Status)


async def applied_by(http: aiohttp.ClientSession, leader: FleetPlanService, gateway: FakeGateway) -> LivePlan:
    async with asyncio.timeout(PATIENCE_S):
        while (await status_of(http, leader)).proposal is None:
            gateway.ask(LAW[:500])
            await asyncio.sleep(0.05)
    async with http.post(f"{leader.url}/apply", json={"by": "ann"}) as answer:
        plan = msgspec.json.decode(await answer.read(), type=Status).in_force
    assert plan is not None
    return plan


@on_loop
async def both_tell_the_plan(etcd: RealEtcd, folder: Path) -> None:
    async with fake_gateway() as gateway, aiohttp.ClientSession() as http, AsyncExitStack() as second:
        other = await second.enter_async_context(service(etcd, folder, gateway, "b"))
        async with AsyncExitStack() as first:
            one = await first.enter_async_context(service(etcd, folder, gateway, "a"))
            leader, _ = await leader_of(one, other)
            follower = other if leader is one else one
            waiting = asyncio.create_task(http.get(f"{follower.url}/plan", params={"wait_s": "60"}))
            plan = await applied_by(http, leader, gateway)
            told = msgspec.json.decode(await (await waiting).read(), type=LivePlan)
            assert told == plan
            status = await status_of(http, follower)
            assert status.leads_at == leader.url
            assert await asyncio.to_thread(main, ["show", "--url", follower.url]) == 0
            async with http.post(f"{follower.url}/rollback", json={}) as answer:
                assert answer.status == 409
                assert (await answer.json())["error"] == f"this service follows: {leader.url} leads, ask there"
            async with http.get(f"{follower.url}/history") as answer:
                assert "applied" in [entry["change"] for entry in await answer.json()]
            if leader is other:
                await second.aclose()
            else:
                await first.aclose()
            _, keeper = await leader_of(follower)
            again = keeper.ledger.in_force
            assert again is not None
            assert (again.version, again.by) == (plan.version, "ann")
            assert keeper.ledger.term == plan.term + 1


def test_both_tell_the_plan_and_the_second_goes_on_with_it(etcd: RealEtcd, tmp_path: Path) -> None:
    both_tell_the_plan(etcd, tmp_path)


@on_loop
async def one_leads_after_etcd_was_lost(etcd: RealEtcd, folder: Path) -> None:
    async with (
        fake_gateway() as gateway,
        aiohttp.ClientSession() as http,
        service(etcd, folder, gateway, "a") as one,
        service(etcd, folder, gateway, "b") as other,
    ):
        leader, _ = await leader_of(one, other)
        plan = await applied_by(http, leader, gateway)
        for each in (one, other):  # one that follows is half a second behind
            async with asyncio.timeout(PATIENCE_S):
                while (await status_of(http, each)).in_force != plan:  # noqa: ASYNC110 no event tells
                    await asyncio.sleep(0.02)
        await asyncio.to_thread(etcd.kill)
        async with asyncio.timeout(PATIENCE_S):
            while isinstance(leader.member.desk, Keeper):  # noqa: ASYNC110 no event tells
                await asyncio.sleep(0.02)
        for each in (one, other):
            async with asyncio.timeout(PATIENCE_S):
                while (status := await status_of(http, each)).leads_at != "?":  # noqa: ASYNC110 no event tells
                    await asyncio.sleep(0.02)
            assert status.in_force == plan
        await asyncio.to_thread(etcd.start)
        _, keeper = await leader_of(one, other)
        assert keeper.ledger.in_force is not None
        assert keeper.ledger.in_force.version == plan.version
        assert keeper.ledger.term > plan.term


def test_none_leads_while_etcd_is_lost_and_one_does_afterwards(etcd: RealEtcd, tmp_path: Path) -> None:
    one_leads_after_etcd_was_lost(etcd, tmp_path)


@on_loop
async def the_first_ledger_is_that_of_files(etcd: RealEtcd, folder: Path) -> None:
    (folder / "a").mkdir()
    Store(folder / "a", 1 << 20).write(Ledger(term=7, last_version=12), None)
    async with fake_gateway() as gateway, service(etcd, folder, gateway, "a") as one:
        _, keeper = await leader_of(one)
        assert (keeper.ledger.term, keeper.ledger.last_version) == (8, 12)


def test_a_fleet_goes_on_with_the_plans_of_one_host(etcd: RealEtcd, tmp_path: Path) -> None:
    the_first_ledger_is_that_of_files(etcd, tmp_path)


@on_loop
async def another_leads(etcd: RealEtcd, folder: Path) -> None:
    (folder / "a").mkdir()
    (folder / "a" / "ledger.json").write_text("{")
    async with fake_gateway() as gateway, service(etcd, folder, gateway, "a") as one:
        async with asyncio.timeout(PATIENCE_S):
            while "not a ledger" not in one.member.desk.status().diagnosis:  # noqa: ASYNC110 no event tells
                await asyncio.sleep(0.01)
        async with service(etcd, folder, gateway, "b") as other:
            leader, _ = await leader_of(other, one)
            assert leader is other


def test_one_whose_first_ledger_is_damaged_lets_another_lead(etcd: RealEtcd, tmp_path: Path) -> None:
    another_leads(etcd, tmp_path)


@on_loop
async def one_leads_after_an_unforeseen_error(etcd: RealEtcd, folder: Path) -> None:
    firsts = iter([RuntimeError("unforeseen"), Ledger(term=7)])

    def first() -> Ledger:
        if isinstance(found := next(firsts), Exception):
            raise found
        return found

    async with fake_gateway() as gateway:
        asked = EtcdConfig(endpoints=(etcd.endpoint,))
        store = PlansInEtcd(asked, "a", EtcdClient(asked, call_s=CALL_S), LEASE_S)
        announced = AnnouncedLedger(Ledger())
        config = config_for(folder, gateways=(gateway.url,))

        def keeper() -> Keeper:
            polled = Gateways(config.gateways, PATIENCE_S)
            return Keeper(config, store, announced, polled, Nodes(gateway), lambda: 0.0, lambda: 0.0)

        member = PlanMember(store, announced, config.mode, keeper, lambda _: [], first, lambda: 0.0)
        running = asyncio.create_task(member.run("http://a"))
        async with asyncio.timeout(PATIENCE_S):
            while not isinstance(member.desk, Keeper):
                assert not running.done()
                await asyncio.sleep(0.02)
        assert announced.ledger.term == 8
        running.cancel()
        await asyncio.wait([running])
        store.close()


def test_an_unforeseen_error_ends_no_service(etcd: RealEtcd, tmp_path: Path) -> None:
    one_leads_after_an_unforeseen_error(etcd, tmp_path)


@asynccontextmanager
async def process(etcd: RealEtcd, folder: Path, gateway: FakeGateway) -> AsyncIterator[tuple[Process, str]]:
    """`prfaas-plan serve`, and where it answers."""
    await asyncio.to_thread(folder.mkdir)
    path = config_file(folder, gateway)
    text = await asyncio.to_thread(path.read_text)
    await asyncio.to_thread(path.write_text, f'{text}\n[plan.etcd]\nendpoints = ["{etcd.endpoint}"]\n')
    made, url = await started(path)
    try:
        yield made, url
    finally:
        made.send_signal(signal.SIGCONT)
        made.send_signal(signal.SIGTERM)
        await made.wait()


async def leading_process(http: aiohttp.ClientSession, url: str) -> Status:
    """The status of the service at `url` once it leads."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            async with http.get(f"{url}/status") as answer:
                status = msgspec.json.decode(await answer.read(), type=Status)
            if not status.leads_at:
                return status
            await asyncio.sleep(0.05)


@on_loop
async def one_that_stood_still_follows(etcd: RealEtcd, folder: Path) -> None:
    async with (
        fake_gateway() as gateway,
        aiohttp.ClientSession() as http,
        process(etcd, folder / "a", gateway) as (stopped, was_leading),
    ):
        before = await leading_process(http, was_leading)
        async with process(etcd, folder / "b", gateway) as (_, follows):
            stopped.send_signal(signal.SIGSTOP)
            after = await leading_process(http, follows)
            assert after.term == before.term + 1
            stopped.send_signal(signal.SIGCONT)
            async with http.post(f"{was_leading}/pause", json={}) as answer:
                assert answer.status == 409
            assert not (await leading_process(http, follows)).paused
            async with asyncio.timeout(PATIENCE_S):
                while True:
                    async with http.get(f"{was_leading}/status") as answer:
                        status = msgspec.json.decode(await answer.read(), type=Status)
                    if (status.leads_at, status.term) == (follows, after.term):
                        break
                    await asyncio.sleep(0.05)


def test_a_leader_that_stood_still_follows_the_one_that_replaced_it(etcd: RealEtcd, tmp_path: Path) -> None:
    one_that_stood_still_follows(etcd, tmp_path)
