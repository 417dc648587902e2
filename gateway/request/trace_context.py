"""Where a request stands in a trace: W3C Trace Context (https://www.w3.org/TR/trace-context/), read and made."""

import random
from dataclasses import dataclass, replace
from typing import Final, Self

TRACEPARENT: Final = "traceparent"
TRACESTATE: Final = "tracestate"
SAMPLED: Final = 1
_LENGTHS: Final = (2, 32, 16, 2)  # of a traceparent's parts: version, trace, span, flags
_HEX: Final = frozenset("0123456789abcdef")


@dataclass(frozen=True, slots=True)
class TraceContext:
    """The ids of one request's span; `parent` 0: it is its trace's first."""

    trace: int
    span: int
    parent: int = 0
    is_sampled: bool = True

    @property
    def header(self) -> str:
        """`traceparent` of whatever is below it."""
        return f"00-{self.trace:032x}-{self.span:016x}-{SAMPLED if self.is_sampled else 0:02x}"

    def beside(self) -> Self:
        """Another request of the same caller."""
        return replace(self, span=random.getrandbits(64) or 1)


def trace_under(traceparent: str | None, sample: float, rng: random.Random) -> TraceContext:
    """The trace of a request that came with this header; one of its own where it is missing or makes no sense."""
    span = rng.getrandbits(64) or 1
    if (caller := _parsed(traceparent)) is not None:
        trace, parent, flags = caller
        return TraceContext(trace, span, parent, bool(flags & SAMPLED))
    return TraceContext(rng.getrandbits(128) or 1, span, is_sampled=rng.random() < sample)


def _parsed(traceparent: str | None) -> tuple[int, int, int] | None:
    """Trace, span and flags; later versions may say more at the end."""
    parts = (traceparent or "").split("-")
    if tuple(map(len, parts[:4])) != _LENGTHS or not all(_HEX.issuperset(part) for part in parts[:4]):
        return None
    version, trace, span, flags = (int(part, 16) for part in parts[:4])
    if version == 0xFF or (version == 0 and len(parts) > 4) or not trace or not span:
        return None
    return trace, span, flags
