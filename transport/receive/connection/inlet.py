"""The receiving end of one connection: a thread that reads chunks straight into the memory of their landing."""

import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from transport.coding.codec import ChunkDecoder, CodecError
from transport.errors import Closed, ConnectionRefused, PeerLost, RemoteProtocolError
from transport.path.shm import copy_extents, scatter
from transport.path.tcp import peer_of, prepare, receive_now, wait_readable
from transport.rdma.inlet import RailEnds
from transport.receive.buffers import Buffers, NoBufferRoom, RoomOfPeer
from transport.receive.connection.arenas import Arenas
from transport.receive.connection.greeter import GreetedVisitor
from transport.receive.connection.payload import Filled, Payload
from transport.receive.connection.replies import SEND_TIMEOUT_S, Replies
from transport.receive.options import ServerOptions
from transport.receive.registry.landing import Claim, Landing
from transport.receive.registry.shared import SharedLandings
from transport.wire.checksum import Integrity, digest, transfer_seed
from transport.wire.connection import Connection
from transport.wire.frames import (
    BUFFERS_SINCE,
    MAX_LIST,
    Abort,
    Accept,
    Ack,
    AskRails,
    Cancel,
    Chunk,
    Code,
    CodedChunk,
    Frame,
    Nack,
    Open,
    RailClosed,
    RailOffer,
    Reference,
    Refuse,
    Written,
)
from transport.wire.seal import TAG_BYTES, Seal, chunk_seal

log = logging.getLogger(__name__)

MAX_REFUSED: Final = 1024  # slots that were refused, whose chunks may be on their way; the oldest are forgotten first


