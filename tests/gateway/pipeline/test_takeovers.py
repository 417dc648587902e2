"""A decode node fails in the middle of a stream: another one goes on, and the client sees no seam."""

import asyncio
import functools
import json
import re
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Any, ClassVar

import pytest

from gateway.cluster.agent_values import NodeEvent
from gateway.cluster.registry import NodeTimes
from gateway.errors import AgentCallFailed
from tests.gateway.memory.agent import MemoryAgent
from tests.gateway.memory.pipeline import Pipelined, on_memory_loop, pipeline
from tests.gateway.scripted import ScriptedNode
from tests.gateway.worlds import PATIENCE_S, PATIENT, Deployment, on_loop, until, world
from transport.control.proto import node_pb2 as pb

LONG = "the quick brown fox jumps over the lazy dog " * 40
WORDS = tuple(f" w{number}" for number in range(12))
USAGE = {"stream_options": {"include_usage": True}}


# A node that failed is trusted again soon: tests let few nodes fail often. There is no news: scripted engines live.
FORGIVING = NodeTimes(suspect_s=0.01, death_news_s=0.01)
forgiving = functools.partial(pipeline, node_times=FORGIVING)


async def streamed(w: Deployment, path: str = "/v1/completions", **fields: Any) -> list[bytes]:
    """The events of a stream, as the client gets them."""
    body = {"model": "scripted", "stream": True, **fields}
    body |= {"messages": [{"role": "user", "content": LONG}]} if "chat" in path else {"prompt": LONG}
    async with w.http.post(path, json=body) as response:
        assert response.status == 200
        return (await response.read()).split(b"\n\n")[:-1]


def texts(events: list[bytes]) -> list[str]:
    answers = [json.loads(event.removeprefix(b"data: ")) for event in events if b"[DONE]" not in event]
    choices = [choice for answer in answers for choice in answer.get("choices", [])]
    return [text for choice in choices if (text := choice.get("text") or choice.get("delta", {}).get("content"))]


def error_of(events: list[bytes]) -> str:
    code: str = json.loads(events[-1].removeprefix(b"data: "))["error"]["code"]
    return code


def resumable(w: Deployment, *faults: str) -> None:
    """Every decode node can go on; the one that is asked first has the first fault, and so on."""
    left = list(faults)
    for number, node in enumerate(w.nodes.decode):
        node.script.words, node.script.is_resumable = WORDS, True
        node.script.decode = left  # shared: for the node that is asked next
        node.created_s = 1_700_000_000 + number


async def takeovers(w: Deployment) -> dict[str, float]:
    return await w.counted("prfaas_takeovers_total{")


async def streams_broken(w: Deployment) -> dict[str, float]:
    return await w.counted("prfaas_streams_broken_total{")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("fault", ["die", "half", "error", "cut"])
@on_memory_loop
async def test_the_client_gets_every_event_once_wherever_the_engine_fails(path: str, fault: str) -> None:
    async with forgiving() as w:
        resumable(w)
        whole = await streamed(w, path, **USAGE)
        for number in range(1, len(WORDS)):
            resumable(w, f"{fault}_after {number}")
            assert undated(await streamed(w, path, **USAGE)) == undated(whole)
        assert (await takeovers(w)) == {"continued": len(WORDS) - 1}
        assert await streams_broken(w) == {}
        await w.settled()


def dates(events: list[bytes]) -> set[int]:
    return {json.loads(e.removeprefix(b"data: ")).get("created") for e in events if b'"created"' in e}


def undated(events: list[bytes]) -> list[bytes]:
    """Two answers have different dates; one answer has one."""
    assert len(dates(events)) == 1
    return [re.sub(rb'"created": ?\d+', b"", event) for event in events]


@on_memory_loop
async def test_the_node_that_goes_on_is_asked_for_what_follows_and_the_prompt_travels_with_the_answer() -> None:
    async with forgiving() as w:
        resumable(w, "die_after 5")
        assert texts(await streamed(w)) == list(WORDS)
        legs = [body["kv_transfer_params"] for node in w.nodes.decode for body in node.bodies]
        assert sorted(leg.get("answered", []) for leg in legs) == [[], [0, 1, 2, 3, 4]]
        prefills = [body for node in w.nodes.remote + w.nodes.local for body in node.bodies]
        tokens = [body["kv_transfer_params"]["ticket"]["num_tokens"] for body in prefills]
        assert tokens[1] == tokens[0] + 5
        (record,) = await w.records()
        assert (record["takeovers"], record["total"]) == (1, tokens[0] + 1)
        assert record["fallbacks"] == ["decode_stream_broken"]


