"""Content codings of bodies (RFC 9110 §8.4): decoded here, in pieces that the event loop does not notice, up to a limit.

`gzip` (several members, too), `deflate` (with the header of RFC 1950, or without it, as some clients send it), and `zstd` where
its extra is installed, with windows of 8 MiB at most (RFC 9659). Several codings in turn are refused: no client uses them.
"""

import zlib
from collections.abc import Callable, Generator, Iterator
from typing import Final

from transport.coding.codec import zstd_module

PIECE_BYTES: Final = 128 * 1024
ZSTD_SLICE_BYTES: Final = 512  # 4 bytes may stand for 128 KiB, and what a slice comes to is decoded at once
ZSTD_WINDOW_BYTES: Final = 8 << 20
IDENTITY: Final = ("", "identity")
_ZSTD: Final = zstd_module()


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
    rest = body
    while rest:
        rest = yield from _inflated(rest, 16 + zlib.MAX_WBITS)


def _deflate(body: bytes) -> Iterator[bytes]:
    has_header = bool(body) and body[0] & 0xF == 8
    if (yield from _inflated(body, zlib.MAX_WBITS if has_header else -zlib.MAX_WBITS)):
        raise ValueError("it goes on after its end")


def _inflated(body: bytes, bits: int) -> Generator[bytes, None, bytes]:
    """Pieces of one stream of zlib's; returns what follows it."""
    decoder, given = zlib.decompressobj(bits), 0
    while not decoder.eof:
        data = decoder.unconsumed_tail
        if not data:
            if given >= len(body):
                raise ValueError("it ends before its end")
            data = body[given : given + PIECE_BYTES]
            given += len(data)
        yield decoder.decompress(data, PIECE_BYTES)
    return decoder.unused_data + body[given:]


def _zstd(body: bytes) -> Iterator[bytes]:
    given = 0
    while given < len(body):
        decoder = _ZSTD.ZstdDecompressor(max_window_size=ZSTD_WINDOW_BYTES).decompressobj()
        while not decoder.eof:
            data = body[given : given + ZSTD_SLICE_BYTES]
            if not data:
                raise ValueError("it ends before its end")
            given += len(data)
            yield decoder.decompress(data)
        given -= len(decoder.unused_data)


CODINGS: Final[dict[str, Callable[[bytes], Iterator[bytes]]]] = {"gzip": _gzip, "deflate": _deflate}
if _ZSTD is not None:
    CODINGS["zstd"] = _zstd
ALIASES: Final = {"x-gzip": "gzip"}  # RFC 9110 §8.4.1.3
_ERRORS: Final = (zlib.error, *([_ZSTD.ZstdError] if _ZSTD is not None else []))
