"""What is asked of a model and is no generation."""

import asyncio
from typing import Any

from gateway.api.openai import Endpoint
from gateway.prompt.tokenize import MAX_BODY_BYTES
from hybrid_cache.layout.layout import ModelLayout
from planner.decisions.views import Role
from tests.gateway.layouts import LAYOUT
from tests.gateway.memory.pipeline import Pipelined, on_memory_loop, pipeline
from tests.gateway.worlds import until
from transport.control.proto import node_pb2 as pb

TEXT = "hello there the quick brown fox"
CHAT = [{"role": "user", "content": TEXT}]


async def asked(each: Pipelined, path: str, **body: Any) -> tuple[int, Any]:
    async with each.http.post(path, json=body) as response:
        return response.status, await response.json()


@on_memory_loop
async def test_tokens_are_those_that_a_request_is_read_as_and_spell_its_text() -> None:
    async with pipeline() as w:
        for path in ("/tokenize", "/v1/tokenize"):
            status, told = await asked(w, path, prompt=TEXT)
            assert (status, told["count"], told["max_model_len"]) == (200, len(told["tokens"]), 4096)
            assert told["token_strs"] is None
        for path in ("/detokenize", "/v1/detokenize"):
            assert await asked(w, path, tokens=told["tokens"]) == (200, {"prompt": TEXT})
        _, spelled = await asked(w, "/tokenize", model="scripted", messages=CHAT, return_token_strs=True)
        assert TEXT in "".join(spelled["token_strs"])
        await w.complete(TEXT)
        async with w.http.post(Endpoint.CHAT, json={"model": "scripted", "messages": CHAT}) as response:
            assert response.status == 200
        totals = [record["total"] for record in await w.records()]
        assert totals == [told["count"], spelled["count"]]


@on_memory_loop
async def test_mistakes_are_named_and_leave_no_place_taken() -> None:
    async with pipeline() as w:
        cases: list[tuple[str, dict[str, Any], int, str | None]] = [
            ("/tokenize", {}, 400, "prompt"),
            ("/tokenize", {"prompt": 5}, 400, "prompt"),
            ("/tokenize", {"messages": []}, 400, "messages"),
            ("/tokenize", {"prompt": "x", "model": "other"}, 404, "model"),
            ("/tokenize", {"messages": CHAT, "chat_template": "x"}, 400, "chat_template"),
            ("/tokenize", {"prompt": "x" * MAX_BODY_BYTES}, 413, None),
            ("/detokenize", {"tokens": "x"}, 400, "tokens"),
            ("/detokenize", {"tokens": [1, -1]}, 400, "tokens[1]"),
            ("/detokenize", {"tokens": [2**31]}, 400, "tokens"),
            ("/detokenize", {"tokens": [1], "model": "other"}, 404, "model"),
            ("/v1/embeddings", {"input": "x", "model": "other"}, 404, "model"),
            ("/v1/embeddings", {"input": "x", "kv_transfer_params": {}}, 400, "kv_transfer_params"),
        ]
        for path, body, status, param in cases:
            found, told = await asked(w, path, **body)
            assert (found, told["error"]["param"]) == (status, param), (path, body, told)
        assert not w.admission.in_flight


@on_memory_loop
async def test_what_engines_of_other_kinds_serve_is_passed_on_and_else_it_is_said_why_not() -> None:
    async with pipeline(decode=1, served_model="alias") as w:
        status, told = await asked(w, "/v1/embeddings", model="alias", input="x", dimensions=3)
        assert (status, told["data"]) == (200, [{"embedding": [0.5]}])
        assert w.nodes.decode[0].bodies == [{"model": "scripted", "input": "x", "dimensions": 3}]
        for path in ("/rerank", "/v1/rerank", "/v1/score"):
            status, told = await asked(w, path, query="x", documents=["y"])
            assert (status, told["error"]["code"]) == (404, "endpoint_not_served"), path
            assert "no model of that kind" in told["error"]["message"]
        await w.nodes.decode[0].stop_engine()
        status, told = await asked(w, "/v1/embeddings", input="x")
        assert (status, told["error"]["code"]) == (503, "engine_failed")
        assert not w.admission.in_flight


@on_memory_loop
async def test_no_node_of_another_model_is_asked() -> None:
    async with pipeline(remote=0, local=0, decode=2) as w:
        other, node = w.nodes.decode
        other.layout = ModelLayout("other", "float32", 16, LAYOUT.groups)
        other.become(pb.NODE_STATE_READY)
        clusters = w.clusters
        await until(lambda: [each.agent.address for each in clusters.ready(Role.DECODE)] == [node.agent_address])
        assert (await asked(w, "/v1/embeddings", input="x"))[0] == 200
        assert [len(each.bodies) for each in (other, node)] == [0, 1]


@on_memory_loop
async def test_a_place_is_taken_for_it_as_for_any_request() -> None:
    async with pipeline(decode=1, max_in_flight=1) as w:
        gate = w.nodes.decode[0].script.decode_gate = asyncio.Event()
        waiting = asyncio.create_task(w.complete(TEXT))
        await until(lambda: w.admission.in_flight)
        status, told = await asked(w, "/tokenize", prompt=TEXT)
        assert (status, told["error"]["type"]) == (429, "rate_limit_error")
        gate.set()
        assert (await waiting).status == 200
