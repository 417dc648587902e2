"""Tenants are read by bytes in turn; what waits is bounded."""

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from gateway.errors import Overloaded
from gateway.prompt.reader_queue import MAX_REMEMBERED, ReadingQueue, ReadingRoom
from planner.decisions.admission.waiting import TenantShare
from tests.gateway.worlds import on_loop, until

KIB = 1024


async def served(queue: ReadingQueue, bodies: list[tuple[TenantShare, int]]) -> list[tuple[str, int]]:
    """In which order bodies that all wait for the one place get it."""
    order: list[tuple[str, int]] = []

    async def read(share: TenantShare, size: int) -> None:
        await queue.take(share, size)
        order.append((share.flow, size))
        queue.give_back()

    tasks = [asyncio.ensure_future(read(*body)) for body in bodies]
    await asyncio.sleep(0)
    assert len(queue) == len(bodies)
    queue.give_back()
    await asyncio.gather(*tasks)
    return order


@on_loop
async def test_a_short_body_waits_for_one_long_one_of_others_at_most() -> None:
    heavy = [(TenantShare("heavy"), 500 * KIB)] * 256
    order = await served(ReadingQueue(0), [*heavy, (TenantShare("light"), 8 * KIB)])
    assert order.index(("light", 8 * KIB)) <= 1


@on_loop
async def test_a_short_body_waits_for_one_long_one_of_its_own_tenant_at_most() -> None:
    order = await served(ReadingQueue(0), [*[(TenantShare(), 500 * KIB)] * 256, (TenantShare(), 8 * KIB)])
    assert order.index(("", 8 * KIB)) <= 1


@on_loop
async def test_a_short_body_waits_for_no_long_one_where_its_class_has_a_place() -> None:
    queue = ReadingQueue(2, own=1)
    long = [asyncio.ensure_future(queue.take(TenantShare("heavy"), 500 * KIB)) for _ in range(256)]
    await asyncio.sleep(0)
    assert sum(each.done() for each in long) == 2
    for size in (8 * KIB, 100 * KIB):
        async with asyncio.timeout(10.0):
            queue.give_back(await queue.take(TenantShare("light"), size))
    await cancelled(long)


