"""One end of one connection, without the connection: bytes and the time in, frames and bytes out.

    received:  receive_buffer() -> fill it -> received(n, now)         or receive_data(bytes, now)
               next_event() -> Frame | None                            None: needs more bytes
               after a Chunk: take_payload(view), payload_received(n)  until payload_left is 0
    to send:   send(frame) -> bytes, chunk_header(...) -> bytes        the caller puts them on the wire, in this order
               data_to_send() -> bytes                                 what the connection itself wants to say
    time:      next_timer() -> when; on_timer(now)                     pings, handshake deadline, silence

The payload of a chunk never passes through here but for the part that came in the same read as the frame before it.
"""

from collections.abc import Callable
from enum import Enum, auto
from typing import Final

from transport.errors import ConnectionRefused, GreetingRefused, LocalProtocolError, PeerLost, RemoteProtocolError
from transport.wire.checksum import DIGEST_BYTES, Integrity
from transport.wire.encoding import decode, encode, encode_chunk, encode_coded
from transport.wire.frames import (
    CHUNK_BODY_BYTES,
    FLAG_SEALED,
    HEADER,
    MAX_BODY_BYTES,
    PAYLOAD_KINDS,
    VERSION_MIN,
    Abort,
    Accept,
    Ack,
    AskRails,
    Cancel,
    Chunk,
    Code,
    CodedChunk,
    Frame,
    Goodbye,
    Grant,
    Hello,
    LandingBuffers,
    Nack,
    Nics,
    Open,
    Ping,
    Pong,
    RailAnswer,
    RailBuffer,
    RailClosed,
    RailOffer,
    Reference,
    Refuse,
    Welcome,
    Written,
)
from transport.wire.greeting import Greeting
from transport.wire.seal import TAG_BYTES, Opening, Seal, Sealing

PING_INTERVAL_S: Final = 2.0
# Large enough for any frame and for a good many small chunks in one read.
BUFFER_BYTES: Final = 2 * (MAX_BODY_BYTES + HEADER.size)
# After a large chunk comes a large chunk: read its header only, so that its payload need not be copied.
BULK_BYTES: Final = 64 << 10
GREETING_BUFFER_BYTES: Final = 4096
MAX_FAREWELL_BYTES: Final = 500


class ConnectionRole(Enum):
    SENDER = auto()
    RECEIVER = auto()


class ProtocolState(Enum):
    GREETING = auto()
    OPEN = auto()
    CLOSED = auto()


_G, _O, _C = ProtocolState.GREETING, ProtocolState.OPEN, ProtocolState.CLOSED
_BOTH: Final[dict[type[Frame], ProtocolState]] = {Ping: _O, Pong: _O, Goodbye: _C}
_RDMA_OF_SENDER: Final[dict[type[Frame], ProtocolState]] = {AskRails: _O, RailOffer: _O, Written: _O, RailClosed: _O}
_RDMA_OF_RECEIVER: Final[dict[type[Frame], ProtocolState]] = {
    Nics: _O, Grant: _O, LandingBuffers: _O, RailBuffer: _O, RailAnswer: _O, RailClosed: _O,
}  # fmt: skip
_SAID_BY_SENDER: Final[dict[ProtocolState, dict[type[Frame], ProtocolState]]] = {
    _G: {Hello: _O, Goodbye: _C},
    _O: {**_BOTH, Open: _O, Chunk: _O, CodedChunk: _O, Reference: _O, Abort: _O, **_RDMA_OF_SENDER},
    _C: {},
}
_SAID_BY_RECEIVER: Final[dict[ProtocolState, dict[type[Frame], ProtocolState]]] = {
    _G: {Welcome: _O, Goodbye: _C},
    _O: {**_BOTH, Accept: _O, Refuse: _O, Ack: _O, Nack: _O, Cancel: _O, **_RDMA_OF_RECEIVER},
    _C: {},
}
# What may come in. What may go out is the other one; only the greeting differs, since saying Hello opens nothing yet.
TRANSITIONS: Final = {ConnectionRole.SENDER: _SAID_BY_RECEIVER, ConnectionRole.RECEIVER: _SAID_BY_SENDER}


