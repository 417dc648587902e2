"""Frames: what two ends of a connection say to each other.

    0      1       2      4              8
    | kind | flags | seq  | body length  | body ...            little endian

`seq` counts the frames of one direction (mod 2^16): a frame that is missing, repeated or out of place ends the
connection, and its chunks are sent again over another one. A Chunk is followed by its payload. The payload is not part
of the body, so the driver can read it straight into its final place. A transfer is one line of bytes, its ranges laid
end to end; chunks, acknowledgements and resumption speak of offsets in that line and never of ranges. A CodedChunk is a
chunk whose payload was made smaller (see codec); the receiver has said in its Welcome what it decodes. The digest of a
Chunk stands in the 8 bytes behind its payload, so that a sender can hash and send part by part.

    sender                                        receiver
      | Hello(versions, nonce) ------------------->  |
      |  <----------- Welcome(version, nonce, codecs) |   or Goodbye(code)
      | Open(slot, transfer, proof, manifest) ------> |
      |  <------------------- Accept(slot, missing)   |   or Refuse(slot, code)
      | Chunk(slot, offset) payload ---------------> |
      |  <------------------- Ack(slot, ranges)       |   or Nack(slot, range, code)
      | Abort(slot) / <---------------- Cancel(slot)  |
      | Ping / Pong, both ways                        |

Over RDMA (see transport.rdma), the same connection carries what is to be said about the writes:

      | AskRails, then Open as above ---------------> |
      |  <------------- LandingBuffers, Nics, Accept  |   a sender that showed a secret learns of the NICs
      | RailOffer(rail, attempt, queue pair) -------> |
      |  <-- RailBuffer(rail, memory), RailAnswer(rail, attempt, queue pair)       or RailClosed
      | Written(slot, offset, checksum, rail) ------> |   each is answered by Ack or Nack
      | RailClosed(rail, attempt), both ways          |

A receiver in direct mode says Nics and Grant(slot, memory) instead, and no RailBuffer.

The body of a frame is the fields of its dataclass in their order, each written as its annotation says (see encoding);
Chunk and CodedChunk, which are hot, have structs of their own. Every length that a peer states is checked against a limit
before a byte of it is awaited.
"""

import struct
from dataclasses import dataclass
from enum import Enum, StrEnum, auto
from typing import Annotated, Final, TypeAlias

MAGIC: Final = 0x50664B56  # "VKfP"
VERSION_MIN: Final = 1
VERSION_MAX: Final = 2
BUFFERS_SINCE: Final = 2  # the version whose senders write into landing buffers

HEADER: Final = struct.Struct("<BBHI")
CHUNK: Final = struct.Struct("<BBHIIIQ")  # header and body of a Chunk in one go: it is the one hot frame
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
    """Reasons for refusing, cancelling or giving up. They label counters."""

    VERSION = "version"
    INTEGRITY_MODE = "integrity_mode"
    PROTOCOL = "protocol"
    ORDER = "out_of_order"  # a frame that was repeated, left out or overtaken
    TOO_MANY = "too_many_connections"
    TOO_MANY_LANDINGS = "too_many_landings"  # one-sided writes that have not ended
    TOO_MANY_READS = "too_many_reads"  # that are not served yet
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
    """Maps a peer's code to one of ours: a peer must not choose the labels of counters."""
    try:
        return Code(code)
    except ValueError:
        return Code.OTHER


class Shape(Enum):
    """How a field is written."""

    U16 = auto()
    U32 = auto()
    U64 = auto()
    FLAG = auto()
    TEXT = auto()
    DETAIL = auto()  # for people to read: may be cut
    BLOB = auto()
    PAIRS = auto()
    SPANS = auto()  # [start, stop); each ends at or after its start


U16: TypeAlias = Annotated[int, Shape.U16]
U32: TypeAlias = Annotated[int, Shape.U32]
U64: TypeAlias = Annotated[int, Shape.U64]
Flag: TypeAlias = Annotated[bool, Shape.FLAG]
Text: TypeAlias = Annotated[str, Shape.TEXT]
Detail: TypeAlias = Annotated[str, Shape.DETAIL]
Blob: TypeAlias = Annotated[bytes, Shape.BLOB]
Pairs: TypeAlias = Annotated[tuple[tuple[int, int], ...], Shape.PAIRS]
Spans: TypeAlias = Annotated[tuple[tuple[int, int], ...], Shape.SPANS]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """First frame of a sender."""

    version_min: U16
    version_max: U16
    integrity: Text
    nonce: Blob
    session: Blob = b""  # names a key that was agreed over the control connection


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """The receiver's answer. `max_chunk_bytes` bounds every Chunk of this connection, `codecs` is a mask of codec.Codec:
    what the receiver decodes.
    """

    version: U16
    integrity: Text
    nonce: Blob
    max_chunk_bytes: U32
    codecs: U32 = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodbye:
    """The connection ends, and why."""

    code: Text
    detail: Detail = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Open:
    """Binds `slot` of this connection to a transfer. `proof` shows the secret without telling it."""

    slot: U32
    transfer_id: Text
    proof: Blob
    total_bytes: U64
    num_ranges: U32
    manifest_digest: Blob
    arena_path: Text = ""  # same host: where References point into
    placement: Pairs = ()  # one-sided write: (offset in the segment, length) of each range


@dataclass(frozen=True, slots=True, kw_only=True)
class Accept:
    """The transfer may flow; only `missing` need travel. May name more than is missing, never less."""

    slot: U32
    missing: Spans


