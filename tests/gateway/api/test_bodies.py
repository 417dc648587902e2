"""What several answers to one long body cost: its fields once, however many engines are asked."""

import asyncio
import gc
import io
import json
import random
import tracemalloc
from itertools import pairwise
from typing import Any, Final

import pytest
from msgspec import Raw

from gateway.api.bodies import LENT_BYTES, body_of
from gateway.api.openai import Call, Endpoint, parse
from gateway.errors import ApiError
from gateway.pipeline.fanout import bodies_of, calls_of, check_size
from gateway.prompt.reader import LONGER_BODY_BYTES
from tests.gateway.worlds import World, on_loop, world

NOTE = "x" * 1_000_000
JSON = {"Content-Type": "application/json"}
COMPLETION = {"model": "scripted", "max_tokens": 1, "metadata": {"note": NOTE}}


def of_several(**said: Any) -> tuple[bytes, list[Call]]:
    """A body that asks for several answers, and the calls that it makes."""
    body = json.dumps(COMPLETION | said).encode()
    if isinstance(said["prompt"], str):
        return body, calls_of(parse(Endpoint.COMPLETIONS, body))
    bodies = bodies_of(body)
    return body, [bodies.whole(prompt) for prompt in bodies.prompts]


def test_a_body_in_pieces_is_the_same_json() -> None:
    rng = random.Random(7)
    for _ in range(50):
        raws = {
            f"field \u00e9 {i}": Raw(json.dumps("y" * rng.choice((1, 50, LENT_BYTES, 3 * LENT_BYTES))).encode())
            for i in range(rng.randrange(4))
        }
        fields = raws | {"n": 1, "nested": {"a": [1.5]}} if rng.random() < 0.8 else raws
        body = body_of(fields)
        assert json.loads(bytes(body)) == {
            name: json.loads(bytes(value)) if isinstance(value, Raw) else value for name, value in fields.items()
        }
        size = rng.randrange(1, 2 * LENT_BYTES)
        parts = list(body.parts(size))
        assert b"".join(piece for part in parts for piece in part) == bytes(body)
        assert all(0 < sum(map(len, part)) <= size for part in parts)
        assert len(body) == len(bytes(body))


@pytest.mark.parametrize("said", [{"prompt": "hello", "n": 128, "seed": 1}, {"prompt": ["hello there"] * 128}])
def test_128_answers_share_the_long_fields_of_their_body(said: dict[str, Any]) -> None:
    body, calls = of_several(**said)
    assert len(calls) == 128
    tracemalloc.start()
    try:
        of_several(**said)
        sent = [call.written({"stream": False}) for call in calls]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 * len(body)
    assert sum(map(len, sent)) > 128 * len(NOTE)
    assert json.loads(bytes(sent[-1]))["metadata"] == {"note": NOTE}


def test_prompts_of_a_list_share_their_options() -> None:
    _, calls = of_several(prompt=["a", "b"], logit_bias={"1": 2.0})
    assert calls[0].options is calls[1].options
    assert calls[0].options.logit_bias == {"1": 2.0}


def test_the_budget_counts_what_engines_are_sent() -> None:
    _, calls = of_several(prompt=["a" * 1000, "b"])
    both = sum(len(json.dumps(COMPLETION["metadata"])) for _ in range(2)) + 1000
    check_size(calls, both + 200)
    with pytest.raises(ApiError, match="max_several_bytes") as refused:
        check_size(calls, both)
    assert (refused.value.status, refused.value.code) == (413, "several_too_large")


SEVERAL: Final = ({"prompt": "hello there", "n": 4}, {"prompt": ["hello there"] * 4})


@on_loop
async def test_more_than_one_request_may_take_is_refused_by_the_name_of_the_limit() -> None:
    async with world(max_several_bytes=3 * len(NOTE)) as w:
        for refused, said in enumerate(SEVERAL, start=1):
            async with w.http.post(Endpoint.COMPLETIONS, json=COMPLETION | said) as response:
                error = (await response.json())["error"]
            assert (response.status, error["code"]) == (413, "several_too_large")
            assert "max_several_bytes" in error["message"]
            told = f'prfaas_requests_total{{reason="several_too_large",route="none",status="413"}} {refused}.0'
            assert told in await w.metrics()
            assert not any(node.bodies for node in w.nodes.nodes)
            two = said | ({"n": 2} if "n" in said else {"prompt": said["prompt"][:2]})
            async with w.http.post(Endpoint.COMPLETIONS, json=COMPLETION | two) as response:
                assert response.status == 200, await response.text()
            sent = [body for node in w.nodes.decode for body in node.bodies]
            assert len(sent) == 2
            assert all(body["metadata"] == {"note": NOTE} for body in sent)
            await w.idle()
            for node in w.nodes.nodes:
                node.bodies.clear()
        await a_list_of_too_many_prompts_is_refused_where_it_is_read(w)


async def a_list_of_too_many_prompts_is_refused_where_it_is_read(w: World) -> None:
    async with w.http.post(Endpoint.COMPLETIONS, json=COMPLETION | {"prompt": ["a"] * 129}) as response:
        error = (await response.json())["error"]
    assert (response.status, error["param"]) == (400, "prompt")
    assert "129 answers are more than the 128" in error["message"]


@on_loop
async def test_others_get_their_turn_between_the_decisions_for_several_answers() -> None:
    async with world() as w:
        turns, decided = 0, []
        dispatcher = w.gateway.door.rooms.dispatcher
        answered = dispatcher.answered

        def noted(request: Any) -> Any:
            decided.append(turns)
            return answered(request)

        dispatcher.answered = noted  # type: ignore[method-assign]

        async def others() -> None:
            nonlocal turns
            while True:
                await asyncio.sleep(0)
                turns += 1

        beside = asyncio.create_task(others())
        try:
            response = await w.complete(["hello there"] * 64, max_tokens=1)
        finally:
            beside.cancel()
        assert response.status == 200
        assert len(decided) == 64
        assert all(later > earlier for earlier, later in pairwise(decided))


REFUSED: Final = (
    ({"prompt": ["hello there"] * 128}, 413),
    ({"prompt": "hello", "n": 128}, 413),
    ({"prompt": "hello", "model": "none"}, 404),
)


@on_loop
async def test_a_refusal_keeps_no_body_until_garbage_is_collected() -> None:
    long = {"metadata": {"note": "x" * LONGER_BODY_BYTES}}  # read in a process
    async with world(max_several_bytes=LONGER_BODY_BYTES) as w:
        for said, status in REFUSED:
            gc.collect()
            gc.disable()
            try:
                body = io.BytesIO(json.dumps(COMPLETION | long | said).encode())
                async with w.http.post(Endpoint.COMPLETIONS, data=body, headers=JSON) as response:
                    assert response.status == status
                await w.idle()
                kept = [each.get_name() for each in gc.get_objects() if type(each) is asyncio.Task and each.done()]
                assert not {"request", "read"} & set(kept), said
            finally:
                gc.enable()
