"""What API users meet: the OpenAI SDK against the whole system, and clear errors for what cannot be served."""

import io
import json
from typing import Any

import openai
import pytest

from tests.e2e.harness import Bench

pytestmark = pytest.mark.e2e


def sdk(bench: Bench) -> openai.AsyncOpenAI:
    identity = bench.system.gateway_identity()
    http = openai.DefaultAsyncHttpxClient(verify=identity.client_context() if identity is not None else True)
    return openai.AsyncOpenAI(base_url=f"{bench.system.api_url}/v1", api_key="unused", max_retries=0, http_client=http)


def test_the_sdk_chats_and_streams(bench: Bench) -> None:
    async def scenario() -> None:
        async with sdk(bench) as client:
            assert [model.id async for model in client.models.list()] == ["tiny"]
            question: Any = [{"role": "user", "content": "How far is it? " * 30}]
            whole = await client.chat.completions.create(model="tiny", messages=question, max_tokens=12, temperature=0)
            assert whole.usage is not None
            prompt_tokens = whole.usage.prompt_tokens

            async def finds_what_is_cached() -> bool:  # the gateway hears of blocks a moment after the answer
                stream = await client.chat.completions.create(
                    model="tiny",
                    messages=question,
                    max_tokens=12,
                    temperature=0,
                    stream=True,
                    stream_options={"include_usage": True},
                )
                text, usage = "", None
                async for chunk in stream:
                    text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
                    usage = chunk.usage or usage
                assert text == whole.choices[0].message.content
                assert usage is not None
                assert usage.prompt_tokens == prompt_tokens > 300
                assert usage.prompt_tokens_details is not None
                return usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens // 64 * 64

            await bench.wait_until(finds_what_is_cached, 60.0)

    bench.run(scenario())


def test_sampling_with_a_seed_repeats_itself(bench: Bench) -> None:
    async def scenario() -> None:
        async with sdk(bench) as client:
            answers = [
                await client.completions.create(
                    model="tiny",
                    prompt="Once upon a time",
                    max_tokens=20,
                    temperature=1.0,
                    top_p=0.9,
                    seed=seed,
                    logprobs=2,
                )
                for seed in (1, 1, 2)
            ]
        texts = [answer.choices[0].text for answer in answers]
        assert texts[0] == texts[1] != texts[2]
        assert answers[0].choices[0].logprobs is not None
        assert len(answers[0].choices[0].logprobs.token_logprobs or []) == answers[0].usage.completion_tokens  # type: ignore[union-attr]

    bench.run(scenario())


def test_headers_say_what_was_decided(bench: Bench) -> None:
    async def scenario() -> None:
        body = {"model": "tiny", "prompt": bench.prompt(400, seed=900), "max_tokens": 1}
        await bench.until_link_takes(400)
        async with bench.session.post(
            f"{bench.system.api_url}/v1/completions", json=body, headers={"x-request-id": "mine"}
        ) as answer:
            assert answer.headers["x-request-id"] == "mine"
            assert answer.headers["x-prfaas-route"] == "remote; node=far; uncached=400; reason=long"

    bench.run(scenario())


GOOD: dict[str, Any] = {"model": "tiny", "prompt": "hello", "max_tokens": 1}


@pytest.mark.dimensions(body=None, status=None, code=None, mentions=None)
@pytest.mark.parametrize(
    ("body", "status", "code", "mentions"),
    [
        (b"{not json", 400, None, "JSON"),
        (GOOD | {"model": "gpt-9"}, 404, "model_not_found", "gpt-9"),
        (GOOD | {"prompt": [5] * 40_000}, 400, "context_length_exceeded", "32768"),
        (GOOD | {"max_tokens": -1}, 400, None, "max_tokens"),
        (GOOD | {"temperature": "hot"}, 400, None, "temperature"),
        (GOOD | {"prompt": 7}, 400, None, "prompt"),
        (GOOD | {"prompt": []}, 400, None, "prompt"),
        (GOOD | {"prompt": [999_999]}, 400, None, "prompt"),
        ([1, 2], 400, None, ""),
        (GOOD | {"prompt": "x" * (10 << 20)}, 413, None, ""),
    ],
)
def test_bad_input_gets_a_clear_error_and_nothing_happens(
    bench: Bench, body: Any, status: int, code: str | None, mentions: str
) -> None:
    async def scenario() -> None:
        before = {name: (await bench.describe(name)).pool.pages_prefix for name in bench.system.nodes}
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with bench.session.post(
            f"{bench.system.api_url}/v1/completions",
            data=io.BytesIO(data),
            headers={"content-type": "application/json"},
        ) as answer:
            error = (await answer.json())["error"]
            assert (answer.status, set(error)) == (status, {"message", "type", "param", "code"})
        assert code is None or error["code"] == code
        assert mentions in error["message"] or mentions == error["param"]
        after = {name: (await bench.describe(name)).pool.pages_prefix for name in bench.system.nodes}
        assert after == before

    bench.run(scenario())


def test_metrics_and_health(bench: Bench) -> None:
    async def scenario() -> None:
        name = bench.name()
        await bench.until_link_takes(350)
        await bench.generate(bench.prompt(350, seed=901), 2, name=name)
        await bench.record(name)  # what came of it is counted by then

        async def told(url: str, line: str) -> bool:
            async with bench.session.get(f"{url}/metrics") as answer:
                return line in await answer.text()

        async with bench.session.get(f"{bench.node('far').metrics_url}/health") as answer:
            assert await answer.json() == {"id": "far", "state": "ready"}
        assert await told(bench.system.api_url, 'route="remote"')
        sent = 'prfaas_link_sent_bytes_total{cluster="east",link="west",peer='
        await bench.wait_until(lambda: told(bench.node("far").metrics_url, sent))

    bench.run(scenario())
