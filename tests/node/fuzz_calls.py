"""Kept connections and tickets, in bulk: `python -m tests.node.fuzz_calls --inputs 20000` (what `make fuzz` runs as well).

An input is what one write may bring: calls and answers with fields at random, cut, repeated, spliced, with impossible lengths,
begun and left. Callers of that kind meet a real server of calls, agents of that kind a real caller, and tickets of that kind a
real sender. All of it comes in clear and again over mutual TLS with good certificates, beside handshakes that are spoiled.
Allowed are answers, refusals and the end of a connection. A traceback, a task that stays, memory that is not given back, or an
honest caller that is not answered beside them, fails.
"""

import argparse
import asyncio
import logging
import math
import random
import ssl
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import uvloop
from msgspec import structs

from gateway.cluster.agent_connection import CallConnection
from gateway.errors import AgentCallFailed
from node.control.call_server import CallServer
from node.control.holders import ReservationHolders, checked_name
from node.errors import NodeRefusal
from prfaas_cluster.links import spec_of
from tests.peers import Peers
from tests.transport.fuzzing.inputs import spoil
from transport.control.calls import AGENT, CALLER
from transport.control.messages import MAX_MESSAGE_BYTES, TicketInfo, frame
from transport.control.proto import node_pb2 as pb
from transport.control.tickets import ticket_info
from transport.errors import TransportError
from transport.peers.name import PeerRole
from transport.send.client import ClientOptions, TransferClient
from transport.send.spec import Urgency
from transport.wire.identity import Identity

CONNECTIONS: Final = 16  # at once
INPUTS_PER_CONNECTION: Final = 6
SHORT_S: Final = 0.5  # what a frame, a greeting and unread answers may take here
PATIENCE_S: Final = 60.0
HUNG_UP: Final = RuntimeError  # what uvloop says to who writes to a connection that has been closed: strangers do
TIMES: Final = (0.0, -1.0, 1e-3, 0.05, 1e300, math.inf, -math.inf, math.nan)
WEIGHTS: Final = (1.0, 0.0, -1.0, 1e-300, 1e300, math.inf, math.nan)
TEXTS: Final = ("", "t", "x" * 100, "\0", "ü" * 70, "a:b", "x" * 5000)
# Nothing but this host: a name would be looked up.
ADDRESSES: Final = (
    "", ":", "127.0.0.1", "127.0.0.1:", "127.0.0.1:0", "127.0.0.1:1", "127.0.0.1:65535", "127.0.0.1:65536", "127.0.0.1:-1",
    "127.0.0.1:1:2", "[::1]:1", "[::1]", "[]:1", "\0:1", "127.0.0.1:\u0661", "127.0.0.1:1 ", "x" * 300 + ":1", ".:1", "ü\0:1",
)  # fmt: skip
KINDS: Final = ("tcp", "tcp", "tcp", "shm", "rdma", "", "TCP", "x" * 300)


class Overheard(logging.Handler):
    """What the code under test logs as an error."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.records: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(f"{record.name}: {self.format(record)}")


class Room:
    """A node that answers at once, late, or not at all."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    async def reserve(self, request: pb.ReserveRequest) -> pb.Ticket:
        if request.request_id == "honest":
            return pb.Ticket(transfer_id="honest")
        checked_name(request.holder)
        match self._rng.randrange(4):
            case 0:
                raise NodeRefusal("no_capacity", "none")
            case 1:
                await asyncio.sleep(PATIENCE_S)
        return pb.Ticket(transfer_id="t")

    def abort(self, request: pb.AbortRequest) -> pb.Done:
        return pb.Done(ok=True)


def any_text(rng: random.Random) -> str:
    return rng.choice(TEXTS)


def any_call(rng: random.Random) -> pb.Call:
    call = pb.Call(id=rng.choice((0, 1, 7, 7, (1 << 64) - 1)), timeout_s=rng.choice(TIMES))
    match rng.randrange(5):
        case 0 | 1:
            call.reserve.request_id = any_text(rng)
            call.reserve.num_tokens = rng.choice((0, 1, 64, (1 << 64) - 1))
            call.reserve.block_hashes = rng.randbytes(rng.choice((0, 1, 32, 64, 100_000)))
            call.reserve.ttl_s = rng.choice(TIMES)
            call.reserve.holder = any_text(rng)
        case 2:
            call.abort.transfer_id = any_text(rng)
        case 3:
            call.introduce.holder = any_text(rng)
    return call


