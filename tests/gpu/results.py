"""What a part of `python -m tests.gpu` comes to."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class PartResult:
    """What became of a part: "passed", "failed" or "skipped"."""

    part: str
    outcome: str
    reason: str
    figures: dict[str, Any]


def judged(part: str, reasons: list[str], figures: dict[str, Any]) -> PartResult:
    """`reasons`: why it has failed."""
    return PartResult(part, "failed" if reasons else "passed", "; ".join(reasons), figures)
