"""What a gateway believes of other gateways' work on a node: counted once, and soon enough that two do not herd."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, cast

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.cluster.agent_client import AgentClient
from gateway.cluster.agent_values import BookingsBeside, NodeInfo, NodeLoad
from gateway.cluster.node import LATE_S, ClusterNode, NodeWork
from gateway.cluster.registry import LOAD_INTERVAL_S, Clusters
from gateway.prompt.prompt import Prompt
from gateway.tasks import TaskSet
from hybrid_cache.hashing.block_hash import block_hashes
from hybrid_cache.index.index import NOTHING
from node.control.booking_news import BookingNews
from node.control.holders import ReservationHolders
from tests.gateway.memory.pipeline import on_memory_loop, pipeline
from tests.gateway.scripted import ScriptedNode
from tests.gateway.worlds import until
from tests.node.running import BLOCK, RunningNode, alone, config, running_node
from transport.control.proto import node_pb2 as pb

INFO: Final = NodeInfo(
    node_id="d", cluster="west", cluster_kind="pd", role="decode", state="ready", engine_url="", model_id="m",
    layout_json="", layout_fingerprint="", max_model_len=1, boot_id="1",
)  # fmt: skip
WORK: Final = NodeWork()


def node_of(node_id: str = "d") -> ClusterNode:
    node = ClusterNode(cast(AgentClient, None))
    node.info, node.connected = replace(INFO, node_id=node_id), True
    return node


def running(node: ClusterNode) -> int:
    return node.view(NOTHING, 1 << 20, 0.0).running


def word(requests: int, clock_s: float) -> BookingsBeside:
    return BookingsBeside(requests=requests, clock_s=clock_s)


# The rule


def test_bookings_of_others_are_seen_with_the_answer_and_ours_are_not_counted_twice() -> None:
    node = node_of()
    node.take(WORK)
    node.booked_beside(word(3, 10.0))
    assert (running(node), node.others) == (4, 3)
    node.take(WORK)  # at once, and not only once the node has said so
    assert (running(node), node.others) == (5, 3)
    for clock_s in (10.1, 10.2):  # ours are reserved there, and no engine has them yet
        node.reported(NodeLoad(booked_by_own=2, booked_by_others=3, clock_s=clock_s))
        assert (running(node), node.others) == (5, 3)
    for clock_s in (10.3, 10.4):  # an engine has begun with all of them
        node.reported(NodeLoad(running=5, clock_s=clock_s))
        assert running(node) == 5
    assert node.others == 3
    node.take(WORK)  # is not hidden behind what others have there
    assert running(node) == 6


@given(st.lists(st.tuples(st.integers(0, 9), st.floats(1.0, 1.0 + LATE_S, exclude_max=True)), min_size=1))
def test_an_older_word_never_replaces_a_newer_one(words: list[tuple[int, float]]) -> None:
    node, newest = node_of(), (0, 0.0)
    for number, (requests, clock_s) in enumerate(words):
        if clock_s >= newest[1]:
            newest = requests, clock_s
        if number % 2:
            node.reported(NodeLoad(booked_by_others=requests, clock_s=clock_s))
        else:
            node.booked_beside(word(requests, clock_s))
        assert node.others == newest[0]


def test_a_node_that_starts_anew_with_another_clock_is_believed() -> None:
    node = node_of()
    node.booked_beside(word(7, 5_000.0))
    node.reported(NodeLoad(booked_by_others=1, clock_s=3.0))
    assert node.others == 1


def test_nothing_is_booked_on_a_node_that_is_lost_or_does_not_say() -> None:
    node = node_of()
    node.booked_beside(word(7, 50.0))
    node.connected = False
    node.reported(NodeLoad())
    node.booked_beside(word(7, 51.0))  # an answer that was on its way
    assert (node.others, running(node)) == (0, 0)
    node.connected = True
    node.reported(NodeLoad(clock_s=49.0))
    assert (node.others, running(node)) == (0, 0)


class BusyNode(ScriptedNode):
    """Another gateway has reserved here, for as many requests as it may hold."""

    async def reserve(self, request: pb.ReserveRequest) -> pb.Ticket:
        ticket = await super().reserve(request)
        ticket.others.CopyFrom(pb.Bookings(requests=9, clock_s=1.0))
        return ticket


@on_memory_loop
async def test_a_gateway_hears_of_others_by_the_answer_to_its_reservation() -> None:
    async with pipeline(remote=1, local=0, decode=1, kind=BusyNode) as w:
        gate = w.nodes.decode[0].script.decode_gate = asyncio.Event()
        asked = asyncio.create_task(w.complete("the quick brown fox jumps over the lazy dog " * 60))
        decode = w.clusters.by_id("d0")
        await until(lambda: decode.others == 9)
        assert running(decode) == 10  # the request of this gateway with them
        gate.set()
        assert (await asked).status == 200


# Two gateways, simulated

NODES: Final = 8
TICK_S: Final = 0.01
RUN_S: Final = 12.0
JOINS_AT_S: Final = 6.0  # the last node is empty until then
WAVE_TICKS: Final = 3  # between two instants at which requests come
WAVE: Final = 4  # of all gateways together
LANDING_S: Final = 1.0  # until an engine has them
DECODE_S: Final = 2.0


@dataclass(eq=False, kw_only=True)
class Stay:
    """One request on its node: an engine has it from `lands_at` on."""

    gateway: int
    lands_at: float
    ends_at: float
    is_booked: bool = True


@dataclass
class SimulatedNode:
    """A node's bookings, its engine's load, and what it says of both."""

    says: bool
    name: str
    phase: int
    now: float = 0.0
    stays: list[Stay] = field(default_factory=list)
    news: BookingNews = field(default_factory=BookingNews)
    report_at: float | None = None
    said: int = 0

    def __post_init__(self) -> None:
        self.holders = ReservationHolders(lambda: self.now)

    def clock_s(self) -> float:
        self.said += 1
        return 1000.0 + self.now + self.said * 1e-6

    def reserve(self, stay: Stay) -> BookingsBeside | None:
        self.stays.append(stay)
        self.holders.booked(str(stay.gateway))
        if (wait_s := self.news.booked(self.now)) is not None:
            self.report_at = self.now + wait_s
        if not self.says:
            return None
        return word(self.holders.booked_by_others(str(stay.gateway)), self.clock_s())

    def goes_on(self, now: float) -> list[Stay]:
        """Those that end."""
        self.now = now
        for stay in self.stays:
            if stay.is_booked and now >= stay.lands_at:
                stay.is_booked = False
                self.holders.unbooked(str(stay.gateway))
        ended = [stay for stay in self.stays if now >= stay.ends_at]
        self.stays = [stay for stay in self.stays if now < stay.ends_at]
        return ended

    def is_to_report(self, tick: int) -> bool:
        if self.says and self.report_at is not None and self.now >= self.report_at:
            self.report_at = None
            self.news.told(self.now)
            return True
        return (tick + self.phase) % round(LOAD_INTERVAL_S / TICK_S) == 0

    def load(self, gateway: int) -> NodeLoad:
        in_engine = sum(not stay.is_booked for stay in self.stays)
        if not self.says:
            return NodeLoad(running=in_engine, clock_s=self.clock_s())
        return NodeLoad(
            running=in_engine,
            booked_by_own=self.holders.booked_by(str(gateway)),
            booked_by_others=self.holders.booked_by_others(str(gateway)),
            clock_s=self.clock_s(),
        )


def greatest_load(gateways: int, seed: int, *, says: bool = True) -> int:
    """Of any node at any time. Each gateway takes the node with the least load that it knows of."""
    rng = random.Random(seed)
    nodes = [SimulatedNode(says, f"d{number}", rng.randrange(25)) for number in range(NODES)]
    views = [[node_of(node.name) for node in nodes] for _ in range(gateways)]
    greatest = 0
    for tick in range(round(RUN_S / TICK_S)):
        now = tick * TICK_S
        for at, node in enumerate(nodes):
            for stay in node.goes_on(now):
                views[stay.gateway][at].give_back(WORK)
        able = NODES if now >= JOINS_AT_S else NODES - 1
        chosen: list[tuple[int, Stay]] = []
        for number in range(WAVE if tick % WAVE_TICKS == 0 else 0):
            known = views[number % gateways]
            at = min(range(able), key=lambda at: running(known[at]))
            known[at].take(WORK)
            lands_at = now + rng.uniform(0.1, 2 * LANDING_S)
            ends_at = lands_at + rng.expovariate(1 / DECODE_S)
            chosen.append((at, Stay(gateway=number % gateways, lands_at=lands_at, ends_at=ends_at)))
        answers = [(at, stay, nodes[at].reserve(stay)) for at, stay in chosen]
        rng.shuffle(answers)
        for at, stay, answer in answers:
            if answer is not None:
                views[stay.gateway][at].booked_beside(answer)
        for at, node in enumerate(nodes):
            if node.is_to_report(tick):
                for gateway, known in enumerate(views):
                    known[at].reported(node.load(gateway), now)
        greatest = max(greatest, *(len(node.stays) for node in nodes))
    return greatest


@settings(max_examples=5, deadline=None)
@given(st.integers(0, 1 << 32), st.sampled_from([2, 4]))
def test_gateways_that_place_at_one_instant_load_nodes_hardly_more_than_one_gateway_does(
    seed: int, gateways: int
) -> None:
    alone_, together = greatest_load(1, seed), greatest_load(gateways, seed)
    assert together <= alone_ + 2 * WAVE
    # Where nodes say nothing of bookings, gateways go on filling the node that has just joined.
    assert greatest_load(gateways, seed, says=False) > together + WAVE


# Two gateways, and nodes whose engines alone are emulated


def prompt(first: int) -> Prompt:
    hashes = block_hashes([100 + (first * 31 + i * 7) % 150 for i in range(4 * BLOCK)], BLOCK, b"")
    return Prompt(num_tokens=4 * BLOCK + 1, hashes=list(hashes), digest=first.to_bytes(4))


@asynccontextmanager
async def registry(nodes: list[RunningNode], holder: str) -> AsyncIterator[Clusters]:
    """What one gateway places by, with agents of its own."""
    agents = [AgentClient(node.address, 20.0, holder=holder) for node in nodes]
    tasks = TaskSet(lambda name: None)
    clusters = Clusters(agents, asyncio.get_running_loop().time, tasks=tasks)
    clusters.start()
    try:
        await until(lambda: all(node.connected for node in clusters.nodes))
        yield clusters
    finally:
        await clusters.close()


async def place(node: ClusterNode, number: int) -> str:
    """Books and reserves there; returns the transfer's id."""
    node.take(WORK)
    granted = await node.agent.reserve("r", prompt(number), 60.0)
    assert granted.beside is not None
    node.booked_beside(granted.beside)
    return granted.ticket.transfer_id


