"""Envoy's external processing, as bytes and as the values of `exchange`. Values a proxy does not need are left out."""

from collections.abc import Mapping
from functools import cache
from math import ceil
from typing import Final

import msgspec
from google.protobuf.struct_pb2 import Struct

from gateway.errors import ExchangeError
from gateway.picker.exchange import (
    BodyMode,
    BodyPart,
    Direction,
    EndpointChoice,
    GiveBack,
    PassHead,
    PassPart,
    PassTrailers,
    ProxyAnswer,
    ProxyMessage,
    Refusal,
    RequestHead,
    ResponseHead,
    Trailers,
)
from gateway.picker.headers import (
    DESTINATION,
    DROPPED,
    NAMESPACE,
    PREFILLER,
    SERVED,
    SIDECARS,
    SUBSET,
    SUBSET_NAMESPACE,
)
from transport.control.proto import ext_proc_pb2 as pb

OVERWRITE: Final = 2
MAX_SUBSET: Final = 4096
MODES: Final = {mode.value: mode for mode in BodyMode}
ERROR_TYPES: Final = {429: "rate_limit_error", 503: "service_unavailable_error"}


def read(message: pb.ProcessingRequest) -> ProxyMessage:
    """What a proxy says. Raises ExchangeError for what says nothing."""
    match message.WhichOneof("request"):
        case "request_body":
            return BodyPart(Direction.REQUEST, message.request_body.body, message.request_body.end_of_stream)
        case "response_body":
            return BodyPart(Direction.RESPONSE, message.response_body.body, message.response_body.end_of_stream)
        case "request_headers":
            modes = message.protocol_config
            return RequestHead(
                headers=_headers(message.request_headers.headers),
                has_ended=message.request_headers.end_of_stream,
                request_mode=MODES.get(modes.request_body_mode, BodyMode.NONE),
                response_mode=MODES.get(modes.response_body_mode, BodyMode.NONE),
                subset=_subset(message.metadata_context.filter_metadata),
            )
        case "response_headers":
            return ResponseHead(served=_served(message.metadata_context.filter_metadata))
        case "request_trailers":
            return Trailers(Direction.REQUEST)
        case "response_trailers":
            return Trailers(Direction.RESPONSE)
    raise ExchangeError("a message without a request")


def _headers(found: pb.ProxyHeaders) -> dict[str, str]:
    """Of headers that come twice, the first: no header that we read may."""
    headers: dict[str, str] = {}
    for each in found.headers:
        headers.setdefault(each.key, each.raw_value.decode("utf-8", "replace") or each.value)
    return headers


def _subset(metadata: Mapping[str, Struct]) -> tuple[str, ...] | None:
    """A list, or a text with commas. A hint that is no such thing allows no endpoint."""
    if SUBSET_NAMESPACE not in metadata:
        return None
    fields = metadata[SUBSET_NAMESPACE].fields
    if SUBSET not in fields:
        return None
    value = fields[SUBSET]
    if value.WhichOneof("kind") == "list_value":
        texts = [each.string_value for each in value.list_value.values[:MAX_SUBSET]]
    else:
        texts = value.string_value.split(",")
    return tuple(text.strip() for text in texts if text.strip())


def _served(metadata: Mapping[str, Struct]) -> str:
    if NAMESPACE not in metadata:
        return ""
    fields = metadata[NAMESPACE].fields
    return fields[SERVED].string_value if SERVED in fields else ""


def write(answer: ProxyAnswer) -> bytes:
    """What a proxy is answered."""
    match answer:
        case GiveBack():
            response = pb.ProcessingResponse()
            streamed = _body(response, answer.direction).response.body_mutation.streamed_response
            streamed.body, streamed.end_of_stream = answer.data, answer.has_ended
            return response.SerializeToString()
        case PassHead(direction, None):
            return _passed_head(direction)
        case PassPart(direction, None):
            return _passed_part(direction)
        case PassTrailers(direction):
            return _passed_trailers(direction)
        case PassHead(direction, choice) if choice is not None:
            response = pb.ProcessingResponse()
            head = response.request_headers if direction is Direction.REQUEST else response.response_headers
            _choose(response, head.response, choice)
            return response.SerializeToString()
        case PassPart(direction, choice) if choice is not None:
            response = pb.ProcessingResponse()
            _choose(response, _body(response, direction).response, choice)
            return response.SerializeToString()
        case Refusal():
            return _refused(answer)
    raise AssertionError(answer)


@cache
def _passed_head(direction: Direction) -> bytes:
    response = pb.ProcessingResponse()
    (response.request_headers if direction is Direction.REQUEST else response.response_headers).SetInParent()
    return response.SerializeToString()


@cache
def _passed_part(direction: Direction) -> bytes:
    response = pb.ProcessingResponse()
    _body(response, direction).SetInParent()
    return response.SerializeToString()


@cache
def _passed_trailers(direction: Direction) -> bytes:
    response = pb.ProcessingResponse()
    (response.request_trailers if direction is Direction.REQUEST else response.response_trailers).SetInParent()
    return response.SerializeToString()


def _body(response: pb.ProcessingResponse, direction: Direction) -> pb.BodyAnswer:
    return response.request_body if direction is Direction.REQUEST else response.response_body


def _choose(response: pb.ProcessingResponse, common: pb.CommonAnswer, choice: EndpointChoice) -> None:
    """The destination in a header and in metadata: proxies read one or the other. What a client says of it is overwritten."""
    endpoints = ",".join(choice.endpoints)
    common.clear_route_cache = True
    _set(common.header_mutation, DESTINATION, endpoints)
    if choice.prefiller:
        _set(common.header_mutation, PREFILLER, choice.prefiller)
    else:
        common.header_mutation.remove_headers.append(PREFILLER)
    common.header_mutation.remove_headers.extend(SIDECARS)
    response.dynamic_metadata.update({NAMESPACE: {DESTINATION: endpoints}})


def _set(mutation: pb.HeaderMutation, key: str, value: str) -> None:
    mutation.set_headers.add(header=pb.ProxyHeader(key=key, raw_value=value.encode()), append_action=OVERWRITE)


def _refused(refusal: Refusal) -> bytes:
    """An error in OpenAI's shape."""
    response = pb.ProcessingResponse()
    immediate = response.immediate_response
    immediate.status.code = refusal.status
    kind = ERROR_TYPES.get(refusal.status, "invalid_request_error")
    error = {"message": refusal.text, "type": kind, "param": None, "code": refusal.reason or None}
    immediate.body = msgspec.json.encode({"error": error})
    immediate.details = refusal.reason or "refused"
    _set(immediate.headers, "content-type", "application/json")
    if refusal.reason:
        _set(immediate.headers, DROPPED, refusal.reason)
    if refusal.retry_after_s:
        _set(immediate.headers, "retry-after", str(ceil(refusal.retry_after_s)))
    return response.SerializeToString()
