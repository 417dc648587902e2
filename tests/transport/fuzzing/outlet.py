"""A stranger where a real sender expects its receiver: sockets, threads, scheduler and rails behind it.

It greets as it should, hears what it is sent, and answers: sometimes what a receiver would, sometimes anything. Allowed is
the end of the connection. An unforeseen error, a push that does not end when its owner gives it up, or a queue
pair that stays, fails; and so does a transfer to an honest receiver that the same sender makes afterwards.
"""

import logging
import random
import select
import socket
import struct
from collections import Counter
from contextlib import suppress
from typing import Final

from tests.transport.fuzzing.inputs import SECRET, SIZES, any_frame, spoil
from tests.transport.helpers import PATIENCE_S
from tests.transport.rdma.worlds import PinnedMemory
from transport.coding.codec import Codec, decodable
from transport.errors import TransportError
from transport.rdma.device import RECEIVE_DEPTH, MemoryRegion, QueuePair, QueuePairEnd, RdmaDevices, RdmaError
from transport.rdma.loopback import LoopbackFabric
from transport.rdma.topology import format_nics
from transport.receive.options import ServerOptions
from transport.receive.server import TransferServer
from transport.send.client import ClientOptions, Push, TransferClient
from transport.send.spec import TransferSpec, Via
from transport.wire.checksum import Integrity
from transport.wire.connection import Connection, ConnectionRole, ProtocolState
from transport.wire.frames import (
    Accept,
    Ack,
    Cancel,
    Chunk,
    Code,
    CodedChunk,
    Frame,
    Grant,
    LandingBuffers,
    Nack,
    Nics,
    RailAnswer,
    RailBuffer,
    RailClosed,
    RailOffer,
    Refuse,
    Written,
)

INPUTS_PER_CONNECTION: Final = 8
CHUNK_LIMITS: Final = (1, 1 << 16, 1 << 16, 1 << 20)
TOTAL_BYTES: Final = sum(SIZES)
LISTENS_S: Final = 0.002  # for what the sender has to say to an input
LOG: Final = logging.getLogger("transport")


