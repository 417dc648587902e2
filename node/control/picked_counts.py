"""What came of picked requests, for metrics."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Final

MAX_REASONS: Final = 64  # other nodes say some of them in their own words
OTHER: Final = "other"


@dataclass(slots=True)
class PickedCounts:
    """Requests by what came of them, those that were computed here after all by why, and legs for other nodes by outcome.

    `under_way` are requests and legs that have begun and not ended: no engine may know of them yet.
    """

    requests: Counter[str] = field(default_factory=Counter)
    fallbacks: Counter[str] = field(default_factory=Counter)
    legs: Counter[str] = field(default_factory=Counter)
    under_way: int = 0

    def fell_back(self, reason: str) -> None:
        """The engine computes a prompt that another node was to prefill."""
        self.requests["fell_back"] += 1
        _count(self.fallbacks, reason)

    def leg_ended(self, outcome: str) -> None:
        """A leg for another node is over."""
        _count(self.legs, outcome)


def _count(counts: Counter[str], what: str) -> None:
    counts[what if what in counts or len(counts) < MAX_REASONS else OTHER] += 1
