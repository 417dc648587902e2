"""KVCache that is on its way to a decode node is not sent there again for prompts with the same beginning."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from gateway.cluster.inflight_load import booked
from gateway.pipeline.reservations import until_landed
from tests.gateway.cluster.test_inflight_load import node_of, route_of
from tests.gateway.memory.pipeline import Pipelined, on_memory_loop, pipeline
from tests.gateway.scripted import ScriptedNode
from tests.gateway.worlds import PATIENCE_S, until

LONG = "the quick brown fox jumps over the lazy dog " * 40


def tickets(w: Pipelined) -> list[dict[str, Any]]:
    """What prefill nodes were given, in the order in which they were asked."""
    return [body["kv_transfer_params"]["ticket"] for node in prefills(w) for body in node.bodies]


def prefills(w: Pipelined) -> Sequence[ScriptedNode]:
    return [*w.nodes.remote, *w.nodes.local]


def gated(w: Pipelined) -> asyncio.Event:
    """No prompt is computed before it is set."""
    gate = asyncio.Event()
    for node in prefills(w):
        node.script.prefill_gate = gate
    return gate


def sent_whole(w: Pipelined) -> Counter[str]:
    """How often all of a prompt was sent, by decode node."""
    return Counter(ticket["node_id"] for ticket in tickets(w) if not ticket["have_tokens"])


def no_arrivals(w: Pipelined) -> bool:
    return not any(len(node.arrivals) for node in w.clusters.nodes)


async def started(w: Pipelined, prompts: Sequence[str], **fields: Any) -> list["asyncio.Task[Any]"]:
    """Requests of their own, each decided after the one before it."""
    tasks = []
    for number, prompt in enumerate(prompts):
        tasks.append(asyncio.create_task(w.complete(prompt, **fields)))
        await until(lambda: sum(len(node.arrivals) for node in w.clusters.nodes) == number + 1)  # noqa: B023
    return tasks


@on_memory_loop
async def test_sixteen_answers_to_one_prompt_have_it_sent_once() -> None:
    async with pipeline(decode=1) as w:
        response = await w.complete(LONG, n=16)
        assert response.status == 200
        have = sorted(ticket["have_tokens"] for ticket in tickets(w))
        assert have[0] == 0
        assert len(have) == 16
        assert len(set(have[1:])) == 1
        assert have[1] > 300
        records = await w.records()
        predicted = sorted(record["predicted_bytes"] for record in records)
        assert predicted[-1] > 4 * predicted[-2]  # what decisions count on the link
        assert not any(record["fallbacks"] for record in records)
        await w.settled()
        assert no_arrivals(w)


@on_memory_loop
async def test_separate_requests_that_fan_out_share_what_they_have_in_common() -> None:
    async with pipeline(decode=1) as w:
        gate = gated(w)
        tasks = await started(w, [f"{LONG} and {number} {'more ' * number}" for number in range(8)])
        assert sum(len(node.bodies) for node in prefills(w)) == 1  # the others wait, and hold nothing
        assert len(w.nodes.decode[0].open_reservations) == 1
        gate.set()
        assert {(await task).status for task in tasks} == {200}
        assert sent_whole(w) == {"d0": 1}
        assert len(tickets(w)) == 8
        await w.settled()
        assert no_arrivals(w)


@on_memory_loop
async def test_prompts_of_others_are_not_waited_for() -> None:
    async with pipeline(decode=1) as w:
        gate = gated(w)
        mine = await started(w, [LONG], cache_salt="mine")
        yours = asyncio.create_task(w.complete(LONG, cache_salt="yours"))
        other = asyncio.create_task(w.complete("another prompt " * 100))
        await until(lambda: sum(len(node.bodies) for node in prefills(w)) == 3)
        gate.set()
        assert {(await task).status for task in (*mine, yours, other)} == {200}
        await w.settled()


@pytest.mark.parametrize("fault", ["422 odd", "undelivered scripted"])
def test_when_the_first_fails_one_other_has_all_sent_and_the_rest_wait_for_that(fault: str) -> None:
    @on_memory_loop
    async def scenario() -> None:
        async with pipeline(decode=1, local=0, remote=1) as w:
            (node,) = prefills(w)
            node.script.prefill_gate = gate = asyncio.Event()
            node.script.prefill = [fault]
            tasks = await started(w, [LONG] * 6)
            await until(lambda: node.bodies)
            gate.set()
            assert {(await task).status for task in tasks} == {200}
            assert sent_whole(w) == {"d0": 2}
            assert len(tickets(w)) == 6
            await w.settled()
            assert no_arrivals(w)

    scenario()


@on_memory_loop
async def test_when_the_clients_of_the_first_leave_the_others_go_on() -> None:
    async with pipeline(decode=1) as w:
        gate = gated(w)
        tasks = await started(w, [LONG] * 6)
        for gone in (tasks[0], tasks[2]):  # the one awaited, and one that waits
            gone.cancel()
            await asyncio.wait([gone])
        await until(lambda: sum(len(node.bodies) for node in prefills(w)) == 2)
        gate.set()
        assert {(await task).status for number, task in enumerate(tasks) if number not in (0, 2)} == {200}
        have = [ticket["have_tokens"] for ticket in tickets(w)]
        assert (len(have), have.count(0)) == (5, 2)
        await w.settled()
        assert no_arrivals(w)


@on_memory_loop
async def test_each_of_two_decode_nodes_is_sent_a_prompt_once() -> None:
    async with pipeline(decode=2) as w:
        response = await w.complete(LONG, n=24)
        assert response.status == 200
        whole = sent_whole(w)
        assert set(whole.values()) == {1}
        assert len(tickets(w)) == 24
        assert set(whole) == {ticket["node_id"] for ticket in tickets(w)}
        await w.settled()


@on_memory_loop
async def test_nobody_waits_for_ever_for_what_does_not_land() -> None:
    decode, hashes = node_of("d0", role="decode"), [b"a", b"b", b"c"]
    with (
        booked(decode, lambda: 0.0, hashes[:1]) as short,
        booked(decode, lambda: 0.0, hashes[:2]) as first,
        booked(decode, lambda: 0.0, hashes) as second,
    ):
        for each in (short, first, second):
            each.lands(route_of())
        assert await until_landed(first, 0, 0.0) == (None, True)
        waiting = asyncio.create_task(until_landed(second, 0, 0.1))
        short.landed(has_landed=True)
        landed, is_late = await waiting  # `first` never lands
        assert (landed, is_late) == (None, True)
        assert await until_landed(short, 0, PATIENCE_S) == (None, False)
        waiting = asyncio.create_task(until_landed(second, 0, PATIENCE_S))
        await asyncio.sleep(0)
        first.landed(has_landed=True)
        landed, is_late = await waiting
        assert landed is not None
        assert (landed.blocks, is_late) == (2, False)


@on_memory_loop
async def test_a_decode_node_that_keeps_nothing_is_not_waited_for_again() -> None:
    async with pipeline(decode=1, local=0, remote=1) as w:
        w.nodes.decode[0].script.keeps_landings = False
        (node,) = prefills(w)
        node.script.prefill_gate = asyncio.Event()
        tasks = await started(w, [LONG] * 2)
        node.script.prefill_gate.set()
        assert {(await task).status for task in tasks} == {200}
        assert (await w.fallbacks())["landing_not_kept"] == 1
        node.script.prefill_gate = asyncio.Event()
        tasks = await started(w, [f"another {LONG}"] * 3)
        await until(lambda: len(w.nodes.decode[0].open_reservations) == 3)
        node.script.prefill_gate.set()
        assert {(await task).status for task in tasks} == {200}
        assert (await w.fallbacks())["landing_not_kept"] == 1
        await w.settled()
