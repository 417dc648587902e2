"""A gateway with a certificate asks the plan service over mutual TLS, for itself and for its operators."""

import asyncio
from pathlib import Path

import pytest

from gateway.admin.console.plan_proxy import PlanProxy
from gateway.config.plan import PlanConfig
from gateway.errors import ApiError
from gateway.routing.plan_follower import Follower
from tests.gateway.routing.test_plan_follower import Followed
from tests.gateway.worlds import on_loop, until
from tests.planner.service.test_peers import Site, answering, service
from transport.peers.name import PeerRole


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    return Site(tmp_path_factory.mktemp("site"))


async def polled(config: PlanConfig, site: Site, role: PeerRole) -> str:
    """What the first question came to."""
    followed = Followed(config)
    follower = Follower(config, followed.plans.append, followed, config.asked(site.by_role[role]))
    asking = asyncio.create_task(follower.run())
    await until(lambda: bool(followed.polls))
    asking.cancel()
    await asyncio.wait([asking])
    return next(iter(followed.polls))


@on_loop
async def test_a_gateway_reads_plans_and_changes_them_for_its_operators(site: Site, tmp_path: Path) -> None:
    async with service(tmp_path, site.by_role[PeerRole.PLANNER]) as (found, url):
        config = PlanConfig(url=url, wait_s=0.05)
        assert await polled(config, site, PeerRole.GATEWAY) == "unchanged"
        assert await polled(config, site, PeerRole.PREFILL) == "status_403"
        desk = PlanProxy(config, config.asked(site.by_role[PeerRole.GATEWAY]))
        assert (await desk.standing()).configured
        await desk.change(desk.wanted(b'{"change": "pause"}'), "ann")
        assert found.keeper.ledger.paused
        thief = PlanProxy(config, config.asked(site.by_role[PeerRole.NODE]))
        wish = thief.wanted(b'{"change": "resume"}')
        with pytest.raises(ApiError, match=r"may not plan\.change"):
            await thief.change(wish)


@on_loop
async def test_what_shows_a_node_s_certificate_is_no_plan_service(site: Site) -> None:
    async with answering(site.by_role[PeerRole.NODE]) as (url, heard):
        config = PlanConfig(url=url)
        assert await polled(config, site, PeerRole.GATEWAY) == "unreachable"
        with pytest.raises(ApiError, match="cannot be asked"):
            await PlanProxy(config, config.asked(site.by_role[PeerRole.GATEWAY])).standing()
        assert not heard


def test_without_a_certificate_or_a_service_there_is_nothing_to_show(site: Site) -> None:
    assert PlanConfig(url="https://h").asked(None) is None
    assert PlanConfig().asked(site.by_role[PeerRole.GATEWAY]) is None
