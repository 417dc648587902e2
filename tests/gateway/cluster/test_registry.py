"""The view follows the nodes: it comes, changes, goes and is rebuilt from their events."""

import asyncio
import time

import pytest

from gateway.cluster.links import ClusterLinks
from gateway.cluster.registry import Clusters, unfit
from gateway.cluster.served_model import hashing_by, salt_of
from gateway.errors import AgentCallFailed
from gateway.prompt.prompt import Prompt
from hybrid_cache.hashing.name_secrets import NameSecrets
from hybrid_cache.index.index import NOTHING
from hybrid_cache.layout.layout import KVCacheGroup, ModelLayout
from hybrid_cache.layout.spec import FullAttention
from planner.decisions.routing.offload import Reason
from planner.decisions.views import Role
from tests.gateway.layouts import LAYOUT
from tests.gateway.memory.pipeline import on_memory_loop, pipeline
from tests.gateway.views import deciding, view_of, watched
from tests.gateway.worlds import on_loop, until
from transport.control.proto import node_pb2 as pb

PROMPT = "the quick brown fox jumps over the lazy dog " * 6


def states(clusters: Clusters) -> dict[str, str]:
    return {node.id: node.state for node in clusters.nodes}


def has_prefix(clusters: Clusters, node: str, block_hash: bytes) -> bool:
    """Whether the index knows the block; a snapshot is applied in pieces, a little after the node counts as ready."""
    return clusters.index is not None and clusters.index.match(node, [block_hash], 16).num_tokens == 16


@on_loop
async def test_states_are_those_the_nodes_tell() -> None:
    async with watched() as w:
        clusters = w.clusters
        assert states(clusters) == {"r0": "ready", "p0": "ready", "d0": "ready", "d1": "ready"}
        w.nodes.remote[0].become(pb.NODE_STATE_DRAINING)
        await until(lambda: states(clusters)["r0"] == "draining")
        w.nodes.local[0].become(pb.NODE_STATE_ENGINE_DOWN)
        await until(lambda: states(clusters)["p0"] == "engine_down")
        assert clusters.ready(Role.PREFILL) == []
        assert [node.id for node in clusters.ready(Role.DECODE)] == ["d0", "d1"]


@on_loop
async def test_a_node_whose_agent_dies_is_down_and_comes_back_with_its_cache() -> None:
    async with watched(decode=1) as w:
        clusters, node = w.clusters, w.nodes.decode[0]
        await node.stop_agent()
        await until(lambda: states(clusters)["d0"] == "down")
        assert not clusters.is_ready
        node.cache = [pb.BlocksStored(group=group, hashes=b"h" * 32) for group in (0, 1)]
        await node.start_agent(node.agent_address)
        await until(lambda: states(clusters)["d0"] == "ready")
        assert clusters.is_ready
        await until(lambda: has_prefix(clusters, "d0", b"h" * 32))


@on_loop
async def test_another_gateway_knows_at_once_what_the_first_one_learnt() -> None:
    async with watched() as w:
        w.nodes.local[0].cache = [pb.BlocksStored(group=group, hashes=b"h" * 32) for group in (0, 1)]
        async with view_of(w.nodes) as second:
            await until(lambda: has_prefix(second.clusters, "p0", b"h" * 32))


@on_loop
async def test_a_lost_event_starts_the_view_of_a_node_anew() -> None:
    async with watched(decode=1) as w:
        clusters, node = w.clusters, w.nodes.remote[0]
        node.cache = [pb.BlocksStored(group=group, hashes=b"a" * 32) for group in (0, 1)]
        node.tell(pb.NodeEvent(load=pb.Load(), seq=5))
        await until(lambda: states(clusters)["r0"] == "down")
        await until(lambda: states(clusters)["r0"] == "ready")
        await until(lambda: has_prefix(clusters, "r0", b"a" * 32))
        assert clusters.index is not None
        assert len(clusters.index) == 2


