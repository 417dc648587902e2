"""Progress on stderr, only on a terminal; only then is the library that draws it loaded."""

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

Item = TypeVar("Item")


def watched(items: Sequence[Item], what: str) -> Iterable[Item]:
    """`items`, with a bar while stderr is a terminal and there is more than one."""
    if not sys.stderr.isatty() or len(items) < 2:
        return items
    from rich.console import Console
    from rich.progress import track

    return track(items, description=what, console=Console(stderr=True), transient=True)


@contextmanager
def busy(what: str) -> Iterator[None]:
    """A spinner with `what` while stderr is a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(what):
        yield
