"""Two nodes without engines: what an engine would do is done by hand, byte by byte."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from hybrid_cache.cache.reservation import Reservation
from hybrid_cache.hashing.block_hash import block_hashes, tokens_digest
from hybrid_cache.layout.layout import KVCacheGroup, ModelLayout
from hybrid_cache.layout.spec import FullAttention, LinearState, SlidingWindow
from node.config import NodeConfig
from node.control.broadcast import Broadcast
from node.control.holders import ReservationHolders
from node.kvcache.arena import Arena, arena_directory, arena_path
from node.kvcache.pages import ArenaPages
from node.transfer.incoming import IncomingTransfers
from node.transfer.job_replies import Reply
from node.transfer.listener import PeerListener
from node.transfer.loans import EngineLoans
from node.transfer.reach import PeerReach
from pd_cluster.landings import DecodeLandings
from pd_cluster.reservations import DecodePages, DecodeUse
from prfaas_cluster.egress_shares import EgressShares
from prfaas_cluster.legs import PrefillLegs, PrefillSender
from prfaas_cluster.links import EgressLinks
from transport.control import messages as m
from transport.control.proto import node_pb2 as pb
from transport.control.tickets import ticket_info
from transport.rdma.device import RdmaDevices

ContentOf = Callable[[int, int, Sequence[int]], bytes]
BLOCK = 8
LEASE_S = 600.0  # at most; a test whose lease is to end asks for less
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
        self.reach = PeerReach(config.cluster, use_shm=use_shm, rdma=rdma)
        self.listener = PeerListener(config, self.reach)
        self.egress = EgressLinks(config, self.reach)
        self.shares = EgressShares(self.egress.client, time.monotonic)
        self.listener.start()
        self.arena = Arena(arena_path(arena_directory(tmp_path), config.node_id), config.cache_bytes)
        self.layout = layout
        self.content_of = content_of or self._content_of
        self.pages = pages(layout, self.arena, config, Broadcast(), clock)
        self.reach.open_memory(self.pages.memory())
        self.coding = config.codings()
        self.legs = PrefillLegs(PrefillSender(self.pages, self.egress, self.coding), clock, lambda: None)
        self.loans = EngineLoans(self.pages, self.legs, room_timeout_s, clock)
        self.holders = ReservationHolders(clock, grace_s=0.0)
        self.incoming = IncomingTransfers(self.pages, self.listener, self.coding, LEASE_S, clock, self.holders)
        self.landings = DecodeLandings(DecodePages(self.incoming))
        self.inbox: asyncio.Queue[m.AgentMessage] = asyncio.Queue()

    async def heard(self) -> m.AgentMessage:
        """The next message to the engine."""
        async with asyncio.timeout(30.0):
            message = await self.inbox.get()
        await turns_of_the_loop(2)  # the task that has answered ends
        return message

    def sends_nothing(self) -> bool:
        """Whether no job and no push holds pages."""
        return self.loans.is_idle() and self.legs.is_idle()

    async def close(self) -> None:
        for end in (self.egress, self.listener, self.reach):
            await asyncio.to_thread(end.close)
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
        self.loans.begin(message, self, reply or self.inbox.put_nowait)

    def compute(self, pages: m.JobPages, tokens: Sequence[int], upto: int | None = None) -> None:
        """Writes what the 'model' makes of `tokens` and says so, layer by layer."""
        stop = pages.num_tokens if upto is None else upto
        for group, entry in enumerate(self.layout.groups):
            for index, layer in enumerate(entry.layers):
                if group in self.layout.state_groups:
                    for length in [n for n in pages.states[group] if pages.cached_tokens < n <= stop]:
                        self._write(group, index, pages.states[group][length], tokens[:length])
                        self.loans.state_done(
                            m.StateDone(job=pages.job, group=group, layer=layer, num_tokens=length), self
                        )
                    continue
                for block in range(pages.cached_tokens // BLOCK, -(-stop // BLOCK)):
                    if pages.blocks[group][block]:
                        self._write(group, index, pages.blocks[group][block], tokens[: min(stop, (block + 1) * BLOCK)])
                self.loans.layer_done(m.LayerDone(job=pages.job, group=group, layer=layer, num_tokens=stop), self)
        if stop == pages.num_tokens:
            self.loans.prefill_done(m.PrefillDone(job=pages.job, num_tokens=stop), self)

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
        transfer_id, secret, reservation = self.reserve_pages(request)
        return ticket_info(
            pb.Ticket(
                transfer_id=transfer_id,
                secret=secret,
                num_tokens=n,
                have_tokens=reservation.cached_tokens,
                tokens_digest=request.tokens_digest,
                endpoints=self.listener.endpoints(),
                layout_fingerprint=self.layout.fingerprint,
                cluster="c",
            )
        )

    def reserve_pages(self, request: pb.ReserveRequest) -> tuple[str, bytes, Reservation]:
        """At once, for a prefix or for a decode, as the request says."""
        return self.incoming.reserve(request, None if request.prefix_only else DecodeUse(self.coding))

    async def reserve_settled(self, request: pb.ReserveRequest) -> tuple[str, bytes, Reservation]:
        """As the node's control service does."""
        if request.prefix_only:
            return await self.incoming.reserve_settled(request)
        return await self.landings.reserve(request)

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
        self.loans.end(message, self)
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
            await until(lambda node=node: node.sends_nothing() and node.incoming.is_idle())
            report = node.pages.report()
            assert (report.reservations, report.pages_transfer, report.pages_locked) == (0, 0, 0)
    finally:
        await prefill.close()
        await decode.close()


