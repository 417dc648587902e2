"""What came of picked requests, for metrics."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Final

MAX_REASONS: Final = 64  # other nodes say some of them in their own words
OTHER: Final = "other"


@dataclass(frozen=True, slots=True)
class PickedCounts:
    """Requests by what came of them, those that were computed here after all by why, and legs for other nodes by outcome."""

    requests: Counter[str] = field(default_factory=Counter)
    fallbacks: Counter[str] = field(default_factory=Counter)
    legs: Counter[str] = field(default_factory=Counter)

    def fell_back(self, reason: str) -> None:
        """The engine computes a prompt that another node was to prefill."""
        self.requests["fell_back"] += 1
        is_known = reason in self.fallbacks or len(self.fallbacks) < MAX_REASONS
        self.fallbacks[reason if is_known else OTHER] += 1
