"""The OpenAPI document says what the gateway serves; whatever bytes come, the answer has a shape of the API's."""

import asyncio
import json
import re
from typing import Any

import msgspec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.api.openai import OPTIONS, Endpoint
from gateway.auth.keyring import digest_of
from gateway.config.tenants import TenantConfig
from gateway.server.openapi import PATH, document
from tests.gateway.memory.pipeline import on_memory_loop, pipeline
from tests.gateway.worlds import World, on_loop, world

CASES = 60  # of each fuzzed thing


def refs_in(value: Any) -> set[str]:
    """The components that are referred to."""
    return set(re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(value)))


def test_every_field_that_is_checked_is_described_and_every_reference_leads_somewhere() -> None:
    told = json.loads(document(("m",)))
    schemas = told["components"]["schemas"]
    assert refs_in(told) <= set(schemas)
    for endpoint, options in OPTIONS.items():
        schema = schemas[options.__name__]
        assert set(schema["properties"]) > set(options.__struct_fields__)
        assert set(schema["required"]) == {"model", endpoint.prompt_field}
        assert schema["properties"]["model"] == {"enum": ["m"]}
    assert "enum" not in json.loads(document())["components"]["schemas"]["ChatOptions"]["properties"]["model"]


@on_memory_loop
async def test_what_is_served_to_clients_is_described_and_what_is_described_is_served() -> None:
    async with pipeline() as w:
        async with w.http.get(PATH) as response:
            told = await response.json()
        assert told["components"]["schemas"]["ChatOptions"]["properties"]["model"] == {"enum": ["scripted"]}
        for path, operations in told["paths"].items():
            for method in operations:
                async with w.http.request(method, path.replace("{model}", "scripted"), data=b"{}") as answer:
                    assert answer.status != 405, path
                    await answer.read()
        assert set(Endpoint) <= set(told["paths"])


@on_memory_loop
async def test_the_models_name_is_for_those_who_are_served() -> None:
    async with pipeline(tenants={"acme": TenantConfig(keys=(digest_of("sk-acme"),))}) as w:
        for headers, is_named in (({}, False), ({"x-api-key": "sk-acme"}, True), ({}, False)):
            async with w.http.get(PATH, headers=headers) as response:
                assert response.status == 200
                assert (
                    "enum" in (await response.json())["components"]["schemas"]["ChatOptions"]["properties"]["model"]
                ) == is_named


async def post(each: World, path: str, data: bytes, headers: dict[str, str]) -> tuple[int, bytes, str]:
    async with each.http.post(path, data=data, headers=headers) as response:
        return response.status, await response.read(), response.headers["x-request-id"]


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda each: st.lists(each, max_size=3) | st.dictionaries(st.text(max_size=8), each, max_size=3),
    max_leaves=6,
)
FIELDS = sorted(
    {
        "messages", "prompt", "input", "tools", "system", "stream", "max_tokens", "n", "stop", "text", "tool_choice", "thinking",
        "instructions", "response_format", "stream_options", "logprobs", "metadata", "kv_transfer_params", "tokens",
    }
)  # fmt: skip
WHOLE = {"model": "scripted", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
BASES = [WHOLE, {"model": "scripted", "input": "hi"}, {"model": "scripted", "prompt": "hi"}, {}]
BODIES = st.builds(
    dict.__or__, st.sampled_from(BASES), st.dictionaries(st.sampled_from(FIELDS), JSON_VALUES, max_size=2)
)
PATHS = [*Endpoint, "/tokenize", "/detokenize", "/v1/embeddings"]


@on_loop
async def test_whatever_comes_is_answered_in_a_shape_of_the_apis() -> None:
    async with world() as w:
        loop = asyncio.get_running_loop()

        @settings(max_examples=CASES, deadline=None, suppress_health_check=list(HealthCheck), database=None)
        @given(st.sampled_from(PATHS), BODIES.map(msgspec.json.encode) | st.binary(max_size=64), st.text(max_size=200))
        def answered(path: str, body: bytes, request_id: str) -> None:
            said = request_id.encode("ascii", "ignore").decode()
            said = re.sub(r"[\x00-\x1f\x7f]", "", said).strip()
            headers = {"Content-Type": "application/json", "x-request-id": said}
            asking = asyncio.run_coroutine_threadsafe(post(w, path, body, headers), loop)
            status, told, echoed = asking.result(60)
            assert re.fullmatch(r"[A-Za-z0-9._:/+=@-]{1,128}", echoed)
            assert status < 500, (path, body, told)
            if status >= 400:
                assert {"message", "type", "param", "code"} <= set(json.loads(told)["error"])

        await asyncio.to_thread(answered)
        await w.settled()
