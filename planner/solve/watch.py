"""The watcher of a long computation: its caller may show the progress."""

from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

Item = TypeVar("Item")


class ProgressWatch(Protocol):
    """Passes items on, one by one, and may report it."""

    def __call__(self, items: Sequence[Item], what: str, /) -> Iterable[Item]: ...


def unwatched(items: Sequence[Item], what: str) -> Iterable[Item]:
    """Reports nothing."""
    return items
