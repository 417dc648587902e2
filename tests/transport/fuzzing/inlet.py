"""The same strangers at the door of a real listener: sockets, threads, memory, codec and RDMA behind it.

Their frames are numbered and sealed as they should be, chunks have their payload and some are right in every way: so
they get in, and then say the rest. Allowed are answers, and the end of the connection; an error other than the
peer's, or a thread that stays, fails.
"""

import logging
import random
import socket
import struct
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Final

from tests.transport.fuzzing.inputs import SECRET, SEGMENT, SEGMENT_BYTES, SIZES, any_frame, spoil
from tests.transport.raw_sender import RawSender
from transport.coding.codec import ChunkEncoder, ChunkPart, Codec, decodable
from transport.coding.elements import Run
from transport.errors import LocalProtocolError
from transport.rdma.device import RdmaDevices
from transport.rdma.loopback import LoopbackFabric
from transport.receive.options import ServerOptions
from transport.receive.server import TransferServer
from transport.wire.checksum import DIGEST_BYTES, Integrity, digest, transfer_seed
from transport.wire.connection import ConnectionRole
from transport.wire.frames import AskRails, Chunk, CodedChunk
from transport.wire.identity import Identity
from transport.wire.seal import TAG_BYTES, chunk_seal

INPUTS_PER_CONNECTION: Final = 8
MAX_CHUNK_BYTES: Final = 1 << 16
PATIENCE_S: Final = 60.0
SLOW_S: Final = 5.0  # of processor time of all threads, for a whole connection; a usual one takes 5 ms
NO_FILES: Final = Identity(certificate=Path("none"), key=Path("none"), authority=Path("none"))
LOG: Final = logging.getLogger("transport")


class Stranger(RawSender):
    """One that has been greeted; what it is about to say is for a receiver."""

    role = ConnectionRole.RECEIVER


