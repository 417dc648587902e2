"""A workload from a trace: lengths after prefix hits, rate, burstiness, the shape of the day."""

import re
from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np

from planner.errors import InputError
from planner.model.demand.fitted import BURST_S, KNOWN_OF_LENGTHS
from planner.model.demand.week import week_of
from planner.model.profile import Floats
from planner.model.reading import TOKENS, Range, named
from planner.model.site import Workload
from planner.model.trace_files.arrivals import KeptArrivals, busiest
from planner.model.trace_files.categories import RequestCategories
from planner.model.trace_files.reuse import reuse_by_category
from planner.model.trace_files.shared_blocks import SharedBlocks
from planner.model.traffic import Lengths
from planner.model.workload import Trace
from transport.control.settings import SettingsError, shown

TABLE_BINS: Final = 2_000
PROBES: Final = (4_096, 8_192, 16_384, 19_400, 32_768, 65_536)


@dataclass(frozen=True, slots=True, eq=False)
class FoundPrefixes:
    """What is found cached of each prompt of a trace.

    `compared_tokens` are what the PD cluster's own caches leave, which is more where only PrfaaS nodes hold some. `held` is 1
    where the decode node holds so much that it computes the rest itself, else 0; of `landed_tokens` it has the attention.
    """

    cached_tokens: Floats
    compared_tokens: Floats
    held: Floats
    landed_tokens: Floats

    @classmethod
    def everywhere(cls, trace: Trace, cached_tokens: Floats, increment_tokens: int) -> Self:
        """Where all nodes hold the same."""
        rests = trace.prompt_tokens - cached_tokens
        held = (cached_tokens > 0) & (rests <= increment_tokens)
        return cls(cached_tokens, rests, held.astype(np.float64), cached_tokens)


def uncached_lengths(
    trace: Trace, hits: Floats | FoundPrefixes | None, named: RequestCategories | None = None
) -> Lengths:
    """The uncached rest of each prompt, at least one token; whole prompts where hits are not known.

    With bare `hits` they are as if nothing were before them, and all for prefill nodes, as in the paper.
    """
    codes, names = (None, 0) if named is None else (named.codes, len(named.names))
    if hits is None:
        return Lengths.of(np.maximum(1.0, trace.prompt_tokens), codes=codes, names=names)
    if not isinstance(hits, FoundPrefixes):
        return Lengths.of(np.maximum(1.0, trace.prompt_tokens - hits), codes=codes, names=names)
    computed = np.maximum(1.0, trace.prompt_tokens - hits.cached_tokens)
    return Lengths.of(
        np.maximum(1.0, hits.compared_tokens), held=hits.held, computed=computed,
        cached=np.maximum(0.0, trace.prompt_tokens - computed), landed=np.minimum(trace.prompt_tokens, hits.landed_tokens),
        codes=codes, names=names,
    )  # fmt: skip


def categories_of(trace: Trace) -> RequestCategories | None:
    """Those that the trace says, else turns where its blocks tell; None where nothing is known. Only such as there are."""
    found = trace.categories
    if found is None:
        return None if trace.blocks is None else RequestCategories.inferred(trace.blocks)
    kept, codes = np.unique(found.codes, return_inverse=True)
    return RequestCategories(tuple(found.names[at] for at in kept), codes.astype(np.uint8), found.source)


def arrivals_of(
    trace: Trace, hits: Floats | FoundPrefixes | None, named: RequestCategories | None = None
) -> KeptArrivals | None:
    """Its requests in their order; of many, those of its busiest time. None where all come at once."""
    if not trace.span_s:
        return None
    arrival_s, prompts = _spread(trace), trace.prompt_tokens
    kept = busiest(arrival_s)
    nothing = np.zeros(len(trace))
    found = _tokens_of(hits)
    computed = np.maximum(1.0, prompts if found is None else prompts - found)
    columns = {"tokens": computed, "held": nothing, "cached": nothing, "landed": nothing}
    if isinstance(hits, FoundPrefixes):
        columns = {
            "tokens": np.maximum(1.0, hits.compared_tokens),
            "held": hits.held,
            "cached": np.maximum(0.0, prompts - computed),
            "landed": np.minimum(prompts, hits.landed_tokens),
        }
    columns |= {"arrival_s": arrival_s, "computed": computed, "output": trace.output_tokens}
    if named is not None:
        columns["category"] = named.codes.astype(np.float64)
    shares = trace.blocks is not None and isinstance(hits, FoundPrefixes)
    return KeptArrivals(
        rate_req_per_s=len(trace) / trace.span_s,
        shared_blocks=SharedBlocks.of(trace.blocks[kept], trace.block_size) if trace.blocks and shares else None,
        sessions=None if trace.sessions is None else trace.sessions[kept],
        **{name: values[kept] for name, values in columns.items()},
    )


