"""Envoy's messages as values, and answers as its messages."""

from typing import Any

import pytest

from gateway.errors import ExchangeError
from gateway.picker.exchange import BodyMode, Direction, EndpointChoice, PassHead, Refusal, RequestHead, ResponseHead
from gateway.picker.wire import read, write
from transport.control.proto import ext_proc_pb2 as pb

KEY = "x-gateway-destination-endpoint-subset"


def head(subset: Any = None) -> pb.ProcessingRequest:
    headers = [pb.ProxyHeader(key="a", value="text"), pb.ProxyHeader(key="b", raw_value=b"\xff")]
    message = pb.ProcessingRequest(
        request_headers=pb.HeadersMessage(headers=pb.ProxyHeaders(headers=headers)),
        protocol_config=pb.BodyModes(request_body_mode=4, response_body_mode=99),
    )
    if subset is not None:
        message.metadata_context.filter_metadata["envoy.lb.subset_hint"].update({KEY: subset})
    return message


def subset_of(hint: Any) -> tuple[str, ...] | None:
    found = read(head(hint))
    assert isinstance(found, RequestHead)
    return found.subset


def test_a_head_is_read_whatever_is_in_it() -> None:
    found = read(head())
    assert isinstance(found, RequestHead)
    assert (dict(found.headers), found.subset) == ({"a": "text", "b": "\N{REPLACEMENT CHARACTER}"}, None)
    assert (found.request_mode, found.response_mode) == (BodyMode.FULL_DUPLEX, BodyMode.NONE)


def test_a_subset_is_a_list_or_a_text_and_anything_else_allows_nothing() -> None:
    assert subset_of(["a:1", " b:2"]) == ("a:1", "b:2")
    assert subset_of("a:1,b:2") == ("a:1", "b:2")
    assert subset_of([]) == subset_of("") == subset_of(7) == subset_of({"a": "b"}) == ()


def test_the_server_that_answered_is_read() -> None:
    message = pb.ProcessingRequest(response_headers=pb.HeadersMessage())
    message.metadata_context.filter_metadata["envoy.lb"].update({"x-gateway-destination-endpoint-served": "a:1"})
    assert read(message) == ResponseHead(served="a:1")


def test_a_message_without_anything_is_an_error() -> None:
    with pytest.raises(ExchangeError):
        read(pb.ProcessingRequest())


def test_a_choice_overwrites_what_a_client_says() -> None:
    choice = EndpointChoice(("a:1", "b:2"))
    answer = pb.ProcessingResponse.FromString(write(PassHead(Direction.REQUEST, choice)))
    mutation = answer.request_headers.response.header_mutation
    (header,) = mutation.set_headers
    assert (header.header.raw_value, header.append_action) == (b"a:1,b:2", 2)
    assert sorted(mutation.remove_headers) == [
        "x-data-parallel-host-port",
        "x-encoder-hosts-ports",
        "x-kv-cache-source-host-port",
        "x-prefiller-host-port",
    ]


def test_a_refusal_says_when_to_come_again() -> None:
    answer = pb.ProcessingResponse.FromString(write(Refusal(status=503, text="none", reason="r", retry_after_s=0.2)))
    said = {each.header.key: each.header.raw_value for each in answer.immediate_response.headers.set_headers}
    assert (said["retry-after"], answer.immediate_response.details) == (b"1", "r")