class StrangeReceiver:
    """One connection of a sender, greeted; what is about to be said is for that sender."""

    role = ConnectionRole.SENDER

    def __init__(self, sock: socket.socket, rng: random.Random, far: RdmaDevices, granted: MemoryRegion) -> None:
        self.sock = sock
        sock.settimeout(PATIENCE_S)
        self.offers: list[RailOffer] = []
        self.sent: list[tuple[int, int, int]] = []  # slot, offset and length of what the sender says has been sent
        self.queue_pairs: list[QueuePair] = []
        self._rng, self._far, self._granted = rng, far, granted
        self._sink = memoryview(bytearray(1 << 17))
        self.connection = Connection(
            ConnectionRole.RECEIVER,
            integrity=Integrity.CHECKSUM,
            nonce=rng.randbytes(16),
            now=0.0,
            max_chunk_bytes=rng.choice(CHUNK_LIMITS),
            codecs=rng.choice((Codec.RAW, Codec.RAW, decodable(lossy=True), decodable(lossy=True), 255)),
        )
        while self.connection.state is ProtocolState.GREETING:
            self._take(self.sock.recv(1 << 16))
        self.sock.sendall(self.connection.data_to_send())

    def close(self) -> None:
        self.sock.close()
        for queue_pair in self.queue_pairs:
            queue_pair.close()

    def hear(self) -> None:
        """What the sender says within a moment. Raises OSError, EOFError."""
        while select.select([self.sock], [], [], LISTENS_S)[0]:
            self._take(self.sock.recv(1 << 18))

    def _take(self, data: bytes) -> None:
        if not data:
            raise EOFError
        view = memoryview(data)
        while view:
            view = view[self.connection.receive_data(view, 0.0) :]
            while True:
                while self.connection.payload_left and self.connection.payload_buffered:
                    self.connection.take_payload(self._sink)
                if self.connection.payload_left or (frame := self.connection.next_event()) is None:
                    break
                self._note(frame)

    def _note(self, frame: Frame) -> None:
        match frame:
            case RailOffer():
                self.offers.append(frame)
            case Chunk() | CodedChunk() | Written():
                self.sent.append((frame.slot, frame.offset, frame.length))

    def said(self) -> bytes:
        """A frame that a receiver might say now, or any other."""
        with suppress(ValueError, struct.error):  # not one that can be said
            return self.connection.encoded(self._likely() if self._rng.random() < 0.7 else any_frame(self._rng, self))
        return b""

    def _likely(self) -> Frame:
        rng = self._rng
        slot = rng.choice((0, 0, 0, 0, 0, 1))
        match rng.randrange(10):
            case 0 | 1:
                missing = rng.choice((((0, TOTAL_BYTES),), ((0, 4096),), ((100, 5000), (4000, 9000)), ()))
                return Accept(slot=slot, missing=missing)
            case 2 if self.sent:
                sent = [rng.choice(self.sent) for _ in range(rng.choice((1, 1, 3)))]
                return Ack(slot=sent[0][0], ranges=tuple((offset, offset + length) for _, offset, length in sent))
            case 3 if self.sent:
                slot, offset, length = rng.choice(self.sent)
                return Nack(slot=slot, offset=offset, length=length, code=rng.choice(list(Code)))
            case 4:
                kind = rng.choice((Cancel, Refuse))
                return kind(slot=slot, code=rng.choice(list(Code)), detail="so be it")
            case 5 | 6 if self.offers:
                return self._answer(rng.choice(self.offers))
            case 7:
                return self._grant(slot)
            case 8 if self.offers and rng.random() < 0.3:
                offer = rng.choice(self.offers)
                return RailClosed(rail=offer.rail, attempt=offer.attempt, reason="enough")
            case 9 if self.offers and rng.random() < 0.7:
                return self._buffer(rng.choice(self.offers))
            case 9:
                return LandingBuffers(places=rng.choice((1, 16, 16, 99)), place_bytes=rng.choice((1 << 20, 1 << 20, 1)))
            case _:
                nics = self._far.nics if rng.random() < 0.9 else self._far.nics[:1] * 2
                return Nics(nics=format_nics(nics))

    def _answer(self, offer: RailOffer) -> RailAnswer:
        """With a queue pair that is there, mostly, and takes some of the chunks."""
        rng = self._rng
        end = QueuePairEnd(number=rng.choice((0, 1 << 24)), packet_number=1 << 30, gid="nowhere", mtu=7)
        if rng.random() < 0.8 and offer.nic < len(self._far.nics):
            queue_pair = self._far.device(self._far.nics[offer.nic].name).direct_queue_pair()
            self.queue_pairs.append(queue_pair)
            end = queue_pair.end
            with suppress(RdmaError):
                queue_pair.connect(
                    QueuePairEnd(
                        number=offer.queue_pair, packet_number=offer.packet_number, gid=offer.gid, mtu=offer.mtu
                    )
                )
                for _ in range(rng.choice((0, 3, RECEIVE_DEPTH))):
                    queue_pair.receive()
        return RailAnswer(
            rail=offer.rail, attempt=offer.attempt, queue_pair=end.number, packet_number=end.packet_number,
            gid=end.gid, mtu=end.mtu, depth=rng.choice((0, RECEIVE_DEPTH, RECEIVE_DEPTH, 1 << 20)),
        )  # fmt: skip

    def _buffer(self, offer: RailOffer) -> RailBuffer:
        rng = self._rng
        key = self._granted.keys[self._far.nics[0].name].remote
        address = rng.choice((self._granted.address,) * 4 + (0, (1 << 64) - 1))
        return RailBuffer(rail=offer.rail, attempt=offer.attempt, address=address, key=rng.choice((key, key, 7)))

    def _grant(self, slot: int) -> Grant:
        rng = self._rng
        keys = tuple((place, self._granted.keys[nic.name].remote) for place, nic in enumerate(self._far.nics))
        extents = rng.choice((((0, TOTAL_BYTES),), ((4096, 70_000), (0, 4096)), ((0, 4096),), ((0, 1 << 60),)))
        address = rng.choice((self._granted.address,) * 4 + (0, (1 << 64) - 1))
        return Grant(slot=slot, address=address, keys=keys[: rng.choice((2, 2, 2, 1, 0))], extents=extents)


