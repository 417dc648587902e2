"""Coded chunks: a coded chunk is a row of blocks, and each block names its codec.

    coded chunk   | codec dtype vector plain coded digest | coded bytes | codec dtype ... | coded bytes | ...

Codecs are stages, applied in this order: quantise to int8 or fp8 (see `quantise`), byte-shuffle what is left of floats,
compress with zstd. A block that nothing makes smaller is carried raw, so that one chunk may span ranges of any kind.
The digest is xxh3 of the plain bytes of a lossless block: a block that does not decode to them is refused.

Blocks describe themselves, so a receiver needs no knowledge of layouts. It checks every size before it uses it. It
decodes into as much memory as the chunk announced.
"""

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntFlag
from functools import cache
from typing import Any, Final

import numpy as np
import xxhash

from transport.coding.elements import ITEM_BYTES, MAX_VECTOR, Bytes, Run, shuffle, unshuffle
from transport.coding.quantise import QuantisedType, dequantise, quantise
from transport.wire.manifest import cut

BLOCK: Final = struct.Struct("<BBHIIQ")
MAX_BLOCKS: Final = 4096
MIN_BLOCK_BYTES: Final = 512  # smaller ones are carried raw: they gain less than they cost
ZSTD_LEVEL: Final = 1  # higher levels gain 1-2 % on KVCache at a third of the speed
_MAX_WINDOW_BYTES: Final = 1 << 27
_DTYPES: Final = tuple(ITEM_BYTES)


class Codec(IntFlag):
    """Stages of a block, and, as a mask, what a receiver takes."""

    RAW = 0
    ZSTD = 1
    INT8 = 2
    FP8 = 4

    @property
    def lossy(self) -> bool:
        return bool(self & LOSSY)

    @property
    def label(self) -> str:
        """For metrics and records: "plain", "zstd", "int8", "int8+zstd", ..."""
        parts = [codec.name.lower() for codec in (Codec.INT8, Codec.FP8, Codec.ZSTD) if self & codec and codec.name]
        return "+".join(parts) or "plain"


LOSSY: Final = Codec.INT8 | Codec.FP8
_KINDS: Final = {Codec.INT8: QuantisedType.INT8, Codec.FP8: QuantisedType.FP8}
MAKEABLE: Final = frozenset(quantised | zstd for quantised in (Codec.RAW, *_KINDS) for zstd in (Codec.RAW, Codec.ZSTD))


class CodecError(ValueError):
    """Coded bytes that our encoder never makes, or of a codec that this receiver does not accept."""


@cache
def zstd_module() -> Any:
    """The zstandard package, or None: it comes with the `zstd` extra."""
    try:
        import zstandard
    except ImportError:
        return None
    return zstandard


def decodable(*, lossy: bool) -> Codec:
    """The codecs that this process can decode and may: quantised bytes only with `lossy`."""
    lossless = Codec.ZSTD if zstd_module() is not None else Codec.RAW
    return lossless | (LOSSY if lossy else Codec.RAW)


@dataclass(frozen=True, slots=True)
class ChunkPart:
    """Some bytes of a chunk, all of one kind: `plain` belongs to `run` and is to be coded with `codec`."""

    plain: memoryview
    run: Run
    codec: Codec
    label: str  # whose it is, for accounts


@dataclass(frozen=True, slots=True)
class CodedPart:
    """Some bytes after coding."""

    label: str
    codec: Codec
    plain_bytes: int
    coded_bytes: int


class ChunkEncoder:
    """Makes chunks smaller; belongs to one thread at a time."""

    def __init__(self) -> None:
        zstd = zstd_module()
        self._zstd = zstd.ZstdCompressor(level=ZSTD_LEVEL, write_checksum=False) if zstd is not None else None

    def encode(self, parts: Iterable[ChunkPart], out: memoryview) -> tuple[int, tuple[CodedPart, ...]] | None:
        """Writes a coded chunk; returns its size and the uses by account. None when it does not fit into `out`."""
        rows = merged(parts)
        if len(rows) > MAX_BLOCKS:
            return None
        at, shares = 0, []
        for part in rows:
            codec, coded = self._block(part)
            plain, stop = part.plain, at + BLOCK.size + len(coded)
            if stop > len(out):
                return None
            digest = 0 if codec.lossy else xxhash.xxh3_64_intdigest(plain)
            dtype = _DTYPES.index(part.run.dtype)
            vector = part.run.vector if codec.lossy else 0
            BLOCK.pack_into(out, at, codec, dtype, vector, len(plain), len(coded), digest)
            out[at + BLOCK.size : stop] = coded
            shares.append(CodedPart(part.label, codec, len(plain), stop - at))
            at = stop
        return at, tuple(shares)

    def _block(self, part: ChunkPart) -> tuple[Codec, memoryview]:
        plain, run, codec = part.plain, part.run, part.codec
        if len(plain) < MIN_BLOCK_BYTES:
            return Codec.RAW, plain
        data: Bytes | None = None
        raw = np.frombuffer(plain, np.uint8)
        if codec.lossy and run.vector_bytes:
            data = quantise(raw, run.dtype, run.vector, _KINDS[codec & LOSSY])
        made = codec & LOSSY if data is not None else Codec.RAW
        if codec & Codec.ZSTD and self._zstd is not None:
            source = data if data is not None else shuffle(raw, run.item_bytes)
            packed = memoryview(self._zstd.compress(source.data))
            if len(packed) < source.size:
                return made | Codec.ZSTD, packed
        return made, plain if data is None else memoryview(data.data)