def any_ticket(rng: random.Random) -> pb.Ticket:
    return pb.Ticket(
        transfer_id=any_text(rng),
        secret=rng.randbytes(rng.choice((0, 1, 32, 5000))),
        num_tokens=rng.choice((0, 1, (1 << 64) - 1)),
        ttl_s=rng.choice(TIMES),
        endpoints=[
            pb.Endpoint(kind=rng.choice(KINDS), address=rng.choice(ADDRESSES), host_id=any_text(rng))
            for _ in range(rng.choice((0, 1, 1, 2, 50)))
        ],
        node_id=any_text(rng),
        cluster=any_text(rng),
    )


def sound_ticket() -> TicketInfo:
    """A ticket that a sender accepts, at a port without a listener."""
    return ticket_info(
        pb.Ticket(
            transfer_id="sound",
            secret=bytes(32),
            num_tokens=1,
            ttl_s=1.0,
            endpoints=[pb.Endpoint(kind="tcp", address="127.0.0.1:1")],
        )
    )


def any_answer(rng: random.Random, number: int) -> pb.CallAnswer:
    answer = pb.CallAnswer(id=rng.choice((number, number, number, 0, number + 1, 1)))
    match rng.randrange(4):
        case 0 | 1:
            answer.ticket.CopyFrom(any_ticket(rng))
        case 2:
            answer.refusal.CopyFrom(pb.Refusal(reason=any_text(rng), detail=any_text(rng)))
    return answer


def any_bytes(rng: random.Random, message: Any) -> bytes:
    """One or a few frames of it, as they should be or nearly."""
    dice = rng.random()
    if dice < 0.05:
        return rng.randbytes(rng.randrange(80))
    if dice < 0.15:  # begun, and left
        length = rng.choice((1, 1000, 1 << 20, MAX_MESSAGE_BYTES, MAX_MESSAGE_BYTES + 1, (1 << 32) - 1))
        return length.to_bytes(4, "little")[: rng.choice((1, 4, 4, 4))] + rng.randbytes(rng.choice((0, 100, 300_000)))
    whole = frame(message.SerializeToString()) * rng.choice((1, 1, 1, 2, 30))
    return whole if dice < 0.7 else bytes(spoil(rng, bytearray(whole)))


@dataclass(frozen=True, slots=True)
class Certificates:
    """With which an agent and its callers meet: strangers' are good, too, but for some that agree on nothing."""

    agent: Identity
    caller: Identity

    def first_words(self, rng: random.Random) -> bytes:
        """With which a handshake begins, or nearly."""
        heard, said = ssl.MemoryBIO(), ssl.MemoryBIO()
        with suppress(ssl.SSLWantReadError):
            self.caller.client_context().wrap_bio(heard, said).do_handshake()
        return bytes(spoil(rng, bytearray(said.read())))


def issued(folder: Path) -> Certificates:
    """By an authority of their own."""
    peers = Peers(folder)
    return Certificates(peers.server, peers.by_role[PeerRole.GATEWAY])


async def strange_handshake(rng: random.Random, port: int, certificates: Certificates) -> None:
    """One connection that is never agreed on: it reads what it is told, and may say more."""
    with suppress(OSError, HUNG_UP):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(certificates.first_words(rng))
            for _ in range(rng.randrange(4)):
                async with asyncio.timeout(SHORT_S):
                    await reader.read(1 << 16)
                writer.write(b"\x17\x03\x03" + rng.randbytes(rng.choice((2, 200, 20_000))))
        finally:
            writer.transport.abort()