@on_loop
async def test_one_stream_may_outlive_several_engines_that_lose_their_connection() -> None:
    async with world(node_times=FORGIVING, decode=4, max_attempts=4) as w:
        resumable(w, "die_after 3", "half_after 7", "cut_after 9")
        assert texts(await streamed(w)) == list(WORDS)
        assert (await takeovers(w)) == {"continued": 3}
        await w.settled()


@on_memory_loop
async def test_an_engine_that_falls_silent_is_given_up() -> None:
    async with forgiving(timeouts=replace(PATIENT, stream_idle_s=0.3)) as w:
        resumable(w, "stall_after 4")
        assert texts(await streamed(w)) == list(WORDS)
        assert await w.fallbacks() == {"decode_stream_idle": 1}
        await w.settled()


async def said(w: Pipelined, how_many: int, then: Callable[[ScriptedNode], None]) -> list[bytes]:
    """The events of a stream; `then` is done to the node that has said so many words and says nothing more."""
    body = {"model": "scripted", "stream": True, "prompt": LONG}
    async with w.http.post("/v1/completions", json=body) as response:
        begun = b""
        while begun.count(b"\n\n") < how_many:
            begun += await response.content.readany()
        (node,) = [node for node in w.nodes.decode if node.bodies]
        then(node)
        return (begun + await response.read()).split(b"\n\n")[:-1]


class HushedAgent(MemoryAgent):
    """The gateway finds each of the `hushed` addresses once to have said nothing for too long."""

    hushed: ClassVar[list[str]] = []

    async def watch(self, load_interval_s: float, silence_s: float) -> AsyncGenerator[NodeEvent, None]:
        async with aclosing(super().watch(load_interval_s, silence_s)) as events:
            async for event in events:
                if self.address in self.hushed:
                    self.hushed.remove(self.address)
                    raise AgentCallFailed(self.address, "silent")
                yield event


@on_memory_loop
async def test_a_stream_leaves_a_node_that_says_that_its_engine_is_silent() -> None:
    async with forgiving() as w:
        resumable(w, "stall_after 4")
        events = await said(w, 4, lambda node: node.become(pb.NODE_STATE_ENGINE_SILENT))
        assert texts(events) == list(WORDS)
        assert await w.fallbacks() == {"decode_node_silent": 1}
        await w.settled()


@on_memory_loop
async def test_a_stream_leaves_a_node_of_which_neither_agent_nor_engine_says_anything() -> None:
    async with forgiving(agent_client=HushedAgent, node_times=replace(FORGIVING, quiet_s=0.0)) as w:
        resumable(w, "stall_after 4")
        events = await said(w, 4, lambda node: HushedAgent.hushed.append(node.agent_address))
        assert texts(events) == list(WORDS)
        assert await w.fallbacks() == {"decode_node_silent": 1}
        assert 'prfaas_node_watch_failures_total{reason="silent"} 1.0' in await w.metrics()


@on_memory_loop
async def test_an_engine_that_says_something_is_not_left_for_the_silence_of_its_agent() -> None:
    async with forgiving(agent_client=HushedAgent) as w:
        resumable(w)
        for node in w.nodes.decode:
            node.script.word_interval_s = 0.05
        events = await said(w, 4, lambda node: HushedAgent.hushed.append(node.agent_address))
        assert texts(events) == list(WORDS)
        assert await w.fallbacks() == {}


@on_memory_loop
async def test_a_stream_that_goes_on_is_not_left_for_an_engine_that_answers_nobody_else() -> None:
    async with forgiving() as w:
        resumable(w)
        for node in w.nodes.decode:
            node.script.word_interval_s = 0.1
        events = await said(w, 4, lambda node: node.become(pb.NODE_STATE_ENGINE_SILENT))
        assert texts(events) == list(WORDS)
        assert await w.fallbacks() == {}
        assert "engine_silent" in [node.state for node in w.clusters.nodes]


@on_memory_loop
async def test_the_only_engine_that_could_answer_may_come_back() -> None:
    async with forgiving(decode=1) as w:
        resumable(w)
        (node,) = w.nodes.decode
        node.script.decode_gate = asyncio.Event()
        answer = asyncio.create_task(streamed(w))
        await until(lambda: node.bodies)
        node.become(pb.NODE_STATE_ENGINE_SILENT)
        seen = w.clusters.nodes[-1]
        await until(lambda: seen.state == "engine_silent")
        report = seen.load
        await until(lambda: seen.load is not report)
        node.become(pb.NODE_STATE_READY)
        node.script.decode_gate.set()
        assert texts(await answer) == list(WORDS)
        assert await w.fallbacks() == {}


