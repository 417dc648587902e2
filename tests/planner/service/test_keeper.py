"""The service looks, proposes, applies when it may, has nodes convert, and forgets nothing."""

import asyncio
import itertools
from pathlib import Path

import msgspec
import pytest

from planner.decisions.plans.live_plan import LivePlan, Mode, PlanSetting, refusal_of
from planner.decisions.views import Role
from planner.errors import ChangeRefused, NothingSeen
from planner.service.config import ApplyMode
from planner.service.store import Store
from planner.solve.control.ledger import DONE, PENDING, Draft, PlanEvent, PlanLimits
from tests.planner.service.worlds import LAW, PATIENCE_S, Desk, desk, fake_gateway, on_loop


async def until(holds) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not holds():  # noqa: ASYNC110 no event tells
            await asyncio.sleep(0)


async def seen_enough(at: Desk) -> None:
    await at.look()
    await at.look(LAW)


@on_loop
async def test_a_far_off_threshold_is_proposed_and_waits_for_somebody(tmp_path: Path) -> None:
    async with fake_gateway() as gateway, desk(tmp_path, gateway) as at:
        await seen_enough(at)
        status = at.keeper.status()
        assert status.in_force is None
        assert status.found == PlanSetting(threshold_tokens=60_000.0)
        assert status.proposal is not None
        assert status.proposal.setting.threshold_tokens == 30_000
        assert "pd_prefill binds" in status.proposal.reason
        assert status.proposal.gain > 0.1
        assert status.proposal.seen.requests == 4000
        for _ in range(5):
            await at.look(LAW[:100])
        assert at.keeper.ledger.proposal == status.proposal
        await at.keeper.apply("ann", 1)
        plan = await at.keeper.next_plan((0, 0), PATIENCE_S)
        assert plan is not None
        assert (plan.version, plan.by, plan.setting.threshold_tokens) == (1, "ann", 30_000)
        assert await at.keeper.next_plan(plan.place, 0.0) is None
        at.follow()
        await at.look()
        proposal = at.keeper.ledger.proposal
        assert proposal is not None
        assert proposal.setting.threshold_tokens == pytest.approx(19_684, rel=0.15)
        assert [entry.change for entry in await at.keeper.history(9)] == [
            PlanEvent.LED, PlanEvent.PROPOSED, PlanEvent.APPLIED, PlanEvent.PROPOSED
        ]  # fmt: skip


@on_loop
async def test_a_waiting_gateway_hears_of_a_plan_at_once(tmp_path: Path) -> None:
    async with fake_gateway() as gateway, desk(tmp_path, gateway) as at:
        await seen_enough(at)
        waiting = asyncio.create_task(at.keeper.next_plan((0, 0), PATIENCE_S))
        await asyncio.sleep(0)
        await at.keeper.apply("ann")
        plan = await waiting
        assert plan is not None
        assert plan.version == 1


@on_loop
async def test_by_itself_it_changes_things_within_limits_and_settles(tmp_path: Path) -> None:
    async with fake_gateway() as gateway, desk(tmp_path, gateway, mode=ApplyMode.AUTO) as at:
        await seen_enough(at)
        changed = [at.watch.now]
        thresholds = [60_000.0, gateway.threshold_tokens]
        for _ in range(40):
            at.follow()
            if gateway.threshold_tokens != thresholds[-1]:
                thresholds.append(gateway.threshold_tokens)
                changed.append(at.watch.now)
            await at.look(LAW[:100])
        assert len(thresholds) <= 5
        assert all(2 >= later / earlier >= 0.5 for earlier, later in itertools.pairwise(thresholds))
        assert thresholds[-1] == pytest.approx(19_684, rel=0.15)
        assert at.keeper.ledger.proposal is None


@on_loop
async def test_a_rollback_stops_it_until_somebody_resumes(tmp_path: Path) -> None:
    async with fake_gateway() as gateway, desk(tmp_path, gateway, mode=ApplyMode.AUTO) as at:
        await seen_enough(at)
        at.follow()
        await at.keeper.roll_back("ann")
        at.follow()
        assert gateway.threshold_tokens == 60_000
        for _ in range(10):
            await at.look(LAW[:100])
        assert at.keeper.ledger.last_version == 2
        await at.keeper.resume("ann")
        await at.look(LAW[:100])
        assert at.keeper.ledger.last_version == 3