class RealInlets:
    """Listeners of both kinds, and the connection that inputs go to at present."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._rng = random.Random(seed)
        self._memory = {name: bytearray(SEGMENT_BYTES) for name in (SEGMENT, "t")}
        self._devices = [RdmaDevices([LoopbackFabric().device("n0")], direct=direct) for direct in (False, True)]
        for memory in self._memory.values():
            for devices in self._devices:
                devices.register(memoryview(memory))
        self._servers = [
            self._server(integrity, devices)
            for integrity in (Integrity.CHECKSUM, Integrity.AEAD)
            for devices in self._devices
        ]
        self._stranger: Stranger | None = None
        self._inputs_left = 0
        self._encoder = ChunkEncoder()

    def _server(self, integrity: Integrity, devices: RdmaDevices) -> TransferServer:
        options = ServerOptions(
            integrity=integrity,
            identity=NO_FILES if integrity is Integrity.AEAD else None,
            max_chunk_bytes=MAX_CHUNK_BYTES,
            codecs=decodable(lossy=True),
            rdma=devices,
        )
        server = TransferServer(options=options, on_read=lambda _: None).start()
        server.register_segment(SEGMENT, memoryview(self._memory[SEGMENT]), SECRET, readable=True)
        return server

    def __enter__(self) -> "RealInlets":
        self._log_level = LOG.level
        LOG.setLevel(logging.ERROR)  # what they say of strangers is not of interest here
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        self._hang_up()
        left = [server for server in self._servers if not _becomes_idle(server)]
        for server in self._servers:
            server.close()
        LOG.setLevel(self._log_level)
        for devices in self._devices:
            devices.close()
        assert kind is not None or not left, f"seed {self._seed}: a connection that is gone is still being read"

    @property
    def counters(self) -> Counter[str]:
        """What the listeners have counted."""
        return sum((server.counters for server in self._servers), Counter[str]())

    def feed(self, number: int) -> None:
        """One input. Raises AssertionError when the listener has failed."""
        if self._stranger is None:
            self._stranger = self._connect()
            self._inputs_left = INPUTS_PER_CONNECTION
            self._began = time.process_time()
        self._inputs_left -= 1
        try:
            self._stranger.sock.sendall(self._input(self._stranger))
        except OSError:  # the listener has had enough
            self._inputs_left = 0
        if not self._inputs_left:
            self._hang_up()
            where = f"seed {self._seed}, input {number}"
            spent_s = time.process_time() - self._began
            assert spent_s < SLOW_S, f"{where}: a connection took {spent_s:.1f} CPU s"
            assert not self.counters["internal_errors"], f"{where}: an error of the listener, see the log"

    def _connect(self) -> Stranger:
        server = self._rng.choice(self._servers)
        with suppress(LocalProtocolError):  # it is expected still
            server.expect("t", SECRET, SIZES, self._target, exact=self._rng.random() < 0.5)
        sealed = server.options.integrity is Integrity.AEAD
        return Stranger.to(server.address, server.new_session() if sealed else None)

    def _target(self, index: int) -> list[memoryview]:
        start = sum(SIZES[:index])
        return [memoryview(self._memory["t"])[start : start + SIZES[index]]]

    def _hang_up(self) -> None:
        """Reads to the end: a listener that counts an error has done so by then."""
        stranger, self._stranger = self._stranger, None
        if stranger is None:
            return
        with stranger, suppress(OSError):
            stranger.sock.shutdown(socket.SHUT_WR)
            while stranger.sock.recv(1 << 16):
                pass

    def _input(self, stranger: Stranger) -> bytes:
        data = bytearray()
        if self._inputs_left == INPUTS_PER_CONNECTION - 1 and self._rng.random() < 0.8:
            if self._rng.random() < 0.3:
                data += stranger.encoded(AskRails())
            data += stranger.encoded(stranger.opening(0, "t", SIZES, SECRET))
        for _ in range(self._rng.choice((1, 1, 2, 5))):
            with suppress(ValueError, struct.error):  # not one that can be said
                data += self._said(stranger)
        if self._rng.random() < 0.05:
            data += bytes(data)  # said again
        return bytes(spoil(self._rng, data) if self._rng.random() < 0.2 else data)

    def _said(self, stranger: Stranger) -> bytes:
        if self._rng.random() < 0.4:
            return self._chunk(stranger)
        frame = any_frame(self._rng, stranger)
        if not isinstance(frame, Chunk | CodedChunk):
            return stranger.connection.encoded(frame)
        size = frame.length if isinstance(frame, Chunk) else frame.coded_length
        return stranger.encoded(frame) + self._rng.randbytes(min(size, MAX_CHUNK_BYTES) + TAG_BYTES * frame.sealed)

    def _chunk(self, stranger: Stranger) -> bytes:
        """One of transfer t that is as it should be, or nearly."""
        rng, connection = self._rng, stranger.connection
        slot = rng.choice((0, 0, 0, 0, 1))
        offset, length = rng.choice(((0, 4096), (4096, 65_536), (69_632, 4464), (0, 1), (4000, 200), (74_000, 200)))
        plain = memoryview(bytes(length))
        coded = self._coded(plain) if rng.random() < 0.5 else None
        carried = plain if coded is None else coded
        if connection.session_secret:
            seal = chunk_seal(connection.session_secret, connection.transcript, "t", SECRET)
            if coded is None:
                header = connection.chunk_header(slot, offset, length, sealed=True)
            else:
                chunk = CodedChunk(
                    slot=slot, offset=offset, length=length, coded_length=len(coded), checksum=0, sealed=True
                )
                header = connection.coded_header(chunk)
            sealing = connection.seal_chunk(seal, header)
            out = memoryview(bytearray(len(carried)))
            sealing.update(carried, out)
            return header + bytes(out) + sealing.tag()
        checksum = digest([carried], transfer_seed("t", connection.transcript), offset)
        if coded is None:
            trailer = checksum.to_bytes(DIGEST_BYTES, "little")
            return stranger.encoded(Chunk(slot=slot, offset=offset, length=length)) + bytes(carried) + trailer
        frame = CodedChunk(slot=slot, offset=offset, length=length, coded_length=len(coded), checksum=checksum)
        return stranger.encoded(frame) + bytes(carried)

    def _coded(self, plain: memoryview) -> memoryview | None:
        """What the decoder gets to see: its checksum, or seal, will be right."""
        codec = self._rng.choice((Codec.INT8, Codec.FP8, Codec.ZSTD, Codec.INT8 | Codec.ZSTD))
        out = memoryview(bytearray(len(plain)))
        made = self._encoder.encode([ChunkPart(plain, Run(len(plain), "bfloat16", 64), codec, "")], out)
        coded = spoil(self._rng, bytearray(out[: made[0]])) if made is not None else bytearray()
        return memoryview(bytes(coded)) if 0 < len(coded) < len(plain) else None


def _becomes_idle(server: TransferServer) -> bool:
    """Whether its connections end and give back their buffers, which they do a moment later."""
    give_up_at = time.monotonic() + PATIENCE_S
    while (server.num_connections or server.buffers_lent_bytes) and time.monotonic() < give_up_at:
        time.sleep(0.01)
    return not (server.num_connections or server.buffers_lent_bytes)
