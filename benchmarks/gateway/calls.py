"""CPU that a reservation takes of the gateway, by what carries it: gRPC, a bidirectional gRPC stream, a kept connection.

The agent is a process of its own and answers at once; all ways take turns, with and without mutual TLS. Counted are all
threads of the calling process, medians of the rounds.
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final

import grpc
import grpc.aio
import uvloop

from benchmarks.lib.processes import GreetingChild
from gateway.cluster.agent_connection import CallConnection, PersistentCalls
from node.control.call_server import CallServer
from transport.control.certificates import Authority
from transport.control.credentials import channel_credentials, channel_options
from transport.control.proto import node_pb2 as pb
from transport.control.proto.node_pb2_grpc import NodeAgentServicer, NodeAgentStub, add_NodeAgentServicer_to_server
from transport.control.tickets import ticket_info
from transport.peers.name import PeerName, PeerRole
from transport.wire.identity import Identity

TIMEOUT_S: Final = 30.0
NAME: Final = "agent.example"
STREAM: Final = "/prfaas.benchmarks/Calls"
CONNECTIONS: Final = (1, 16)  # requests under way at once
TICKET: Final = pb.Ticket(
    transfer_id="t" * 32,
    secret=b"s" * 16,
    num_tokens=31,
    tokens_digest=b"d" * 32,
    endpoints=[pb.Endpoint(kind=kind, address="127.0.0.1:1", host_id="h" * 16) for kind in ("shm", "tcp")],
    ttl_s=60.0,
    layout_fingerprint="f" * 64,
    node_id="decode0",
    cluster="home",
)

Call = Callable[[], Awaitable[Any]]


class AcceptingAgent(NodeAgentServicer):
    """Has room for everything."""

    async def reserve(self, request: pb.ReserveRequest) -> pb.Ticket:
        return TICKET

    def abort(self, request: pb.AbortRequest) -> pb.Done:
        return pb.Done(ok=True)

    async def Reserve(self, request: Any, context: Any) -> pb.Ticket:
        return TICKET


class Streams(grpc.GenericRpcHandler):
    """The same calls over a stream of gRPC's own, which node.proto has no use for."""

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        async def answers(calls: AsyncIterator[bytes], _: Any) -> AsyncIterator[bytes]:
            async for call in calls:
                yield pb.CallAnswer(id=pb.Call.FromString(call).id, ticket=TICKET).SerializeToString()

        return grpc.stream_stream_rpc_method_handler(answers) if details.method == STREAM else None


def message() -> pb.ReserveRequest:
    """The reservation of a short chat."""
    return pb.ReserveRequest(
        request_id="r" * 16, num_tokens=31, block_hashes=b"h" * 64, tokens_digest=b"d" * 32, ttl_s=60.0
    )


def _credentials(identity: Identity) -> grpc.ServerCredentials:
    """gRPC's own TLS; a node has a front instead, which costs a relayed connection more."""
    pair = (identity.key.read_bytes(), identity.certificate.read_bytes())
    return grpc.ssl_server_credentials([pair], identity.authorities().pem, require_client_auth=True)


