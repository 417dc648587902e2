"""A request's body as a sequence of pieces: short fields are copied, long ones are lent from the body that the client sent.

Several answers to one request have most of their body in common. A body is joined nowhere: its pieces are written one by one.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec
from msgspec import Raw

LENT_BYTES: Final = 16 * 1024  # a shorter field is copied sooner than it is written by itself


class Body:
    """Bytes in pieces; `len` is the length of all of them."""

    __slots__ = ("_pieces", "_size")

    def __init__(self, pieces: Sequence[bytes | memoryview]) -> None:
        self._pieces = pieces
        self._size = sum(map(len, pieces))

    def __len__(self) -> int:
        return self._size

    def __bytes__(self) -> bytes:
        return b"".join(self._pieces)

    @property
    def pieces(self) -> Sequence[bytes | memoryview]:
        return self._pieces

    def parts(self, max_bytes: int) -> Iterator[tuple[bytes | memoryview, ...]]:
        """All pieces in order, in groups of at most `max_bytes`; a piece that is longer is divided."""
        part: list[bytes | memoryview] = []
        room = max_bytes
        for piece in self._pieces:
            view = memoryview(piece)
            while len(view) > room:
                yield (*part, view[:room])
                view, part, room = view[room:], [], max_bytes
            part.append(view)
            room -= len(view)
        if part:
            yield tuple(part)


def body_of(fields: Mapping[str, Any]) -> Body:
    """The JSON object of `fields`; raw ones are written byte for byte."""
    lent = {name: raw for name, raw in fields.items() if isinstance(raw, Raw) and len(raw) > LENT_BYTES}
    if not lent:
        return Body((msgspec.json.encode(fields),))
    copied = msgspec.json.encode({name: value for name, value in fields.items() if name not in lent})
    pieces: list[bytes | memoryview] = [copied[:-1]]
    for name, raw in lent.items():
        comma = b"" if pieces == [b"{"] else b","
        pieces += (b"%b%b:" % (comma, msgspec.json.encode(name)), memoryview(raw))
    pieces.append(b"}")
    return Body(pieces)
