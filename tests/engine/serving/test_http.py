"""The HTTP surface on an emulated engine: shapes, streams, errors, shutdown."""

import asyncio
import io
import json

import openai
import pytest

from engine.byte_tokenizer import byte_text
from engine.emulated.emulated import emulated_tokens
from tests.engine.builders import random_tokens
from tests.engine.running import MODEL, PATIENCE_S, emulated, running, until

TOKENIZER = byte_text()


def serve(scenario, engine=None, **limits):
    async def main():
        async with running(engine or emulated(), **limits) as node:
            await scenario(node)

    asyncio.run(main())


def test_completion_stream_adds_up_to_the_whole_answer():
    async def scenario(node):
        prompt = random_tokens(70)
        _, whole = await node.post(prompt=prompt, max_tokens=40)
        chunks = await node.events(
            prompt=prompt, max_tokens=40, return_token_ids=True, stream_options={"include_usage": True}
        )
        choices = [chunk["choices"][0] for chunk in chunks[:-1]]
        assert "".join(choice["text"] for choice in choices) == whole["choices"][0]["text"]
        assert [token for choice in choices for token in choice["token_ids"]] == emulated_tokens(prompt, 40)
        assert [choice["finish_reason"] for choice in choices] == [None] * 39 + ["length"]
        assert chunks[-1]["choices"] == []
        assert chunks[-1]["usage"] == whole["usage"]
        assert whole["usage"] == {
            "prompt_tokens": 70,
            "completion_tokens": 40,
            "total_tokens": 110,
            "prompt_tokens_details": {"cached_tokens": 0},
        }

    serve(scenario)


def test_a_prompt_is_rendered_as_vllm_renders_it():
    async def scenario(node):
        prompt = random_tokens(70)
        status, told = await node.post("/v1/completions/render", prompt=prompt)
        assert (status, told) == (200, [{"token_ids": prompt}])
        text = "of rivers " * 2000  # too long for the event loop
        _, whole = await node.post(prompt=text[:200], max_tokens=1, return_token_ids=True)
        _, told = await node.post("/v1/completions/render", prompt=text[:200])
        assert told == [{"token_ids": whole["choices"][0]["prompt_token_ids"]}]
        _, told = await node.post("/v1/completions/render", prompt=text)
        assert len(told[0]["token_ids"]) > 10_000
        messages = [{"role": "user", "content": "of rivers"}]
        chat = {"messages": messages, "max_tokens": 1, "return_token_ids": True}
        _, told = await node.post("/v1/chat/completions/render", **chat)
        _, whole = await node.post("/v1/chat/completions", **chat)
        assert told == {"token_ids": whole["prompt_token_ids"]}
        status, told = await node.post("/v1/completions/render", prompt="a", model="another")
        assert (status, told["error"]["code"]) == (404, "model_not_found")

    serve(scenario)


def test_openai_client_understands_us():
    async def scenario(node):
        async with openai.AsyncOpenAI(base_url=node.url + "/v1", api_key="none", max_retries=0) as client:
            messages = [{"role": "user", "content": "Hello"}]
            answer = await client.chat.completions.create(
                model=MODEL, messages=messages, max_tokens=8, temperature=0, logprobs=True, top_logprobs=2
            )
            tokens = emulated_tokens(TOKENIZER.encode_rendered(TOKENIZER.render(messages)).tolist(), 8)
            assert answer.choices[0].message.content == TOKENIZER.decode(tokens)
            assert len(answer.choices[0].logprobs.content) == 8
            assert [len(entry.top_logprobs) for entry in answer.choices[0].logprobs.content] == [2] * 8
            assert answer.usage.prompt_tokens_details.cached_tokens == 0
            stream = await client.chat.completions.create(
                model=MODEL, messages=messages, max_tokens=8, temperature=0, stream=True
            )
            deltas = [chunk.choices[0].delta async for chunk in stream]
            assert deltas[0].role == "assistant"
            assert "".join(delta.content for delta in deltas) == answer.choices[0].message.content
            assert [model.id async for model in client.models.list()] == [MODEL]
            with pytest.raises(openai.NotFoundError, match="does not exist"):
                await client.completions.create(model="other", prompt="x")
            with pytest.raises(openai.BadRequestError) as caught:
                await client.completions.create(model=MODEL, prompt="x" * 9000)
            assert caught.value.code == "context_length_exceeded"

    serve(scenario)


def test_completion_logprobs():
    async def scenario(node):
        _, answer = await node.post(prompt="hello", max_tokens=5, logprobs=2)
        logprobs = answer["choices"][0]["logprobs"]
        assert [len(value) for value in logprobs.values()] == [5] * 4
        for text, logprob, top in zip(
            *(logprobs[k] for k in ("tokens", "token_logprobs", "top_logprobs")), strict=True
        ):
            assert logprob == max(top.values())
            assert text in top

    serve(scenario)


