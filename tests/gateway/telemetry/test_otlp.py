"""Traces: a request's timeline as spans at a collector, below its caller's span and above its engines'."""

import asyncio
import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from gateway.config.traces import TracesConfig
from gateway.request.request import RequestRecord
from gateway.request.trace_context import TraceContext
from gateway.telemetry.otlp import Traces
from gateway.telemetry.otlp_spans import CLOSE_S, Spans
from tests.gateway.worlds import SERVED, on_loop, request_of, until, world
from transport.control.settings import SettingsError

LONG = "the quick brown fox jumps over the lazy dog " * 40
CALLER = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
OTHER_CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
TRACES = [caller[3:35] for caller in (CALLER, OTHER_CALLER)]
PROTOBUF = "application/x-protobuf"


class Collector:
    """An OTLP collector: keeps spans, by name."""

    def __init__(self, spans: Sequence[Any] = ()) -> None:
        self.spans = list(spans)
        self.status = 200

    async def take(self, http: web.Request) -> web.Response:
        body = ExportTraceServiceRequest.FromString(await http.read())
        if self.status == 200:
            for resource in body.resource_spans:
                self.spans += [span for scope in resource.scope_spans for span in scope.spans]
        return web.Response(
            body=ExportTraceServiceResponse().SerializeToString(), content_type=PROTOBUF, status=self.status
        )

    async def __aenter__(self) -> "Collector":
        app = web.Application()
        app.router.add_post("/v1/traces", self.take)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1/traces"
        return self

    async def __aexit__(self, *failure: object) -> None:
        await self._runner.cleanup()

    def named(self, name: str) -> list:
        return [span for span in self.spans if span.name == name]


def attributes(span) -> dict:  # type: ignore[no-untyped-def]
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes}


@on_loop
async def test_a_remote_prefill_and_answers_to_one_call_as_spans() -> None:
    async with Collector() as collector, world(traces=TracesConfig(endpoint=collector.url)) as w:
        assert (await w.complete(LONG, headers={"traceparent": CALLER}, stream=True)).status == 200
        (record,) = await w.records()
        legs = [node.headers[0]["traceparent"] for node in (w.nodes.remote[0], w.nodes.decode[0])]
        for node in w.nodes.nodes:
            node.headers.clear()
        assert (await w.complete(["a b", "c d"], headers={"traceparent": OTHER_CALLER})).status == 200
        of_answers = {headers["traceparent"] for node in w.nodes.decode for headers in node.headers}
        await until(
            lambda: len(collector.named("text_completion scripted")) == 3
        )  # a stop waits for less than a second
    spans_of = {trace: [span for span in collector.spans if span.trace_id.hex() == trace] for trace in TRACES}
    assert sum(map(len, spans_of.values())) == len(collector.spans)
    one, other = (Collector(spans) for spans in spans_of.values())
    a_remote_prefill_is_spans_of_its_caller(one, record, legs)
    answers_to_one_call_have_spans_of_their_own(other, of_answers)


def a_remote_prefill_is_spans_of_its_caller(collector: Collector, record: dict[str, Any], legs: list[str]) -> None:
    (request,) = collector.named("text_completion scripted")
    assert request.trace_id.hex() == CALLER[3:35]
    assert request.parent_span_id.hex() == CALLER[36:52]
    assert legs == [f"00-{CALLER[3:35]}-{request.span_id.hex()}-01"] * 2
    said = attributes(request)
    assert said["gen_ai.usage.input_tokens"] == record["total"]
    assert said["prfaas.route"] == "remote"
    assert said["http.response.status_code"] == 200
    for name, begin, end in (("prefill", "prefill_start", "prefill_end"), ("decode", "first_token", "last_token")):
        (span,) = collector.named(name)
        assert span.parent_span_id == request.span_id
        assert span.trace_id == request.trace_id
        steps = record["timeline"]
        assert (span.start_time_unix_nano - request.start_time_unix_nano) / 1e9 == pytest.approx(steps[begin], abs=1e-5)
        assert (span.end_time_unix_nano - request.start_time_unix_nano) / 1e9 == pytest.approx(steps[end], abs=1e-5)
    (transfer,) = collector.named("kv_transfer")
    assert attributes(transfer)["prfaas.bytes"] == record["bytes"] > 0


