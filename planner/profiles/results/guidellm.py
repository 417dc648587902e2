"""Results of GuideLLM: a report with a benchmark for each load, whose metrics are distributions by the requests' status."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from planner.model.reading import SECONDS, TOKENS, Range, placed
from planner.profiles.results.run import COMPLETED, MILLISECONDS, RUNNING, BenchmarkRun, check_served
from transport.control.settings import SettingsError, require_table, require_tables

STATUS: Final = "successful"
OPEN: Final = ("constant", "poisson", "async")  # strategies in which requests wait for no answer


def is_guidellm(table: Mapping[str, Any]) -> bool:
    return "benchmarks" in table


def guidellm_runs(table: Mapping[str, Any], source: str) -> Iterator[BenchmarkRun]:
    """Raises SettingsError naming the benchmark and the field."""
    for at, each in enumerate(require_tables(table["benchmarks"], "benchmarks")):
        with placed(f"benchmarks[{at}]"):
            yield _run(each, f"{source}, benchmarks[{at}]")


def _run(table: Mapping[str, Any], source: str) -> BenchmarkRun:
    metrics = _inside(table, "metrics", "metrics")
    # Before version 0.4 they lay beside the metrics.
    holder = table if metrics.get("request_totals") is None and "request_totals" in table else metrics
    totals = _inside(holder, "request_totals", "metrics.request_totals")
    completed, failed = (_number(totals, key, "metrics.request_totals", COMPLETED) for key in (STATUS, "errored"))
    check_served(completed, failed)
    output = _of(metrics, "output_token_count", "mean", TOKENS)
    running = _of(metrics, "request_concurrency", "mean", RUNNING)
    ttft_ms = _of(metrics, "time_to_first_token_ms", "median", MILLISECONDS)
    step_ms = _of(metrics, "inter_token_latency_ms", "median", MILLISECONDS) if output > 1 else 0.0
    latency_ms = 1000 * _of(metrics, "request_latency", "mean", SECONDS)
    decoding = min(1.0, step_ms * max(0.0, output - 1) / latency_ms) if latency_ms else 0.0
    return BenchmarkRun(
        source=source,
        tool="GuideLLM",
        requests=int(completed),
        prompt_tokens=_of(metrics, "prompt_token_count", "mean", TOKENS),
        output_tokens=output,
        running=running,
        ttft_s=ttft_ms / 1000,
        ttft_spread_s=_of(metrics, "time_to_first_token_ms", "std_dev", MILLISECONDS) / 1000 if completed > 1 else None,
        step_s=step_ms / 1000 or None,
        decoding=running * decoding,
        is_one_by_one=_strategy(table) not in OPEN,
    )


def _strategy(table: Mapping[str, Any]) -> str:
    """How requests came; empty where it is not said."""
    for part in ("config", "args"):
        inner = table.get(part)
        strategy = inner.get("strategy") if isinstance(inner, dict) else None
        if isinstance(strategy, dict):
            return str(strategy.get("type_") or strategy.get("type"))
    return ""


def _of(metrics: Mapping[str, Any], metric: str, statistic: str, allowed: Range) -> float:
    """One statistic of the successful requests."""
    place = f"metrics.{metric}"
    return _number(
        _inside(_inside(metrics, metric, place), STATUS, f"{place}.{STATUS}"), statistic, f"{place}.{STATUS}", allowed
    )


def _inside(table: Mapping[str, Any], key: str, place: str) -> dict[str, Any]:
    if table.get(key) is None:
        raise SettingsError(f"missing: {place}")
    return require_table(table[key], place)


def _number(table: Mapping[str, Any], key: str, place: str, allowed: Range) -> float:
    if table.get(key) is None:
        raise SettingsError(f"missing: {place}.{key}")
    return allowed.of(f"{place}.{key}", table[key])
