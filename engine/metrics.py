"""Prometheus metrics of an engine, named after vLLM's where they mean the same."""

from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

PREFIX: Final = "prfaas_engine"
_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class EngineMetrics:
    """One registry per server; the server calls the methods, nothing reads the values back."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._running = self._gauge("num_requests_running", "Requests whose prefill or decode is under way")
        self._waiting = self._gauge("num_requests_waiting", "Requests that wait for the model")
        self._queued_tokens = self._gauge("queued_prompt_tokens", "Prompt tokens that are still to be computed")
        self._agent = self._gauge("agent_connected", "1 while the node's agent is connected")
        self._prompt = self._counter("prompt_tokens", "Prompt tokens by where their KVCache came from", "source")
        self._generated = self._counter("generation_tokens", "Tokens generated")
        self._requests = self._counter("requests", "Requests by kind and outcome", "kind", "outcome")
        self._fallbacks = self._counter("kv_fallbacks", "Prefills computed without the KVCache hoped for", "reason")
        self._kept = self._counter("answers_kept", "Answers by whether their blocks became prefix cache", "outcome")
        self._kept_tokens = self._counter("answer_tokens_kept", "Tokens of answers in blocks that became prefix cache")
        self._legs = self._counter("prefill_legs", "Prefill legs by outcome", "outcome")
        self._sent = self._counter("kv_bytes_sent", "KVCache bytes that prefill legs delivered")
        self._ttft = self._histogram("time_to_first_token_seconds", "Arrival to first token")
        self._tbt = self._histogram("inter_token_latency_seconds", "Between two tokens of a request")
        self._e2e = self._histogram("e2e_request_latency_seconds", "Arrival to last token")
        self._queue = self._histogram("request_queue_time_seconds", "Arrival to the first computation")
        self._prefill = self._histogram("request_prefill_time_seconds", "First computation to the end of prefill")

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def on_load(self, running: int, waiting: int, queued_tokens: int) -> None:
        self._running.set(running)
        self._waiting.set(waiting)
        self._queued_tokens.set(queued_tokens)

    def on_agent(self, *, connected: bool) -> None:
        self._agent.set(connected)

    def on_prefilled(
        self, *, computed: int, local_cache: int, transferred: int, queue_s: float, prefill_s: float
    ) -> None:
        self._prompt.labels("computed").inc(computed)
        self._prompt.labels("local_cache").inc(local_cache)
        self._prompt.labels("external_kv_transfer").inc(transferred)
        self._queue.observe(queue_s)
        self._prefill.observe(prefill_s)

    def on_first_token(self, ttft_s: float) -> None:
        self._generated.inc()
        self._ttft.observe(ttft_s)

    def on_next_token(self, since_last_s: float) -> None:
        self._generated.inc()
        self._tbt.observe(since_last_s)

    def on_request_done(self, kind: str, outcome: str, e2e_s: float) -> None:
        self._requests.labels(kind, outcome).inc()
        self._e2e.observe(e2e_s)

    def on_fallback(self, reason: str) -> None:
        self._fallbacks.labels(reason).inc()

    def on_answer(self, outcome: str, num_tokens: int = 0) -> None:
        """`num_tokens` were added to the prefix cache."""
        self._kept.labels(outcome).inc()
        self._kept_tokens.inc(num_tokens)

    def on_leg(self, outcome: str, bytes_sent: int = 0) -> None:
        self._legs.labels(outcome).inc()
        self._sent.inc(bytes_sent)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"{PREFIX}_{name}", text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"{PREFIX}_{name}", text, registry=self.registry)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(f"{PREFIX}_{name}", text, registry=self.registry, buckets=_SECONDS)
