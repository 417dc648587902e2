"""Frames: what two ends of a connection say to each other.

    0      1       2      4              8
    | kind | flags | seq  | body length  | body ...            little endian

`seq` counts the frames of one direction (mod 2^16): a frame that is missing, repeated or out of place ends the
connection, and its chunks are sent again over another one. A Chunk is followed by its payload, which is not part of the
body, so that the driver can read it straight into its final place. A transfer is one line of bytes, its ranges laid end
to end; chunks, acknowledgements and resumption speak of offsets in that line and never of ranges. A CodedChunk is a chunk
whose payload was made smaller (see codec); both ends speak version 2 then, and the receiver has offered to decode it.
From version 4 on, the digest of a Chunk with a checksum is not in its body but in the 8 bytes behind its payload, so
that a sender can hash and send part by part.

    sender                                        receiver
      | Hello(versions, nonce) ------------------->  |
      |  <------------------- Welcome(version, nonce) |   or Goodbye(code)
      |  <------------------- Offer(codecs)           |   from version 2 on
      | Open(slot, transfer, proof, manifest) ------> |
      |  <------------------- Accept(slot, missing)   |   or Refuse(slot, code)
      | Chunk(slot, offset) payload ---------------> |
      |  <------------------- Ack(slot, ranges)       |   or Nack(slot, range, code)
      | Abort(slot) / <---------------- Cancel(slot)  |
      | Ping / Pong, both ways                        |

Over RDMA (see rdma_outlet), from version 3 on, the same connection carries what is to be said about the writes:

      | AskRails, then Open as above ---------------> |
      |  <------ Nics, Grant(slot, memory) ..., Accept |   whoever showed a secret learns where to write
      | RailOffer(rail, attempt, queue pair) -------> |
      |  <-------- RailAnswer(rail, attempt, queue pair)   or RailClosed
      | Written(slot, offset, checksum, rail) ------> |   each is answered by Ack or Nack
      | RailClosed(rail, attempt), both ways          |

Every length that a peer states is checked against a limit before a byte of it is awaited.
"""

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, TypeAlias

from transport.errors import RemoteProtocolError

MAGIC: Final = 0x50664B56  # "VKfP"
VERSION_MIN: Final = 1
VERSION_MAX: Final = 4  # 2: Offer and CodedChunk; 3: what belongs to RDMA; 4: digests behind payloads

HEADER: Final = struct.Struct("<BBHI")
CHUNK: Final = struct.Struct("<BBHIIIQQ")  # header and body of a Chunk in one go: it is the one hot frame
CHUNK_BODY_BYTES: Final = CHUNK.size - HEADER.size
CODED: Final = struct.Struct("<BBHIIIQQI")  # the same for a CodedChunk
CODED_BODY_BYTES: Final = CODED.size - HEADER.size

MAX_BODY_BYTES: Final = 64 << 10
MAX_CHUNK_BYTES: Final = 16 << 20
LEAST_CHUNK_LIMIT: Final = 64 << 10  # of a receiver: what cuts a sender's bytes smaller costs it more than it is worth
MAX_TRANSFER_BYTES: Final = 1 << 46
MAX_RANGES: Final = 1 << 24
MAX_LIST: Final = 4000  # entries of an Ack, an Accept or a Reference: 16 bytes each keep a body under its limit
MAX_PLACEMENT: Final = 3900  # of an Open, which has more to say
MAX_TEXT_BYTES: Final = 1024
MAX_BLOB_BYTES: Final = 1024

FLAG_SEALED: Final = 1  # the payload is AEAD ciphertext and 16 bytes longer than `length`


