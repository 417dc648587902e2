"""What a gateway of a large fleet costs: `python -m benchmarks.fleet.scale [--json] [--plot FILE] [--sizes 64/4 1000/20]`.

Nodes are simulated, the gateway's code is its own: registry, prefix index, routing, placement, admission. For each size
(nodes/clusters) there is

    decision   CPU of one decision about a prompt of 131,072 tokens, median and P90; other prompts each time
    live       the same while nodes report: before each decision as many have done so as do in a hundredth of a second
    index      bytes that indexes say they take
    events     bytes per second that a region's nodes send the gateways of one other region, by names and by summaries
    wrong      prompts that seem cached on a node of two million blocks by its summary, and are not
    lost       a region's connections end: seconds until no decision sees one of its nodes, at each of `--views` gateways

Decisions are those of a gateway that hears every block, and of one that is near two clusters and has summaries of the
others. Half of the clusters decode; nodes of the others report a link to each of them. Gateways are spread over all regions.
Where a line is cut without a word, SILENCE_S of silence comes before what `lost` says. Ten million requests are not
decided: their cost is that of the sample, times their number, and is called extrapolated.
"""

import argparse
import asyncio
import json
import logging
import math
import os
import random
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final

from benchmarks.fleet.regions import (
    LosableAgent,
    RegionNode,
    cached_of,
    digest_bytes,
    digest_of,
    names_bytes,
    nodes_of,
    report_bytes,
    said_of,
    wrong_hits,
)
from benchmarks.gateway.decision import ARMS, PROMPT_TOKENS, cpu_us, decide, layout_of, prompts_of, request_of, teach
from gateway.admission.queue import WaitingLine
from gateway.admission.slo import SloGate
from gateway.cluster.agent_values import NodeEvent, NodeLoad
from gateway.cluster.links import ClusterLinks
from gateway.cluster.registry import LOAD_INTERVAL_S, SILENCE_S, Clusters
from gateway.config.gateway import GatewayConfig, NodeAddress
from gateway.routing.router import Router
from gateway.tasks import TaskSet
from node.grpc_service import FAR_LOAD_INTERVAL_S
from planner.decisions.estimates.decoding import LearnedSteps
from planner.decisions.estimates.durations import LearnedCost

SIZES: Final = ("64/4", "250/10", "500/20", "1000/20")
ARM: Final = next(arm for arm in ARMS if arm.name == "hybrid, blocks of 64, few")
EXTRAPOLATED: Final = 10_000_000
REQUESTS_PER_S: Final = 0.25  # of a node
NEW_BLOCKS: Final = 16_384 // ARM.block_size  # of a prompt that are computed, and cached
NEAR: Final = ("c0", "c1")  # the region of the gateway that decides: one cluster that decodes, one that prefills
LARGE_NODE_BLOCKS: Final = 2_000_000
WRONG_PROMPTS: Final = 2000
GATEWAYS: Final = 100
DECISIONS_PER_S: Final = 100.0  # of one gateway: so many reports come in between two of them
WAIT_S: Final = 600.0


@dataclass(frozen=True, slots=True)
class DecisionResult:
    """Decisions of one gateway, and what it takes to know what they need."""

    median_us: float
    p90_us: float
    live_us: float
    live_p90_us: float
    extrapolated_cpu_h: float  # of live decisions
    index_bytes: int


@dataclass(frozen=True, slots=True)
class LostRegion:
    """A region whose connections end, as several gateways see it. Their CPU is that of one after the other."""

    nodes: int
    views: int
    seconds: float
    cpu_s: float
    bytes_per_view: float


@dataclass(frozen=True, slots=True)
class ScaleResult:
    """One size. Bytes per second are those of a pair of regions, in one direction."""

    nodes: int
    clusters: int
    by_names: DecisionResult
    by_summaries: DecisionResult
    load_bytes_per_s: float
    names_bytes_per_s: float
    far_load_bytes_per_s: float
    digest_bytes_per_s: float
    wrong_hit_ratio: float
    lost: LostRegion


class GatewayView:
    """What one gateway knows of the fleet, and decides by."""

    def __init__(self, agents: Sequence[LosableAgent]) -> None:
        self.now = 0.0  # of a clock that goes on with decisions, however slow the machine is
        config = GatewayConfig(tokenizer_dir=Path(), nodes=tuple(NodeAddress(agent=agent.address) for agent in agents))
        self.clusters = Clusters(agents, self.clock, tasks=TaskSet(lambda work: None))
        self.steps = LearnedSteps()
        self.cost = LearnedCost(steps=self.steps)
        self.links = ClusterLinks(self.clusters.nodes, self.clock)
        self.router = Router(config, self.clusters, self.links, self.cost, self.clock)
        self.gate = SloGate(config, self.clusters, self.steps, self.clock)
        self.line = WaitingLine(self.clock, limit=256, patience_s=30.0)

    def clock(self) -> float:
        return self.now

    async def start(self) -> None:
        self.clusters.start()
        await self.clusters.wait_for(lambda: all(node.connected for node in self.clusters.nodes), WAIT_S)
        for _ in range(100):  # the events behind the last description
            await asyncio.sleep(0)

    def sees(self, cluster: str) -> bool:
        """Whether a decision could choose a node of this cluster."""
        return any(
            node.info is not None and node.info.cluster == cluster and node.connected for node in self.clusters.nodes
        )