@on_loop
async def test_a_node_of_another_layout_is_not_used() -> None:
    async with watched() as w:
        clusters, node = w.clusters, w.nodes.remote[0]
        node.layout = ModelLayout("other", "float32", 8, (KVCacheGroup(FullAttention(8, 4), (0,)),))
        node.become(pb.NODE_STATE_READY)
        await until(lambda: (info := clusters.by_id("r0").info) and info.layout_fingerprint == node.layout.fingerprint)
        assert [each.id for each in clusters.ready(Role.PREFILL)] == ["p0"]
        assert list(clusters.views(Prompt(100, [], b"", revision=LAYOUT.fingerprint)).prefills) == ["west"]


@on_loop
async def test_the_next_model_is_served_as_soon_as_the_last_node_of_the_one_before_is_gone() -> None:
    async with watched(remote=0, local=0, decode=2) as w:
        clusters, (first, second) = w.clusters, w.nodes.decode
        second.layout = ModelLayout("other", "float32", 16, LAYOUT.groups)
        second.become(pb.NODE_STATE_READY)
        await until(
            lambda: (info := clusters.by_id("d1").info) and info.layout_fingerprint == second.layout.fingerprint
        )
        stored = [pb.BlocksStored(group=group, hashes=b"h" * 32) for group in (0, 1)]
        second.tell(pb.NodeEvent(stored=stored[0]))
        second.tell(pb.NodeEvent(stored=stored[1]))
        assert [node.id for node in clusters.ready(Role.DECODE)] == ["d0"]
        await first.stop_agent()
        await until(lambda: clusters.served and clusters.served.layout == second.layout)
        assert [node.id for node in clusters.ready(Role.DECODE)] == ["d1"]
        await until(lambda: has_prefix(clusters, "d1", b"h" * 32))  # though it came while another model was served


@on_loop
async def test_another_model_never_takes_the_place_of_one_whose_region_is_lost() -> None:
    async with watched(remote=0, local=0, decode=2) as w:
        clusters, (first, second) = w.clusters, w.nodes.decode
        served = clusters.served
        second.layout, second.model_id = ModelLayout("other", "float32", 16, LAYOUT.groups), "another"
        second.become(pb.NODE_STATE_READY)
        await until(lambda: (info := clusters.by_id("d1").info) and info.model_id == "another")
        await first.stop_agent()
        await until(lambda: states(clusters)["d0"] == "down")
        assert clusters.served == served
        assert not clusters.is_ready
        assert clusters.ready(Role.DECODE) == []
        await first.start_agent(first.agent_address)
        await until(lambda: [node.id for node in clusters.ready(Role.DECODE)] == ["d0"])
        clusters.leave(clusters.by_id("d0"))  # an operator removes it: it will not come back
        await until(lambda: [node.id for node in clusters.ready(Role.DECODE)] == ["d1"])


@on_memory_loop
async def test_an_address_that_returns_under_another_name_is_another_node() -> None:
    async with pipeline(decode=2) as w:
        clusters, node = w.clusters, w.nodes.decode[1]
        gate = node.script.decode_gate = asyncio.Event()
        w.nodes.decode[0].become(pb.NODE_STATE_DRAINING)
        await until(lambda: states(clusters)["d0"] == "draining")
        asking = asyncio.create_task(w.complete(PROMPT, stream=True))  # d1 is chosen under its old name
        await until(lambda: node.running)
        node.node_id = "d9"
        node.become(pb.NODE_STATE_READY)
        await until(lambda: "d9" in states(clusters))
        with pytest.raises(AgentCallFailed, match="gone"):
            clusters.by_id("d1")
        gate.set()
        assert (await asking).status == 200
        assert clusters.by_id("d9").state == "ready"
        assert (await w.complete(PROMPT)).status == 200


