"""The connector's counts, in the form that vLLM carries from its workers and its scheduler to its metrics endpoint."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from engine.vllm.scheduler_side.handover import HandoverCounts
from engine.vllm.worker_side.worker import CopyCounts

PREFIX: Final = "prfaas_vllm"
TOTALS: Final = {
    "bytes_saved": "KVCache bytes that left vLLM's blocks for pages",
    "save_seconds": "Seconds of copying them, on a thread beside the model",
    "save_wait_seconds": "Seconds that the model waited for such copies at the end of a step",
    "saves_given_up": "Prompts whose KVCache was not saved because copying took too long",
    "bytes_loaded": "KVCache bytes that came from pages into vLLM's blocks",
    "load_seconds": "Seconds of copying them, on a thread beside the model",
    "bytes_delivered": "KVCache bytes that prefill legs delivered to other nodes",
    "bytes_overlapped": "Of bytes_delivered, those that left before their prefill had ended",
    "tokens_landed": "Prompt tokens whose KVCache came from another node",
    "tokens_reloaded": "Prompt tokens whose KVCache came from the node's own pages",
}
BY_REASON: Final = {
    "fallbacks": "Requests computed without the KVCache hoped for",
    "legs": "Prefill legs by outcome",
    "bytes_buffered": "KVCache bytes that were copied through a buffer, by why they could not go straight",
}


def copy_stats(counts: CopyCounts) -> "PrfaasStats":
    """A worker's counts."""
    stats = PrfaasStats(
        _without_zeros(
            bytes_saved=counts.bytes_saved,
            save_seconds=counts.save_s,
            save_wait_seconds=counts.waited_s,
            saves_given_up=counts.saves_given_up,
            bytes_loaded=counts.bytes_loaded,
            load_seconds=counts.load_s,
        )
    )
    return _with_reasons(stats, bytes_buffered=counts.bytes_buffered)


def handover_stats(counts: HandoverCounts) -> "PrfaasStats":
    """The counts of the scheduler's side."""
    stats = PrfaasStats(
        _without_zeros(
            bytes_delivered=counts.delivered_bytes,
            bytes_overlapped=counts.overlapped_bytes,
            tokens_landed=counts.landed_tokens,
            tokens_reloaded=counts.cached_tokens,
        )
    )
    return _with_reasons(stats, fallbacks=counts.fallbacks, legs=counts.legs)


def _with_reasons(stats: "PrfaasStats", **counts: Counter[str]) -> "PrfaasStats":
    stats.data |= {name: dict(reasons) for name, reasons in counts.items() if reasons}
    return stats


def _without_zeros(**totals: float) -> dict[str, Any]:
    return {name: value for name, value in totals.items() if value}


@dataclass
class PrfaasStats(KVConnectorStats):  # type: ignore[misc]
    """Totals since the last report: numbers, and numbers by reason."""

    data: dict[str, Any] = field(default_factory=dict)

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> "PrfaasStats":
        for name, value in other.data.items():
            if isinstance(value, dict):
                self.data[name] = dict(Counter(self.data.get(name, {})) + Counter(value))
            else:
                self.data[name] = self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        """One line for vLLM's log."""
        line: dict[str, int | float] = {}
        for name, value in self.data.items():
            if isinstance(value, dict):
                line |= {f"{name}[{reason}]": count for reason, count in value.items()}
            else:
                line[name] = round(value, 3)
        return line

    def is_empty(self) -> bool:
        return not self.data


class PrfaasPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """The same as counters of vLLM's metrics endpoint: `prfaas_vllm_*`."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._totals = {
            name: self._counter_cls(name=f"{PREFIX}_{name}", documentation=text, labelnames=labelnames)
            for name, text in TOTALS.items()
        }
        self._by_reason = {
            name: self._counter_cls(name=f"{PREFIX}_{name}", documentation=text, labelnames=[*labelnames, "reason"])
            for name, text in BY_REASON.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        for name, counter in self._totals.items():
            if value := transfer_stats_data.get(name):
                counter.labels(*labels).inc(value)
        for name, counter in self._by_reason.items():
            for reason, count in transfer_stats_data.get(name, {}).items():
                counter.labels(*labels, reason).inc(count)
