"""Any picker, asked directly: the messages themselves, which Envoy hides. Needs no Envoy."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Final

import grpc
import grpc.aio
import pytest

from tests.epp.world import ACT_S, OURS, PickerWorld, asked_world, chat
from transport.control.proto import ext_proc_pb2 as pb

pytestmark = pytest.mark.timeout(600)

PROCESS: Final = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
DESTINATION: Final = "x-gateway-destination-endpoint"
MAX_PART_BYTES: Final = 62_000
DUPLEX: Final = 4
BUFFERED: Final = 2


def head(*, request: int = DUPLEX, response: int = DUPLEX, ends: bool = False, **more: str) -> pb.ProcessingRequest:
    headers = {":method": "POST", ":path": "/v1/chat/completions", "content-type": "application/json", **more}
    listed = [pb.ProxyHeader(key=key, raw_value=value.encode()) for key, value in headers.items()]
    return pb.ProcessingRequest(
        request_headers=pb.HeadersMessage(headers=pb.ProxyHeaders(headers=listed), end_of_stream=ends),
        protocol_config=pb.BodyModes(request_body_mode=request, response_body_mode=response),
    )


def part(data: bytes, ends: bool = False) -> pb.ProcessingRequest:
    return pb.ProcessingRequest(request_body=pb.BodyMessage(body=data, end_of_stream=ends))


def answered(data: bytes, ends: bool = False) -> pb.ProcessingRequest:
    return pb.ProcessingRequest(response_body=pb.BodyMessage(body=data, end_of_stream=ends))


def response_head() -> pb.ProcessingRequest:
    status = pb.ProxyHeaders(headers=[pb.ProxyHeader(key=":status", raw_value=b"200")])
    return pb.ProcessingRequest(response_headers=pb.HeadersMessage(headers=status))


class Caller:
    """A stream to the picker, as a proxy has it."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        process = channel.stream_stream(
            PROCESS,
            request_serializer=pb.ProcessingRequest.SerializeToString,
            response_deserializer=pb.ProcessingResponse.FromString,
        )
        self.call = process()

    async def says(self, *messages: pb.ProcessingRequest) -> None:
        for message in messages:
            await self.call.write(message)

    async def hears(self, number: int) -> list[pb.ProcessingResponse]:
        return [await self.call.read() for _ in range(number)]

    async def hears_all(self) -> list[pb.ProcessingResponse]:
        await self.call.done_writing()
        return [answer async for answer in self.call]


def asked(folder: Path, act: Callable[[PickerWorld, Caller], Coroutine[Any, Any, None]], **more: Any) -> None:
    async def acted() -> None:
        async with (
            asked_world(folder, **more) as world,
            grpc.aio.insecure_channel(f"127.0.0.1:{world.ports['grpc']}") as channel,
            asyncio.timeout(ACT_S),
        ):
            await act(world, Caller(channel))

    asyncio.run(acted())


def parts_of(answers: Sequence[pb.ProcessingResponse], which: str) -> list[pb.StreamedBody]:
    return [
        getattr(each, which).response.body_mutation.streamed_response
        for each in answers
        if each.WhichOneof("response") == which
    ]


def chosen(common: pb.CommonAnswer) -> str:
    return {each.header.key: each.header.raw_value.decode() for each in common.header_mutation.set_headers}[DESTINATION]


def in_metadata(answer: pb.ProcessingResponse) -> str:
    return answer.dynamic_metadata.fields["envoy.lb"].struct_value.fields[DESTINATION].string_value


def test_the_header_and_the_metadata_say_the_same(tmp_path: Path) -> None:
    async def act(world: PickerWorld, caller: Caller) -> None:
        await caller.says(head(), part(chat("hello"), ends=True))
        first, _ = await caller.hears(2)
        endpoint = chosen(first.request_headers.response)
        assert in_metadata(first) == endpoint
        assert endpoint in {server.address for server in world.servers}

    asked(tmp_path, act)


