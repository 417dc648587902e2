"""What a replay showed, as values and as text."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

MEGABYTE = 1e6
HEADER = "     s   request route  prefill  computed/prompt     TTFT   egress, early  reason"
"""`computed` of `prompt` tokens were not cached; `early` is the share of the egress bytes that left before prefill ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOutcome:
    """One finished request: what the client saw, and the gateway's record of it."""

    name: str
    prompt: str
    max_tokens: int
    token_ids: tuple[int, ...]
    ttft_s: float
    record: Mapping[str, Any]

    @property
    def route(self) -> str:
        """ "local" or "remote"."""
        return str(self.record["route"])

    @property
    def egress_bytes(self) -> int:
        """Bytes that crossed between clusters; inside one nothing leaves."""
        return int(self.record["bytes"]) if self.route == "remote" else 0

    def line(self, at_s: float) -> str:
        """The request's line of output, below HEADER."""
        record = self.record
        sent = f"{self.egress_bytes / MEGABYTE:6.2f} MB {record['overlap'] or 0:5.0%}" if self.egress_bytes else ""
        return (
            f"{at_s:6.1f} {self.name:>9} {self.route:<6} {record['prefill_node'] or record['decode_node']:<8}"
            f" {record['uncached']:>6} /{record['total']:>6} {self.ttft_s:6.2f} s {sent:>15}  {record['reason']}"
        ).rstrip()


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Totals of a replay."""

    requests: int
    by_route: Mapping[str, int]
    hit_ratio: float
    ttft_s: Mapping[str, tuple[float, float]]  # route -> (p50, p90)
    egress_bytes: int
    egress_mbit_per_s: float
    overlap: float | None
    kv_wait_p50_s: float | None
    fallbacks: Mapping[str, int]

    def lines(self) -> list[str]:
        """The summary as text."""
        routes = ", ".join(f"{count} {route}" for route, count in self.by_route.items())
        lines = [
            f"requests          {self.requests} ({routes})",
            f"prefix hit ratio  {self.hit_ratio:.1%} of prompt tokens",
        ]
        for route, (p50, p90) in self.ttft_s.items():
            lines.append(f"TTFT {route:<12} p50 {p50:.2f} s   p90 {p90:.2f} s")
        lines.append(
            f"egress            {self.egress_bytes / MEGABYTE:.1f} MB, on average {self.egress_mbit_per_s:.2f} Mbit/s"
        )
        if self.overlap is not None:
            lines.append(
                f"overlap           {self.overlap:.0%} of the egress bytes left while prefill was still running"
            )
        if self.kv_wait_p50_s is not None:
            lines.append(
                f"KVCache complete  {self.kv_wait_p50_s * 1000:.0f} ms after the end of prefill (kv_ready − prefill_end, p50)"
            )
        fallbacks = ", ".join(f"{count} {reason}" for reason, count in self.fallbacks.items()) or "none"
        return [*lines, f"fallbacks         {fallbacks}"]


def summarise(outcomes: Sequence[DemoOutcome], seconds: float) -> Summary:
    """Totals over `outcomes`, which took `seconds` in all. Raises ValueError without outcomes."""
    if not outcomes:
        raise ValueError("no request has finished")
    routes = sorted({outcome.route for outcome in outcomes})
    egress = sum(outcome.egress_bytes for outcome in outcomes)
    early = [
        o.egress_bytes * o.record["overlap"] for o in outcomes if o.egress_bytes and o.record["overlap"] is not None
    ]
    waits = [o.record["kv_ready_minus_prefill_end_s"] for o in outcomes if o.egress_bytes]
    waits = [wait for wait in waits if wait is not None]
    total = sum(outcome.record["total"] for outcome in outcomes)
    return Summary(
        requests=len(outcomes),
        by_route={route: sum(o.route == route for o in outcomes) for route in routes},
        hit_ratio=sum(outcome.record["cached"] for outcome in outcomes) / total,
        ttft_s={route: _percentiles(o.ttft_s for o in outcomes if o.route == route) for route in routes},
        egress_bytes=egress,
        egress_mbit_per_s=egress * 8 / 1e6 / seconds,
        overlap=sum(early) / egress if egress else None,
        kv_wait_p50_s=float(np.median(waits)) if waits else None,
        fallbacks=_count(reason for outcome in outcomes for reason in outcome.record["fallbacks"]),
    )


def _percentiles(values: Iterable[float]) -> tuple[float, float]:
    p50, p90 = np.percentile(list(values), [50, 90])
    return float(p50), float(p90)


def _count(labels: Iterable[str]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for label in labels:
        counts[label] = counts.get(label, 0) + 1
    return counts
