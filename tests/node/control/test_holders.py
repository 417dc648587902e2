"""Gateways that hold reservations: what they held goes with them, and nothing of anybody else's."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

from gateway.cluster.agent_client import AgentClient
from node.control.call_server import CallServer
from node.control.holders import MAX_GONE, MAX_NAME, ReservationHolders, checked_name
from node.errors import NodeRefusal
from node.grpc_service import NodeService
from tests.gateway.worlds import on_both_loops, until
from tests.node.control.test_call_server import Caller, Room, calling, serving
from tests.node.running import alone, config, refused, running_node
from tests.pd_cluster.handover import TOKENS, HandNode, landed, run, two_nodes
from transport.control.proto import node_pb2 as pb


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def holders(clock: Clock) -> ReservationHolders:
    return ReservationHolders(clock, grace_s=5.0)


# The rule


def test_bookings_are_counted_by_gateway_and_not_by_process() -> None:
    named = holders(Clock())
    for name in ("one.a", "one.b", "other", ""):  # without a name: an engine, whose own load has the request
        named.booked(name)
    assert [named.booked_by(name) for name in ("one.c", "other", "third", "")] == [2, 1, 0, 0]
    assert [named.booked_by_others(name) for name in ("one.a", "one.b", "other", "third", "")] == [1, 1, 2, 3, 3]
    for name in ("one.b", "one.a", "other", ""):
        named.unbooked(name)
    assert [named.booked_by_others(name) for name in ("one.a", "third")] == [0, 0]


def test_a_holder_is_gone_some_time_after_its_last_connection() -> None:
    clock = Clock()
    known = holders(clock)
    known.came("a")
    known.came("a")
    known.left("a")
    clock.now += 60.0
    assert not known.is_gone("a", 0.0)  # it has another connection
    known.left("a")
    clock.now += 4.9
    assert not known.is_gone("a", 0.0)
    clock.now += 0.1
    assert known.is_gone("a", 0.0)


def test_who_comes_back_within_the_grace_was_never_gone() -> None:
    clock = Clock()
    known = holders(clock)
    known.came("a")
    known.left("a")
    clock.now += 4.0
    known.came("a")
    clock.now += 60.0
    assert not known.is_gone("a", 0.0)


def test_another_holder_and_one_that_never_had_a_connection_are_not_concerned() -> None:
    clock = Clock()
    known = holders(clock)
    known.came("a")
    known.came("b")
    known.left("a")
    clock.now += 60.0
    assert known.is_gone("a", 0.0)
    assert not known.is_gone("b", 0.0)
    assert not known.is_gone("never heard of", 0.0)
    assert not known.is_gone("", 0.0)


def test_what_was_said_after_its_connections_ended_counts_from_then() -> None:
    clock = Clock()
    known = holders(clock)
    known.came("a")
    known.left("a")
    clock.now += 60.0
    since = clock.now  # a call by gRPC that came late
    assert not known.is_gone("a", since)
    clock.now += 5.0
    assert known.is_gone("a", since)


def test_no_more_than_so_many_are_remembered() -> None:
    clock = Clock()
    known = holders(clock)
    for number in range(3 * MAX_GONE):
        known.came(str(number))
        known.left(str(number))
    assert len(known) == 0
    clock.now += 60.0
    assert sum(known.is_gone(str(number), 0.0) for number in range(3 * MAX_GONE)) == MAX_GONE


def test_a_name_has_an_end() -> None:
    assert checked_name("a" * MAX_NAME) == "a" * MAX_NAME
    with pytest.raises(NodeRefusal, match="bad_request"):
        checked_name("a" * (MAX_NAME + 1))


# Reservations


@contextmanager
def _two_gateways(decode: HandNode) -> Iterator[None]:
    """ "b" stays; "a" goes with the block."""
    decode.holders.came("b")
    with decode.holders.connected("a"):
        yield


def test_what_a_gateway_had_reserved_goes_with_it_and_another_ones_stays(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with two_nodes(tmp_path) as (_, decode):
            with _two_gateways(decode):
                of_a = decode.reserve(TOKENS, holder="a", ttl_s=60.0)
                of_b = decode.reserve(TOKENS, holder="b", ttl_s=60.0)
                of_nobody = decode.reserve(TOKENS, ttl_s=60.0)
                assert decode.incoming.expire() == []
            assert decode.incoming.expire() == [of_a.transfer_id]
            await until(lambda: of_a.transfer_id not in decode.incoming.entries)
            assert set(decode.incoming.entries) == {of_b.transfer_id, of_nobody.transfer_id}
            assert decode.incoming.counts.ended == {"gateway_gone": 1}
            for ticket in (of_b, of_nobody):
                decode.incoming.abort(ticket.transfer_id, "aborted")
            await until(decode.incoming.is_idle)

    run(scenario())


def test_what_has_landed_goes_unless_an_engine_has_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with two_nodes(tmp_path) as (prefill, decode):
            with decode.holders.connected("a"):
                lent, unclaimed = [await landed(prefill, decode, holder="a", ttl_s=60.0) for _ in range(2)]
                pages = await decode.claim(lent, TOKENS)
            assert decode.incoming.expire() == [unclaimed.transfer_id]
            decode.check(pages, TOKENS)  # it is there to load as before
            decode.end("claim", loaded=True)
            assert decode.incoming.is_idle()

    run(scenario())


def test_what_an_engine_waits_for_stays_as_long_as_it_waits(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with two_nodes(tmp_path) as (_, decode):
            with decode.holders.connected("a"):
                ticket = decode.reserve(TOKENS, holder="a", ttl_s=60.0)
                decode.claim_as("waits", ticket, TOKENS, decode.inbox.put_nowait)
                await until(lambda: decode.incoming.entries[ticket.transfer_id].use.claims)
            assert decode.incoming.expire() == []
            decode.end("waits")  # its client is gone
            await until(lambda: not decode.incoming.entries[ticket.transfer_id].use.claims)
            assert decode.incoming.expire() == [ticket.transfer_id]
            await until(decode.incoming.is_idle)

    run(scenario())


# Connections


def introduce(name: str, number: int = 7) -> pb.Call:
    return pb.Call(id=number, introduce=pb.Introduce(holder=name))


async def _introduced(caller: Caller, name: str) -> str:
    caller.say(introduce(name))
    answer = await caller.answer()
    return "" if answer.done.ok else answer.refusal.reason


@on_both_loops
async def test_a_kept_connection_says_who_holds_it_and_its_end_is_the_holders_end() -> None:
    known = ReservationHolders(Clock())
    async with serving(Room(), holders=known) as (_, port):
        async with calling(port) as first, calling(port) as second, calling(port) as other:
            assert [await _introduced(first, "a"), await _introduced(second, "a"), await _introduced(other, "b")] == [
                ""
            ] * 3
            assert len(known) == 2
            assert await _introduced(first, "b") == "bad_request"  # one name each
            first.writer.transport.abort()
            other.writer.transport.abort()
            await until(lambda: len(known) == 1)
        await until(lambda: not len(known))


@on_both_loops
async def test_what_is_no_name_is_refused() -> None:
    known = ReservationHolders(Clock())
    async with serving(Room(), holders=known) as (_, port), calling(port) as caller:
        assert await _introduced(caller, "") == "bad_request"
        assert await _introduced(caller, "x" * (MAX_NAME + 1)) == "bad_request"
        assert len(known) == 0


def test_a_node_frees_at_once_what_a_gateway_that_was_killed_had_reserved_and_stops(tmp_path: Path) -> None:
    """Over both ways, as gateways do it: the kept connection and Watch."""

    async def scenario() -> None:
        async with running_node(config(tmp_path, lease_s=900.0)) as node:
            node.agent.holders.grace_s = 0.3
            calls = CallServer(NodeService(node.agent, time.monotonic), node.agent.holders)
            node.agent.calls_port = await calls.start("127.0.0.1", 0)
            node.agent.publish_description()
            first, second = (AgentClient(node.address, 30.0, holder=name) for name in ("first", "second"))
            watches = [asyncio.create_task(_watch(client)) for client in (first, second)]
            await until(lambda: len(calls) == 2)
            tickets = [await client.reserve_prefix("r", (), 16, 660.0) for client in (first, second)]
            await asyncio.sleep(0.6)  # longer than the grace: a connected holder keeps what it has
            assert set(node.agent.incoming.entries) == {ticket.transfer_id for ticket in tickets}
            await _killed(first, watches[0])
            await until(lambda: set(node.agent.incoming.entries) == {tickets[1].transfer_id})
            await second.kept.close()  # it has its Watch still
            await asyncio.sleep(1.2)
            assert set(node.agent.incoming.entries) == {tickets[1].transfer_id}
            await _killed(second, watches[1])
            assert await node.agent.draining.begin(30.0, "a test")
            await calls.close(0.0)

    alone(scenario())


def test_a_watcher_whose_name_is_too_long_is_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(config(tmp_path), wait=False) as node:
            watch = node.stub.Watch(pb.WatchRequest(holder="x" * (MAX_NAME + 1)))
            assert await refused(watch.read()) == (grpc.StatusCode.INVALID_ARGUMENT, "bad_request")

    alone(scenario())


async def _watch(client: AgentClient) -> None:
    async for _ in client.watch(0.1, 30.0):
        pass


async def _killed(client: AgentClient, watch: "asyncio.Task[None]") -> None:
    """What the kernel does to a process's connections."""
    watch.cancel()
    await asyncio.wait([watch])
    await client.close()