@on_loop
async def test_the_next_service_goes_on_where_the_last_one_ended(tmp_path: Path) -> None:
    async with fake_gateway() as gateway:
        async with desk(tmp_path, gateway) as at:
            await seen_enough(at)
            await at.keeper.apply("ann")
            at.follow()
        async with desk(tmp_path, gateway) as at:
            plan = await at.keeper.next_plan((1, 1), PATIENCE_S)
            assert plan is not None
            assert plan.place == (2, 1)
            await at.look()
            await at.keeper.roll_back("bob")
            assert at.keeper.ledger.setting == PlanSetting(threshold_tokens=60_000.0)


@on_loop
async def test_a_service_that_has_lost_its_memory_takes_up_what_gateways_follow(tmp_path: Path) -> None:
    async with fake_gateway() as gateway, desk(tmp_path, gateway) as at:
        gateway.follows = LivePlan(
            version=7, term=5, made_at=0.0, setting=PlanSetting(threshold_tokens=9_000.0), reason="", mode=Mode.APPLIED
        )
        await at.look()
        assert at.keeper.ledger.in_force is not None
        assert at.keeper.ledger.in_force.place == (6, 7)
        assert not at.keeper.superseded


@on_loop
async def test_a_leader_that_was_replaced_changes_nothing(tmp_path: Path) -> None:
    async with fake_gateway() as gateway, desk(tmp_path, gateway) as at:
        await seen_enough(at)
        await at.keeper.apply("ann")
        assert at.keeper.ledger.in_force is not None
        gateway.follows = msgspec.structs.replace(at.keeper.ledger.in_force, term=9)
        await at.look(LAW[:500])
        assert at.keeper.status().superseded
        with pytest.raises(ChangeRefused, match="another service leads"):
            await at.keeper.roll_back("ann")
        gateway.follows = at.keeper.ledger.in_force
        await at.look()
        await at.keeper.roll_back("ann")


@on_loop
async def test_gateways_that_do_not_answer_are_counted_and_nothing_is_made_of_them(tmp_path: Path) -> None:
    async with fake_gateway() as gateway, desk(tmp_path, gateway) as at:
        gateway.status = 500
        await at.look()
        status = at.keeper.status()
        assert status.polls_failed == {"status_500": 1}
        assert status.diagnosis == "no gateway answers"
        gateway.status = 200
        at.keeper.gateways.urls = (gateway.url, "http://127.0.0.1:1")
        await seen_enough(at)
        assert at.keeper.status().polls_failed["unreachable"] == 2
        assert at.keeper.ledger.proposal is not None


@on_loop
async def test_wishes_of_a_look_that_is_long_ago_are_not_told(tmp_path: Path) -> None:
    async with fake_gateway() as gateway, desk(tmp_path, gateway) as at:
        with pytest.raises(NothingSeen, match="nothing has been seen yet"):
            at.keeper.wishes()
        await at.look(LAW)
        assert at.keeper.wishes().at == at.watch.now
        gateway.status = 500
        await at.look()
        assert at.keeper.wishes().sites["w"].prefill is not None  # the last ones still count
        at.watch.now += 60.0
        with pytest.raises(NothingSeen, match="last seen 61 s ago: no gateway answers"):
            at.keeper.wishes()


@on_loop
async def test_a_node_is_converted_and_converted_back(tmp_path: Path) -> None:
    async with fake_gateway(threshold_tokens=19_684.0, num_prefill=6) as gateway, desk(
        tmp_path, gateway, conversions=True
    ) as at:  # fmt: skip
        await seen_enough(at)
        proposal = at.keeper.ledger.proposal
        assert proposal is not None
        assert dict(proposal.setting.roles) == {"n0": Role.DECODE}
        assert at.nodes.asked == []
        await at.keeper.apply("ann")
        await until(lambda: at.keeper.ledger.conversions == {"n0": DONE})
        assert gateway.roles["n0"] is Role.DECODE
        await at.keeper.roll_back("ann")
        await until(lambda: gateway.roles["n0"] is Role.PREFILL)
        await until(lambda: at.keeper.ledger.conversions == {"n0": DONE})
        assert at.nodes.asked == [("n0", Role.DECODE, 1), ("n0", Role.PREFILL, 2)]


