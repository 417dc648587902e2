import itertools
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.properties import examples
from transport.coding.codec import (
    BLOCK,
    LOSSY,
    MAKEABLE,
    MAX_BLOCKS,
    ChunkDecoder,
    ChunkEncoder,
    ChunkPart,
    Codec,
    CodecError,
    decodable,
    merged,
    parts_of,
    zstd_module,
)
from transport.coding.elements import Run, from_floats

pytestmark = pytest.mark.skipif(zstd_module() is None, reason="needs the zstd extra")

EVERYTHING = decodable(lossy=True)
RUN = Run(1 << 20, "bfloat16", 64)


def kv(num_bytes: int, seed: int = 0) -> memoryview:
    """bfloat16 values that compress."""
    values = np.random.default_rng(seed).standard_normal(num_bytes // 2).astype(np.float32)
    return memoryview(from_floats(values, "bfloat16").copy().data).cast("B")


def encode(*parts: ChunkPart, room: int = 1 << 21) -> memoryview:
    out = memoryview(bytearray(room))
    encoded = ChunkEncoder().encode(parts, out)
    assert encoded is not None
    return out[: encoded[0]]


def decode(coded: memoryview, size: int, allowed: Codec = EVERYTHING) -> bytes:
    into = memoryview(bytearray(size))
    ChunkDecoder(allowed).decode(coded, into)
    return bytes(into)


@pytest.mark.parametrize("codec", sorted(MAKEABLE))
def test_all_codecs_come_back_as_large_as_they_went(codec: Codec) -> None:
    plain = kv(1 << 16)
    coded = encode(ChunkPart(plain, RUN, codec, "g"))
    back = decode(coded, len(plain))
    assert (back == plain) == (not codec.lossy)
    if codec:
        assert len(coded) < 0.8 * len(plain)


@settings(max_examples=examples(60), deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 5000), st.sampled_from(["", "float16", "bfloat16", "float32"]), st.sampled_from([0, 16])),
        min_size=1, max_size=6,
    ),
    st.sampled_from([Codec.RAW, Codec.ZSTD]),
)  # fmt: skip
def test_lossless_means_every_byte_of_any_chunk(kinds: list[tuple[int, str, int]], codec: Codec) -> None:
    rng = np.random.default_rng(1)
    parts = [
        ChunkPart(memoryview(rng.integers(0, 7, size, np.uint8).data).cast("B"), Run(size, dtype, vector), codec, "g")
        for size, dtype, vector in kinds
    ]
    plain = b"".join(part.plain for part in parts)
    assert decode(encode(*parts), len(plain), decodable(lossy=False)) == plain


@settings(max_examples=examples(60), deadline=None)
@given(st.integers(0, 300), st.integers(0, 3000), st.lists(st.integers(1, 400), max_size=12))
def test_whole_vectors_are_quantised_wherever_pages_and_chunks_are_cut(skip: int, size: int, pages: list[int]) -> None:
    data = memoryview(bytearray(size))
    cuts = [0, *np.minimum(np.cumsum(pages, dtype=int), size).tolist(), size]
    views = [data[a:b] for a, b in itertools.pairwise(cuts) if a < b]
    parts = parts_of(RUN, views, skip, Codec.INT8, "g")
    assert sum(len(part.plain) for part in parts) == size
    quantised = sum(len(part.plain) for part in parts if part.codec is Codec.INT8)
    head = -skip % RUN.vector_bytes
    assert quantised == max(0, size - head) // RUN.vector_bytes * RUN.vector_bytes
    for part in merged(parts):
        assert part.codec is not Codec.INT8 or len(part.plain) % RUN.vector_bytes == 0


def test_what_is_not_finite_is_carried_exactly() -> None:
    plain = kv(1 << 14)
    plain[128:130] = b"\x80\x7f"  # infinity
    coded = encode(ChunkPart(plain, RUN, Codec.INT8 | Codec.ZSTD, "g"))
    assert decode(coded, len(plain)) == plain


def test_noise_is_carried_raw() -> None:
    noise = memoryview(np.random.default_rng(1).bytes(1 << 16))
    out = memoryview(bytearray(1 << 17))
    encoded = ChunkEncoder().encode([ChunkPart(noise, Run(1 << 16), Codec.ZSTD, "g")], out)
    assert encoded is not None
    size, (share,) = encoded
    assert share.codec is Codec.RAW
    assert size == len(noise) + BLOCK.size
    assert (
        ChunkEncoder().encode([ChunkPart(noise, Run(1 << 16), Codec.ZSTD, "g")], out[: len(noise)]) is None
    )  # no room: no gain


