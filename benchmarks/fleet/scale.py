"""What a gateway of a large fleet costs: `python -m benchmarks.fleet.scale [--json] [--plot FILE] [--sizes 64/4 1000/20]`.

Nodes are simulated, the gateway's code is its own: registry, prefix index, routing, placement, admission. For each size
(nodes/clusters) there is

    decision   CPU of one decision about a prompt of 131,072 tokens, median and P90; other prompts each time
    live       the same while nodes report: before each decision as many have done so as do in a hundredth of a second
    index      bytes that the prefix index says it takes, and by how much the process grew
    events     bytes per second that a region's nodes send the gateways of one other region: load reports four times a
               second to each gateway, and names of blocks that are cached and evicted
    lost       a region's connections end: seconds until no decision sees one of its nodes, at each of `--views` gateways

Half of the clusters decode; nodes of the others report a link to each of them. Gateways are spread over all regions.
Where a line is cut without a word, SILENCE_S of silence comes before what `lost` says. Ten million requests are not
decided: their cost is that of the sample, times their number, and is called extrapolated.
"""

import argparse
import asyncio
import json
import math
import os
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

from benchmarks.fleet.regions import LosableAgent, RegionNode, blocks_bytes, cached_of, nodes_of, report_bytes, said_of
from benchmarks.gateway.decision import ARMS, PROMPT_TOKENS, cpu_us, decide, prompts_of, request_of, teach
from gateway.admission.queue import WaitingLine
from gateway.admission.slo import SloGate
from gateway.cluster.agent_values import NodeLoad
from gateway.cluster.links import ClusterLinks
from gateway.cluster.registry import LOAD_INTERVAL_S, SILENCE_S, Clusters
from gateway.config.gateway import GatewayConfig, NodeAddress
from gateway.routing.router import Router
from gateway.tasks import TaskSet
from planner.decisions.estimates.decoding import LearnedSteps
from planner.decisions.estimates.durations import LearnedCost

SIZES: Final = ("64/4", "250/10", "500/20", "1000/20")
ARM: Final = next(arm for arm in ARMS if arm.name == "hybrid, blocks of 64, few")
EXTRAPOLATED: Final = 10_000_000
REQUESTS_PER_S: Final = 0.25  # of a node
NEW_TOKENS: Final = 16_384  # of a prompt that are computed, and cached
GATEWAYS: Final = 100
DECISIONS_PER_S: Final = 100.0  # of one gateway: so many reports come in between two of them
WAIT_S: Final = 600.0


@dataclass(frozen=True, slots=True)
class ScaleResult:
    """One size. Bytes per second are those of a pair of regions, in one direction."""

    nodes: int
    clusters: int
    decision_us: float
    decision_p90_us: float
    live_us: float
    live_p90_us: float
    extrapolated_cpu_h: float  # of live decisions
    indexed_blocks: int
    index_bytes: int
    grown_bytes: int
    load_bytes_per_s: float
    blocks_bytes_per_s: float
    lost_nodes: int
    views: int
    lost_s: float
    lost_cpu_s: float
    bytes_per_view: float


