import asyncio
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.cluster.agent_client import RENEWED, AgentClient, NearClusters
from gateway.cluster.agent_values import NodeEvent, NodeInfo, NodeLoad, events_from
from gateway.errors import AgentCallFailed
from hybrid_cache.cache.events import BlocksStored, CacheCleared, Medium
from hybrid_cache.index.digest import NAME_BYTES, WHOLE_NAMES, DigestCleared, DigestPart
from node.control.broadcast import Broadcast, Watcher
from node.control.summaries import MOST_CHANGES, PART_NAMES, TELL_S, Summaries, messages
from tests.hybrid_cache.builders import hashes_of
from tests.node.running import BLOCK, alone, config, running_node
from transport.control.proto import node_pb2 as pb

CHAIN = hashes_of(list(range(4 * 64)))
PATIENCE_S = 60.0


def named(blocks: list[bytes]) -> tuple[bytes, ...]:
    return tuple(each[:NAME_BYTES] for each in blocks)


def stored(blocks: list[bytes], group: int = 1) -> pb.NodeEvent:
    return pb.NodeEvent(stored=pb.BlocksStored(group=group, hashes=b"".join(blocks), medium=pb.MEDIUM_MEMORY))


def removed(blocks: list[bytes], group: int = 1) -> pb.NodeEvent:
    return pb.NodeEvent(removed=pb.BlocksRemoved(group=group, hashes=b"".join(blocks), medium=pb.MEDIUM_MEMORY))


