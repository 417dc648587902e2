"""Learns from transfers how much senders shrink bytes on a link: a routing decision must know how much will cross.

Senders code KVCache while the link is what transfers wait for, and only with what has proved to be faster than plain bytes
(`transport.coding.choice`). So what is learned is what they make of bytes then; of transfers that waited for nothing it says
nothing, and a link of senders that do not code has a ratio of 1.
"""

from typing import Final

FORGET_BYTES: Final = 256 << 20  # over which the ratio is averaged
FORGET_S: Final = 300.0  # what was seen so long ago says little of what is sent now
BOUND_S: Final = 0.2  # a transfer that outlasts its prefill by so much has waited for the link (CODED_FROM_S of views)
PLAIN: Final = 1.0


class CodingEstimate:
    """Coded over plain bytes of one link, while it is what transfers wait for."""

    def __init__(self) -> None:
        self._ratio = PLAIN
        self._weight = 0.0  # bytes that it stands on
        self._at = 0.0

    def observe(self, plain_bytes: int, saved_bytes: int, waited_s: float, now: float) -> None:
        """A transfer of `plain_bytes`, some of them saved by coding, ended `waited_s` after its prefill."""
        if plain_bytes <= 0 or not 0 <= saved_bytes <= plain_bytes:
            return
        if not saved_bytes and waited_s < BOUND_S:
            return
        kept = self._weight * self._fade(now)
        total = kept + plain_bytes
        self._ratio += (1 - saved_bytes / plain_bytes - self._ratio) * plain_bytes / total if kept else 0.0
        if not kept:
            self._ratio = 1 - saved_bytes / plain_bytes
        self._weight, self._at = min(total, float(FORGET_BYTES)), now

    def ratio(self, now: float) -> float:
        """In (0, 1]; with time it goes back to 1: nothing is hoped for that has not been seen lately."""
        return PLAIN - (PLAIN - self._ratio) * self._fade(now)

    def _fade(self, now: float) -> float:
        return max(0.0, 1.0 - max(0.0, now - self._at) / FORGET_S)
