"""Errors of the cache.

CacheError
├── LayoutError            a layout that cannot be built or does not match
├── OutOfPages             not enough free or evictable pages; nothing was changed
├── DuplicateReservation   the request id already holds a reservation
├── UnchainedHashes        block hashes that are not those of one prompt; nothing was changed
├── UnknownReservation     no such reservation: never made, or ended
├── DiskInUse              another process, or another object, uses the disk tier's directory
└── IntegrityError         the books do not balance: a bug, never an input
"""

from pathlib import Path


class CacheError(Exception):
    """Base of all errors of this package."""


class LayoutError(CacheError, ValueError):
    """A layout that cannot be built, or one that does not match another."""


class OutOfPages(CacheError):
    """Not enough free or evictable pages. The cache is as it was before the call."""

    def __init__(self, needed: int, available: int) -> None:
        super().__init__(f"{needed} pages needed, {available} free or evictable")
        self.needed = needed
        self.available = available


class DuplicateReservation(CacheError):
    """The request id already holds a reservation."""


class UnchainedHashes(CacheError, ValueError):
    """Block hashes that are not those of one prompt: each stands for all tokens before it, too."""


class UnknownReservation(CacheError, KeyError):
    """No such reservation: never made, already ended, or expired."""

    def __str__(self) -> str:
        return str(self.args[0])


class DiskInUse(CacheError):
    """A disk tier's directory has a user already."""

    def __init__(self, directory: Path) -> None:
        super().__init__(f"{directory} is in use by another disk tier; every node needs a directory of its own")


class IntegrityError(CacheError):
    """The books of the cache do not balance."""
