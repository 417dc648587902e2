"""Requests to nodes that are paired by rooms: both are sent the whole request, and neither is left to do it alone."""

from typing import Any

import pytest

from tests.gateway.memory.pipeline import Pipelined, on_memory_loop, pipeline
from tests.gateway.paired import BOOTSTRAP_PORT, PairedNode
from tests.gateway.worlds import on_loop, until, world

SHORT, LONG = "hello there the quick brown fox", "the quick brown fox jumps over it " * 40
ROOM = ("bootstrap_host", "bootstrap_port", "bootstrap_room")
TOLD = "one two three"


def text_of(body: dict[str, Any]) -> str:
    return str(body["choices"][0]["text"])


async def answered(at: Pipelined, prompt: str = SHORT, **fields: Any) -> str:
    response = await at.complete(prompt, **fields)
    assert response.status == 200, await response.text()
    return text_of(await response.json())


def without_room(body: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if name not in ROOM}


@on_memory_loop
async def test_both_servers_get_the_whole_request_and_one_room():
    asked = {
        "max_tokens": 30,
        "temperature": 0.7,
        "top_p": 0.5,
        "stop": ["x"],
        "logprobs": 1,
        "min_tokens": 2,
        "seed": 5,
    }
    async with pipeline(decode=1, kind=PairedNode) as at:
        assert await answered(at, **asked) == TOLD
        (near,), (decode,) = at.nodes.local, at.nodes.decode
        ours = {"model": "scripted", "prompt": SHORT, **asked}
        assert without_room(decode.bodies[0]) == ours
        assert without_room(near.bodies[0]) == ours | {"stream": False}
        rooms = [{name: body[name] for name in ROOM} for body in (near.bodies[0], decode.bodies[0])]
        assert rooms[0] == rooms[1]
        assert (rooms[0]["bootstrap_host"], rooms[0]["bootstrap_port"]) == (near.node_id, BOOTSTRAP_PORT)
        await at.settled()


@on_memory_loop
async def test_how_an_answer_is_told_is_for_the_decode_server_alone():
    async with pipeline(decode=1, kind=PairedNode) as at:
        response = await at.complete(stream=True, stream_options={"include_usage": True})
        assert (await response.text()).endswith("data: [DONE]\n\n")
        (near,), (decode,) = at.nodes.local, at.nodes.decode
        assert (near.bodies[0]["stream"], "stream_options" in near.bodies[0]) == (False, False)
        assert (decode.bodies[0]["stream"], "stream_options" in decode.bodies[0]) == (True, True)


@on_memory_loop
async def test_rooms_are_never_the_same():
    async with pipeline(decode=1, kind=PairedNode) as at:
        for _ in range(5):
            await answered(at)
        assert len({body["bootstrap_room"] for body in at.nodes.decode[0].bodies}) == 5


@on_memory_loop
async def test_long_prompts_are_prefilled_remotely():
    async with pipeline(decode=1, kind=PairedNode) as at:
        await answered(at, LONG)
        await answered(at, SHORT)
        assert [len(node.bodies) for node in at.nodes.nodes] == [1, 1, 2]
        remote, local = await at.records()
        assert (remote["target"], remote["prefill_node"], remote["route"]) == ("remote", "r0", "remote")
        assert (local["target"], local["prefill_node"], local["route"]) == ("local", "p0", "local")
        # Whole blocks of what the engine counted, and when they left is not known.
        assert (remote["bytes"], remote["overlap"]) == (13 * 16 * 64 + 256, None)


@on_memory_loop
async def test_what_prefill_had_cached_is_in_the_usage():
    async with pipeline(decode=1, kind=PairedNode) as at:
        at.nodes.local[0].script.cached_tokens = 32
        response = await at.complete()
        assert (await response.json())["usage"]["prompt_tokens_details"]["cached_tokens"] == 32


@pytest.mark.parametrize("fault", ["die", "drop", "503 full", "500 somehow"])
@on_memory_loop
async def test_a_prefill_that_fails_is_done_by_another_node_in_another_room(fault):
    async with pipeline(local=2, decode=1, kind=PairedNode) as at:
        at.nodes.local[0].script.prefill = [fault]
        assert await answered(at) == TOLD
        assert [len(node.bodies) for node in at.nodes.local] == [1, 1]
        rooms = [body["bootstrap_room"] for node in at.nodes.local for body in node.bodies]
        assert rooms[0] != rooms[1]
        assert [body["bootstrap_room"] for body in at.nodes.decode[0].bodies] == rooms
        assert sum((await at.fallbacks()).values()) == 1
        await at.settled()


@on_memory_loop
async def test_nobody_left_who_prefills_is_an_error_at_once():
    async with pipeline(remote=0, local=1, decode=1, kind=PairedNode) as at:
        at.nodes.local[0].script.prefill = ["500 somehow"]
        response = await at.complete()
        assert response.status == 503
        assert (await response.json())["error"]["code"] == "prefill_failed"
        await at.settled()


@on_memory_loop
async def test_prefill_nodes_of_other_pd_clusters_are_not_asked():
    async with pipeline(remote=0, local=2, decode=2, clusters=("west", "south"), kind=PairedNode) as at:
        for node in at.nodes.local:
            node.script.prefill = ["503 full"]
        response = await at.complete()
        assert response.status == 503
        assert sum(len(node.bodies) for node in at.nodes.local) == 1