def test_quantised_blocks_are_refused_where_they_are_not_taken() -> None:
    plain = kv(1 << 14)
    coded = encode(ChunkPart(plain, RUN, Codec.FP8, "g"))
    with pytest.raises(CodecError, match="fp8 is not accepted"):
        decode(coded, len(plain), decodable(lossy=False))


def block(codec: int, dtype: int, vector: int, plain: int, coded: bytes, digest: int = 0) -> memoryview:
    return memoryview(BLOCK.pack(codec, dtype, vector, plain, len(coded), digest) + coded)


def zstd(data: bytes, **options: bool) -> bytes:
    packed: bytes = zstd_module().ZstdCompressor(**options).compress(data)
    return packed


@pytest.mark.parametrize(
    ("coded", "says"),
    [
        (memoryview(b"x" * 5), "row of blocks"),
        (memoryview(b""), "0 of 1000"),
        (block(0, 0, 0, 1000, b"x" * 999), "999 raw bytes"),
        (block(0, 0, 0, 1001, b"x" * 1001), "for 1001"),
        (block(0, 0, 0, 0, b""), "for 0"),
        (block(0, 0, 0, 1000, b"x" * 1000), "not what was coded"),
        (memoryview(BLOCK.pack(0, 0, 0, 1000, 1 << 31, 0) + b"x" * 1000), "a block of"),
        (block(8, 0, 0, 1000, b"x"), "codec 8"),
        (block(6, 2, 10, 1000, b"x"), "codec 6"),
        (block(1, 99, 0, 1000, b"x"), "type 99"),
        (block(2, 0, 10, 1000, b"x"), "its type cannot be"),
        (block(2, 2, 0, 1000, b"x"), "its type cannot be"),
        (block(2, 2, 60000, 1000, b"x"), "vectors of 60000"),
        (block(2, 2, 10, 1000, b"x"), "quantised bytes"),
        (block(1, 0, 0, 1000, b"x" * 50), "zstd|state"),
        (block(1, 0, 0, 1000, zstd(b"x" * 1000) + b"more"), "zstd"),
        (block(1, 0, 0, 1000, zstd(b"x" * 1000)[:-2]), "zstd"),
        (block(1, 0, 0, 1000, zstd(b"x" * (1 << 20))), "state"),
        (block(1, 0, 0, 1000, zstd(b"x" * 1000, write_content_size=False)), "state"),
    ],
)  # fmt: skip
def test_what_no_encoder_makes_is_refused(coded: memoryview, says: str) -> None:
    with pytest.raises(CodecError, match=says):
        decode(coded, 1000)


def test_a_frame_that_states_a_terabyte_allocates_nothing() -> None:
    # magic, single segment with an 8-byte content size, the size, one raw block of one byte
    bomb = b"\x28\xb5\x2f\xfd" + b"\xe0" + struct.pack("<Q", 1 << 40) + b"\x09\x00\x00x"
    with pytest.raises(CodecError, match="state 1000"):
        decode(block(1, 0, 0, 1000, bomb), 1000)


def test_the_number_of_blocks_has_a_limit() -> None:
    many = memoryview(b"".join(BLOCK.pack(2, 2, 1, 2, 5, 0) + b"\0" * 5 for _ in range(MAX_BLOCKS + 1)))
    with pytest.raises(CodecError, match="row of blocks"):
        decode(many, 2 * (MAX_BLOCKS + 1))
    parts = [ChunkPart(memoryview(b"ab"), RUN, Codec.RAW, str(i)) for i in range(MAX_BLOCKS + 1)]
    assert ChunkEncoder().encode(parts, memoryview(bytearray(1 << 20))) is None


@settings(max_examples=examples(300), deadline=None)
@given(st.data(), st.sampled_from(sorted(MAKEABLE)))
def test_damage_is_refused_or_harmless(data: st.DataObject, codec: Codec) -> None:
    plain = kv(4096)
    coded = bytearray(encode(ChunkPart(plain[:2048], RUN, codec, "g"), ChunkPart(plain[2048:], RUN, Codec.ZSTD, "h")))
    for _ in range(data.draw(st.integers(1, 4))):
        coded[data.draw(st.integers(0, len(coded) - 1))] ^= data.draw(st.integers(1, 255))
    cut = data.draw(st.integers(0, len(coded)))
    try:
        back = decode(memoryview(coded)[:cut], len(plain))
    except CodecError:
        return
    # Only what was quantised may have changed unnoticed: it has no digest, the chunk's checksum covers it.
    assert back[2048:] == plain[2048:] or codec & LOSSY


@settings(max_examples=examples(300), deadline=None)
@given(st.binary(max_size=400), st.integers(1, 2000))
def test_noise_is_no_chunk(noise: bytes, size: int) -> None:
    try:
        decode(memoryview(noise), size)
    except CodecError:
        return
    assert len(noise) >= size or noise  # a raw block with the right digest is possible, and fine
