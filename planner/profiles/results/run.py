"""One run of a benchmark, whatever wrote it down."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from planner.model.reading import SECONDS, TOKENS, Range
from transport.control.settings import SettingsError, require

MILLISECONDS: Final = Range(0, 1e10, "milliseconds")
RUNNING: Final = Range(0, 1e7, "requests at once")
COMPLETED: Final = Range(0, 1e9, "requests", is_whole=True)
FAILED: Final = 0.1  # share of requests beyond which a run measured something else
ALONE: Final = 1.1  # requests at once up to which none waits for another, where each comes after the one before
RARE: Final = 0.1  # and where they come at any time


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkRun:
    """Means over the requests of one run. `prefills` are those of single requests: (tokens, seconds), where they are known.

    `decoding` requests decoded at once, with `context_tokens` each; `step_s` is the time between two tokens.
    """

    source: str
    tool: str
    requests: int
    prompt_tokens: float
    output_tokens: float
    running: float
    ttft_s: float
    ttft_spread_s: float | None = None
    step_s: float | None = None
    decoding: float = 0.0
    prefills: tuple[tuple[float, float], ...] = ()
    is_one_by_one: bool = True  # a request came when the one before was answered
    is_estimate: bool = False

    def __post_init__(self) -> None:
        TOKENS.above_low("prompt tokens", self.prompt_tokens)
        SECONDS.above_low("time to first token", self.ttft_s)
        RUNNING.of("requests at once", self.running)

    @property
    def is_alone(self) -> bool:
        """Whether prompts waited for nothing, so that the time to the first token is that of the prefill."""
        return self.running <= (ALONE if self.is_one_by_one else RARE)

    @property
    def context_tokens(self) -> float:
        """Of a request in the middle of its answer."""
        return self.prompt_tokens + self.output_tokens / 2


def field_of(table: Mapping[str, Any], key: str, allowed: Range, *others: str) -> float:
    """The first of these keys that is there. Raises SettingsError naming it."""
    for name in (key, *others):
        if table.get(name) is not None:
            return allowed.of(name, table[name])
    raise SettingsError(f"missing: {' or '.join((key, *others))}")


def optional_field(table: Mapping[str, Any], key: str, allowed: Range) -> float | None:
    """Raises SettingsError for a value that it cannot have."""
    return None if table.get(key) is None else allowed.of(key, table[key])


def check_served(completed: float, failed: float) -> None:
    """Raises SettingsError for a run in which too few requests were answered."""
    require(completed > 0, "completed", completed, "above 0: no request was answered")
    share = failed / (completed + failed)
    require(share <= FAILED, "failed", failed, f"at most {FAILED:.0%} of all requests, and is {share:.0%} of them")
