"""Real vLLM API servers behind our gateway: a PrfaaS node that prefills and a PD node that decodes, with a slow link between.

Started once for all tests. What one vLLM server alone would answer comes from the decode node's server, asked directly and
with a cache salt of its own: nothing cached fits, and the connector leaves salted requests alone.
"""

import asyncio
import json
import os
import shutil
import signal
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from gateway.api.usage import recompute_reason
from gateway.cluster.served_model import salt_of
from hybrid_cache.cache.events import Medium
from hybrid_cache.hashing.block_hash import block_hashes
from hybrid_cache.layout.layout import ModelLayout
from prfaas.demo.client import complete
from tests.e2e.harness import Bench
from tests.transport.path.ports import free_port
from tests.transport.proxy import Proxy
from tests.vllm.cases import build
from tests.vllm.chats import HISTORIES, TOOLS
from tests.vllm.servers.serving import (
    CHUNK,
    LINK_BYTES_PER_S,
    TEMPLATE,
    ask,
    document,
    heard,
    is_sending,
    leg_whose_push_fails,
)

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200), pytest.mark.dimensions(start="servers")]

ARCH = "gemma3"  # sliding windows and full attention. (LFM2, scaled as it is, changes its mind with the batch that it runs in.)


@pytest.fixture(scope="module")
def relay() -> Iterator[Proxy]:
    with Proxy(f"127.0.0.1:{free_port()}", LINK_BYTES_PER_S) as running:
        yield running


