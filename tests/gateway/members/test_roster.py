"""Nodes come, go and move while requests run, as registries say."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import Any

import pytest

from gateway.cluster.registry import LINGER_S, Clusters, NodeTimes
from membership.member import Member
from membership.view import View
from planner.decisions.views import Role
from tests.gateway.memory.loop import memory_loop
from tests.gateway.memory.pipeline import Pipelined, on_memory_loop, pipeline
from tests.gateway.scripted import ScriptedNode
from tests.gateway.worlds import until
from transport.control.proto import node_pb2 as pb

PROMPT = "the quick brown fox jumps over the lazy dog " * 6
FILE = "file"


def states(clusters: Clusters) -> dict[str, str]:
    return {node.id: node.state for node in clusters.nodes}


def view_of(*nodes: ScriptedNode) -> View:
    members = [Member(id=node.node_id, agent=node.agent_address) for node in nodes]
    return View(members={member.id: member for member in members}, is_synced=True)


def without(w: Pipelined, *nodes: ScriptedNode) -> None:
    """The gateway's own file lists these nodes no more."""
    gone = {node.agent_address for node in nodes}
    w.configure(replace(w.config, nodes=tuple(each for each in w.config.nodes if each.agent not in gone)))


async def has_states(w: Pipelined, wanted: Mapping[str, str]) -> None:
    await until(lambda: states(w.clusters) == wanted, lambda: states(w.clusters))


@on_memory_loop
async def test_a_node_that_a_registry_lists_serves_and_leaves_with_its_entry() -> None:
    async with pipeline(remote=0, local=1, decode=2) as w:
        second = w.nodes.decode[1]
        without(w, second)
        await has_states(w, {"p0": "ready", "d0": "ready"})
        w.seen.roster.saw(FILE, view_of(second))
        await has_states(w, {"p0": "ready", "d0": "ready", "d1": "ready"})
        w.nodes.decode[0].become(pb.NODE_STATE_DRAINING)
        await until(lambda: [each.id for each in w.clusters.ready(Role.DECODE)] == ["d1"])
        assert (await w.complete(PROMPT)).status == 200
        assert 'prfaas_member_changes_total{kind="joined"} 1.0' in await w.metrics()


@on_memory_loop
async def test_requests_of_a_node_that_leaves_end_and_nothing_new_comes() -> None:
    async with pipeline(remote=0, local=1, decode=2) as w:
        first, second = w.nodes.decode
        first.become(pb.NODE_STATE_DRAINING)
        await until(lambda: [each.id for each in w.clusters.ready(Role.DECODE)] == ["d1"])
        gate = second.script.decode_gate = asyncio.Event()
        asking = asyncio.create_task(w.complete(PROMPT, stream=True))
        await until(lambda: second.running)
        first.become(pb.NODE_STATE_READY)
        await until(lambda: len(w.clusters.ready(Role.DECODE)) == 2)
        without(w, second)
        await has_states(w, {"p0": "ready", "d0": "ready"})
        assert (await w.complete(PROMPT)).status == 200
        await asyncio.sleep(10 * LINGER_S)
        assert [node.id for node in w.clusters.retired] == ["d1"]
        gate.set()
        answer = await asking
        assert (answer.status, b"[DONE]" in await answer.read()) == (200, True)
        await until(lambda: not w.clusters.retired)
        assert not w.nodes.leftovers()


class Mute(ScriptedNode):
    """An agent that says nothing."""

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[pb.NodeEvent]:
        await asyncio.Event().wait()
        yield pb.NodeEvent()


@on_memory_loop
async def test_a_node_takes_over_from_its_former_address_once_it_answers_at_the_new_one() -> None:
    async with pipeline(remote=0, local=1, decode=1) as w:
        node, agents = w.nodes.decode[0], memory_loop().agents
        agents["127.0.0.1:9"] = Mute("d0", "west", "pd", "decode", node.fabric, node.script)
        agents["127.0.0.1:10"] = node
        without(w, node)
        w.seen.roster.saw(FILE, view_of(node))
        await until(lambda: w.clusters.retired)
        await has_states(w, {"p0": "ready", "d0": "ready"})
        former = w.clusters.by_id("d0")
        gate = node.script.decode_gate = asyncio.Event()
        asking = asyncio.create_task(w.complete(PROMPT, stream=True))
        await until(lambda: node.running)

        moved = Member(id="d0", agent="127.0.0.1:9")
        w.seen.roster.saw(FILE, View(members={"d0": moved}, is_synced=True))
        await asyncio.sleep(5.0)  # the one before goes on
        assert w.clusters.by_id("d0") is former
        assert former.state == "ready"

        w.seen.roster.saw(FILE, View(members={"d0": replace(moved, agent="127.0.0.1:10")}, is_synced=True))
        await until(lambda: former in w.clusters.retired)
        assert states(w.clusters) == {"p0": "ready", "d0": "ready"}
        assert w.clusters.by_id("d0").agent.address == "127.0.0.1:10"
        gate.set()
        assert (await asking).status == 200
        assert (await w.complete(PROMPT)).status == 200
        await until(lambda: not w.clusters.retired)