@on_memory_loop
async def test_a_decode_node_that_is_another_one_when_its_reservation_comes_costs_no_request() -> None:
    async with pipeline(remote=0, decode=2) as w:
        clusters, node = w.clusters, w.nodes.decode[0]
        gate = node.script.reserve_gate = asyncio.Event()
        asking = asyncio.create_task(w.complete(PROMPT))
        await until(lambda: node.open_reservations)
        node.node_id = "d9"
        node.become(pb.NODE_STATE_READY)
        await until(lambda: "d9" in states(clusters))
        gate.set()
        assert (await asking).status == 200
        assert await w.fallbacks() == {"decode_gone": 1.0}
        await w.settled()


@on_loop
async def test_a_name_goes_with_its_node_to_another_address() -> None:
    async with watched(decode=2) as w:
        clusters, (first, second) = w.clusters, w.nodes.decode
        await first.stop_agent()
        await until(lambda: states(clusters)["d0"] == "down")
        second.node_id = "d0"
        second.become(pb.NODE_STATE_READY)
        await until(lambda: clusters.by_id("d0").state == "ready")
        assert clusters.by_id("d0").agent.address == second.agent_address
        assert clusters.ready(Role.DECODE) == [clusters.by_id("d0")]


@on_loop
async def test_nodes_that_have_swapped_their_addresses_keep_what_they_have() -> None:
    async with watched(decode=2) as w:
        clusters, (first, second) = w.clusters, w.nodes.decode
        for node in (first, second):
            await node.stop_agent()
        await until(lambda: states(clusters)["d0"] == states(clusters)["d1"] == "down")
        first.node_id, second.node_id = "d1", "d0"
        first.cache = [pb.BlocksStored(group=group, hashes=b"h" * 32) for group in (0, 1)]
        await first.start_agent(first.agent_address)
        await until(lambda: has_prefix(clusters, "d1", b"h" * 32))
        await second.start_agent(second.agent_address)
        await until(lambda: states(clusters).get("d0") == "ready")
        assert has_prefix(clusters, "d1", b"h" * 32)
        assert [clusters.by_id(node.node_id).agent.address for node in (first, second)] == [
            first.agent_address,
            second.agent_address,
        ]


@on_loop
async def test_a_name_is_that_of_one_node() -> None:
    async with watched(decode=2) as w:
        clusters, (first, second) = w.clusters, w.nodes.decode
        await second.stop_agent()
        await until(lambda: states(clusters)["d1"] == "down")
        first.node_id, first.takes_media = "d1", True
        first.become(pb.NODE_STATE_READY)
        await until(lambda: clusters.by_id("d1").state == "ready")
        assert states(clusters) == {"r0": "ready", "p0": "ready", "d1": "ready", second.agent_address: "down"}
        with_image = Prompt(1, [], b"", has_media=True)
        assert "d1" not in unfit(clusters.nodes, with_image)
        now = 0.0
        links = ClusterLinks(clusters.nodes, lambda: now)
        links.failed(clusters.by_id("r0"), clusters.by_id("d1"))
        now = 1.0
        assert links.probes() == [(clusters.by_id("r0"), [clusters.by_id("d1")])]


@on_loop
async def test_a_description_that_makes_no_sense_keeps_the_node_out() -> None:
    async with watched(decode=2) as w:
        clusters, (first, second) = w.clusters, w.nodes.decode
        first.role = "conductor"
        first.become(pb.NODE_STATE_READY)
        await until(lambda: states(clusters)["d0"] == "down")
        second.node_id = "p0"
        second.become(pb.NODE_STATE_READY)
        await until(lambda: states(clusters)["d1"] == "down")
        assert not clusters.is_ready


