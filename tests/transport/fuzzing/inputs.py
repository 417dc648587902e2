"""What a stranger may say: frames of every kind with fields at random and at the edges, and what may befall their bytes."""

import dataclasses
import random
from typing import Any, Final, Protocol

from transport.receive.registry.segments import read_id, write_id
from transport.wire import frames
from transport.wire.connection import TRANSITIONS, Connection, ConnectionRole
from transport.wire.encoding import shapes
from transport.wire.frames import Chunk, CodedChunk, Frame, Open, Shape
from transport.wire.manifest import Manifest, proof_of

SIZES: Final = (4096, 0, 70_000)
SECRET: Final = b"secret"
SEGMENT: Final = "s"
SEGMENT_BYTES: Final = 100_000
PLACEMENT: Final = ((0, 4096), (5000, 0), (6000, 70_000))
OPENABLE: Final = ("t", "t", "t", write_id(SEGMENT, "1"), read_id(SEGMENT, "1", "127.0.0.1:1"))
EDGES: Final = {
    Shape.U16: (0, 1, 2, 3, 65535), Shape.U32: (0, 0, 0, 1, 4096, 1 << 16, (1 << 32) - 1),
    Shape.U64: (0, 0, 0, 1, 4096, 74_096, 1 << 46, (1 << 46) + 1, (1 << 64) - 1), Shape.FLAG: (False, True),
}  # fmt: skip
WORDS: Final = ("", "t", "xxh3", "aes-128-gcm", "protocol", "a word nobody knows", "é" * 20, "segment:s:1", "x" * 1024)


class Listening(Protocol):
    """The end that is spoken to."""

    @property
    def role(self) -> ConnectionRole: ...

    @property
    def connection(self) -> Connection:
        """Of either end: state and transcript are the same."""


def any_frame(rng: random.Random, end: Listening) -> Frame:
    due = list(TRANSITIONS[end.role][end.connection.state])
    return frame_of(rng, rng.choice(due if due and rng.random() < 0.9 else list(frames.KINDS)), end)


def frame_of(rng: random.Random, kind: type[Frame], end: Listening) -> Frame:
    """Some frame of that kind."""
    if kind is Chunk or kind is CodedChunk:
        values: dict[str, Any] = {f.name: rng.choice(EDGES[Shape.U32]) for f in dataclasses.fields(kind)}
        values["sealed"] = rng.random() < 0.5
        return kind(**values)
    values = {name: _value(rng, shape) for name, shape in shapes(kind).items()}
    if kind is Open and rng.random() < 0.5:  # one that is let in
        manifest, transfer_id = Manifest(SIZES), rng.choice(OPENABLE)
        values |= {
            "transfer_id": transfer_id,
            "proof": proof_of(SECRET, transfer_id, manifest.digest, end.connection.transcript),
            "manifest_digest": manifest.digest,
            "total_bytes": manifest.total_bytes,
            "num_ranges": len(SIZES),
            "placement": PLACEMENT,
        }
    return kind(**values)


def _value(rng: random.Random, shape: Shape) -> Any:
    if shape in (Shape.TEXT, Shape.DETAIL):
        return rng.choice(WORDS)
    if shape is Shape.BLOB:
        return rng.randbytes(rng.choice((0, 16, 16, 32, 1024)))
    if shape in (Shape.PAIRS, Shape.SPANS):
        starts = [rng.choice(EDGES[Shape.U64][:6]) for _ in range(rng.choice((0, 1, 1, 2, 40)))]
        return tuple((start, start + rng.choice((0, 1, 4096))) for start in starts)
    return rng.choice(EDGES[shape])


def spoil(rng: random.Random, data: bytearray) -> bytearray:
    for _ in range(rng.choice((0,) * 8 + (1, 1, 1, 2, 2, 4))):
        if not data:
            break
        at = rng.randrange(len(data))
        match rng.randrange(5):
            case 0:
                data[at] ^= 1 << rng.randrange(8)
            case 1:
                data[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF))
            case 2:
                del data[at:]
            case 3:
                data[at:at] = rng.randbytes(rng.randrange(1, 9))
            case 4:
                data[4:8] = rng.choice((0, 1, 24, 65536, 65537, (1 << 32) - 1)).to_bytes(4, "little")
    return data