async def serve(identity: Identity | None) -> None:
    """Says its ports, and serves until its standard input closes."""
    server, calls = grpc.aio.server(), CallServer(AcceptingAgent())
    add_NodeAgentServicer_to_server(AcceptingAgent(), server)  # type: ignore[no-untyped-call]
    server.add_generic_rpc_handlers((Streams(),))
    address = "127.0.0.1:0"
    port = server.add_secure_port(address, _credentials(identity)) if identity else server.add_insecure_port(address)
    await server.start()
    kept = await calls.start("127.0.0.1", 0, identity)
    print(json.dumps({"grpc": port, "kept": kept}), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(None)
    await calls.close(0.0)


@asynccontextmanager
async def ways(ports: dict[str, Any], identity: Identity | None) -> AsyncIterator[dict[str, Call]]:
    """A connected transport for reservations."""
    async with AsyncExitStack() as stack:
        address = f"127.0.0.1:{ports['grpc']}"
        if identity is None:
            channel = grpc.aio.insecure_channel(address)
        else:
            channel = grpc.aio.secure_channel(address, channel_credentials(identity), options=channel_options(NAME))
        await stack.enter_async_context(channel)
        stub: Any = NodeAgentStub(channel)  # type: ignore[no-untyped-call]
        kept = PersistentCalls(address, TIMEOUT_S, identity, NAME)
        stack.push_async_callback(kept.close)
        kept.offered(ports["kept"])
        while not isinstance(connection := kept.connection(), CallConnection):  # noqa: ASYNC110 it has no Event
            await asyncio.sleep(0.01)

        async def over_kept() -> None:
            ticket_info((await connection.ask(pb.Call(reserve=message()), TIMEOUT_S)).ticket)

        async def by_grpc() -> None:
            ticket_info(await stub.Reserve(message(), timeout=TIMEOUT_S))

        yield {"gRPC": by_grpc, "gRPC stream": await _stream(channel, stack), "kept connection": over_kept}


async def _stream(channel: grpc.aio.Channel, stack: AsyncExitStack) -> Call:
    stream = channel.stream_stream(STREAM)()
    asked: dict[int, asyncio.Future[pb.CallAnswer]] = {}
    writing, numbers = asyncio.Lock(), iter(range(1, sys.maxsize))

    async def read() -> None:
        async for body in stream:
            answer = pb.CallAnswer.FromString(body)
            asked.pop(answer.id).set_result(answer)

    async def end() -> None:
        reading.cancel()
        with suppress(asyncio.CancelledError):
            await reading

    reading = asyncio.create_task(read())
    stack.push_async_callback(end)

    async def over_stream() -> None:
        number = next(numbers)
        answer = asked[number] = asyncio.get_running_loop().create_future()
        async with writing:  # gRPC takes one at a time
            await stream.write(pb.Call(id=number, reserve=message()).SerializeToString())
        async with asyncio.timeout(TIMEOUT_S):
            ticket_info((await answer).ticket)

    return over_stream


async def measured(by: dict[str, Call], calls: int, rounds: int) -> dict[tuple[str, int], float]:
    """µs of CPU per call, by way and by how many are under way at once."""
    found: dict[tuple[str, int], list[float]] = defaultdict(list)
    for at_once in CONNECTIONS:
        for _ in range(rounds):
            for name, call in by.items():

                async def some(call: Call = call, number: int = calls // at_once) -> None:
                    for _ in range(number):
                        await call()

                before_s = time.process_time()
                await asyncio.gather(*(some() for _ in range(at_once)))
                found[name, at_once].append((time.process_time() - before_s) / (calls // at_once * at_once) * 1e6)
    return {what: statistics.median(each) for what, each in found.items()}


async def compare(folder: Path, calls: int, rounds: int, secure: bool) -> dict[tuple[str, int], float]:
    identity, files = None, []
    if secure:
        authority = Authority(folder)
        agents = authority.issue("agent", [NAME], peer=PeerName("prfaas", "west", PeerRole.NODE, "agent"))
        identity = authority.issue("gateway", peer=PeerName("prfaas", "any", PeerRole.GATEWAY, "gateway"))
        files = [str(agents.certificate), str(agents.key), str(agents.authority)]
    agent = GreetingChild([sys.executable, "-m", "benchmarks.gateway.calls", "--serve", *files])
    try:
        async with ways(agent.greeting, identity) as by:
            return await measured(by, calls, rounds)
    finally:
        agent.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=1600, help="per round and way")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--serve", nargs="*", metavar="FILE", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve is not None:
        files = dict(zip(("certificate", "key", "authority"), map(Path, args.serve), strict=False))
        uvloop.run(serve(Identity(**files) if files else None))
        return
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for secure in (False, True):
            found = uvloop.run(compare(Path(folder), args.calls, args.rounds, secure))
            results |= {(name, at_once, secure): us for (name, at_once), us in found.items()}
    if args.json:
        rows = [{"way": way, "at_once": n, "tls": tls, "cpu_us": us} for (way, n, tls), us in results.items()]
        print(json.dumps({"load_average": os.getloadavg(), "calls": rows}, indent=1))
        return
    print(f"load average {os.getloadavg()[0]:.1f}; µs of CPU per call, medians of {args.rounds} rounds")
    for (way, at_once, secure), us in results.items():
        print(f"{way:16} {at_once:3} at once {'mutual TLS' if secure else 'plain':11} {us:6.0f}")


if __name__ == "__main__":
    main()
