"""Messages between an engine and the processes of its stages, over sockets between parent and children.

    engine ─► stage 0 ─► stage 1 ─► ...      Whole, Begin, SequencePages, LoadPages, SequenceChunk, Drop
    engine ◄─ each stage                     StageReady or StageUnfit; StageLayerWritten, StageStateWritten, Done, StageFailure,
                                             Logits

Messages to stages come in this order for every sequence. They go through all stages, so that each hears of a sequence
before its chunks, and of its end after them.
A frame:

    | bytes of the head, u32 | bytes of the payload, u64 | head, msgpack | payload: a tensor, raw |
"""

import socket
import struct
from typing import Final, NamedTuple

import msgspec

from transport.control.messages import JobPages

_LENGTHS: Final = struct.Struct("<IQ")
MAX_HEAD_BYTES: Final = 64 << 20
MAX_PAYLOAD_BYTES: Final = 1 << 34


class StageMessage(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Base of all."""


class Whole(StageMessage, frozen=True):
    """The layout of the whole model; each stage has told a part."""

    layout_json: str


class Begin(StageMessage, frozen=True):
    """A sequence, by its number, with its slot among permits."""

    sequence: int
    slot: int
    expected_tokens: int


class SequencePages(StageMessage, frozen=True, tag="Pages"):
    """The destination of a sequence's KVCache: pages of the arena at `path`, which is `file` (device and inode)."""

    sequence: int
    path: str
    page_bytes: int
    num_pages: int
    file: tuple[int, int]
    pages: JobPages


class LoadPages(StageMessage, frozen=True, tag="Load"):
    """The first `num_tokens` are in the pages."""

    sequence: int
    num_tokens: int


class SequenceChunk(StageMessage, frozen=True, tag="Chunk"):
    """More tokens of a sequence; the payload is those (int64), or their hidden states behind the first stage.

    `steps`: one token, whose logits are wanted. `is_void`: an earlier stage has not computed it, so none can.
    """

    sequence: int
    num_tokens: int
    steps: bool = False
    is_void: bool = False


class Drop(StageMessage, frozen=True):
    """The sequence has ended: stages drop it."""

    sequence: int


class StageReady(StageMessage, frozen=True, tag="Ready"):
    """The layout of a share, and what else the engine does not know of a model that it never loads."""

    layout_json: str
    max_model_len: int
    vocab_size: int


class StageUnfit(StageMessage, frozen=True, tag="Unfit"):
    """No stage can be made of this model, however often it is started."""

    reason: str


class StageLayerWritten(StageMessage, frozen=True, tag="Written"):
    """K and V of `layer` are in their pages up to `num_tokens`."""

    sequence: int
    group: int
    layer: int
    num_tokens: int


class StageStateWritten(StageMessage, frozen=True, tag="StateWritten"):
    """So are the states of `layer` after `num_tokens`."""

    sequence: int
    group: int
    layer: int
    num_tokens: int


class Done(StageMessage, frozen=True):
    """This stage has finished the sequence's next LoadPages or SequenceChunk, computed or not."""

    sequence: int


class StageFailure(StageMessage, frozen=True, tag="Failure"):
    """A LoadPages or a SequenceChunk could not be done. `reason` "pages_invalid": what is in the pages cannot be used."""

    sequence: int
    reason: str
    text: str


class Logits(StageMessage, frozen=True):
    """The logits of a step, float32 in the payload."""

    sequence: int


ToStage = Whole | Begin | SequencePages | LoadPages | SequenceChunk | Drop
FromStage = StageReady | StageUnfit | StageLayerWritten | StageStateWritten | Done | StageFailure | Logits

_encoder: Final = msgspec.msgpack.Encoder()
_to_stage: Final = msgspec.msgpack.Decoder(ToStage)
_from_stage: Final = msgspec.msgpack.Decoder(FromStage)


class ToStageFrame(NamedTuple):
    message: ToStage
    payload: bytearray


class FromStageFrame(NamedTuple):
    message: FromStage
    payload: bytearray


def send(peer: socket.socket, message: StageMessage, payload: memoryview | bytes = b"") -> None:
    """Blocks until the kernel has taken all. Raises OSError."""
    head = _encoder.encode(message)
    peer.sendall(_LENGTHS.pack(len(head), len(payload)) + head)
    if len(payload):
        peer.sendall(payload)


def receive_to_stage(peer: socket.socket) -> ToStageFrame | None:
    """The next frame, None at the end. Blocks. Raises OSError, and ValueError for what is no frame."""
    frame = _receive(peer)
    return None if frame is None else ToStageFrame(_to_stage.decode(frame[0]), frame[1])


def receive_from_stage(peer: socket.socket) -> FromStageFrame | None:
    """As above, of what stages say."""
    frame = _receive(peer)
    return None if frame is None else FromStageFrame(_from_stage.decode(frame[0]), frame[1])


def _receive(peer: socket.socket) -> tuple[bytearray, bytearray] | None:
    lengths = _exactly(peer, _LENGTHS.size)
    if lengths is None:
        return None
    head_bytes, payload_bytes = _LENGTHS.unpack(lengths)
    if head_bytes > MAX_HEAD_BYTES or payload_bytes > MAX_PAYLOAD_BYTES:
        raise ValueError(f"a frame of {head_bytes} and {payload_bytes} bytes")
    head, payload = _exactly(peer, head_bytes), _exactly(peer, payload_bytes)
    return None if head is None or payload is None else (head, payload)


def _exactly(peer: socket.socket, count: int) -> bytearray | None:
    """None where the peer hung up before it had said all."""
    data = bytearray(count)
    rest = memoryview(data)
    while rest:
        received = peer.recv_into(rest)
        if not received:
            return None
        rest = rest[received:]
    return data
