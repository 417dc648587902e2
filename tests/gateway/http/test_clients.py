"""Clients as they are: the OpenAI SDK, one that stops reading, one that never finishes its body."""

import asyncio
import json
from dataclasses import replace
from typing import Any, Final

import aiohttp
import pytest

from gateway.api.openai import Endpoint
from gateway.cluster.served_model import ServedModel
from gateway.config.classes import ClassConfig
from gateway.config.gateway import RoutingConfig, Strangers
from gateway.http.response import Reply
from gateway.pipeline.relay import pass_on
from gateway.prompt.prompt import Hashing, PromptMemory, read_call
from gateway.request.request import Request, RequestProgress, Timeline
from gateway.upstream.http1 import EngineAnswer
from tests.gateway.layouts import LAYOUT
from tests.gateway.memory.pipeline import on_memory_loop, pipeline
from tests.gateway.worlds import PATIENT, World, model_of, on_both_loops, on_loop, until, world
from tests.prompts.builders import text_tokenizer

LONG = "the quick brown fox jumps over the lazy dog " * 40


@on_loop
async def test_the_openai_sdk_gets_models_answers_streams_and_errors() -> None:
    openai = pytest.importorskip("openai")
    async with world() as w:
        w.nodes.remote[0].script.cached_tokens = 16
        async with openai.AsyncOpenAI(base_url=f"{w.gateway.url}/v1", api_key="x", max_retries=0) as client:
            assert [model.id async for model in client.models.list()] == ["scripted"]
            whole = await client.completions.create(model="scripted", prompt=LONG)
            assert whole.choices[0].text == "one two three"
            assert whole.usage.prompt_tokens_details.cached_tokens == 16
            stream = await client.completions.create(
                model="scripted", prompt=LONG, stream=True, stream_options={"include_usage": True}
            )
            chunks = [chunk async for chunk in stream]
            assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == "one two three"
            assert chunks[-1].usage.prompt_tokens_details.cached_tokens == 16
            with pytest.raises(openai.NotFoundError, match="does not exist"):
                await client.chat.completions.create(model="other", messages=[{"role": "user", "content": "x"}])
            with pytest.raises(openai.BadRequestError) as failure:
                await client.completions.create(model="scripted", prompt="x", max_tokens=-1)
            assert failure.value.param == "max_tokens"
            for node in w.nodes.decode:
                node.script.decode = ["die_after_first"]
            with pytest.raises(openai.APIError, match="The decode node failed: stream_broken"):
                async for _ in await client.completions.create(model="scripted", prompt=LONG, stream=True):
                    pass


@on_loop
async def test_a_client_that_stops_reading_loses_its_place() -> None:
    async with world(decode=1, timeouts=replace(PATIENT, client_stall_s=0.3)) as w:
        node = w.nodes.decode[0]
        node.script.words = ("x" * 100_000,) * 500
        reader, writer = await w.connect(limit=1024)
        body = json.dumps({"model": "scripted", "prompt": LONG, "stream": True}).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        )
        writer.write(head.encode() + b"\r\n\r\n" + body)
        assert b"200 OK" in await reader.readline()
        await until(lambda: node.running == 0 and not w.gateway.admission.in_flight)
        await w.settled()
        (record,) = await w.records()
        assert (record["status"], record["error"]) == (499, "client stalled")
        assert 'prfaas_streams_broken_total{reason="client_stalled"} 1.0' in await w.metrics()
        writer.close()


@on_memory_loop
async def test_what_the_gateway_does_not_live_to_see_the_end_of_is_no_fault_of_its_client() -> None:
    async with pipeline() as w:
        for node in w.nodes.decode:
            node.script.decode = ["stall_after_first"]
        body = {"model": "scripted", "prompt": LONG, "stream": True}
        async with w.http.post("/v1/completions", json=body) as response:
            await response.content.readany()
            w.door.visits.end_all()
            with pytest.raises(aiohttp.ClientPayloadError):
                await response.read()
        await w.settled()
        (record,) = await w.records()
        assert (record["status"], record["error"]) == (503, "the gateway was shut down")
        assert 'prfaas_streams_broken_total{reason="shutdown"} 1.0' in await w.metrics()