@on_loop
async def test_a_conversion_that_fails_is_said_and_not_tried_for_ever(tmp_path: Path) -> None:
    async with fake_gateway(threshold_tokens=19_684.0, num_prefill=6) as gateway:
        async with desk(tmp_path, gateway, conversions=True) as at:
            at.nodes.unwilling["n0"] = "drain_timeout: 3 requests run"
            await seen_enough(at)
            await at.keeper.apply("ann")
            await until(lambda: at.keeper.ledger.conversions == {"n0": "drain_timeout: 3 requests run"})
            await at.look()
            assert len(at.nodes.asked) == 1
            last = (await at.keeper.history(1))[0]
            assert (last.change, last.reason) == (PlanEvent.NOT_CONVERTED, "n0: drain_timeout: 3 requests run")
        async with desk(tmp_path, gateway, conversions=True) as at:
            await at.look()
            assert at.keeper.status().conversions == {"n0": "drain_timeout: 3 requests run"}
            assert at.nodes.asked == []


@on_loop
async def test_who_leaves_in_the_middle_of_a_change_does_not_leave_it_half_done(tmp_path: Path) -> None:
    async with fake_gateway() as gateway, desk(tmp_path, gateway) as at:
        await seen_enough(at)
        leaving = asyncio.create_task(at.keeper.apply("ann"))
        await asyncio.sleep(0)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        assert at.keeper.ledger.in_force is not None
        assert Store(tmp_path, 1000).read() == at.keeper.ledger


@on_loop
async def test_what_cannot_be_written_down_has_not_happened(tmp_path: Path) -> None:
    async with fake_gateway() as gateway, desk(tmp_path / "state", gateway) as at:
        await seen_enough(at)
        before = at.keeper.ledger
        (tmp_path / "state").rename(tmp_path / "gone")
        with pytest.raises(OSError, match="ledger"):
            await at.keeper.apply("ann")
        assert at.keeper.ledger == before
        (tmp_path / "gone").rename(tmp_path / "state")
        await at.keeper.apply("ann")
        assert at.keeper.ledger.in_force is not None


@on_loop
async def test_who_is_replaced_while_a_node_converts_goes_on_converting_when_it_leads_again(tmp_path: Path) -> None:
    async with fake_gateway(threshold_tokens=19_684.0, num_prefill=6) as gateway, desk(
        tmp_path, gateway, conversions=True
    ) as at:  # fmt: skip

        def on_asked() -> None:
            at.keeper.superseded = not at.nodes.asked

        at.nodes.on_asked = on_asked
        await seen_enough(at)
        await at.keeper.apply("ann")
        await until(lambda: [node_id for node_id, _, _ in at.nodes.asked] == ["n0"])
        assert at.keeper.ledger.conversions == {"n0": PENDING}
        await at.look()
        await until(lambda: at.keeper.ledger.conversions == {"n0": DONE})


@on_loop
async def test_by_itself_it_applies_nothing_that_is_not_found_better_now(tmp_path: Path) -> None:
    async with fake_gateway() as gateway:
        async with desk(tmp_path, gateway) as at:
            await seen_enough(at)
            assert at.keeper.ledger.proposal is not None
        async with desk(tmp_path, gateway, mode=ApplyMode.AUTO) as at:
            await at.look()
            assert at.keeper.status().diagnosis == "too few requests to judge by"
            assert at.keeper.ledger.in_force is None
            await at.look(LAW)
            assert at.keeper.ledger.in_force is not None


@on_loop
async def test_a_role_is_not_left_without_a_node_by_a_plan_that_waited_too_long(tmp_path: Path) -> None:
    async with fake_gateway(threshold_tokens=19_684.0, num_prefill=6) as gateway, desk(
        tmp_path, gateway, conversions=True
    ) as at:  # fmt: skip
        await seen_enough(at)
        await at.keeper.pause("ann")
        for name in ("n1", "n2", "n3", "n4", "n5"):
            del gateway.roles[name]
        await at.look()
        await at.keeper.apply("ann")
        await until(lambda: at.keeper.ledger.conversions == {"n0": "n0 is the last prefill node of w that is ready"})
        assert at.nodes.asked == []