@dataclass(frozen=True, slots=True, kw_only=True)
class Refuse:
    """The transfer may not flow."""

    slot: U32
    code: Text
    detail: Detail = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """`length` bytes of payload follow; they belong at `offset` of the transfer's line of bytes."""

    slot: U32
    offset: U64
    length: U32
    sealed: bool = False

    @property
    def stop(self) -> int:
        return self.offset + self.length


@dataclass(frozen=True, slots=True, kw_only=True)
class CodedChunk:
    """A Chunk whose `length` bytes travel as `coded_length` bytes; the checksum is of the latter."""

    slot: U32
    offset: U64
    length: U32
    coded_length: U32
    checksum: U64
    sealed: bool = False

    @property
    def stop(self) -> int:
        return self.offset + self.length


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """A chunk whose bytes lie in the sender's arena file, at `extents` (start, length): same host only."""

    slot: U32
    offset: U64
    checksum: U64
    extents: Pairs

    @property
    def length(self) -> int:
        return sum(length for _, length in self.extents)

    @property
    def stop(self) -> int:
        return self.offset + self.length


@dataclass(frozen=True, slots=True, kw_only=True)
class Ack:
    """`ranges` [start, stop) have landed and were verified."""

    slot: U32
    ranges: Spans


@dataclass(frozen=True, slots=True, kw_only=True)
class Nack:
    """A chunk came but does not count; send it again."""

    slot: U32
    offset: U64
    length: U32
    code: Text


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel:
    """Receiver: the transfer is over, its bytes have no place any more."""

    slot: U32
    code: Text
    detail: Detail = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    """Sender: the transfer is over. With `leave`, only this sender goes; another may finish the landing."""

    slot: U32
    leave: Flag
    detail: Detail = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ping:
    """Asks for a Pong with the same token."""

    token: U32


@dataclass(frozen=True, slots=True, kw_only=True)
class Pong:
    """Answers a Ping."""

    token: U32


@dataclass(frozen=True, slots=True, kw_only=True)
class AskRails:
    """Sender: transfers opened from now on may be written by RDMA."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Nics:
    """Receiver: its NICs (rdma_topology.format_nics), empty where it has none. Comes before the first Accept."""

    nics: Text


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """Receiver: where the transfer's line of bytes lies in its memory. Before the Accept, in several frames when long.

    `extents` are (offset from `address`, length); `keys` are (place in Nics, remote key of the memory at that NIC).
    """

    slot: U32
    address: U64
    keys: Pairs
    extents: Pairs


@dataclass(frozen=True, slots=True, kw_only=True)
class LandingBuffers:
    """Receiver: chunks are written into a buffer of their rail. It has `places` of them; chunk number n goes to place
    n mod `places`. Comes before Nics.
    """

    places: U32
    place_bytes: U32


@dataclass(frozen=True, slots=True, kw_only=True)
class RailBuffer:
    """Receiver: where this queue pair's buffer lies. `key` opens it to this queue pair, and nothing else. Before RailAnswer."""

    rail: U32
    attempt: U32
    address: U64
    key: U32


@dataclass(frozen=True, slots=True, kw_only=True)
class RailOffer:
    """Sender: its end of a new queue pair, for the receiver's NIC `nic` (place in Nics)."""

    rail: U32
    attempt: U32
    nic: U32
    queue_pair: U32
    packet_number: U32
    gid: Text
    mtu: U32


@dataclass(frozen=True, slots=True, kw_only=True)
class RailAnswer:
    """Receiver: the other end. It takes `depth` chunks before the first of them is answered."""

    rail: U32
    attempt: U32
    queue_pair: U32
    packet_number: U32
    gid: Text
    mtu: U32
    depth: U32


@dataclass(frozen=True, slots=True, kw_only=True)
class RailClosed:
    """This queue pair is closed here: nothing more comes over it. Said before its chunks are sent again."""

    rail: U32
    attempt: U32
    reason: Detail = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """Sender: a chunk is in its place, written as number `number` of this rail."""

    slot: U32
    offset: U64
    length: U32
    checksum: U64
    rail: U32
    attempt: U32
    number: U32

    @property
    def stop(self) -> int:
        return self.offset + self.length


RdmaFrame: TypeAlias = (
    AskRails | Nics | Grant | RailOffer | RailAnswer | RailClosed | Written | LandingBuffers | RailBuffer
)
Frame: TypeAlias = (
    Hello | Welcome | Goodbye | Open | Accept | Refuse | Chunk | Reference | Ack | Nack | Cancel | Abort | Ping | Pong
    | CodedChunk | RdmaFrame
)  # fmt: skip

KINDS: Final[dict[type[Frame], int]] = {
    Hello: 1, Welcome: 2, Goodbye: 3, Open: 4, Accept: 5, Refuse: 6, Chunk: 7, Reference: 8,
    Ack: 9, Nack: 10, Cancel: 11, Abort: 12, Ping: 13, Pong: 14, CodedChunk: 15,
    AskRails: 16, Nics: 17, Grant: 18, RailOffer: 19, RailAnswer: 20, RailClosed: 21, Written: 22,
    LandingBuffers: 23, RailBuffer: 24,
}  # fmt: skip
CHUNK_KIND: Final = KINDS[Chunk]
CODED_KIND: Final = KINDS[CodedChunk]
PAYLOAD_KINDS: Final = (CHUNK_KIND, CODED_KIND)