class Code(StrEnum):
    """Why something was refused, cancelled or given up. Counters are labelled with these."""

    VERSION = "version"
    INTEGRITY_MODE = "integrity_mode"
    PROTOCOL = "protocol"
    ORDER = "out_of_order"  # a frame that was repeated, left out or overtaken
    TOO_MANY = "too_many_connections"
    CLOSING = "closing"
    UNKNOWN_TRANSFER = "unknown_transfer"
    BAD_SECRET = "bad_secret"
    MANIFEST = "manifest_mismatch"
    CHECKSUM = "checksum"
    CODEC = "codec"
    ARENA = "arena_not_readable"
    TARGET = "target"  # the receiver has no memory for it
    CANCELLED = "cancelled"
    ABORTED = "aborted"
    DEADLINE = "deadline"
    SENDER_LOST = "sender_lost"
    PEER_LOST = "peer_lost"
    IDENTITY = "identity"
    SESSION = "session"
    SEAL = "seal"
    OUT_OF_BOUNDS = "out_of_bounds"
    ACCESS = "access_denied"
    OTHER = "other"  # what a peer said that we do not know


def known(code: str) -> Code:
    """A peer's word as one of ours: what counters are labelled with is not the peer's to choose."""
    try:
        return Code(code)
    except ValueError:
        return Code.OTHER


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """First frame of a sender."""

    version_min: int
    version_max: int
    integrity: str
    nonce: bytes
    session: bytes = b""  # names a key that was agreed over the control connection


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """The receiver's answer; `max_chunk_bytes` bounds every Chunk of this connection."""

    version: int
    integrity: str
    nonce: bytes
    max_chunk_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodbye:
    """The connection ends, and why."""

    code: str
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Open:
    """Binds `slot` of this connection to a transfer. `proof` shows the secret without telling it."""

    slot: int
    transfer_id: str
    proof: bytes
    total_bytes: int
    num_ranges: int
    manifest_digest: bytes
    arena_path: str = ""  # same host: where References point into
    placement: tuple[tuple[int, int], ...] = ()  # one-sided write: (offset in the segment, length) of each range


@dataclass(frozen=True, slots=True, kw_only=True)
class Accept:
    """The transfer may flow; only `missing` need travel. May name more than is missing, never less."""

    slot: int
    missing: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Refuse:
    """The transfer may not flow."""

    slot: int
    code: str
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """`length` bytes of payload follow; they belong at `offset` of the transfer's line of bytes."""

    slot: int
    offset: int
    length: int
    checksum: int
    sealed: bool = False

    @property
    def stop(self) -> int:
        return self.offset + self.length


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What the receiver decodes: a mask of codec.Codec. Until it is heard, nothing is coded."""

    codecs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CodedChunk:
    """A Chunk whose `length` bytes travel as `coded_length` bytes; the checksum is of the latter."""

    slot: int
    offset: int
    length: int
    coded_length: int
    checksum: int
    sealed: bool = False

    @property
    def stop(self) -> int:
        return self.offset + self.length


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """A chunk whose bytes lie in the sender's arena file, at `extents` (start, length): same host only."""

    slot: int
    offset: int
    checksum: int
    extents: tuple[tuple[int, int], ...]

    @property
    def length(self) -> int:
        return sum(length for _, length in self.extents)

    @property
    def stop(self) -> int:
        return self.offset + self.length


@dataclass(frozen=True, slots=True, kw_only=True)
class Ack:
    """`ranges` [start, stop) have landed and were verified."""

    slot: int
    ranges: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Nack:
    """A chunk came but does not count; send it again."""

    slot: int
    offset: int
    length: int
    code: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel:
    """Receiver: the transfer is over, its bytes have no place any more."""

    slot: int
    code: str
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    """Sender: the transfer is over. With `leave`, only this sender goes; another may finish the landing."""

    slot: int
    leave: bool
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ping:
    """Asks for a Pong with the same token."""

    token: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pong:
    """Answers a Ping."""

    token: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AskRails:
    """Sender: transfers opened from now on may be written by RDMA."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Nics:
    """Receiver: its NICs (rdma_topology.format_nics), empty where it has none. Comes before the first Accept."""

    nics: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """Receiver: where the transfer's line of bytes lies in its memory. Before the Accept, in several frames when long.

    `extents` are (offset from `address`, length); `keys` are (place in Nics, remote key of the memory at that NIC).
    """

    slot: int
    address: int
    keys: tuple[tuple[int, int], ...]
    extents: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RailOffer:
    """Sender: its end of a new queue pair, for the receiver's NIC `nic` (place in Nics)."""

    rail: int
    attempt: int
    nic: int
    queue_pair: int
    packet_number: int
    gid: str
    mtu: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RailAnswer:
    """Receiver: the other end. It takes `depth` chunks before the first of them is answered."""

    rail: int
    attempt: int
    queue_pair: int
    packet_number: int
    gid: str
    mtu: int
    depth: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RailClosed:
    """This queue pair is closed here: nothing more comes over it. Said before its chunks are sent again."""

    rail: int
    attempt: int
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """Sender: a chunk is in its place, written as number `number` of this rail."""

    slot: int
    offset: int
    length: int
    checksum: int
    rail: int
    attempt: int
    number: int

    @property
    def stop(self) -> int:
        return self.offset + self.length


