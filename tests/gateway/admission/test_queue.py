"""A full system lets requests wait in line, tells those it has no place for when to come again, and forgets no request."""

import asyncio
from collections import Counter

import pytest

from gateway.admission.queue import ASK_AGAIN_S, HELD_BACK_S, QueueEntry, WaitingLine
from gateway.config.gateway import RoutingConfig
from gateway.errors import Overloaded
from gateway.http.response import Reply
from planner.decisions.admission.classes import ServiceClass
from planner.decisions.admission.waiting import TenantShare
from tests.gateway.memory.pipeline import on_memory_loop, pipeline
from tests.gateway.worlds import PATIENT, Deployment, until
from transport.control.proto import node_pb2 as pb

LONG = "the quick brown fox jumps over the lazy dog " * 40


def line_of(limit: int = 100, patience_s: float = 60.0) -> WaitingLine:
    return WaitingLine(asyncio.get_running_loop().time, limit=limit, patience_s=patience_s)


@on_memory_loop
async def test_the_first_is_served_first() -> None:
    line, room, served = line_of(), 0, []

    async def client(name: int) -> None:
        nonlocal room
        with line.place() as place:
            while True:
                await place.wait()
                if room:
                    break
            room -= 1
            served.append(name)
            place.served()

    clients = []
    for name in range(5):
        clients.append(asyncio.create_task(client(name)))
        await until(lambda: len(line) == len(clients))
    for _ in range(5):
        room += 1
        line.freed()
    await asyncio.gather(*clients)
    assert served == [0, 1, 2, 3, 4]
    assert len(line) == 0


@on_memory_loop
async def test_a_line_that_is_full_says_when_to_come_again() -> None:
    line = line_of(limit=2)
    line.drain.interval_s = 3.0
    with line.place() as first, line.place() as second, line.place() as third:
        waiting = [asyncio.create_task(place.wait()) for place in (first, second)]
        await until(lambda: len(line) == 2)
        with pytest.raises(Overloaded) as refused:
            await third.wait()
        assert (refused.value.status, refused.value.code, refused.value.retry_after_s) == (429, "no_room", 9.0)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
    assert len(line) == 0


@on_memory_loop
async def test_nobody_waits_longer_than_the_patience() -> None:
    async def in_vain(place: QueueEntry) -> None:
        while True:
            await place.wait()

    line = line_of(patience_s=0.6)
    line.drain.interval_s = 0.01
    with line.place() as place, pytest.raises(Overloaded):
        await in_vain(place)
    for at in range(3):  # seconds
        line.drain.on_turn(float(at))
    with line.place() as place, pytest.raises(Overloaded):
        await place.wait()  # it would be in vain, so it is said at once
    assert len(line) == 0


@on_memory_loop
async def test_who_leaves_lets_the_next_one_come() -> None:
    line = line_of()
    places: list[QueueEntry] = []

    async def client() -> None:
        with line.place() as place:
            places.append(place)
            while True:
                await place.wait()

    first = asyncio.create_task(client())
    await until(lambda: len(line) == 1)
    second = asyncio.create_task(client())
    await until(lambda: len(line) == 2)
    first.cancel()
    await until(lambda: len(line) == 1)
    assert [place.stands for place in places] == [False, True]
    second.cancel()
    await asyncio.gather(first, second, return_exceptions=True)
    assert len(line) == 0


@on_memory_loop
async def test_whose_room_is_lost_waits_for_another() -> None:
    line = line_of()
    with line.place() as place:
        await place.wait()
        place.served()
        assert not place.stands
        waiting = asyncio.create_task(place.wait())
        await until(lambda: waiting.done() or place.stands)
        line.freed()
        await waiting
        assert place.stands
    assert len(line) == 0


@on_memory_loop
async def test_a_higher_priority_is_served_first() -> None:
    line, room, served = line_of(), 0, []

    async def client(name: str, priority: int) -> None:
        nonlocal room
        with line.place(ServiceClass(priority=priority)) as place:
            while True:
                await place.wait()
                if room:
                    break
            room -= 1
            served.append(name)
            place.served()

    clients = []
    for name, priority in (("low", -1), ("first", 0), ("second", 0), ("high", 5)):
        clients.append(asyncio.create_task(client(name, priority)))
        await until(lambda: len(line) == len(clients))
    for _ in clients:
        room += 1
        line.freed()
    await asyncio.gather(*clients)
    assert served == ["high", "first", "second", "low"]


