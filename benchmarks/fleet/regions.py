"""Nodes of many clusters as a gateway hears of them, and what their messages weigh on the wire."""

import asyncio
import random
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Final

from benchmarks.gateway.decision import DecisionArm, StillAgent, chain, held_blocks, layout_of, stored
from gateway.cluster.agent_values import LinkLoad, NodeEvent, NodeInfo, NodeLoad
from gateway.errors import AgentCallFailed
from hybrid_cache.hashing.block_hash import HASH_BYTES
from transport.control.proto import node_pb2 as pb

PD_CLUSTER_EVERY: Final = 2  # of the clusters, every second one decodes; the others prefill for them
DECODE_NODE_EVERY: Final = 3  # of the nodes of a cluster that decodes
SEQ: Final = 1 << 20  # of an event in the middle of a stream: numbers take the bytes that they take there


@dataclass(frozen=True, slots=True)
class RegionNode:
    """A node and where it is."""

    number: int
    cluster: str
    kind: str
    role: str


def nodes_of(nodes: int, clusters: int) -> list[RegionNode]:
    """Clusters in turn, one node after the other."""
    found = []
    for number in range(nodes):
        at, place = number % clusters, number // clusters
        is_pd = at % PD_CLUSTER_EVERY == 0
        role = "decode" if is_pd and place % DECODE_NODE_EVERY == 0 else "prefill"
        found.append(RegionNode(number, f"c{at}", "pd" if is_pd else "prfaas", role))
    return found


class LosableAgent(StillAgent):
    """Says what it has to say, until its region is lost."""

    def __init__(self, events: Sequence[NodeEvent], address: str, is_lost: asyncio.Event) -> None:
        super().__init__(events, address)
        self._is_lost = is_lost

    async def watch(self, load_interval_s: float, silence_s: float) -> AsyncGenerator[NodeEvent, None]:
        if not self._is_lost.is_set():
            for event in self._events:
                yield event
            await self._is_lost.wait()
        raise AgentCallFailed(self.address, "unreachable", "its region is lost")


def said_of(arm: DecisionArm, node: RegionNode, clusters: Sequence[str], rng: random.Random) -> list[NodeEvent]:
    """Who it is and how busy; a node that prefills for others has a link to each cluster that decodes."""
    layout = layout_of(arm)
    info = NodeInfo(
        node_id=f"{node.cluster}-{node.number}", cluster=node.cluster, cluster_kind=node.kind, role=node.role,
        state="ready", engine_url="", model_id="speed", layout_json=layout.to_json(),
        layout_fingerprint=layout.fingerprint, max_model_len=1 << 20, boot_id="b",
    )  # fmt: skip
    links = tuple(
        LinkLoad(
            peer=peer, available_bytes_per_s=rng.uniform(0.5, 2.0) * 1e10, utilisation=rng.uniform(0.0, 0.6),
            retransmit_ratio=0.0, rtt_s=0.02, min_rtt_s=0.02, congested=False, queued_bytes=10_000_000, estimate_error=0.1,
        )
        for peer in (clusters if node.kind == "prfaas" else ())
    )  # fmt: skip
    return [info, NodeLoad(running=rng.randrange(12), queued_tokens=rng.randrange(30_000), links=links)]


def cached_of(
    arm: DecisionArm, node: RegionNode, total: int, prompts: Sequence[Sequence[bytes]], filler: int, rng: random.Random
) -> list[NodeEvent]:
    """What it holds of the prompts, and blocks of others."""
    events: list[NodeEvent] = []
    for index, hashes in enumerate(prompts):
        blocks = held_blocks(arm, node.number, index, total, rng)
        events += stored(0, hashes[:blocks], arm.medium)
        if arm.hybrid and blocks:
            events += stored(1, [hashes[mark - 1] for mark in {blocks, max(1, blocks // 2)}], arm.medium)
    return [*events, *stored(0, chain(rng, filler), arm.medium)]


def report_bytes(node: RegionNode, clusters: Sequence[str]) -> int:
    """A node's report of its load, as it is sent: with links, step times and room as nodes that serve have them."""
    links = [
        pb.Link(
            peer=peer, available_bytes_per_s=1.1e10, goodput_bytes_per_s=9e9, utilisation=0.4, retransmit_ratio=0.001,
            rtt_s=0.02, min_rtt_s=0.019, queued_bytes=10_000_000, connections=8, bytes_total=1 << 45,
            retransmitted_bytes_total=1 << 30, budget_bytes_per_s=1.2e10, estimate_error=0.1,
            own_budget_bytes_per_s=1.2e10,
        )
        for peer in (clusters if node.kind == "prfaas" else ())
    ]  # fmt: skip
    steps = [pb.StepTime(batch=1 << at, seconds=0.02 + 0.003 * at) for at in range(6 if node.role == "decode" else 0)]
    load = pb.Load(
        running=9, waiting=2, queued_tokens=27_000, sending=3, egress_bytes_total=1 << 45, ingress_bytes_total=1 << 30,
        links=links, slots=64, steps=steps, clock_s=1e6,
        room=pb.Room(pages_total=1 << 16, pages_free=1 << 12, pages_evictable=1 << 14, free_tokens=1 << 18, tokens=1 << 20),
    )  # fmt: skip
    return int(pb.NodeEvent(seq=SEQ, load=load).ByteSize())


def blocks_bytes(blocks: int) -> int:
    """A message that so many blocks are cached; the same that they are not any more."""
    return int(pb.NodeEvent(seq=SEQ, stored=pb.BlocksStored(group=0, hashes=bytes(blocks * HASH_BYTES))).ByteSize())