RdmaFrame: TypeAlias = AskRails | Nics | Grant | RailOffer | RailAnswer | RailClosed | Written
Frame: TypeAlias = (
    Hello | Welcome | Goodbye | Open | Accept | Refuse | Chunk | Reference | Ack | Nack | Cancel | Abort | Ping | Pong
    | Offer | CodedChunk
    | RdmaFrame
)  # fmt: skip

# The body of a frame is its fields in this order. Chunk and CodedChunk have structs of their own.
_U16, _U32, _U64, _BOOL = "H", "I", "Q", "?"
_TEXT, _DETAIL, _BLOB, _PAIRS, _SPANS = "text", "detail", "blob", "pairs", "spans"  # details are for people: may be cut
_FIELDS: Final[dict[type[Frame], tuple[tuple[str, str], ...]]] = {
    Hello: (("version_min", _U16), ("version_max", _U16), ("integrity", _TEXT), ("nonce", _BLOB), ("session", _BLOB)),
    Welcome: (("version", _U16), ("integrity", _TEXT), ("nonce", _BLOB), ("max_chunk_bytes", _U32)),
    Goodbye: (("code", _TEXT), ("detail", _DETAIL)),
    Open: (
        ("slot", _U32),
        ("transfer_id", _TEXT),
        ("proof", _BLOB),
        ("total_bytes", _U64),
        ("num_ranges", _U32),
        ("manifest_digest", _BLOB),
        ("arena_path", _TEXT),
        ("placement", _PAIRS),
    ),
    Accept: (("slot", _U32), ("missing", _SPANS)),
    Refuse: (("slot", _U32), ("code", _TEXT), ("detail", _DETAIL)),
    Reference: (("slot", _U32), ("offset", _U64), ("checksum", _U64), ("extents", _PAIRS)),
    Ack: (("slot", _U32), ("ranges", _SPANS)),
    Nack: (("slot", _U32), ("offset", _U64), ("length", _U32), ("code", _TEXT)),
    Cancel: (("slot", _U32), ("code", _TEXT), ("detail", _DETAIL)),
    Abort: (("slot", _U32), ("leave", _BOOL), ("detail", _DETAIL)),
    Ping: (("token", _U32),),
    Pong: (("token", _U32),),
    Offer: (("codecs", _U32),),
    AskRails: (),
    Nics: (("nics", _TEXT),),
    Grant: (("slot", _U32), ("address", _U64), ("keys", _PAIRS), ("extents", _PAIRS)),
    RailOffer: (
        ("rail", _U32),
        ("attempt", _U32),
        ("nic", _U32),
        ("queue_pair", _U32),
        ("packet_number", _U32),
        ("gid", _TEXT),
        ("mtu", _U32),
    ),
    RailAnswer: (
        ("rail", _U32),
        ("attempt", _U32),
        ("queue_pair", _U32),
        ("packet_number", _U32),
        ("gid", _TEXT),
        ("mtu", _U32),
        ("depth", _U32),
    ),
    RailClosed: (("rail", _U32), ("attempt", _U32), ("reason", _DETAIL)),
    Written: (
        ("slot", _U32),
        ("offset", _U64),
        ("length", _U32),
        ("checksum", _U64),
        ("rail", _U32),
        ("attempt", _U32),
        ("number", _U32),
    ),
}
_KINDS: Final[dict[type[Frame], int]] = {
    Hello: 1, Welcome: 2, Goodbye: 3, Open: 4, Accept: 5, Refuse: 6, Chunk: 7, Reference: 8,
    Ack: 9, Nack: 10, Cancel: 11, Abort: 12, Ping: 13, Pong: 14, Offer: 15, CodedChunk: 16,
    AskRails: 20, Nics: 21, Grant: 22, RailOffer: 23, RailAnswer: 24, RailClosed: 25, Written: 26,
}  # fmt: skip
_TYPES: Final = {kind: frame for frame, kind in _KINDS.items()}
CHUNK_KIND: Final = _KINDS[Chunk]
CODED_KIND: Final = _KINDS[CodedChunk]
PAYLOAD_KINDS: Final = (CHUNK_KIND, CODED_KIND)
_FIRST_BYTES: Final = struct.Struct("<I")


