"""A gateway follows a plan service: it takes newer plans at once, refuses stale ones, and keeps the last one."""

import asyncio
import os
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web
from msgspec.structs import replace as replace_struct

from gateway.config.gateway import RoutingConfig
from gateway.config.plan import PlanConfig
from gateway.errors import GatewayConfigError
from gateway.routing.plan_follower import Follower
from planner.decisions.plans.live_plan import LivePlan, Mode, PlanSetting
from planner.decisions.plans.offered import GatewayLoad
from planner.decisions.routing.offload import Target
from tests.gateway.memory.pipeline import on_memory_loop, pipeline
from tests.gateway.views import deciding
from tests.gateway.worlds import Deployment, on_loop, until, world

PROMPT = "hello there the quick brown fox"


class Service:
    """Answers as a plan service does, with whatever plan it is given."""

    def __init__(self) -> None:
        self.plan: LivePlan | None = None
        self.raw: bytes | None = None
        self.asked: list[dict[str, str]] = []
        self.headers: list[str] = []
        self.changed = asyncio.Event()
        self.url = ""

    def publish(self, version: int, term: int = 1, **setting: Any) -> LivePlan:
        self.plan = LivePlan(
            version=version, term=term, made_at=1.0, setting=PlanSetting(**setting), reason="test", mode=Mode.APPLIED
        )
        self.changed.set()
        return self.plan

    async def answer(self, http: web.Request) -> web.Response:
        self.asked.append(dict(http.query))
        self.headers.append(http.headers.get("Authorization", ""))
        known = (int(http.query["term"]), int(http.query["after"]))
        while self.raw is None and (self.plan is None or self.plan.place == known):
            self.changed.clear()
            await self.changed.wait()
        return web.Response(body=self.raw or msgspec.json.encode(self.plan))


@asynccontextmanager
async def service(port: int = 0) -> AsyncIterator[Service]:
    found = Service()
    app = web.Application()
    app.router.add_get("/plan", found.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port)
    await site.start()
    found.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield found
    finally:
        await runner.cleanup()


async def metric(w: Deployment, name: str) -> float:
    for line in (await w.metrics()).splitlines():
        if line.startswith(f"{name} "):
            return float(line.split()[-1])
    return 0.0


async def load(w: Deployment, **query: Any) -> GatewayLoad:
    async with w.http.get("/prfaas/load", params=query) as answer:
        return msgspec.json.decode(await answer.read(), type=GatewayLoad)


async def follows(w: Deployment, version: int) -> None:
    """Waits until that plan is followed."""
    async with asyncio.timeout(60.0):
        while (plan := (await load(w)).follows) is None or plan.version != version:  # noqa: ASYNC110 no event tells
            await asyncio.sleep(0.005)


@on_loop
async def test_a_plan_is_followed_at_once_and_recorded() -> None:
    async with service() as plans, world(plan=PlanConfig(url=plans.url)) as w:
        await w.complete()
        plans.publish(1, threshold_tokens=3.0, tie_share=0.5)
        await follows(w, 1)
        answer = await w.complete()
        assert answer.headers["x-prfaas-route"].startswith("remote;")
        assert [record["plan"] for record in await w.records()] == [0, 1]
        assert (await w.records())[1]["threshold"] == 3.0
        seen = await load(w)
        assert (seen.threshold_tokens, seen.tie_share) == (3.0, 0.5)
        assert await metric(w, "prfaas_plan_version") == 1
        assert await metric(w, "prfaas_plan_age_seconds") > 0
        assert await metric(w, 'prfaas_plans_total{outcome="applied"}') == 1
        assert plans.asked[-1]["after"] == "1"


class Followed:
    """A follower without a gateway: the plans that it has done as they say, and what it has counted."""

    def __init__(self, config: PlanConfig, model: str = "") -> None:
        self.plans: list[LivePlan] = []
        self.polls, self.offers = Counter[str](), Counter[str]()
        self.follower = Follower(config, self.plans.append, self, model=model)

    def plan_polled(self, outcome: str) -> None:
        self.polls[outcome] += 1

    def plan_offered(self, outcome: str) -> None:
        self.offers[outcome] += 1

    @property
    def threshold_tokens(self) -> float:
        """That of the plan in force."""
        return self.plans[-1].setting.threshold_tokens

    async def follows(self, version: int) -> None:
        """Waits until that plan is followed."""
        await until(lambda: self.plans and self.plans[-1].version == version)


@asynccontextmanager
async def following(config: PlanConfig, model: str = "") -> AsyncIterator[Followed]:
    followed = Followed(config, model)
    asking = asyncio.create_task(followed.follower.run())
    try:
        yield followed
    finally:
        asking.cancel()
        await asyncio.wait([asking])


@on_loop
async def test_a_stale_plan_is_refused_and_counted() -> None:
    async with service() as plans, following(PlanConfig(url=plans.url)) as f:
        plans.publish(5, 2, threshold_tokens=3.0)
        await f.follows(5)
        plans.publish(4, 2, threshold_tokens=900.0)
        await until(lambda: f.offers["stale_version"])
        plans.publish(6, 1, threshold_tokens=900.0)
        await until(lambda: f.offers["stale_term"])
        assert f.threshold_tokens == 3.0
        plans.publish(6, 3, threshold_tokens=4.0)
        await f.follows(6)


@on_loop
async def test_a_plan_of_another_model_is_refused_and_counted() -> None:
    async with service() as plans, following(PlanConfig(url=plans.url), "chat") as f:
        plans.plan = replace_struct(plans.publish(1, threshold_tokens=900.0), model="coder")
        await until(lambda: f.offers["other_model"])
        assert not f.plans
        for version, model in ((2, "chat"), (3, "")):  # a service of an earlier version does not say
            plans.plan = replace_struct(plans.publish(version, threshold_tokens=3.0), model=model)
            await f.follows(version)