@on_memory_loop
async def test_a_full_line_sends_the_last_away_for_a_higher_priority() -> None:
    line = line_of(limit=2)
    with (
        line.place() as first,
        line.place() as last,
        line.place(ServiceClass(priority=1)) as high,
        line.place(ServiceClass(priority=-1)) as low,
    ):
        waiting = [asyncio.create_task(first.wait())]
        await until(lambda: len(line) == 1)
        waiting.append(asyncio.create_task(last.wait()))
        await until(lambda: len(line) == 2)
        with pytest.raises(Overloaded, match="No decode node has room"):
            await low.wait()
        waiting.append(asyncio.create_task(high.wait()))
        await until(lambda: high.stands)
        with pytest.raises(Overloaded) as refused:
            await waiting[1]
        assert (refused.value.status, refused.value.code) == (429, "displaced")
        assert [place.stands for place in (first, last, high)] == [True, False, True]
        with pytest.raises(Overloaded, match="higher priority"):
            await last.wait()  # it comes no second time
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


@on_memory_loop
async def test_whose_deadline_has_passed_is_told_at_once() -> None:
    async def in_vain(place: QueueEntry) -> None:
        while True:
            await place.wait()

    line = line_of()
    soon = ServiceClass(deadline_s=0.2)
    with line.place(soon, arrived=asyncio.get_running_loop().time()) as place, pytest.raises(Overloaded) as refused:
        await in_vain(place)
    assert refused.value.code == "deadline"
    for at in range(3):  # seconds
        line.drain.on_turn(float(at))
    with line.place(soon, arrived=asyncio.get_running_loop().time()) as place, pytest.raises(Overloaded) as refused:
        await place.wait()  # a turn takes a second
    assert refused.value.code == "deadline"
    assert len(line) == 0


async def targets(w: Deployment) -> list[str]:
    return [record["target"] for record in await w.records()]


@on_memory_loop
async def test_forty_prompts_for_a_small_arena_wait_and_none_is_moved_to_the_decode_node() -> None:
    async with pipeline(local=2, decode=1, routing=RoutingConfig(decode_prefill_share=0.0)) as w:
        (decode,) = w.nodes.decode
        decode.script.room = 4
        for node in (*w.nodes.remote, *w.nodes.local):
            node.script.prefill_s = 0.02
        answers = await asyncio.gather(*(w.complete(f"{i} {LONG}") for i in range(40)))
        assert [answer.status for answer in answers] == [200] * 40
        assert set(await targets(w)) == {"remote"}
        await w.settled()
        assert "prfaas_requests_waiting 0.0" in await w.metrics()


@on_memory_loop
async def test_who_waits_does_not_ask_a_full_node_as_fast_as_it_answers() -> None:
    async with pipeline(decode=1, routing=RoutingConfig(decode_prefill_share=0.0)) as w:
        (decode,) = w.nodes.decode
        decode.script.room, reserve, asked = 1, decode.reserve, 0

        async def counted(request: pb.ReserveRequest) -> pb.Ticket:
            nonlocal asked
            asked += 1
            return await reserve(request)

        decode.reserve = counted  # type: ignore[method-assign]
        w.nodes.remote[0].script.prefill_gate = gate = asyncio.Event()
        first = asyncio.create_task(w.complete(LONG))
        await until(lambda: decode.open_reservations)
        second = asyncio.create_task(w.complete(f"another {LONG}"))
        await until(lambda: len(w.line) == 1)
        await asyncio.sleep(2 * ASK_AGAIN_S)
        assert asked <= 5
        gate.set()
        assert [(await each).status for each in (first, second)] == [200] * 2
        await w.settled()


@on_memory_loop
async def test_room_is_free_once_an_engine_has_said_all_though_its_client_does_not_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reads, offer = asyncio.Event(), Reply.offer

    async def taken(reply: Reply) -> None:
        await reads.wait()

    monkeypatch.setattr("gateway.admission.queue.ASK_AGAIN_S", 1000.0)  # only what has become free wakes the line
    monkeypatch.setattr(Reply, "taken", taken)
    monkeypatch.setattr(Reply, "offer", lambda reply, data: offer(reply, data) or True)
    async with pipeline(decode=1, routing=RoutingConfig(decode_prefill_share=0.0)) as w:
        (decode,) = w.nodes.decode
        decode.script.room = 1
        w.nodes.remote[0].script.prefill_gate = gate = asyncio.Event()
        first = asyncio.create_task(w.complete(LONG, stream=True))
        await until(lambda: decode.open_reservations)
        second = asyncio.create_task(w.complete(f"another {LONG}", stream=True))
        await until(lambda: len(w.line) == 1)
        gate.set()
        await until(lambda: len(decode.bodies) == 2)
        assert not first.done()
        reads.set()
        assert [(await each).status for each in (first, second)] == [200] * 2
        await w.settled()


@on_memory_loop
async def test_decode_nodes_compute_what_finds_no_room_up_to_their_share() -> None:
    slow = RoutingConfig(prefill_tokens_per_s=300.0)  # a prompt is more than a second: three of them are over the share
    async with pipeline(decode=1, routing=slow) as w:
        w.nodes.decode[0].script.room = 1
        for node in (*w.nodes.remote, *w.nodes.local):
            node.script.prefill_s = 0.2
        answers = await asyncio.gather(*(w.complete(f"{i} {LONG}") for i in range(10)))
        assert [answer.status for answer in answers] == [200] * 10
        assert 1 <= (await targets(w)).count("decode") <= 3


