"""Plans under traffic: they are followed through everything that dies; nodes that they move take their roles, or do not, and
are moved back."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from gateway.errors import AgentCallFailed
from planner.decisions.plans.live_plan import LivePlan
from planner.decisions.views import Role
from planner.service.conversions import EPOCHS_PER_TERM
from planner.solve.control.ledger import DONE, PENDING, PlanEvent
from tests.e2e.plans.planned import LONG, SHORT, Stage, document, running

pytestmark = pytest.mark.e2e

ANSWER = 48  # tokens, 3,072 of the model: decode binds
ENDLESS = 4000  # tokens: two minutes
DRAIN_TIMEOUT_S = 8.0  # longer than what is asked here takes
ATTEMPTS = 4


@pytest.fixture(autouse=True)
def _nothing_is_left() -> None:
    """In place of the package's: here no other system runs."""


async def changes_under_traffic(at: Stage) -> None:
    """A shift of the load → a proposal with its reason → applied → rolled back; nothing is lost on the way."""
    await at.until_polled()
    names = await at.ask_all(24, LONG)
    records = await at.records(names)
    assert {records[name]["route"] for name in names} == {"local"}
    assert {records[name]["plan"] for name in names} == {0}
    status = await at.until_status(lambda status: status.proposal is not None)
    assert status.proposal is not None
    assert "binds" in status.proposal.reason
    assert status.proposal.setting.threshold_tokens == LONG  # all are of one length, and shared out
    assert 0 < status.proposal.setting.tie_share < 1
    async with at.traffic():
        assert await at.command("apply") == 0
        await at.until(lambda: _follows_something(at))
    followed = await at.load()
    assert followed.follows is not None
    assert followed.threshold_tokens == followed.follows.setting.threshold_tokens
    names = await at.ask_all(24, LONG)
    records = await at.records(names)
    assert "remote" in {records[name]["route"] for name in names}
    assert {records[name]["plan"] for name in names} == {followed.follows.version}


async def _follows_something(at: Stage) -> bool:
    return (await at.load()).follows is not None


async def deaths(at: Stage) -> None:
    """Of the service: requests go on, and it returns with the same version. Of the gateway: it comes back with the plan."""
    plan = (await at.load()).follows
    assert plan is not None
    assert at.system.plan is not None
    assert at.system.gateway is not None
    async with at.traffic():
        os.kill(at.system.plan.pid, signal.SIGKILL)
        await at.ask_all(4, LONG)
        kept = (await at.load()).follows
        assert kept is not None
        assert kept.version == plan.version
        await at.until_followed(plan.version, plan.term)
    os.kill(at.system.gateway.pid, signal.SIGKILL)
    await at.until(lambda: _ready(at))
    await at.until_followed(plan.version, plan.term)
    names = await at.ask_all(4, SHORT)
    records = await at.records(names)
    assert {records[name]["plan"] for name in names} == {plan.version}


async def _ready(at: Stage) -> bool:
    async with at.http.get(f"{at.system.api_url}/health") as answer:
        return answer.status == 200 and (await answer.json())["nodes_ready"] == 3


async def back(at: Stage) -> None:
    """Another shift → another proposal; a rollback → what the gateway's file says holds again."""
    await at.until_polled()

    async def shift_is_seen() -> bool:
        await at.ask_all(20, SHORT)
        status = await at.status()
        assert status.in_force is not None
        now, proposal = status.in_force.setting, status.proposal
        return proposal is not None and proposal.setting.threshold_tokens < now.threshold_tokens

    await at.until(shift_is_seen)
    async with at.traffic():
        assert await at.command("rollback") == 0
        plan = (await at.status()).in_force
        assert plan is not None
        await at.until_followed(plan.version)
    assert (await at.load()).threshold_tokens == 5000
    names = await at.ask_all(4, LONG)
    assert {(await at.records(names))[name]["route"] for name in names} == {"local"}


async def moves(at: Stage) -> LivePlan:
    """Applies the first proposal that moves a node."""
    while True:
        status = await at.until_status(
            lambda status: status.proposal is not None and status.proposal.setting.roles != {}
        )
        assert status.proposal is not None
        if await at.command("apply", "--version", str(status.proposal.version)) == 0:
            return status.proposal  # else another one has come meanwhile


