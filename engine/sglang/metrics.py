"""What a server of SGLang's does without, as counters among its own: `prfaas_sglang_*`.

With --enable-metrics SGLang collects what each of its processes counts from files that all of them write. prometheus_client
writes them if it is imported after SGLang has named their folder: import this in a scheduler's process only.
"""

from prometheus_client import Counter


class FallbackMetric:
    """`prfaas_sglang_fallbacks`: pages that were computed again or not kept, by what was asked for and why."""

    def __init__(self) -> None:
        self._counter = Counter(
            "prfaas_sglang_fallbacks",
            "Calls of the storage that came to nothing, by what was asked for and the reason",
            ["call", "reason"],
            registry=None,  # SGLang's endpoint reads files
        )

    def count(self, call: str, reason: str) -> None:
        self._counter.labels(call, reason).inc()
