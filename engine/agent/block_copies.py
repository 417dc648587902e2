"""Copies of many blocks at once between the page arena and an engine's rows, planned as arrays.

Blocks of a group are cut over their pages at the same places. So one piece describes the same bytes of all of them, and
one call of numpy moves it for every block:

    rows    | offset: length bytes | ...        one row for each block
    arena   ... start of block 0 ... start of block 2 ... start of block 1 ...       in any order
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from hybrid_cache.errors import LayoutError
from hybrid_cache.layout.layout import ModelLayout

Bytes = NDArray[np.uint8]
Index = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class BlockPages:
    """Where the pages of a group's blocks begin in the arena: [blocks, pages of a block]; `stored` says which have any."""

    starts: Index
    stored: NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class CopyPiece:
    """Bytes [offset, offset + length) of every row, and where each begins in the arena."""

    offset: int
    length: int
    starts: Index


@dataclass(frozen=True, slots=True)
class BlockCopies:
    """Rows by number, cut alike."""

    rows: Index
    pieces: tuple[CopyPiece, ...]

    @property
    def row_bytes(self) -> int:
        return sum(piece.length for piece in self.pieces)

    @property
    def num_bytes(self) -> int:
        return len(self.rows) * self.row_bytes


def block_pages(layout: ModelLayout, group: int, blocks: Sequence[Sequence[int]]) -> BlockPages:
    """The page lists of a group's blocks as an array. Raises LayoutError for one that no block of the group has."""
    per_block = layout.pages_per_block(group)
    lengths = np.fromiter(map(len, blocks), np.int64, len(blocks))
    stored = lengths > 0
    if wrong := set(lengths[stored].tolist()) - {per_block}:
        raise LayoutError(f"a block of group {group} has {per_block} pages, not {max(wrong)}")
    starts = np.zeros((len(blocks), per_block), np.int64)
    pages = np.fromiter(chain.from_iterable(blocks), np.int64, int(lengths.sum()))
    starts[stored] = pages.reshape(-1, per_block) * layout.page_bytes
    return BlockPages(starts, stored)


def pieces_of(starts: Index, start: int, stop: int, page_bytes: int) -> tuple[CopyPiece, ...]:
    """Bytes [start, stop) of blocks whose pages begin at `starts` [blocks, pages of a block]."""
    pieces, at = [], start
    while at < stop:
        page, within = divmod(at, page_bytes)
        length = min(page_bytes - within, stop - at)
        pieces.append(CopyPiece(at - start, length, starts[:, page] + within))
        at += length
    return tuple(pieces)


def check_copies(copies: Sequence[BlockCopies], num_rows: int, arena: Bytes) -> None:
    """Raises IndexError for a row or a byte that is not there; numpy would take a negative one for one from the end."""
    for each in copies:
        _check_within(each.rows, num_rows, "row")
        for piece in each.pieces:
            _check_within(piece.starts, arena.size - piece.length + 1, "byte of the arena")


def _check_within(index: Index, stop: int, what: str) -> None:
    if index.size and not 0 <= (low := int(index.min())) <= (high := int(index.max())) < stop:
        raise IndexError(f"{what} {low if low < 0 else high}: there are {stop}")


def in_batches(copies: Sequence[BlockCopies], most_bytes: int) -> Iterator[BlockCopies]:
    """The same copies in batches of a bounded size, one row at least."""
    for each in copies:
        most = max(1, most_bytes // max(1, each.row_bytes))
        for at in range(0, len(each.rows), most):
            some = slice(at, at + most)
            pieces = tuple(CopyPiece(piece.offset, piece.length, piece.starts[some]) for piece in each.pieces)
            yield BlockCopies(each.rows[some], pieces)


def windows(arena: Bytes, length: int) -> Bytes:
    """The arena as windows of `length` bytes, one for each byte at which one can begin: the same memory."""
    return np.lib.stride_tricks.as_strided(arena, (arena.size - length + 1, length), (1, 1))


def gather(rows: Bytes, copies: BlockCopies, arena: Bytes) -> None:
    """Rows of a contiguous array, in their order, into the arena."""
    for piece in copies.pieces:
        windows(arena, piece.length)[piece.starts] = rows[:, piece.offset : piece.offset + piece.length]


def scatter(rows: Bytes, copies: BlockCopies, arena: Bytes) -> None:
    """The arena's bytes into rows of a contiguous array, in their order."""
    for piece in copies.pieces:
        rows[:, piece.offset : piece.offset + piece.length] = windows(arena, piece.length)[piece.starts]