@on_memory_loop
async def test_a_registry_that_is_lost_takes_no_node_away() -> None:
    async with pipeline(remote=0, local=1, decode=2) as w:
        second = w.nodes.decode[1]
        without(w, second)
        listed = view_of(second)
        w.seen.roster.saw(FILE, listed)
        await has_states(w, {"p0": "ready", "d0": "ready", "d1": "ready"})
        now = asyncio.get_running_loop().time()
        w.seen.roster.saw(FILE, listed.failed("it is not there", now))
        await asyncio.sleep(30.0)
        assert states(w.clusters)["d1"] == "ready"
        status = next(each for each in w.seen.roster.status() if each.source == FILE)
        assert (status.state, status.reason, status.frozen_s) == (
            "frozen",
            "it is not there",
            pytest.approx(30.0, abs=1),
        )
        assert (await w.complete(PROMPT)).status == 200


@on_memory_loop
async def test_a_node_on_another_machine_is_left_out_where_traffic_would_be_in_clear() -> None:
    async with pipeline(remote=0, local=1, decode=1) as w:
        far = Member(id="d7", agent="192.0.2.7:7001")
        w.seen.roster.saw(FILE, View(members={"d7": far}, is_synced=True))
        await asyncio.sleep(1.0)
        assert states(w.clusters) == {"p0": "ready", "d0": "ready"}
        assert [each.refused for each in w.seen.roster.status()] == [0, 1]


@on_memory_loop
async def test_what_was_learned_of_a_node_stays_for_a_while() -> None:
    async with pipeline(remote=0, local=1, decode=2, node_times=NodeTimes(remember_s=30.0)) as w:
        second = w.nodes.decode[1]
        without(w, second)
        w.seen.roster.saw(FILE, view_of(second))
        await has_states(w, {"p0": "ready", "d0": "ready", "d1": "ready"})
        w.seen.roster.saw(FILE, View(is_synced=True))
        await has_states(w, {"p0": "ready", "d0": "ready"})
        remembered = w.seen.roster.remembered
        assert dict(remembered)["d1"] == "west"
        await asyncio.sleep(31.0)
        assert not remembered


@on_memory_loop
async def test_a_gateway_is_ready_once_all_registries_have_been_read() -> None:
    async with pipeline(remote=0, local=1, decode=1) as w:
        assert (await w.http.get("/readyz")).status == 200
        w.seen.roster.saw(FILE, View().failed("it is not there", 0.0))
        answer = await w.http.get("/readyz")
        assert (answer.status, (await answer.json())["error"]["code"]) == (503, "members_unread")


@on_memory_loop
async def test_a_node_goes_on_where_another_one_answers_at_its_new_address() -> None:
    async with pipeline(remote=0, local=1, decode=2) as w:
        first, second = w.nodes.decode
        without(w, first)
        w.seen.roster.saw(FILE, view_of(first))
        await until(lambda: w.clusters.retired)
        await has_states(w, {"p0": "ready", "d0": "ready", "d1": "ready"})
        former = w.clusters.by_id("d0")
        memory_loop().agents["127.0.0.1:9"] = second
        wrong = Member(id="d0", agent="127.0.0.1:9")
        w.seen.roster.saw(FILE, View(members={"d0": wrong}, is_synced=True))
        await asyncio.sleep(5.0)
        assert w.clusters.by_id("d0") is former
        assert states(w.clusters) == {"p0": "ready", "d0": "ready", "d1": "ready"}


@on_memory_loop
async def test_an_entry_that_names_a_node_once_more_takes_nothing_of_it() -> None:
    async with pipeline(remote=0, local=1, decode=1) as w:
        await has_states(w, {"p0": "ready", "d0": "ready"})
        healthy, dropped = w.clusters.by_id("d0"), list[str]()
        index = w.clusters.index
        assert index is not None
        index.drop = dropped.append  # type: ignore[method-assign]
        node, agents = w.nodes.decode[0], memory_loop().agents
        agents["127.0.0.1:9"] = Mute("d0", "west", "pd", "decode", node.fabric, node.script)
        twice = Member(id="d0", agent="127.0.0.1:9")
        w.seen.roster.saw(FILE, View(members={"d0": twice}, is_synced=True))
        await until(lambda: len(w.clusters.nodes) == 3)
        assert (await (await w.http.get("/readyz")).json())["nodes"] == {"p0": "ready", "d0": "ready"}
        w.seen.roster.saw(FILE, View(is_synced=True))
        await until(lambda: len(w.clusters.nodes) == 2)
        assert w.clusters.by_id("d0") is healthy
        assert dropped == []


@on_memory_loop
async def test_other_clusters_are_near_from_a_reload_on_for_nodes_that_are_there_and_that_come() -> None:
    async with pipeline(remote=1, local=1, decode=2, near=("west",)) as w:
        second = w.nodes.decode[1]
        without(w, second)
        assert {node.agent.near.names for node in w.clusters.nodes} == {("west",)}
        w.configure(replace(w.config, near=("west", "east")))
        w.seen.roster.saw(FILE, view_of(second))
        await until(lambda: {"d0", "d1"} <= {node.id for node in w.clusters.nodes})
        assert {node.agent.near.names for node in w.clusters.nodes} == {("west", "east")}