async def cancelled(tasks: Sequence[asyncio.Future[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@on_loop
async def test_in_places_of_a_class_tenants_take_turns_by_bytes_and_weight() -> None:
    queue, had = ReadingQueue(0, own=1), Counter[str]()
    held = await queue.take(TenantShare("first"), KIB)

    async def read(share: TenantShare, size: int) -> None:
        place = await queue.take(share, size)
        had[share.flow] += size
        if had.total() < 1000 * KIB:
            queue.give_back(place)

    weights = {"one": 1.0, "three": 3.0}
    tasks = [
        asyncio.ensure_future(read(TenantShare(name, weight), size * KIB))
        for name, weight, size in (("one", 1.0, 16), ("three", 3.0, 4))
        for _ in range(1000)
    ]
    await asyncio.sleep(0)
    queue.give_back(held)
    await until(lambda: had.total() >= 1000 * KIB)
    for name, weight in weights.items():
        assert had[name] == pytest.approx(1000 * KIB * weight / 4, abs=32 * KIB)
    await cancelled(tasks)


@on_loop
async def test_what_was_read_in_places_of_a_class_is_charged_nowhere_else() -> None:
    queue = ReadingQueue(1, own=1)
    for _ in range(100):
        queue.give_back(await queue.take(TenantShare("a"), 8 * KIB))
    await queue.take(TenantShare("a"), 500 * KIB)
    order = [name for name, _ in await served(queue, [(TenantShare(name), 500 * KIB) for name in "baba"])]
    assert sorted(order[:2]) == ["a", "b"]


@on_loop
async def test_bytes_are_shared_by_weight_whatever_the_sizes() -> None:
    rng = random.Random(4)
    weights = {"one": 1.0, "two": 2.0, "five": 5.0}
    sizes = {"one": 300 * KIB, "two": 20 * KIB, "five": 5 * KIB}
    bodies = [(TenantShare(name, weight), sizes[name]) for name, weight in weights.items() for _ in range(2000)]
    rng.shuffle(bodies)
    order = await served(ReadingQueue(0), bodies)
    had: Counter[str] = Counter()
    for name, size in order:
        had[name] += size
        if had["five"] > 8000 * KIB:
            break
    for name, weight in weights.items():
        assert had[name] == pytest.approx(8000 * KIB * weight / 5, abs=2 * sizes[name])


@on_loop
async def test_who_had_much_while_nobody_waited_is_not_punished_for_long() -> None:
    queue = ReadingQueue(1)
    for _ in range(100):
        await queue.take(TenantShare("a"), 500 * KIB)
        queue.give_back()
    await queue.take(TenantShare("a"), 500 * KIB)
    order = asyncio.ensure_future(served_late(queue))
    assert (await order)[:4].count("a") >= 1


async def served_late(queue: ReadingQueue) -> list[str]:
    order: list[str] = []

    async def read(name: str) -> None:
        await queue.take(TenantShare(name), 500 * KIB)
        order.append(name)
        queue.give_back()

    tasks = [asyncio.ensure_future(read(name)) for name in "bbbbaaaa"]
    await asyncio.sleep(0)
    queue.give_back()
    await asyncio.gather(*tasks)
    return order


@on_loop
async def test_a_light_tenant_waits_no_longer_than_its_share_beside_tenants_that_keep_step() -> None:
    """Their bodies are ten times as long as its own, which come half as often as it may be read."""
    queue, order, heavies = ReadingQueue(0), [], 200

    async def read(name: str, size: int, came: int) -> None:
        await queue.take(TenantShare(name), size)
        order.append((name, came))

    tasks = [asyncio.ensure_future(read(f"t{number % heavies}", 500 * KIB, 0)) for number in range(2 * heavies)]
    its_turn = heavies // 10
    waits = []
    for now in range(-2 * heavies, 40 * 2 * its_turn):  # at first until they are past their first body
        if now >= 0 and now % (2 * its_turn) == 0:
            tasks.append(asyncio.ensure_future(read("light", 50 * KIB, now)))
        await asyncio.sleep(0)
        queue.give_back()
        await asyncio.sleep(0)
        name, came = order[-1]
        if name == "light":
            waits.append(now - came)
        else:
            tasks.append(asyncio.ensure_future(read(name, 500 * KIB, now)))
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert sorted(waits)[len(waits) * 9 // 10] <= its_turn + 1


@pytest.mark.parametrize("own", [0, 1])
@on_loop
async def test_tenants_who_come_once_are_not_remembered_for_ever(own: int) -> None:
    queue = ReadingQueue(1, own)
    for number in range(3 * MAX_REMEMBERED):
        queue.give_back(await queue.take(TenantShare(f"t{number}"), 8 * KIB))
    assert queue.num_remembered <= (1 + 2 * own) * MAX_REMEMBERED


@pytest.mark.parametrize("size", [8 * KIB, 500 * KIB])
@on_loop
async def test_clients_that_have_left_are_passed(size: int) -> None:
    queue = ReadingQueue(1, own=1)
    taken = [await queue.take(TenantShare(), each) for each in (500 * KIB, 8 * KIB)]
    waiting = [asyncio.ensure_future(queue.take(TenantShare(f"t{n % 50}"), size)) for n in range(2000)]
    await asyncio.sleep(0)
    await cancelled(waiting[:-1])
    for place in taken:
        queue.give_back(place)
    async with asyncio.timeout(10.0):
        queue.give_back(await waiting[-1])
    assert (len(queue), queue.has_free) == (0, True)


@on_loop
async def test_within_a_tenant_and_a_size_who_came_first_is_first() -> None:
    order = await served(ReadingQueue(0), [(TenantShare("a"), 2 * KIB + n) for n in range(50)])
    assert order == sorted(order)


@pytest.mark.parametrize("own", [0, 1])
@on_loop
async def test_places_survive_any_order_of_coming_leaving_and_being_cancelled(own: int) -> None:
    rng = random.Random(11)
    queue, inside, most = ReadingQueue(3, own), 0, 0

    async def read(share: TenantShare, size: int) -> None:
        nonlocal inside, most
        place = await queue.take(share, size)
        inside += 1
        most = max(most, inside)
        try:
            for _ in range(rng.randrange(3)):
                await asyncio.sleep(0)
        finally:
            inside -= 1
            queue.give_back(place)

    tasks: list[asyncio.Task[None]] = []
    for _ in range(3000):
        share = TenantShare(rng.choice("abcd"), rng.choice([0.5, 1.0, 3.0]))
        tasks.append(asyncio.create_task(read(share, rng.choice([1, 20_000, 500_000]))))
        if rng.random() < 0.3:
            rng.choice(tasks[-20:]).cancel()
        if rng.random() < 0.5:
            await asyncio.sleep(0)
    await asyncio.gather(*tasks, return_exceptions=True)
    assert (inside, most, len(queue)) == (0, 3 + 2 * own, 0)
    for size in [1, 20_000][: own * 2] + [500_000] * 3:
        async with asyncio.timeout(10.0):
            await queue.take(TenantShare(), size)
    assert not queue.has_free


def test_bytes_of_a_tenant_and_of_all_are_bounded() -> None:
    room = ReadingRoom(1000)
    with room.held("a", 900), room.held("b", 90):  # one alone may be of any size
        for flow, size in (("a", 1), ("c", 20), ("", 20)):
            with pytest.raises(Overloaded) as refusal, room.held(flow, size):
                pass
            assert refusal.value.code == "reading_overload"
        with room.held("c", 10):
            assert room.held_bytes == 1000
    assert room.held_bytes == 0
    with room.held("", 600), room.held("", 400):  # without tenants it is everybody's
        pass
    with room.held("a", 300), pytest.raises(Overloaded), room.held("a", 300):
        pass
