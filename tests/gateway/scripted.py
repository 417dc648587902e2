"""Scripted nodes: an agent and an engine in this process, with the protocol of real ones and faults on demand.

No model: a decode node "generates" the words of its script. A `Fabric` stands for the transport: a prefill leg that succeeds
marks its transfer as landed, and a decode leg waits for that, as real engines do.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
from aiohttp import web

from gateway.cluster.agent_client import REASONS
from hybrid_cache.hashing.block_hash import split_hashes
from node.control.call_server import CallServer
from node.errors import NodeRefusal
from tests.gateway.fabric import Fabric
from tests.gateway.layouts import LAYOUT
from tests.gateway.sse import event as _event
from transport.control.proto import node_pb2 as pb
from transport.control.proto.node_pb2_grpc import NodeAgentServicer, add_NodeAgentServicer_to_server


@dataclass
class Script:
    """What a node does wrong, and how it answers. A fault list is used up from the front; "" is a success."""

    words: tuple[str, ...] = ("one", " two", " three")
    deltas: tuple[dict[str, Any], ...] = ()  # of chats, instead of words; a whole answer is the first of them
    finish_reason: str = "stop"  # of chats
    is_resumable: bool = False  # names its tokens (one a word: its number), and goes on after those that it is told
    tokens_per_event: int = 1  # that its usage counts, and resumable streams name
    forgets: bool = False  # that it is told them
    not_resumable: str = ""  # why it names none, as it says itself
    ends_before_usage: bool = False  # its streams end after their last word
    word_interval_s: float = 0.0
    word_gate: asyncio.Event | None = (
        None  # set by the test when streams may go on that begin now, after their first word
    )
    prefill_s: float = 0.0
    tokens_per_s: float = 0.0  # that it says it computes, in no time; 0: every prompt in 10 ms
    prefill_gate: asyncio.Event | None = None  # set by the test when prefills may go on
    decode_gate: asyncio.Event | None = None  # the same of decode legs
    reserve_gate: asyncio.Event | None = None  # the same of the answers to Reserve
    room: int = 1 << 30  # reservations at once
    keeps_landings: bool = True  # what has landed is there for other prompts
    cached_tokens: int = 0
    reserve: list[str] = field(default_factory=list)  # a grpc.StatusCode name
    # "die", "lament" (as a server whose engine has died), "hang", "drop", "garbled", "undelivered REASON" or "STATUS code"
    prefill: list[str] = field(default_factory=list)
    # The same, "lament 200" (in a stream), "die_after_first", "stall_after_first"; "200 html" is no answer, "200 error" an
    # error's event. After N words: "die_after N", "kill_after N" (the engine), "lament_after N", "error_after N";
    # "half_after N" (an event is cut), "cut_after N" (the stream ends early, in order)
    decode: list[str] = field(default_factory=list)
    load: list[str] = field(default_factory=list)  # "hang" or a grpc.StatusCode name
    share: list[str] = field(default_factory=list)  # a grpc.StatusCode name
    drop: list[str] = field(default_factory=list)  # a grpc.StatusCode name
    path_is_down: bool = False  # of what this node sends: its prefills end as undeliverable, its probes have no answer
    not_reached: tuple[str, ...] = ()  # the same towards these nodes alone
    knows_no_probes: bool = False  # as before there were any
    landing_failure: str = ""  # why what has landed is not used
    hang_s: float = 30.0


class ScriptedNode(NodeAgentServicer):
    """One node. `open_reservations` and `running` must be empty when nothing is under way."""

    def __init__(self, node_id: str, cluster: str, kind: str, role: str, fabric: Fabric, script: Script) -> None:
        self.node_id = node_id
        self.cluster = cluster
        self.kind = kind
        self.role = role
        self.script = script
        self.fabric = fabric
        self.state = pb.NODE_STATE_READY
        self.layout, self.model_id = LAYOUT, "scripted"
        self.max_model_len = 4096
        self.not_done_json = ""
        self.adapters, self.takes_media = list[str](), False
        self.load = pb.Load()
        self.cache: list[pb.BlocksStored] = []
        self.agent_address, self.engine_url = "", ""
        self.open_reservations: set[str] = set()
        self.aborts: list[tuple[str, str]] = []
        self.loads: list[tuple[str, int, int]] = []  # of prefixes: receiver, tokens, blocks
        self.shares: list[pb.EgressShare] = []
        self.drops: list[tuple[int, int]] = []  # of prefixes: blocks, tokens to keep
        self.probes: list[str] = []  # whom this node was to reach
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[Mapping[str, str]] = []
        self.connections: list[int] = []  # of each leg, by the port that it came from
        self.created_s = 1_700_000_000  # of its answers
        self.running, self._made = 0, 0
        self._listeners: set[asyncio.Queue[pb.NodeEvent]] = set()
        self.takes_calls = True  # over kept connections; False: an agent of before there were any
        self.calls_port = 0
        self._agent: grpc.aio.Server | None = None
        self._calls: CallServer | None = None
        self._engine: web.AppRunner | None = None

    def __repr__(self) -> str:
        return f"<ScriptedNode {self.node_id}, {len(self.open_reservations)} reservations, {self.running} running>"

    # Life

    @asynccontextmanager
    async def serving(self) -> AsyncIterator["ScriptedNode"]:
        await self.start_engine()
        await self.start_agent()
        try:
            yield self
        finally:
            await self.stop_agent()
            await self.stop_engine()

    async def start_engine(self, port: int = 0) -> None:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_post("/v1/{chat:(chat/)?}completions", self._generate)
        app.router.add_post("/v1/{chat:(chat/)?}completions/render", self.fabric.render)
        app.router.add_post("/v1/embeddings", self._embed)
        self._engine = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await self._engine.setup()
        await web.TCPSite(self._engine, "127.0.0.1", port).start()
        self.engine_url = "http://{}:{}".format(*self._engine.addresses[0][:2])

    async def stop_engine(self) -> None:
        if self._engine is not None:
            await self._engine.cleanup()
            self._engine = None

    async def start_agent(self, address: str = "127.0.0.1:0") -> None:
        if self.takes_calls:
            self._calls = CallServer(self)
            self.calls_port = await self._calls.start("127.0.0.1", 0)
        self._agent = grpc.aio.server()
        add_NodeAgentServicer_to_server(self, self._agent)  # type: ignore[no-untyped-call]
        port = self._agent.add_insecure_port(address)
        self.agent_address = f"127.0.0.1:{port}"
        await self._agent.start()

    async def stop_agent(self) -> None:
        if self._agent is not None:
            await self._agent.stop(None)
            self._agent = None
        if self._calls is not None:
            await self._calls.close(0.0)
            self._calls = None

    # Agent

    def description(self) -> pb.NodeDescription:
        return pb.NodeDescription(
            node_id=self.node_id,
            cluster=self.cluster,
            cluster_kind=self.kind,
            role=self.role,
            state=self.state,
            engine_url=self.engine_url,
            model_id=self.model_id,
            layout_json=self.layout.to_json(),
            layout_fingerprint=self.layout.fingerprint,
            block_size=self.layout.block_size,
            max_model_len=self.max_model_len,
            not_done_json=self.not_done_json,
            adapters=self.adapters,
            takes_media=self.takes_media,
            load=self.load,
            boot_id="1",
            calls_port=self.calls_port,
        )

    def tell(self, event: pb.NodeEvent) -> None:
        """Sends an event to everybody who watches."""
        for queue in self._listeners:
            queue.put_nowait(event)

    def become(self, state: Any) -> None:
        self.state = state
        self.tell(pb.NodeEvent(description=self.description()))

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[pb.NodeEvent]:
        queue: asyncio.Queue[pb.NodeEvent] = asyncio.Queue()
        queue.put_nowait(pb.NodeEvent(description=self.description()))
        queue.put_nowait(pb.NodeEvent(snapshot=pb.CacheSnapshot(groups=self.cache)))
        self._listeners.add(queue)
        seq = 0
        try:
            while True:
                event = await self._next_event(queue, request.load_interval_s)
                seq += event.seq or 1  # a script may skip numbers
                event.seq = seq
                yield event
        finally:
            self._listeners.discard(queue)

    async def _next_event(self, queue: asyncio.Queue[pb.NodeEvent], load_interval_s: float) -> pb.NodeEvent:
        try:
            async with asyncio.timeout(load_interval_s):
                return await queue.get()
        except TimeoutError:
            return pb.NodeEvent(load=self.load)

    async def Reserve(self, request: Any, context: Any) -> pb.Ticket:
        try:
            return await self.reserve(request)
        except NodeRefusal as refusal:
            await context.abort(next(code for code, label in REASONS.items() if label == refusal.label), "scripted")
        raise AssertionError("abort raises")

    async def reserve(self, request: pb.ReserveRequest) -> pb.Ticket:
        if fault := next_of(self.script.reserve):
            raise NodeRefusal(REASONS[grpc.StatusCode[fault]], "scripted")
        if len(self.open_reservations) >= self.script.room:
            raise NodeRefusal("no_capacity", "scripted")
        self._made += 1
        transfer_id = f"{self.node_id}-t{self._made}"
        self.open_reservations.add(transfer_id)
        landed = self.fabric.expect(transfer_id, self.node_id, split_hashes(request.block_hashes))
        if self.script.reserve_gate is not None:
            await self.script.reserve_gate.wait()
        return pb.Ticket(
            transfer_id=transfer_id,
            secret=b"s" * 16,
            num_tokens=request.num_tokens,
            have_tokens=landed * self.layout.block_size if self.script.keeps_landings else 0,
            tokens_digest=request.tokens_digest,
            endpoints=[pb.Endpoint(kind="tcp", address="127.0.0.1:1", host_id="h")],
            ttl_s=request.ttl_s,
            layout_fingerprint=self.layout.fingerprint,
            node_id=self.node_id,
            cluster=self.cluster,
        )

    async def Load(self, request: Any, context: Any) -> pb.LoadResult:
        self.loads.append((request.ticket.node_id, request.ticket.num_tokens, len(request.block_hashes) // 32))
        if (fault := next_of(self.script.load)) == "hang":
            await asyncio.sleep(self.script.hang_s)
        elif fault:
            await context.abort(grpc.StatusCode[fault], "scripted")
        self.fabric.end(request.ticket.transfer_id)
        return pb.LoadResult(num_tokens=request.ticket.num_tokens, bytes_sent=500)

    async def ShareEgress(self, request: Any, context: Any) -> pb.Done:
        if fault := next_of(self.script.share):
            await context.abort(grpc.StatusCode[fault], "scripted")
        self.shares.append(request)
        return pb.Done(ok=True)

    async def DropPrefix(self, request: Any, context: Any) -> pb.DropPrefixResult:
        if fault := next_of(self.script.drop):
            await context.abort(grpc.StatusCode[fault], "scripted")
        self.drops.append((len(request.block_hashes) // 32, request.keep_tokens))
        return pb.DropPrefixResult(pages=len(request.block_hashes) // 32)

    async def Probe(self, request: Any, context: Any) -> pb.Done:
        self.probes.append(request.node_id)
        if self.script.knows_no_probes:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "scripted")
        is_lost = self._does_not_reach(request.node_id)
        return pb.Done(ok=not is_lost, reason="peer_lost" if is_lost else "")

    def _does_not_reach(self, node_id: str) -> bool:
        return self.script.path_is_down or node_id in self.script.not_reached

    async def Commit(self, request: Any, context: Any) -> pb.Done:
        why = await self.fabric.landed(request.transfer_id)
        self.open_reservations.discard(request.transfer_id)
        return pb.Done(ok=not why, reason=why)

    async def Abort(self, request: Any, context: Any) -> pb.Done:
        return self.abort(request)

    def abort(self, request: pb.AbortRequest) -> pb.Done:
        self.aborts.append((request.transfer_id, request.reason))
        if request.transfer_id in self.open_reservations:
            self.open_reservations.discard(request.transfer_id)
            self.fabric.end(request.transfer_id, request.reason)
        return pb.Done(ok=True)

    # Engine

    async def _generate(self, http: web.Request) -> web.StreamResponse:
        body = await http.json()
        self.bodies.append(body)
        self.headers.append(http.headers)
        assert http.transport is not None
        self.connections.append(http.transport.get_extra_info("peername")[1])
        self.running += 1
        try:
            if body["kv_transfer_params"].get("do_remote_decode"):
                return await self._prefill(http, body)
            return await self._decode(http, body)
        finally:
            self.running -= 1

    async def _embed(self, http: web.Request) -> web.Response:
        self.bodies.append(await http.json())
        await self._fault(http, next_of(self.script.decode))  # "hang"
        return web.json_response({"object": "list", "data": [{"embedding": [0.5]}], "usage": {"total_tokens": 100}})

    async def _fault(self, http: web.Request, fault: str) -> web.Response | None:
        if not fault or "_after_first" in fault or "_after " in fault:
            return None
        if fault == "hang":
            await asyncio.sleep(self.script.hang_s)
            return None
        if fault in ("die", "drop"):
            assert http.transport is not None
            http.transport.abort()
            if fault == "die":
                self.become(pb.NODE_STATE_ENGINE_DOWN)
            raise ConnectionResetError
        if fault.startswith("lament"):
            self.become(pb.NODE_STATE_ENGINE_DOWN)
            fault = "500 500" if fault == "lament" else "200 error"
        if fault == "garbled":
            return web.Response(status=500, body=b'{"error":{"message":"\xff"}}', content_type="application/json")
        if fault in ("200 html", "200 error"):
            kind = "text/event-stream" if fault == "200 error" else "text/html"
            told = _event({"error": {"message": "scripted"}}) if fault == "200 error" else b"<html>Welcome!</html>"
            return web.Response(body=told, content_type=kind)
        status, _, code = fault.partition(" ")
        error = {"message": "scripted", "type": "server_error", "param": None, "code": code}
        return web.json_response({"error": error}, status=int(status))

    async def _prefill(self, http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await asyncio.sleep(self.script.prefill_s)
        if self.script.prefill_gate is not None:
            await self.script.prefill_gate.wait()
        receiver = body["kv_transfer_params"]["ticket"]["node_id"]
        fault = "502 peer_lost" if self._does_not_reach(receiver) else next_of(self.script.prefill)
        if fault.startswith("undelivered "):
            return web.json_response({"kv_transfer_params": {"delivered": False, "reason": fault.split()[1]}})
        if refusal := await self._fault(http, fault):
            return refusal
        ticket = body["kv_transfer_params"]["ticket"]
        self.fabric.end(ticket["transfer_id"])
        rate, computed = self.script.tokens_per_s, ticket["num_tokens"] - self.script.cached_tokens
        computed_s = computed / rate if rate else 0.01
        outcome = {
            "delivered": True,
            "num_tokens": ticket["num_tokens"],
            "cached_tokens": self.script.cached_tokens,
            "bytes_total": 1000,
            "bytes_before_prefill_end": 900,
            "prefill_start_s": 0.0,
            "prefill_end_s": computed_s,
            "delivered_s": computed_s + 0.002,
            "link": "tcp",
        }
        choice = {"index": 0, "text": "", "finish_reason": "length"}
        return web.json_response({"choices": [choice], "usage": {}, "kv_transfer_params": outcome})

    async def _decode(self, http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        fault = next_of(self.script.decode)
        params = body["kv_transfer_params"]
        if self.script.decode_gate is not None:
            await self.script.decode_gate.wait()
        if refusal := await self._fault(http, fault):
            return refusal
        why = await self._load(params)
        said = self.script.tokens_per_event * len(self.script.words)
        usage: dict[str, Any] = {"prompt_tokens": 7, "completion_tokens": said, "total_tokens": 7 + said}
        usage |= {"prompt_tokens_details": {"cached_tokens": 3}}
        extra = {"kv_transfer_params": {"recomputed": True, "reason": why}} if why else {}
        if body.get("stream"):
            return await self._stream(http, body, fault, usage, extra)
        choice: dict[str, Any] = {"index": 0, "text": "".join(self.script.words), "finish_reason": "stop"}
        if "messages" in body:
            message = next(iter(self.script.deltas), {"content": choice.pop("text")})
            choice |= {"message": {"role": "assistant", **message}, "finish_reason": self.script.finish_reason}
        return web.json_response({"id": "x", "choices": [choice], "usage": usage, **extra})

    async def _load(self, params: dict[str, Any]) -> str:
        if not params.get("do_remote_prefill"):
            return ""
        why = await self.fabric.landed(params["transfer_id"]) or self.script.landing_failure
        if not why:
            self.open_reservations.discard(params["transfer_id"])
        return why

    async def _stream(
        self, http: web.Request, body: dict[str, Any], fault: str, usage: dict[str, Any], extra: dict[str, Any]
    ) -> web.StreamResponse:
        params, script = body["kv_transfer_params"], self.script
        answered = params.get("answered", []) if script.is_resumable and not script.forgets else []
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        response.headers["x-prfaas-not-resumable"] = script.not_resumable
        if answered:
            response.headers["x-prfaas-answered"] = str(len(answered))
        await response.prepare(http)
        is_chat = "messages" in body
        kind = "chat.completion.chunk" if is_chat else "text_completion"
        chunk = {"object": kind, "created": 0, "model": "scripted"}
        is_resumed = script.is_resumable and params.get("resumable")
        if is_resumed:
            chunk["created"] = self.created_s
        words = (is_chat and script.deltas) or script.words
        fails, _, after = fault.partition("_after ")
        gate = script.word_gate
        for number, said in enumerate(words[len(answered) :], len(answered)):
            choice = {"delta": {"content": said} if isinstance(said, str) else said} if is_chat else {"text": said}
            value: dict[str, Any] = {"id": "x", **chunk, "choices": [{"index": 0, **choice}], "usage": None}
            if is_resumed:
                last = script.finish_reason if number + 1 == len(words) and not is_chat else None
                ids = [number] * script.tokens_per_event
                value["choices"] = [{"index": 0, **choice, "finish_reason": last, "token_ids": ids}]
            event = _event(value, (",", ":") if is_resumed else None)
            if after and number == int(after):
                return await self._end_early(http, response, fails, event)
            await response.write(event)
            if fault == "stall_after_first":
                await asyncio.sleep(self.script.hang_s)
            if fault == "die_after_first":
                return await self._end_early(http, response, "die", event)
            if gate is not None:
                await gate.wait()
            await asyncio.sleep(self.script.word_interval_s)
        if script.ends_before_usage:
            return response
        if extra:
            await response.write(_event({"id": "x", "choices": [], **extra}))
        if is_chat:
            last = {"index": 0, "delta": {}, "finish_reason": self.script.finish_reason}
            await response.write(_event({"id": "x", **chunk, "choices": [last], "usage": None}))
        if (body.get("stream_options") or {}).get("include_usage"):
            await response.write(_event({"id": "x", **chunk, "choices": [], "usage": usage, **extra}))
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _end_early(
        self, http: web.Request, response: web.StreamResponse, how: str, event: bytes
    ) -> web.StreamResponse:
        """Before `event`, which is of a word, or in the middle of it."""
        if how == "cut":
            return response
        if how in ("error", "lament"):
            if how == "lament":
                self.become(pb.NODE_STATE_ENGINE_DOWN)
            await response.write(_event({"error": {"message": "scripted", "code": "scripted"}}) + b"data: [DONE]\n\n")
            return response
        if how == "stall":
            await asyncio.sleep(self.script.hang_s)
        await response.write(event[: len(event) // 2] if how == "half" else b"")
        await asyncio.sleep(0.01)  # what has been written arrives
        if how == "kill":
            self.become(pb.NODE_STATE_ENGINE_DOWN)
        assert http.transport is not None
        http.transport.abort()
        raise ConnectionResetError


def next_of(faults: list[str]) -> str:
    return faults.pop(0) if faults else ""


@dataclass
class Topology:
    """Nodes of a PrfaaS cluster `east` and a PD cluster `west`."""

    remote: list[ScriptedNode]
    local: list[ScriptedNode]
    decode: list[ScriptedNode]

    @property
    def nodes(self) -> list[ScriptedNode]:
        return [*self.remote, *self.local, *self.decode]

    def leftovers(self) -> list[str]:
        """What nodes still hold; must be empty when no request is under way."""
        return [repr(node) for node in self.nodes if node.open_reservations or node.running]


@asynccontextmanager
async def topology(
    remote: int = 1,
    local: int = 1,
    decode: int = 2,
    remote_clusters: tuple[str, ...] = ("east",),
    clusters: tuple[str, ...] = ("west",),
    kind: type[ScriptedNode] = ScriptedNode,
    serving: Callable[[ScriptedNode], AbstractAsyncContextManager[object]] = ScriptedNode.serving,
) -> AsyncIterator[Topology]:
    """That many nodes, serving inside the block; PrfaaS nodes are of the `remote_clusters`, others of `clusters`, in turn."""
    fabric = Fabric()
    names, homes = remote_clusters, clusters
    world = Topology(
        remote=[kind(f"r{i}", names[i % len(names)], "prfaas", "prefill", fabric, Script()) for i in range(remote)],
        local=[kind(f"p{i}", homes[i % len(homes)], "pd", "prefill", fabric, Script()) for i in range(local)],
        decode=[kind(f"d{i}", homes[i % len(homes)], "pd", "decode", fabric, Script()) for i in range(decode)],
    )
    async with AsyncExitStack() as stack:
        for node in world.nodes:
            await stack.enter_async_context(serving(node))
        yield world