class Connection:
    """The protocol state of one end."""

    def __init__(
        self,
        role: ConnectionRole,
        *,
        integrity: str,
        weaker: str | None = None,
        nonce: bytes,
        now: float,
        max_chunk_bytes: int,
        session: bytes = b"",
        session_secret: Callable[[bytes], bytes | None] | None = None,
        dead_after_s: float = 10.0,
        codecs: int = 0,
    ) -> None:
        self.role = role
        self.version = VERSION_MIN  # until both have greeted
        self.codecs = codecs  # what the receiver decodes; a sender learns it
        self.state = ProtocolState.GREETING
        self.integrity = integrity  # of a receiver that takes a `weaker` one, too: until both have greeted
        self.digest_behind = integrity == Integrity.CHECKSUM  # of a Chunk's payload
        self.transcript = b""  # of both greetings, once they were said: unique, and the same at both ends or not at all
        self.session_secret = b""  # once agreed on
        self._greeting = Greeting(integrity, nonce, session, session_secret, weaker)
        self._seal_out: Seal | None = None
        self._seal_in: Seal | None = None
        self._chunk_header = b""
        self._chunk_seq = 0
        self.max_chunk_bytes = max_chunk_bytes
        self.payload_left = 0
        self._dead_after_s = dead_after_s
        # Strangers are many: until one is let in, or has a large frame to say, it gets little.
        self._buffer = memoryview(bytearray(BUFFER_BYTES if role is ConnectionRole.SENDER else GREETING_BUFFER_BYTES))
        self._begin = self._end = 0
        self._bulk = False
        self.frames_received = self.frames_sent = 0
        self._greeting_bytes = b""  # not sent yet
        self._outgoing: dict[type[Frame], Frame] = {}  # one of a kind: a peer cannot make them pile up
        self._began_at = self._heard_at = self._pinged_at = now
        if role is ConnectionRole.SENDER:
            self._greet(self._greeting.hello())

    # bytes in

    def receive_buffer(self) -> memoryview:
        """Where the next read should go; never empty."""
        if self._begin == self._end:
            self._begin = self._end = 0
            if self._bulk:
                return self._buffer[: HEADER.size + CHUNK_BODY_BYTES]
        elif len(self._buffer) - self._end < len(self._buffer) // 4:
            pending = bytes(self._buffer[self._begin : self._end])
            self._buffer[: len(pending)] = pending
            self._begin, self._end = 0, len(pending)
        if self._end == len(self._buffer):
            if self._end == BUFFER_BYTES:
                raise LocalProtocolError("the events of earlier bytes were not taken")
            self.widen_once()
        return self._buffer[self._end :]

    def widen_once(self) -> None:
        """From now on reads use a large buffer."""
        if len(self._buffer) == BUFFER_BYTES:
            return
        narrow, self._buffer = self._buffer, memoryview(bytearray(BUFFER_BYTES))
        self._buffer[: self._end] = narrow[: self._end]

    def received(self, size: int, now: float) -> None:
        """`size` bytes were put into receive_buffer()."""
        self._end += size
        self._heard_at = now

    def receive_data(self, data: bytes | memoryview, now: float) -> int:
        """Takes bytes from anywhere; returns how many fitted."""
        room = self.receive_buffer()
        size = min(len(room), len(data))
        room[:size] = data[:size]
        self.received(size, now)
        return size

    def next_event(self) -> Frame | None:
        """The next whole frame. Raises RemoteProtocolError, ConnectionRefused; the connection is closed then."""
        if self.payload_left:
            raise LocalProtocolError("the payload of the last chunk was not taken")
        try:
            frame = self._parse()
            while frame is not None and self._answered(frame):
                frame = self._parse()
        except (RemoteProtocolError, ConnectionRefused):
            self.state = ProtocolState.CLOSED
            raise
        return frame

    def take_payload(self, into: memoryview) -> int:
        """Copies what is buffered of the present chunk's payload; returns how much it was."""
        size = min(self.payload_left, self._end - self._begin, len(into))
        into[:size] = self._buffer[self._begin : self._begin + size]
        self._begin += size
        self.payload_left -= size
        return size

    @property
    def payload_buffered(self) -> int:
        return min(self.payload_left, self._end - self._begin)

    def payload_received(self, size: int, now: float) -> None:
        """`size` bytes of payload were read elsewhere."""
        assert size <= self.payload_left
        assert not self.payload_buffered
        self.payload_left -= size
        self._heard_at = now

    # bytes out

    def send(self, frame: Frame) -> bytes:
        """The bytes of `frame`, which must be sent next. Raises LocalProtocolError when the state forbids it."""
        allowed = TRANSITIONS[ConnectionRole.RECEIVER if self.role is ConnectionRole.SENDER else ConnectionRole.SENDER]
        if type(frame) not in allowed[self.state]:
            raise LocalProtocolError(f"{type(frame).__name__} cannot be sent in state {self.state.name}")
        if isinstance(frame, Goodbye):
            self.state = ProtocolState.CLOSED
        return self.encoded(frame)

    def encoded(self, frame: Frame) -> bytes:
        """The bytes of `frame` as the next one, in any state: numbered and sealed. A frame that cannot be encoded
        raises ValueError or struct.error, and takes no number.
        """
        number = self.frames_sent
        data = encode(frame, number)
        self.frames_sent += 1
        if self._seal_out is None or isinstance(frame, Hello | Welcome):
            return data
        kind, _, seq, body_bytes = HEADER.unpack_from(data)
        header = HEADER.pack(kind, FLAG_SEALED, seq, body_bytes + TAG_BYTES)
        return header + self._seal_out.seal(number, data[HEADER.size :], header)

    def seal_chunk(self, seal: Seal, header: bytes) -> Sealing:
        """For the payload behind a header, the last one that was made; the tag goes behind the payload."""
        return seal.sealing(self.frames_sent - 1, header)

    def open_chunk(self, seal: Seal) -> Opening:
        """For the payload of the last Chunk or CodedChunk."""
        return seal.opening(self._chunk_seq, self._chunk_header)

    def chunk_header(self, slot: int, offset: int, length: int, sealed: bool = False) -> bytes:
        """The header before a chunk's payload: `send(Chunk(...))` without the object."""
        assert self.state is ProtocolState.OPEN
        seq = self.frames_sent
        self.frames_sent += 1
        return encode_chunk(slot, offset, length, seq, sealed)

    def coded_header(self, chunk: CodedChunk) -> bytes:
        """The header before a coded chunk's payload."""
        assert self.state is ProtocolState.OPEN
        seq = self.frames_sent
        self.frames_sent += 1
        return encode_coded(chunk, seq)

    def farewell(self, exc: RemoteProtocolError) -> bytes:
        """The last words to a peer that broke the protocol: why."""
        if not isinstance(exc, GreetingRefused):  # that has said it already
            detail = str(exc).encode()[:MAX_FAREWELL_BYTES].decode(errors="ignore")
            self._say(Goodbye(code=exc.code, detail=detail))
        self.state = ProtocolState.CLOSED
        return self.data_to_send()

    def data_to_send(self) -> bytes:
        """The greeting, pings and pongs."""
        greeting, self._greeting_bytes = self._greeting_bytes, b""
        frames, self._outgoing = self._outgoing, {}
        return greeting + b"".join([self.encoded(frame) for frame in frames.values()])

    @property
    def has_data_to_send(self) -> bool:
        return bool(self._greeting_bytes or self._outgoing)

    # time

    def next_timer(self) -> float:
        """When on_timer() wants to be called."""
        dead_at = self._alive_at + self._dead_after_s
        if self.role is ConnectionRole.SENDER and self.state is ProtocolState.OPEN:
            return min(dead_at, self._pinged_at + PING_INTERVAL_S)
        return dead_at

    def on_timer(self, now: float) -> None:
        """Pings when it is time to. Raises PeerLost when the peer has been silent for too long.

        Only senders ping: it keeps idle connections alive, and tells the receiver, too, that its peer is alive.
        """
        if now >= self._alive_at + self._dead_after_s:
            silent = "no whole greeting" if self.state is ProtocolState.GREETING else "nothing heard"
            self.state = ProtocolState.CLOSED
            raise PeerLost(f"{silent} for {now - self._alive_at:.1f} s")
        if self.role is not ConnectionRole.SENDER or self.state is not ProtocolState.OPEN:
            return
        if now >= self._pinged_at + PING_INTERVAL_S:
            self._pinged_at = now
            self._say(Ping(token=self.frames_sent & 0xFFFFFFFF))

    @property
    def _alive_at(self) -> float:
        """A greeting has to be whole in time: a stranger could drag it out for ever."""
        return self._began_at if self.state is ProtocolState.GREETING else self._heard_at

    # inside

    def _parse(self) -> Frame | None:
        if self._end - self._begin < HEADER.size:
            return None
        kind, flags, seq, body_bytes = HEADER.unpack_from(self._buffer, self._begin)
        if body_bytes > MAX_BODY_BYTES:
            raise RemoteProtocolError(f"body of {body_bytes} bytes, at most {MAX_BODY_BYTES}")
        stop = self._begin + HEADER.size + body_bytes
        if self._end < stop:
            self._bulk = False  # whatever it is, read on without restraint
            return None
        if seq != self.frames_received & 0xFFFF:
            raise RemoteProtocolError(f"frame {seq} where {self.frames_received & 0xFFFF} was due", Code.ORDER)
        body = self._buffer[stop - body_bytes : stop]
        if kind in PAYLOAD_KINDS:
            self._chunk_header, self._chunk_seq = bytes(self._buffer[self._begin : stop]), self.frames_received
        if self._seal_in is not None:
            body, flags = self._unseal(kind, flags, body)
        frame = decode(kind, flags, body)
        if self.state is ProtocolState.GREETING:
            self._greeting.note(self._buffer[self._begin : stop])
        self.frames_received += 1
        self._begin = stop
        self._enter(frame)
        self._bulk = kind in PAYLOAD_KINDS and self.payload_left > BULK_BYTES
        return frame

    def _unseal(self, kind: int, flags: int, body: memoryview) -> tuple[memoryview, int]:
        if not flags & FLAG_SEALED or self._seal_in is None:
            raise RemoteProtocolError("a frame that is not sealed", Code.SEAL)
        if kind in PAYLOAD_KINDS:
            return body, flags
        header = bytes(self._buffer[self._begin : self._begin + HEADER.size])
        return memoryview(self._seal_in.open(self.frames_received, bytes(body), header)), flags & ~FLAG_SEALED

    def _enter(self, frame: Frame) -> None:
        allowed = TRANSITIONS[self.role][self.state]
        try:
            self.state = allowed[type(frame)]
        except KeyError:
            raise RemoteProtocolError(f"{type(frame).__name__} in state {self.state.name}") from None
        if isinstance(frame, Chunk | CodedChunk):
            if frame.sealed != (self._seal_in is not None):
                raise RemoteProtocolError("a chunk of another integrity mode")
            if frame.length > self.max_chunk_bytes:
                raise RemoteProtocolError(f"chunk of {frame.length} bytes, at most {self.max_chunk_bytes}")
            self.payload_left = _payload_bytes(frame, self.digest_behind)

    def _answered(self, frame: Frame) -> bool:
        """Deals with the frames that concern the connection alone."""
        match frame:
            case Ping():
                self._say(Pong(token=frame.token))
            case Pong():
                pass
            case Goodbye():
                raise ConnectionRefused(frame.code, frame.detail)
            case Hello() | Welcome():
                self._greeted(frame)
                return False
            case _:
                return False
        return True

    def _greeted(self, frame: Hello | Welcome) -> None:
        """Both greetings were said then: who saw others has other keys, and other proofs of secrets."""
        if isinstance(frame, Hello):
            welcome = self._answer_to(frame)
            self._greet(welcome)
        else:
            welcome = frame
            self._greeting.accept(frame)
            self.max_chunk_bytes, self.codecs = min(self.max_chunk_bytes, frame.max_chunk_bytes), frame.codecs
        self.version = welcome.version
        self.integrity = welcome.integrity
        self.digest_behind = welcome.integrity == Integrity.CHECKSUM
        self.transcript, self.session_secret = self._greeting.transcript(), self._greeting.secret
        self._seal_out, self._seal_in = self._greeting.seals(
            *(("s", "r") if self.role is ConnectionRole.SENDER else ("r", "s"))
        )

    def _answer_to(self, hello: Hello) -> Welcome:
        try:
            return self._greeting.answer(hello, self.max_chunk_bytes, self.codecs)
        except GreetingRefused as exc:
            self._say(Goodbye(code=exc.code, detail=exc.detail))
            raise

    def _greet(self, frame: Hello | Welcome) -> None:
        """Encoded at once: what follows from it, the keys, must hold for whatever comes in next."""
        self._greeting_bytes = self.encoded(frame)
        self._greeting.note(self._greeting_bytes)

    def _say(self, frame: Frame) -> None:
        self._outgoing[type(frame)] = frame

    def __repr__(self) -> str:
        return f"<Connection {self.role.name} {self.state.name} payload_left={self.payload_left}>"


def _payload_bytes(frame: Chunk | CodedChunk, digest_behind: bool) -> int:
    """With what follows it."""
    size = frame.length if isinstance(frame, Chunk) else frame.coded_length
    if frame.sealed:
        return size + TAG_BYTES
    return size + (DIGEST_BYTES if digest_behind and isinstance(frame, Chunk) else 0)