def encode(frame: Frame, seq: int) -> bytes:
    """The bytes of a frame (of a Chunk: without its payload)."""
    if isinstance(frame, Chunk):
        return encode_chunk(frame.slot, frame.offset, frame.length, frame.checksum, seq, frame.sealed)
    if isinstance(frame, CodedChunk):
        return encode_coded(frame, seq)
    body = b"".join(_ENCODERS[kind](getattr(frame, name)) for name, kind in _FIELDS[type(frame)])
    if isinstance(frame, Hello):
        body = _FIRST_BYTES.pack(MAGIC) + body
    return HEADER.pack(_KINDS[type(frame)], 0, seq & 0xFFFF, len(body)) + body


def check_opening(transfer_id: str, arena_path: str, placement: Sequence[tuple[int, int]]) -> None:
    """Raises ValueError when no Open can carry this."""
    for text in (transfer_id, arena_path):
        _encode_text(text)
    if len(placement) > MAX_PLACEMENT:
        raise ValueError(f"a placement of {len(placement)} ranges, at most {MAX_PLACEMENT}")
    if any(min(pair) < 0 or max(pair) > MAX_TRANSFER_BYTES for pair in placement):
        raise ValueError("a placement beyond any transfer")


def encode_chunk(slot: int, offset: int, length: int, checksum: int, seq: int, sealed: bool = False) -> bytes:
    """The 32 bytes before a chunk's payload."""
    flags = FLAG_SEALED if sealed else 0
    return CHUNK.pack(CHUNK_KIND, flags, seq & 0xFFFF, CHUNK_BODY_BYTES, slot, length, offset, checksum)


def encode_coded(chunk: CodedChunk, seq: int) -> bytes:
    """The 36 bytes before a coded chunk's payload."""
    flags, where = FLAG_SEALED if chunk.sealed else 0, (chunk.slot, chunk.length, chunk.offset)
    return CODED.pack(CODED_KIND, flags, seq & 0xFFFF, CODED_BODY_BYTES, *where, chunk.checksum, chunk.coded_length)


def decode(kind: int, flags: int, body: memoryview) -> Frame:
    """The frame of a whole body. Raises RemoteProtocolError on anything malformed."""
    frame_type = _TYPES.get(kind)
    if frame_type is None:
        raise RemoteProtocolError(f"unknown frame kind {kind}")
    try:
        if frame_type is Chunk:
            return _decode_chunk(flags, body)
        return _decode_coded(flags, body) if frame_type is CodedChunk else _decode_fields(frame_type, body)
    except (struct.error, UnicodeDecodeError, ValueError, IndexError) as exc:
        raise RemoteProtocolError(f"malformed {frame_type.__name__}: {exc}") from exc


def _decode_chunk(flags: int, body: memoryview) -> Chunk:
    if len(body) != CHUNK_BODY_BYTES:
        raise ValueError(f"body of {len(body)} bytes")
    slot, length, offset, checksum = struct.unpack("<IIQQ", body)
    if not 0 < length <= MAX_CHUNK_BYTES or offset + length > MAX_TRANSFER_BYTES:
        raise ValueError(f"length {length} at offset {offset}")
    return Chunk(slot=slot, offset=offset, length=length, checksum=checksum, sealed=bool(flags & FLAG_SEALED))


