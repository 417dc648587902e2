"""The requests of a trace in their order, as far as queues depend on it: bursts, and phases in which prompts are longer.

A distribution of lengths and a rate say nothing of either. So `fit` keeps these columns, of at most MOST requests.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Self

import numpy as np

from planner.model.profile import Floats
from planner.model.reading import RATE, SECONDS, SHARE, TOKENS, Range
from planner.model.trace_files.categories import MOST_CATEGORIES
from planner.model.trace_files.shared_blocks import SharedBlocks
from transport.control.settings import require, require_table

MOST: Final = 20_000  # requests, that a workload keeps
DIGITS: Final = 3  # after the point
SESSION: Final = Range(0, 1e9)
COLUMNS: Final[Mapping[str, Range]] = MappingProxyType(
    {
        "arrival_s": SECONDS, "tokens": TOKENS, "held": SHARE, "computed": TOKENS, "cached": TOKENS, "landed": TOKENS,
        "output": TOKENS,
    }
)  # fmt: skip


CATEGORY: Final = Range(0, MOST_CATEGORIES - 1, "the places of categories", is_whole=True)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KeptArrivals:
    """A request per place, sorted by `arrival_s`. The columns are those of `Lengths`, and the tokens of answers.

    `rate_req_per_s` is that of the whole trace; these may be a part of it. `category` is a place among the workload's names.
    `shared_blocks` says what prompts have in common, where the trace does; without it nothing is cached. `sessions` numbers the
    session of each, where requests come in sessions.
    """

    rate_req_per_s: float
    arrival_s: Floats
    tokens: Floats
    held: Floats
    computed: Floats
    cached: Floats
    landed: Floats
    output: Floats
    category: Floats | None = None
    shared_blocks: SharedBlocks | None = None
    sessions: Floats | None = None

    def __len__(self) -> int:
        return len(self.arrival_s)

    def at(self, rate: float) -> Floats:
        """When each comes, in seconds from the first, where the whole trace comes at `rate`."""
        return np.asarray((self.arrival_s - self.arrival_s[0]) * (self.rate_req_per_s / rate), dtype=np.float64)

    def table(self) -> dict[str, Any]:
        """Its JSON form."""
        columns = {name: np.round(getattr(self, name), DIGITS).tolist() for name in COLUMNS}
        if self.category is not None:
            columns["category"] = self.category.astype(np.int64).tolist()
        blocks, sessions = self.shared_blocks, self.sessions
        return {
            "rate_req_per_s": self.rate_req_per_s,
            **columns,
            "shared_blocks": None if blocks is None else blocks.table(),
            "sessions": None if sessions is None else sessions.tolist(),
        }

    @property
    def prompts(self) -> Floats:
        """The tokens of whole prompts."""
        return self.computed + self.cached

    @classmethod
    def read(cls, table: Mapping[str, Any]) -> Self:
        """From its JSON form. Raises SettingsError."""
        columns: dict[str, Floats] = {}
        known = dict(COLUMNS)
        for name, allowed in (("category", CATEGORY), ("sessions", SESSION)):
            if table.get(name) is not None:
                known[name] = allowed
        for name, allowed in known.items():
            column = table.get(name)
            require(isinstance(column, list) and 1 < len(column) <= MOST, name, column, f"2 to {MOST} numbers")
            columns[name] = np.array([allowed.of(f"{name}[{at}]", value) for at, value in enumerate(column or ())])
            count = len(columns["arrival_s"])
            require(len(columns[name]) == count, name, column, f"{count} numbers, as there are arrivals")
        times = columns["arrival_s"]
        ascends = bool((np.diff(times) >= 0).all()) and times[-1] > times[0]
        require(ascends, "arrival_s", times.tolist(), "times that go up")
        rate = RATE.above_low("rate_req_per_s", table.get("rate_req_per_s"))
        blocks = table.get("shared_blocks")
        shared = None if blocks is None else SharedBlocks.read(require_table(blocks, "shared_blocks"), len(times))
        return cls(rate_req_per_s=rate, shared_blocks=shared, **columns)


def busiest(arrival_s: Floats, most: int = MOST) -> slice:
    """The `most` neighbours that come within the least time; all where there are no more."""
    if len(arrival_s) <= most:
        return slice(0, len(arrival_s))
    first = int(np.argmin(arrival_s[most - 1 :] - arrival_s[: len(arrival_s) - most + 1]))
    return slice(first, first + most)
