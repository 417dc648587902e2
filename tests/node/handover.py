"""Two nodes without engines: what an engine would do is done by hand, byte by byte."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from hybrid_cache.hashing.block_hash import block_hashes, tokens_digest
from hybrid_cache.layout.layout import KVCacheGroup, ModelLayout
from hybrid_cache.layout.spec import FullAttention, LinearState, SlidingWindow
from node.config import NodeConfig
from node.control.broadcast import Broadcast
from node.control.holders import ReservationHolders
from node.kvcache.arena import Arena, arena_directory, arena_path
from node.kvcache.pages import ArenaPages
from node.transfer.incoming import Consumer
from node.transfer.job_replies import Reply
from node.transfer.links import PeerLinks
from node.transfer.loans import Producer
from pd_cluster.landings import DecodeLandings
from transport.control import messages as m
from transport.control.proto import node_pb2 as pb
from transport.control.tickets import ticket_info
from transport.rdma.device import RdmaDevices

ContentOf = Callable[[int, int, Sequence[int]], bytes]
BLOCK = 8
LAYOUT = ModelLayout(
    model="test",
    dtype="u8",
    block_size=BLOCK,
    groups=(
        KVCacheGroup(FullAttention(bytes_per_token=24, k_bytes_per_token=16), (2, 5)),
        KVCacheGroup(SlidingWindow(window=12, bytes_per_token=16, k_bytes_per_token=8), (1, 4)),
        KVCacheGroup(LinearState(bytes_per_snapshot=300), (0, 3)),
    ),
)


def run(scenario: Coroutine[None, None, None]) -> None:
    """Runs a scenario, and not for ever."""

    async def bounded() -> None:
        async with asyncio.timeout(120.0):
            await scenario

    asyncio.run(bounded())


class HandNode:
    """A node whose engine is the test."""

    def __init__(
        self,
        name: str,
        tmp_path: Path,
        *,
        use_shm: bool = False,
        rdma: RdmaDevices | None = None,
        room_timeout_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
        layout: ModelLayout = LAYOUT,
        content_of: ContentOf | None = None,
        pages: type[ArenaPages] = ArenaPages,
        **changes: Any,
    ) -> None:
        values: dict[str, Any] = {
            "node_id": f"{name}-{time.monotonic_ns()}",
            "cluster": "c",
            "cluster_kind": "pd",
            "role": "decode",
            "model": "m",
            "run_dir": str(tmp_path),
            "cache_bytes": 1 << 20,
            "connections": 3,
        }
        self.config = config = NodeConfig(**(values | changes))
        self.links = PeerLinks(config, use_shm=use_shm, rdma=rdma)
        self.links.start()
        self.arena = Arena(arena_path(arena_directory(tmp_path), config.node_id), config.cache_bytes)
        self.layout = layout
        self.content_of = content_of or self._content_of
        self.pages = pages(layout, self.arena, config, Broadcast(), clock)
        self.links.open_memory(self.pages.memory())
        self.producer = Producer(self.pages, self.links, room_timeout_s, clock)
        self.holders = ReservationHolders(clock, grace_s=0.0)
        self.consumer = Consumer(self.pages, self.links, 0.5, clock, self.holders)
        self.landings = DecodeLandings(self.consumer)
        self.inbox: asyncio.Queue[m.AgentMessage] = asyncio.Queue()

    async def heard(self) -> m.AgentMessage:
        """The next message to the engine."""
        async with asyncio.timeout(30.0):
            message = await self.inbox.get()
        await turns_of_the_loop(2)  # the task that has answered ends
        return message

    async def close(self) -> None:
        await asyncio.to_thread(self.links.close)
        await asyncio.sleep(0)  # callbacks that the links' last threads left on the loop
        self.pages.cache.check_integrity()
        await self.pages.close()
        self.arena.close()

    # As an engine

    def begin(
        self,
        job: str,
        tokens: Sequence[int],
        num_tokens: int,
        ticket: m.TicketInfo | None = None,
        reply: Reply | None = None,
        tenant: str = "",
    ) -> None:
        message = m.BeginPrefill(
            job=job,
            request_id=job,
            hashes=b"".join(block_hashes(tokens[:num_tokens], BLOCK, b"")),
            num_tokens=num_tokens,
            tokens_digest=tokens_digest(tokens, b""),
            ticket=ticket,
            tenant=tenant,
        )
        self.producer.begin(message, self, reply or self.inbox.put_nowait)

    def compute(self, pages: m.JobPages, tokens: Sequence[int], upto: int | None = None) -> None:
        """Writes what the 'model' makes of `tokens` and says so, layer by layer."""
        stop = pages.num_tokens if upto is None else upto
        for group, entry in enumerate(self.layout.groups):
            for index, layer in enumerate(entry.layers):
                if group in self.layout.state_groups:
                    for length in [n for n in pages.states[group] if pages.cached_tokens < n <= stop]:
                        self._write(group, index, pages.states[group][length], tokens[:length])
                        self.producer.state_done(
                            m.StateDone(job=pages.job, group=group, layer=layer, num_tokens=length), self
                        )
                    continue
                for block in range(pages.cached_tokens // BLOCK, -(-stop // BLOCK)):
                    if pages.blocks[group][block]:
                        self._write(group, index, pages.blocks[group][block], tokens[: min(stop, (block + 1) * BLOCK)])
                self.producer.layer_done(m.LayerDone(job=pages.job, group=group, layer=layer, num_tokens=stop), self)
        if stop == pages.num_tokens:
            self.producer.prefill_done(m.PrefillDone(job=pages.job, num_tokens=stop), self)

    def _write(self, group: int, index: int, pages: Sequence[int], prefix: Sequence[int]) -> None:
        content = self.content_of(group, index, prefix)
        for segment in self.layout.segments(group, index, pages):
            self.pages.arena.view(segment.start, segment.length)[:] = content[: segment.length]
            content = content[segment.length :]

    def read(self, group: int, index: int, pages: Sequence[int]) -> bytes:
        segments = self.layout.segments(group, index, pages)
        return b"".join(bytes(self.pages.arena.view(s.start, s.length)) for s in segments)

    def check(self, pages: m.JobPages, tokens: Sequence[int]) -> None:
        """Everything a decode needs of `tokens[:num_tokens]` is in `pages`, bit by bit."""
        n, layout, content_of = pages.num_tokens, self.layout, self.content_of
        for group, entry in enumerate(layout.groups):
            for index in range(len(entry.layers)):
                if group in layout.state_groups:
                    assert self.read(group, index, pages.states[group][n]) == content_of(group, index, tokens[:n])
                    continue
                needed = layout.window_blocks(group, n) if group in layout.window_groups else range(-(-n // BLOCK))
                for block in needed:
                    prefix = tokens[: min(n, (block + 1) * BLOCK)]
                    assert self.read(group, index, pages.blocks[group][block]) == content_of(group, index, prefix)

    def _content_of(self, group: int, index: int, prefix: Sequence[int]) -> bytes:
        """A slab's bytes as a function of everything before it, so that a wrong block is a wrong byte."""
        seed = hash((group, index, tuple(prefix)))
        return bytes((seed >> (8 * (i % 7))) + i & 0xFF for i in range(self.layout.slab_bytes(group)))

    # As a gateway

    def reserve(self, tokens: Sequence[int], num_tokens: int | None = None, **options: object) -> m.TicketInfo:
        n = len(tokens) - 1 if num_tokens is None else num_tokens
        request = pb.ReserveRequest(
            request_id="r",
            num_tokens=n,
            block_hashes=b"".join(block_hashes(tokens[:n], BLOCK, b"")),
            tokens_digest=tokens_digest(tokens, b""),
            **options,  # type: ignore[arg-type]
        )
        transfer_id, secret, reservation = self.consumer.reserve(request)
        return ticket_info(
            pb.Ticket(
                transfer_id=transfer_id,
                secret=secret,
                num_tokens=n,
                have_tokens=reservation.cached_tokens,
                tokens_digest=request.tokens_digest,
                endpoints=self.links.endpoints(),
                layout_fingerprint=self.layout.fingerprint,
                cluster="c",
            )
        )

    async def claim(self, ticket: m.TicketInfo, tokens: Sequence[int], timeout_s: float = 30.0) -> m.AgentMessage:
        self.claim_as("claim", ticket, tokens, self.inbox.put_nowait, timeout_s)
        return await self.heard()

    def claim_as(
        self, job: str, ticket: m.TicketInfo, tokens: Sequence[int], reply: Reply, timeout_s: float = 30.0
    ) -> None:
        message = m.ClaimLanding(
            job=job, transfer_id=ticket.transfer_id, tokens_digest=tokens_digest(tokens, b""), timeout_s=timeout_s
        )
        self.landings.claim(message, self, reply)

    def end(self, job: str, *, loaded: bool = False) -> None:
        message = m.EndJob(job=job, loaded=loaded)
        self.producer.end(message, self)
        self.landings.end(message, self)


@asynccontextmanager
async def two_nodes(
    tmp_path: Path, *, use_shm: bool = False, **changes: Any
) -> AsyncIterator[tuple[HandNode, HandNode]]:
    """A prefill node and a decode node; at the end nothing may be held on either."""
    prefill, decode = (HandNode(name, tmp_path, use_shm=use_shm, **changes) for name in "pd")
    try:
        yield prefill, decode
        for node in (prefill, decode):
            await until(lambda node=node: node.producer.is_idle() and node.consumer.is_idle())
            report = node.pages.report()
            assert (report.reservations, report.pages_transfer, report.pages_locked) == (0, 0, 0)
    finally:
        await prefill.close()
        await decode.close()


async def turns_of_the_loop(turns: int = 20) -> None:
    """Whatever needs no other thread and no time has happened after this."""
    for _ in range(turns):
        await asyncio.sleep(0)


async def until(condition: object, timeout_s: float = 30.0) -> None:
    """Waits for other threads' effects to reach the loop."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # type: ignore[operator]  # noqa: ASYNC110 threads have no Event of ours
            await asyncio.sleep(0.005)
