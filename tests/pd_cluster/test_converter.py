"""A real node, its emulated engine a process of its own, changes its role."""

import asyncio
import os
import signal
from collections.abc import Coroutine, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, TypeVar

import grpc
import pytest

from tests.node.running import BLOCK, RunningNode, config, new_runner, running_node, until
from tests.node.test_agent import prompt, refused, reserve_request
from transport.control.proto import node_pb2 as pb

pytestmark = pytest.mark.turns

T = TypeVar("T")
PATIENCE_S = 100.0
OTHER = {"prefill": "decode", "decode": "prefill"}


async def _bounded(scenario: Coroutine[Any, Any, T]) -> T:
    async with asyncio.timeout(PATIENCE_S):
        return await scenario


class Bench:
    """A node that all tests of this file share; each leaves it ready, in whatever role."""

    def __init__(self, runner: asyncio.Runner, node: RunningNode) -> None:
        self._runner = runner
        self.node = node

    def run(self, scenario: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(_bounded(scenario))


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with new_runner() as runner:
        stack = AsyncExitStack()
        node = runner.run(stack.enter_async_context(running_node(config(tmp_path_factory.mktemp("node")))))
        yield Bench(runner, node)
        runner.run(stack.aclose())


def alone(scenario: Coroutine[Any, Any, T]) -> T:
    with new_runner() as runner:
        return runner.run(_bounded(scenario))


async def convert(node: RunningNode, role: str, **options: Any) -> pb.Conversion:
    """With the next epoch, to its end."""
    epoch = options.pop("epoch", 0) or (await node.describe()).conversion.epoch + 1
    request = pb.ConvertRequest(epoch=epoch, role=role, **({"wait_s": PATIENCE_S} | options))
    report: pb.Conversion = await node.stub.Convert(request)
    return report


async def become(node: RunningNode, role: str) -> None:
    assert (await convert(node, role)).role == role


async def idle(node: RunningNode) -> None:
    async def is_idle() -> bool:
        load = (await node.describe()).load
        return not (load.running or load.waiting)

    await until(is_idle)


def test_there_and_back_with_the_cache_as_it_was(bench: Bench) -> None:
    async def scenario() -> None:
        node, tokens = bench.node, prompt(21, 4 * BLOCK + 1)
        await become(node, "decode")
        await node.prefill(tokens)
        pages = (await node.describe()).pool.pages_prefix
        for role in ("prefill", "decode"):
            report = await convert(node, role)
            assert (report.role, report.outcome, report.detail) == (role, "converted", "")
            after = await node.describe()
            assert (after.role, after.state) == (role, pb.NODE_STATE_READY)
            assert after.pool.pages_prefix == pages, "neither the conversion nor its verification touches the cache"
            assert await node.prefill(tokens) == 4 * BLOCK
        text = (await node.get("/metrics"))[1]
        assert 'prfaas_node_role{cluster="west",role="decode"} 1.0' in text
        assert 'prfaas_conversions_total{cluster="west",outcome="converted"}' in text

    bench.run(scenario())


def test_watchers_hear_of_every_step(bench: Bench) -> None:
    async def scenario() -> None:
        node = bench.node
        await become(node, "decode")
        stream = node.stub.Watch(pb.WatchRequest(load_interval_s=1.0))
        await stream.read()
        await become(node, "prefill")
        heard: list[tuple[str, int]] = []
        while ("prefill", pb.NODE_STATE_READY) not in heard:
            event = await stream.read()
            if event.WhichOneof("event") == "description":
                heard.append((event.description.role, event.description.state))
        assert heard == [("decode", pb.NODE_STATE_CONVERTING), ("prefill", pb.NODE_STATE_READY)]
        stream.cancel()

    bench.run(scenario())


def test_what_was_accepted_is_waited_for_and_what_is_new_goes_elsewhere(bench: Bench) -> None:
    async def scenario() -> None:
        node = bench.node
        await become(node, "decode")
        held = await node.stub.Reserve(reserve_request(31))
        begun = await convert(node, "prefill", wait_s=0.0)
        assert (begun.phase, begun.outcome) == (pb.CONVERSION_PHASE_DRAINING, "")
        assert (await node.describe()).state == pb.NODE_STATE_CONVERTING
        assert await refused(node.stub.Reserve(reserve_request(32))) == (grpc.StatusCode.UNAVAILABLE, "converting")
        prefix = await node.stub.Reserve(reserve_request(33, prefix_only=True))  # of no role: it stays through the flip
        following = asyncio.create_task(convert(node, "prefill", epoch=begun.epoch))
        await node.stub.Abort(pb.AbortRequest(transfer_id=held.transfer_id))
        assert (await following).outcome == "converted"
        assert await refused(node.stub.Reserve(reserve_request(34))) == (
            grpc.StatusCode.FAILED_PRECONDITION,
            "wrong_role",
        )
        assert (await node.stub.Abort(pb.AbortRequest(transfer_id=prefix.transfer_id))).reason == ""

    bench.run(scenario())


def test_requests_that_do_not_end_restore_the_old_role(bench: Bench) -> None:
    async def scenario() -> None:
        node = bench.node
        await become(node, "decode")
        held = await node.stub.Reserve(reserve_request(41))
        report = await convert(node, "prefill", drain_timeout_s=0.05)
        assert (report.role, report.target, report.outcome) == ("decode", "prefill", "drain_timeout")
        assert "requests still ran" in report.detail
        assert (await node.describe()).state == pb.NODE_STATE_READY
        further = await node.stub.Reserve(reserve_request(42))
        for ticket in (held, further):
            await node.stub.Abort(pb.AbortRequest(transfer_id=ticket.transfer_id))
        assert (await convert(node, "prefill")).outcome == "converted"

    bench.run(scenario())


def test_an_engine_that_does_not_answer_restores_the_old_role(bench: Bench) -> None:
    async def scenario() -> None:
        node = bench.node
        await idle(node)  # as the engine says, which it could not any more
        before = await node.describe()
        os.kill(before.engine_pid, signal.SIGSTOP)
        try:
            report = await convert(node, OTHER[before.role], verify_timeout_s=0.2)
        finally:
            os.kill(before.engine_pid, signal.SIGCONT)
        assert (report.role, report.outcome) == (before.role, "verify_failed")
        assert "no answer" in report.detail

        async def is_ready() -> bool:  # on a busy machine it was stopped for long enough to be noticed
            return (await node.describe()).state == pb.NODE_STATE_READY

        await until(is_ready)
        assert (await node.describe()).role == before.role
        assert (await convert(node, OTHER[before.role])).outcome == "converted"

    bench.run(scenario())


def test_stale_commands_are_refused_and_the_same_again_is_not(bench: Bench) -> None:
    async def scenario() -> None:
        node = bench.node
        await become(node, "decode")
        epoch = (await node.describe()).conversion.epoch + 5
        assert (await convert(node, "prefill", epoch=epoch)).outcome == "converted"
        assert (await convert(node, "prefill", epoch=epoch)).outcome == "converted"
        stale = (grpc.StatusCode.FAILED_PRECONDITION, "stale_epoch")
        assert await refused(convert(node, "decode", epoch=epoch)) == stale
        assert await refused(convert(node, "decode", epoch=epoch - 1)) == stale
        assert (await convert(node, "prefill", epoch=epoch + 1)).outcome == "unchanged"
        assert (await node.describe()).role == "prefill"

    bench.run(scenario())


def test_of_two_commands_the_newer_one_counts(bench: Bench) -> None:
    async def scenario() -> None:
        node = bench.node
        await become(node, "decode")
        held = await node.stub.Reserve(reserve_request(51))
        begun = await convert(node, "prefill", wait_s=0.0)
        request = pb.ConvertRequest(epoch=begun.epoch, role="prefill", wait_s=PATIENCE_S)
        overruled = asyncio.create_task(node.agent.conversions.convert(request))  # in this process: it waits before
        report = await convert(node, "decode", epoch=begun.epoch + 1)
        assert (report.role, report.outcome) == ("decode", "withdrawn")
        assert (await overruled).epoch == begun.epoch + 1, "who waited for the older one is told"
        await node.stub.Abort(pb.AbortRequest(transfer_id=held.transfer_id))

    bench.run(scenario())


@pytest.mark.parametrize(
    "wrong",
    [
        {"epoch": 1, "role": "both"},
        {"role": "decode"},
        {"epoch": 1 << 40, "role": "decode", "drain_timeout_s": -1.0},
        {"epoch": 1 << 40, "role": "decode", "verify_timeout_s": float("nan")},
        {"epoch": 1 << 40, "role": "decode", "wait_s": float("inf")},
    ],
)
def test_what_makes_no_sense_is_refused(bench: Bench, wrong: dict[str, Any]) -> None:
    async def scenario() -> None:
        call = bench.node.stub.Convert(pb.ConvertRequest(**wrong))
        assert await refused(call) == (grpc.StatusCode.INVALID_ARGUMENT, "bad_request")

    bench.run(scenario())


def test_an_engine_that_dies_while_its_node_drains_is_waited_for(bench: Bench) -> None:
    async def scenario() -> None:
        node = bench.node
        await become(node, "decode")
        held = await node.stub.Reserve(reserve_request(61))
        begun = await convert(node, "prefill", wait_s=0.0)
        before = await node.describe()
        os.kill(before.engine_pid, signal.SIGKILL)

        async def is_gone() -> bool:
            return (await node.describe()).engine_pid != before.engine_pid

        await until(is_gone)
        await node.stub.Abort(pb.AbortRequest(transfer_id=held.transfer_id))
        report = await convert(node, "prefill", epoch=begun.epoch)
        assert (report.role, report.outcome) == ("prefill", "converted")

    bench.run(scenario())


def test_a_node_that_is_started_again_keeps_its_role_and_its_epoch(tmp_path: Path) -> None:
    async def scenario() -> None:
        settings = config(tmp_path)
        async with running_node(settings) as node:
            assert (await convert(node, "prefill", epoch=7)).outcome == "converted"
        async with running_node(settings) as node:
            about = await node.describe()
            assert (about.role, about.conversion.epoch, about.conversion.outcome) == ("prefill", 7, "converted")
            held = asyncio.create_task(node.prefill(prompt(71)))
            assert await refused(convert(node, "decode", epoch=7)) == (
                grpc.StatusCode.FAILED_PRECONDITION,
                "stale_epoch",
            )
            await held
            await node.stub.Drain(pb.DrainRequest(timeout_s=PATIENCE_S))
            assert await refused(convert(node, "decode")) == (grpc.StatusCode.UNAVAILABLE, "draining")

    alone(scenario())


def test_a_node_that_ends_in_the_middle_comes_back_in_the_old_role(tmp_path: Path) -> None:
    async def scenario() -> None:
        settings = config(tmp_path)
        async with running_node(settings) as node:
            await node.stub.Reserve(reserve_request(81))
            await convert(node, "prefill", wait_s=0.0)
        async with running_node(settings) as node:
            about = await node.describe()
            assert (about.role, about.conversion.target, about.conversion.outcome) == (
                "decode",
                "prefill",
                "interrupted",
            )
            await become(node, "prefill")

    alone(scenario())


def test_a_role_that_cannot_be_remembered_holds_all_the_same(tmp_path: Path) -> None:
    async def scenario() -> None:
        settings = config(tmp_path)
        async with running_node(settings) as node:
            (tmp_path / f"{settings.node_id}.role.json").mkdir()  # no file can take its place now
            assert (await convert(node, "prefill")).outcome == "converted"
            assert node.agent.failures["role's file"] == 2

    alone(scenario())
