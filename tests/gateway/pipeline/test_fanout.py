"""Several answers to one request: each is decided by itself, and they come back as one, in the order asked for."""

import asyncio
import json
import threading
from typing import Any

import pytest

from gateway.api.openai import Endpoint, parse
from gateway.auth.keyring import digest_of
from gateway.config.gateway import Strangers
from gateway.config.tenants import TenantConfig
from gateway.errors import BadRequest
from gateway.pipeline.fanout import bodies_of, calls_of
from planner.decisions.admission.waiting import TenantShare
from tests.gateway.memory.pipeline import on_memory_loop, pipeline
from tests.gateway.worlds import Deployment, on_loop, until, world

LONG = "the quick brown fox jumps over the lazy dog " * 40
PROMPTS = ["hello there", LONG, "the quick brown fox"]
CHAT = {"model": "scripted", "messages": [{"role": "user", "content": LONG}]}


async def events(each: Deployment, path: str, **body: Any) -> list[dict[str, Any]]:
    async with each.http.post(path, json={**body, "stream": True}) as response:
        assert response.status == 200, await response.text()
        raw = (await response.text()).split("\n\n")
    assert raw[-2:] == ["data: [DONE]", ""]
    assert raw.count("data: [DONE]") == 1
    return [json.loads(event.removeprefix("data: ")) for event in raw[:-2]]


def test_a_list_of_prompts_is_so_many_bodies() -> None:
    body = b'{"model": "m", "x": {"kept": 1}, "prompt": ["a", [1, 2]], "cache_salt": "s"}'
    bodies = bodies_of(body)
    read = [json.loads(each) for each in bodies]
    assert read == [
        {"model": "m", "prompt": "a", "cache_salt": "s"},
        {"model": "m", "prompt": [1, 2], "cache_salt": "s"},
    ]
    assert [json.loads(bodies.whole(prompt).body({})) for prompt in bodies.prompts] == [
        each | {"x": {"kept": 1}} for each in read
    ]


def test_of_several_answers_each_has_a_seed_of_its_own() -> None:
    call = parse(Endpoint.CHAT, json.dumps(CHAT | {"n": 3, "seed": 5}).encode())
    said = [json.loads(each.body({})) for each in calls_of(call)]
    assert said == [CHAT | {"seed": seed} for seed in (5, 6, 7)]
    call = parse(Endpoint.COMPLETIONS, b'{"model": "m", "prompt": "x", "n": 2, "best_of": 2}')
    assert [json.loads(each.body({})) for each in calls_of(call)] == [{"model": "m", "prompt": "x"}] * 2


@pytest.mark.parametrize("seed", [-1, -64, 2**63 - 2])
def test_seeds_below_nothing_and_at_the_end_are_different_ones(seed: int) -> None:
    body = json.dumps({"model": "m", "prompt": "a", "n": 128, "seed": seed}).encode()
    seeds = [json.loads(call.body({}))["seed"] for call in calls_of(parse(Endpoint.COMPLETIONS, body))]
    assert (seeds[0], len(set(seeds))) == (seed, 128)
    assert all(-(2**63) <= each < 2**63 for each in seeds)
    with pytest.raises(BadRequest):
        parse(Endpoint.COMPLETIONS, json.dumps({"model": "m", "prompt": "a", "seed": 2**63}).encode())


@on_memory_loop
async def test_prompts_of_a_list_are_routed_by_themselves_and_answered_in_order() -> None:
    async with pipeline() as w:
        for node in w.nodes.decode:
            node.script.cached_tokens = 3
        response = await w.complete(PROMPTS, max_tokens=5)
        told = await response.json()
        assert response.status == 200, told
        assert [(choice["index"], choice["text"]) for choice in told["choices"]] == [
            (number, "one two three") for number in range(3)
        ]
        assert told["usage"]["prompt_tokens"] == 3 * 7
        assert told["usage"]["completion_tokens"] == 9
        records = await w.records()
        assert sorted(record["route"] for record in records) == ["local", "local", "remote"]
        assert not w.admission.in_flight
        await w.settled()


@on_memory_loop
async def test_a_list_of_prompts_is_its_tenants_to_read() -> None:
    key = {"Authorization": "Bearer sk-acme"}
    tenants = {"acme": TenantConfig(keys=(digest_of("sk-acme"),))}
    async with pipeline(tenants=tenants, strangers=Strangers(max_reading_bytes=40_000)) as w:
        may_end = threading.Event()
        reader = w.door.rooms.reader
        holding = asyncio.ensure_future(reader.think(lambda _: may_end.wait(60.0), TenantShare("acme"), 20_000))
        await asyncio.sleep(0)
        try:
            refused = await w.complete(PROMPTS, headers=key)
            assert (refused.status, refused.headers["x-prfaas-rejected"]) == (429, "reading_overload")
        finally:
            may_end.set()
            await holding
        assert (await w.complete(PROMPTS, headers=key)).status == 200