def _decode_coded(flags: int, body: memoryview) -> CodedChunk:
    if len(body) != CODED_BODY_BYTES:
        raise ValueError(f"body of {len(body)} bytes")
    slot, length, offset, checksum, coded_length = struct.unpack("<IIQQI", body)
    if not 0 < coded_length < length <= MAX_CHUNK_BYTES or offset + length > MAX_TRANSFER_BYTES:
        raise ValueError(f"length {length}, coded {coded_length}, at offset {offset}")
    return CodedChunk(
        slot=slot,
        offset=offset,
        length=length,
        coded_length=coded_length,
        checksum=checksum,
        sealed=bool(flags & FLAG_SEALED),
    )


def _decode_fields(frame_type: type[Frame], body: memoryview) -> Frame:
    reader = _Reader(body)
    if frame_type is Hello and reader.number(_U32) != MAGIC:
        raise ValueError("not a PrfaaS sender")
    values = {name: reader.read(kind) for name, kind in _FIELDS[frame_type]}
    if reader.left:
        raise ValueError(f"{reader.left} bytes too many")
    return frame_type(**values)


class _Reader:
    """Takes fields off a body, one after the other."""

    def __init__(self, body: memoryview) -> None:
        self._body = body
        self._at = 0

    @property
    def left(self) -> int:
        return len(self._body) - self._at

    def read(self, kind: str) -> Any:
        if kind in (_TEXT, _DETAIL):
            return str(self.blob(MAX_TEXT_BYTES), "utf-8")
        if kind == _BLOB:
            return self.blob(MAX_BLOB_BYTES)
        if kind in (_PAIRS, _SPANS):
            return self.pairs(ordered=kind == _SPANS)
        return self.number(kind)

    def number(self, kind: str) -> int:
        size = struct.calcsize("<" + kind)
        value: int = struct.unpack("<" + kind, self._take(size))[0]
        return value

    def blob(self, limit: int) -> bytes:
        size = self.number(_U16)
        if size > limit:
            raise ValueError(f"field of {size} bytes, at most {limit}")
        return bytes(self._take(size))

    def pairs(self, *, ordered: bool) -> tuple[tuple[int, int], ...]:
        count = self.number(_U32)
        if count > MAX_LIST:
            raise ValueError(f"{count} entries, at most {MAX_LIST}")
        pairs = tuple(struct.iter_unpack("<QQ", self._take(16 * count)))
        if any(max(pair) > MAX_TRANSFER_BYTES for pair in pairs):
            raise ValueError("an offset beyond any transfer")
        if ordered and any(start > stop for start, stop in pairs):
            raise ValueError("a range that ends before it begins")
        return pairs

    def _take(self, size: int) -> memoryview:
        if size > self.left:
            raise ValueError("body too short")
        self._at += size
        return self._body[self._at - size : self._at]


def _encode_blob(value: bytes, limit: int = MAX_BLOB_BYTES) -> bytes:
    if len(value) > limit:
        raise ValueError(f"field of {len(value)} bytes, at most {limit}")
    return struct.pack("<H", len(value)) + value


def _encode_text(value: str) -> bytes:
    return _encode_blob(value.encode(), MAX_TEXT_BYTES)


def _encode_detail(value: str) -> bytes:
    """What people read comes from anywhere: it is cut, at a character, rather than refused."""
    return _encode_blob(value.encode(errors="replace")[:MAX_TEXT_BYTES].decode(errors="ignore").encode())


def _encode_pairs(pairs: tuple[tuple[int, int], ...]) -> bytes:
    if len(pairs) > MAX_LIST:
        raise ValueError(f"{len(pairs)} entries, at most {MAX_LIST}")
    return struct.pack("<I", len(pairs)) + b"".join(struct.pack("<QQ", *pair) for pair in pairs)


def _number_encoder(kind: str) -> Callable[[Any], bytes]:
    return lambda value: struct.pack("<" + kind, value)


_ENCODERS: Final[dict[str, Callable[[Any], bytes]]] = {
    _TEXT: _encode_text,
    _DETAIL: _encode_detail,
    _BLOB: _encode_blob,
    _PAIRS: _encode_pairs,
    _SPANS: _encode_pairs,
    **{kind: _number_encoder(kind) for kind in (_U16, _U32, _U64, _BOOL)},
}
