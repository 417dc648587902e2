"""CPU of one decision: `python -m benchmarks.gateway.decision [--json] [--prompts N] [--rounds N] [--blocks N]`.

What a gateway does between a prompt's hashes and its booking, in the gateway's own code: a place in the line, views of
nodes and links, routing, placement, admission; what prefills and steps take has been learned of every node. There are a
prompt of 131,072 tokens, 64 nodes and an index of a million blocks. The nodes are 16 of a PrfaaS cluster, 32 that
prefill and 16 that decode at home. Every decision is about another prompt than the one before, whose hashes are fresh
objects: nothing lies in the processor's caches that would not lie there in a gateway. Medians over all prompts and
rounds; on a machine that is busy with other things the tenth percentile is nearer to what the code takes.

    few     a conversation: four nodes hold nearly all of it, the others its system prompt
    spread  every node holds another length of it, the worst there is
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from gateway.admission.queue import WaitingLine
from gateway.admission.slo import SloGate
from gateway.api.openai import Endpoint, parse
from gateway.cluster.agent_client import AgentClient
from gateway.cluster.agent_values import LinkLoad, NodeEvent, NodeInfo, NodeLoad
from gateway.cluster.links import ClusterLinks
from gateway.cluster.registry import Clusters
from gateway.config.gateway import GatewayConfig, NodeAddress
from gateway.prompt.prompt import Prompt
from gateway.request.request import Request, RequestProgress, Timeline
from gateway.routing.router import Router
from gateway.tasks import TaskSet
from hybrid_cache.cache.events import BlocksStored, Medium
from hybrid_cache.layout.layout import KVCacheGroup, ModelLayout
from hybrid_cache.layout.spec import FullAttention, LinearState
from planner.decisions.admission.classes import ServiceClass
from planner.decisions.estimates.decoding import LearnedSteps
from planner.decisions.estimates.durations import LearnedCost

PROMPT_TOKENS: Final = 131_072
NODES: Final = {"prfaas": 16, "prefill": 32, "decode": 16}
SYSTEM_TOKENS: Final = 4096
SEEN_PROMPTS: Final = 16  # of each node: what its prefills take is known
GROWN_TOKENS: Final = 2048  # a turn of a conversation: what is new of it
EVENT_BLOCKS: Final = 4096
PROMISED: Final = ServiceClass(name="interactive", ttft_s=600.0, tbt_s=0.1)


@dataclass(frozen=True, slots=True)
class DecisionArm:
    """A kind of model and cache, and how much of a prompt each node holds."""

    name: str
    block_size: int
    hybrid: bool
    medium: Medium
    spread: bool


ARMS: Final = tuple(
    DecisionArm(f"{name}, {'spread' if spread else 'few'}", block_size, hybrid, medium, spread)
    for spread in (False, True)
    for name, block_size, hybrid, medium in (
        ("full attention, blocks of 16", 16, False, Medium.MEMORY),
        ("hybrid, blocks of 64", 64, True, Medium.MEMORY),
        ("hybrid, blocks of 16", 16, True, Medium.MEMORY),
        ("vLLM's own cache, blocks of 16", 16, False, Medium.ENGINE),
        ("vLLM's own cache, hybrid, blocks of 16", 16, True, Medium.ENGINE),
    )
)


class StillAgent(AgentClient):
    """Says once what it is and has, and nothing more."""

    def __init__(self, events: Sequence[NodeEvent], address: str) -> None:
        self.address = address
        self._events = events

    async def watch(self, load_interval_s: float, silence_s: float) -> AsyncGenerator[NodeEvent, None]:
        for event in self._events:
            yield event
        await asyncio.get_running_loop().create_future()

    async def close(self) -> None:
        pass


def layout_of(arm: DecisionArm) -> ModelLayout:
    full = KVCacheGroup(FullAttention(1152, 1152), (0,))
    state = KVCacheGroup(LinearState(4_000_000), (1,))
    return ModelLayout("speed", "bfloat16", arm.block_size, (full, state) if arm.hybrid else (full,))


def chain(rng: random.Random, blocks: int) -> list[bytes]:
    data = rng.randbytes(32 * blocks)
    return [data[at : at + 32] for at in range(0, len(data), 32)]


def prompts_of(arm: DecisionArm, count: int, rng: random.Random) -> list[list[bytes]]:
    """Conversations that share a system prompt; the last token of a prompt is in no block."""
    system = chain(rng, SYSTEM_TOKENS // arm.block_size)
    rest = (PROMPT_TOKENS - 1) // arm.block_size - len(system)
    return [system + chain(rng, rest) for _ in range(count)]


def held_blocks(arm: DecisionArm, node: int, prompt: int, num_nodes: int, rng: random.Random) -> int:
    """How many leading blocks of a prompt a node holds."""
    longest = (PROMPT_TOKENS - GROWN_TOKENS) // arm.block_size
    if arm.spread:
        return rng.randrange(longest)
    if (node + 7 * prompt) % (num_nodes // 4) == 0:
        return longest - (node + prompt) % 4 * (GROWN_TOKENS // arm.block_size)
    return SYSTEM_TOKENS // arm.block_size


def stored(group: int, hashes: Sequence[bytes], medium: Medium) -> Iterator[BlocksStored]:
    for at in range(0, len(hashes), EVENT_BLOCKS):
        yield BlocksStored(group, tuple(hashes[at : at + EVENT_BLOCKS]), medium)


def node_events(
    arm: DecisionArm, prompts: Sequence[Sequence[bytes]], filler: int, rng: random.Random
) -> list[list[NodeEvent]]:
    """Each node's report: its prompts with a state at the end of the part it holds, and blocks of other prompts."""
    layout = layout_of(arm)
    roles = [role for role, count in NODES.items() for _ in range(count)]
    link = LinkLoad(
        peer="home", available_bytes_per_s=1.25e10, utilisation=0.2, retransmit_ratio=0.0, rtt_s=0.02, min_rtt_s=0.02,
        congested=False, queued_bytes=10_000_000, estimate_error=0.1,
    )  # fmt: skip
    found: list[list[NodeEvent]] = []
    for number, role in enumerate(roles):
        is_remote = role == "prfaas"
        info = NodeInfo(
            node_id=f"{role}-{number}", cluster="east" if is_remote else "home", cluster_kind="prfaas" if is_remote else "pd",
            role="decode" if role == "decode" else "prefill", state="ready", engine_url="", model_id="speed",
            layout_json=layout.to_json(), layout_fingerprint=layout.fingerprint, max_model_len=1 << 20, boot_id="b",
        )  # fmt: skip
        load = NodeLoad(
            running=rng.randrange(12), queued_tokens=rng.randrange(30_000), links=(link,) if is_remote else ()
        )
        events: list[NodeEvent] = [info, load]
        for index, hashes in enumerate(prompts):
            blocks = held_blocks(arm, number, index, len(roles), rng)
            held = hashes[:blocks]
            events += stored(0, held, arm.medium)
            if arm.medium is Medium.ENGINE:  # what an engine has computed, its agent has a part of
                events += stored(0, held[: blocks // 2], Medium.MEMORY)
            if arm.hybrid and held:
                marks = {blocks, blocks // 2, SYSTEM_TOKENS // arm.block_size} & set(range(1, blocks + 1))
                events += stored(1, [hashes[mark - 1] for mark in marks], arm.medium)
                events += stored(1, held[blocks // 2 - 1 : blocks // 2], Medium.MEMORY)
        events += stored(0, chain(rng, filler // len(roles)), arm.medium)
        if arm.hybrid:
            events += stored(1, chain(rng, filler // len(roles) // 64), arm.medium)
        found.append(events)
    return found


def request_of(hashes: Sequence[bytes], clusters: Clusters, number: int) -> Request:
    assert clusters.served is not None
    prompt = Prompt(PROMPT_TOKENS, [bytes(bytearray(each)) for each in hashes], b"")
    call = parse(Endpoint.COMPLETIONS, b'{"model": "speed", "prompt": "p"}')
    return Request(
        id=f"r{number}",
        leg_id=f"r{number}",
        call=call,
        asked=prompt,
        offered=clusters.served,
        progress=RequestProgress(Timeline(time.monotonic())),
        service=PROMISED,
    )


async def measure(arm: DecisionArm, num_prompts: int, rounds: int, num_blocks: int) -> dict[str, float]:
    """Microseconds of CPU by part, the number of blocks indexed, and the longest decision."""
    rng = random.Random(0)
    prompts = prompts_of(arm, num_prompts, rng)
    events = node_events(arm, prompts, max(0, num_blocks - sum(map(len, prompts))), rng)
    agents = [StillAgent(each, f"127.0.0.1:{port}") for port, each in enumerate(events, 1)]
    config = GatewayConfig(tokenizer_dir=Path(), nodes=tuple(NodeAddress(agent=agent.address) for agent in agents))
    clusters = Clusters(agents, time.monotonic, tasks=TaskSet(lambda work: None))
    links = ClusterLinks(clusters.nodes, time.monotonic)
    steps = LearnedSteps()
    cost = LearnedCost(steps=steps)
    decider = Router(config, clusters, links, cost, time.monotonic)
    refusals = SloGate(config, clusters, steps, time.monotonic)
    line = WaitingLine(time.monotonic, limit=256, patience_s=30.0)
    clusters.start()
    try:
        await clusters.wait_for(lambda: all(node.connected for node in clusters.nodes), 600.0)
        for _ in range(100):  # the events behind the last description
            await asyncio.sleep(0)
        index = clusters.index
        assert index is not None
        teach(cost, steps, clusters, rng)
        took: dict[str, list[float]] = {"decision": [], "views": [], "links": []}
        for number in range(rounds * num_prompts):
            request = request_of(prompts[number % num_prompts], clusters, number)
            took["decision"].append(cpu_us(partial(decide, line, decider, refusals, request)))
            request = request_of(prompts[(number + num_prompts // 2) % num_prompts], clusters, number)
            took["views"].append(cpu_us(partial(clusters.views, request.prompt)))
            took["links"].append(cpu_us(links.views))
        medians = {f"{part}_us": statistics.median(each) for part, each in took.items()}
        tenths = statistics.quantiles(took["decision"], n=10)
        return {**medians, "decision_p10_us": tenths[0], "decision_p90_us": tenths[-1], "blocks": len(index)}
    finally:
        await clusters.close()


def teach(cost: LearnedCost, steps: LearnedSteps, clusters: Clusters, rng: random.Random) -> None:
    """Every node has shown what its prefills and decode steps take, each something else."""
    cost.as_of(time.monotonic())
    for node in clusters.nodes:
        slowness = rng.uniform(0.9, 1.1)
        for _ in range(SEEN_PROMPTS):
            computed, cached = rng.randrange(1, 64_000), rng.randrange(64_000)
            seconds = slowness * (0.05 + 1e-4 * computed + 1e-9 * computed * (2 * cached + computed))
            cost.observe(node.id, node.cluster, computed, cached, seconds)
            running = rng.randrange(1, 12)
            steps.observe(node.id, running, slowness * (0.02 + 0.003 * running))


def decide(line: WaitingLine, decider: Router, refusals: SloGate, request: Request) -> None:
    with line.place(request.service, request.progress.timeline.arrived):
        refusals.check(request, decider.route(request))


def cpu_us(action: Callable[[], object]) -> float:
    began = time.thread_time_ns()
    action()
    return (time.thread_time_ns() - began) / 1e3


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--json", action="store_true")
    arguments.add_argument("--prompts", type=int, default=24)
    arguments.add_argument("--rounds", type=int, default=8)
    arguments.add_argument("--blocks", type=int, default=1_000_000, help="in the index")
    args = arguments.parse_args()
    found = {arm.name: asyncio.run(measure(arm, args.prompts, args.rounds, args.blocks)) for arm in ARMS}
    if args.json:
        print(json.dumps({"load_average": os.getloadavg()[0], "arms": found}, indent=2))
        return
    print(f"load average {os.getloadavg()[0]:.1f}; µs of CPU, medians")
    for name, figures in found.items():
        print(f"{name:48}" + "  ".join(f"{part}={value:,.0f}" for part, value in figures.items()))


if __name__ == "__main__":
    main()