def workload_of(trace: Trace, hits: Floats | FoundPrefixes | None) -> Workload:
    """The trace as a workload to solve for."""
    named = categories_of(trace)
    return Workload(
        name=trace.name,
        lengths=uncached_lengths(trace, hits, named),
        categories=() if named is None else named.names,
        output_tokens=float(trace.output_tokens.mean()),
        rate_req_per_s=len(trace) / trace.span_s if trace.span_s else None,
        hit_ratio=_hit_ratio(trace, _tokens_of(hits)),
        longest_prompt_tokens=float(trace.prompt_tokens.max()),
        burst_index=max(1.0, burst_index(_spread(trace), BURST_S) or 1.0),
        output_spread=_relative_spread(trace.output_tokens),
        arrivals=arrivals_of(trace, hits, named),
        week=week_of(trace.arrival_s),
        provenance=f"measured: trace {trace.name}, {len(trace)} requests",
    )


def _tokens_of(hits: Floats | FoundPrefixes | None) -> Floats | None:
    return hits.cached_tokens if isinstance(hits, FoundPrefixes) else hits


def fit(trace: Trace, found: Floats | FoundPrefixes | None) -> dict[str, Any]:
    """The JSON form of a workload, with what describes the trace beyond it."""
    named, hits = categories_of(trace), _tokens_of(found)
    lengths, arrivals = uncached_lengths(trace, found, named), arrivals_of(trace, found, named)
    thin = lengths.thinned(TABLE_BINS)
    names = () if named is None else named.names
    shares = [] if thin.categories is None else np.minimum(thin.categories.T, 1.0).round(6).tolist()
    return {
        "schema": 1,
        "name": trace.name,
        "requests": len(trace),
        "span_s": trace.span_s,
        "rate_req_per_s": len(trace) / trace.span_s if trace.span_s else None,
        "prompt_tokens": _summary(trace.prompt_tokens),
        "output_tokens": _summary(trace.output_tokens) | {"spread": _relative_spread(trace.output_tokens)},
        "output_tokens_mean": float(trace.output_tokens.mean()),
        "uncached_tokens": _summary(trace.prompt_tokens if hits is None else trace.prompt_tokens - hits)
        | {"tokens": thin.tokens.tolist(), "weights": thin.weights.tolist()}
        | {name: values.tolist() for name in KNOWN_OF_LENGTHS if (values := getattr(thin, name)) is not None}
        | ({"categories": dict(zip(names, shares, strict=True))} if names else {}),
        "hit_ratio": _hit_ratio(trace, hits),
        "share_above_threshold": {
            str(t): {"total": float((trace.prompt_tokens > t).mean()), "uncached": lengths.share_above(t)}
            for t in PROBES
        },
        "burst_index": {f"{window:g}_s": burst_index(_spread(trace), window) for window in (1.0, BURST_S, 60.0)},
        "rate_by_bin_req_per_s": rate_bins(trace.arrival_s),
        "week_req_per_s": list(week_of(trace.arrival_s)),
        "block_reuse": block_reuse(trace, named),
        "arrivals": None if arrivals is None else arrivals.table(),
        "provenance": f"measured: trace {trace.name}, {len(trace)} requests",
    }


def block_reuse(trace: Trace, named: RequestCategories | None) -> dict[str, Any] | None:
    """When blocks are used again, by category of request. None where the trace names no blocks."""
    if trace.blocks is None or named is None:
        return None
    return reuse_by_category(trace.arrival_s, trace.blocks, named)


def _relative_spread(values: Floats) -> float:
    """Standard deviation over mean."""
    return float(values.std() / values.mean())


def _spread(trace: Trace) -> Floats:
    """When its requests come, its clock's ticks set aside."""
    return trace.spread(np.random.default_rng(0)).arrival_s


def _hit_ratio(trace: Trace, hits: Floats | None) -> float | None:
    if hits is None:
        return None
    total = float(trace.prompt_tokens.sum())
    return float(hits.sum()) / total if total else 0.0


def _summary(values: Floats) -> dict[str, float]:
    p50, p90, p99 = np.quantile(values, [0.5, 0.9, 0.99])
    return {
        "mean": float(values.mean()), "p50": float(p50), "p90": float(p90), "p99": float(p99), "max": float(values.max())
    }  # fmt: skip


def burst_index(arrival_s: Floats, window_s: float) -> float | None:
    """Variance over mean of the arrivals per window: 1 for Poisson, more when bursty; None for less than 10 windows."""
    span = float(arrival_s[-1] - arrival_s[0])
    if span < 10 * window_s:
        return None
    counts, _ = np.histogram(arrival_s - arrival_s[0], bins=np.arange(0.0, span, window_s))
    return float(counts.var() / counts.mean()) if counts.mean() else None


