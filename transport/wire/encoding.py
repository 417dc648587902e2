"""Frames as bytes, and bytes as frames: what every field's annotation says, derived once from the dataclasses."""

import dataclasses
import struct
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias, get_args, get_type_hints

from transport.errors import RemoteProtocolError
from transport.wire.frames import (
    CHUNK,
    CHUNK_BODY_BYTES,
    CHUNK_KIND,
    CODED,
    CODED_BODY_BYTES,
    CODED_KIND,
    FLAG_SEALED,
    HEADER,
    KINDS,
    MAGIC,
    MAX_BLOB_BYTES,
    MAX_CHUNK_BYTES,
    MAX_LIST,
    MAX_PLACEMENT,
    MAX_TEXT_BYTES,
    MAX_TRANSFER_BYTES,
    Chunk,
    CodedChunk,
    Frame,
    Hello,
    Shape,
)

_MAGIC_BYTES: Final = MAGIC.to_bytes(4, "little")
_CHUNK_BODY: Final = struct.Struct("<IIQ")
_CODED_BODY: Final = struct.Struct("<IIQQI")
_PAIR: Final = struct.Struct("<QQ")


def encode(frame: Frame, seq: int) -> bytes:
    """The bytes of a frame (of a Chunk: without its payload). Raises ValueError or struct.error for what none can say."""
    if isinstance(frame, Chunk):
        return encode_chunk(frame.slot, frame.offset, frame.length, seq, frame.sealed)
    if isinstance(frame, CodedChunk):
        return encode_coded(frame, seq)
    kind, writers = _WRITERS[type(frame)]
    body = b"".join([write(getattr(frame, name)) for name, write in writers])
    if isinstance(frame, Hello):
        body = _MAGIC_BYTES + body
    return HEADER.pack(kind, 0, seq & 0xFFFF, len(body)) + body


def encode_chunk(slot: int, offset: int, length: int, seq: int, sealed: bool = False) -> bytes:
    """The 24 bytes before a chunk's payload."""
    flags = FLAG_SEALED if sealed else 0
    return CHUNK.pack(CHUNK_KIND, flags, seq & 0xFFFF, CHUNK_BODY_BYTES, slot, length, offset)


def encode_coded(chunk: CodedChunk, seq: int) -> bytes:
    """The 36 bytes before a coded chunk's payload."""
    flags, where = FLAG_SEALED if chunk.sealed else 0, (chunk.slot, chunk.length, chunk.offset)
    return CODED.pack(CODED_KIND, flags, seq & 0xFFFF, CODED_BODY_BYTES, *where, chunk.checksum, chunk.coded_length)


def check_opening(transfer_id: str, arena_path: str, placement: Sequence[tuple[int, int]]) -> None:
    """Raises ValueError when no Open can carry this."""
    for text in (transfer_id, arena_path):
        _write_text(text)
    if len(placement) > MAX_PLACEMENT:
        raise ValueError(f"a placement of {len(placement)} ranges, at most {MAX_PLACEMENT}")
    if any(min(pair) < 0 or max(pair) > MAX_TRANSFER_BYTES for pair in placement):
        raise ValueError("a placement beyond any transfer")


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
    slot, length, offset = _CHUNK_BODY.unpack(body)
    if not 0 < length <= MAX_CHUNK_BYTES or offset + length > MAX_TRANSFER_BYTES:
        raise ValueError(f"length {length} at offset {offset}")
    return Chunk(slot=slot, offset=offset, length=length, sealed=bool(flags & FLAG_SEALED))


def _decode_coded(flags: int, body: memoryview) -> CodedChunk:
    slot, length, offset, checksum, coded_length = _CODED_BODY.unpack(body)
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
    if frame_type is Hello and reader.take(4) != _MAGIC_BYTES:
        raise ValueError("not a PrfaaS sender")
    values = {name: read(reader) for name, read in _READERS[frame_type]}
    if reader.left:
        raise ValueError(f"{reader.left} bytes too many")
    return frame_type(**values)


