"""Tables of aiconfigurator (`best_config_topn.csv`, `pareto.csv`): what it expects of one configuration after another.

They are estimates, not measurements, and lack the fixed cost of a request.
"""

from collections.abc import Mapping
from typing import Any

from planner.model.reading import TOKENS, spelled_number
from planner.profiles.aiconfigurator import SERVING_OVERHEAD_S
from planner.profiles.results.run import MILLISECONDS, RUNNING, BenchmarkRun


def is_estimate(row: Mapping[str, Any]) -> bool:
    return "isl" in row and "ttft" in row


def estimated_run(row: Mapping[str, Any], source: str) -> BenchmarkRun:
    """Raises SettingsError naming the column."""
    prompt, output = spelled_number(row, "isl", TOKENS), spelled_number(row, "osl", TOKENS)
    if row.get("prefix"):
        prompt -= spelled_number(row, "prefix", TOKENS)
    running = spelled_number(row, "concurrency", RUNNING)
    ttft_s, step_s = (spelled_number(row, key, MILLISECONDS) / 1000 for key in ("ttft", "tpot"))
    decode_s = step_s * max(0.0, output - 1)
    return BenchmarkRun(
        source=source,
        tool="aiconfigurator",
        requests=1,
        prompt_tokens=prompt,
        output_tokens=output,
        running=running,
        ttft_s=ttft_s + SERVING_OVERHEAD_S,
        step_s=step_s or None,
        decoding=running * decode_s / (ttft_s + decode_s),
        is_estimate=True,
    )
