"""Virtual time: a heap of (time, order, handler, argument).

Equal times run in the order in which they were scheduled, so a run depends on nothing but its inputs.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from heapq import heappop, heappush
from typing import Any, TypeAlias

Handler: TypeAlias = Callable[[float, Any], None]


class Loop:
    """Runs handlers in order of time."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0
        self._heap: list[tuple[float, int, Handler, Any]] = []

    def at(self, time: float, handler: Handler, argument: Any = None) -> None:
        """Calls `handler(time, argument)` when virtual time gets there; a past time means now."""
        self.events += 1
        heappush(self._heap, (time, self.events, handler, argument))

    def run(self) -> None:
        """Until nothing is left to happen."""
        heap = self._heap
        with _no_collector():
            while heap:
                time, _, handler, argument = heappop(heap)
                self.now = time
                handler(time, argument)


@contextmanager
def _no_collector() -> Iterator[None]:
    """Requests come and go without leaving cycles behind, so looking for some would only take time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
