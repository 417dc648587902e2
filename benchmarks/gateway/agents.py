"""The agents of nodes without a model, for benchmarks.gateway: they say what they are, hand out tickets and report prefixes.

    python -m benchmarks.gateway.agents decode=http://127.0.0.1:9001 prefill=http://127.0.0.1:9002

Prints the agents' addresses as JSON and serves until its standard input closes.
"""

import asyncio
import itertools
import json
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import grpc.aio

from hybrid_cache.hashing.block_hash import split_hashes
from hybrid_cache.layout.layout import KVCacheGroup, ModelLayout
from hybrid_cache.layout.spec import FullAttention, LinearState
from node.control.call_server import CallServer
from transport.control.proto import node_pb2 as pb
from transport.control.proto.node_pb2_grpc import NodeAgentServicer, add_NodeAgentServicer_to_server
from transport.control.tickets import MAX_CONTROL_BYTES

LAYOUT = ModelLayout(
    model="mock",
    dtype="bfloat16",
    block_size=64,
    groups=(
        KVCacheGroup(FullAttention(bytes_per_token=4096, k_bytes_per_token=2048), (0,)),
        KVCacheGroup(LinearState(bytes_per_snapshot=1 << 20), (1,)),
    ),
)


class ReservingAgent(NodeAgentServicer):
    """One node. What it has made room for it holds from then on, and says so."""

    def __init__(self, name: str, role: str, engine_url: str) -> None:
        self._name = name
        self._role = role
        self._engine_url = engine_url
        self.calls_port = 0
        self._numbers = itertools.count(1)
        self._held: set[bytes] = set()
        self._watchers: set[asyncio.Queue[pb.NodeEvent]] = set()

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[pb.NodeEvent]:
        events: asyncio.Queue[pb.NodeEvent] = asyncio.Queue()
        events.put_nowait(pb.NodeEvent(description=self._description()))
        events.put_nowait(pb.NodeEvent(snapshot=pb.CacheSnapshot()))
        self._watchers.add(events)
        try:
            for seq in itertools.count(1):
                event = pb.NodeEvent(load=pb.Load())
                with suppress(TimeoutError):
                    async with asyncio.timeout(request.load_interval_s):
                        event = await events.get()
                event.seq = seq
                yield event
        finally:
            self._watchers.discard(events)

    async def Reserve(self, request: Any, context: Any) -> pb.Ticket:
        return await self.reserve(request)

    async def Abort(self, request: Any, context: Any) -> pb.Done:
        return self.abort(request)

    async def reserve(self, request: pb.ReserveRequest) -> pb.Ticket:
        self._hold(split_hashes(request.block_hashes))
        return pb.Ticket(
            transfer_id=f"{self._name}-{next(self._numbers)}",
            secret=b"s" * 16,
            num_tokens=request.num_tokens,
            tokens_digest=request.tokens_digest,
            endpoints=[pb.Endpoint(kind="tcp", address="127.0.0.1:1", host_id="h")],
            ttl_s=request.ttl_s,
            layout_fingerprint=LAYOUT.fingerprint,
            node_id=self._name,
            cluster="home",
        )

    def abort(self, request: pb.AbortRequest) -> pb.Done:
        return pb.Done(ok=True)

    def _description(self) -> pb.NodeDescription:
        return pb.NodeDescription(
            node_id=self._name,
            cluster="home",
            cluster_kind="pd",
            role=self._role,
            state=pb.NODE_STATE_READY,
            engine_url=self._engine_url,
            model_id="mock",
            layout_json=LAYOUT.to_json(),
            layout_fingerprint=LAYOUT.fingerprint,
            block_size=LAYOUT.block_size,
            max_model_len=1 << 22,
            boot_id="1",
            calls_port=self.calls_port,
        )

    def _hold(self, hashes: list[bytes]) -> None:
        new = [each for each in hashes if each not in self._held]
        if not new:
            return
        self._held.update(new)
        for events in self._watchers:
            events.put_nowait(pb.NodeEvent(stored=pb.BlocksStored(group=0, hashes=b"".join(new))))
            events.put_nowait(pb.NodeEvent(stored=pb.BlocksStored(group=1, hashes=new[-1])))


async def main(nodes: list[str]) -> None:
    servers, kept, addresses = [], [], []
    for number, node in enumerate(nodes):
        role, _, engine_url = node.partition("=")
        options = [("grpc.max_receive_message_length", MAX_CONTROL_BYTES)]
        server = grpc.aio.server(options=options)
        agent = ReservingAgent(f"{role}{number}", role, engine_url)
        add_NodeAgentServicer_to_server(agent, server)  # type: ignore[no-untyped-call]
        calls = CallServer(agent)
        agent.calls_port = await calls.start("127.0.0.1", 0)
        addresses.append(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
        await server.start()
        servers.append(server)
        kept.append(calls)
    print(json.dumps({"addresses": addresses}), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await asyncio.gather(*(server.stop(None) for server in servers), *(calls.close(0.0) for calls in kept))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
