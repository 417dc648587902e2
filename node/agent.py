"""The agent of a node: the pages, the engine that computes into them, the links that move them.

It outlives its engine: pages are cut when the first engine says Hello, and a successor finds the prefix cache as it was.
"""

import asyncio
import logging
import tempfile
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

from hybrid_cache.cache.events import CacheEvent
from hybrid_cache.cache.reservation import Reservation
from hybrid_cache.layout.layout import ModelLayout
from node.config import SERVERS, NodeConfig
from node.control.broadcast import Broadcast
from node.control.holders import ReservationHolders
from node.control.picked_counts import PickedCounts
from node.draining import Draining
from node.engine.block_naming import BlockNaming
from node.engine.doors import door_of
from node.engine.http_status import follow_adapters, follow_loads, serves
from node.engine.kv_events import events_endpoint, follow
from node.engine.liveness import TIMES, LivenessTimes, Vigil
from node.engine.prefix_cache import EngineCache
from node.engine.sglang_teardown import end_headless
from node.engine.socket import EngineConnection, EngineSocket
from node.engine.supervisor import EngineCommand, EngineSupervisor, engine_command
from node.errors import (
    ArenaError,
    EngineFailure,
    EngineRefused,
    LayoutMismatch,
    NodeConfigError,
    NodeRefusal,
    SecondEngine,
)
from node.kvcache.arena import Arena, take_arena
from node.kvcache.paced_check import PacedCheck
from node.kvcache.pages import PART_HASHES, ArenaPages, as_message
from node.kvcache.pinned_contexts import PinnedContexts
from node.process.owned_names import OwnedDirectory
from node.role import NodeRole
from node.tasks import Tasks
from node.transfer.incoming import IncomingTransfers
from node.transfer.listener import PeerListener
from node.transfer.loans import EngineLoans
from node.transfer.reach import reach_of
from node.transfer.services import DecodeService, OutgoingLegs
from transport.control import messages as m
from transport.control.proto import node_pb2 as pb
from transport.control.release import release

log = logging.getLogger(__name__)

T = TypeVar("T")

VERSION: Final = release()
HOUSEKEEPING_S = 0.5
POLL_S = 0.02
START_KEY: Final = "engine_start_timeout_s"  # of the file, named in messages
ENGINE_STOP_S = 20.0


