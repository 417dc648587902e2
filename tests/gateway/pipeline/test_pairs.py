"""Several PrfaaS clusters and several PD clusters: each pair has a link of its own, and prompts go by it."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

import numpy as np
import pytest

from gateway.config.gateway import RoutingConfig
from hybrid_cache.layout.layout import ModelLayout
from planner.decisions.routing.policy import RoutingPolicy
from planner.decisions.views import ClusterKind
from planner.model.profile import DecodeProfile, KvSize, PrefillCurve
from planner.model.workload import Trace
from planner.simulator.scenario import Pool, Scenario, Wire
from planner.simulator.world import simulate
from tests.gateway.memory.pipeline import Pipelined, on_memory_loop, pipeline
from tests.gateway.worlds import until
from transport.control.proto import node_pb2 as pb

LONG = "the quick brown fox jumps over the lazy dog " * 40
FAST, SLOW = 1e9, 1e3
GOOD = {("east", "west"), ("north", "south")}


async def linked(w: Pipelined) -> None:
    """Each PrfaaS cluster has a good link to one PD cluster, and a bad one to the other."""
    for node in w.nodes.remote:
        node.load = pb.Load(
            links=[
                pb.Link(peer=to, available_bytes_per_s=FAST if (node.cluster, to) in GOOD else SLOW)
                for to in ("west", "south")
            ]
        )
        node.tell(pb.NodeEvent(load=node.load))
    await until(lambda: all(view.available_bytes_per_s for view in w.links.views()))


def simulated(home: str, rates: Mapping[str, float], layout: ModelLayout, prompts: list[int]) -> dict[str, int]:
    """The same clusters, links and prompts, one prompt after the other: by who computed and who answered them."""
    fixed = layout.kv_bytes(0)
    pools = [
        Pool(
            name=name, kind=ClusterKind.PRFAAS if far else ClusterKind.PD, num_prefill=1, num_decode=0 if far else 1,
            prefill=PrefillCurve(coefficients=(0.0, 1 / rates.get(name, 2_000.0), 0.0), valid_tokens=(0, 1e6)),
            decode=None if far else DecodeProfile(max_running=8, step_s=0.001),
        )
        for name, far in (("east", True), ("north", True), ("west", False), ("south", False))
    ]  # fmt: skip
    wires = [
        Wire(source=source, destination=to, capacity=[(0.0, FAST if (source, to) in GOOD else SLOW)])
        for source in ("east", "north")
        for to in ("west", "south")
    ]
    scenario = Scenario(
        pools=pools, wires=wires, homes={home: 1.0}, routing=RoutingPolicy(threshold_tokens=100),
        kv=KvSize(bytes_per_token=(layout.kv_bytes(1_000) - fixed) / 1_000, fixed_bytes=fixed),
    )  # fmt: skip
    size = len(prompts)
    trace = Trace(
        name="pairs", arrival_s=np.arange(size) * 60.0, prompt_tokens=np.array(prompts, dtype=np.float64),
        output_tokens=np.ones(size),
    )  # fmt: skip
    return dict(simulate(scenario, trace).ways)


async def agrees(w: Pipelined, home: str, rates: Mapping[str, float] = MappingProxyType({})) -> None:
    """The latest twelve prompts went as simulated ones do: nearly all of them by the one good way."""
    found: dict[str, int] = {}
    clusters = {node.node_id: node.cluster for node in w.nodes.nodes}
    records = (await w.records())[-12:]
    for record in records:
        way = f"{clusters[record['prefill_node']]} to {clusters[record['decode_node']]}"
        found[way] = found.get(way, 0) + 1
    served = w.clusters.served
    assert served is not None
    expected = simulated(home, rates, served.layout, [record["total"] for record in records])
    (way,) = [f"{source} to {to}" for source, to in GOOD if to == home]
    assert found[way] >= 11
    assert expected[way] >= 11


@pytest.mark.parametrize(("home", "by"), [("west", "r0"), ("south", "r1")])
@on_memory_loop
async def test_long_prompts_take_the_good_link_of_their_home(home: str, by: str) -> None:
    routing = RoutingConfig(prefill_tokens_per_s=2_000.0, home_cluster=home)
    names = {"remote_clusters": ("east", "north"), "clusters": ("west", "south")}
    async with pipeline(remote=2, local=2, decode=2, routing=routing, **names) as w:
        await linked(w)
        for i in range(12):
            answer = await w.complete(f"{i} {LONG}")
            assert answer.headers["x-prfaas-route"].startswith("remote;")
        assert {node.node_id: len(node.bodies) for node in w.nodes.remote}[by] >= 11
        records = await w.records()
        homes = {node.node_id: node.cluster for node in w.nodes.decode}
        assert {homes[record["decode_node"]] for record in records} == {home}
        await agrees(w, home)
        await w.settled()


@on_memory_loop
async def test_a_quick_cluster_behind_a_bad_link_is_no_quick_cluster() -> None:
    routing = RoutingConfig(prefill_tokens_per_s=2_000.0, home_cluster="west")
    names = {"remote_clusters": ("east", "north"), "clusters": ("west", "south")}
    async with pipeline(remote=2, local=2, decode=2, routing=routing, **names) as w:
        near, far = w.nodes.remote
        near.script.tokens_per_s, far.script.tokens_per_s = 2_000.0, 20_000.0
        await linked(w)
        for i in range(12):
            await w.complete(f"{i} {LONG}")
        assert len(near.bodies) >= 11
        await agrees(w, "west", {"north": 20_000.0})
        config = w.config
        w.configure(replace(config, routing=replace(routing, home_cluster="south")))
        for i in range(12):
            await w.complete(f"south {i} {LONG}")
        assert len(far.bodies) >= 11
        await agrees(w, "south", {"north": 20_000.0})