async def became(at: Stage, plan: LivePlan) -> str:
    """What became of the node that a plan moves."""
    (node,) = plan.setting.roles
    status = await at.until_status(lambda status: status.conversions.get(node, PENDING) != PENDING)
    assert status.in_force is not None
    assert status.in_force.version == plan.version
    return status.conversions[node]


@asynccontextmanager
async def held_up(at: Stage, node: str) -> AsyncIterator[None]:
    """A node has an answer to give that does not end while the block lasts."""
    body = {"model": "m", "prompt": [4], "max_tokens": ENDLESS, "temperature": 0, "ignore_eos": True, "stream": True}
    async with at.http.post(f"{at.system.nodes[node].engine_url}/v1/completions", json=body) as stream:
        assert await stream.content.readline()
        yield


async def decoded_by(at: Stage) -> set[str]:
    """The nodes that some answers are given by, asked for now."""
    names = await at.ask_all(24, SHORT)
    records = await at.records(names)
    return {records[name]["decode_node"] for name in names}


async def conversions(at: Stage) -> None:
    await at.until_polled()
    async with at.traffic([SHORT] * 8, ANSWER):
        async with held_up(at, "p0"), held_up(at, "p1"):
            failed = await moves(at)
            assert (await became(at, failed)).startswith("drain_timeout: requests still ran")
        (stuck,) = failed.setting.roles
        await at.until_role(stuck, Role.PREFILL)
        assert await decoded_by(at) == {"d0"}

        late = []
        while (outcome := await became(at, done := await moves(at))) != DONE:
            assert outcome.startswith("drain_timeout: "), outcome
            late.append(done.version)  # the machine is so busy that ordinary answers take that long
            assert len(late) < ATTEMPTS
        (node,) = done.setting.roles
        await at.until_role(node, Role.DECODE)
        assert node in await decoded_by(at)
        agent = at.agent(node)
        assert (converted := (await agent.describe())[0].role_epoch) // EPOCHS_PER_TERM == done.term
        with pytest.raises(AgentCallFailed, match="stale_epoch"):
            await agent.convert(failed.version, Role.PREFILL)

        assert await at.command("rollback") == 0
        await at.until_role(node, Role.PREFILL)
        back = (await at.status()).in_force
        assert back is not None
        assert back.version > done.version
        assert (await agent.describe())[0].role_epoch > converted
        await agent.close()
    told = [(entry.change, entry.version, entry.reason) for entry in await at.history()]
    kept = [each for each in told if each[0] in (PlanEvent.CONVERTED, PlanEvent.NOT_CONVERTED)]
    given_up = kept[: 1 + len(late)]
    assert [each[:2] for each in given_up] == [
        (PlanEvent.NOT_CONVERTED, version) for version in (failed.version, *late)
    ]
    assert given_up[0][2].startswith(f"{stuck}: drain_timeout: ")
    assert kept[len(given_up) :] == [
        (PlanEvent.CONVERTED, done.version, node),
        (PlanEvent.CONVERTED, back.version, node),
    ]


def test_plans_are_followed_through_everything_that_dies(tmp_path: Path) -> None:
    # At first nothing is long enough to leave.
    table = document({"p0": "prefill", "d0": "decode"}, threshold_tokens=5000)

    async def scenario() -> None:
        async with running(table, tmp_path) as at:
            for part in (changes_under_traffic, deaths, back):
                await part(at)

    asyncio.run(scenario())


def test_nodes_follow_a_plan_and_its_rollback_under_traffic(tmp_path: Path) -> None:
    """What decode lacks is moved there; a node that cannot end what it does stays, is told, and asked again by a later plan."""
    roles = {"p0": "prefill", "p1": "prefill", "d0": "decode"}
    table = document(roles, threshold_tokens=5000, conversions=True, drain_timeout_s=DRAIN_TIMEOUT_S)

    async def run() -> None:
        async with running(table, tmp_path) as at:
            await conversions(at)

    asyncio.run(run())