class NodeAgent:
    """Owns everything of one node but its gRPC and metrics listeners."""

    def __init__(
        self,
        config: NodeConfig,
        role: NodeRole,
        now: Callable[[], float],
        *,
        engine_command: EngineCommand = engine_command,
        liveness: LivenessTimes = TIMES,
        pages: type[ArenaPages] = ArenaPages,
    ) -> None:
        self.config = config
        self.role = role
        self.naming = BlockNaming(config.names_secret)
        self.boot_id = uuid.uuid4().hex
        self.events = Broadcast()
        self.holders = ReservationHolders(now)
        self.reach = reach_of(config)
        self.guard = self.reach.guard
        self.engine_log = Path(config.run_dir) / f"{config.node_id}-engine.log"
        self.engine_log.parent.mkdir(parents=True, exist_ok=True)
        self._socket_dir = OwnedDirectory(Path(tempfile.gettempdir()))  # its own: no other node's name can collide
        self.socket = EngineSocket(self._socket_dir.path / "engine.sock", self)
        self.listener = PeerListener(config, self.reach)
        self.prefills = role.prefills(config, self.reach)
        self.supervisor = EngineSupervisor(
            config, self.socket.path, self.engine_log, now, self.publish_description, command=engine_command
        )
        self.door = door_of(config.identity, self.guard)
        self.arena: Arena | None = None
        self._taking: asyncio.Future[Arena] | None = None
        self.pages: ArenaPages | None = None
        self.loans: EngineLoans | None = None
        self.legs: OutgoingLegs | None = None
        self.incoming: IncomingTransfers | None = None
        self.decodes: DecodeService | None = None
        self.contexts: PinnedContexts | None = None
        self.ended: dict[str, Counter[str]] = {}  # by listener, connections that it ended, by why
        self.picked = PickedCounts()
        self.reloads = Counter(applied=0, unchanged=0, refused=0)
        self.calls_port = 0  # where calls are taken over kept connections; 0: nowhere
        self.draining = Draining(config.node_id, now, self.is_idle, self._on_draining)
        self.unusable = ""  # why no engine can work here, whatever it does
        self._now = now
        self._alone_since = now()
        self._engine: EngineConnection | None = None
        self._engine_serves = False
        self.vigil = Vigil(now, self.publish_description, times=liveness)
        self._adapters: tuple[str, ...] = ()  # that its engine serves
        self._engine_cache: EngineCache | None = None
        self.failures: Counter[str] = Counter()  # errors of our own that were survived, by what failed
        self.tasks = Tasks(self.failures)
        self._engine_tasks = Tasks(self.failures)  # end with the engine's connection
        self._integrity = PacedCheck(now)
        self._make_pages = pages
        self._hello: m.Hello | None = None
        self.engine_load = m.LoadReport(running=0, waiting=0, queued_tokens=0)
        self.conversions = role.conversions(self, now)

    # Life

    async def start(self) -> None:
        """Takes the arena's memory, starts listening and starts the engine; `wait_ready` waits for it.

        Raises NoArenaMemory, NodeConfigError, OSError.
        """
        self._taking = asyncio.ensure_future(asyncio.to_thread(take_arena, self.config))
        self.arena = await asyncio.shield(self._taking)
        self.listener.start()
        await self.socket.start()
        await self.door.start(self.config.port("engine"))
        self.tasks.start("supervisor", self.supervisor.run)
        self.tasks.start("housekeeping", self._keep_house)

    async def wait_ready(self, timeout_s: float) -> None:
        """Waits for an engine that takes requests. Raises EngineFailure when it is late, and when waiting is in vain."""
        try:
            async with asyncio.timeout(timeout_s):
                while not self._engine_serves:
                    if refusal := self.unusable or self.supervisor.refusal:
                        raise EngineRefused(refusal)
                    if self.supervisor.gave_up:
                        raise EngineFailure("it died too often")
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise EngineFailure(f"it was not ready within {timeout_s:g} s ({START_KEY})") from None

    def _on_draining(self, is_on: bool) -> None:
        if self._engine:
            self._engine.send(m.Drain() if is_on else m.Resume())
        self.publish_description()

    async def close(self) -> None:
        """Ends the engine, the links and the arena, in the order in which they use each other."""
        await self._engine_tasks.close()
        self._forget_engine_cache()
        await self.tasks.close()
        await self.supervisor.stop(ENGINE_STOP_S)
        await self.door.close()
        await self.socket.close()
        self._socket_dir.close()
        await asyncio.to_thread(self._close_links)
        await asyncio.sleep(0)  # callbacks that the links' last threads left on the loop
        if self.contexts:
            self.contexts.end_all()
        if self.pages:
            await self.pages.close()
        if self._taking:  # a thread that clears memory cannot be told to stop
            await asyncio.wait([self._taking])
            if self._taking.exception() is None:
                self._taking.result().close()

    def _close_links(self) -> None:
        self.prefills.egress.close()
        self.listener.close()
        self.reach.close()

    def reconfigure(self, read: Callable[[], NodeConfig]) -> None:
        """Takes up what may change while the node runs. What is wrong with the file is logged, and nothing changes."""
        try:
            new = read()
        except NodeConfigError as exc:
            self.reloads["refused"] += 1
            log.error("configuration refused node=%s: %s", self.config.node_id, exc)
            return
        layout = self.pages.layout.fingerprint if self.pages else ""
        outcome = self.naming.read_again(layout, self._engine_cache, self._engine.send if self._engine else None)
        if outcome != "refused":
            config, changes = self.config.reloaded(new)
            for change in changes:
                log.info("configuration node=%s %s", self.config.node_id, change)
            self.prefills.egress.set_budgets(new.budgets())
            outcome = outcome if config == self.config else "applied"
            self.config = config
        self.reloads[outcome] += 1

    def is_idle(self) -> bool:
        """Whether nothing runs, is sent or lands."""
        holders = (self.loans, self.legs, self.incoming)
        asked = self.picked.under_way or (self._engine and (self.engine_load.running or self.engine_load.waiting))
        return not asked and all(holder is None or holder.is_idle() for holder in holders)

    async def _keep_house(self) -> None:
        while True:
            await asyncio.sleep(HOUSEKEEPING_S)
            self._end_silent_engine()
            if self.incoming:
                self.incoming.expire()
            if self.pages:
                self.pages.publish()
            if self.contexts:
                self.contexts.expire()

    def _end_silent_engine(self) -> None:
        """A process that runs but never takes requests, lost its connection for good, or is stopped or stuck, is no engine."""
        if self.supervisor.pid is None:
            return
        if self.vigil.is_lost:
            silence, silent_s = self.vigil.silence, self.vigil.silent_s
            log.error("engine killed node=%s: %s for %.0fs", self.config.node_id, silence, silent_s)
            self.supervisor.kill()
        if self._engine_serves:
            return
        silent_s = self._now() - max(self._alone_since, self.supervisor.started_at)
        if silent_s > self.config.start_timeout_s:
            missing = "Hello" if self._engine is None else "answer over HTTP"
            log.error("engine killed node=%s: no %s for %.1fs (%s)", self.config.node_id, missing, silent_s, START_KEY)
            self.supervisor.kill()

    # EngineListener

    def on_hello(self, hello: m.Hello, engine: EngineConnection) -> None:
        """Cuts the arena, or checks that a returning engine fits the one there is. Raises EngineFailure, MessageError."""
        if self._engine is engine:
            raise m.MessageError("Hello twice")
        if self._engine is not None:
            raise SecondEngine(f"engine pid={hello.engine_pid}: another engine is connected")
        pages = self._pages_for(hello)
        self._engine, self._hello = engine, hello
        self.door.open(hello.http_url)
        engine.send(
            m.Welcome(
                arena_path=str(pages.arena.path),
                page_bytes=pages.layout.page_bytes,
                num_pages=pages.num_pages,
                chunk_tokens=self.config.prefill_chunk_tokens,
                block_salts=self.naming.model_salts(pages.layout.fingerprint),
            )
        )
        if self.draining.is_on:
            engine.send(m.Drain())
        log.info("engine joined node=%s pid=%d url=%s", self.config.node_id, hello.engine_pid, hello.http_url)
        if hello.notice:
            log.warning("engine of node=%s: %s", self.config.node_id, hello.notice)
        if self.config.engine in SERVERS:
            self._engine_tasks.start("engine's health", partial(self._await_http, hello.http_url))
            self._engine_tasks.start("engine's cache events", partial(self._follow_engine_cache, pages.layout))
        else:  # it listened before it said Hello
            self._takes_requests()
        self.publish_description()

    async def _await_http(self, url: str) -> None:
        await serves(url)  # `_end_silent_engine` says how long that may take
        self._takes_requests()
        log.info("engine serves node=%s url=%s", self.config.node_id, url)
        self.publish_description()
        if self.config.engine == "sglang" and (engine := self._engine) is not None:
            # Nothing of ours in it sees its queues: it is asked, and heard as if it had said so by itself.
            self._engine_tasks.start(
                "engine's load", partial(follow_loads, url, partial(self.on_message, engine=engine))
            )

        def serves_adapters(adapters: tuple[str, ...]) -> None:
            self._adapters = adapters
            self.publish_description()

        self._engine_tasks.start("engine's adapters", partial(follow_adapters, url, serves_adapters))

    def _takes_requests(self) -> None:
        self._engine_serves = True
        self.supervisor.engine_serves()
        if self._hello is not None:
            watch = partial(self.vigil.watch, self._hello.http_url, self.supervisor.leader_of(self._hello.engine_pid))
            self._engine_tasks.start("engine's pulse", watch)

    async def _follow_engine_cache(self, layout: ModelLayout) -> None:
        self._forget_engine_cache()  # should this be another attempt
        self._engine_cache = EngineCache(layout, self.naming.model_salts(layout.fingerprint)[0])
        await follow(events_endpoint(self.socket.path), self._engine_cache, self._publish_cache_event)

    def _publish_cache_event(self, event: CacheEvent) -> None:
        self.events.publish(as_message(event))

    def _forget_engine_cache(self) -> None:
        if self._engine_cache is not None:
            for event in self._engine_cache.clear():
                self._publish_cache_event(event)
            self._engine_cache = None

    def _pages_for(self, hello: m.Hello) -> ArenaPages:
        assert self.arena is not None  # no engine is started without
        try:
            layout = ModelLayout.from_json(hello.layout_json)
            pages = self.pages or self._make_pages(layout, self.arena, self.config, self.events, self._now)
        except (ValueError, KeyError, TypeError) as exc:
            reason = f"no arena for {hello.model_id} with cache_bytes = {self.config.cache_bytes}: {exc}"
            if self.pages is None:
                self.unusable = reason
            raise ArenaError(reason) from exc
        if pages.layout.fingerprint != layout.fingerprint:
            raise LayoutMismatch(
                f"engine pid={hello.engine_pid} has layout {layout.fingerprint[:12]}, the arena has another"
            )
        if self.pages is None:
            self.reach.open_memory(pages.memory())
            self.pages = pages
            if self.config.ssd_dir:
                self.tasks.start("SSD tier", pages.open_ssd)
            self._open_services(pages)
            self.contexts = PinnedContexts(pages, self._now)
        return pages

    def _open_services(self, pages: ArenaPages) -> None:
        config, now = self.config, self._now
        self.legs = self.prefills.open_legs(pages, now, lambda: self.role.admit_leg(self.conversions.standing))
        self.loans = EngineLoans(pages, self.legs, config.room_timeout_s, now)
        self.incoming = IncomingTransfers(pages, self.listener, config.codings(), config.lease_s, now, self.holders)
        self.decodes = self.role.decodes(self.incoming)

    def on_message(self, message: m.EngineMessage, engine: EngineConnection) -> None:
        """Hands a message to the side it belongs to. Raises MessageError."""
        if self.loans is None or self.decodes is None or engine is not self._engine:
            raise m.MessageError(f"{type(message).__name__} before Hello")
        match message:
            case m.BeginPrefill():
                self.loans.begin(message, engine, engine.send)
            case m.LayerDone():
                self.loans.layer_done(message, engine)
            case m.StateDone():
                self.loans.state_done(message, engine)
            case m.PrefillDone():
                self.loans.prefill_done(message, engine)
            case m.ClaimLanding():
                self.decodes.claim(message, engine, engine.send)
            case m.EndJob():
                self.loans.end(message, engine)
                self.decodes.end(message, engine)
            case m.LoadReport():
                self.engine_load = message
                self.events.publish(pb.NodeEvent(load=self.load()))
            case m.Hello():
                raise AssertionError("Hello goes to on_hello")

    def on_deaf(self, engine: EngineConnection) -> None:
        """Pages that it may be writing into must not be lent again while it lives."""
        if engine is self._engine:
            log.error("engine killed node=%s: it broke the protocol and stayed connected", self.config.node_id)
            self.supervisor.kill()

    def on_gone(self, engine: EngineConnection) -> None:
        """The engine hung up; its jobs end, the cache stays."""
        if self.loans and self.decodes:
            self.loans.engine_gone(engine)
            self.decodes.engine_gone(engine)
        if self._engine is engine:
            if self.config.engine == "sglang" and self._hello is not None:
                scheduler = self._hello.engine_pid
                end = partial(end_headless, self.supervisor, scheduler, lambda: self._engine is not None)
                self.tasks.start("engine's end", end)
            self._engine, self._engine_serves, self._adapters = None, False, ()
            self.door.shut()
            self.vigil.end()
            self._engine_tasks.cancel()
            self._forget_engine_cache()
            self._alone_since = self._now()
            self.engine_load = m.LoadReport(running=0, waiting=0, queued_tokens=0)
            self.publish_description()

    # For the control service

    async def reserve(self, request: pb.ReserveRequest) -> tuple[str, bytes, Reservation]:
        """Pages for a transfer, if this node takes new reservations: its id, its secret and the pages. Raises NodeRefusal."""
        if self.draining.is_on:
            raise NodeRefusal("draining", f"{self.config.node_id} drains: it finishes its work and takes no more")
        if not self._engine_serves or self.incoming is None or self.decodes is None:
            raise NodeRefusal("engine_down", f"{self.config.node_id} has no engine right now")
        if self.vigil.silence is not None:
            raise NodeRefusal("engine_silent", f"the engine of {self.config.node_id} is silent: {self.vigil.silence}")
        if request.prefix_only:
            return await self.incoming.reserve_settled(request)
        return await self.decodes.reserve(request)

    def known(self, service: T | None) -> T:
        """One of the services that need a layout, but no engine. Raises NodeRefusal while no layout is known."""
        if service is None:
            raise NodeRefusal("starting", f"{self.config.node_id} has never had an engine")
        return service

    def abort(self, transfer_id: str, reason: str) -> bool:
        """Free what a reservation, or a push to it, holds here. False for an unknown id."""
        landing = self.incoming is not None and self.incoming.abort(transfer_id, reason)
        push = self.legs is not None and self.legs.abort(transfer_id, reason)
        return landing or push

    def state(self) -> pb.NodeState:
        """The node's state as the control service names it."""
        if self.draining.is_on:
            return pb.NODE_STATE_DRAINING
        if self.vigil.silence is not None:
            return pb.NODE_STATE_ENGINE_SILENT
        if self._engine_serves:
            converting = self.conversions.standing.is_converting
            return pb.NODE_STATE_CONVERTING if converting else pb.NODE_STATE_READY
        starting = self._engine is not None or self.pages is None
        return pb.NODE_STATE_STARTING if starting and not self.supervisor.gave_up else pb.NODE_STATE_ENGINE_DOWN

    def load(self) -> pb.Load:
        """Queues, memory and links right now."""
        egress = self.prefills.egress
        return pb.Load(
            running=self.engine_load.running,
            waiting=self.engine_load.waiting,
            queued_tokens=self.engine_load.queued_tokens,
            sending=self.legs.sending if self.legs else 0,
            landing=self.incoming.landing if self.incoming else 0,
            egress_bytes_total=egress.bytes_sent,
            ingress_bytes_total=self.listener.bytes_received,
            links=egress.states(),
            budgets=egress.own_budgets(),
            slots=self.engine_load.slots,
            steps=[pb.StepTime(batch=batch, seconds=seconds) for batch, seconds in self.engine_load.steps],
            room=self.pages.room() if self.pages else None,
            clock_s=self.prefills.shares.now(),
        )

    def describe(self) -> pb.NodeDescription:
        """Everything about the node but its integrity, which takes a look at every page."""
        config, hello = self.config, self._hello
        description = pb.NodeDescription(
            node_id=config.node_id,
            cluster=config.cluster,
            cluster_kind=config.cluster_kind,
            role=self.conversions.standing.role,
            state=self.state(),
            model_id=config.model_name,
            load=self.load(),
            boot_id=self.boot_id,
            conversion=self.conversions.report(),
            calls_port=self.calls_port,
            version=VERSION,
            wall_clock_s=datetime.now(UTC).timestamp(),
            plain=config.plain_hops,
            rdma_direct=self.reach.is_open_to_peers,
            name_secrets=self.naming.fingerprints,
            own_cache=config.engine in SERVERS,
        )
        if hello:
            description.engine_pid = hello.engine_pid if self._engine else 0
            description.engine_url = self.door.url
            description.max_model_len = hello.max_model_len
            description.not_done_json = hello.not_done_json
            description.takes_media = hello.takes_media
            if hello.rooms is not None:
                description.rooms.CopyFrom(pb.Rooms(host=hello.rooms.host, port=hello.rooms.port))
            description.adapters.extend(self._adapters)
        if self.pages:
            description.layout_json = self.pages.layout.to_json()
            description.layout_fingerprint = self.pages.layout.fingerprint
            description.block_size = self.pages.layout.block_size
            description.pool.CopyFrom(self.pages.report())
            if ssd := self.pages.ssd_report():
                description.ssd.CopyFrom(ssd)
        if self.contexts:
            description.contexts.extend(self.contexts.messages())
        return description

    async def integrity_error(self) -> str:
        """What a check of the pool says; empty when all is well. On a large pool it may be an answer of before."""
        return await self._integrity.result(self.pages.cache.integrity_steps) if self.pages else ""

    def snapshot(self) -> Iterator[CacheEvent]:
        """What is cached, in parts that are read when they are asked for; nothing before the first engine."""
        if self.pages:
            yield from self.pages.snapshot()
        if self._engine_cache is not None:
            yield from self._engine_cache.snapshot(PART_HASHES)

    def publish_description(self) -> None:
        self.events.publish(pb.NodeEvent(description=self.describe()))
