"""What engines do nothing about is refused before anybody makes room for it."""

import json

import pytest
from msgspec import Raw

from gateway.api.openai import Endpoint
from gateway.api.unsupported import UnsupportedFields
from gateway.errors import BadRequest
from tests.gateway.memory.pipeline import on_memory_loop, pipeline
from tests.gateway.worlds import until
from transport.control.proto import node_pb2 as pb

SAID = json.dumps({"tools": [None, []], "response_format": [None, {"type": "text"}], "tool_choice": [None, "none"]})
TOOLS = [{"type": "function", "function": {"name": "look"}}]


@pytest.mark.parametrize(
    ("raw", "is_done"),
    [
        (b'{"tools": null, "tool_choice": "none", "other": 5}', True),
        (b'{"tools": [ ], "response_format": { "type" : "text", "json_schema": null}}', True),
        (b'{"tools": [1]}', False),
        (b'{"response_format": {"type": "json_object"}}', False),
        (b'{"tool_choice": "%b"}' % (b"x" * 500), False),
    ],
)
def test_a_value_that_asks_for_nothing_is_harmless(raw: bytes, is_done: bool) -> None:
    fields = {name: Raw(json.dumps(value).encode()) for name, value in json.loads(raw).items()}
    if is_done:
        UnsupportedFields.of([SAID]).check(fields)
        return
    with pytest.raises(BadRequest, match="not supported by the engines") as refusal:
        UnsupportedFields.of([SAID]).check(fields)
    assert (refusal.value.param, refusal.value.code) == (next(iter(fields)), "unsupported_parameter")


def test_what_one_engine_does_is_done() -> None:
    for more in ("", "{", '{"tool_choice": [null]}'):
        UnsupportedFields.of([SAID, more]).check({"tools": Raw(b"[1]")})
    with pytest.raises(BadRequest):
        UnsupportedFields.of([SAID, SAID]).check({"tools": Raw(b"[1]")})
    UnsupportedFields.of([]).check({"tools": Raw(b"[1]")})


@on_memory_loop
async def test_a_refusal_costs_no_reservation() -> None:
    async with pipeline() as w:
        for node in w.nodes.nodes:
            node.not_done_json = SAID
            node.become(pb.NODE_STATE_READY)
        await until(lambda: w.clusters.served and w.clusters.served.not_done.harmless)
        chat = {"model": "scripted", "messages": [{"role": "user", "content": "the quick brown fox " * 60}]}
        async with w.http.post(Endpoint.CHAT, json=chat | {"tools": TOOLS}) as response:
            error = (await response.json())["error"]
        assert (response.status, error["param"], error["code"]) == (400, "tools", "unsupported_parameter")
        assert all(not node.bodies and not node.open_reservations and not node.aborts for node in w.nodes.nodes)
        async with w.http.post(Endpoint.CHAT, json=chat | {"tool_choice": "none"}) as response:
            assert response.status == 200
        await w.settled()
