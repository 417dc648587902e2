"""Times in which a decode batch stands still, because its node computes a prompt."""

from collections.abc import Sequence
from typing import Final

LEAST_KEPT: Final = 1024  # before those that no request remembers are dropped


class Standstills:
    """What has stood still, as long as some request of the batch has seen it."""

    def __init__(self) -> None:
        self._times: list[tuple[float, float]] = []  # (from, until), in order
        self._began_at = 0.0
        self._drop_at = LEAST_KEPT

    def __len__(self) -> int:
        return len(self._times)

    def begin(self, now: float) -> None:
        self._began_at = now

    def end(self, now: float, began: Sequence[float]) -> None:
        """The batch goes on; its requests `began` to decode then."""
        if not began:
            self._times.clear()
            return
        self._times.append((self._began_at, now))
        if len(self._times) >= self._drop_at:
            oldest = min(began)
            self._times = [each for each in self._times if each[1] > oldest]
            self._drop_at = LEAST_KEPT + 2 * len(self._times)

    def longest_s(self, since: float, count: float) -> float:
        """The sum of the `count` longest ones that a request has seen which decodes `since` then."""
        seen = []
        for from_s, until_s in reversed(self._times):
            if until_s <= since:
                break
            seen.append(until_s - max(from_s, since))
        seen.sort(reverse=True)
        whole = int(count)
        rest = seen[whole] * (count - whole) if len(seen) > whole else 0.0
        return sum(seen[:whole]) + rest