@on_memory_loop
async def test_what_cannot_be_served_in_time_is_told_so_and_leaves_nothing() -> None:
    async with pipeline(decode=1, routing=RoutingConfig(decode_prefill_share=0.0), max_waiting=2) as w:
        (decode,) = w.nodes.decode
        decode.script.room = 1
        w.nodes.remote[0].script.prefill_gate = gate = asyncio.Event()
        served = asyncio.create_task(w.complete(LONG))
        await until(lambda: decode.open_reservations)
        waiting = [asyncio.create_task(w.complete(f"{i} {LONG}")) for i in range(2)]
        await until(lambda: len(w.line) == 2)
        refused = await w.complete(f"one more {LONG}")
        assert (refused.status, (await refused.json())["error"]["code"]) == (429, "no_room")
        assert int(refused.headers["Retry-After"]) >= 1
        gate.set()
        assert [(await each).status for each in (served, *waiting)] == [200] * 3
        await w.settled()


@on_memory_loop
async def test_full_prefill_nodes_are_asked_again_rather_than_the_decode_node() -> None:
    async with pipeline(remote=0, local=1, decode=1, routing=RoutingConfig(decode_prefill_share=0.0)) as w:
        w.nodes.local[0].script.prefill = ["503 no_capacity"]
        answer = await w.complete(LONG)
        assert answer.status == 200
        (record,) = await w.records()
        assert (record["target"], record["fallbacks"]) == ("local", ["prefill_no_capacity"])
    assert PATIENT.room_s >= 1.0


@on_memory_loop
async def test_who_is_refused_for_its_tenants_part_lets_others_ask_first() -> None:
    line, asked = line_of(), []

    async def in_vain(tenant: str) -> None:
        with line.place(share=TenantShare(tenant)) as place:
            while True:
                await place.wait()
                asked.append(tenant)
                place.held_back()

    async def client(tenant: str) -> None:
        with line.place(share=TenantShare(tenant)) as place:
            await place.wait()
            asked.append(tenant)
            place.served()

    heavy = [asyncio.create_task(in_vain("heavy")) for _ in range(3)]
    await until(lambda: len(line) == 3 and "heavy" in asked)
    assert not line.must_wait(ServiceClass(), TenantShare("light"))
    assert line.must_wait(ServiceClass(), TenantShare("heavy"))
    asked.clear()
    async with asyncio.timeout(HELD_BACK_S / 2):
        await client("light")
    assert asked == ["light"] or asked == ["heavy", "light"]
    for task in heavy:
        task.cancel()
    await asyncio.gather(*heavy, return_exceptions=True)


@on_memory_loop
async def test_many_tenants_whose_parts_are_full_keep_none_waiting_that_finds_room() -> None:
    line, asked = line_of(limit=100), Counter[str]()

    async def in_vain(tenant: str) -> None:
        with line.place(share=TenantShare(tenant)) as place:
            while True:
                await place.wait()
                asked[tenant] += 1
                await asyncio.sleep(0.002)
                place.held_back()

    heavy = [asyncio.create_task(in_vain(f"heavy {number}")) for number in range(40)]
    await until(lambda: len(line) == 40 and bool(asked))
    with line.place(share=TenantShare("light")) as place:
        async with asyncio.timeout(30.0):
            await place.wait()
        place.served()
    assert asked.total() <= 120, "each of them once, and few once more"
    for task in heavy:
        task.cancel()
    await asyncio.gather(*heavy, return_exceptions=True)


@on_memory_loop
async def test_a_tenant_alone_that_is_held_back_asks_again_and_again() -> None:
    line, asked = line_of(), []

    async def in_vain() -> None:
        with line.place(share=TenantShare("heavy")) as place:
            while True:
                await place.wait()
                asked.append(asyncio.get_running_loop().time())
                place.held_back()

    waiting = [asyncio.create_task(in_vain()) for _ in range(2)]
    await until(lambda: len(asked) >= 4)
    assert asked[3] - asked[0] >= 2.5 * ASK_AGAIN_S  # and not as fast as it can
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


@on_memory_loop
async def test_while_another_waits_in_vain_too_who_was_held_back_asks_now_and_then() -> None:
    line, asked = line_of(), []

    async def in_vain(tenant: str, held_back: bool) -> None:
        with line.place(share=TenantShare(tenant)) as place:
            while True:
                await place.wait()
                asked.append(tenant)
                if held_back:
                    place.held_back()

    waiting = [asyncio.create_task(in_vain("heavy", True))]
    await until(lambda: len(line) == 1)
    waiting.append(asyncio.create_task(in_vain("light", False)))
    await until(lambda: len(line) == 2)
    asked.clear()
    await until(lambda: asked.count("heavy") >= 3)
    assert asked.count("light") >= 2
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
