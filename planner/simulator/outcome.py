"""The results of a simulation as arrays, and the figures made from them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from planner.decisions.admission.classes import ServiceClass
from planner.decisions.estimates.accuracy import Error
from planner.errors import needing_scipy
from planner.model.demand.slo import fastest, members
from planner.model.profile import Floats
from planner.simulator.scenario import Targets


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SimulationOutcome:
    """One run. Per request: arrival, TTFT, TBT and E2E in seconds (nan where it was refused), tokens found cached."""

    arrival_s: Floats
    ttft_s: Floats
    tbt_s: Floats
    e2e_s: Floats
    prefill_wait_s: Floats
    prompt_tokens: Floats
    cached_tokens: Floats
    remote: Floats
    rejects: Mapping[str, int]
    wasted_prefill_s: float  # computed for requests that were refused after it
    fallbacks: Mapping[str, int] = field(default_factory=dict)  # by reason, as gateways count them
    moved_bytes: Mapping[str, int] = field(default_factory=dict)  # of prefixes, between clusters
    link_failures: Mapping[str, int] = field(default_factory=dict)  # by link: how often its breakers opened
    routes: Mapping[str, int]
    utilisation: Mapping[str, float]
    egress_bytes: Mapping[float, Floats]  # by window length in s, until the last arrival
    sent_bytes: float = 0.0  # over all links, until the last answer
    horizon_s: float
    targets: Targets
    seed: int
    events: int
    timeline: Sequence[Mapping[str, Any]] = field(default_factory=tuple)
    conversions: Mapping[str, int] = field(default_factory=dict)  # by how they ended
    # Only where there are several clusters of a kind: requests by who computed and who answered them, and numbers of each
    # cluster and link.
    ways: Mapping[str, int] = field(default_factory=dict)
    clusters: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    links: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    categories: Any = None  # the name of each request's, where any are known
    classes: Sequence[ServiceClass] = ()
    class_of: Any = ()  # by request, an index into `classes`
    errors: Mapping[tuple[str, str], Error] = field(default_factory=dict)  # of predictions, by what and of what

    def report(self) -> dict[str, Any]:
        """The published keys; seconds, requests per second, Gbit/s."""
        done = ~np.isnan(self.ttft_s)
        completed = int(done.sum())
        good = self._good
        prompts = float(self.prompt_tokens[done].sum())
        one, ten = (self.egress_bytes[window] * 8e-9 / window for window in (1.0, 10.0))
        return {
            "requests": len(self.ttft_s),
            "completed": completed,
            "rejected": int(sum(self.rejects.values())),
            "rejected_by_reason": dict(self.rejects),
            "wasted_prefill_s": self.wasted_prefill_s,
            **self._by_class(done),
            **self._by_target(),
            **({"ways": dict(self.ways), "clusters": self.clusters, "links": self.links} if self.clusters else {}),
            **self._between_clusters(),
            **({"conversions": dict(self.conversions)} if self.conversions else {}),
            "routes": dict(self.routes),
            **_percentiles("ttft", self.ttft_s[done]),
            **_percentiles("tbt", self.tbt_s[done]),
            **_percentiles("e2e", self.e2e_s[done]),
            "prefill_wait_mean_s": _mean(self.prefill_wait_s[done]),
            "throughput_req_per_s": completed / self.horizon_s,
            "goodput_req_per_s": int(good.sum()) / self.horizon_s,
            "hit_ratio": float(self.cached_tokens[done].sum()) / prompts if prompts else 0.0,
            "offload_fraction": _mean(self.remote[done]),
            "egress_mean_gbps": float(one.mean()),
            "egress_p99_gbps": float(np.quantile(one, 0.99)),
            "egress_p99_10s_gbps": float(np.quantile(ten, 0.99)),
            "utilisation": dict(self.utilisation),
            "estimate_error": {
                f"{what} {of} {stat}": value
                for (what, of), error in self.errors.items()
                for stat, value in (("mean", error.mean), ("p90", error.p90))
            },
            "horizon_s": self.horizon_s,
            "seed": self.seed,
        }

    def _between_clusters(self) -> dict[str, dict[str, int]]:
        """What was lost and late, and what moved between clusters, where anything did."""
        tables = {"fallbacks": self.fallbacks, "link_failures": self.link_failures, "moved_bytes": self.moved_bytes}
        return {name: dict(table) for name, table in tables.items() if table}

    @property
    def _good(self) -> Any:
        """Whether each request had its first token and its other tokens in time."""
        in_time_s = fastest(self.targets.some, self.prompt_tokens, self.categories, self.targets.ttft_s)
        return (self.ttft_s <= in_time_s) & (self.tbt_s <= self.targets.tbt_s)

    def _by_target(self) -> dict[str, Any]:
        """How the targets of some requests were kept, and by how much in the worst case, as a share; refused ones are late."""
        rows: dict[str, dict[str, float]] = {}
        good, margins = self._good, list[float]()
        for target in self.targets.some:
            own = members(target, self.prompt_tokens, self.categories)
            ttft_s = self.ttft_s[own]
            rows[target.name] = {"requests": int(own.sum()), "target_s": target.ttft_s, "asked_share": target.share}
            if not len(ttft_s):
                continue
            in_time = float((ttft_s <= target.ttft_s).mean())
            margins.append(in_time - target.share)
            done = ttft_s[~np.isnan(ttft_s)]
            reached = {} if not len(done) else {"ttft_s": float(np.quantile(done, target.share))}
            goodput = int(good[own].sum()) / self.horizon_s
            rows[target.name] |= {"share_in_time": in_time, "goodput_req_per_s": goodput, **reached}
        return {} if not rows else {"by_target": rows, "target_margin": min(margins, default=None)}

    def _by_class(self, done: Any) -> dict[str, dict[str, int]]:
        """Requests that got an answer, and those that got it as their class was promised; nothing of a single class."""
        if len(self.classes) < 2:
            return {}
        completed, kept = {}, {}
        for number, each in enumerate(self.classes):
            own = done & (self.class_of == number)
            completed[each.name] = int(own.sum())
            in_time = self.ttft_s <= min(each.ttft_s, each.deadline_s)
            kept[each.name] = int((own & in_time & (self.tbt_s <= each.tbt_s)).sum())
        return {"completed_by_class": completed, "kept_by_class": kept}


def _mean(values: Floats) -> float:
    return float(values.mean()) if len(values) else float("nan")


def _percentiles(name: str, values: Floats) -> dict[str, float | None]:
    if not len(values):
        return {f"{name}_{what}_s": None for what in ("mean", "p50", "p90", "p99")}
    p50, p90, p99 = np.quantile(values, [0.5, 0.9, 0.99])
    return {
        f"{name}_mean_s": float(values.mean()),
        f"{name}_p50_s": float(p50),
        f"{name}_p90_s": float(p90),
        f"{name}_p99_s": float(p99),
    }


def over_seeds(reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Means of reports, and half-widths of their 95 % confidence intervals (Student's t over seeds)."""
    if len(reports) == 1:
        return dict(reports[0]) | {"seeds": 1, "ci95": {}}
    merged: dict[str, Any] = {}
    widths: dict[str, float] = {}
    for key in _all_keys(reports):
        first = next(report[key] for report in reports if key in report)
        values = [report.get(key, {}) for report in reports]  # what only some have is a table
        if isinstance(first, Mapping) and any(isinstance(value, Mapping) for value in first.values()):
            merged[key] = mean_of(values)
        elif isinstance(first, Mapping):
            merged[key] = {k: float(np.mean([v.get(k, 0) for v in values])) for k in _all_keys(values)}
        elif key == "seed":
            merged[key] = first
        elif all(isinstance(v, int | float) for v in values):
            merged[key] = float(np.mean(values)) if isinstance(first, float) else round(float(np.mean(values)))
            widths[key] = confidence_95(values)
        else:
            merged[key] = None
    return merged | {"seeds": len(reports), "ci95": widths}


def mean_of(tables: Sequence[Any]) -> Any:
    """Means of equal keys, of tables in tables too; what only some have is the mean of those."""
    if not isinstance(tables[0], Mapping):
        return float(np.mean(tables))
    return {key: mean_of([table[key] for table in tables if key in table]) for key in _all_keys(tables)}


def _all_keys(tables: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(key for table in tables for key in table))


def confidence_95(values: Sequence[float]) -> float:
    """Half-width of the 95 % confidence interval of the mean of independent `values`."""
    count = len(values)
    if count < 2:
        return float("inf")
    # Half a second to load, and one seed has no interval.
    with needing_scipy("confidence intervals of several seeds"):
        from scipy.special import stdtrit

    return float(stdtrit(count - 1, 0.975) * np.std(values, ddof=1) / np.sqrt(count))