@on_loop
async def test_a_service_that_is_gone_or_talks_nonsense_changes_nothing() -> None:
    async with service() as plans, following(PlanConfig(url=plans.url)) as f:
        plans.publish(1, threshold_tokens=3.0)
        await f.follows(1)
        plans.raw = b'{"version": "one"}'
        plans.publish(2, threshold_tokens=900.0)
        await until(lambda: f.polls["bad_answer"])
        assert f.threshold_tokens == 3.0
        for raw in (b'{"reason": "\xff"}', b" " * (1 << 21)):
            plans.raw = raw
            bad = f.polls["bad_answer"]
            await until(lambda bad=bad: f.polls["bad_answer"] > bad)
            assert f.threshold_tokens == 3.0
        plans.raw = None
        await f.follows(2)


@on_loop
async def test_a_service_that_comes_late_is_followed_from_then_on() -> None:
    async with service() as plans:
        url = plans.url
    async with following(PlanConfig(url=url)) as f:
        await until(lambda: f.polls["unreachable"])
        async with service(int(url.rpartition(":")[2])) as plans:
            plans.publish(1, threshold_tokens=3.0)
            await f.follows(1)


@on_loop
async def test_a_gateway_that_starts_again_begins_with_its_last_plan(tmp_path: Path) -> None:
    config = PlanConfig(plan_file=tmp_path / "plan.json")
    async with service() as plans, following(replace(config, url=plans.url)) as f:
        plans.publish(3, 2, threshold_tokens=3.0)
        await f.follows(3)
    assert os.listdir(tmp_path) == ["plan.json"]
    async with world(plan=config) as w:
        followed = (await load(w)).follows
        assert followed is not None
        assert followed.place == (2, 3)
        assert (await w.complete()).headers["x-prfaas-route"].startswith("remote;")


@pytest.mark.parametrize("damaged", [b"{", b'{"reason": "\xff"}'])
def test_a_damaged_file_is_counted_and_holds_no_plan(tmp_path: Path, damaged: bytes) -> None:
    (tmp_path / "plan.json").write_bytes(damaged)
    f = Followed(PlanConfig(plan_file=tmp_path / "plan.json"))
    f.follower.begin()
    assert (f.plans, f.offers) == ([], {"unreadable_file": 1})


@on_loop
async def test_the_secret_is_sent(tmp_path: Path) -> None:
    with open(tmp_path / "token", "w") as file:  # noqa: ASYNC230
        file.write("abc\n")
    async with service() as plans, following(PlanConfig(url=plans.url, token_file=tmp_path / "token")):
        await until(lambda: plans.headers)
        assert plans.headers[0] == "Bearer abc"


def test_a_secret_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(GatewayConfigError, match=r"token_file: .*none"):
        PlanConfig(token_file=tmp_path / "none").headers()


@on_loop
async def test_a_reload_leaves_the_plan_in_force() -> None:
    async with service() as plans, world(plan=PlanConfig(url=plans.url)) as w:
        plans.publish(1, threshold_tokens=3.0)
        await follows(w, 1)
        w.gateway.reload(w.gateway.config)
        assert (await load(w)).threshold_tokens == 3.0


@pytest.mark.parametrize(("share", "target"), [(0.0, Target.REMOTE), (1.0, Target.LOCAL)])
@on_loop
async def test_a_tie_share_can_be_set_without_a_plan(share: float, target: Target) -> None:
    async with deciding(routing=RoutingConfig(tie_share=share)) as d:
        uncached = d.route(PROMPT).uncached_tokens
        d.decider.configure(replace(d.config, threshold_tokens=float(uncached)))
        assert (d.decider.setting.tie_share, d.route(PROMPT).target) == (share, target)


@on_memory_loop
async def test_load_is_what_was_asked_for_and_readers_do_not_disturb_each_other() -> None:
    async with pipeline(max_in_flight=1) as w:
        for _ in range(3):
            assert (await w.complete(max_tokens=4)).status == 200
        await w.idle()
        first = await load(w)
        assert first == await load(w)
        assert len(first.uncached.values) == 3
        assert len(first.outputs.values) == 3
        assert {(node.node_id, node.role, node.state) for node in first.nodes} == {
            ("r0", "prefill", "ready"), ("p0", "prefill", "ready"), ("d0", "decode", "ready"), ("d1", "decode", "ready")
        }  # fmt: skip
        assert [(link.source, link.destination, link.up) for link in first.links] == [("east", "west", True)]
        await w.complete("another prompt")
        await w.idle()
        new = await load(w, boot=first.boot, uncached=first.uncached.last_seq, outputs=first.outputs.last_seq)
        assert len(new.uncached.values) == 1
        assert len((await load(w, boot="another life", uncached=4)).uncached.values) == 4
        w.admission.limit = 0
        assert (await w.complete()).status == 429
        assert (await load(w)).unread == 1


@on_memory_loop
async def test_a_senseless_cursor_is_refused() -> None:
    async with pipeline() as w, w.http.get("/prfaas/load?uncached=x") as answer:
        assert answer.status == 400
        assert "uncached" in (await answer.json())["error"]["message"]


def test_a_url_that_is_none_is_named() -> None:
    with pytest.raises(ValueError, match=r"url = '127\.0\.0\.1:1': must be an http"):
        PlanConfig(url="127.0.0.1:1")
