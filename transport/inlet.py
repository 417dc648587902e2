"""The receiving end of one connection: a thread that reads chunks straight into the memory of their landing."""

import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final

from transport.checksum import DIGEST_BYTES, HASHED_PART_BYTES, Digest, Integrity, digest, transfer_seed
from transport.codec import CodecError, Decoder
from transport.connection import BULK_BYTES, NONCE_BYTES, Connection, Role, State
from transport.crypto import SEALED_PART_BYTES, SMALL_VIEW_BYTES, TAG_BYTES, TLS_RECORD, Opening, Seal, chunk_seal
from transport.errors import (
    Closed,
    ConnectionRefused,
    GreetingRefused,
    LocalProtocolError,
    PeerLost,
    RemoteProtocolError,
)
from transport.frames import (
    MAX_LIST,
    Abort,
    Accept,
    Ack,
    AskRails,
    Chunk,
    Code,
    CodedChunk,
    Frame,
    Hello,
    Nack,
    Open,
    RailClosed,
    RailOffer,
    Reference,
    Written,
)
from transport.landings import Claim, Landing
from transport.rdma_inlet import RailEnds
from transport.shm import advance, copy, copy_extents, open_arena, parts_of, pour, scatter
from transport.tcp import (
    hang_up,
    peer_of,
    prepare,
    receive_now,
    receive_some,
    send_some,
    shut,
    wait_readable,
)

if TYPE_CHECKING:
    from transport.server import TransferServer

log = logging.getLogger(__name__)

MAX_PENDING_ACKS: Final = 1000
MAX_PASSED_CHUNKS: Final = 1 << 16  # in a row that had no place here: each is answered, and a stranger lands none
MAX_REFUSED: Final = 1024  # slots that were refused, whose chunks may be on their way; the oldest are forgotten first
SINK_BYTES: Final = 64 << 10  # what has no place is read past in pieces of this size
ACK_DELAY_S: Final = 0.005  # while more comes in, slowly
# While there is more to read, acknowledgements wait for each other: one wakes the sender, who has enough to do then.
MAX_PENDING_ACK_BYTES: Final = 16 << 20
SEND_TIMEOUT_S: Final = 2.0  # acknowledgements are tiny: a peer that takes none for this long reads nothing


