"""How long to wait before a registry is asked again: longer after each failure, and not at one moment with others."""

from typing import Final

import numpy as np

FIRST_S: Final = 0.25
MOST_S: Final = 5.0
SPREAD: Final = 0.5  # of each pause that chance may take away


class Backoff:
    """Pauses double with each failure, up to `most_s`."""

    def __init__(self, rng: np.random.Generator, first_s: float = FIRST_S, most_s: float = MOST_S) -> None:
        self._rng = rng
        self._first_s = first_s
        self._most_s = most_s
        self._failures = 0

    def failed(self) -> float:
        """The pause after one more failure."""
        pause_s = min(self._most_s, self._first_s * 2.0 ** min(self._failures, 32))
        self._failures += 1
        return pause_s * (1.0 - SPREAD * float(self._rng.random()))

    def succeeded(self) -> None:
        """The next pause is a short one again."""
        self._failures = 0