class _Reader:
    """Takes fields off a body, one after the other."""

    __slots__ = ("_at", "_body")

    def __init__(self, body: memoryview) -> None:
        self._body = body
        self._at = 0

    @property
    def left(self) -> int:
        return len(self._body) - self._at

    def take(self, size: int) -> memoryview:
        if size > self.left:
            raise ValueError("body too short")
        self._at += size
        return self._body[self._at - size : self._at]

    def blob(self, limit: int) -> bytes:
        size = _U16.unpack(self.take(2))[0]
        if size > limit:
            raise ValueError(f"field of {size} bytes, at most {limit}")
        return bytes(self.take(size))

    def pairs(self) -> tuple[tuple[int, int], ...]:
        count = _U32.unpack(self.take(4))[0]
        if count > MAX_LIST:
            raise ValueError(f"{count} entries, at most {MAX_LIST}")
        pairs = tuple(_PAIR.iter_unpack(self.take(_PAIR.size * count)))
        if any(max(pair) > MAX_TRANSFER_BYTES for pair in pairs):
            raise ValueError("an offset beyond any transfer")
        return pairs

    def spans(self) -> tuple[tuple[int, int], ...]:
        spans = self.pairs()
        if any(start > stop for start, stop in spans):
            raise ValueError("a range that ends before it begins")
        return spans


_Write: TypeAlias = Callable[[Any], bytes]
_Read: TypeAlias = Callable[[_Reader], Any]
_U16: Final = struct.Struct("<H")
_U32: Final = struct.Struct("<I")


def _write_blob(value: bytes, limit: int = MAX_BLOB_BYTES) -> bytes:
    if len(value) > limit:
        raise ValueError(f"field of {len(value)} bytes, at most {limit}")
    return _U16.pack(len(value)) + value


def _write_text(value: str) -> bytes:
    return _write_blob(value.encode(), MAX_TEXT_BYTES)


def _write_detail(value: str) -> bytes:
    """Text for people may come from anywhere: it is cut, at a character, instead of refused."""
    return _write_blob(value.encode(errors="replace")[:MAX_TEXT_BYTES].decode(errors="ignore").encode())


def _write_pairs(pairs: tuple[tuple[int, int], ...]) -> bytes:
    if len(pairs) > MAX_LIST:
        raise ValueError(f"{len(pairs)} entries, at most {MAX_LIST}")
    return _U32.pack(len(pairs)) + b"".join([_PAIR.pack(*pair) for pair in pairs])


def _read_text(reader: _Reader) -> str:
    return str(reader.blob(MAX_TEXT_BYTES), "utf-8")


def _read_blob(reader: _Reader) -> bytes:
    return reader.blob(MAX_BLOB_BYTES)


def _number(form: struct.Struct) -> tuple[_Write, _Read]:
    return form.pack, lambda reader: form.unpack(reader.take(form.size))[0]


_WAYS: Final[dict[Shape, tuple[_Write, _Read]]] = {
    Shape.U16: _number(_U16),
    Shape.U32: _number(_U32),
    Shape.U64: _number(struct.Struct("<Q")),
    Shape.FLAG: _number(struct.Struct("<?")),
    Shape.TEXT: (_write_text, _read_text),
    Shape.DETAIL: (_write_detail, _read_text),
    Shape.BLOB: (_write_blob, _read_blob),
    Shape.PAIRS: (_write_pairs, _Reader.pairs),
    Shape.SPANS: (_write_pairs, _Reader.spans),
}


def shapes(frame_type: type[Frame]) -> dict[str, Shape]:
    """The fields of a frame's body, in their order, and how each is written."""
    hints = get_type_hints(frame_type, include_extras=True)
    return {field.name: get_args(hints[field.name])[1] for field in dataclasses.fields(frame_type)}


_TYPES: Final = {kind: frame_type for frame_type, kind in KINDS.items()}
_PLAIN: Final = {frame_type: shapes(frame_type) for frame_type in KINDS if frame_type not in (Chunk, CodedChunk)}
_WRITERS: Final = {
    frame_type: (KINDS[frame_type], [(name, _WAYS[shape][0]) for name, shape in fields.items()])
    for frame_type, fields in _PLAIN.items()
}
_READERS: Final = {
    frame_type: [(name, _WAYS[shape][1]) for name, shape in fields.items()] for frame_type, fields in _PLAIN.items()
}