def test_sampling_is_reproducible_with_a_seed():
    async def scenario(node):
        prompt = random_tokens(10)
        runs = [await node.tokens(prompt, 20, temperature=1.0, seed=seed) for seed in (1, 1, 2)]
        assert runs[0] == runs[1] != runs[2]

    serve(scenario)


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code"),
    [
        ("POST", "/v1/completions", b"{nonsense", 400, "invalid_json"),
        ("POST", "/v1/completions", b'{"model":"x","prompt":"a"}', 404, "model_not_found"),
        ("POST", "/v1/completions", b'{"model":"tiny","prompt":"a","max_tokens":-3}', 400, None),
        ("POST", "/v1/chat/completions", b'{"model":"tiny","messages":[]}', 400, "invalid_value"),
        (
            "POST",
            "/v1/completions",
            b'{"model":"tiny","prompt":"a","guided_json":{"a":1}}',
            400,
            "unsupported_parameter",
        ),
        (
            "POST",
            "/v1/chat/completions",
            b'{"model":"tiny","messages":[{"role":"user","content":"x"}],"chat_template_kwargs":{"messages":[]}}',
            400,
            "unsupported",
        ),
        ("POST", "/v1/completions", b'{"model":"tiny","prompt":' + b"[" * 100_000, 400, "invalid_json"),
        ("POST", "/v1/completions", b'{"model":"tiny","prompt":"\\ud800"}', 400, "invalid_json"),
        ("POST", "/v1/completions", b'{"model":"tiny","prompt":"\xff"}', 400, "invalid_json"),
        ("POST", "/v1/completions", b" " * (11 << 20), 413, "request_too_large"),
        ("GET", "/v1/completions", None, 405, None),
        ("GET", "/v2/anything", None, 404, "not_found"),
        ("GET", "/v1/models/other", None, 404, "model_not_found"),
    ],
)
def test_errors_have_openais_shape(method, path, body, status, code):
    async def scenario(node):
        async with node.http.request(method, node.url + path, data=body and io.BytesIO(body)) as response:
            assert response.status == status
            error = (await response.json())["error"]
            assert set(error) == {"message", "type", "param", "code"}
            assert error["code"] == code
            assert response.headers["x-request-id"]
        assert node.service.active == 0

    serve(scenario)


def test_request_id_is_kept_if_it_is_one():
    async def scenario(node):
        for given, kept in (("abc-123", True), ("bad id\x01", False)):
            headers = {"x-request-id": given.replace("\x01", "?")}
            async with node.http.get(node.url + "/health", headers=headers) as response:
                assert (response.headers["x-request-id"] == given) is kept

    serve(scenario)


def test_more_requests_than_allowed_get_503():
    async def scenario(node):
        slow = [asyncio.create_task(node.tokens(random_tokens(5), 4000)) for _ in range(2)]  # for over a minute
        await until(lambda: node.service.active == 2)
        status, answer = await node.post(prompt="x")
        assert (status, answer["error"]["code"]) == (503, "queue_full")
        for task in slow:
            task.cancel()
        await asyncio.gather(*slow, return_exceptions=True)
        await until(lambda: not node.service.active)
        assert (await node.post(prompt="x"))[0] == 200

    serve(scenario, emulated(decode_step_s=0.02), max_requests=2)


def test_a_tenant_leaves_places_to_others_beyond_those_that_run_at_once():
    async def scenario(node):
        async def post(tenant):
            return await node.post(prompt=[1, 2], max_tokens=1, kv_transfer_params={"tenant": tenant})

        assert (await post("light"))[0] == 200
        more = {"max_tokens": 500, "kv_transfer_params": {"tenant": "heavy"}}
        heavy = [asyncio.create_task(node.post(prompt=[1, 2], **more)) for _ in range(70)]
        await until(lambda: node.service.active == 70)
        status, answer = await post("heavy")
        assert (status, answer["error"]["code"]) == (503, "queue_full")
        assert (await post("light"))[0] == 200
        assert (await post(""))[0] == 200
        for task in heavy:
            task.cancel()
        await asyncio.gather(*heavy, return_exceptions=True)

    serve(scenario, emulated(decode_step_s=0.02), max_requests=80)


def test_a_tenant_that_is_alone_may_have_all_places():
    async def scenario(node):
        more = {"max_tokens": 500, "kv_transfer_params": {"tenant": "heavy"}}
        heavy = [asyncio.create_task(node.post(prompt=[1, 2], **more)) for _ in range(80)]
        await until(lambda: node.service.active == 80)
        for task in heavy:
            task.cancel()
        await asyncio.gather(*heavy, return_exceptions=True)

    serve(scenario, emulated(decode_step_s=0.02), max_requests=80)


def test_as_many_requests_as_run_at_once_are_any_tenants():
    async def scenario(node):
        more = {"max_tokens": 500, "kv_transfer_params": {"tenant": "heavy"}}
        heavy = [asyncio.create_task(node.post(prompt=[1, 2], **more)) for _ in range(8)]
        await until(lambda: node.service.active == 8)
        for task in heavy:
            task.cancel()
        await asyncio.gather(*heavy, return_exceptions=True)

    serve(scenario, emulated(decode_step_s=0.02), max_requests=8)


