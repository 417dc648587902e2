"""Content codings of bodies (RFC 9110 §8.4): decoded here, in pieces that the event loop does not notice, up to a limit.

`gzip` has up to 4,096 members; `deflate` comes with the header of RFC 1950, or without it, as some clients send it.
`zstd` needs its extra, and has windows of 8 MiB at most (RFC 9659). Several codings in turn are refused: no client uses them.
"""

import zlib
from collections.abc import Callable, Generator, Iterator
from typing import Final

from transport.coding.codec import zstd_module

PIECE_BYTES: Final = 128 * 1024
SLICE_BYTES: Final = 16 * 1024  # given to a decoder at once
MAX_MEMBERS: Final = 4096  # a member may have 9 bytes, and costs some microseconds even if it is empty
ZSTD_SLICE_BYTES: Final = 512  # 4 bytes may stand for 128 KiB, and what a slice comes to is decoded at once
ZSTD_WINDOW_BYTES: Final = 8 << 20
IDENTITY: Final = ("", "identity")
_ZSTD: Final = zstd_module()

Member = Generator[bytes, None, int]  # the pieces of one member; returns where it ends


def coding_of(said: list[str]) -> str:
    """The coding that values of `Content-Encoding` name, in lower case; "" for none."""
    named = ",".join(said).strip().lower()
    return "" if named in IDENTITY else ALIASES.get(named, named)


def decoded(coding: str, body: bytes) -> Iterator[bytes]:
    """`body` without its coding, which is one of `CODINGS`, in pieces. Raises ValueError for what is not in that coding."""
    try:
        yield from CODINGS[coding](body)
    except _ERRORS as error:
        raise ValueError(str(error)) from error


def _gzip(body: bytes) -> Iterator[bytes]:
    return _members(body, lambda start: _inflated(body, start, 16 + zlib.MAX_WBITS))


def _deflate(body: bytes) -> Iterator[bytes]:
    has_header = bool(body) and body[0] & 0xF == 8
    end = yield from _inflated(body, 0, zlib.MAX_WBITS if has_header else -zlib.MAX_WBITS)
    if end < len(body):
        raise ValueError("data follows its end")


def _zstd(body: bytes) -> Iterator[bytes]:
    return _members(body, lambda start: _frame(body, start))


def _members(body: bytes, member: Callable[[int], Member]) -> Iterator[bytes]:
    """Pieces of all members, one member after the other."""
    start = 0
    for _ in range(MAX_MEMBERS):
        if start == len(body):
            return
        start = yield from member(start)
    if start < len(body):
        raise ValueError(f"it has more than {MAX_MEMBERS} members")


def _inflated(body: bytes, start: int, bits: int) -> Member:
    """Pieces of the stream of zlib's that begins at `start`."""
    decoder, given = zlib.decompressobj(bits), start
    while not decoder.eof:
        data = decoder.unconsumed_tail
        if not data:
            data = _slice(body, given, SLICE_BYTES)
            given += len(data)
        yield decoder.decompress(data, PIECE_BYTES)
    return given - len(decoder.unused_data)


def _frame(body: bytes, start: int) -> Member:
    """Pieces of the frame of zstd's that begins at `start`."""
    decoder, given = _ZSTD.ZstdDecompressor(max_window_size=ZSTD_WINDOW_BYTES).decompressobj(), start
    while not decoder.eof:
        data = _slice(body, given, ZSTD_SLICE_BYTES)
        given += len(data)
        yield decoder.decompress(data)
    return given - len(decoder.unused_data)


def _slice(body: bytes, start: int, size: int) -> bytes:
    if start >= len(body):
        raise ValueError("it is cut short")
    return body[start : start + size]


CODINGS: Final[dict[str, Callable[[bytes], Iterator[bytes]]]] = {"gzip": _gzip, "deflate": _deflate}
if _ZSTD is not None:
    CODINGS["zstd"] = _zstd
ALIASES: Final = {"x-gzip": "gzip"}  # RFC 9110 §8.4.1.3
_ERRORS: Final = (zlib.error, *([_ZSTD.ZstdError] if _ZSTD is not None else []))