@on_loop
async def test_senders_share_one_line() -> None:
    async with watched(remote=2) as w:
        links = ClusterLinks(w.clusters.nodes, time.monotonic)
        (before,) = links.views()
        assert (before.source, before.destination, before.up) == ("east", "west", True)
        assert before.available_bytes_per_s is None
        for node in w.nodes.remote:
            link = pb.Link(peer="west", available_bytes_per_s=1e6, utilisation=0.99, queued_bytes=5)
            node.load = pb.Load(links=[link])
            node.tell(pb.NodeEvent(load=node.load))
        # Both are busy: each sees its part of the line, which has at least what they carry together.
        await until(lambda: links.views()[0].available_bytes_per_s == 2 * 0.99e6)
        (link_view,) = links.views()
        assert link_view.queued_bytes == 10


@on_loop
async def test_what_waits_for_an_egress_budget_keeps_requests_local() -> None:
    async with deciding() as d:
        (node,), links = d.nodes.remote, ClusterLinks(d.clusters.nodes, time.monotonic)
        # No loss, no longer round trips: only the queue says it.
        link = pb.Link(peer="west", available_bytes_per_s=1e6, budget_bytes_per_s=1e6, queued_bytes=5_000_000)
        await d.reports(node, pb.Load(links=[link]))
        (view,) = links.views()
        assert (view.congested, view.budget_bytes_per_s, view.drain_s) == (False, 1e6, 5.0)
        way = d.route("the quick brown fox jumps over the lazy dog " * 40)
        assert (way.prefill_node, way.reason) == ("p0", Reason.CONGESTED)


@on_memory_loop
async def test_what_is_promised_to_a_link_is_seen_before_it_queues() -> None:
    async with pipeline() as w:
        (node,), links = w.nodes.remote, w.links
        node.load = pb.Load(links=[pb.Link(peer="west", available_bytes_per_s=1e9)])
        await until(lambda: links.views()[0].available_bytes_per_s)
        gate = node.script.prefill_gate = asyncio.Event()
        running = asyncio.create_task(w.complete("the quick brown fox jumps over the lazy dog " * 40))
        await until(lambda: node.running)
        assert links.views()[0].promised_bytes > 10_000
        gate.set()
        await running
        await until(lambda: not links.views()[0].promised_bytes)


@on_loop
async def test_the_longest_context_is_that_of_the_nodes_that_are_there() -> None:
    async with watched(decode=2) as w:
        clusters, node = w.clusters, w.nodes.decode[1]
        node.max_model_len = 100
        node.become(pb.NODE_STATE_READY)
        await until(lambda: clusters.served and clusters.served.max_model_len == 100)
        await node.stop_agent()
        await until(lambda: clusters.served and clusters.served.max_model_len == 4096)
        await node.start_agent(node.agent_address)
        await until(lambda: clusters.served and clusters.served.max_model_len == 100)
        node.max_model_len = 8192
        node.become(pb.NODE_STATE_READY)
        await until(lambda: clusters.served and clusters.served.max_model_len == 4096)


@on_loop
async def test_a_watch_that_fails_in_a_way_nobody_thought_of_is_counted_and_begun_again() -> None:
    async with watched(decode=1) as w:
        clusters, node = w.clusters, w.nodes.decode[0]
        with_bad_layout = pb.NodeEvent(description=node.description())
        with_bad_layout.description.layout_json = "[" * 100_000  # json: RecursionError, which is no ValueError
        with_bad_layout.description.layout_fingerprint = "another"
        node.tell(with_bad_layout)
        await until(lambda: w.errors == ["watch"])
        await until(lambda: states(clusters)["d0"] == "ready")


@on_loop
async def test_a_queue_that_one_sender_sees_is_the_lines() -> None:
    async with watched(remote=2) as w:
        links = ClusterLinks(w.clusters.nodes, time.monotonic)
        for node, rtt_s in zip(w.nodes.remote, (0.04, 0.2), strict=True):
            link = pb.Link(
                peer="west", available_bytes_per_s=1e9, rtt_s=rtt_s, min_rtt_s=0.04, congested=rtt_s > 0.08,
                inflated=rtt_s > 0.08, estimate_error=rtt_s,
            )  # fmt: skip
            node.load = pb.Load(links=[link])
            node.tell(pb.NodeEvent(load=node.load))
        await until(lambda: links.views()[0].congested)
        (link_view,) = links.views()
        assert link_view.rtt_inflation == 5.0
        assert link_view.available_bytes_per_s == 1e9  # an idle line, seen by two, is one line
        assert link_view.estimate_error == 0.2


