"""Several PrfaaS clusters and several PD clusters: each pair has a link of its own, and prompts go by it."""

from dataclasses import replace

import pytest

from gateway.config import RoutingConfig
from tests.gateway.worlds import World, on_loop, until, world
from transport.control.proto import node_pb2 as pb

LONG = "the quick brown fox jumps over the lazy dog " * 40
FAST, SLOW = 1e9, 1e3
GOOD = {("east", "west"), ("north", "south")}


async def linked(w: World) -> None:
    """Each PrfaaS cluster has a good link to one PD cluster, and a bad one to the other."""
    for node in w.nodes.remote:
        node.load = pb.Load(
            links=[
                pb.Link(peer=to, available_bytes_per_s=FAST if (node.cluster, to) in GOOD else SLOW)
                for to in ("west", "south")
            ]
        )
        node.tell(pb.NodeEvent(load=node.load))
    await until(lambda: all(view.available_bytes_per_s for view in w.gateway.links.views()))


@pytest.mark.parametrize(("home", "by"), [("west", "r0"), ("south", "r1")])
@on_loop
async def test_long_prompts_take_the_good_link_of_their_home(home: str, by: str) -> None:
    routing = RoutingConfig(prefill_tokens_per_s=2_000.0, home_cluster=home)
    names = {"remote_clusters": ("east", "north"), "clusters": ("west", "south")}
    async with world(remote=2, local=2, decode=2, routing=routing, **names) as w:
        await linked(w)
        for i in range(12):
            answer = await w.complete(f"{i} {LONG}")
            assert answer.headers["x-prfaas-route"].startswith("remote;")
        assert {node.node_id: len(node.bodies) for node in w.nodes.remote}[by] >= 11
        records = await w.records()
        homes = {node.node_id: node.cluster for node in w.nodes.decode}
        assert {homes[record["decode_node"]] for record in records} == {home}
        await w.settled()


@on_loop
async def test_a_quick_cluster_behind_a_bad_link_is_no_quick_cluster() -> None:
    routing = RoutingConfig(prefill_tokens_per_s=2_000.0, home_cluster="west")
    names = {"remote_clusters": ("east", "north"), "clusters": ("west", "south")}
    async with world(remote=2, local=2, decode=2, routing=routing, **names) as w:
        near, far = w.nodes.remote
        near.script.tokens_per_s, far.script.tokens_per_s = 2_000.0, 20_000.0
        await linked(w)
        for i in range(12):
            await w.complete(f"{i} {LONG}")
        assert len(near.bodies) >= 11
        config = w.gateway.config
        w.gateway.reload(replace(config, routing=replace(routing, home_cluster="south")))
        for i in range(12):
            await w.complete(f"south {i} {LONG}")
        assert len(far.bodies) >= 11