class RealOutlets:
    """A sender, and the stranger that inputs come from at present."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._rng = random.Random(seed)
        self._fabric = LoopbackFabric()
        self._near = RdmaDevices([self._fabric.device("a0", fabric="a"), self._fabric.device("b0", fabric="b")])
        self._far = RdmaDevices(
            [self._fabric.device("a1", fabric="a"), self._fabric.device("b1", fabric="b")], direct=True
        )
        self._source = PinnedMemory(SIZES, fill=True, seed=1)
        self._target = PinnedMemory(SIZES)
        self._granted = self._far.register(memoryview(self._target.buffer))
        self._client = TransferClient(options=ClientOptions(connections=1, max_peers=8, rdma=self._near))
        self._stranger: StrangeReceiver | None = None
        self._push: Push | None = None
        self._inputs_left = 0
        self.ends = Counter[str]()

    def __enter__(self) -> "RealOutlets":
        self._log_level = LOG.level
        LOG.setLevel(logging.CRITICAL)  # what it says of strangers is not of interest here
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        try:
            self._hang_up()
            if kind is None:
                self._serve_honest_receivers()
        finally:
            self._client.close()
            LOG.setLevel(self._log_level)
            left = Counter(each.device.nic.name for each in self._fabric.queue_pairs.values())
            self._near.close()
            self._far.close()
        assert kind is not None or not left, f"seed {self._seed}: queue pairs are left: {dict(left)}"

    def feed(self, number: int) -> None:
        """One input. Raises AssertionError when the sender has failed."""
        where = f"seed {self._seed}, input {number}"
        try:
            if self._stranger is None:
                self._stranger = self._meet()
            self._inputs_left -= 1
            self._stranger.hear()
            self._stranger.sock.sendall(self._input(self._stranger))
        except TimeoutError:
            raise AssertionError(f"{where}: the sender neither connects, nor speaks, nor listens") from None
        except (OSError, EOFError, TransportError):  # it has had enough of us
            self._inputs_left = 0
        if self._inputs_left <= 0:
            self._hang_up(where)
        errors = self._client.internal_errors
        assert not errors, f"{where}: errors of the sender, by thread: {dict(errors)}"

    def _meet(self) -> StrangeReceiver:
        self._inputs_left = INPUTS_PER_CONNECTION
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.settimeout(PATIENCE_S)
            address = "{}:{}".format(*listener.getsockname())
            via = Via.RDMA if self._rng.random() < 0.5 else Via.TCP
            spec = TransferSpec(address, "t", SECRET, SIZES, via=via, deadline_s=PATIENCE_S)
            self._push = self._client.open(spec, self._source.source)
            self._push.ready_all()
            sock, _ = listener.accept()
        try:
            return StrangeReceiver(sock, self._rng, self._far, self._granted)
        except BaseException:
            sock.close()
            raise

    def _input(self, stranger: StrangeReceiver) -> bytes:
        data = bytearray(b"".join(stranger.said() for _ in range(self._rng.choice((1, 2, 3, 5)))))
        return bytes(spoil(self._rng, data) if self._rng.random() < 0.1 else data)

    def _hang_up(self, where: str = "at the end") -> None:
        stranger, self._stranger = self._stranger, None
        if stranger is not None:
            stranger.close()
        push, self._push = self._push, None
        if push is None:
            return
        push.abort("the owner gives it up")
        result = push.wait(PATIENCE_S)
        assert result is not None, f"{where}: a push that was given up does not end"
        self.ends[result.reason or "ok"] += 1

    def _serve_honest_receivers(self) -> None:
        for via in (Via.TCP, Via.RDMA):
            with TransferServer(options=ServerOptions(rdma=self._far)) as server:
                target = PinnedMemory(SIZES)
                self._far.register(memoryview(target.buffer))
                server.expect("t", SECRET, SIZES, target, on_done=None)
                push = self._client.open(TransferSpec(server.address, "t", SECRET, SIZES, via=via), self._source.source)
                push.ready_all()
                result = push.wait(PATIENCE_S)
                assert result is not None
                assert result.ok, f"seed {self._seed}: {result}"
                assert target.content() == self._source.content()