@on_loop
async def test_a_client_that_reads_nothing_of_a_whole_answer_loses_its_place_and_its_connection() -> None:
    limits = Strangers(header_s=1.0, idle_s=1.0)
    async with world(decode=1, timeouts=replace(PATIENT, client_stall_s=0.3), strangers=limits) as w:
        w.nodes.decode[0].script.words = ("x" * 1000,) * 12_000
        reader, writer = await w.connect(limit=1024)
        body = json.dumps({"model": "scripted", "prompt": LONG}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: "
        writer.write(f"{head}{len(body)}\r\n\r\n".encode() + body)
        assert b"200 OK" in await reader.readline()
        await until(lambda: not w.gateway.admission.in_flight)
        await w.settled()
        (record,) = await w.records()
        assert (record["status"], record["error"]) == (499, "client stalled")
        while 'connections{listener="clients"} 1.0' not in await w.metrics():  # noqa: ASYNC110 the session's own
            await asyncio.sleep(0.05)
        writer.close()


@on_loop
async def test_what_waits_for_the_client_counts_as_written() -> None:
    """Only between two events may anything else be written."""
    hashing = Hashing(block_size=16, salt=b"salt")
    body = b'{"model":"scripted","prompt":"x","stream":true}'
    call, prompt = read_call(Endpoint.COMPLETIONS, body, model_of(hashing), PromptMemory(text_tokenizer()))
    served = ServedModel("scripted", "scripted", LAYOUT, 4096, hashing)
    request = Request("r", "r-1", call, prompt, served, RequestProgress(Timeline(0.0)))
    chunks = [b"data: 1\n\n", b"data: ", b"2\n\n", b""]
    seen: list[bool] = []
    seen_waiting: list[float | None] = []

    class Client:
        def offer(self, data: bytes) -> bool:
            seen.append(request.stream.is_between_events)
            return True

        async def taken(self) -> None:
            seen_waiting.append(request.stream.writing_since)

    async def read() -> bytes:
        return chunks.pop(0)

    await pass_on(read, Client(), request, lambda: 7.0, lambda: None)
    assert seen == [True, False, True]
    assert seen_waiting == [7.0, 7.0, 7.0]
    assert request.stream.writing_since is None
    assert request.stream.events == 2


@on_memory_loop
async def test_a_body_that_never_arrives_is_a_408() -> None:
    async with pipeline(timeouts=replace(PATIENT, body_s=0.1)) as w:
        reader, writer = await w.connect()
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{"
        )
        answer = await reader.readuntil(b'"code":"request_timeout"')
        assert b"408" in answer.split(b"\r\n")[0]
        writer.close()
        await w.idle()


@on_loop
async def test_an_engine_is_timed_by_what_it_says_not_by_a_client_that_does_not_read() -> None:
    hashing = Hashing(block_size=16, salt=b"salt")
    body = b'{"model":"scripted","prompt":"x","stream":true}'
    call, prompt = read_call(Endpoint.COMPLETIONS, body, model_of(hashing), PromptMemory(text_tokenizer()))
    served = ServedModel("scripted", "scripted", LAYOUT, 4096, hashing)
    now = 0.0
    request = Request("r", "r-1", call, prompt, served, RequestProgress(Timeline(0.0, first_token=0.0)))
    chunks = [b"data: x\n\n"] * 12 + [b""]

    class Client:
        def offer(self, data: bytes) -> bool:
            return request.stream.events > 10

        async def taken(self) -> None:
            nonlocal now
            now += 1000.0

    async def read() -> bytes:
        nonlocal now
        now += 0.9
        return chunks.pop(0)

    await pass_on(read, Client(), request, lambda: now, lambda: None)
    request.progress.timeline.last_token = now
    assert now > 2000.0
    assert request.tbt_s == pytest.approx(9.9 / 9)


@on_memory_loop
async def test_a_client_that_does_not_read_takes_no_room_in_decode_once_its_engine_has_said_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reads = asyncio.Event()

    async def taken(reply: Reply) -> None:
        await reads.wait()

    offer = Reply.offer
    monkeypatch.setattr(Reply, "taken", taken)
    monkeypatch.setattr(Reply, "offer", lambda reply, data: offer(reply, data) or True)
    promised = {"default": ClassConfig(ttft_s=1000.0, tbt_ms=1e6)}
    async with pipeline(decode=1, classes=promised, routing=RoutingConfig(decode_slots=1)) as w:
        nodes = w.clusters.nodes
        answers = []
        for asked in range(1, 5):
            answers.append(asyncio.create_task(w.complete(stream=True)))
            await until(lambda: len(w.nodes.decode[0].bodies) == asked)  # noqa: B023 it is awaited here
            await until(lambda: not w.refusals.running and not any(node.pending_requests for node in nodes))
        assert not any(answer.done() for answer in answers)
        reads.set()
        assert [(await answer).status for answer in answers] == [200] * 4
        assert w.refusals.running == 0
        await w.settled()


MESSAGES = [{"role": "user", "content": "x"}]


STREAMS: Final = (
    ("/v1/completions", {"prompt": "x"}),
    ("/v1/completions", {"prompt": LONG}),
    ("/v1/chat/completions", {"messages": MESSAGES}),
    ("/v1/messages", {"messages": MESSAGES, "max_tokens": 9}),
    ("/v1/responses", {"input": "x"}),
)


@on_both_loops
async def test_a_client_that_hangs_up_at_the_last_event_has_been_served(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = asyncio.Event()
    read = EngineAnswer.read

    async def until_it_ends(answer: EngineAnswer) -> bytes:
        data = await read(answer)
        if not data:  # the engine's connection ends later than its answer
            await ends.wait()
        return data

    async with world(decode=1) as w:
        with monkeypatch.context() as patched:
            patched.setattr(EngineAnswer, "read", until_it_ends)
            for number, (path, fields) in enumerate(STREAMS, start=1):
                ends.clear()
                await hang_up_at_the_last_event(w, path, fields)
                ends.set()
                await w.idle()
                records = await w.records()
                assert len(records) == number
                assert (records[-1]["status"], records[-1]["error"]) == (200, ""), path
                assert records[-1]["output_tokens"] >= 3, path
                assert records[-1]["e2e_s"] is not None, path


async def hang_up_at_the_last_event(w: World, path: str, fields: dict[str, Any]) -> None:
    """Until the gateway has seen that the connection is gone."""
    reader, writer = await w.connect()
    raw = json.dumps({"model": "scripted", "stream": True, **fields}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n"
    writer.write(head.encode() + raw)
    told = b""
    while not any(last in told for last in (b"[DONE]\n\n", b'"message_stop"}\n\n', b"event: response.completed")):
        told += await reader.read(1 << 16)
    assert told.startswith(b"HTTP/1.1 200")
    writer.transport.abort()
    page = ""
    while 'connections{listener="clients"} 1.0' not in page:  # the session's own
        async with w.http.get("/metrics") as metrics:
            page = await metrics.text()