class Node:
    """A node's events, what it has cached, and its clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events = Broadcast()
        self.cached: list[BlocksStored] = []
        self.summaries = Summaries(self.events, lambda: self.cached, lambda: (0,), lambda: self.now)


async def heard(watcher: Watcher) -> list[NodeEvent]:
    """All that is queued."""
    found: list[NodeEvent] = []
    while (event := await watcher.next(0.0)) is not None:
        found += events_from(event)
    return found


def values(events: list[pb.NodeEvent]) -> list[NodeEvent]:
    return [value for event in events for value in events_from(event)]


def test_watchers_hear_what_has_changed_in_a_second() -> None:
    async def scenario() -> None:
        node = Node()
        node.cached.append(BlocksStored(1, tuple(CHAIN[:2]), Medium.MEMORY))
        with node.summaries.watch() as watcher:
            assert values(node.summaries.whole()) == [DigestCleared(), DigestPart(1, Medium.MEMORY, named(CHAIN[:2]))]
            node.summaries.tell()
            node.events.publish(stored(CHAIN[2:5]))
            node.events.publish(removed(CHAIN[3:5]))
            node.summaries.tell()
            assert await heard(watcher) == []  # not yet
            node.now += TELL_S
            node.summaries.tell()
            assert await heard(watcher) == [DigestPart(1, Medium.MEMORY, named(CHAIN[2:3]))]
            node.events.publish(pb.NodeEvent(load=pb.Load(running=3)))
            node.events.publish(pb.NodeEvent(description=pb.NodeDescription(node_id="n")))
            assert [type(value) for value in await heard(watcher)] == [NodeInfo, NodeLoad]
            node.events.publish(pb.NodeEvent(cleared=pb.CacheCleared()))
            node.now += TELL_S
            node.summaries.tell()
            assert await heard(watcher) == [DigestCleared()]
        assert node.events.watching == 0

    asyncio.run(scenario())


def test_one_who_comes_late_is_told_all() -> None:
    async def scenario() -> None:
        node = Node()
        with node.summaries.watch():
            node.events.publish(stored(CHAIN[:2]))
            with node.summaries.watch() as late:
                assert values(node.summaries.whole())[1] == DigestPart(1, Medium.MEMORY, named(CHAIN[:2]))
                node.now += TELL_S
                node.summaries.tell()
                assert await heard(late) == []
            assert node.events.watching == 1
        # Nothing is kept without watchers; what there is then counts.
        node.events.publish(stored(CHAIN[2:4]))
        with node.summaries.watch():
            assert values(node.summaries.whole()) == [DigestCleared()]

    asyncio.run(scenario())


def test_one_who_comes_between_two_words_knows_what_the_others_know() -> None:
    """What came since the last word is in the whole; what goes before the next one is told, too."""

    async def scenario() -> None:
        node = Node()
        node.cached.append(BlocksStored(1, tuple(CHAIN[:1]), Medium.MEMORY))
        with node.summaries.watch() as early:
            await node.summaries.read()
            node.events.publish(removed(CHAIN[:1]))
            node.events.publish(stored(CHAIN[1:2]))
            with node.summaries.watch() as late:
                whole = values(node.summaries.whole())
                assert whole == [DigestCleared(), DigestPart(1, Medium.MEMORY, named(CHAIN[1:2]))]
                node.events.publish(stored(CHAIN[:1]))
                node.events.publish(removed(CHAIN[1:2]))
                node.now += TELL_S
                node.summaries.tell()
                change = DigestPart(1, Medium.MEMORY, named(CHAIN[:1]), named(CHAIN[1:2]))
                assert await heard(late) == [change]
                before = DigestPart(1, Medium.MEMORY, named(CHAIN[1:2]), named(CHAIN[:1]))
                assert await heard(early) == [before, change]

    asyncio.run(scenario())


def test_changes_that_wait_to_be_told_have_a_bound() -> None:
    """A gateway that reads no more holds its stream up; the changes for it have a bound, as its queue has."""

    async def scenario() -> None:
        node = Node()
        with node.summaries.watch() as watcher:
            await node.summaries.read()
            many = [number.to_bytes(32) for number in range(MOST_CHANGES << 224, MOST_CHANGES * 2 << 224, 1 << 224)]
            node.events.publish(stored(many))
            told = await heard(watcher)
            assert sum(len(each.added) for each in told if isinstance(each, DigestPart)) == MOST_CHANGES

    asyncio.run(scenario())


def test_long_digests_come_in_parts() -> None:
    names = tuple(number.to_bytes(4) for number in range(PART_NAMES + 1))
    parts = messages([DigestPart(0, Medium.MEMORY, names, names[:1])])
    assert [len(each.digest.parts[0].added) for each in parts] == [PART_NAMES * NAME_BYTES, NAME_BYTES]
    assert [len(each.digest.parts[0].removed) for each in parts] == [NAME_BYTES, 0]


def test_a_gateway_for_which_a_node_becomes_far_hears_digests_from_then_on(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(config(tmp_path)) as node:
            await node.prefill([100 + (at * 7) % 150 for at in range(16 * BLOCK + 1)])
            client = AgentClient(node.address, PATIENCE_S, near=NearClusters(("west",)))
            with pytest.raises(AgentCallFailed) as renewed:
                await heard_with(client, [("west", "more"), ("east",)])
            assert (renewed.value.reason, client.near.names) == (RENEWED, ("east",))  # it stayed near before
            assert any(isinstance(each, DigestPart) for each in await first_events(client, 2))
            await client.close()

    alone(scenario())


async def heard_with(client: AgentClient, nears: Sequence[tuple[str, ...]]) -> None:
    """Watches, and says with each load report that other clusters are near."""
    coming = iter(nears)
    async with asyncio.timeout(PATIENCE_S), aclosing(client.watch(0.05, PATIENCE_S)) as events:
        async for event in events:
            if isinstance(event, NodeLoad):
                client.near.names = next(coming, client.near.names)


async def first_events(client: AgentClient, enough: int) -> list[NodeEvent]:
    """What a watcher hears until so many load reports have come."""
    found: list[NodeEvent] = []
    async with asyncio.timeout(PATIENCE_S), aclosing(client.watch(0.05, PATIENCE_S)) as events:
        async for event in events:
            found.append(event)
            if sum(isinstance(each, NodeLoad) for each in found) > enough:
                return found
    raise AssertionError("the stream ended")


def test_a_node_sends_digests_to_gateways_far_away_alone(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(config(tmp_path)) as node:
            prompt = [100 + (at * 7) % 150 for at in range(16 * BLOCK + 1)]
            await node.prefill(prompt)
            clients = {
                "near": AgentClient(node.address, PATIENCE_S, near=NearClusters(("west", "other"))),
                "far": AgentClient(node.address, PATIENCE_S, near=NearClusters(("east",))),
                "all": AgentClient(node.address, PATIENCE_S),
            }
            kinds = {name: await first_events(client, 2) for name, client in clients.items()}
            for client in clients.values():
                await client.close()
            for name in ("near", "all"):
                assert any(isinstance(each, BlocksStored) for each in kinds[name])
                assert not any(isinstance(each, DigestPart | DigestCleared) for each in kinds[name])
            far = kinds["far"]
            assert isinstance(far[0], NodeInfo)
            assert not any(isinstance(each, BlocksStored | CacheCleared) for each in far)
            # Every state has a name; of the blocks of attention one in eight.
            assert node.agent.pages is not None
            full = node.agent.pages.layout.full_groups
            parts = [each for each in far if isinstance(each, DigestPart) and each.group not in full]
            blocks = [each for each in kinds["near"] if isinstance(each, BlocksStored) and each.group not in full]
            told = {name for part in parts for name in part.added}
            by_names = {each[:NAME_BYTES] for event in blocks for each in event.hashes}
            assert told == by_names != set()

    alone(scenario())


def test_what_is_cached_is_read_part_by_part_between_turns_of_the_loop() -> None:
    """And what changes meanwhile counts, whether its part was read before or not."""

    async def scenario() -> None:
        node, read, turns = Node(), list[int](), list[int]()
        blocks = [[(part << 8 | number).to_bytes(32, "big")[::-1] for number in range(4)] for part in range(40)]
        gone: set[bytes] = set()

        def snapshot() -> Iterator[BlocksStored]:
            for part, hashes in enumerate(blocks):
                read.append(part)
                yield BlocksStored(1, tuple(each for each in hashes if each not in gone))

        def remove(some: list[bytes]) -> None:
            gone.update(some)
            node.events.publish(removed(some))

        async def beat() -> None:
            while len(read) < len(blocks):
                turns.append(len(read))
                await asyncio.sleep(0)

        summaries = Summaries(node.events, snapshot, lambda: (0,), lambda: node.now)
        beating = asyncio.create_task(beat())

        async def watch_and_leave() -> None:
            with summaries.watch():
                await summaries.read()

        first = asyncio.create_task(watch_and_leave())
        for _ in range(10):
            await asyncio.sleep(0)
        assert 5 < len(read) < 20
        with summaries.watch() as watcher:
            remove([blocks[2][0], blocks[30][0]])
            node.events.publish(stored(CHAIN[:1]))
            node.now += TELL_S
            summaries.tell()
            first.cancel()
            await summaries.read()
            await beating
            told = {
                name for each in values([*summaries.whole()]) if isinstance(each, DigestPart) for name in each.added
            }
            left = {each for part in blocks for each in part} - gone
            assert told == {*named([*left, *CHAIN[:1]])}
            assert await heard(watcher) == []
        assert read == list(range(len(blocks)))
        assert max(after - before for before, after in pairwise(turns)) <= 2
        assert node.events.watching == 0

    asyncio.run(scenario())


def test_a_long_digest_is_made_message_by_message() -> None:
    node = Node()
    many = tuple(number.to_bytes(4) + bytes(28) for number in range(2 * WHOLE_NAMES + 1))
    node.cached.append(BlocksStored(1, many, Medium.MEMORY))
    with node.summaries.watch():
        messages = node.summaries.whole()
        assert values([next(messages)]) == [DigestCleared()]
        assert len(next(messages).digest.parts[0].added) == WHOLE_NAMES * NAME_BYTES
        node.events.publish(removed(list(many[-2:])))  # of the last two parts
        assert [len(each.digest.parts[0].added) // NAME_BYTES for each in messages] == [WHOLE_NAMES - 1]


BITS = [part + bytes(28) for part in (b"aaaa", b"bbbb", b"cccc")]
CHANGES = st.tuples(
    st.sampled_from(["stored", "removed", "cleared", "tell", "read"]),
    st.sampled_from(BITS),
    st.sampled_from([pb.MEDIUM_MEMORY, pb.MEDIUM_SSD, pb.MEDIUM_ENGINE]),
)


READ = ("read", BITS[0], pb.MEDIUM_MEMORY)


@given(st.lists(CHANGES, max_size=8), st.lists(CHANGES, max_size=24))
@example(  # it is read back from the SSD after its memory was told, and before the SSD is
    [("stored", BITS[0], pb.MEDIUM_MEMORY), ("stored", BITS[1], pb.MEDIUM_SSD)],
    [READ, READ, ("stored", BITS[1], pb.MEDIUM_MEMORY)],
)
@example(  # the same, and the SSD forgets it
    [("stored", BITS[0], pb.MEDIUM_MEMORY), ("stored", BITS[1], pb.MEDIUM_SSD)],
    [READ, READ, ("stored", BITS[1], pb.MEDIUM_MEMORY), ("removed", BITS[1], pb.MEDIUM_SSD)],
)
@example(  # its part leaves it out, and it comes again before the next word
    [("stored", BITS[0], pb.MEDIUM_MEMORY), ("stored", BITS[1], pb.MEDIUM_MEMORY)],
    [READ, READ, ("removed", BITS[1], pb.MEDIUM_MEMORY), READ, ("stored", BITS[1], pb.MEDIUM_MEMORY)],
)
@example(  # it is not there when the names are looked up, and comes again before the next word
    [("stored", BITS[0], pb.MEDIUM_MEMORY), ("stored", BITS[1], pb.MEDIUM_MEMORY)],
    [("removed", BITS[1], pb.MEDIUM_MEMORY), READ, READ, ("stored", BITS[1], pb.MEDIUM_MEMORY)],
)
def test_one_who_reads_the_whole_while_it_changes_knows_what_there_is(
    before: list[tuple[str, bytes, pb.Medium]], after: list[tuple[str, bytes, pb.Medium]]
) -> None:
    """However blocks move between memory and SSD meanwhile, or go and come again."""

    async def scenario() -> None:
        node, held = Node(), set[tuple[bytes, bool]]()
        of_medium: dict[pb.Medium, set[bytes]] = {
            medium: set() for medium in (pb.MEDIUM_MEMORY, pb.MEDIUM_SSD, pb.MEDIUM_ENGINE)
        }

        def act(what: str, block: bytes, medium: pb.Medium) -> None:
            if what == "stored":
                of_medium[medium].add(block)
                change = pb.BlocksStored(group=1, hashes=block, medium=medium)
                node.events.publish(pb.NodeEvent(stored=change))
            elif what == "removed":
                of_medium[medium].discard(block)
                gone = pb.BlocksRemoved(group=1, hashes=block, medium=medium)
                node.events.publish(pb.NodeEvent(removed=gone))
            elif what == "cleared":
                of_medium[medium].clear()
                node.events.publish(pb.NodeEvent(cleared=pb.CacheCleared(medium=medium)))
            elif what == "tell":
                node.now += TELL_S
                node.summaries.tell()

        def learn(events: list[NodeEvent]) -> None:
            for event in events:
                if isinstance(event, DigestCleared):
                    held.clear()
                elif isinstance(event, DigestPart):
                    held.update((name, event.medium is Medium.ENGINE) for name in event.added)
                    held.difference_update((name, event.medium is Medium.ENGINE) for name in event.removed)

        with node.summaries.watch():
            await node.summaries.read()
            for change in before:
                act(*change)
            with node.summaries.watch() as watcher:
                whole = node.summaries.whole(1)
                for what, block, medium in after:
                    if what == "read":
                        learn(values([each for each in [next(whole, None)] if each is not None]))
                    act(what, block, medium)
                learn(values([*whole]))
                node.now += TELL_S
                node.summaries.tell()
                learn(await heard(watcher))
        here = of_medium[pb.MEDIUM_MEMORY] | of_medium[pb.MEDIUM_SSD]
        wanted = {(name, False) for name in named([*here])}
        assert held == wanted | {(name, True) for name in named([*of_medium[pb.MEDIUM_ENGINE]])}

    asyncio.run(scenario())
