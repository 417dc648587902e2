"""How soon answers must begin, and how fast they go on."""

from dataclasses import dataclass

from planner.model.reading import SECONDS


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """Targets: TTFT at P90, TBT by Mooncake's definition (mean of a request's longest tenth of intervals)."""

    ttft_p90_s: float | None = None
    tbt_s: float | None = None
    provenance: str = ""

    def __post_init__(self) -> None:
        for name in ("ttft_p90_s", "tbt_s"):
            if (target := getattr(self, name)) is not None:
                SECONDS.above_low(name, target)
