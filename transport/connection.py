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

from transport.checksum import DIGEST_BYTES, Integrity
from transport.crypto import TAG_BYTES, Opening, Seal, Sealing, connection_seal
from transport.errors import ConnectionRefused, GreetingRefused, LocalProtocolError, PeerLost, RemoteProtocolError
from transport.frames import (
    CHUNK_BODY_BYTES,
    FLAG_SEALED,
    HEADER,
    LEAST_CHUNK_LIMIT,
    MAX_BODY_BYTES,
    PAYLOAD_KINDS,
    VERSION_MAX,
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
    Nack,
    Nics,
    Offer,
    Open,
    Ping,
    Pong,
    RailAnswer,
    RailClosed,
    RailOffer,
    RdmaFrame,
    Reference,
    Refuse,
    Welcome,
    Written,
    decode,
    encode,
    encode_chunk,
    encode_coded,
)

NONCE_BYTES: Final = 16
PING_INTERVAL_S: Final = 2.0
# Large enough for any frame and for a good many small chunks in one read.
BUFFER_BYTES: Final = 2 * (MAX_BODY_BYTES + HEADER.size)
# After a large chunk comes a large chunk: read its header only, so that its payload need not be copied.
BULK_BYTES: Final = 64 << 10
MAX_FAREWELL_BYTES: Final = 500


class Role(Enum):
    SENDER = auto()
    RECEIVER = auto()


class State(Enum):
    GREETING = auto()
    OPEN = auto()
    CLOSED = auto()


_G, _O, _C = State.GREETING, State.OPEN, State.CLOSED
_BOTH: Final[dict[type[Frame], State]] = {Ping: _O, Pong: _O, Goodbye: _C}
_RDMA_OF_SENDER: Final[dict[type[Frame], State]] = {AskRails: _O, RailOffer: _O, Written: _O, RailClosed: _O}
_RDMA_OF_RECEIVER: Final[dict[type[Frame], State]] = {Nics: _O, Grant: _O, RailAnswer: _O, RailClosed: _O}
_SAID_BY_SENDER: Final[dict[State, dict[type[Frame], State]]] = {
    _G: {Hello: _O, Goodbye: _C},
    _O: {**_BOTH, Open: _O, Chunk: _O, CodedChunk: _O, Reference: _O, Abort: _O, **_RDMA_OF_SENDER},
    _C: {},
}
_SAID_BY_RECEIVER: Final[dict[State, dict[type[Frame], State]]] = {
    _G: {Welcome: _O, Goodbye: _C},
    _O: {**_BOTH, Offer: _O, Accept: _O, Refuse: _O, Ack: _O, Nack: _O, Cancel: _O, **_RDMA_OF_RECEIVER},
    _C: {},
}
# What may come in. What may go out is the other one; only the greeting differs, since saying Hello opens nothing yet.
TRANSITIONS: Final = {Role.SENDER: _SAID_BY_RECEIVER, Role.RECEIVER: _SAID_BY_SENDER}