@pytest.fixture(scope="module")
def bench(models: Path, relay: Proxy, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    model = tmp_path_factory.mktemp("model") / ARCH
    shutil.copytree(build(ARCH, models), model)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    with Bench(document(str(model), relay), model, tmp_path_factory.mktemp("serving")) as running:
        yield running


@pytest.fixture(autouse=True)
def _nothing_is_left(bench: Bench) -> Iterator[None]:
    yield
    bench.run(bench.wait_idle())


def one_server(bench: Bench) -> str:
    return bench.node("decode0").engine_url


async def alone(bench: Bench, prompt: Sequence[int], max_tokens: int = 16) -> list[int]:
    """What one vLLM server gives for a prompt that nothing is cached of."""
    body = {"model": "tiny", "prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    done = await complete(bench.session, one_server(bench), body | {"cache_salt": uuid.uuid4().hex}, bench.name())
    return done.token_ids


@pytest.mark.dimensions(num_tokens=None)  # any of them will do
@pytest.mark.parametrize("num_tokens", [2, 129, 300, 301, 384, 385, 511, 513, 1025, 2000])
def test_tokens_equal_those_of_one_server_alone(bench: Bench, num_tokens: int) -> None:
    async def scenario() -> None:
        prompt, name = bench.prompt(num_tokens, seed=num_tokens), bench.name()
        done = await bench.generate(prompt, name=name)
        record = await bench.record(name)
        expected = await alone(bench, prompt)
        assert done.token_ids == expected
        assert len(set(expected)) > 3
        assert (record["route"], record["cached"], record["fallbacks"]) == ("remote", 0, [])
        assert done.usage["prompt_tokens"] == num_tokens

    bench.run(scenario())


def test_a_namespace_travels_and_is_nobody_elses(bench: Bench) -> None:
    """A client's cache_salt names blocks in our pages and in vLLM's own cache alike."""

    async def scenario() -> None:
        prompt = bench.prompt(1100, seed=41)
        expected = await alone(bench, prompt)
        seen = []
        for cache_salt in ("mine", "mine", "theirs", None):
            name = bench.name()
            options = {} if cache_salt is None else {"cache_salt": cache_salt}
            done = await bench.generate(prompt, name=name, **options)
            assert done.token_ids == expected
            record = await bench.record(name)
            assert record["fallbacks"] == []
            assert record["cached"] or record["bytes"]
            seen.append(record["cached"] > 0)
        assert seen == [False, True, False, False]

    bench.run(scenario())


def test_a_prefix_is_computed_once(bench: Bench) -> None:
    async def scenario() -> None:
        prompt = bench.prompt(1500, seed=7)
        first = await bench.generate(prompt)
        name = bench.name()
        longer = prompt + bench.prompt(400, seed=8)
        done = await bench.generate(longer, name=name)
        record = await bench.record(name)
        assert first.cached_tokens == 0
        assert done.cached_tokens >= 1024
        assert (record["cached"], record["fallbacks"]) == (done.cached_tokens, [])
        assert done.token_ids == await alone(bench, longer)

    bench.run(scenario())


def test_bytes_leave_while_prefill_runs(bench: Bench) -> None:
    async def scenario() -> None:
        name = bench.name()
        await bench.generate(bench.prompt(9 * CHUNK + 1, seed=77), 1, name=name)
        record = await bench.record(name)
        assert (record["route"], record["link"], record["fallbacks"]) == ("remote", "tcp", [])
        assert record["overlap"] > 0.2

    bench.run(scenario())


def test_prompt_logprobs_are_those_of_one_server_alone(bench: Bench) -> None:
    async def scenario() -> None:
        prompt, name = bench.prompt(700, seed=91), bench.name()
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 4, "temperature": 0, "prompt_logprobs": 0}
        answers = []
        for url, headers in ((bench.system.api_url, {"x-request-id": name}), (one_server(bench), {})):
            async with bench.session.post(f"{url}/v1/completions", json=body, headers=headers) as answer:
                (choice,) = (await answer.json())["choices"]
                answers.append((choice["text"], choice["prompt_logprobs"]))
        assert answers[0] == answers[1]
        assert len(answers[0][1]) == len(prompt)
        record = await bench.record(name)
        assert (record["reason"], record["prefill_node"], record["fallbacks"]) == ("unshared", "decode0", [])

    bench.run(scenario())


def test_six_at_once(bench: Bench) -> None:
    async def scenario() -> None:
        prompts = [bench.prompt(length, seed=50 + length) for length in (40, 250, 320, 640, 900, 1300)]
        done = await asyncio.gather(*(bench.generate(prompt, 24) for prompt in prompts))
        for prompt, completion in zip(prompts, done, strict=True):
            assert completion.token_ids == await alone(bench, prompt, 24)

    bench.run(scenario())


def test_prompts_of_a_list_and_n_answers_are_what_one_server_says(bench: Bench) -> None:
    async def scenario() -> None:
        prompts, name = [bench.prompt(length, seed=600 + length) for length in (40, 700)], bench.name()
        body = {"model": "tiny", "prompt": prompts, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        answers = []
        # vLLM alone gives one greedy answer and no more: two of ours are the same.
        for url, fields in ((bench.system.api_url, body | {"n": 2}), (one_server(bench), body)):
            async with bench.session.post(
                f"{url}/v1/completions", json=fields, headers={"x-request-id": name}
            ) as answer:
                assert answer.status == 200, await answer.text()
                answers.append(await answer.json())
        ours, alone = ([(choice["index"], choice["text"]) for choice in each["choices"]] for each in answers)
        assert ours == [(2 * index + again, text) for index, text in alone for again in (0, 1)]
        assert answers[0]["usage"]["completion_tokens"] == 4 * 8
        assert answers[0]["usage"]["prompt_tokens"] == answers[1]["usage"]["prompt_tokens"]

    bench.run(scenario())


def test_messages_and_responses_say_what_a_chat_says(bench: Bench) -> None:
    async def scenario() -> None:
        text = " ".join(f"{number}" for number in range(400))
        asked = {"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": 9}
        response = {"model": "tiny", "input": text, "max_output_tokens": 9}
        told = {}
        for path, body in (("chat/completions", asked), ("messages", asked), ("responses", response)):
            url = f"{bench.system.api_url}/v1/{path}"
            async with bench.session.post(url, json=body | {"temperature": 0, "ignore_eos": True}) as answer:
                told[path] = await answer.json()
                assert answer.status == 200, told[path]
            async with bench.session.post(
                url, json=body | {"temperature": 0, "ignore_eos": True, "stream": True}
            ) as answer:
                assert answer.status == 200
                events = await answer.text()
            assert "event: error" not in events
            assert '"error":{' not in events
        chat = told["chat/completions"]
        assert told["messages"]["content"][0]["text"] == chat["choices"][0]["message"]["content"]
        assert told["messages"]["stop_reason"] == "max_tokens"
        assert told["responses"]["output"][0]["content"][0]["text"] == chat["choices"][0]["message"]["content"]
        assert told["responses"]["status"] == "incomplete"
        # The same prompt in each dialect: what the chat has computed is there.
        usage = told["messages"]["usage"]
        assert usage["input_tokens"] + usage["cache_read_input_tokens"] == chat["usage"]["prompt_tokens"]
        assert usage["cache_read_input_tokens"] > 100
        assert told["responses"]["usage"]["input_tokens_details"]["cached_tokens"] > 100

    bench.run(scenario())


def test_what_a_model_is_not_for_is_said(bench: Bench) -> None:
    async def scenario() -> None:
        url = f"{bench.system.api_url}/v1/embeddings"
        async with bench.session.post(url, json={"model": "tiny", "input": "x"}) as answer:
            assert 400 <= answer.status < 500
            assert (await answer.json())["error"]["message"]

    bench.run(scenario())


# What agents send; the gateway used to read each of these otherwise.
AGENTS_SEND: dict[str, dict[str, Any]] = {
    "a bare tool": {"tools": TOOLS["bare"], "tool_choice": "none"},
    "a tool in another order": {"tools": TOOLS["another order"], "tool_choice": "none"},
    "compact arguments": {"messages": HISTORIES["compact arguments"]},
    "developer": {"messages": HISTORIES["developer"]},
    "developer before system": {"messages": HISTORIES["developer before system"]},
    "parts": {"messages": HISTORIES["parts everywhere"]},
    "reasoning": {"messages": HISTORIES["reasoning and calls"], "reasoning_effort": "none"},
    "cut": {"truncate_prompt_tokens": 500},
    "cut on the right": {"truncate_prompt_tokens": 500, "truncation_side": "right"},
}


async def chat(bench: Bench, name: str, fields: dict[str, Any]) -> tuple[Any, Any]:
    """A long chat's answers: by the gateway, and by one server that has nothing of it cached."""
    long = {"role": "user", "content": f"{name}: " + "the rain in the plain " * 30}
    body = {"model": "tiny", "max_tokens": 8, "temperature": 0, "ignore_eos": True} | fields
    body["messages"] = [*fields.get("messages", []), long]
    told = []
    for url, extra in ((bench.system.api_url, {}), (one_server(bench), {"cache_salt": uuid.uuid4().hex})):
        headers = {"x-request-id": name}
        async with bench.session.post(f"{url}/v1/chat/completions", json=body | extra, headers=headers) as answer:
            told.append(await answer.json())
            assert answer.status == 200, told[-1]
    ours, alone = ((each["choices"][0]["message"], each["usage"]["prompt_tokens"]) for each in told)
    return ours, alone


def test_what_agents_send_is_prefilled_remotely(bench: Bench) -> None:
    async def scenario() -> None:
        for what, fields in AGENTS_SEND.items():
            name = bench.name()
            ours, alone = await chat(bench, name, fields)
            assert ours == alone, what
            record = await bench.record(name)
            assert (record["route"], record["fallbacks"], record["total"]) == ("remote", [], ours[1]), what
            assert record["bytes"], what

    bench.run(scenario())


def test_a_chat_that_vllm_reads_otherwise_is_read_by_vllm_the_next_time(bench: Bench) -> None:
    async def scenario() -> None:
        seen = []
        for number in range(3):
            name = bench.name()
            said = {"messages": [{"role": "critic", "content": f"I saw {number}."}]}
            ours, alone = await chat(bench, name, said)
            assert ours == alone
            record = await bench.record(name)
            seen.append((record["fallbacks"], record["total"] == ours[1]))
        told, is_right = seen[0]  # the decode node's engine may see it, too, and before
        assert {"prefill_digest_mismatch", "recompute_no_prefill"} <= {*told}
        assert not is_right
        assert seen[1:] == [([], True)] * 2

    bench.run(scenario())


async def events_of(bench: Bench, path: str, body: dict[str, Any], most: int = 1 << 20) -> list[dict[str, Any]]:
    """The events of a stream of one server, until they name `most` tokens or more."""
    events: list[dict[str, Any]] = []
    async with bench.session.post(f"{one_server(bench)}/v1/{path}", json=body) as answer:
        assert answer.status == 200, await answer.text()
        answered = body["kv_transfer_params"].get("answered", [])
        assert answer.headers.get("x-prfaas-answered", "0") == str(len(answered))
        async for line in answer.content:
            if line.startswith(b"data: {"):
                events.append(json.loads(line[6:]))
            if sum(len(ids_of(event)) for event in events) >= most:
                break
    return events


def ids_of(event: dict[str, Any]) -> list[int]:
    return [token for choice in event.get("choices", []) for token in choice.get("token_ids") or []]


def text_of(events: list[dict[str, Any]]) -> str:
    choices = [choice for event in events for choice in event.get("choices", [])]
    return "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)


@pytest.mark.dimensions(path=None)
@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_an_answer_goes_on_wherever_it_was_cut(bench: Bench, path: str) -> None:
    """Random tokens are half characters more often than not: what one server held back, the next one says."""

    async def scenario() -> None:
        prompt = {"prompt": bench.prompt(90, seed=71)}
        if "chat" in path:
            prompt = {"messages": [{"role": "user", "content": "Tell me of your ways, and of those of others."}]}
        asked = {"model": "tiny", "max_tokens": 60, "temperature": 0, "ignore_eos": True, "stream": True, **prompt}
        asked |= {"stream_options": {"include_usage": True}, "kv_transfer_params": {"resumable": True}}
        unstopped = text_of(await events_of(bench, path, asked))
        for stop in (None, unstopped[-9:-5]):
            asked["stop"] = stop
            whole = await events_of(bench, path, asked)
            tokens = [token for event in whole for token in ids_of(event)]
            assert not any(event.get("prompt_token_ids") for event in whole)
            assert (len(tokens) == 60) == (stop is None)
            for cut in range(1, len(tokens) - 1, 6):
                had = await events_of(bench, path, asked, cut)
                answered = [token for event in had for token in ids_of(event)]
                if len(answered) == len(tokens):
                    break  # a late reader gets several tokens at once
                rest = await events_of(
                    bench, path, asked | {"kv_transfer_params": {"resumable": True, "answered": answered}}
                )
                assert answered + [token for event in rest for token in ids_of(event)] == tokens
                assert text_of(had) + text_of(rest) == text_of(whole)
                assert counted(rest) == counted(whole)
                assert reasons(rest) == reasons(whole)

    bench.run(scenario())


def counted(events: list[dict[str, Any]]) -> tuple[int, int]:
    usage = events[-1]["usage"]
    return usage["prompt_tokens"], usage["completion_tokens"]


def reasons(events: list[dict[str, Any]]) -> list[tuple[Any, Any]]:
    choices = [choice for event in events for choice in event.get("choices", [])]
    return [(c["finish_reason"], c.get("stop_reason")) for c in choices if c.get("finish_reason")]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("words", [20, 300], ids=["short", "long"])
def test_the_sdk_gets_what_one_server_says(bench: Bench, words: int, stream: bool) -> None:
    async def scenario() -> None:
        text = " ".join(f"{words + number}" for number in range(words)) + str(stream)
        asked: list[Any] = [{"role": "system", "content": "Count."}, {"role": "user", "content": text}]
        options: dict[str, Any] = {"model": "tiny", "max_tokens": 12, "temperature": 0}
        for call in ({"messages": asked}, {"prompt": text}):
            ours = await ask(f"{bench.system.api_url}/v1", stream, options | call)
            theirs = await ask(f"{one_server(bench)}/v1", stream, options | call, cache_salt=uuid.uuid4().hex)
            assert ours == theirs

    bench.run(scenario())


@pytest.mark.parametrize(
    ("change", "status"), [({"max_tokens": -1}, 400), ({"temperature": 9.0}, 400), ({"max_tokens": 100_000}, 400)]
)
def test_errors_have_the_shape_of_openais(bench: Bench, change: dict[str, Any], status: int) -> None:
    async def scenario() -> None:
        body = {"model": "tiny", "prompt": "Once", "max_tokens": 4} | change
        async with bench.session.post(f"{bench.system.api_url}/v1/completions", json=body) as answer:
            error = (await answer.json())["error"]
            assert answer.status == status
            assert error["message"]

    bench.run(scenario())


def test_the_gateway_hears_what_vllms_own_cache_holds(bench: Bench) -> None:
    async def scenario() -> None:
        layout = ModelLayout.from_json((await bench.describe("decode0")).layout_json)
        prompt = bench.prompt(280, seed=91)
        wanted = block_hashes(prompt[:-1], layout.block_size, salt_of(layout))
        await bench.generate(prompt)
        await heard(bench, "decode0", wanted, Medium.ENGINE)
        assert wanted

    bench.run(scenario())


def test_a_client_that_leaves_leaves_nothing_behind(bench: Bench, relay: Proxy) -> None:
    async def scenario() -> None:
        with relay.held():
            task = asyncio.create_task(bench.generate(bench.prompt(3000, seed=33), 64))
            await bench.wait_until(lambda: is_sending(bench))
            task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    bench.run(scenario())


def test_a_stream_whose_landing_cannot_be_used_says_so(bench: Bench) -> None:
    async def scenario() -> None:
        prompt = bench.prompt(600, seed=37)
        salt = salt_of(ModelLayout.from_json((await bench.describe("decode0")).layout_json)).hex()
        landing = {"do_remote_prefill": True, "transfer_id": "nobody's", "salt": salt, "timeout_s": 1.0}
        body = {
            "model": "tiny",
            "prompt": prompt,
            "max_tokens": 8,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        for params in (landing, landing | {"resumable": True}):
            asked = body | {"kv_transfer_params": params}
            async with bench.session.post(f"{one_server(bench)}/v1/completions", json=asked) as answer:
                *events, finish, usage, _, _ = (await answer.read()).split(b"\n\n")
            assert [recompute_reason(event) for event in (finish, usage)] == 2 * ["unknown_transfer"]
            assert not any(recompute_reason(event) for event in events)

    bench.run(scenario())


def test_a_leg_whose_push_fails_computes_no_further(bench: Bench, relay: Proxy) -> None:
    async def scenario() -> None:
        for seed in range(35, 40):  # on a busy machine it may have computed everything before it can be told
            prompt = bench.prompt(3900, seed=seed)
            said = await leg_whose_push_fails(bench, relay, prompt)
            assert not said["kv_transfer_params"]["delivered"]
            if said["choices"][0]["finish_reason"] != "length":
                break
        assert said["choices"][0]["finish_reason"] == "abort"
        assert said["usage"]["completion_tokens"] == 0

        async def computes_nothing() -> bool:
            return await bench.metric(bench.node("far").engine_url, "vllm:num_requests_running") == 0

        await bench.wait_until(computes_nothing)
        assert (await bench.generate(prompt)).token_ids == await alone(bench, prompt)

    bench.run(scenario())


def test_a_prefill_server_that_is_killed_costs_time_not_tokens(bench: Bench, relay: Proxy) -> None:
    async def scenario() -> None:
        prompt, name = bench.prompt(3900, seed=17), bench.name()
        engine = (await bench.describe("far")).engine_pid
        with relay.held():
            task = asyncio.create_task(bench.generate(prompt, name=name))
            await bench.wait_until(lambda: is_sending(bench))
            os.kill(engine, signal.SIGKILL)
        done, record = await task, await bench.record(name)
        assert record["fallbacks"]
        assert record["fallbacks"][-1] == "recompute_no_prefill"
        assert done.token_ids == await alone(bench, prompt)

        async def was_restarted() -> bool:
            async with bench.session.get(f"{bench.node('far').metrics_url}/metrics") as answer:
                return 'prfaas_engine_restarts_total{cluster="east"} 1.0' in await answer.text()

        await bench.wait_until(was_restarted)

    bench.run(scenario())