@pytest.mark.parametrize("leg", ["prefill", "decode"])
@on_memory_loop
async def test_a_leg_that_waits_for_a_silent_engine_is_another_ones(leg: str) -> None:
    async with forgiving(local=2) as w:
        nodes = w.nodes.decode if leg == "decode" else w.nodes.remote + w.nodes.local
        for node in nodes:
            node.script.decode_gate = node.script.prefill_gate = asyncio.Event()
        answer = asyncio.create_task(w.complete(LONG))
        await until(lambda: any(node.bodies for node in nodes))
        (silent,) = [node for node in nodes if node.bodies]
        silent.become(pb.NODE_STATE_ENGINE_SILENT)
        for node in nodes:
            if node is not silent:
                node.script.decode_gate = node.script.prefill_gate = None
        assert (await answer).status == 200
        assert await w.fallbacks() == {f"{leg}_node_silent": 1}


@on_memory_loop
async def test_when_only_the_end_of_a_stream_is_missing_the_gateway_says_it() -> None:
    async with forgiving(decode=1) as w:
        (node,) = w.nodes.decode
        resumable(w)
        whole = await streamed(w, **USAGE)
        node.script.ends_before_usage = True
        ended = await streamed(w, **USAGE)
        assert ended[:-2] == whole[:-2]
        assert ended[-1] == b"data: [DONE]"
        usage = json.loads(ended[-2].removeprefix(b"data: "))["usage"]
        assert usage["completion_tokens"] == len(WORDS)
        assert (await takeovers(w)) == {"ended": 1}


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "structured_output"),
    ],
)
@on_memory_loop
async def test_what_cannot_be_continued_ends_with_its_reason(fields: dict[str, Any], why: str) -> None:
    async with forgiving() as w:
        resumable(w, "die_after 3")
        assert error_of(await streamed(w, "/v1/chat/completions", **fields)) == "stream_broken"
        assert (await takeovers(w)) == {why: 1}
        await w.settled()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
@pytest.mark.parametrize("kept_answer_bytes", [0, 1 << 20])
@on_memory_loop
async def test_an_error_that_an_engine_tells_its_client_ends_no_answer(path: str, kept_answer_bytes: int) -> None:
    async with forgiving(kept_answer_bytes=kept_answer_bytes) as w:
        resumable(w, "error_after 3")
        for node in w.nodes.decode:
            node.script.is_resumable = False
        said: dict[str, Any] = {"messages": [{"role": "user", "content": LONG}], "max_tokens": 99}
        if path == "/v1/responses":
            said = {"input": LONG, "max_output_tokens": 99}
        body = {"model": "scripted", "stream": True} | said
        async with w.http.post(path, json=body) as response:
            assert (response.status, "scripted" in await response.text()) == (200, True)
        (record,) = await w.records()
        assert (record["status"], "scripted" in record["error"]) == (502, True)
        assert await streams_broken(w) == {"stream_error": 1}
        await w.settled()


@on_memory_loop
async def test_a_node_that_has_only_lost_the_connection_goes_on_itself_once_it_is_trusted_again() -> None:
    async with forgiving(decode=1) as w:
        resumable(w, "die_after 3")
        assert texts(await streamed(w)) == list(WORDS)
        assert (await takeovers(w)) == {"continued": 1}
        await w.settled()


@on_memory_loop
async def test_without_any_node_the_stream_ends_as_it_must() -> None:
    never_again = replace(FORGIVING, suspect_s=PATIENCE_S)
    async with forgiving(decode=1, timeouts=replace(PATIENT, room_s=0.1), node_times=never_again) as w:
        resumable(w, "die_after 3")
        events = await streamed(w)
        assert texts(events) == list(WORDS[:3])
        assert error_of(events) == "stream_broken"
        assert (await takeovers(w)) == {"no_decode_node": 1}
        await w.settled()


@on_memory_loop
async def test_an_engine_that_would_begin_anew_is_not_believed() -> None:
    async with forgiving() as w:
        resumable(w, "die_after 3")
        for node in w.nodes.decode:
            node.script.forgets = True
        events = await streamed(w)
        assert texts(events) == list(WORDS[:3])
        assert error_of(events) == "stream_broken"
        assert (await w.fallbacks())["decode_not_resumable"] == 1
        await w.settled()


@on_memory_loop
async def test_engines_that_name_no_tokens_cannot_be_continued() -> None:
    async with forgiving() as w:
        resumable(w, "die_after 3")
        for node in w.nodes.decode:
            node.script.is_resumable = False
        assert error_of(await streamed(w)) == "stream_broken"
        assert (await takeovers(w)) == {"tokens_unknown": 1}


@on_memory_loop
async def test_an_engine_that_cannot_go_on_says_why() -> None:
    async with forgiving() as w:
        resumable(w, "die_after 3")
        for node in w.nodes.decode:
            node.script.is_resumable, node.script.not_resumable = False, "penalties"
        assert error_of(await streamed(w)) == "stream_broken"
        assert (await takeovers(w)) == {"penalties": 1}


