"""Pages that take long to make: in a thread, and each once for all who ask while it is being made.

The event loop serves requests meanwhile; it waits for the interpreter no longer than a thread keeps it (5 ms).
"""

import asyncio
from collections.abc import Callable
from typing import TypeVar, cast

T = TypeVar("T")


class PageThread:
    """Makes pages."""

    def __init__(self) -> None:
        self._under_way: dict[Callable[[], object], asyncio.Future[object]] = {}

    async def has(self, make: Callable[[], T]) -> T:
        """What `make` gives, begun now or a moment ago."""
        making = self._under_way.get(make)
        if making is None:
            making = self._under_way[make] = asyncio.get_running_loop().run_in_executor(None, make)
            making.add_done_callback(lambda _: self._under_way.pop(make))
        return cast(T, await asyncio.shield(making))
