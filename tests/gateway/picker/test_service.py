"""A picker's streams, without a proxy: what they hold, for how long, and what is counted."""

import asyncio
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from gateway.picker.asking import PickRequest
from gateway.picker.choosing import Pick
from gateway.picker.exchange import EndpointChoice, Refusal
from gateway.picker.metrics import PickerMetrics
from gateway.picker.service import ExchangeService
from transport.control.proto import ext_proc_pb2 as pb

BUFFERED, DUPLEX = 2, 4


class OneServer:
    """Chooses the same server for each request. `ended` says of each that has ended whether its answer was heard of."""

    def __init__(self) -> None:
        self.ended: list[bool] = []

    async def pick(self, asked: PickRequest) -> Pick | Refusal:
        return Pick(EndpointChoice(("10.0.0.1:8000",)), self.ended.append)


class Stream:
    """A proxy's end of one stream."""

    def __init__(self, service: ExchangeService) -> None:
        self._said = asyncio.Queue[pb.ProcessingRequest | None]()
        self.answers = service.process(self._messages(), None)

    async def _messages(self) -> AsyncIterator[pb.ProcessingRequest]:
        while (message := await self._said.get()) is not None:
            yield message

    def says(self, *messages: pb.ProcessingRequest | None) -> None:
        for message in messages:
            self._said.put_nowait(message)

    @property
    def is_read(self) -> bool:
        return self._said.empty()

    async def hears(self) -> pb.ProcessingResponse:
        return pb.ProcessingResponse.FromString(await anext(self.answers))


def head(request: int, response: int = 0, **more: bool) -> pb.ProcessingRequest:
    message = pb.ProcessingRequest()
    message.protocol_config.request_body_mode = request
    message.protocol_config.response_body_mode = response
    message.request_headers.end_of_stream = more.get("ends", False)
    return message


def body(data: bytes, ends: bool = False) -> pb.ProcessingRequest:
    message = pb.ProcessingRequest()
    message.request_body.body, message.request_body.end_of_stream = data, ends
    return message


def in_service(act: Callable[[ExchangeService, PickerMetrics], Awaitable[None]], **limits: int) -> list[bool]:
    """What `act` does; whether the answers of picks that ended were heard of."""
    picker = OneServer()

    async def run() -> None:
        counts = PickerMetrics()
        given = {"max_body_bytes": 1 << 20, "max_held_bytes": 1 << 20} | limits
        async with asyncio.timeout(10):
            await act(ExchangeService(picker, counts, **given), counts)

    asyncio.run(run())
    return picker.ended


def test_bodies_that_others_hold_cut_no_answer() -> None:
    async def act(service: ExchangeService, _: PickerMetrics) -> None:
        answering, holding = Stream(service), Stream(service)
        answering.says(head(DUPLEX, DUPLEX, ends=True), pb.ProcessingRequest(response_headers={}))
        assert [(await answering.hears()).WhichOneof("response") for _ in range(2)] == [
            "request_headers",
            "response_headers",
        ]
        holding.says(head(DUPLEX, DUPLEX), body(b"x" * 90))
        waiting = asyncio.ensure_future(holding.hears())
        await asyncio.sleep(0)
        late = Stream(service)
        late.says(head(DUPLEX, DUPLEX), body(b"x" * 90))
        assert (await late.hears()).immediate_response.status.code == 429
        part = pb.ProcessingRequest()
        part.response_body.body = b"an answer"
        answering.says(part)
        assert (await answering.hears()).response_body.response.body_mutation.streamed_response.body == b"an answer"
        waiting.cancel()

    in_service(act, max_held_bytes=100)


def test_a_body_is_let_go_once_it_is_answered() -> None:
    async def act(service: ExchangeService, _: PickerMetrics) -> None:
        tracemalloc.start()
        try:
            before, _peak = tracemalloc.get_traced_memory()
            streams = [Stream(service) for _ in range(4)]
            for stream in streams:
                stream.says(head(BUFFERED), body(b'{"prompt": "' + b"x" * 1_000_000 + b'"}', ends=True))
                assert [(await stream.hears()).WhichOneof("response") for _ in range(2)] == [
                    "request_headers",
                    "request_body",
                ]
            running = [asyncio.ensure_future(stream.hears()) for stream in streams]
            await asyncio.sleep(0.01)
            after, _peak = tracemalloc.get_traced_memory()
            assert after - before < 500_000
        finally:
            tracemalloc.stop()
        for each in running:
            each.cancel()

    in_service(act)


def test_a_body_in_small_parts_takes_no_more_room_than_is_counted() -> None:
    async def act(service: ExchangeService, _: PickerMetrics) -> None:
        stream = Stream(service)
        stream.says(head(DUPLEX))
        waiting = asyncio.ensure_future(stream.hears())
        await asyncio.sleep(0)
        tracemalloc.start()
        try:
            for number in range(20_000):
                stream.says(body(number.to_bytes(3, "big")))
                if number % 100 == 99:
                    await asyncio.sleep(0)
            while not stream.is_read:  # noqa: ASYNC110 nothing tells
                await asyncio.sleep(0)
            held, _peak = tracemalloc.get_traced_memory()
            assert held < 3 * 60_000
        finally:
            tracemalloc.stop()
        waiting.cancel()

    in_service(act)


def test_refusals_of_bodies_are_counted() -> None:
    async def act(service: ExchangeService, counts: PickerMetrics) -> None:
        for data in (b"x" * 60, b"x" * 120):
            stream = Stream(service)
            stream.says(head(DUPLEX), body(data))
            await stream.hears()
        page = counts.page().decode()
        assert 'prfaas_picker_requests_total{outcome="rejected-saturated"} 1.0' in page
        assert 'prfaas_picker_requests_total{outcome="refused_413"} 1.0' in page

    in_service(act, max_body_bytes=100, max_held_bytes=50)


@pytest.mark.parametrize(
    ("request_mode", "response_mode", "is_heard"),
    [(BUFFERED, 0, True), (DUPLEX, DUPLEX, True), (DUPLEX, 0, False), (0, 0, False)],
)
def test_the_end_of_a_stream_is_that_of_the_answer_where_the_proxy_waits_for_it(
    request_mode: int, response_mode: int, is_heard: bool
) -> None:
    async def act(service: ExchangeService, _: PickerMetrics) -> None:
        stream = Stream(service)
        stream.says(head(request_mode, response_mode), body(b"{}", ends=True), None)
        assert [answer async for answer in stream.answers]

    assert in_service(act) == [is_heard]
