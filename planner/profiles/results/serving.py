"""Results of `vllm bench serve --save-result` and of SGLang's `bench_serving`, which have most of their fields in common.

Times are in milliseconds (`mean_ttft_ms`), those of single requests (`ttfts`, only with details) in seconds.
"""

from collections.abc import Mapping
from typing import Any, Final

from planner.model.reading import SECONDS, TOKENS
from planner.profiles.results.run import (
    COMPLETED,
    MILLISECONDS,
    RUNNING,
    BenchmarkRun,
    check_served,
    field_of,
    optional_field,
)
from transport.control.settings import require

COALESCED: Final = 0.1  # of the time per token


def is_serving(table: Mapping[str, Any]) -> bool:
    return "total_input_tokens" in table or "mean_ttft_ms" in table or "median_ttft_ms" in table


def serving_run(table: Mapping[str, Any], source: str) -> BenchmarkRun:
    """Raises SettingsError naming the field."""
    completed = field_of(table, "completed", COMPLETED)
    check_served(completed, optional_field(table, "failed", COMPLETED) or 0.0)
    duration_s = SECONDS.above_low("duration", field_of(table, "duration", SECONDS))
    prompt = field_of(table, "total_input_tokens", TOKENS) / completed
    output = field_of(table, "total_output_tokens", TOKENS) / completed
    ttft_ms = field_of(table, "median_ttft_ms", MILLISECONDS, "mean_ttft_ms")
    spread_ms = optional_field(table, "std_ttft_ms", MILLISECONDS)
    step_ms = _step_ms(table) if output > 1 else None
    # A request decodes for as long as its tokens took, however fast most steps were.
    token_ms = (optional_field(table, "mean_tpot_ms", MILLISECONDS) or step_ms or 0.0) if output > 1 else 0.0
    decode_ms = token_ms * max(0.0, output - 1)
    at_once = completed / (1000 * duration_s)
    running = optional_field(table, "concurrency", RUNNING)
    if running is None:
        e2e_ms = optional_field(table, "mean_e2el_ms", MILLISECONDS)
        waited_ms = field_of(table, "mean_ttft_ms", MILLISECONDS, "median_ttft_ms")
        running = at_once * (waited_ms + decode_ms if e2e_ms is None else e2e_ms)
    limit = optional_field(table, "max_concurrency", RUNNING)
    return BenchmarkRun(
        source=source,
        tool="SGLang's bench_serving" if "mean_e2e_latency_ms" in table else "vllm bench serve",
        requests=int(completed),
        prompt_tokens=prompt,
        output_tokens=output,
        running=running if limit is None else min(running, limit),
        ttft_s=ttft_ms / 1000,
        ttft_spread_s=None if spread_ms is None or completed < 2 else spread_ms / 1000,
        step_s=None if step_ms is None else step_ms / 1000,
        decoding=at_once * decode_ms,
        prefills=_prefills(table),
        is_one_by_one=completed == 1 or (limit is not None and limit <= 1),
    )


def _step_ms(table: Mapping[str, Any]) -> float | None:
    """Chunked prefills of others lengthen the mean; several tokens at once lengthen what is between chunks.

    Chunks that come in one packet have almost nothing between them, which is no step.
    """
    between, *per_token = (
        optional_field(table, key, MILLISECONDS) for key in ("median_itl_ms", "median_tpot_ms", "mean_tpot_ms")
    )
    found = [each for each in per_token if each]
    if between and (not found or between >= COALESCED * min(found)):
        found.append(between)
    return min(found) if found else None


def _prefills(table: Mapping[str, Any]) -> tuple[tuple[float, float], ...]:
    lengths, times = table.get("input_lens"), table.get("ttfts")
    if lengths is None or times is None:
        return ()
    require(isinstance(lengths, list), "input_lens", lengths, "a list of tokens")
    require(isinstance(times, list) and len(times) == len(lengths), "ttfts", times, "a list as long as input_lens")
    pairs = [
        (TOKENS.of(f"input_lens[{at}]", tokens), SECONDS.of(f"ttfts[{at}]", seconds))
        for at, (tokens, seconds) in enumerate(zip(lengths, times, strict=True))
    ]
    return tuple(pair for pair in pairs if min(pair) > 0)  # requests that failed have no first token
