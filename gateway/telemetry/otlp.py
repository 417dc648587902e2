"""Finished requests as OTLP traces: the timeline as spans, under the caller's own trace if it sent one (W3C Trace Context).

The ids of a request's trace are chosen when it is read, so that both legs' engines can hang their spans below it; the spans
themselves are made once it is over. Needs the extra `otlp`, imported where traces are wanted.
"""

import random
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from gateway.config.traces import TracesConfig
from gateway.errors import GatewayConfigError
from gateway.request.request import Request, RequestRecord
from gateway.request.trace_context import TRACEPARENT, TRACESTATE, TraceContext, trace_under

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter


class Traces:
    """Sends the spans of finished requests, by a thread of the library's; its queue is bounded, and what exceeds it is lost.

    `on_lost` is told why, and how many spans: "queue_full", or "collector", which refused them or was away. It is called
    from both threads.
    """

    def __init__(
        self,
        config: TracesConfig,
        on_lost: Callable[[str, int], None],
        exporter: "SpanExporter | None" = None,
        rng: random.Random | None = None,
    ) -> None:
        """To an `exporter` other than that of `config`, if there is one. Raises GatewayConfigError without the extra."""
        self._sample = config.sample
        self._rng = rng or random.Random()
        try:
            from gateway.telemetry.otlp_spans import Spans
        except ImportError as error:
            raise GatewayConfigError(
                f"traces.endpoint: traces need the otlp extra (pip install 'prfaas[otlp]'): {error}"
            ) from error
        self._spans = Spans(config.endpoint, on_lost, exporter)

    def below(self, given: Mapping[str, str]) -> tuple[TraceContext, dict[str, str]]:
        """The trace of a request with these headers, and the headers of its legs."""
        trace = trace_under(given.get(TRACEPARENT), self._sample, self._rng)
        headers = {TRACEPARENT: trace.header}
        if trace.parent and TRACESTATE in given:
            headers[TRACESTATE] = given[TRACESTATE]
        return trace, headers

    def ended(self, request: Request, record: RequestRecord, arrived_unix_s: float) -> None:
        """Takes a request that is over."""
        if request.trace is not None and request.trace.is_sampled:
            self._spans.add(request.trace, record, request.served.name, arrived_unix_s)

    def close(self) -> None:
        """Sends what waits, for as long as a stop may take."""
        self._spans.close()