@on_memory_loop
async def test_of_a_long_answer_no_more_is_kept_than_is_allowed() -> None:
    async with forgiving(kept_answer_bytes=6) as w:
        resumable(w, "die_after 2")
        assert texts(await streamed(w)) == list(WORDS)
        resumable(w, "cut_after 5")
        assert error_of(await streamed(w)) == "stream_cut"
        assert (await takeovers(w)) == {"continued": 1, "too_long": 1}


@on_memory_loop
async def test_a_client_that_asks_for_tokens_gets_them_across_the_seam() -> None:
    async with forgiving() as w:
        resumable(w, "die_after 5")
        events = await streamed(w, return_token_ids=True)
        answers = [json.loads(event.removeprefix(b"data: ")) for event in events[:-1]]
        assert [answer["choices"][0]["token_ids"] for answer in answers] == [[n] for n in range(len(WORDS))]


@on_memory_loop
async def test_a_client_that_leaves_during_a_takeover_leaves_nothing_behind() -> None:
    async with forgiving() as w:
        resumable(w, "die_after 3")
        gate = asyncio.Event()
        body = {"model": "scripted", "prompt": LONG, "stream": True}
        async with w.http.post("/v1/completions", json=body) as response:
            await response.content.readany()
            for node in w.nodes.decode:
                node.script.decode_gate = gate
            response.close()
        await w.settled()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("fault", ["200 html", "200 error"])
@on_memory_loop
async def test_an_answer_that_is_none_is_asked_of_another_node(fault: str, stream: bool) -> None:
    async with forgiving() as w:
        resumable(w, fault)
        response = await w.complete(LONG, stream=stream)
        assert response.status == 200
        assert b"w11" in await response.read()
        assert await w.fallbacks() == {"decode_bad_answer": 1}
        await w.settled()


@on_memory_loop
async def test_nothing_is_kept_where_it_is_not_wanted() -> None:
    async with forgiving(kept_answer_bytes=0) as w:
        resumable(w, "die_after 3")
        assert error_of(await streamed(w)) == "stream_broken"
        assert (await takeovers(w)) == {"off": 1}
        assert "resumable" not in w.nodes.decode[0].bodies[-1]["kv_transfer_params"]


@pytest.mark.parametrize(
    ("path", "said", "end"),
    [
        ("/v1/completions", {"prompt": "hello there"}, "data: [DONE]"),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hello there"}], "max_tokens": 9}, "message_stop"),
        ("/v1/responses", {"input": "hello there"}, "response.completed"),
    ],
)
@pytest.mark.parametrize("kept_answer_bytes", [0, 1 << 10])
@on_memory_loop
async def test_a_stream_that_its_engine_ends_too_early_is_never_told_as_whole(
    path: str, said: dict[str, Any], end: str, kept_answer_bytes: int
) -> None:
    async with forgiving(kept_answer_bytes=kept_answer_bytes) as w:
        for node in w.nodes.decode:
            node.script.decode = ["cut_after 2"]
        async with w.http.post(path, json={"model": "scripted", "stream": True, **said}) as response:
            told = await response.text()
        assert "stream_cut" in told
        assert end not in told
        (record,) = await w.records()
        assert record["fallbacks"] == ["decode_stream_cut"]
        assert record["error"]
        await w.settled()


@pytest.mark.parametrize("is_usage_asked", [False, True])
@on_memory_loop
async def test_tokens_are_counted_as_they_are_named_however_many_come_in_one_event(is_usage_asked: bool) -> None:
    async with forgiving(decode=1) as w:
        resumable(w)
        w.nodes.decode[0].script.tokens_per_event = 3
        assert texts(await streamed(w, **(USAGE if is_usage_asked else {}))) == list(WORDS)
        (record,) = await w.records()
        assert record["output_tokens"] == 3 * len(WORDS)


@pytest.mark.parametrize("kept_answer_bytes", [0, 1 << 10])
@on_memory_loop
async def test_without_names_tokens_are_those_of_the_usage_where_it_is_asked_for(kept_answer_bytes: int) -> None:
    async with forgiving(decode=1, kept_answer_bytes=kept_answer_bytes) as w:
        w.nodes.decode[0].script.words = WORDS
        w.nodes.decode[0].script.tokens_per_event = 3
        events = await streamed(w, **USAGE)
        usage = next(
            json.loads(event.removeprefix(b"data: "))["usage"] for event in events if b"prompt_tokens" in event
        )
        (record,) = await w.records()
        assert record["output_tokens"] == usage["completion_tokens"] == 3 * len(WORDS)