async def strange_caller(rng: random.Random, port: int, secure: ssl.SSLContext | None) -> None:
    """One connection: says its inputs, reads or does not, and hangs up in one of the ways there are."""
    with suppress(OSError, HUNG_UP):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=secure)
        try:
            writer.write(CALLER if rng.random() < 0.9 else bytes(spoil(rng, bytearray(CALLER))))
            for _ in range(INPUTS_PER_CONNECTION):
                writer.write(any_bytes(rng, any_call(rng)))
                async with asyncio.timeout(SHORT_S):
                    await writer.drain()
                if rng.random() < 0.03:  # begins a frame, and says no more
                    writer.write((1 << 20).to_bytes(4, "little") + bytes(300_000))
                    await asyncio.sleep(3 * SHORT_S)
                if rng.random() < 0.5:
                    async with asyncio.timeout(0.001):
                        await reader.read(1 << 16)
            if rng.random() < 0.05:
                await asyncio.sleep(2 * SHORT_S)
        finally:
            writer.transport.abort()
            with suppress(OSError):
                await writer.wait_closed()


async def silent_caller(port: int, secure: ssl.SSLContext | None) -> None:
    """Greets, begins a frame, and sends no more until the server closes the connection."""
    with suppress(OSError, HUNG_UP):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=secure)
        try:
            writer.write(CALLER + (1 << 20).to_bytes(4, "little") + bytes(1000))
            async with asyncio.timeout(PATIENCE_S):
                while await reader.read(1 << 16):
                    pass
        finally:
            writer.transport.abort()


