"""KVCache between two nodes of one host: by reference into the sender's arena file.

The receiver copies (preadv from the file into its own pages), not the sender: so the memory of a landing is only ever
written by its owner, who can stop at any moment and reuse it. preadv rather than a mapping of the foreign arena: it
does not hold the interpreter lock while it copies, and a file that was truncated gives a short read instead of a
SIGBUS.
"""

import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final

DEFAULT_ARENA_DIRS: Final = ("/dev/shm",)
_MAX_VIEWS: Final = 512


@dataclass(frozen=True, slots=True)
class ArenaSource:
    """The ranges of a transfer in an arena file, usable over TCP (as views) and on the same host (as extents).

    `segments(i)` gives the (start, length) pairs of range i in the arena, `segments_between(first, stop)` those of many.
    """

    path: str
    arena: memoryview
    segments: Callable[[int], Iterable[tuple[int, int]]]
    segments_between: Callable[[int, int], Iterable[tuple[int, int]]] | None = None

    def __call__(self, index: int) -> Sequence[memoryview]:
        return [self.arena[start : start + length] for start, length in self.segments(index)]

    def between(self, first: int, stop: int) -> list[memoryview]:
        """The memory of ranges `[first, stop)`."""
        return [self.arena[start : start + length] for start, length in self._segments(first, stop)]

    def extents(self, first: int, stop: int, skip: int, size: int) -> list[tuple[int, int]]:
        """`size` bytes of ranges `[first, stop)` after their first `skip`, as extents of the file; neighbours are one."""
        extents: list[tuple[int, int]] = []
        for start, length in merge_extents(self._segments(first, stop)):
            if skip >= length:
                skip -= length
                continue
            take = min(length - skip, size)
            extents.append((start + skip, take))
            skip, size = 0, size - take
            if not size:
                break
        return extents

    def _segments(self, first: int, stop: int) -> Iterable[tuple[int, int]]:
        if self.segments_between is not None:
            return self.segments_between(first, stop)
        return chain.from_iterable(map(self.segments, range(first, stop)))


def merge_extents(extents: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Neighbours in the file become one."""
    merged: list[tuple[int, int]] = []
    for start, length in extents:
        if merged and sum(merged[-1]) == start:
            merged[-1] = (merged[-1][0], merged[-1][1] + length)
        else:
            merged.append((start, length))
    return merged


def open_arena(path: str, allowed_dirs: Sequence[str]) -> int:
    """A descriptor of a sender's arena. Raises PermissionError unless it is a regular file of ours in an allowed
    place.
    """
    real = os.path.realpath(path)
    if not any(real.startswith(os.path.join(os.path.realpath(base), "")) for base in allowed_dirs):
        raise PermissionError(f"arena {path} lies in none of {', '.join(allowed_dirs)}")
    fd = os.open(real, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
        os.close(fd)
        raise PermissionError(f"arena {path} is not a regular file of this user")
    return fd


def copy_extents(fd: int, extents: Iterable[tuple[int, int]], views: Sequence[memoryview]) -> bool:
    """Fills `views` from the file; False when the file is too short."""
    pending = list(views)
    for start, length in extents:
        while length:
            batch = _head(pending, length)
            got = os.preadv(fd, batch, start)
            if got == 0:
                return False
            advance(pending, got)
            start, length = start + got, length - got
    return not pending


def _head(views: Sequence[memoryview], length: int) -> list[memoryview]:
    """The first `length` bytes of the views, or as many as one system call takes."""
    head: list[memoryview] = []
    for view in views[:_MAX_VIEWS]:
        if not length:
            break
        head.append(view[:length])
        length -= len(head[-1])
    return head


def advance(views: list[memoryview], size: int) -> None:
    """Drops the first `size` bytes of a list of views, in place."""
    done = 0
    while done < len(views) and size >= len(views[done]):
        size -= len(views[done])
        done += 1
    del views[:done]
    if size:
        views[0] = views[0][size:]


def copy(data: memoryview, into: memoryview) -> None:
    into[:] = data


def pour(data: memoryview, views: list[memoryview], put: Callable[[memoryview, memoryview], None]) -> None:
    """Puts all of `data` into the first views, piece by piece, and takes what is full off the list."""
    while data:
        size = min(len(data), len(views[0]))
        put(data[:size], views[0][:size])
        data = data[size:]
        advance(views, size)


def pieces_of(views: Iterable[memoryview], size: int, small: int, gathered: memoryview) -> Iterator[memoryview]:
    """The views in pieces of at most `size` bytes; those shorter than `small` are copied together into `gathered`, of
    `size` bytes, which is used again.
    """
    filled = 0
    for view in views:
        for at in range(0, len(view), size):
            piece = view[at : at + size]
            if filled and (len(piece) >= small or filled + len(piece) > size):
                yield gathered[:filled]
                filled = 0
            if len(piece) >= small:
                yield piece
            else:
                gathered[filled : filled + len(piece)] = piece
                filled += len(piece)
    if filled:
        yield gathered[:filled]


def parts_of(views: Iterable[memoryview], size: int) -> Iterator[list[memoryview]]:
    """The views, in order, in lists that are `size` bytes together; the last one has what is left."""
    part: list[memoryview] = []
    room = size
    for view in views:
        while view:
            part.append(view[:room])
            view, room = view[room:], room - len(part[-1])
            if not room:
                yield part
                part, room = [], size
    if part:
        yield part


def scatter(plain: memoryview, views: Sequence[memoryview]) -> None:
    """Copies one buffer into several that together are as long."""
    at = 0
    for view in views:
        view[:] = plain[at : at + len(view)]
        at += len(view)
