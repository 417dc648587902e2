"""One node of benchmarks.transport.sizes: an agent's parts without an engine, told what to do in JSON lines.

    {"reserve": n} -> {"ticket": ...}      {"begin": job, "ticket": ...} -> {"cached": n}
    {"compute": job, ...} -> {}                  {"delivered": job} -> {"ok": true, "taken_s": s, ...}
    {"claim": ...} -> {}                   {"clear": true} -> {}

With {"prompt": 1} it is another one, which shares no block with the first; 2 is a short one.
Every answer has what the call cost the loop: `pause_s`, the longest time in which nothing else could run; `turn_s`, the most
processor time of the loop's thread between two of its turns; `loop_s`, all of it but for the meter's own beats; `cpu_s`, that
of the process. An empty call costs what calls do that nothing is done for.
"""

import argparse
import asyncio
import json
import resource
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import uvloop

from benchmarks.lib.loop_meter import BEAT_S, LoopMeter
from hybrid_cache.hashing.block_hash import block_hashes, tokens_digest
from hybrid_cache.layout.layout import ModelLayout
from node.config import NodeConfig
from node.control.broadcast import Broadcast
from node.control.holders import ReservationHolders
from node.kvcache.arena import Arena, arena_directory, arena_path
from node.kvcache.eviction_steps import EVICT_BLOCKS
from node.kvcache.pages import ArenaPages
from node.process.interpreter import favour_the_loop
from node.transfer.incoming import IncomingTransfers
from node.transfer.listener import PeerListener
from node.transfer.loans import EngineLoans
from node.transfer.reach import PeerReach
from pd_cluster.landings import DecodeLandings
from pd_cluster.reservations import DecodePages
from prfaas_cluster.legs import PrefillLegs, PrefillSender
from prfaas_cluster.links import EgressLinks
from transport.control import messages as m
from transport.control.proto import node_pb2 as pb
from transport.control.tickets import ticket_info

WAIT_S: Final = 300.0
LEASE_S: Final = 600.0
SALT: Final = b"sizes"
WARM_BLOCKS: Final = 4  # of the prompt that opens the link
IDLE_S: Final = 0.25  # in which the meter learns what it costs itself


class NodeMeter:
    """What the loop and the process have spent since the last time."""

    def __init__(self) -> None:
        self.loop = LoopMeter()
        self._beat_s = 0.0  # of the loop's processor time
        self._loop_s, self._process_s = time.thread_time(), time.process_time()

    async def calibrate(self) -> None:
        """Learns what a beat of the meter costs while nothing else runs."""
        self.take()
        await asyncio.sleep(IDLE_S)
        beats = max(1, self.loop.beats)
        self._beat_s = self.take()["loop_s"] / beats

    def take(self) -> dict[str, float]:
        """Since the last time."""
        loop_s, process_s = time.thread_time(), time.process_time()
        taken = {
            "pause_s": self.loop.pause_s,
            "turn_s": self.loop.turn_s,
            "loop_s": max(0.0, loop_s - self._loop_s - self.loop.beats * self._beat_s),
            "cpu_s": process_s - self._process_s,
            "peak_bytes": _own_bytes(),
        }
        self.loop.reset()
        self._loop_s, self._process_s = loop_s, process_s
        return taken


def _own_bytes() -> int:
    """The most memory so far, without the shared arena: that is given."""
    shared = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssShmem"))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - int(shared.split()[1]) * 1024