class Connection:
    """The protocol state of one end."""

    def __init__(
        self,
        role: Role,
        *,
        integrity: str,
        nonce: bytes,
        now: float,
        max_chunk_bytes: int,
        session: bytes = b"",
        session_secret: Callable[[bytes], bytes | None] | None = None,
        dead_after_s: float = 10.0,
        version_max: int = VERSION_MAX,
        codecs: int = 0,
    ) -> None:
        self.role = role
        self.version = 0  # once agreed on
        self.codecs = codecs  # what the receiver decodes; a sender learns it
        self._version_max = version_max
        self.state = State.GREETING
        self.integrity = integrity
        self.nonce = nonce
        self.peer_nonce = b""
        self.session = session
        self.session_secret = b""  # once agreed on
        self._session_secret = session_secret
        self._seal_out: Seal | None = None
        self._seal_in: Seal | None = None
        self._chunk_header = b""
        self._chunk_seq = 0
        self.max_chunk_bytes = max_chunk_bytes
        self.payload_left = 0
        self._dead_after_s = dead_after_s
        self._buffer = memoryview(bytearray(BUFFER_BYTES))
        self._begin = self._end = 0
        self._bulk = False
        self._receive_seq = self._send_seq = 0
        self._outgoing: list[Frame] = []
        self._began_at = self._heard_at = self._pinged_at = now
        if role is Role.SENDER:
            self._say(
                Hello(
                    version_min=VERSION_MIN, version_max=version_max, integrity=integrity, nonce=nonce, session=session
                )
            )

    @property
    def nonces(self) -> bytes:
        """Unique to this connection as long as one of the two ends chooses at random; the receiver's first."""
        mine, theirs = self.nonce, self.peer_nonce
        return theirs + mine if self.role is Role.SENDER else mine + theirs

    @property
    def digest_behind(self) -> bool:
        """Whether a Chunk's digest follows its payload: older peers have it before, in the frame."""
        return self.version >= 4 and self.integrity == Integrity.CHECKSUM

    # bytes in

    def receive_buffer(self) -> memoryview:
        """Where the next read should go; never empty."""
        if self._begin == self._end:
            self._begin = self._end = 0
            if self._bulk:
                return self._buffer[: HEADER.size + CHUNK_BODY_BYTES]
        elif BUFFER_BYTES - self._end < BUFFER_BYTES // 4:
            pending = bytes(self._buffer[self._begin : self._end])
            self._buffer[: len(pending)] = pending
            self._begin, self._end = 0, len(pending)
        if self._end == BUFFER_BYTES:
            raise LocalProtocolError("the events of earlier bytes were not taken")
        return self._buffer[self._end :]

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
            self.state = State.CLOSED
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
        allowed = TRANSITIONS[Role.RECEIVER if self.role is Role.SENDER else Role.SENDER]
        if type(frame) not in allowed[self.state]:
            raise LocalProtocolError(f"{type(frame).__name__} cannot be sent in state {self.state.name}")
        if isinstance(frame, Goodbye):
            self.state = State.CLOSED
        return self._encode(frame)

    def _encode(self, frame: Frame) -> bytes:
        number = self._send_seq
        self._send_seq += 1
        data = encode(frame, number)
        if self._seal_out is None or isinstance(frame, Hello | Welcome):
            return data
        kind, _, seq, body_bytes = HEADER.unpack_from(data)
        header = HEADER.pack(kind, FLAG_SEALED, seq, body_bytes + TAG_BYTES)
        return header + self._seal_out.seal(number, data[HEADER.size :], header)

    def seal_chunk(self, seal: Seal, slot: int, offset: int, length: int) -> tuple[bytes, Sealing]:
        """What goes before a sealed payload of `length` bytes, and what seals it; its tag goes behind it."""
        number = self._send_seq
        header = self.chunk_header(slot, offset, length, 0, sealed=True)
        return header, seal.sealing(number, header)

    def seal_coded(self, seal: Seal, chunk: CodedChunk) -> tuple[bytes, Sealing]:
        """The same for a coded chunk."""
        number = self._send_seq
        header = self.coded_header(chunk)
        return header, seal.sealing(number, header)

    def open_chunk(self, seal: Seal) -> Opening:
        """For the payload of the last Chunk or CodedChunk."""
        return seal.opening(self._chunk_seq, self._chunk_header)

    def chunk_header(self, slot: int, offset: int, length: int, checksum: int, sealed: bool = False) -> bytes:
        """What goes before a chunk's payload: `send(Chunk(...))` without the object."""
        assert self.state is State.OPEN
        seq = self._send_seq
        self._send_seq += 1
        return encode_chunk(slot, offset, length, checksum, seq, sealed)

    def coded_header(self, chunk: CodedChunk) -> bytes:
        """What goes before a coded chunk's payload."""
        assert self.state is State.OPEN
        seq = self._send_seq
        self._send_seq += 1
        return encode_coded(chunk, seq)

    def farewell(self, exc: RemoteProtocolError) -> bytes:
        """The last words to a peer that broke the protocol: why."""
        if not isinstance(exc, GreetingRefused):  # that has said it already
            detail = str(exc).encode()[:MAX_FAREWELL_BYTES].decode(errors="ignore")
            self._say(Goodbye(code=exc.code, detail=detail))
        self.state = State.CLOSED
        return self.data_to_send()

    def data_to_send(self) -> bytes:
        """Greetings, pings and pongs."""
        frames, self._outgoing = self._outgoing, []
        return b"".join(self._encode(frame) for frame in frames)

    # time

    def next_timer(self) -> float:
        """When on_timer() wants to be called."""
        dead_at = self._alive_at + self._dead_after_s
        if self.role is Role.SENDER and self.state is State.OPEN:
            return min(dead_at, self._pinged_at + PING_INTERVAL_S)
        return dead_at

    def on_timer(self, now: float) -> None:
        """Pings when it is time to. Raises PeerLost when the peer has been silent for too long.

        Only senders ping: it keeps idle connections alive, and tells the receiver, too, that its peer is alive.
        """
        if now >= self._alive_at + self._dead_after_s:
            silent = "no whole greeting" if self.state is State.GREETING else "nothing heard"
            self.state = State.CLOSED
            raise PeerLost(f"{silent} for {now - self._alive_at:.1f} s")
        if self.role is not Role.SENDER or self.state is not State.OPEN:
            return
        if now >= self._pinged_at + PING_INTERVAL_S:
            self._pinged_at = now
            self._say(Ping(token=self._send_seq & 0xFFFFFFFF))

    @property
    def _alive_at(self) -> float:
        """A greeting has to be whole in time: a stranger could drag it out for ever."""
        return self._began_at if self.state is State.GREETING else self._heard_at

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
        if seq != self._receive_seq & 0xFFFF:
            raise RemoteProtocolError(f"frame {seq} where {self._receive_seq & 0xFFFF} was due", Code.ORDER)
        body = self._buffer[stop - body_bytes : stop]
        if kind in PAYLOAD_KINDS:
            self._chunk_header, self._chunk_seq = bytes(self._buffer[self._begin : stop]), self._receive_seq
        if self._seal_in is not None:
            body, flags = self._unseal(kind, flags, body)
        frame = decode(kind, flags, body)
        self._receive_seq += 1
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
        return memoryview(self._seal_in.open(self._receive_seq, bytes(body), header)), flags & ~FLAG_SEALED

    def _agree_on_keys(self) -> bool:
        """False when the session is not known (any more)."""
        if self.integrity != Integrity.AEAD:
            return True
        secret = self._session_secret(self.session) if self._session_secret is not None else None
        if secret is None:
            return False
        mine, theirs = ("s", "r") if self.role is Role.SENDER else ("r", "s")
        self._seal_out = connection_seal(secret, self.nonces, mine)
        self._seal_in = connection_seal(secret, self.nonces, theirs)
        self.session_secret = secret
        return True

    def _enter(self, frame: Frame) -> None:
        allowed = TRANSITIONS[self.role][self.state]
        try:
            self.state = allowed[type(frame)]
        except KeyError:
            raise RemoteProtocolError(f"{type(frame).__name__} in state {self.state.name}") from None
        if isinstance(frame, Offer | CodedChunk) and self.version < 2:
            raise RemoteProtocolError(f"{type(frame).__name__} in version {self.version}")
        if isinstance(frame, RdmaFrame) and self.version < 3:
            raise RemoteProtocolError(f"{type(frame).__name__} in version {self.version}")
        if isinstance(frame, Chunk | CodedChunk):
            if frame.sealed != (self._seal_in is not None):
                raise RemoteProtocolError("a chunk of another integrity mode")
            if frame.length > self.max_chunk_bytes:
                raise RemoteProtocolError(f"chunk of {frame.length} bytes, at most {self.max_chunk_bytes}")
            self.payload_left = self._payload_bytes(frame)

    def _payload_bytes(self, frame: Chunk | CodedChunk) -> int:
        """With what follows it."""
        size = frame.length if isinstance(frame, Chunk) else frame.coded_length
        if frame.sealed:
            return size + TAG_BYTES
        return size + (DIGEST_BYTES if self.digest_behind and isinstance(frame, Chunk) else 0)

    def _answered(self, frame: Frame) -> bool:
        """Deals with the frames that concern the connection alone."""
        match frame:
            case Ping():
                self._say(Pong(token=frame.token))
            case Pong():
                pass
            case Goodbye():
                raise ConnectionRefused(frame.code, frame.detail)
            case Offer():
                self.codecs = frame.codecs
            case Welcome():
                self._welcomed(frame)
                return False
            case Hello():
                self._greet(frame)
                return False
            case _:
                return False
        return True

    def _greet(self, hello: Hello) -> None:
        self.peer_nonce, self.session = hello.nonce, hello.session
        version = min(hello.version_max, self._version_max)
        if version < max(hello.version_min, VERSION_MIN):
            self._refuse(Code.VERSION, f"we speak {VERSION_MIN} to {self._version_max}")
        if hello.integrity != self.integrity:
            self._refuse(Code.INTEGRITY_MODE, f"this listener wants {self.integrity}")
        if len(hello.nonce) != NONCE_BYTES:
            self._refuse(Code.PROTOCOL, "bad nonce")
        if not self._agree_on_keys():
            self._refuse(Code.SESSION, "no such session")
        self._say(
            Welcome(version=version, integrity=self.integrity, nonce=self.nonce, max_chunk_bytes=self.max_chunk_bytes)
        )
        self.version = version
        if version >= 2 and self.codecs:
            self._say(Offer(codecs=self.codecs))

    def _welcomed(self, welcome: Welcome) -> None:
        if not VERSION_MIN <= welcome.version <= self._version_max or welcome.integrity != self.integrity:
            raise RemoteProtocolError(f"cannot go on with version {welcome.version}, {welcome.integrity}")
        if len(welcome.nonce) != NONCE_BYTES:
            raise RemoteProtocolError("bad nonce")
        if welcome.max_chunk_bytes < LEAST_CHUNK_LIMIT:
            raise RemoteProtocolError(f"chunks of at most {welcome.max_chunk_bytes} bytes")
        self.peer_nonce, self.version = welcome.nonce, welcome.version
        self.max_chunk_bytes = min(self.max_chunk_bytes, welcome.max_chunk_bytes)
        if not self._agree_on_keys():
            raise LocalProtocolError("sealed chunks need a session")

    def _refuse(self, code: Code, detail: str) -> None:
        self._say(Goodbye(code=code, detail=detail))
        raise GreetingRefused(code, detail)

    def _say(self, frame: Frame) -> None:
        self._outgoing.append(frame)

    def __repr__(self) -> str:
        return f"<Connection {self.role.name} {self.state.name} payload_left={self.payload_left}>"