@on_loop
async def test_whom_nobody_traces() -> None:
    async with Collector() as collector:
        traces = Traces(TracesConfig(endpoint=collector.url, sample=0.0), lambda *_: None)
        for given in ({}, {"traceparent": CALLER[:-1] + "0"}):
            trace, _ = traces.below(given)
            assert not trace.is_sampled
            traces.ended(request_of("x", SERVED, trace=trace), of_one_step(), 0.0)
        await asyncio.to_thread(traces.close)
        assert collector.spans == []


def answers_to_one_call_have_spans_of_their_own(collector: Collector, legs: set[str]) -> None:
    spans = collector.named("text_completion scripted")
    assert legs == {f"00-{OTHER_CALLER[3:35]}-{span.span_id.hex()}-01" for span in spans}
    assert len(legs) == 2


@on_loop
async def test_a_collector_that_fails_is_nobodys_trouble() -> None:
    async with Collector() as collector:
        collector.status, lost = 400, Counter[str]()
        traces = Traces(TracesConfig(endpoint=collector.url), lambda reason, number: lost.update({reason: number}))
        trace, _ = traces.below({"traceparent": CALLER})
        traces.ended(request_of("x", SERVED, trace=trace), of_one_step(), 0.0)
        await asyncio.to_thread(traces.close)
        await until(lambda: lost)  # a close waits for less than a second
        assert set(lost) == {"collector"}
    async with asyncio.timeout(30), world(traces=TracesConfig(endpoint="http://127.0.0.1:9/v1/traces")) as w:
        assert (await w.complete("short")).status == 200


class Held(SpanExporter):
    """Takes nothing until it is let go, and then says `result`."""

    def __init__(self, result: SpanExportResult) -> None:
        self.result, self.is_let_go, self.is_asked = result, threading.Event(), threading.Event()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.is_asked.set()
        self.is_let_go.wait()
        return self.result


def of_one_step() -> RequestRecord:
    fields = {"status": 200, "endpoint": "chat", "timeline": {"arrived": 0.0, "routed": 0.1}}
    return RequestRecord(**{name: fields.get(name, "") for name in RequestRecord.__struct_fields__})


@pytest.mark.parametrize("result", SpanExportResult)
def test_lost_spans_are_counted_with_a_reason(result: SpanExportResult) -> None:
    lost, exporter = Counter[str](), Held(result)
    spans = Spans(
        "",
        lambda reason, number: lost.update({reason: number}),
        exporter,
        max_waiting=520,  # more than a batch of the library's
        interval_s=3600.0,  # full batches only
        close_s=30.0,
    )
    for _ in range(256):  # two spans each, a batch
        spans.add(TraceContext(1, 2), of_one_step(), "m", 0.0)
    assert exporter.is_asked.wait(30)
    for _ in range(261):
        spans.add(TraceContext(1, 2), of_one_step(), "m", 0.0)
    exporter.is_let_go.set()
    spans.close()
    kept = 512 + 516
    assert lost == {"queue_full": 6} | ({} if result is SpanExportResult.SUCCESS else {"collector": kept})


def test_a_stop_does_not_wait_for_a_collector_that_hangs(caplog: pytest.LogCaptureFixture) -> None:
    assert CLOSE_S < 1
    exporter = Held(SpanExportResult.SUCCESS)
    spans = Spans("", lambda *_: None, exporter, close_s=0.05)
    spans.add(TraceContext(1, 2), of_one_step(), "m", 0.0)
    spans.close()  # the exporter hangs for good: this would not come back
    assert "2 spans are lost" in caplog.text
    exporter.is_let_go.set()


@pytest.mark.parametrize("wrong", [{"sample": 1.5}, {"endpoint": "collector:4318"}])
def test_what_cannot_be_is_said(wrong: dict) -> None:
    with pytest.raises(SettingsError, match="traces"):
        TracesConfig(**wrong)