class Inlet(threading.Thread):
    """Reads one connection to its end."""

    def __init__(self, server: "TransferServer", sock: socket.socket, who: int) -> None:
        super().__init__(name=f"kv-inlet-{who}", daemon=True)
        self.who = who
        self._server = server
        self._sock = sock
        options = server.options
        self._connection = Connection(
            Role.RECEIVER,
            integrity=options.integrity,
            nonce=os.urandom(NONCE_BYTES),
            now=time.monotonic(),
            max_chunk_bytes=options.max_chunk_bytes,
            dead_after_s=options.tcp.dead_after_s,
            session_secret=server.secret_of,
            codecs=options.codecs,
        )
        self._decoder: Decoder | None = None  # made when first needed
        self._opened = memoryview(b"")  # coded payloads out of their seal
        self._seals: dict[int, Seal] = {}
        self._sealed = memoryview(b"")  # where parts of sealed payloads, and coded ones, lie until they are opened
        self._send_lock = threading.Lock()
        self._seeds: dict[int, int] = {}  # of the slots that were accepted, as are seals and arenas
        self._refused: dict[int, None] = {}
        self._arenas: dict[int, str] = {}  # slot -> path
        self._arena_fds: dict[str, int] = {}
        self._acks: dict[int, list[tuple[int, int]]] = {}
        self._num_acks = self._ack_bytes = 0
        self._passed_chunks = 0  # read past since the last one that landed
        self._acks_since = 0.0
        self._sink = memoryview(b"")
        self._plain = memoryview(b"")
        self._rails = RailEnds(options.rdma, server.count)

    def stop(self) -> None:
        shut(self._sock)

    def say(self, frame: Frame, timeout_s: float = SEND_TIMEOUT_S) -> None:
        """Sends a frame from any thread; a peer that takes nothing for so long loses its connection."""
        if not self._send_lock.acquire(timeout=timeout_s):
            self.stop()
            return
        try:
            if self._connection.state is State.OPEN:
                self._send_all(self._connection.send(frame), timeout_s)
        except (OSError, PeerLost, LocalProtocolError):  # the last: it was closed by its own thread meanwhile
            self.stop()
        finally:
            self._send_lock.release()

    def run(self) -> None:
        broken: RemoteProtocolError | None = None
        try:
            prepare(self._sock, self._server.options.tcp)
            if self._speaks_tls():
                self._server.grant(self._sock)
            else:
                self._serve()
        except RemoteProtocolError as exc:
            broken = exc
        except (OSError, PeerLost, ConnectionRefused, Closed) as exc:
            log.debug("connection %d ended: %s", self.who, exc)
            self._server.count("lost_connections")
        except Exception:
            log.exception("connection %d ended by an error of ours", self.who)
            self._server.count("internal_errors")
        finally:
            self._rails.close()  # first: until then the sender may write
            self._server.let_go(self)
            if broken is not None:
                self._say_goodbye(broken)
            self._server.left(self)
            self._sock.close()
            for fd in self._arena_fds.values():
                os.close(fd)

    def _speaks_tls(self) -> bool:
        first = bytearray(1)
        while not (size := receive_now(self._sock, memoryview(first), socket.MSG_PEEK)):
            if size == 0:
                raise PeerLost("nothing was said")
            now = time.monotonic()
            self._connection.on_timer(now)
            wait_readable([self._sock.fileno()], self._connection.next_timer() - now)
        return first[0] == TLS_RECORD

    def _say_goodbye(self, exc: RemoteProtocolError) -> None:
        """To a peer that broke the protocol; a sender at work has more on its way, which must not make it a reset."""
        if isinstance(exc, GreetingRefused):
            self._server.refused(exc.code, peer_of(self._sock), str(exc))
        else:
            log.info("ended connection %d of %s: %s", self.who, peer_of(self._sock), exc)
            self._server.count(f"rejected:{exc.code}")
            self._server.count("lost_connections")
        with suppress(OSError, PeerLost), self._send_lock:  # it may be gone already
            self._send_all(self._connection.farewell(exc))
        hang_up(self._sock)

    def _serve(self) -> None:
        while True:
            event = self._connection.next_event()
            if event is not None:
                self._handle(event)
                if self._num_acks >= MAX_PENDING_ACKS or self._ack_bytes >= MAX_PENDING_ACK_BYTES:
                    self._flush()
            elif not self._read():
                return

    def _read(self) -> bool:
        """Waits for bytes, after having answered those before; False at the end of the stream."""
        buffer = self._connection.receive_buffer()
        while (size := receive_now(self._sock, buffer)) is None:
            self._flush()
            now = time.monotonic()
            self._connection.on_timer(now)
            wait_readable([self._sock.fileno()], self._connection.next_timer() - now)
        self._connection.received(size, time.monotonic())
        return size > 0

    def _flush(self) -> None:
        """Acknowledges what has landed since the last time, in as few frames as possible."""
        acks, self._acks, self._num_acks, self._ack_bytes = self._acks, {}, 0, 0
        with self._send_lock:
            data = self._connection.data_to_send()
            for slot, ranges in acks.items():
                data += self._connection.send(Ack(slot=slot, ranges=tuple(ranges)))
            if data:
                self._send_all(data)

    def _send_all(self, data: bytes, timeout_s: float = SEND_TIMEOUT_S) -> None:
        give_up_at = time.monotonic() + timeout_s
        view = memoryview(data)
        while view:
            view = view[send_some(self._sock, [view]) :]
            if view and time.monotonic() > give_up_at:
                raise PeerLost("the peer does not read")

    # frames

    def _handle(self, frame: Frame) -> None:
        match frame:
            case Chunk():
                self._receive_chunk(frame)
            case CodedChunk():
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
                self.say(self._rails.offer(frame))
            case RailClosed():
                self._rails.closed(frame)
            case Hello():
                pass  # the connection has answered it

    def _open(self, frame: Open) -> None:
        with self._server.changed:
            reply = self._server.landings.open(self.who, frame, self._connection.nonces, time.monotonic())
            self._server.changed.notify_all()
            landing = self._server.landings.bound(self.who, frame.slot)
        if landing is not None:
            self._bind(frame, landing)
        else:  # refused, or a read, for which nothing comes in
            self._refused[frame.slot] = None
            if len(self._refused) > MAX_REFUSED:
                del self._refused[next(iter(self._refused))]
        self._flush()
        if isinstance(reply, Accept) and self._rails.asked:
            self._grant(reply)
        self.say(reply)
        self._server.settle()

    def _bind(self, frame: Open, landing: Landing) -> None:
        """What the chunks of an accepted slot are verified with, and where References point."""
        connection = self._connection
        self._refused.pop(frame.slot, None)
        self._seeds[frame.slot] = transfer_seed(frame.transfer_id, connection.nonces)
        if self._server.options.integrity is Integrity.AEAD:
            self._seals[frame.slot] = chunk_seal(
                connection.session_secret, connection.nonces, frame.transfer_id, landing.secret
            )
        if frame.arena_path:
            self._arenas[frame.slot] = frame.arena_path

    def _is_bound(self, slot: int) -> bool:
        """False for a slot that was refused: its chunks were on their way. Raises RemoteProtocolError for one that was
        never opened, or was left: nobody has a reason to send anything for it.
        """
        if slot not in self._seeds and slot not in self._refused:
            raise RemoteProtocolError(f"bytes for slot {slot}, which is not open")
        return slot in self._seeds

    def _claim(self, frame: Chunk | Reference) -> Claim | None:
        return self._server.claim(self.who, frame, self._sink_of) if self._is_bound(frame.slot) else None

    def _grant(self, reply: Accept) -> None:
        """Tells where to write, if the memory is registered: not granted, chunks come over this connection."""
        slot, place = reply.slot, None
        landing = self._server.grant_memory(self.who, slot) if self._server.options.rdma is not None else None
        # An Accept that had to be shortened names bytes that have landed: those nobody may write.
        if landing is not None and landing.targets is not None and len(reply.missing) < MAX_LIST:
            try:
                place = self._rails.locate(landing.inbox.manifest.views(landing.targets, 0, landing.bytes_total))
            except Exception as exc:
                self._server.fail(self.who, slot, Code.TARGET, exc)
        if place is None:
            self._server.revoke_memory(self.who, slot)
        for nics in self._rails.nics(place[0] if place is not None else None):
            self.say(nics)
        for grant in self._rails.grants(slot, *place) if place is not None else ():
            self.say(grant)

    def _abort(self, frame: Abort) -> None:
        with self._server.changed:
            notices = self._server.landings.abort(self.who, frame, time.monotonic())
            self._server.changed.notify_all()
        self._seeds.pop(frame.slot, None)
        self._seals.pop(frame.slot, None)
        self._arenas.pop(frame.slot, None)
        self._refused.pop(frame.slot, None)
        self._server.tell(notices)
        self._server.settle()

    def _receive_chunk(self, chunk: Chunk) -> None:
        self._server.received_bytes += chunk.length
        if chunk.sealed:
            self._receive_sealed(chunk)
            return
        claim, verified = self._claim(chunk), True
        if claim is None or self._server.options.integrity is Integrity.NONE:
            claim = self._fill(claim)
        else:
            claim, verified = self._fill_hashed(chunk, claim)
        if claim is None:
            self._passed(chunk)
        else:
            self._finish(chunk, claim, verified)

    def _fill_hashed(self, chunk: Chunk, claim: Claim) -> tuple[Claim | None, bool]:
        """Part by part into its place, each hashed while the processor's cache has it; no claim when the landing failed
        meanwhile.
        """
        running = Digest(self._seeds[claim.slot], claim.start)
        trailer = memoryview(bytearray(DIGEST_BYTES)) if self._connection.digest_behind else memoryview(b"")
        left = chunk.length
        for part in parts_of(claim.views, HASHED_PART_BYTES):
            left -= sum(map(len, part))
            if not self._read_part([*part, trailer] if trailer and not left else part, claim):
                self._withdraw(claim)
                self._skip()
                return None, False
            running.update(part)
        expected = int.from_bytes(trailer, "little") if trailer else chunk.checksum
        return claim, running.value() == expected

    def _receive_sealed(self, chunk: Chunk) -> None:
        claim = self._claim(chunk)
        if claim is None:
            self._skip()
        else:
            with self._sealing(chunk.slot):
                claim = self._fill_sealed(self._connection.open_chunk(self._seals[chunk.slot]), claim)
        if claim is None:
            self._passed(chunk)
        else:
            self._finish(chunk, claim, True)

    @contextmanager
    def _sealing(self, slot: int) -> Iterator[None]:
        """A payload that is not authentic ends the connection, and after some of them the landing."""
        try:
            yield
        except RemoteProtocolError:
            self._server.break_seal(self.who, slot)
            raise

    def _receive_coded(self, chunk: CodedChunk) -> None:
        """Whole into a buffer of ours, checked and decoded there, and only then into its place."""
        self._server.received_bytes += chunk.length
        if not self._is_bound(chunk.slot):
            self._skip()
            self._passed(chunk)
            return
        size = self._connection.payload_left
        if len(self._sealed) < size:
            self._sealed = memoryview(bytearray(size))
        self._read_past([self._sealed[:size]])
        coded = self._checked(chunk, self._sealed[:size])
        if coded is None:
            self._reject(chunk, Code.CHECKSUM)
            return
        plain = self._plain_of(chunk.length)[: chunk.length]
        lossy_bytes = self._decode(chunk, coded, plain)
        if lossy_bytes is None:
            self._reject(chunk, Code.CODEC)
            return
        claim = self._server.claim(self.who, chunk, self._sink_of)
        if claim is None:
            self._passed(chunk)
            return
        scatter(plain, claim.views)
        self._finish(chunk, claim, True, lossy_bytes)

    def _checked(self, chunk: CodedChunk, payload: memoryview) -> memoryview | None:
        """The coded bytes, if they are what was sent. Raises RemoteProtocolError when a seal does not open."""
        if not chunk.sealed:
            if self._server.options.integrity is Integrity.NONE:
                return payload
            return payload if digest([payload], self._seeds[chunk.slot], chunk.offset) == chunk.checksum else None
        if len(self._opened) < chunk.coded_length:
            self._opened = memoryview(bytearray(chunk.coded_length))
        opened = self._opened[: chunk.coded_length]
        with self._sealing(chunk.slot):
            opening = self._connection.open_chunk(self._seals[chunk.slot])
            opening.update(payload[:-TAG_BYTES], opened)
            opening.verify(bytes(payload[-TAG_BYTES:]))
        return opened

    def _decode(self, chunk: CodedChunk, coded: memoryview, plain: memoryview) -> int | None:
        """How many bytes of it are not exact; None when it cannot be decoded, or must not be."""
        if self._decoder is None:
            self._decoder = Decoder(self._server.options.codecs)
        began = time.thread_time()
        try:
            shares = self._decoder.decode(coded, plain)
        except CodecError as exc:
            log.warning("connection %d: a chunk that does not decode: %s", self.who, exc)
            return None
        self._server.on_decoded(shares, time.thread_time() - began)
        lossy_bytes = sum(share.plain_bytes for share in shares if share.codec.lossy)
        with self._server.lock:
            taken = self._server.landings.takes(self.who, chunk.slot, lossy=lossy_bytes > 0)
        return lossy_bytes if taken else None

    def _reject(self, chunk: CodedChunk, code: Code) -> None:
        with self._server.lock:
            reply = self._server.landings.reject(self.who, chunk.slot, chunk.offset, chunk.length, code)
        if reply is None:
            self._passed(chunk)
        else:
            self.say(reply)

    def _fill_sealed(self, opening: Opening, claim: Claim) -> Claim | None:
        """Part by part into a buffer of ours and from there, opened, into its place; None when the landing failed
        meanwhile. Raises RemoteProtocolError when the payload is not authentic: its place counts as missing then.
        """
        connection, places = self._connection, list(claim.views)
        if len(self._sealed) < SEALED_PART_BYTES + TAG_BYTES:
            self._sealed = memoryview(bytearray(SEALED_PART_BYTES + TAG_BYTES))
        while True:
            left = connection.payload_left
            last = left <= SEALED_PART_BYTES + TAG_BYTES
            part = self._sealed[: left if last else SEALED_PART_BYTES]
            if not self._read_part([part], claim):
                self._withdraw(claim)
                self._skip()
                return None
            self._open_into(opening, part[:-TAG_BYTES] if last else part, places)
            if last:
                opening.verify(bytes(part[-TAG_BYTES:]))
                return claim

    def _read_past(self, views: list[memoryview]) -> None:
        """Fills the views, whatever becomes of the landing."""
        while views:
            if self._connection.payload_buffered:
                advance(views, self._connection.take_payload(views[0]))
            else:
                self._read_payload(views)

    def _open_into(self, opening: Opening, sealed: memoryview, places: list[memoryview]) -> None:
        """Into the first places, which are taken off the list."""
        if places and len(places[0]) < min(len(sealed), SMALL_VIEW_BYTES):
            plain = self._plain_of(len(sealed))[: len(sealed)]
            opening.update(sealed, plain)
            pour(plain, places, copy)
        else:
            pour(sealed, places, opening.update)

    def _read_part(self, part: list[memoryview], claim: Claim) -> bool:
        """False when the landing failed meanwhile."""
        rest = list(part)
        while rest:
            if claim.void:
                return False
            if self._connection.payload_buffered:
                advance(rest, self._connection.take_payload(rest[0]))
            else:
                self._read_payload(rest)
        return True

    def _fill(self, claim: Claim | None) -> Claim | None:
        """Reads the payload into its place, or past it; None when the landing failed meanwhile."""
        if claim is None:
            self._skip()
            return None
        connection, views = self._connection, list(claim.views)
        while connection.payload_buffered:
            advance(views, connection.take_payload(views[0]))
        while connection.payload_left:
            if claim.void:
                self._withdraw(claim)
                self._skip()
                return None
            self._read_payload(views)
        return claim

    def _skip(self) -> None:
        """Reads past what is left of the payload."""
        while left := self._connection.payload_left:
            self._read_past([self._sink_of(SINK_BYTES)[: min(left, SINK_BYTES)]])

    def _read_payload(self, views: list[memoryview]) -> None:
        connection = self._connection
        left = connection.payload_left
        bulk = left > BULK_BYTES
        # Behind a small chunk there is likely another one: take what is there in the same call. Not behind a part of one:
        # what follows that is payload still.
        alone = bulk or len(views) > 256 or sum(map(len, views)) < left
        into = views if alone else [*views, connection.receive_buffer()]
        size = receive_some(self._sock, into, socket.MSG_WAITALL if bulk else 0)
        now = time.monotonic()
        if size is None:
            connection.on_timer(now)
            return
        if size == 0:
            raise PeerLost("the connection ended in mid-chunk")
        connection.payload_received(min(size, left), now)
        advance(views, min(size, left))
        if size > left:
            connection.received(size - left, now)
        if self._num_acks and now >= self._acks_since + ACK_DELAY_S:
            self._flush()

    def _copy_reference(self, frame: Reference) -> None:
        length = frame.length
        if not 0 < length <= self._server.options.max_chunk_bytes:
            raise RemoteProtocolError(f"reference to {length} bytes")
        if not self._is_bound(frame.slot):
            self._passed(frame)
            return
        fd = self._arena_fd(frame.slot)
        if fd is None:
            self.say(Nack(slot=frame.slot, offset=frame.offset, length=length, code=Code.ARENA))
            return
        claim = self._claim(frame)
        if claim is None:
            self._passed(frame)
            return
        complete = copy_extents(fd, frame.extents, claim.views)
        self._server.received_bytes += length
        # In every mode: the sender may have had its memory back before we came to read it.
        self._finish(frame, claim, complete and self._is_as_sent(frame, claim))

    def _count_written(self, frame: Written) -> None:
        """A chunk was written into its place by the sender."""
        arrived = self._rails.has_arrived(frame)
        with self._server.lock:
            granted = self._server.landings.is_granted(self.who, frame.slot)
        claim = self._server.claim(self.who, frame, self._sink_of) if granted else None
        if claim is None:
            self._passed(frame)
            return
        self._server.received_bytes += frame.length
        unchecked = self._server.options.integrity is Integrity.NONE
        self._finish(frame, claim, arrived if unchecked else self._is_as_sent(frame, claim))

    def _arena_fd(self, slot: int) -> int | None:
        path = self._arenas.get(slot, "")
        if path not in self._arena_fds:
            try:
                self._arena_fds[path] = open_arena(path, self._server.options.arena_dirs)
            except OSError as exc:
                log.warning("cannot read arena %s of a sender: %s", path, exc)
                return None
        return self._arena_fds[path]

    def _is_as_sent(self, frame: Reference | Written, claim: Claim) -> bool:
        return digest(claim.views, self._seeds[claim.slot], claim.start) == frame.checksum

    def _passed(self, frame: Chunk | CodedChunk | Reference | Written) -> None:
        """A chunk without a place here. It is answered all the same: that frees its room in the sender's window."""
        self._passed_chunks += 1
        if self._passed_chunks > MAX_PASSED_CHUNKS:
            raise RemoteProtocolError(f"more than {MAX_PASSED_CHUNKS} chunks that nobody waits for")
        self.say(Nack(slot=frame.slot, offset=frame.offset, length=frame.length, code=Code.CANCELLED))

    def _finish(
        self, frame: Chunk | CodedChunk | Reference | Written, claim: Claim, verified: bool, lossy_bytes: int = 0
    ) -> None:
        with self._server.lock:
            reply = self._server.landings.finish(claim, verified, time.monotonic(), lossy_bytes)
            settled = claim.landing.outcome is not None
        if isinstance(reply, Ack):
            self._acks.setdefault(claim.slot, []).append((claim.start, claim.stop))
            if not self._num_acks:
                self._acks_since = time.monotonic()
            self._num_acks += 1
            self._passed_chunks = 0
            self._ack_bytes += claim.stop - claim.start
        elif reply is not None:
            self.say(reply)
        else:
            self._passed(frame)
        if settled:
            self._server.settle()

    def _withdraw(self, claim: Claim) -> None:
        with self._server.lock:
            self._server.landings.withdraw(claim)
        self._server.settle()

    def _plain_of(self, size: int) -> memoryview:
        """Not the sink: that may be a part of a chunk's place."""
        if len(self._plain) < size:
            self._plain = memoryview(bytearray(size))
        return self._plain

    def _sink_of(self, size: int) -> memoryview:
        """Memory for bytes that have no other place; allocated when first needed, at most one chunk long."""
        if len(self._sink) < size:
            self._sink = memoryview(bytearray(size))
        return self._sink
