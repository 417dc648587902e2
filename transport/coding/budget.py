"""How much of the processor coding may take, over all lines of a node together.

Each line decides for itself whether coding pays, so many slow lines could take a core that others need. They all draw on one
budget in core-seconds a second:

    idle cores, LEAST_TOGETHER at least, and no more than the most that coding may ever take

What finds the budget spent leaves as on an idle link, and is counted.
"""

import math
import threading
from typing import Final

from transport.coding.cores import usable_cores

MOST_SHARE: Final = 0.25  # of the usable cores: what else runs there is the engine, which idle cores do not show
LEAST_TOGETHER: Final = 0.1  # cores, of a machine that others keep busy: five lines that need a fiftieth
BURST_S: Final = 0.25  # of the budget that may be spent at once: as long as idle cores are measured over


class CodingBudget:
    """May be used from any thread; time comes in as `now`, seconds."""

    def __init__(self, most_cores: float | None = None) -> None:
        """`most_cores` is the most that coding may take; None: MOST_SHARE of the cores that this process may use."""
        self.most_cores = MOST_SHARE * usable_cores() if most_cores is None else most_cores
        self._lock = threading.Lock()
        self._cores = min(LEAST_TOGETHER, self.most_cores)
        self._left_s = BURST_S * self._cores
        self._at: float | None = None

    def follow(self, idle_cores: float, now: float) -> float:
        """So many cores are idle, 0 while that is unknown: how many of them one line may count on."""
        with self._lock:
            self._earn(now)
            self._cores = min(max(idle_cores, LEAST_TOGETHER), self.most_cores)
        return min(idle_cores, self.most_cores)

    def is_left(self, now: float) -> bool:
        """Whether anything may be coded now."""
        with self._lock:
            self._earn(now)
            return self._left_s > 0

    def charge(self, cpu_s: float, now: float, *, is_owed: bool = True) -> None:
        """Coding took so much; more than was left is owed.

        What is coded always, be anything left or not, may be hours of work. Of that no more is owed than BURST_S of the
        budget: once it ends, other work waits no longer.
        """
        with self._lock:
            self._earn(now)
            least_s = -math.inf if is_owed else min(self._left_s, -BURST_S * self._cores)
            self._left_s = max(self._left_s - cpu_s, least_s)

    def _earn(self, now: float) -> None:
        since = now if self._at is None else self._at
        self._at = max(since, now)  # a thread may have waited for the lock with an older time
        self._left_s = min(BURST_S * self._cores, self._left_s + (self._at - since) * self._cores)