class GatewayView:
    """What one gateway knows of the fleet, and decides by."""

    def __init__(self, agents: Sequence[LosableAgent]) -> None:
        config = GatewayConfig(tokenizer_dir=Path(), nodes=tuple(NodeAddress(agent=agent.address) for agent in agents))
        self.clusters = Clusters(agents, time.monotonic, tasks=TaskSet(lambda work: None))
        self.steps = LearnedSteps()
        self.cost = LearnedCost(steps=self.steps)
        self.links = ClusterLinks(self.clusters.nodes, time.monotonic)
        self.router = Router(config, self.clusters, self.links, self.cost, time.monotonic)
        self.gate = SloGate(config, self.clusters, self.steps, time.monotonic)
        self.line = WaitingLine(time.monotonic, limit=256, patience_s=30.0)

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
    prompts = prompts_of(ARM, arguments.prompts, rng)
    before = resident_bytes()
    filler = max(0, arguments.blocks - sum(map(len, prompts))) // nodes
    events = [
        [*said_of(ARM, node, decodes, rng), *cached_of(ARM, node, nodes, prompts, filler, rng)] for node in members
    ]
    view = GatewayView(agents_of(events, asyncio.Event()))
    await view.start()
    events.clear()
    try:
        teach(view.cost, view.steps, view.clusters, rng)
        took: list[float] = []
        live: list[float] = []
        reports = math.ceil(nodes / LOAD_INTERVAL_S / DECISIONS_PER_S)
        for number in range(2 * arguments.rounds * len(prompts)):
            is_live = number % 2 == 1
            for node in rng.sample(view.clusters.nodes, reports if is_live else 0):
                node.reported(another_report(node.load, rng), time.monotonic())
            request = request_of(prompts[number // 2 % len(prompts)], view.clusters, number)
            if not is_live:
                view.links.views()  # what the reports before have changed is not of this decision
            spent = cpu_us(partial(decide, view.line, view.router, view.gate, request))
            (live if is_live else took).append(spent)
        index = view.clusters.index
        assert index is not None
        indexed, index_bytes, grown = len(index), index.memory_bytes, resident_bytes() - before
    finally:
        await view.clusters.close()
    lost_s, cpu_s, lost, view_bytes = await region_lost(members, decodes, arguments.views, rng)
    load, blocks = event_rates(members, decodes, clusters)
    return ScaleResult(
        nodes=nodes, clusters=clusters, decision_us=statistics.median(took),
        decision_p90_us=statistics.quantiles(took, n=10)[-1],
        live_us=statistics.median(live), live_p90_us=statistics.quantiles(live, n=10)[-1],
        extrapolated_cpu_h=statistics.fmean(live) * 1e-6 * EXTRAPOLATED / 3600.0, indexed_blocks=indexed,
        index_bytes=index_bytes, grown_bytes=grown, load_bytes_per_s=load, blocks_bytes_per_s=blocks, lost_nodes=lost,
        views=arguments.views, lost_s=lost_s, lost_cpu_s=cpu_s, bytes_per_view=view_bytes,
    )  # fmt: skip


async def region_lost(
    members: Sequence[RegionNode], decodes: Sequence[str], views: int, rng: random.Random
) -> tuple[float, float, int, float]:
    """Seconds until all views are without a region, CPU of all of them, its nodes, and the bytes of a view without blocks."""
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
    return took_s, cpu_s, sum(node.cluster == region for node in members), grown / views


def event_rates(members: Sequence[RegionNode], decodes: Sequence[str], clusters: int) -> tuple[float, float]:
    """Bytes per second of load reports and of blocks' names, from the mean region to the gateways of one other region."""
    gateways = GATEWAYS / clusters
    reports = sum(report_bytes(node, decodes) for node in members) / clusters / LOAD_INTERVAL_S
    stored_and_evicted = 2 * blocks_bytes(NEW_TOKENS // ARM.block_size) * REQUESTS_PER_S
    return gateways * reports, gateways * stored_and_evicted * len(members) / clusters


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

    figure, axes = pyplot.subplots(1, 3, figsize=(11, 3.2), layout="constrained")
    sizes = [each.nodes for each in results]
    axes[0].plot(sizes, [each.decision_us / 1e3 for each in results], "o-", color="#0072b2", label="nothing new")
    axes[0].plot(sizes, [each.live_us / 1e3 for each in results], "^--", color="#e69f00", label="while nodes report")
    axes[0].set_ylabel("CPU of a decision, ms")
    axes[1].plot(sizes, [each.load_bytes_per_s / 1e6 for each in results], "o-", color="#0072b2", label="load reports")
    axes[1].plot(
        sizes, [each.blocks_bytes_per_s / 1e6 for each in results], "^--", color="#e69f00", label="blocks' names"
    )
    axes[1].set_ylabel("MB/s, one region to another")
    axes[2].plot(
        sizes, [each.lost_s * 1e3 for each in results], "o-", color="#0072b2", label=f"{results[0].views} views"
    )
    axes[2].set_ylabel("ms until a lost region is gone")
    for each in axes:
        each.set_xlabel("nodes")
        each.set_ylim(bottom=0)
        each.grid(alpha=0.25)
        each.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=90)


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
    results = [asyncio.run(measure(nodes, clusters, arguments)) for nodes, clusters in sizes]
    if arguments.plot:
        plot(results, arguments.plot)
    if arguments.json:
        found = {"load_average": os.getloadavg()[0], "prompt_tokens": PROMPT_TOKENS, "silence_s": SILENCE_S}
        print(json.dumps({**found, "sizes": [asdict(each) for each in results]}, indent=2))
        return 0
    print(f"load average {os.getloadavg()[0]:.1f}; silence before a cut line is seen {SILENCE_S:.0f} s")
    for each in results:
        print(
            "  ".join(
                f"{name}={value:,.0f}" if value >= 10 else f"{name}={value:.3f}" for name, value in asdict(each).items()
            )
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