@on_memory_loop
async def test_a_request_that_every_server_refuses_is_told_once():
    async with pipeline(local=2, decode=1, kind=PairedNode) as at:
        for node in at.nodes.nodes:
            node.script.prefill = node.script.decode = ["400 no such thing"]
        response = await at.complete()
        assert response.status == 400
        assert (await response.json())["error"]["message"] == "no such thing"
        assert sum(len(node.bodies) for node in at.nodes.nodes) == 2


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("words", ["peer_lost", "draining", "no_capacity"])
@on_memory_loop
async def test_what_a_client_has_written_is_not_taken_for_a_reason_of_ours(words, stream):
    async with pipeline(decode=2, kind=PairedNode) as at:
        for node in at.nodes.nodes:
            node.script.prefill = node.script.decode = [f"400 'input': '{words}'"]
        response = await at.complete(LONG, stream=stream)
        assert response.status == 400, await response.text()
        assert at.links.num_failed == 0  # every request would hear of it
        assert [len(node.bodies) for node in at.nodes.nodes] == [1, 0, 1, 0]


@pytest.mark.parametrize(("fault", "reason"), [("die", "engine_died"), ("500 no_capacity: of pages", "no_capacity")])
@on_memory_loop
async def test_a_decode_node_that_fails_is_followed_by_another(fault, reason):
    async with pipeline(local=1, decode=2, kind=PairedNode) as at:
        first, second = at.nodes.decode
        first.script.decode = [fault]
        at.nodes.local[0].script.prefill = ["500 decode has aborted the request"]
        assert await answered(at) == TOLD
        assert [len(node.bodies) for node in (first, second)] == [1, 1]
        assert await at.fallbacks() == {f"decode_{reason}": 1.0}


@on_memory_loop
async def test_why_a_decode_node_fails_is_heard_in_streams_too():
    async with pipeline(local=1, decode=2, kind=PairedNode) as at:
        at.nodes.decode[0].script.decode = ["500 no_capacity: of pages"]
        at.nodes.local[0].script.prefill = ["500 decode has aborted the request"]
        response = await at.complete(stream=True)
        assert (await response.text()).endswith("data: [DONE]\n\n")
        assert await at.fallbacks() == {"decode_no_capacity": 1.0}


@pytest.mark.parametrize(
    ("told", "status", "code"), [("draining", 503, "no_decode_node"), ("no_capacity", 429, "no_room")]
)
@on_memory_loop
async def test_the_only_decode_node_is_not_asked_for_ever(told, status, code):
    async with pipeline(remote=0, local=1, decode=1, kind=PairedNode) as at:
        at.nodes.decode[0].script.decode = [f"500 {told}: of pages"] * 5
        at.nodes.local[0].script.prefill = ["500 decode has aborted the request"] * 5
        response = await at.complete()
        assert (response.status, (await response.json())["error"]["code"]) == (status, code)
        assert response.headers["Retry-After"] == "1"
        assert [len(node.bodies) for node in at.nodes.nodes] == [1, 1]
        await at.settled()


@on_memory_loop
async def test_a_decode_leg_is_hung_up_when_its_prefill_fails():
    async with pipeline(remote=0, local=1, decode=1, kind=PairedNode) as at:
        at.nodes.local[0].script.prefill = ["die"]
        response = await at.complete()
        assert response.status == 503
        await until(lambda: not at.nodes.decode[0].running)


@pytest.mark.parametrize("fields", [{"echo": True}, {"bootstrap_room": 5}, {"rid": "mine"}])
@on_memory_loop
async def test_what_pairs_cannot_do_is_refused_before_anybody_is_asked(fields):
    from engine.sglang.unsupported import not_done_json

    async with pipeline(decode=1, kind=PairedNode) as at:
        for node in at.nodes.nodes:
            node.not_done_json = not_done_json()
            node.become(node.state)
        served = at.clusters
        await until(lambda: served.served is not None and served.served.not_done.harmless)
        response = await at.complete(**fields)
        assert response.status == 400
        assert not any(node.bodies for node in at.nodes.nodes)


@on_memory_loop
async def test_without_a_prefill_node_there_is_no_route():
    async with pipeline(remote=0, local=0, decode=1, kind=PairedNode) as at:
        response = await at.complete()
        assert response.status == 503
        assert (await response.json())["error"]["code"] == "no_prefill_node"
        async with at.http.get("/health") as health:
            assert health.status == 503


@on_loop
async def test_a_stream_that_breaks_ends_with_an_error():
    async with world(decode=2, kind=PairedNode) as at:
        for node in at.nodes.decode:
            node.script.decode = ["die_after_first"]
        response = await at.complete(stream=True)
        assert '"error"' in await response.text()
        assert sum(len(node.bodies) for node in at.nodes.decode) == 1
        await at.settled()


@on_memory_loop
async def test_lists_of_prompts_are_requests_of_their_own():
    async with pipeline(decode=1, kind=PairedNode) as at:
        response = await at.complete([SHORT, SHORT], n=2)
        assert [choice["text"] for choice in (await response.json())["choices"]] == [TOLD] * 4
        assert len({body["bootstrap_room"] for body in at.nodes.decode[0].bodies}) == 4