TOKENS = list(range(100, 161))


async def lent(node: HandNode, job: str, tokens: list[int], ticket: m.TicketInfo | None = None) -> m.JobPages:
    """Pages for a job of the node's engine."""
    node.begin(job, tokens, len(tokens) - 1, ticket)
    pages = await node.heard()
    assert isinstance(pages, m.JobPages), pages
    return pages


async def refusal(node: HandNode) -> str:
    """Why the node refuses what its engine asked for."""
    answer = await node.heard()
    assert isinstance(answer, m.Refused), answer
    return answer.reason


async def cache(node: HandNode, tokens: list[int]) -> list[bytes]:
    """Makes a prefix of whole blocks cached; returns its hashes."""
    node.begin("warm", tokens, len(tokens))
    pages = await node.heard()
    assert isinstance(pages, m.JobPages)
    node.compute(pages, tokens)
    node.end("warm")
    return block_hashes(tokens, BLOCK, b"")


async def landed(prefill: HandNode, decode: HandNode, **options: object) -> m.TicketInfo:
    """A reservation that is complete."""
    ticket = decode.reserve(TOKENS, **options)  # type: ignore[arg-type]
    prefill.compute(await lent(prefill, "job", TOKENS, ticket), TOKENS)
    delivered = await prefill.heard()
    assert isinstance(delivered, m.Delivered)
    assert delivered.ok
    prefill.end("job")
    await decode.incoming.entries[ticket.transfer_id].landed
    return ticket


async def hand_over(prefill: HandNode, decode: HandNode, tokens: list[int]) -> tuple[m.JobPages, m.Delivered]:
    """One request from ticket to decode; returns the prefill's pages and how it was delivered."""
    ticket = decode.reserve(tokens)
    pages = await lent(prefill, "job", tokens, ticket)
    prefill.compute(pages, tokens)
    delivered = await prefill.heard()
    assert isinstance(delivered, m.Delivered) and delivered.ok, delivered  # noqa: PT018
    landed = await decode.claim(ticket, tokens)
    assert isinstance(landed, m.JobPages), landed
    decode.check(landed, tokens)
    prefill.end("job")
    decode.end("claim", loaded=True)
    return pages, delivered


async def turns_of_the_loop(turns: int = 20) -> None:
    """Whatever needs no other thread and no time has happened after this."""
    for _ in range(turns):
        await asyncio.sleep(0)


async def until(condition: object, timeout_s: float = 30.0) -> None:
    """Waits for other threads' effects to reach the loop."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # type: ignore[operator]  # noqa: ASYNC110 threads have no Event of ours
            await asyncio.sleep(0.005)
