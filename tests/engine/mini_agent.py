"""A small agent for tests: prefix cache and arena of one node; "transfers" are copies between two such nodes."""

import asyncio
import contextlib
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np

from hybrid_cache.cache.prefix_cache import PrefixCache
from hybrid_cache.cache.reservation import Purpose, Reservation
from hybrid_cache.errors import OutOfPages
from hybrid_cache.hashing.block_hash import block_hashes, split_hashes, tokens_digest
from hybrid_cache.layout.layout import ModelLayout
from hybrid_cache.layout.transfers import transfer_ranges
from transport.control import messages as m

SALT = b"tests"


@dataclass
class Landing:
    reservation: Reservation
    digest: bytes
    landed: asyncio.Event = field(default_factory=asyncio.Event)
    failed: str = ""


class MiniAgent:
    """Serves one engine over a Unix socket. `peers` are the agents its tickets may name."""

    def __init__(self, folder: Path, layout: ModelLayout, *, num_pages: int = 2048, chunk_tokens: int = 128) -> None:
        folder.mkdir(exist_ok=True)
        self.layout = layout
        self.socket = folder / "agent.sock"
        self.peers: dict[str, MiniAgent] = {}
        self.refuse: str = ""
        self.refuse_answers: str = ""
        self.deaf_to_answers = False
        self.lands_exact = True
        self.block_salts: tuple[bytes, ...] = ()
        self.ended: list[m.EndJob] = []
        self.heard: list[m.EngineMessage] = []
        self.landings: dict[str, Landing] = {}
        self.cache = PrefixCache(layout, num_pages)
        self._arena_path = folder / "arena"
        # "w+" makes a file of zeros without a write: it has up to half a gigabyte, and a test uses little.
        self.arena = np.memmap(self._arena_path, dtype=np.uint8, mode="w+", shape=num_pages * layout.page_bytes)
        self._num_pages = num_pages
        self._chunk_tokens = chunk_tokens
        self._jobs: dict[str, tuple[Reservation, m.TicketInfo | None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: list[asyncio.StreamWriter] = []
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        self._server = await asyncio.start_unix_server(self._serve, self.socket)

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._server is not None:
            self._server.close()
            for writer in self._writers:
                writer.close()
            await self._server.wait_closed()
        self.socket.unlink(missing_ok=True)

    def send(self, message: m.ControlMessage) -> None:
        self.send_bytes(m.encode(message))

    def send_bytes(self, data: bytes) -> None:
        """Whatever it is, to the engine that came last."""
        self._writers[-1].write(data)

    def has_heard(self, kind: type[m.EngineMessage]) -> bool:
        return any(isinstance(message, kind) for message in self.heard)

    @property
    def is_hung_up_on(self) -> bool:
        """Whether the engine that came last has ended its connection."""
        return self._writers[-1].is_closing()

    def release_jobs(self) -> None:
        """Gives back what an engine that is gone had."""
        while self._jobs:
            _, (reservation, _) = self._jobs.popitem()
            self.cache.release(reservation.request_id, 0.0)

    def reserve(self, transfer_id: str, prompt: list[int]) -> m.TicketInfo:
        """What a gateway asks of a decode node."""
        hashes = block_hashes(prompt[:-1], self.layout.block_size, SALT)
        reservation = self.cache.reserve(transfer_id, hashes, len(prompt) - 1, now=0.0, purpose=Purpose.LANDING)
        digest = tokens_digest(prompt, SALT)
        self.landings[transfer_id] = Landing(reservation, digest)
        return m.TicketInfo(
            transfer_id=transfer_id,
            secret=b"s",
            num_tokens=len(prompt) - 1,
            have_tokens=reservation.cached_tokens,
            tokens_digest=digest,
            endpoints=(),
            ttl_s=60.0,
            layout_fingerprint=self.layout.fingerprint,
            node_id="decode",
            cluster="tests",
        )

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        buffer = m.MessageBuffer()
        with contextlib.suppress(ConnectionError, asyncio.CancelledError):
            while data := await reader.read(1 << 16):
                for body in buffer.feed(data):
                    self._hear(m.decode_from_engine(body))
        writer.close()

    def _hear(self, message: m.EngineMessage) -> None:
        self.heard.append(message)
        match message:
            case m.Hello():
                self.send(
                    m.Welcome(
                        arena_path=str(self._arena_path),
                        page_bytes=self.layout.page_bytes,
                        num_pages=self._num_pages,
                        chunk_tokens=self._chunk_tokens,
                        block_salts=self.block_salts,
                    )
                )
            case m.BeginPrefill():
                self._begin(message)
            case m.ClaimLanding():
                task = asyncio.get_running_loop().create_task(self._claim(message))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            case m.PrefillDone():
                self._prefill_done(message)
            case m.EndJob():
                self.ended.append(message)
                self._end(message)

    def _begin(self, message: m.BeginPrefill) -> None:
        if message.computed and self.deaf_to_answers:
            return
        if refuse := (self.refuse_answers if message.computed else "") or self.refuse:
            self.send(m.Refused(job=message.job, reason=refuse))
            return
        hashes, num_tokens = split_hashes(message.hashes), message.num_tokens
        if message.cached_only:
            num_tokens = self.cache.match(hashes, num_tokens).num_tokens
            if not num_tokens:
                groups = self.layout.groups
                nothing = m.JobPages(
                    job=message.job,
                    num_tokens=0,
                    cached_tokens=0,
                    blocks=tuple(() for _ in groups),
                    states=tuple({} for _ in groups),
                )
                self.send(nothing)
                return
            hashes = hashes[: num_tokens // self.layout.block_size]
        purpose = Purpose.ANSWER if message.computed else Purpose.PREFILL
        try:
            reservation = self.cache.reserve(message.job, hashes, num_tokens, now=0.0, purpose=purpose)
        except OutOfPages:
            self.send(m.Refused(job=message.job, reason="no_capacity"))
            return
        self._jobs[message.job] = (reservation, message.ticket)
        self.send(self._pages(message.job, reservation))

    async def _claim(self, message: m.ClaimLanding) -> None:
        landing = self.landings.get(message.transfer_id)
        if landing is None or landing.digest != message.tokens_digest:
            self.send(m.Refused(job=message.job, reason="unknown_transfer" if landing is None else "digest_mismatch"))
            return
        await landing.landed.wait()
        if landing.failed:
            self.send(m.Refused(job=message.job, reason=landing.failed))
            return
        self._jobs[message.job] = (landing.reservation, None)
        self.send(msgspec.structs.replace(self._pages(message.job, landing.reservation), exact=self.lands_exact))

    def _prefill_done(self, message: m.PrefillDone) -> None:
        reservation, ticket = self._jobs[message.job]
        self.cache.commit(reservation.request_id, message.num_tokens, 0.0)
        if ticket is not None:
            sent = self.peers[ticket.node_id].receive(ticket, self, reservation)
            self.send(m.Delivered(job=message.job, ok=True, bytes_total=sent, delivered_s=1.0, link="shm"))

    def receive(self, ticket: m.TicketInfo, sender: "MiniAgent", source: Reservation) -> int:
        landing, sent = self.landings[ticket.transfer_id], 0
        for group, layer, block in transfer_ranges(self.layout, ticket.num_tokens, ticket.have_tokens):
            slabs = []
            for reservation in (source, landing.reservation):
                is_state = group in self.layout.state_groups
                pages = reservation.states[group][block] if is_state else reservation.blocks[group][block]
                slabs.append(self.layout.segments(group, layer, pages))
            data = np.concatenate([sender.arena[s.start : s.start + s.length] for s in slabs[0]])
            for segment in slabs[1]:
                self.arena[segment.start : segment.start + segment.length] = data[: segment.length]
                data = data[segment.length :]
            sent += self.layout.slab_bytes(group)
        self.cache.commit(ticket.transfer_id, ticket.num_tokens, 0.0)
        landing.landed.set()
        return sent

    def _end(self, message: m.EndJob) -> None:
        if message.job in self._jobs:
            reservation, _ = self._jobs.pop(message.job)
            self.cache.release(reservation.request_id, 0.0)

    def _pages(self, job: str, reservation: Reservation) -> m.JobPages:
        return m.JobPages(
            job=job,
            num_tokens=reservation.num_tokens,
            cached_tokens=reservation.cached_tokens,
            blocks=reservation.blocks,
            states=reservation.states,
        )