def test_two_gateways_see_what_each_other_has_reserved_on_real_nodes(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            nodes = [await stack.enter_async_context(running_node(config(tmp_path / name))) for name in ("a", "b")]
            one = await stack.enter_async_context(registry(nodes, "one.1"))
            other = await stack.enter_async_context(registry(nodes, "other"))
            sibling = await stack.enter_async_context(registry(nodes, "one.2"))
            first = one.nodes[0]
            held = [await place(first, number) for number in range(5)]
            counts = [0, 0]
            for number in range(5, 9):  # before reports have come
                at = min(range(2), key=lambda at: running(other.nodes[at]))
                await place(other.nodes[at], number)
                counts[at] += 1
            assert counts[1] >= 3
            # By the next reports at the latest, everybody knows all; a gateway's own are no others'.
            here, there = counts
            await until(lambda: [running(node) for node in other.nodes] == [5 + here, there])
            await until(lambda: [running(node) for node in one.nodes] == [5 + here, there])
            sibling.nodes[0].pending_requests = 5  # as the board of its gateway's workers tells it
            await until(lambda: [running(node) for node in sibling.nodes] == [5 + here, there])
            for transfer_id in held:
                await first.agent.abort(transfer_id, "request_ended")
                first.give_back(WORK)
            await until(lambda: [running(node) for node in other.nodes] == counts)

    alone(scenario())
