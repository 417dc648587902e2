"""The promise to a kind of request: its SLOs and its priority."""

from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import Final

MOST_PRIORITY: Final = 100  # either way


@dataclass(frozen=True, kw_only=True)
class ServiceClass:
    """A class of requests. `inf`: nothing is promised.

    `ttft_s` is from a request's arrival to its first token, `tbt_s` between two tokens. Of two that wait the one of the higher
    `priority` is first. A request whose first token is not there `deadline_s` after it came is of no use to anybody.
    Decode is filled with this class up to `max_load` of its room: what is left is for others.
    """

    name: str = "default"
    ttft_s: float = inf
    tbt_s: float = inf
    priority: int = 0
    deadline_s: float = inf
    max_load: float = 1.0

    def __post_init__(self) -> None:
        for each in ("ttft_s", "tbt_s", "deadline_s"):
            if not getattr(self, each) > 0:
                raise ValueError(f"{each}={getattr(self, each)}: must be above 0")
        if not 0 < self.max_load <= 1:
            raise ValueError(f"max_load={self.max_load}: must be above 0 and at most 1")
        if not -MOST_PRIORITY <= self.priority <= MOST_PRIORITY:
            raise ValueError(f"priority={self.priority}: must be from {-MOST_PRIORITY} to {MOST_PRIORITY}")

    @cached_property
    def promises(self) -> bool:
        """Whether there is anything to keep, to these requests or to others."""
        return min(self.ttft_s, self.tbt_s, self.deadline_s) < inf or self.max_load < 1


UNPROMISED: Final = ServiceClass()