@on_memory_loop
async def test_answers_to_one_prompt_are_counted_once_in_what_they_read() -> None:
    async with pipeline() as w:
        async with w.http.post(Endpoint.CHAT, json=CHAT | {"n": 3}) as response:
            told = await response.json()
        assert [choice["message"]["content"] for choice in told["choices"]] == ["one two three"] * 3
        assert [choice["index"] for choice in told["choices"]] == [0, 1, 2]
        usage = told["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (7, 9, 16)
        assert all("n" not in body for node in w.nodes.nodes for body in node.bodies)
        await w.settled()


@on_memory_loop
async def test_streams_of_several_answers_are_one_stream() -> None:
    async with pipeline() as w:
        options = {"stream_options": {"include_usage": True}}
        said = await events(w, Endpoint.COMPLETIONS, model="scripted", prompt=PROMPTS, n=2, **options)
        texts = [""] * 6
        for event in said[:-1]:
            (choice,) = event["choices"]
            texts[choice["index"]] += choice["text"]
        assert texts == ["one two three"] * 6
        assert (said[-1]["choices"], said[-1]["usage"]["completion_tokens"]) == ([], 18)
        assert said[-1]["usage"]["prompt_tokens"] == 21
        plain = await events(w, Endpoint.CHAT, **CHAT, n=2)
        assert {choice["index"] for event in plain for choice in event["choices"]} == {0, 1}
        for path, asked, kind in (
            (Endpoint.CHAT, CHAT, "chat.completion.chunk"),
            (Endpoint.COMPLETIONS, {"model": "scripted", "prompt": LONG}, "text_completion"),
        ):
            said = await events(w, path, **asked, n=2, **options)
            assert {(event["object"], event["model"]) for event in said} == {(kind, "scripted")}
        await w.settled()


@on_memory_loop
async def test_one_that_fails_fails_all_and_nothing_is_left() -> None:
    async with pipeline(decode=1) as w:
        node = w.nodes.decode[0]
        node.script.decode = ["422 too_odd"]
        response = await w.complete(PROMPTS)
        assert (response.status, (await response.json())["error"]["code"]) == (422, "too_odd")
        errors = [(record["status"], record["error"]) for record in await w.records()]
        assert errors.count((422, "scripted")) == 1
        assert set(errors) <= {(422, "scripted"), (200, ""), (499, "another answer to the same request failed")}
        await w.settled()
        assert not w.admission.in_flight
        node.script.decode = ["die_after_first"]
        async with w.http.post(
            Endpoint.COMPLETIONS, json={"model": "scripted", "prompt": PROMPTS, "stream": True}
        ) as got:
            assert '"error"' in await got.text()
        await w.settled()
        assert 'prfaas_streams_broken_total{reason="stream_broken"} 1.0' in await w.metrics()


@on_memory_loop
@pytest.mark.parametrize("fault", ["die_after 2", "error_after 2", "die_after_first", "cut_after 2"])
async def test_an_error_is_the_last_event(fault: str) -> None:
    async with pipeline(decode=2) as w:
        left = [fault, "", ""]
        for node in w.nodes.decode:
            node.script.decode, node.script.word_interval_s = left, 0.01
        body = {"model": "scripted", "prompt": LONG, "n": 3, "stream": True, "stream_options": {"include_usage": True}}
        async with w.http.post(Endpoint.COMPLETIONS, json=body) as got:
            said = [event.removeprefix("data: ") for event in (await got.text()).split("\n\n") if event]
        if got.status == 200:
            assert '"error"' in said[-1]
        assert sum('"error"' in event for event in said) == 1
        records = [(record["status"], record["error"]) for record in await w.records()]
        assert sum(status == 502 for status, _ in records) == 1
        assert not w.admission.in_flight
        await w.settled()


@on_memory_loop
async def test_each_answer_takes_a_place() -> None:
    async with pipeline(max_in_flight=2) as w:
        await w.admission.take()
        response = await w.complete(PROMPTS[:2])
        w.admission.give_back()
        assert (response.status, (await response.json())["error"]["type"]) == (429, "rate_limit_error")
        assert 'prfaas_requests_total{reason="rate_limit_exceeded",route="none",status="429"} 1.0' in await w.metrics()
        assert (await w.complete(PROMPTS[:2])).status == 200
        await w.idle()


@on_loop
async def test_a_client_that_leaves_ends_all_of_them() -> None:
    async with world(decode=1) as w:
        gate = w.nodes.decode[0].script.decode_gate = asyncio.Event()
        asking = asyncio.create_task(w.complete(PROMPTS))
        await until(lambda: w.nodes.decode[0].running == 3)
        asking.cancel()
        await asyncio.wait([asking])
        await until(lambda: not w.gateway.admission.in_flight)
        gate.set()
        await w.settled()


def test_other_dialects_have_one_answer() -> None:
    call = parse(Endpoint.CHAT, json.dumps(CHAT | {"n": 2}).encode())
    with pytest.raises(BadRequest, match="'n' is not supported here"):
        calls_of(type(call)(call.endpoint, call.options, call.fields, dialect=Endpoint.MESSAGES))
