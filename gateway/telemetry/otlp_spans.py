"""A finished request's record as OpenTelemetry spans, named and described by the GenAI conventions. Imports the extra `otlp`."""

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import IdGenerator, RandomIdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import NonRecordingSpan, SpanContext, SpanKind, StatusCode, TraceFlags, set_span_in_context

from gateway.api.openai import Endpoint
from gateway.request.request import RequestRecord
from gateway.request.trace_context import TraceContext

log = logging.getLogger("prfaas.gateway.traces")

SERVICE: Final = "prfaas-gateway"
TIMEOUT_S: Final = 5.0  # of a try to send spans
MAX_WAITING: Final = 8192  # spans
MOST_OF_A_REQUEST: Final = 6  # its own, and one for each step
INTERVAL_S: Final = 1.0
CLOSE_S: Final = 0.9  # that a stop waits for a collector; below a second, as nothing else waits for it
OPERATIONS: Final[dict[str, str]] = {
    Endpoint.COMPLETIONS: "text_completion"
}  # gen_ai.operation.name by endpoint; all others are chats

# Spans below a request's own: name, from which step, to which. What was not reached has none.
STEPS: Final = (
    ("route", "arrived", "routed"),
    ("prefill", "prefill_start", "prefill_end"),
    ("kv_transfer", "prefill_start", "kv_ready"),
    ("first_token", "kv_ready", "first_token"),
    ("decode", "first_token", "last_token"),
)

Value = str | bool | int | float


class _ChosenIds(IdGenerator):
    """Ids that were chosen when a request came; random ones for spans that only the gateway knows."""

    def __init__(self) -> None:
        self._random = RandomIdGenerator()
        self.trace = self.span = 0

    def generate_trace_id(self) -> int:
        return self.trace or self._random.generate_trace_id()

    def generate_span_id(self) -> int:
        span, self.span = self.span, 0
        return span or self._random.generate_span_id()


class _Counted(SpanExporter):
    """Sends by another exporter, and counts. Runs in the library's thread, as all that it counts does."""

    def __init__(self, exporter: SpanExporter, on_lost: Callable[[str, int], None]) -> None:
        self._exporter = exporter
        self._on_lost = on_lost
        self.taken = self.done = 0  # spans: out of the queue, and done with

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.taken += len(spans)
        result = SpanExportResult.FAILURE
        try:
            result = self._exporter.export(spans)
        finally:
            if result is not SpanExportResult.SUCCESS:
                self._on_lost("collector", len(spans))
            self.done += len(spans)
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._exporter.force_flush(timeout_millis)


class Spans:
    """Makes spans and has them sent to `endpoint`, or by an `exporter`. What is lost is told to `on_lost`, from any thread."""

    def __init__(
        self,
        endpoint: str,
        on_lost: Callable[[str, int], None],
        exporter: SpanExporter | None = None,
        *,
        max_waiting: int = MAX_WAITING,
        interval_s: float = INTERVAL_S,
        close_s: float = CLOSE_S,
    ) -> None:
        self._on_lost = on_lost
        self._max_waiting = max_waiting
        self._close_s = close_s
        self._exporter = _Counted(exporter or OTLPSpanExporter(endpoint, timeout=TIMEOUT_S), on_lost)
        self._made = 0
        self._ids = _ChosenIds()
        self._provider = TracerProvider(
            sampler=ALWAYS_ON,  # that it is traced has been decided
            resource=Resource.create({"service.name": SERVICE}),
            id_generator=self._ids,
            span_limits=SpanLimits(),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(
            BatchSpanProcessor(
                self._exporter,
                max_queue_size=max_waiting,
                schedule_delay_millis=interval_s * 1e3,
            )
        )
        self._tracer = self._provider.get_tracer("prfaas.gateway")

    def add(self, trace: TraceContext, record: RequestRecord, model: str, arrived_unix_s: float) -> None:
        """The spans of a request to `model` that is over: all of them, or none where too many wait."""
        reached = [each for each in STEPS if each[1] in record.timeline and each[2] in record.timeline]
        if self._made - self._exporter.taken > self._max_waiting - MOST_OF_A_REQUEST:
            self._on_lost("queue_full", 1 + len(reached))
            return
        self._made += 1 + len(reached)
        began_ns = round(arrived_unix_s * 1e9)
        steps = record.timeline
        self._ids.trace, self._ids.span = trace.trace, trace.span
        operation = OPERATIONS.get(record.endpoint, "chat")
        request = self._tracer.start_span(
            f"{operation} {model}",
            _below(trace.trace, trace.parent) if trace.parent else Context(),
            SpanKind.SERVER,
            {"gen_ai.operation.name": operation, "gen_ai.request.model": model} | dict(_attributes(record)),
            start_time=began_ns,
        )
        for name, begin, end in reached:
            below = self._tracer.start_span(
                name,
                _below(trace.trace, trace.span),
                attributes=dict(_of_step(name, record)),
                start_time=began_ns + round(steps[begin] * 1e9),
            )
            below.end(began_ns + round(steps[end] * 1e9))
        if record.status >= 500 or record.error:
            request.set_status(StatusCode.ERROR, record.error)
        request.end(began_ns + round(max(steps.values(), default=0.0) * 1e9))

    def close(self) -> None:
        """Sends what waits, in `close_s`; what a collector has not taken by then is lost."""
        # The library's own wait is half a minute, and cannot be told otherwise; its thread ends with the process.
        closing = threading.Thread(target=self._provider.shutdown, name="traces close", daemon=True)
        closing.start()
        closing.join(self._close_s)
        if closing.is_alive() and (waiting := self._made - self._exporter.done):
            log.warning("%d spans are lost: the collector did not take them in %g s", waiting, self._close_s)


def _below(trace: int, span: int) -> Context:
    context = SpanContext(trace, span, is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED))
    return set_span_in_context(NonRecordingSpan(context), Context())


def _attributes(record: RequestRecord) -> Iterator[tuple[str, Value]]:
    yield "gen_ai.provider.name", "prfaas"
    yield "gen_ai.response.id", record.id
    yield "gen_ai.usage.input_tokens", record.total
    yield "gen_ai.usage.output_tokens", record.output_tokens
    yield "gen_ai.usage.cache_read.input_tokens", record.cached
    yield "http.response.status_code", record.status
    if record.ttft_s is not None:
        yield "gen_ai.response.time_to_first_chunk", record.ttft_s
    for name in ("tenant", "service_class", "route", "reason", "threshold", "plan", "fallbacks", "takeovers", "stream"):
        value = getattr(record, name)
        if value not in ("", []):
            yield f"prfaas.{name}", value


def _of_step(name: str, record: RequestRecord) -> Iterator[tuple[str, Value]]:
    if name == "route":
        yield "prfaas.target", record.target
        if record.predicted_ttft_s is not None:
            yield "prfaas.predicted_ttft_s", record.predicted_ttft_s
    elif name == "prefill":
        yield "prfaas.node", record.prefill_node
        yield "prfaas.uncached_tokens", record.uncached
        if record.fetched_from:
            yield "prfaas.fetched_from", record.fetched_from
    elif name == "kv_transfer":
        yield "prfaas.link", record.link
        yield "prfaas.bytes", record.bytes
        yield "prfaas.bytes_saved", record.bytes_saved
    elif name in ("first_token", "decode"):
        yield "prfaas.node", record.decode_node
