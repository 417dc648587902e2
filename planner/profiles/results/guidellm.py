"""Results of GuideLLM: a report with a benchmark for each load, whose metrics are distributions by the requests' status."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from planner.model.reading import SECONDS, TOKENS, Range, placed
from planner.profiles.results.run import COMPLETED, MILLISECONDS, RUNNING, BenchmarkRun, check_served
from transport.control.settings import SettingsError, require_table, require_tables

STATUS: Final = "successful"


def is_guidellm(table: Mapping[str, Any]) -> bool:
    return "benchmarks" in table


def guidellm_runs(table: Mapping[str, Any], source: str) -> Iterator[BenchmarkRun]:
    """Raises SettingsError naming the benchmark and the field."""
    for at, each in enumerate(require_tables(table["benchmarks"], "benchmarks")):
        with placed(f"benchmarks[{at}]"):
            yield _run(_inside(each, "metrics", "metrics"), f"{source}, benchmarks[{at}]")


def _run(metrics: Mapping[str, Any], source: str) -> BenchmarkRun:
    totals = _inside(metrics, "request_totals", "metrics.request_totals")
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
    )


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
