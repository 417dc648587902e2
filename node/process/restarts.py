"""Whether an engine that died is started again, and how soon.

Deaths count that lie within the last minute, and so do those since the engine last took requests, however far apart: one whose
every start takes minutes and fails is no better than one that fails at once.
"""

from collections import deque

RESTART_WINDOW_S = 60.0
FIRST_BACKOFF_S = 0.5
MAX_BACKOFF_S = 8.0
MAX_DOUBLINGS = 4  # after which it is MAX_BACKOFF_S; powers of any number of deaths are no floats


class Restarts:
    """The deaths of one node's engine. `max_restarts`: how many may count before it is given up."""

    def __init__(self, max_restarts: int, *, first_backoff_s: float = FIRST_BACKOFF_S) -> None:
        self._max_restarts = max_restarts
        self._first_backoff_s = first_backoff_s
        self._recent: deque[float] = deque()
        self._since_ready = 0

    @property
    def deaths(self) -> int:
        """How many counted when the last one was noted."""
        # Both are the last so many deaths, so the longer run has the shorter one in it.
        return max(len(self._recent), self._since_ready)

    def on_ready(self) -> None:
        """It takes requests, so it can be started."""
        self._since_ready = 0

    def on_death(self, now: float) -> float | None:
        """Seconds to wait before the next start; None: it is given up."""
        self._since_ready += 1
        self._recent.append(now)
        while self._recent[0] < now - RESTART_WINDOW_S:
            self._recent.popleft()
        if self.deaths > self._max_restarts:
            return None
        return min(self._first_backoff_s * 2.0 ** min(self.deaths - 1, MAX_DOUBLINGS), MAX_BACKOFF_S)