class ReceiverThread(threading.Thread):
    """Reads one connection to its end."""

    def __init__(
        self,
        shared: SharedLandings,
        options: ServerOptions,
        sock: socket.socket,
        who: int,
        connection: Connection,
        begun: GreetedVisitor,
    ) -> None:
        super().__init__(name=f"kv-inlet-{who}", daemon=True)
        self.who = who
        self._shared = shared
        self._options = options
        self._sock = sock
        self._connection = connection
        self._begun = begun
        self._replies = Replies(sock, connection)
        address = peer_of(sock).rpartition(":")[0]
        self._buffers = Buffers(shared.buffers, address)
        self._payload = Payload(sock, connection, self._replies, self._buffers, options.limits)
        self._decoder: ChunkDecoder | None = None  # made when first needed
        self._seeds: dict[int, int] = {}  # of the slots that were accepted, as are seals and arenas
        self._seals: dict[int, Seal] = {}
        self._refused: dict[int, None] = dict.fromkeys(begun.refused)
        self._arenas = Arenas(options.arena_dirs)
        self._passed_chunks = 0  # read past since the last one that landed
        self._rails = RailEnds(options.rdma, RoomOfPeer(shared.buffers, address), shared.count)
        self._rails.asked = begun.asked_rails

    def stop(self) -> None:
        self._replies.stop()

    def say(self, frame: Frame, timeout_s: float = SEND_TIMEOUT_S) -> None:
        """Sends a frame from any thread; a peer that reads nothing for too long loses its connection."""
        self._replies.say(frame, timeout_s)

    def run(self) -> None:
        broken: RemoteProtocolError | None = None
        try:
            prepare(self._sock, self._options.tcp)
            self._connection.widen_once()
            self._replies.send_all(self._begun.unsent)
            self._begin(self._begun)
            self._serve()
        except RemoteProtocolError as exc:
            broken = exc
        except NoBufferRoom as exc:
            log.warning("connection %d of %s ended: %s", self.who, peer_of(self._sock), exc)
            self._shared.count("crowded:memory")
            self._shared.count("lost_connections")
        except (OSError, PeerLost, ConnectionRefused, Closed) as exc:
            log.debug("connection %d ended: %s", self.who, exc)
            self._shared.count("lost_connections")
        except Exception:
            log.exception("connection %d ended by an error of ours", self.who)
            self._shared.count("internal_errors")
        finally:
            self._rails.close()  # first: until then the sender may write
            self._shared.gone(self.who)
            self._arenas.close()
            self._buffers.close()  # before it has left: from then on the server's end waits for it no more
            if broken is not None:
                self._say_goodbye(broken)
            self._shared.left(self.who)
            self._sock.close()

    def _say_goodbye(self, exc: RemoteProtocolError) -> None:
        log.info("ended connection %d of %s: %s", self.who, peer_of(self._sock), exc)
        self._shared.count(f"rejected:{exc.code}")
        self._shared.count("lost_connections")
        self._replies.farewell(exc)

    def _serve(self) -> None:
        while True:
            event = self._connection.next_event()
            if event is not None:
                self._handle(event)
                self._buffers.relax()
                if self._replies.are_many:
                    self._replies.flush()
            elif not self._read():
                return

    def _read(self) -> bool:
        """Waits for bytes, after having answered those before; False at the end of the stream."""
        if self._connection.has_data_to_send:  # or a peer that never pauses would never be answered
            self._replies.flush()
        buffer = self._connection.receive_buffer()
        while (size := receive_now(self._sock, buffer)) is None:
            self._replies.flush()
            now = time.monotonic()
            self._connection.on_timer(now)
            wait_readable([self._sock.fileno()], self._connection.next_timer() - now)
        self._connection.received(size, time.monotonic())
        return size > 0

    # frames

    def _handle(self, frame: Frame) -> None:
        match frame:
            case Chunk():
                self._payload.begins()
                self._receive_chunk(frame)
            case CodedChunk():
                self._payload.begins()
                self._receive_coded(frame)
            case Reference():
                self._copy_reference(frame)
            case Open():
                self._open(frame)
            case Abort():
                self._abort(frame)
            case Written():
                self._count_written(frame)
            case AskRails():
                self._rails.asked = True
            case RailOffer():
                for said in self._rails.offer(frame):
                    self.say(said)
            case RailClosed():
                self._rails.closed(frame)

    def _open(self, frame: Open) -> None:
        self._answer(frame, self._shared.open(self.who, frame, self._connection.transcript))

    def _begin(self, begun: GreetedVisitor) -> None:
        """With what was said at the door; the sender could not be told what became of the transfer since then."""
        self._answer(begun.frame, begun.reply)
        landing = self._shared.bound(self.who, begun.frame.slot)
        outcome = landing.outcome if landing is not None else None
        if outcome is not None and not outcome.ok:
            self.say(Cancel(slot=begun.frame.slot, code=outcome.code, detail=outcome.detail))

    def _answer(self, frame: Open, reply: Accept | Refuse) -> None:
        landing = self._shared.bound(self.who, frame.slot)
        if landing is not None:
            self._bind(frame, landing)
        else:  # refused, or a read, for which nothing comes in
            self._refused[frame.slot] = None
            if len(self._refused) > MAX_REFUSED:
                del self._refused[next(iter(self._refused))]
        self._replies.flush()
        if isinstance(reply, Accept) and self._rails.asked:
            if self._rails.direct:
                self._grant(reply)
            else:
                self._introduce(reply.slot)
        self.say(reply)
        self._shared.settle()

    def _bind(self, frame: Open, landing: Landing) -> None:
        """The seals and arenas of an accepted slot: to verify its chunks, and to resolve References."""
        connection = self._connection
        self._refused.pop(frame.slot, None)
        self._seeds[frame.slot] = transfer_seed(frame.transfer_id, connection.transcript)
        if connection.integrity == Integrity.AEAD:
            self._seals[frame.slot] = chunk_seal(
                connection.session_secret, connection.transcript, frame.transfer_id, landing.secret
            )
        if frame.arena_path:
            self._arenas.bind(frame.slot, frame.arena_path)

    def _is_bound(self, slot: int) -> bool:
        """False for a slot that was refused: its chunks were on their way. Raises RemoteProtocolError for one that was
        never opened, or was left: there is no reason to send anything for it.
        """
        if slot not in self._seeds and slot not in self._refused:
            raise RemoteProtocolError(f"bytes for slot {slot}, which is not open")
        return slot in self._seeds

    def _claim(self, frame: Chunk | Reference | Written) -> Claim | None:
        return self._shared.claim(self.who, frame, self._payload.sink_of) if self._is_bound(frame.slot) else None

    def _introduce(self, slot: int) -> None:
        """Tells of the NICs here, those near to the landing's memory first."""
        landing = self._shared.bound(self.who, slot) if self._options.rdma is not None else None
        region = None
        if landing is not None and landing.targets is not None and landing.bytes_total:
            try:
                region = self._rails.region_of(landing.inbox.manifest.views(landing.targets, 0, 1)[0])
            except Exception as exc:
                self._shared.fail(self.who, slot, Code.TARGET, exc)
        knows_buffers = self._connection.version >= BUFFERS_SINCE
        for frame in self._rails.introduction(region, knows_buffers=knows_buffers):
            self.say(frame)

    def _grant(self, reply: Accept) -> None:
        """Direct mode: tells where to write, if the memory is registered: not granted, chunks come over this connection."""
        slot, place = reply.slot, None
        landing = self._shared.grant_memory(self.who, slot) if self._options.rdma is not None else None
        # An Accept that had to be shortened names bytes that have landed: those must not be written.
        if landing is not None and landing.targets is not None and len(reply.missing) < MAX_LIST:
            try:
                place = self._rails.locate(landing.inbox.manifest.views(landing.targets, 0, landing.bytes_total))
            except Exception as exc:
                self._shared.fail(self.who, slot, Code.TARGET, exc)
        if place is None:
            self._shared.revoke_memory(self.who, slot)
        for frame in self._rails.introduction(place[0] if place is not None else None, knows_buffers=True):
            self.say(frame)
        for grant in self._rails.grants(slot, *place) if place is not None else ():
            self.say(grant)

    def _abort(self, frame: Abort) -> None:
        self._shared.abort(self.who, frame)
        self._seeds.pop(frame.slot, None)
        self._seals.pop(frame.slot, None)
        self._arenas.leave(frame.slot)
        self._refused.pop(frame.slot, None)

    def _receive_chunk(self, chunk: Chunk) -> None:
        self._shared.received_bytes += chunk.length
        claim = self._claim(chunk)
        filled = self._fill(chunk, claim) if claim is not None else Filled.VOID
        if claim is not None and filled is not Filled.VOID:
            self._finish(chunk, claim, filled is Filled.WHOLE)
            return
        if claim is not None:
            self._shared.withdraw(claim)
        self._payload.skip()
        self._passed(chunk)

    def _fill(self, chunk: Chunk, claim: Claim) -> Filled:
        if chunk.sealed:
            with self._sealing(chunk.slot):
                return self._payload.fill_sealed(claim, self._connection.open_chunk(self._seals[chunk.slot]))
        if self._connection.integrity == Integrity.NONE:
            return self._payload.fill(claim)
        return self._payload.fill_hashed(claim, self._seeds[chunk.slot], chunk.length)

    @contextmanager
    def _sealing(self, slot: int) -> Iterator[None]:
        """A payload that is not authentic ends the connection, and after some of them the landing."""
        try:
            yield
        except RemoteProtocolError:
            self._shared.break_seal(self.who, slot)
            raise

    def _receive_coded(self, chunk: CodedChunk) -> None:
        """Reads a coded chunk whole into a buffer, checks and decodes it there, and only then copies it into its
        place."""
        self._shared.received_bytes += chunk.length
        if not self._is_bound(chunk.slot):
            self._payload.skip()
            self._passed(chunk)
            return
        lengths = {"carried": self._connection.payload_left, "plain": chunk.length}
        self._buffers.prepare(lengths | ({"opened": chunk.coded_length} if chunk.sealed else {}))
        coded = self._checked(chunk, self._payload.whole())
        if coded is None:
            self._reject(chunk, Code.CHECKSUM)
            return
        plain = self._payload.plain_of(chunk.length)
        lossy_bytes = self._decode(chunk, coded, plain)
        if lossy_bytes is None:
            self._reject(chunk, Code.CODEC)
            return
        claim = self._shared.claim(self.who, chunk, self._payload.sink_of)
        if claim is None:
            self._passed(chunk)
            return
        scatter(plain, claim.views)
        self._finish(chunk, claim, True, lossy_bytes)

    def _checked(self, chunk: CodedChunk, payload: memoryview) -> memoryview | None:
        """The coded bytes, if they are what was sent. Raises RemoteProtocolError when a seal does not open."""
        if not chunk.sealed:
            if self._connection.integrity == Integrity.NONE:
                return payload
            return payload if digest([payload], self._seeds[chunk.slot], chunk.offset) == chunk.checksum else None
        opened = self._buffers.of("opened", chunk.coded_length)[: chunk.coded_length]
        with self._sealing(chunk.slot):
            opening = self._connection.open_chunk(self._seals[chunk.slot])
            opening.update(payload[:-TAG_BYTES], opened)
            opening.verify(bytes(payload[-TAG_BYTES:]))
        return opened

    def _decode(self, chunk: CodedChunk, coded: memoryview, plain: memoryview) -> int | None:
        """How many bytes of it are not exact; None when it cannot be decoded, or must not be."""
        if self._decoder is None:
            self._decoder = ChunkDecoder(self._options.codecs)
        began = time.thread_time()
        try:
            shares = self._decoder.decode(coded, plain)
        except CodecError as exc:
            log.warning("connection %d: a chunk that does not decode: %s", self.who, exc)
            return None
        self._shared.on_decoded(shares, time.thread_time() - began)
        lossy_bytes = sum(share.plain_bytes for share in shares if share.codec.lossy)
        return lossy_bytes if self._shared.takes(self.who, chunk.slot, lossy=lossy_bytes > 0) else None

    def _reject(self, chunk: CodedChunk, code: Code) -> None:
        reply = self._shared.reject(self.who, chunk, code)
        if reply is None:
            self._passed(chunk)
        else:
            self.say(reply)

    def _copy_reference(self, frame: Reference) -> None:
        length = frame.length
        if not 0 < length <= self._options.max_chunk_bytes:
            raise RemoteProtocolError(f"reference to {length} bytes")
        if not self._is_bound(frame.slot):
            self._passed(frame)
            return
        fd = self._arenas.fd(frame.slot)
        if fd is None:
            self.say(Nack(slot=frame.slot, offset=frame.offset, length=length, code=Code.ARENA))
            return
        claim = self._claim(frame)
        if claim is None:
            self._passed(frame)
            return
        complete = copy_extents(fd, frame.extents, claim.views)
        self._shared.received_bytes += length
        # In every mode: the sender may have had its memory back before we came to read it.
        self._finish(frame, claim, complete and self._is_as_sent(frame, claim))

    def _count_written(self, frame: Written) -> None:
        """A chunk was written by the sender: into its rail's buffer, or in direct mode into its place."""
        arrived = self._rails.has_arrived(frame)
        if not self._rails.direct:
            self._take_written(frame, arrived)
            return
        granted = self._shared.is_granted(self.who, frame.slot)
        claim = self._shared.claim(self.who, frame, self._payload.sink_of) if granted else None
        if claim is None:
            self._passed(frame)
            return
        self._shared.received_bytes += frame.length
        unchecked = self._connection.integrity == Integrity.NONE
        self._finish(frame, claim, arrived if unchecked else self._is_as_sent(frame, claim))

    def _take_written(self, frame: Written, arrived: bool) -> None:
        """Checked in its place only: in the buffer the sender may still change it."""
        fd, start = self._rails.written(frame)
        claim = self._claim(frame)
        if claim is None:
            self._passed(frame)
            return
        complete = copy_extents(fd, [(start, frame.length)], claim.views)
        self._shared.received_bytes += frame.length
        unchecked = self._connection.integrity == Integrity.NONE
        self._finish(frame, claim, complete and (arrived if unchecked else self._is_as_sent(frame, claim)))

    def _is_as_sent(self, frame: Reference | Written, claim: Claim) -> bool:
        return digest(claim.views, self._seeds[claim.slot], claim.start) == frame.checksum

    def _passed(self, frame: Chunk | CodedChunk | Reference | Written) -> None:
        """A chunk without a place here. It is answered anyway, which frees its room in the sender's window."""
        self._passed_chunks += 1
        if self._passed_chunks > (most := self._options.limits.max_passed_chunks):
            raise RemoteProtocolError(f"more than {most} unexpected chunks")
        self.say(Nack(slot=frame.slot, offset=frame.offset, length=frame.length, code=Code.CANCELLED))

    def _finish(
        self, frame: Chunk | CodedChunk | Reference | Written, claim: Claim, verified: bool, lossy_bytes: int = 0
    ) -> None:
        reply = self._shared.finish(claim, verified, lossy_bytes)
        if isinstance(reply, Ack):
            self._replies.acknowledge(claim.slot, claim.start, claim.stop)
            self._passed_chunks = 0
        elif reply is not None:
            self.say(reply)
        else:
            self._passed(frame)