def test_bodies_come_back_whole_in_parts_that_fit(tmp_path: Path) -> None:
    async def act(world: PickerWorld, caller: Caller) -> None:
        body = chat("z" * 400_000)
        await caller.says(
            head(), *(part(body[at : at + 16_384]) for at in range(0, len(body), 16_384)), part(b"", True)
        )
        await caller.says(response_head(), answered(b"a" * 200_000), answered(b"b"), answered(b"", ends=True))
        answers = await caller.hears_all()
        for which, sent in (("request_body", body), ("response_body", b"a" * 200_000 + b"b")):
            parts = parts_of(answers, which)
            assert b"".join(each.body for each in parts) == sent
            assert max(len(each.body) for each in parts) <= MAX_PART_BYTES
            assert [each.end_of_stream for each in parts] == [False] * (len(parts) - 1) + [True]

    asked(tmp_path, act)


def test_the_stream_is_not_ended_before_the_response(tmp_path: Path) -> None:
    async def act(world: PickerWorld, caller: Caller) -> None:
        await caller.says(head(ends=True))
        await caller.hears(1)
        await asyncio.sleep(0.5)
        await caller.says(response_head(), answered(b"late", ends=True))
        answers = await caller.hears(2)
        assert [each.body for each in parts_of(answers, "response_body")] == [b"late"]

    asked(tmp_path, act)


def test_a_buffered_bodys_head_is_answered_at_once_and_its_body_has_the_choice(tmp_path: Path) -> None:
    async def act(world: PickerWorld, caller: Caller) -> None:
        await caller.says(head(request=BUFFERED, response=0))
        (first,) = await caller.hears(1)
        assert first.WhichOneof("response") == "request_headers"
        await caller.says(part(chat("hello"), ends=True))
        (second,) = await caller.hears(1)
        assert in_metadata(second) == chosen(second.request_body.response)

    asked(tmp_path, act)


def test_trailers_end_a_body(tmp_path: Path) -> None:
    async def act(world: PickerWorld, caller: Caller) -> None:
        await caller.says(head(), part(chat("hello")), pb.ProcessingRequest(request_trailers=pb.TrailersMessage()))
        answers = await caller.hears(3)
        kinds = [each.WhichOneof("response") for each in answers]
        assert kinds == ["request_headers", "request_body", "request_trailers"]
        assert not parts_of(answers, "request_body")[0].end_of_stream

    asked(tmp_path, act)


def test_a_refusal_says_why_in_a_header_and_in_json(tmp_path: Path) -> None:
    async def act(world: PickerWorld, caller: Caller) -> None:
        message = head(ends=True)
        message.metadata_context.filter_metadata["envoy.lb.subset_hint"].update(
            {"x-gateway-destination-endpoint-subset": []}
        )
        await caller.says(message)
        (answer,) = await caller.hears_all()
        refused = answer.immediate_response
        said = {each.header.key: each.header.raw_value for each in refused.headers.set_headers}
        assert (refused.status.code, said["x-llm-d-request-dropped-reason"]) == (503, b"rejected-no-endpoints")
        if OURS:
            assert json.loads(refused.body)["error"]["code"] == "rejected-no-endpoints"

    asked(tmp_path, act)


@pytest.mark.skipif(not OURS, reason="only ours promises that")
def test_what_comes_out_of_turn_ends_the_stream(tmp_path: Path) -> None:
    async def act(world: PickerWorld, caller: Caller) -> None:
        await caller.says(part(b"without headers"))
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await caller.hears_all()
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT

    asked(tmp_path, act)


@pytest.mark.parametrize("port", ["grpc", "health"])
def test_health_says_serving(tmp_path: Path, port: str) -> None:
    async def act(world: PickerWorld, _: Caller) -> None:
        if port == "grpc" and not OURS:
            return
        async with grpc.aio.insecure_channel(f"127.0.0.1:{world.ports[port]}") as channel:
            check = channel.unary_unary("/grpc.health.v1.Health/Check")
            assert await check(b"") == bytes((0x08, 1))
            watch: AsyncIterator[bytes] = channel.unary_stream("/grpc.health.v1.Health/Watch")(b"")
            async for state in watch:
                assert state == bytes((0x08, 1))
                break

    asked(tmp_path, act)