def parts_of(run: Run, views: Sequence[memoryview], skip: int, codec: Codec, label: str) -> list[ChunkPart]:
    """Bytes of a run, after its first `skip`, as parts. Whole vectors are quantised; vectors cut at either end are
    not."""
    lossless = codec & ~LOSSY
    if not codec.lossy or not run.vector_bytes:
        return [ChunkPart(view, run, lossless, label) for view in views]
    size = sum(len(view) for view in views)
    head = min(-skip % run.vector_bytes, size)
    body = (size - head) // run.vector_bytes * run.vector_bytes
    # Pages may end in the middle of a vector: cut by vectors first, by memory second.
    pieces = ((0, head, lossless), (head, body, codec), (head + body, size - head - body, lossless))
    return [
        ChunkPart(view, run, how, label)
        for start, length, how in pieces
        if length
        for view in cut(views, start, length)
    ]


def merged(parts: Iterable[ChunkPart]) -> list[ChunkPart]:
    """Neighbours of one kind become one part, so that blocks are few and vectors whole."""
    rows: list[list[ChunkPart]] = []
    for part in parts:
        if rows and _alike(rows[-1][-1], part):
            rows[-1].append(part)
        else:
            rows.append([part])
    return [row[0] if len(row) == 1 else _joined(row) for row in rows]


def _alike(one: ChunkPart, other: ChunkPart) -> bool:
    same_run = (one.run.dtype, one.run.vector) == (other.run.dtype, other.run.vector)
    return same_run and one.codec == other.codec and one.label == other.label


def _joined(row: Sequence[ChunkPart]) -> ChunkPart:
    joined = memoryview(b"".join(part.plain for part in row))
    return ChunkPart(joined, row[0].run, row[0].codec, row[0].label)


class ChunkDecoder:
    """Takes coded chunks apart; belongs to one thread at a time. `allowed` is the mask that the peer was told."""

    def __init__(self, allowed: Codec) -> None:
        self.allowed = allowed
        zstd = zstd_module()
        self._zstd = zstd.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES) if zstd is not None else None

    def decode(self, coded: memoryview, into: memoryview) -> tuple[CodedPart, ...]:
        """Fills `into`, which is exactly as long as the chunk; returns which codecs it took. Raises CodecError."""
        shares: list[CodedPart] = []
        at = filled = 0
        while at < len(coded):
            if len(coded) - at < BLOCK.size or len(shares) == MAX_BLOCKS:
                raise CodecError("not a row of blocks")
            number, dtype, vector, plain_bytes, coded_bytes, digest = BLOCK.unpack_from(coded, at)
            at += BLOCK.size
            if not plain_bytes or plain_bytes > len(into) - filled or coded_bytes > len(coded) - at:
                raise CodecError(f"a block of {coded_bytes} bytes for {plain_bytes}")
            codec = self._checked(number, dtype, vector)
            target = into[filled : filled + plain_bytes]
            self._decode_block(codec, _DTYPES[dtype], vector, coded[at : at + coded_bytes], target)
            if not codec.lossy and xxhash.xxh3_64_intdigest(target) != digest:
                raise CodecError("what was decoded is not what was coded")
            shares.append(CodedPart("", codec, plain_bytes, BLOCK.size + coded_bytes))
            at, filled = at + coded_bytes, filled + plain_bytes
        if filled != len(into):
            raise CodecError(f"{filled} of {len(into)} bytes")
        return tuple(shares)

    def _checked(self, number: int, dtype: int, vector: int) -> Codec:
        if number not in MAKEABLE or dtype >= len(_DTYPES) or vector > MAX_VECTOR:
            raise CodecError(f"codec {number}, type {dtype}, vectors of {vector}")
        codec = Codec(number)
        if codec & ~self.allowed:
            raise CodecError(f"{codec.label} is not accepted here")
        if codec.lossy and not Run(0, _DTYPES[dtype], vector).vector_bytes:
            raise CodecError("quantised, but its type cannot be")
        return codec

    def _decode_block(self, codec: Codec, dtype: str, vector: int, coded: memoryview, target: memoryview) -> None:
        into = np.frombuffer(target, np.uint8)
        if codec.lossy:
            size = into.size // (ITEM_BYTES[dtype] * vector) * (4 + vector)
            quantised = self._inflated(coded, size) if codec & Codec.ZSTD else np.frombuffer(coded, np.uint8)
            try:
                dequantise(quantised, dtype, vector, _KINDS[codec & LOSSY], into)
            except ValueError as exc:
                raise CodecError(str(exc)) from exc
        elif codec & Codec.ZSTD:
            unshuffle(self._inflated(coded, into.size), ITEM_BYTES[dtype], into)
        elif len(coded) != into.size:
            raise CodecError(f"{len(coded)} raw bytes for {into.size}")
        else:
            target[:] = coded

    def _inflated(self, packed: memoryview, size: int) -> Bytes:
        zstd = zstd_module()
        assert self._zstd is not None  # else it would not be allowed
        try:
            # The size that a frame states is what gets allocated: look at it first.
            if zstd.frame_content_size(packed) != size:
                raise CodecError(f"a compressed block that does not state {size} bytes")
            data = self._zstd.decompress(packed, max_output_size=size, allow_extra_data=False)
        except zstd.ZstdError as exc:
            raise CodecError(f"zstd: {exc}") from exc
        if len(data) != size:
            raise CodecError(f"{len(data)} bytes out of a block of {size}")
        return np.frombuffer(data, np.uint8)