async def strange_agent(rng: random.Random, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Greets, hears calls, and answers anything."""
    number = 0
    with suppress(OSError, HUNG_UP):
        try:
            writer.write(AGENT if rng.random() < 0.9 else bytes(spoil(rng, bytearray(AGENT))))
            while await reader.read(1 << 16):
                number += 1
                writer.write(any_bytes(rng, any_answer(rng, number)))
                async with asyncio.timeout(SHORT_S):
                    await writer.drain()
        finally:
            writer.transport.abort()


async def asked(rng: random.Random, port: int, counts: Counter[str], secure: ssl.SSLContext | None) -> list[pb.Ticket]:
    """A real caller at a strange agent: every call comes to an end. Returns the tickets that it was told."""
    connection = CallConnection("agent", "fuzz")
    tickets = []
    try:
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.get_running_loop().create_connection(lambda: connection, "127.0.0.1", port, ssl=secure)
        async with asyncio.timeout(2 * SHORT_S):
            await connection.greeted
        for _ in range(INPUTS_PER_CONNECTION):
            if not connection.is_open:
                break
            async with asyncio.timeout(PATIENCE_S):
                answer = await connection.ask(any_call(rng), 0.05)
            counts["answered"] += 1
            if answer.HasField("ticket"):
                tickets.append(answer.ticket)
    except AgentCallFailed as error:
        counts[f"failed:{error.reason}"] += 1
    except OSError:
        counts["not greeted"] += 1
    finally:
        connection.close()
    return tickets


async def honest(port: int, secure: ssl.SSLContext | None) -> None:
    """Is answered, beside any other caller. On a busy machine it may be late once, and tries again, as gateways do."""
    async with asyncio.timeout(PATIENCE_S):
        while not await _is_answered(port, secure):
            pass


async def _is_answered(port: int, secure: ssl.SSLContext | None) -> bool:
    connection = CallConnection("agent", "honest")
    call = pb.Call(reserve=pb.ReserveRequest(request_id="honest", block_hashes=bytes(1 << 20)))
    try:
        await asyncio.get_running_loop().create_connection(lambda: connection, "127.0.0.1", port, ssl=secure)
        await connection.greeted
        return (await connection.ask(call, PATIENCE_S)).ticket.transfer_id == "honest"
    except (OSError, AgentCallFailed):
        return False
    finally:
        connection.close()


def sent_to(client: TransferClient, rng: random.Random, ticket: TicketInfo, counts: Counter[str]) -> None:
    """A real sender with a strange ticket: a push that can be given up, or a refusal."""
    for kind, address, _ in ticket.endpoints[:2]:
        try:
            spec = spec_of(ticket, kind, address, [10], None, rng.choice(list(Urgency)))
            push = client.open(spec, lambda index: [memoryview(bytes(10))])
        except (TransportError, ValueError, OSError):
            counts["ticket refused"] += 1
            continue
        push.ready_all()
        if rng.random() < 0.5:
            push.abort("given up", keep_landing=True)
        assert push.wait(PATIENCE_S) is not None, f"a push to {address!r} does not end"
        counts["ticket tried"] += 1


async def fuzz(num_inputs: int, seed: int, certificates: Certificates | None = None) -> Counter[str]:
    """What came of the inputs, over mutual TLS with `certificates`. Raises AssertionError for what is not allowed."""
    secure = None if certificates is None else certificates.caller.client_context()
    rng, counts, overheard = random.Random(seed), Counter[str](), Overheard()
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: overheard.records.append(repr(context)))
    loggers = [logging.getLogger(name) for name in ("node", "prfaas.gateway", "transport", "asyncio")]
    for logger in loggers:
        logger.addHandler(overheard)
        logger.propagate = False
    # Names of holders are told apart from what their connections are worth: no holder stays.
    holders = ReservationHolders(loop.time)
    server = CallServer(
        Room(rng), holders, handshake_s=SHORT_S, frame_s=SHORT_S, unread_s=SHORT_S, of_address=4 * CONNECTIONS
    )
    port = await server.start("127.0.0.1", 0, None if certificates is None else certificates.agent)
    agents: set[asyncio.Task[None]] = set()

    async def at_agent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        agents.add(task := asyncio.ensure_future(strange_agent(rng, reader, writer)))
        await asyncio.wait([task])
        agents.discard(task)

    shown = None if certificates is None else certificates.agent.mutual_context()
    agent = await asyncio.start_server(at_agent, "127.0.0.1", 0, ssl=shown)
    agent_port = agent.sockets[0].getsockname()[1]
    client = TransferClient(options=ClientOptions(connections=1, peer_timeout_s=0.3))
    try:
        for _ in range(0, num_inputs, 2 * INPUTS_PER_CONNECTION * CONNECTIONS):
            _, *told = await asyncio.gather(
                honest(port, secure),
                *(asked(rng, agent_port, counts, secure) for _ in range(CONNECTIONS)),
                _nothing(silent_caller(port, secure)),
                *(_nothing(strange_caller(rng, port, secure)) for _ in range(CONNECTIONS)),
                *(_nothing(strange_handshake(rng, at, certificates)) for at in (port, agent_port) if certificates),
            )
            tickets = [ticket for tickets in told for ticket in tickets][:6]
            strange = [
                structs.replace(ticket_info(ticket), weight=rng.choice(WEIGHTS), tenant=any_text(rng))
                for ticket in [*tickets, any_ticket(rng)]
            ]
            for info in [sound_ticket(), *strange]:
                await asyncio.to_thread(sent_to, client, rng, info, counts)
            assert not overheard.records, f"seed {seed}: {overheard.records[0]}"
        async with asyncio.timeout(PATIENCE_S):
            while len(server) or len(holders) or agents:  # noqa: ASYNC110 it has no event of ours
                await asyncio.sleep(0.01)
        assert server.room.memory.lent_bytes == 0
        assert server.room.num_waiting == 0
        assert not client.internal_errors, client.internal_errors
    finally:
        await asyncio.to_thread(client.close)
        agent.close()
        await server.close(0.0)
        for logger in loggers:
            logger.removeHandler(overheard)
            logger.propagate = True
    assert not overheard.records, f"seed {seed}: {overheard.records[0]}"
    return counts + Counter({f"ended:{why}": count for why, count in server.ended.items()})


async def _nothing(work: Any) -> list[pb.Ticket]:
    await work
    return []


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.node.fuzz_calls", description=__doc__.splitlines()[0])
    parser.add_argument("--inputs", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args(argv)
    counts = Counter[str]()
    loops = (asyncio.new_event_loop, uvloop.new_event_loop)  # nodes run on the second one
    with tempfile.TemporaryDirectory() as folder:
        ways = [(loop, certificates) for certificates in (None, issued(Path(folder))) for loop in loops]
        for part, (loop, certificates) in enumerate(ways):
            with asyncio.Runner(loop_factory=loop) as runner:
                counts += runner.run(fuzz(arguments.inputs // len(ways), arguments.seed + part, certificates))
    print(f"{arguments.inputs:,} inputs: " + ", ".join(f"{count:,} {what}" for what, count in counts.most_common()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