@on_loop
async def test_nodes_that_change_places_do_so_in_the_order_that_leaves_every_role_a_node(tmp_path: Path) -> None:
    async with fake_gateway(threshold_tokens=19_684.0, num_prefill=1) as gateway, desk(
        tmp_path, gateway, conversions=True
    ) as at:  # fmt: skip
        await at.look()
        ledger, _ = at.keeper.ledger.propose(
            Draft(setting=PlanSetting(threshold_tokens=19_684.0, roles={"n0": Role.DECODE, "n1": Role.PREFILL}), reason=""),
            PlanLimits(), 0.0,
        )  # fmt: skip
        at.announced.say(ledger)
        await at.keeper.apply("ann")
        await until(lambda: at.keeper.ledger.conversions == {"n0": DONE, "n1": DONE})
        assert [name for name, *_ in at.nodes.asked] == ["n1", "n0"]


@on_loop
@pytest.mark.parametrize("first", ["a", "b"])
async def test_of_two_services_with_a_memory_each_one_gives_way(tmp_path: Path, first: str) -> None:
    second = "b" if first == "a" else "a"
    async with (
        fake_gateway() as gateway,
        desk(tmp_path / first, gateway, first) as early,
        desk(tmp_path / second, gateway, second) as late,
    ):
        await seen_enough(early)
        await early.keeper.apply("ann")
        await seen_enough(late)
        await late.keeper.apply("bob")
        ours, theirs = early.keeper.ledger.in_force, late.keeper.ledger.in_force
        assert ours is not None
        assert theirs is not None
        assert ours.place == theirs.place
        gateway.follows = ours if refusal_of(theirs, ours) is not None else theirs
        for at in (early, late):
            await at.look(LAW[:10])
        leads = {at.keeper.ledger.leader: not at.keeper.superseded for at in (early, late)}
        assert leads == {"a": False, "b": True}


@on_loop
async def test_a_leader_goes_on_from_the_later_version_of_one_that_gives_way(tmp_path: Path) -> None:
    async with fake_gateway() as gateway, desk(tmp_path, gateway, "b") as at:
        await seen_enough(at)
        await at.keeper.apply("ann")
        plan = at.keeper.ledger.in_force
        assert plan is not None
        gateway.follows = msgspec.structs.replace(
            plan, leader="a", version=9, setting=PlanSetting(threshold_tokens=9_000.0)
        )
        assert refusal_of(plan, gateway.follows) is not None
        await at.look(LAW[:10])
        followed = at.keeper.ledger.in_force
        assert followed is not None
        assert followed.setting == PlanSetting(threshold_tokens=9_000.0)
        assert refusal_of(followed, gateway.follows) is None
        assert not at.keeper.superseded


@on_loop
async def test_a_leader_that_gave_way_goes_on_once_gateways_follow_an_earlier_one(tmp_path: Path) -> None:
    async with fake_gateway() as gateway, desk(tmp_path, gateway, "b") as at:
        await seen_enough(at)
        await at.keeper.apply("ann")
        plan = at.keeper.ledger.in_force
        assert plan is not None
        gateway.follows = msgspec.structs.replace(plan, leader="c")
        await at.look(LAW[:10])
        assert at.keeper.superseded
        gateway.follows = msgspec.structs.replace(plan, leader="a", version=9)
        await at.look(LAW[:10])
        assert not at.keeper.superseded
        assert at.keeper.ledger.in_force is not None
        assert at.keeper.ledger.in_force.version == 9


@on_loop
async def test_a_plan_of_the_same_place_of_another_leader_is_news(tmp_path: Path) -> None:
    async with fake_gateway() as gateway, desk(tmp_path, gateway, "b") as at:
        await seen_enough(at)
        await at.keeper.apply("ann")
        plan = at.keeper.ledger.in_force
        assert plan is not None
        assert await at.keeper.next_plan(plan.place, PATIENCE_S, "a") == plan
        assert await at.keeper.next_plan(plan.place, 0.0, "b") is None
        assert await at.keeper.next_plan(plan.place, 0.0) is None