async def measure(nodes: int, clusters: int, arguments: argparse.Namespace) -> ScaleResult:
    rng = random.Random(0)
    members = nodes_of(nodes, clusters)
    decodes = sorted({node.cluster for node in members if node.kind == "pd"})
    lost = await region_lost(
        members, decodes, arguments.views, rng
    )  # first: what a view takes shows in a small process
    prompts = prompts_of(ARM, arguments.prompts, rng)
    filler = max(0, arguments.blocks - sum(map(len, prompts))) // nodes
    events = [
        [*said_of(ARM, node, decodes, rng), *cached_of(ARM, node, nodes, prompts, filler, rng)] for node in members
    ]
    by_names = await decided(events, prompts, arguments, rng)
    for number, node in enumerate(members):
        if node.cluster not in NEAR:
            events[number] = digest_of(events[number])
    by_summaries = await decided(events, prompts, arguments, rng)
    events.clear()
    regions = RegionPair(members, decodes, clusters)
    return ScaleResult(
        nodes=nodes, clusters=clusters, by_names=by_names, by_summaries=by_summaries,
        load_bytes_per_s=regions.load(LOAD_INTERVAL_S), names_bytes_per_s=regions.blocks(names_bytes(NEW_BLOCKS)),
        far_load_bytes_per_s=regions.load(FAR_LOAD_INTERVAL_S),
        digest_bytes_per_s=regions.blocks(digest_bytes(NEW_BLOCKS, rng)),
        wrong_hit_ratio=wrong_hits(layout_of(ARM), LARGE_NODE_BLOCKS, WRONG_PROMPTS, len(prompts[0]), rng), lost=lost,
    )  # fmt: skip


