"""Whether a process that died is started again, and how soon.

Deaths count that lie within the last minute, and so do those since the process last served, however far apart: one whose
every start takes minutes and fails is no better than one that fails at once. A process that was killed from outside may run well
when it is started again: such ends lengthen the pause, and no number of them is too many.
"""

from collections import deque

RESTART_WINDOW_S = 60.0
FIRST_BACKOFF_S = 0.5
MAX_BACKOFF_S = 8.0
MAX_DOUBLINGS = 4  # after which it is MAX_BACKOFF_S; powers of any number of deaths are no floats


class Restarts:
    """The deaths of one process, or of a group that dies as one. `max_restarts`: how many may count before it is given up."""

    def __init__(self, max_restarts: int, *, first_backoff_s: float = FIRST_BACKOFF_S) -> None:
        self._max_restarts = max_restarts
        self._first_backoff_s = first_backoff_s
        self._recent: deque[float] = deque()
        self._killed: deque[float] = deque(maxlen=MAX_DOUBLINGS + 1)
        self._since_ready = 0

    @property
    def deaths(self) -> int:
        """How many counted when the last one was noted."""
        # Both are the last so many deaths, so the longer run has the shorter one in it.
        return max(len(self._recent), self._since_ready)

    def on_ready(self) -> None:
        """It serves, so it can be started."""
        self._since_ready = 0

    def on_death(self, now: float) -> float | None:
        """Seconds to wait before the next start; None: it is given up."""
        self._since_ready += 1
        self._recent.append(now)
        while self._recent[0] < now - RESTART_WINDOW_S:
            self._recent.popleft()
        if self.deaths > self._max_restarts:
            return None
        return self._pause_s(self.deaths)

    def on_kill(self, now: float) -> float:
        """Seconds to wait before the next start of a process that was ended from outside."""
        self._killed.append(now)
        while self._killed[0] < now - RESTART_WINDOW_S:
            self._killed.popleft()
        return self._pause_s(len(self._killed))

    def _pause_s(self, ends: int) -> float:
        return min(self._first_backoff_s * 2.0 ** min(ends - 1, MAX_DOUBLINGS), MAX_BACKOFF_S)
