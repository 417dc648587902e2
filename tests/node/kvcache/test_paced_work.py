"""Work in steps, one in each turn of the loop."""

import asyncio
import contextlib
import random
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hybrid_cache.cache.reservation import Purpose
from hybrid_cache.hashing.block_hash import block_hashes, split_hashes
from node.control.broadcast import Broadcast
from node.errors import NodeRefusal
from node.kvcache.paced_work import PacedWork
from node.kvcache.pages import PACED_BLOCKS, ArenaPages
from tests.node.kvcache.test_pages import arena_pages
from tests.pd_cluster.handover import LAYOUT, run
from transport.control.proto import node_pb2 as pb


def test_one_step_a_turn_in_the_order_of_pieces() -> None:
    async def scenario() -> None:
        work, done = PacedWork(), list[str]()

        def steps(name: str, count: int) -> Iterator[None]:
            for number in range(count):
                done.append(f"{name}{number}")
                yield

        work.add("a", steps("a", 2))
        work.add("b", steps("b", 1))
        assert "a" in work
        assert "b" in work
        for turn in range(5):
            assert len(done) <= turn
            await asyncio.sleep(0)
        await work.settled()
        assert done == ["a0", "a1", "b0"]
        assert "a" not in work
        assert "b" not in work

    run(scenario())


def test_an_error_ends_its_piece_and_no_other() -> None:
    async def scenario() -> None:
        work, done, errors = PacedWork(), list[str](), list[dict[str, Any]]()
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: errors.append(context))

        def failing() -> Iterator[None]:
            yield
            raise ValueError("no more")

        def going() -> Iterator[None]:
            yield
            done.append("b")

        work.add("a", failing())
        work.add("b", going())
        await work.settled()
        assert done == ["b"]
        assert [str(each["exception"]) for each in errors] == ["no more"]
        assert "a" not in work

    run(scenario())


def test_settled_does_not_wait_for_what_comes_later() -> None:
    async def scenario() -> None:
        work = PacedWork()
        ends = asyncio.Event()

        def steps() -> Iterator[None]:
            yield from ()

        def until_told() -> Iterator[None]:
            while not ends.is_set():
                yield

        work.add("a", steps())
        waiting = asyncio.create_task(work.settled())
        await asyncio.sleep(0)
        work.add("b", until_told())
        async with asyncio.timeout(10.0):
            await waiting
        assert "b" in work
        ends.set()
        await work.settled()

    run(scenario())


OPS = ("reserve", "reserve", "commit", "commit", "release", "turns", "evict", "clear")


class _Heard:
    """What one who hears all events of a cache believes to be there, by group."""

    def __init__(self) -> None:
        self.held: dict[int, set[bytes]] = defaultdict(set)

    def offer(self, event: pb.NodeEvent) -> None:
        match event.WhichOneof("event"):
            case "stored":
                self.held[event.stored.group].update(split_hashes(event.stored.hashes))
            case "removed":
                self.held[event.removed.group].difference_update(split_hashes(event.removed.hashes))
            case "cleared":
                self.held.clear()

    def is_right(self, pages: ArenaPages) -> bool:
        pages.publish()
        return all(self.held[group] == {*pages.cache.held(group)} for group in range(len(LAYOUT.groups)))


@pytest.mark.parametrize("seed", range(3))
def test_whatever_comes_between_two_steps_what_is_told_is_there(tmp_path: Path, seed: int) -> None:
    """Other commits of the same blocks, releases, evictions, and a cache that is cleared."""
    drawn, size = random.Random(seed), LAYOUT.block_size

    async def scenario() -> None:
        events, heard, errors = Broadcast(), _Heard(), list[dict[str, Any]]()
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: errors.append(context))
        events.tell(heard)
        pages = arena_pages(tmp_path, events, 4 * PACED_BLOCKS)
        prompts = [block_hashes(range(at, at + 3 * PACED_BLOCKS * size), size, b"") for at in (0, 10**7)]
        running: dict[str, int] = {}
        for number in range(200):
            name = drawn.choice([*running, ""])
            match drawn.choice(OPS):
                case "reserve":
                    blocks, purpose = drawn.randint(1, 2 * PACED_BLOCKS), drawn.choice([*Purpose][:2])
                    with contextlib.suppress(NodeRefusal):
                        pages.reserve(f"r{number}", drawn.choice(prompts)[:blocks], blocks * size, purpose)
                        running[f"r{number}"] = blocks
                case "commit" if name:
                    pages.commit(name, drawn.randint(1, running[name]) * size)
                case "release" if name:
                    del running[name]
                    pages.release(name)
                case "turns":
                    for _ in range(drawn.randint(1, 8)):
                        await asyncio.sleep(0)
                case "evict":
                    pages.cache.shrink(drawn.randint(1, 4 * PACED_BLOCKS), 0.0)
                case "clear":
                    pages.cache.shrink(pages.cache.evictable_pages, 0.0)
            assert heard.is_right(pages)
        for name in running:
            pages.release(name)
        await pages.work.settled()
        pages.cache.check_integrity()
        assert heard.is_right(pages)
        assert not pages.report().reservations
        pages.cache.shrink(pages.cache.evictable_pages, 0.0)
        assert pages.cache.free_pages == pages.num_pages
        assert not errors

    run(scenario())