def test_draining_finishes_streams_and_refuses_new_requests():
    async def scenario(node):
        prompt = random_tokens(5)
        stream = asyncio.create_task(node.events(prompt=prompt, max_tokens=100))
        await until(lambda: node.service.active)
        draining = asyncio.create_task(node.service.drain(PATIENCE_S))
        await until(lambda: node.service.draining)
        status, answer = await node.post(prompt="x")
        assert (status, answer["error"]["code"]) == (503, "draining")
        async with node.http.get(node.url + "/health") as response:
            assert (response.status, (await response.json())["status"]) == (503, "draining")
        assert len(await stream) == 100
        assert await draining

    serve(scenario, emulated(decode_step_s=0.02))


def test_failure_in_mid_stream_is_an_event():
    async def scenario(node):
        engine, calls = node.service.engine, []
        decode = engine.decode

        def failing(sequence, token):
            calls.append(token)
            if len(calls) > 3:
                raise ValueError("broken weights")
            return decode(sequence, token)

        engine.decode = failing
        body = {"model": MODEL, "prompt": "x", "stream": True, "max_tokens": 10}
        async with node.http.post(node.url + "/v1/completions", json=body) as response:
            text = await response.text()
        assert '"error"' in text
        assert text.endswith("data: [DONE]\n\n")
        assert (await node.post(prompt="x"))[0] == 500

    serve(scenario)


def test_metrics_count_what_happened():
    async def scenario(node):
        await node.tokens(random_tokens(10), 7)
        async with node.http.get(node.url + "/metrics") as response:
            lines = (await response.text()).splitlines()
        values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        assert values["prfaas_engine_generation_tokens_total"] == "7.0"
        assert values['prfaas_engine_prompt_tokens_total{source="computed"}'] == "10.0"
        assert values['prfaas_engine_requests_total{kind="generate",outcome="length"}'] == "1.0"
        assert values["prfaas_engine_time_to_first_token_seconds_count"] == "1.0"

    serve(scenario)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 1.0, "seed": 5},
        {"presence_penalty": 2.0, "frequency_penalty": 1.5, "min_tokens": 9},
        {"logprobs": 2},
    ],
)
def test_a_stream_goes_on_at_every_token_as_it_would_have(options):
    """Text that was held back, half a character or the beginning of a stop string, comes with what follows the seam."""

    async def scenario(node):
        prompt = random_tokens(40)
        asked = {"prompt": prompt, "max_tokens": 24, "stream_options": {"include_usage": True}} | options
        told = {"kv_transfer_params": {"resumable": True}}
        text = (await node.post(**asked | {"stream_options": None}))[1]["choices"][0]["text"]
        stops = [text[12:18], "no such text"]
        for stop in (None, stops):
            whole = _undated(await node.events(**asked, **told, stop=stop))
            tokens = [chunk["choices"][0]["token_ids"][0] for chunk in whole[:-1]]
            for count in range(1, len(tokens)):
                answered = {"kv_transfer_params": {"resumable": True, "answered": tokens[:count]}}
                rest = _undated(await node.events(**asked, **answered, stop=stop))
                assert rest == whole[count:]

    serve(scenario)


def test_a_chat_goes_on_without_its_role_and_says_after_how_many_tokens():
    async def scenario(node):
        body = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8, "temperature": 0}
        body |= {"stream": True, "kv_transfer_params": {"resumable": True}}
        whole = await _chat(node, body)
        answered = [chunk["choices"][0]["token_ids"][0] for chunk in whole[1][:3]]
        rest = await _chat(node, body | {"kv_transfer_params": {"answered": answered}})
        assert (whole[0], rest[0]) == (None, "3")
        assert [c["choices"][0]["delta"] for c in rest[1]] == [c["choices"][0]["delta"] for c in whole[1][3:]]

    serve(scenario)


@pytest.mark.parametrize(
    ("answered", "fields", "message"),
    [
        ([1 << 31], {"stream": True}, "token ids must be in"),
        ([5], {"stream": False}, "only a stream is continued"),
        ([5] * 8, {"stream": True}, "the answer is complete"),
    ],
)
def test_what_cannot_be_continued_is_refused(answered, fields, message):
    async def scenario(node):
        params = {"answered": answered}
        status, answer = await node.post(prompt=[5, 6], max_tokens=8, kv_transfer_params=params, **fields)
        assert status == 400
        assert message in answer["error"]["message"]

    serve(scenario)


def _undated(chunks):
    return [{name: value for name, value in chunk.items() if name not in ("id", "created")} for chunk in chunks]


async def _chat(node, body):
    async with node.http.post(node.url + "/v1/chat/completions", json=body) as answer:
        events = (await answer.text()).split("\n\n")[:-2]
        return answer.headers.get("x-prfaas-answered"), [json.loads(event[len("data: ") :]) for event in events]
