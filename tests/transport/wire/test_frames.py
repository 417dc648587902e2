import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transport.errors import RemoteProtocolError
from transport.wire import frames
from transport.wire.encoding import decode, encode
from transport.wire.frames import HEADER, Chunk, Frame, Hello

u16, u32, u64 = st.integers(0, 2**16 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
offset = st.integers(0, frames.MAX_TRANSFER_BYTES)
text, blob = st.text(max_size=200), st.binary(max_size=200)
spans = st.lists(st.tuples(offset, offset).map(lambda p: (min(p), max(p))), max_size=40).map(tuple)
pairs = st.lists(st.tuples(offset, offset), max_size=40).map(tuple)
length = st.integers(1, frames.MAX_CHUNK_BYTES)

ANY_FRAME: st.SearchStrategy[Frame] = st.one_of(
    st.builds(Hello, version_min=u16, version_max=u16, integrity=text, nonce=blob, session=blob),
    st.builds(frames.Welcome, version=u16, integrity=text, nonce=blob, max_chunk_bytes=u32, codecs=u32),
    st.builds(frames.Goodbye, code=text, detail=text),
    st.builds(
        frames.Open, slot=u32, transfer_id=text, proof=blob, total_bytes=u64, num_ranges=u32,
        manifest_digest=blob, arena_path=text, placement=pairs,
    ),
    st.builds(frames.Accept, slot=u32, missing=spans),
    st.builds(frames.Refuse, slot=u32, code=text, detail=text),
    st.builds(Chunk, slot=u32, offset=st.integers(0, 2**40), length=length, sealed=st.booleans()),
    st.builds(frames.Reference, slot=u32, offset=offset, checksum=u64, extents=pairs),
    st.builds(frames.Ack, slot=u32, ranges=spans),
    st.builds(frames.Nack, slot=u32, offset=offset, length=u32, code=text),
    st.builds(frames.Cancel, slot=u32, code=text, detail=text),
    st.builds(frames.Abort, slot=u32, leave=st.booleans(), detail=text),
    st.builds(frames.Ping, token=u32),
    st.builds(frames.Pong, token=u32),
    st.builds(
        frames.CodedChunk, slot=u32, offset=st.integers(0, 2**40), length=st.integers(1000, frames.MAX_CHUNK_BYTES),
        coded_length=st.integers(1, 999), checksum=u64, sealed=st.booleans()
    ),
    st.builds(frames.AskRails),
    st.builds(frames.Nics, nics=text),
    st.builds(frames.Grant, slot=u32, address=u64, keys=pairs, extents=pairs),
    st.builds(frames.LandingBuffers, places=u32, place_bytes=u32),
    st.builds(frames.RailBuffer, rail=u32, attempt=u32, address=u64, key=u32),
    st.builds(frames.RailOffer, rail=u32, attempt=u32, nic=u32, queue_pair=u32, packet_number=u32, gid=text, mtu=u32),
    st.builds(
        frames.RailAnswer, rail=u32, attempt=u32, queue_pair=u32, packet_number=u32, gid=text, mtu=u32, depth=u32
    ),
    st.builds(frames.RailClosed, rail=u32, attempt=u32, reason=text),
    st.builds(
        frames.Written, slot=u32, offset=u64, length=u32, checksum=u64, rail=u32, attempt=u32, number=u32
    ),
)  # fmt: skip


@given(st.text(st.characters(), max_size=3 * frames.MAX_TEXT_BYTES), st.integers(0, 3000))
def test_details_are_cut_where_a_frame_ends_not_refused(detail: str, more: int) -> None:
    detail += "…" * more
    data = memoryview(encode(frames.Abort(slot=1, leave=False, detail=detail), 0))
    kind, flags, _, _ = HEADER.unpack_from(data)
    frame = decode(kind, flags, data[HEADER.size :])
    assert isinstance(frame, frames.Abort)
    printable = detail.encode(errors="replace").decode()
    assert printable.startswith(frame.detail)
    assert frame.detail == printable or len(frame.detail.encode()) > frames.MAX_TEXT_BYTES - 4


def test_names_are_refused_not_cut() -> None:
    with pytest.raises(ValueError, match="1025 bytes"):
        encode(frames.RailOffer(rail=0, attempt=0, nic=0, queue_pair=0, packet_number=0, gid="x" * 1025, mtu=0), 0)


@given(ANY_FRAME, u32)
def test_what_is_encoded_is_decoded(frame: Frame, seq: int) -> None:
    data = memoryview(encode(frame, seq))
    kind, flags, got_seq, body_bytes = HEADER.unpack_from(data)
    assert got_seq == seq & 0xFFFF
    assert body_bytes == len(data) - HEADER.size <= frames.MAX_BODY_BYTES
    assert decode(kind, flags, data[HEADER.size :]) == frame


@given(ANY_FRAME, st.data())
def test_a_truncated_body_is_refused(frame: Frame, data: st.DataObject) -> None:
    whole = memoryview(encode(frame, 0))
    kept = data.draw(st.integers(HEADER.size, len(whole) - 1)) if len(whole) > HEADER.size else None
    if kept is not None:
        with pytest.raises(RemoteProtocolError):
            decode(whole[0], whole[1], whole[HEADER.size : kept])


@given(st.integers(0, 255), st.integers(0, 255), st.binary(max_size=200))
def test_any_body_is_a_frame_or_a_protocol_error(kind: int, flags: int, body: bytes) -> None:
    with contextlib.suppress(RemoteProtocolError):
        decode(kind, flags, memoryview(body))


def test_an_absurd_count_is_refused_before_it_is_believed() -> None:
    body = (0).to_bytes(4, "little") + (2**32 - 1).to_bytes(4, "little")
    with pytest.raises(RemoteProtocolError, match="entries"):
        decode(5, 0, memoryview(body))


def test_a_stranger_is_recognised() -> None:
    with pytest.raises(RemoteProtocolError, match="not a PrfaaS sender"):
        decode(1, 0, memoryview(b"GET / HTTP/1.1\r\n"))