@on_memory_loop
async def test_prompts_that_come_at_once_are_spread_over_equal_nodes() -> None:
    async with pipeline(remote=0, local=2, decode=1) as w:
        gates = [asyncio.Event() for _ in w.nodes.local]
        for node, gate in zip(w.nodes.local, gates, strict=True):
            node.script.prefill_gate = gate
        w.nodes.decode[0].script.reserve_gate = reserving = (
            asyncio.Event()
        )  # all are routed before anything is reserved
        prompts = [asyncio.create_task(w.complete(f"{i} {PROMPT}")) for i in range(12)]
        await until(lambda: len(w.nodes.decode[0].open_reservations) == 12)
        reserving.set()
        for gate in gates:
            gate.set()
        assert [(await each).status for each in prompts] == [200] * 12
        assert [len(node.bodies) for node in w.nodes.local] == [6, 6]
        await w.idle()
        assert [(node.pending_requests, node.pending_tokens) for node in w.clusters.nodes] == [(0, 0)] * 3


@on_memory_loop
async def test_work_under_way_counts_before_the_node_reports_it() -> None:
    async with pipeline(decode=2) as w:
        for node in w.nodes.decode:
            node.script.word_interval_s = 0.2
        await asyncio.gather(*(w.complete(PROMPT, stream=True) for _ in range(4)))
        assert [len(node.bodies) for node in w.nodes.decode] == [2, 2]


@on_loop
async def test_a_decode_node_without_memory_for_a_prompt_is_passed_over_while_another_has_some() -> None:
    async with deciding(decode=2) as d:
        full, roomy = d.nodes.decode
        for node, tokens in ((full, 16), (roomy, 1 << 20)):
            room = pb.Room(pages_total=1 << 20, free_tokens=tokens, tokens=tokens)
            await d.reports(node, pb.Load(room=room))
        assert [d.route(PROMPT).decode_node for _ in range(3)] == ["d1"] * 3
        await d.reports(roomy, full.load)
        assert d.route(PROMPT).decode_node in ("d0", "d1")  # no node has room: one is asked all the same


@on_loop
async def test_a_node_has_no_more_slots_than_it_says() -> None:
    async with watched(decode=1) as w:
        node = w.nodes.decode[0]
        node.load = pb.Load(slots=3, steps=[pb.StepTime(batch=2, seconds=0.5), pb.StepTime(batch=1, seconds=-1.0)])
        node.tell(pb.NodeEvent(load=node.load))
        known = next(each for each in w.clusters.nodes if each.role == "decode")
        await until(lambda: known.load.slots == 3)
        seen = known.view(NOTHING, 16, 0.0)
        assert (seen.max_running, seen.steps) == (3, ((2.0, 0.5),))
        assert known.view(NOTHING, 2, 0.0).max_running == 2


def test_the_salt_separates_tenants_and_models() -> None:
    other = ModelLayout("other", "float32", 16, LAYOUT.groups)
    assert salt_of(LAYOUT) == salt_of(LAYOUT)
    assert salt_of(LAYOUT) != salt_of(other)


ROTATED = NameSecrets.of(f"{'a1' * 32}\nnone")


def test_the_salt_is_the_first_secrets_and_the_earlier_one_the_seconds() -> None:
    hashing = hashing_by(ROTATED, LAYOUT)
    assert hashing.salt == salt_of(LAYOUT, ROTATED) != salt_of(LAYOUT)
    assert hashing.earlier == hashing_by(NameSecrets(), LAYOUT)
