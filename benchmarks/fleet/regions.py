"""Nodes of many clusters as a gateway hears of them, and what their messages weigh on the wire."""

import asyncio
import random
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Final

from benchmarks.gateway.decision import DecisionArm, StillAgent, chain, held_blocks, layout_of, stored
from gateway.cluster.agent_values import LinkLoad, NodeEvent, NodeInfo, NodeLoad
from gateway.errors import AgentCallFailed
from hybrid_cache.cache.events import BlocksStored, Medium
from hybrid_cache.hashing.block_hash import HASH_BYTES
from hybrid_cache.index.digest import CacheDigest
from hybrid_cache.index.digests import DigestIndex
from hybrid_cache.layout.layout import ModelLayout
from node.control.summaries import messages
from transport.control.proto import node_pb2 as pb

PD_CLUSTER_EVERY: Final = 2  # of the clusters, every second one decodes; the others prefill for them
DECODE_NODE_EVERY: Final = 3  # of the nodes of a cluster that decodes
FEW_BLOCKS: Final = 4096
BLOCKS_PER_STATE: Final = 64
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


def names_bytes(blocks: int) -> int:
    """What is sent of a prompt by names: its blocks and a state are cached, and as much is evicted."""
    events = []
    for group, count in ((0, blocks), (1, 1)):
        hashes = bytes(count * HASH_BYTES)
        events.append(pb.NodeEvent(seq=SEQ, stored=pb.BlocksStored(group=group, hashes=hashes)))
        events.append(pb.NodeEvent(seq=SEQ, removed=pb.BlocksRemoved(group=group, hashes=hashes)))
    return sum(each.ByteSize() for each in events)


def digest_bytes(blocks: int, rng: random.Random) -> int:
    """The same by a digest, as a node's own code makes it."""
    digest, before = CacheDigest(), chain(rng, blocks)
    for group, hashes in ((0, before), (1, before[-1:])):
        digest.stored(group, hashes, Medium.MEMORY, is_sampled=group == 0)
    digest.take()
    for group, (new, old) in enumerate(((chain(rng, blocks), before), (chain(rng, 1), before[-1:]))):
        digest.stored(group, new, Medium.MEMORY, is_sampled=group == 0)
        digest.removed(group, old, Medium.MEMORY, is_sampled=group == 0)
    told = messages(digest.take())
    for each in told:
        each.seq = SEQ
    return sum(each.ByteSize() for each in told)


def digest_of(events: Sequence[NodeEvent]) -> list[NodeEvent]:
    """What a gateway far away is told instead."""
    digest, others = CacheDigest(), list[NodeEvent]()
    for event in events:
        if isinstance(event, BlocksStored):
            digest.stored(event.group, event.hashes, event.medium, is_sampled=event.group == 0)
        else:
            others.append(event)
    return [*others, *digest.whole()]


def wrong_hits(layout: ModelLayout, blocks: int, prompts: int, prompt_blocks: int, rng: random.Random) -> float:
    """Share of prompts that seem cached on a node with so many blocks by its digest, and are not."""
    digest, index = CacheDigest(), DigestIndex(layout)
    for _ in range(blocks // FEW_BLOCKS):
        digest.stored(0, chain(rng, FEW_BLOCKS), Medium.MEMORY, is_sampled=True)
        digest.stored(1, chain(rng, FEW_BLOCKS // BLOCKS_PER_STATE), Medium.MEMORY, is_sampled=False)
    for event in digest.take():
        index.apply("n", event)
    found = 0
    for _ in range(prompts):
        hit = index.match_all(chain(rng, prompt_blocks), prompt_blocks * layout.block_size)["n"].hit
        found += hit.num_tokens > 0 or hit.attention_tokens > 0
    return found / prompts
