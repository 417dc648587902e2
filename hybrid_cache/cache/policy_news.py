"""What an eviction policy hears of requests: one after the other, however their steps meet."""

from collections.abc import Iterator

from hybrid_cache.eviction.base import EvictionPolicy, Use


class PolicyNews:
    """Tells a policy of requests in steps, between which the cache may be used."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy = policy
        self._told: Iterator[None] | None = None  # what is being told

    def steps(self, use: Use) -> Iterator[None]:
        """Tells of one request. One that has not been told to its end is, first, in one go."""
        if self._told is not None:
            for _ in self._told:
                pass
        steps = self._told = self._policy.begin_steps(use)
        yield from steps
        if self._told is steps:
            self._told = None