class SizedNode:
    """An agent's parts, put together as the agent does."""

    def __init__(self, name: str, layout: ModelLayout, cache_bytes: int, folder: Path) -> None:
        config = NodeConfig(
            node_id=f"{name}-{time.monotonic_ns()}",
            cluster="c",
            cluster_kind="pd",
            role="decode",
            model="m",
            run_dir=str(folder),
            cache_bytes=cache_bytes,
        )
        reach, clock = PeerReach(config.cluster, use_shm=False), time.monotonic
        self.layout = layout
        self.listener = PeerListener(config, reach)
        self.egress = EgressLinks(config, reach)
        self.listener.start()
        self.arena = Arena(arena_path(arena_directory(folder), config.node_id), cache_bytes)
        self.pages = ArenaPages(layout, self.arena, config, Broadcast(), clock)
        self.legs = PrefillLegs(PrefillSender(self.pages, self.egress, config.codings()), clock, lambda: None)
        self.loans = EngineLoans(self.pages, self.legs, 30.0, clock)
        incoming = IncomingTransfers(
            self.pages, self.listener, config.codings(), LEASE_S, clock, ReservationHolders(clock)
        )
        self.landings = DecodeLandings(DecodePages(incoming))
        self._heard: asyncio.Queue[m.AgentMessage] = asyncio.Queue()
        self._leaving_at = self._delivered_at = 0.0  # of the last prompt: when its first bytes could leave, and its end

    def close(self) -> None:
        self.egress.close()
        self.listener.close()
        self.arena.close()

    def _reply(self, message: m.AgentMessage) -> None:
        m.encode(message)  # as for an engine behind its socket
        if isinstance(message, m.Delivered):
            self._delivered_at = time.monotonic()
        self._heard.put_nowait(message)

    async def _next(self) -> m.AgentMessage:
        async with asyncio.timeout(WAIT_S):
            return await self._heard.get()

    async def reserve(self, prompt: "SizedPrompt") -> dict[str, Any]:
        request = pb.ReserveRequest.FromString(prompt.reserve)
        transfer_id, secret, reservation = await self.landings.reserve(request)
        ticket = pb.Ticket(
            transfer_id=transfer_id,
            secret=secret,
            num_tokens=prompt.num_tokens,
            have_tokens=reservation.cached_tokens,
            tokens_digest=prompt.digest,
            endpoints=self.listener.endpoints(),
            layout_fingerprint=self.layout.fingerprint,
            cluster="c",
        )
        return {"ticket": msgspec.to_builtins(ticket_info(ticket))}

    async def begin(self, prompt: "SizedPrompt", job: str, ticket: m.TicketInfo) -> dict[str, Any]:
        message = m.BeginPrefill(
            job=job,
            request_id=job,
            hashes=prompt.hashes,
            num_tokens=prompt.num_tokens,
            tokens_digest=prompt.digest,
            ticket=ticket,
        )
        self._leaving_at = time.monotonic()
        self.loans.begin(message, self, self._reply)
        pages = await self._next()
        assert isinstance(pages, m.JobPages), pages
        return {"cached": pages.cached_tokens}

    async def compute(self, prompt: "SizedPrompt", job: str, cached: int) -> dict[str, Any]:
        """Says layer by layer that all tokens are computed, as for a prompt that is one chunk."""
        if cached < prompt.num_tokens:
            self._leaving_at = time.monotonic()
        states = self.layout.state_groups
        for group, entry in enumerate(self.layout.groups if cached < prompt.num_tokens else ()):
            for layer in entry.layers:
                if group in states:
                    done = m.StateDone(job=job, group=group, layer=layer, num_tokens=prompt.num_tokens)
                    self.loans.state_done(done, self)
                else:
                    layer_done = m.LayerDone(job=job, group=group, layer=layer, num_tokens=prompt.num_tokens)
                    self.loans.layer_done(layer_done, self)
                await asyncio.sleep(0)
        self.loans.prefill_done(m.PrefillDone(job=job, num_tokens=prompt.num_tokens), self)
        return {}

    async def delivered(self, job: str) -> dict[str, Any]:
        message = await self._next()
        assert isinstance(message, m.Delivered), message
        self.loans.end(m.EndJob(job=job), self)
        taken_s = self._delivered_at - self._leaving_at  # what passed between calls is in it
        return {"ok": message.ok, "bytes": message.bytes_total, "taken_s": taken_s}

    async def claim(self, prompt: "SizedPrompt", transfer_id: str) -> dict[str, Any]:
        claim = m.ClaimLanding(job="c", transfer_id=transfer_id, tokens_digest=prompt.digest, timeout_s=WAIT_S)
        self.landings.claim(claim, self, self._reply)
        pages = await self._next()
        assert isinstance(pages, m.JobPages), pages
        self.landings.end(m.EndJob(job="c", loaded=True), self)
        return {}

    async def clear(self) -> dict[str, Any]:
        """Forgets every prefix, once no request holds any."""
        await self.pages.work.settled()
        while self.pages.cache.shrink(EVICT_BLOCKS, time.monotonic()):
            self.pages.publish()
            await asyncio.sleep(0)
        return {}


class SizedPrompt:
    """A prompt as messages name it."""

    def __init__(self, num_tokens: int, block_tokens: int, first: int = 0) -> None:
        tokens = range(first, first + num_tokens)
        self.num_tokens = num_tokens
        self.hashes = b"".join(block_hashes(tokens, block_tokens, SALT))
        self.digest = tokens_digest(tokens, SALT)
        self.reserve = pb.ReserveRequest(
            request_id="r", num_tokens=num_tokens, block_hashes=self.hashes, tokens_digest=self.digest, ttl_s=LEASE_S
        ).SerializeToString()


async def serve(node: SizedNode, prompts: Sequence[SizedPrompt], meter: NodeMeter) -> None:
    """Answers until standard input ends."""

    def call_of(request: dict[str, Any]) -> Callable[[], Awaitable[dict[str, Any]]]:
        prompt = prompts[request.pop("prompt", 0)]
        match request:
            case {"reserve": _}:
                return lambda: node.reserve(prompt)
            case {"begin": job, "ticket": ticket}:
                return lambda: node.begin(prompt, job, msgspec.convert(ticket, m.TicketInfo))
            case {"compute": job, "cached": cached}:
                return lambda: node.compute(prompt, job, cached)
            case {"delivered": job}:
                return lambda: node.delivered(job)
            case {"claim": transfer_id}:
                return lambda: node.claim(prompt, transfer_id)
            case {"clear": _}:
                return node.clear
            case _:
                return _nothing

    beating = asyncio.create_task(meter.loop.run())
    await meter.calibrate()
    print(json.dumps({"ready": True}), flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        call = call_of(json.loads(line))
        answer = await call()
        await asyncio.sleep(2 * BEAT_S)  # a beat sees what the call has cost
        print(json.dumps(answer | meter.take()), flush=True)
    beating.cancel()


async def _nothing() -> dict[str, Any]:
    return {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name")
    parser.add_argument("layout", help="as JSON")
    parser.add_argument("--tokens", type=int, required=True)
    args = parser.parse_args()
    layout = ModelLayout.from_json(args.layout)
    pages = sum(
        layout.pages_per_block(group) * (1 if group in layout.state_groups else -(-args.tokens // layout.block_size))
        for group in range(len(layout.groups))
    )

    async def run(folder: Path) -> None:
        node = SizedNode(args.name, layout, (pages + pages // 16 + 64) * layout.page_bytes, folder)
        prompts = [SizedPrompt(args.tokens, layout.block_size, first) for first in (0, 1)]
        prompts.append(SizedPrompt(min(args.tokens, WARM_BLOCKS * layout.block_size), layout.block_size, 2))
        await serve(node, prompts, NodeMeter())
        await asyncio.to_thread(node.close)

    favour_the_loop()
    with tempfile.TemporaryDirectory() as folder, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run(Path(folder)))


if __name__ == "__main__":
    main()