def rate_bins(arrival_s: Floats, bins: int = 24) -> dict[str, Any]:
    """Rates over 24 equal bins of the trace: the shape of the day, where the trace is a day."""
    span = float(arrival_s[-1] - arrival_s[0]) or 1.0
    counts, _ = np.histogram(arrival_s - arrival_s[0], bins=bins, range=(0.0, span))
    return {"bin_s": span / bins, "rates": (counts / (span / bins)).tolist()}


UNCACHED_HISTOGRAM: Final = "prfaas_uncached_prompt_tokens"
OUTPUT_HISTOGRAM: Final = "prfaas_output_tokens"
PROMPT_COUNTER: Final = "prfaas_prompt_tokens_total"


def fit_metrics(text: str, span_s: float | None = None) -> dict[str, Any]:
    """A workload from a gateway's Prometheus text: its histograms of uncached prompt tokens and of answer lengths.

    A bucket stands for its geometric middle, scaled such that the mean is the histogram's own; finer shapes need the trace.
    Raises InputError when a histogram is missing or empty.
    """
    edges, counts, total = _histogram(text, UNCACHED_HISTOGRAM)
    _, output_counts, output_total = _histogram(text, OUTPUT_HISTOGRAM)
    kept = counts > 0
    lower = np.concatenate(([max(1.0, edges[0] / 2)], edges[:-1]))
    upper = np.where(np.isfinite(edges), edges, 2 * lower)
    tokens = np.sqrt(lower * upper)[kept]
    weights = counts[kept] / counts.sum()
    mean = total / counts.sum()
    tokens = np.maximum(1.0, tokens * mean / float(tokens @ weights))
    return {
        "schema": 1,
        "name": "gateway metrics",
        "requests": int(counts.sum()),
        "rate_req_per_s": float(counts.sum()) / span_s if span_s else None,
        "output_tokens_mean": output_total / output_counts.sum(),
        "uncached_tokens": {"mean": mean, "tokens": tokens.tolist(), "weights": weights.tolist()},
        "hit_ratio": _cached_share(text),
        "provenance": f"measured: {int(counts.sum())} requests of a gateway, by histogram",
    }


# A sample of Prometheus' text format: name, labels, value, and perhaps when it was taken (/federate says so).
_SAMPLE: Final = re.compile(r'([a-zA-Z_:][\w:]*)(?:\{((?:[^"}]|"(?:[^"\\]|\\.)*")*)\})?\s+(\S+)(?:\s+-?\d+)?\s*')
_LABEL: Final = re.compile(r'(\w+)\s*=\s*"((?:[^"\\]|\\.)*)"')
_COUNT: Final = Range(0, 1e18)


def _cached_share(text: str) -> float | None:
    """The share of prompt tokens that were cached, where the gateway has counted them."""
    tokens = {"cache": 0.0, "computed": 0.0}
    for at, line in enumerate(text.splitlines(), 1):
        sample = _SAMPLE.fullmatch(line) if line.startswith(PROMPT_COUNTER) else None
        source = dict(_LABEL.findall(sample[2] or "")).get("source") if sample is not None else None
        if sample is not None and sample[1] == PROMPT_COUNTER and source in tokens:
            with named(f"metrics, line {at}"):
                tokens[source] += _COUNT.of_text(PROMPT_COUNTER, sample[3])
    total = sum(tokens.values())
    return tokens["cache"] / total if total else None


def _histogram(text: str, name: str) -> tuple[Floats, Floats, float]:
    """Upper edges, counts per bucket, and sum, over all label sets of a Prometheus histogram. Raises InputError."""
    buckets: dict[float, float] = {}
    total = 0.0
    for at, line in enumerate(text.splitlines(), 1):
        if not line.startswith((f"{name}_bucket", f"{name}_sum")):
            continue
        with named(f"metrics, line {at}"):
            sample = _SAMPLE.fullmatch(line)
            if sample is None:
                raise SettingsError(f"{shown(line)}: must be a sample of Prometheus' text format")
            metric, labels, value = sample[1], dict(_LABEL.findall(sample[2] or "")), sample[3]
            if metric == f"{name}_sum":
                total += _COUNT.of_text(metric, value)
            elif metric == f"{name}_bucket":
                edge = _edge(labels.get("le"))
                buckets[edge] = buckets.get(edge, 0.0) + _COUNT.of_text(f"{metric} le={edge:g}", value)
    edges = np.array(sorted(buckets))
    counts = np.diff([0.0, *(buckets[edge] for edge in edges)])
    if not buckets or not counts.sum() or not total:
        raise InputError(f"metrics: histogram {name} is missing or empty; fit from a request log instead")
    if counts.min() < 0:
        raise InputError(f"metrics: histogram {name} has fewer counts in a wider bucket; was the file cut or merged?")
    return edges, counts, total


def _edge(text: str | None) -> float:
    return float("inf") if text == "+Inf" else TOKENS.of_text("le", text)