async def decided(
    events: Sequence[Sequence[NodeEvent]], prompts: Sequence[Sequence[bytes]], arguments: argparse.Namespace,
    rng: random.Random,
) -> DecisionResult:  # fmt: skip
    """What decisions cost a gateway that has heard this."""
    view = GatewayView(agents_of(events, asyncio.Event()))
    await view.start()
    try:
        teach(view.cost, view.steps, view.clusters, rng)
        took: list[float] = []
        live: list[float] = []
        reports = math.ceil(len(events) / LOAD_INTERVAL_S / DECISIONS_PER_S)
        for number in range(2 * arguments.rounds * len(prompts)):
            is_live = number % 2 == 1
            view.now += is_live / DECISIONS_PER_S
            for node in rng.sample(view.clusters.nodes, reports if is_live else 0):
                node.reported(another_report(node.load, rng), view.now)
            request = request_of(prompts[number // 2 % len(prompts)], view.clusters, number)
            if not is_live:
                view.links.views()  # what the reports before have changed is not of this decision
            spent = cpu_us(partial(decide, view.line, view.router, view.gate, request))
            (live if is_live else took).append(spent)
        return DecisionResult(
            median_us=statistics.median(took), p90_us=statistics.quantiles(took, n=10)[-1],
            live_us=statistics.median(live), live_p90_us=statistics.quantiles(live, n=10)[-1],
            extrapolated_cpu_h=statistics.fmean(live) * 1e-6 * EXTRAPOLATED / 3600.0,
            index_bytes=view.clusters.indexes.memory_bytes,
        )  # fmt: skip
    finally:
        await view.clusters.close()


async def region_lost(
    members: Sequence[RegionNode], decodes: Sequence[str], views: int, rng: random.Random
) -> LostRegion:
    """Until all views are without a region; views hold no blocks."""
    region = members[-1].cluster
    said = [said_of(ARM, node, decodes, rng) for node in members]
    is_lost, never = asyncio.Event(), asyncio.Event()
    before = resident_bytes()
    gateways = [
        GatewayView([
            LosableAgent(events, f"127.0.0.1:{port}", is_lost if node.cluster == region else never)
            for port, (node, events) in enumerate(zip(members, said, strict=True), 1)
        ])
        for _ in range(views)
    ]  # fmt: skip
    try:
        for gateway in gateways:
            await gateway.start()
        grown = resident_bytes() - before
        began, cpu_began = time.monotonic(), time.thread_time()
        is_lost.set()
        while any(gateway.sees(region) for gateway in gateways):  # noqa: ASYNC110 each look counts
            await asyncio.sleep(0)
        took_s, cpu_s = time.monotonic() - began, time.thread_time() - cpu_began
    finally:
        for gateway in gateways:
            await gateway.clusters.close()
    nodes = sum(node.cluster == region for node in members)
    return LostRegion(nodes=nodes, views=views, seconds=took_s, cpu_s=cpu_s, bytes_per_view=grown / views)


@dataclass(frozen=True, slots=True)
class RegionPair:
    """The mean region, which tells the gateways of one other region how it is."""

    members: Sequence[RegionNode]
    decodes: Sequence[str]
    clusters: int

    def load(self, interval_s: float) -> float:
        """Bytes per second of load reports."""
        reports = sum(report_bytes(node, self.decodes) for node in self.members) / self.clusters / interval_s
        return GATEWAYS / self.clusters * reports

    def blocks(self, bytes_per_request: float) -> float:
        """The same of what is cached and evicted."""
        return GATEWAYS / self.clusters * bytes_per_request * REQUESTS_PER_S * len(self.members) / self.clusters


def agents_of(events: Sequence[Sequence], is_lost: asyncio.Event) -> list[LosableAgent]:  # type: ignore[type-arg]
    return [LosableAgent(each, f"127.0.0.1:{port}", is_lost) for port, each in enumerate(events, 1)]


def another_report(load: NodeLoad, rng: random.Random) -> NodeLoad:
    """The node has other queues, and its links other rates."""
    links = tuple(replace(link, utilisation=rng.uniform(0.0, 0.6)) for link in load.links)
    return replace(load, running=rng.randrange(12), queued_tokens=rng.randrange(30_000), links=links)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def plot(results: Sequence[ScaleResult], path: Path) -> None:
    """Writes the figure. Needs the extra `plots`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(12, 3.6), layout="constrained")
    sizes = [each.nodes for each in results]
    views = sorted({each.lost.views for each in results})
    curves = (
        (0, "by names", "o-", "#0072b2", [each.by_names.live_us / 1e3 for each in results]),
        (0, "by summaries", "^--", "#e69f00", [each.by_summaries.live_us / 1e3 for each in results]),
        (1, "names: blocks", "o-", "#0072b2", [each.names_bytes_per_s / 1e3 for each in results]),
        (1, "names: load", "s-", "#56b4e9", [each.load_bytes_per_s / 1e3 for each in results]),
        (1, "summaries: blocks", "^--", "#e69f00", [each.digest_bytes_per_s / 1e3 for each in results]),
        (1, "summaries: load", "v--", "#d55e00", [each.far_load_bytes_per_s / 1e3 for each in results]),
        (
            2,
            f"{' or '.join(map(str, views))} gateways' views",
            "o-",
            "#0072b2",
            [each.lost.seconds for each in results],
        ),
    )
    for number, label, style, colour, values in curves:
        axes[number].plot(sizes, values, style, color=colour, label=label)
    for each, what in zip(
        axes, ("CPU of a decision, ms", "kB/s, one region to another", "s until a lost region is gone"), strict=True
    ):
        each.set_ylabel(what)
        each.set_xlabel("nodes")
        each.grid(alpha=0.25)
        each.legend(frameon=False, fontsize=8, loc="lower left" if each is axes[1] else "upper left")
    axes[0].set_ylim(bottom=0)
    axes[1].set_yscale("log")
    axes[1].set_ylim(bottom=0.5)  # room for the legend
    axes[2].set_ylim(bottom=0)
    figure.savefig(path, dpi=90)


def run(nodes: int, clusters: int, arguments: argparse.Namespace) -> ScaleResult:
    """In a process of its own."""
    logging.disable(logging.WARNING)  # every node of a lost region would say so
    return asyncio.run(measure(nodes, clusters, arguments))


def flat(values: Mapping[str, Any], of: str = "") -> Iterator[str]:
    """Names and values, those of parts behind their names."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{name}.")
        else:
            yield f"{of}{name}={value:,.0f}" if value >= 10 else f"{of}{name}={value:.4f}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fleet.scale", description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--sizes", nargs="+", default=SIZES, metavar="NODES/CLUSTERS")
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--blocks", type=int, default=1_000_000, help="in the index, about")
    parser.add_argument("--views", type=int, default=GATEWAYS, help="gateways from which a region is lost")
    arguments = parser.parse_args()
    sizes = [tuple(map(int, each.split("/"))) for each in arguments.sizes]
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as alone:
        results = [alone.submit(run, nodes, clusters, arguments).result() for nodes, clusters in sizes]
    if arguments.plot:
        plot(results, arguments.plot)
    if arguments.json:
        found = {"load_average": os.getloadavg()[0], "prompt_tokens": PROMPT_TOKENS, "silence_s": SILENCE_S}
        print(json.dumps({**found, "sizes": [asdict(each) for each in results]}, indent=2))
        return 0
    print(f"load average {os.getloadavg()[0]:.1f}; silence before a cut line is seen {SILENCE_S:.0f} s")
    for each in results:
        print("  ".join(flat(asdict(each))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
