"""Chats with images that an engine has read for the gateway: named by what is in them, and prefilled where any chat may be."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.api.openai import Endpoint
from gateway.prompt.media import TOKENS_EACH, MediaGuess
from gateway.prompt.media_render import EXPLORED, RenderedMedia, Worth, seen_in
from gateway.prompt.prompt import PromptMemory, prompt_from, read_call
from hybrid_cache.hashing.block_hash import MEDIUM, Inset, namespaced
from tests.gateway.prompt.test_media import IMAGE, MODEL, WORDS, chat, text
from tests.gateway.worlds import World, on_loop, until, world
from tests.prompts.builders import text_tokenizer
from transport.control.proto import node_pb2 as pb

IDS = [7, 8, 9] * 150


def rendered(*places: tuple[int, int], ids: list[int] = IDS, **more: Any) -> dict[str, Any]:
    """vLLM's answer, with images at places (offset, length)."""
    features = {
        "mm_hashes": {"image": [f"{MEDIUM}{number}" for number in range(len(places))]},
        "mm_placeholders": {"image": [{"offset": offset, "length": length} for offset, length in places]},
        "kwargs_data": None,
    }
    return {"token_ids": ids, "features": features | more}


def encoded(answer: Any) -> bytes:
    return json.dumps(answer).encode()


def test_tokens_and_what_stands_among_them_are_read() -> None:
    seen = seen_in(encoded(rendered((3, 10), (13, 4))), 2)
    assert (seen.tokens.tolist(), seen.failure) == (IDS, "")
    assert seen.insets == (Inset(3, f"{MEDIUM}0"), Inset(13, f"{MEDIUM}1"))


@pytest.mark.parametrize(
    ("answer", "failure"),
    [
        ({}, "bad_answer"),
        ({"token_ids": IDS}, "bad_answer"),
        ({"token_ids": [-1], "features": None}, "bad_answer"),
        (rendered(), "bad_answer"),
        (rendered((3, 10), (20, 4)), "bad_answer"),
        (rendered((3, 0)), "bad_answer"),
        (rendered((-1, 3)), "bad_answer"),
        (rendered((448, 3)), "bad_answer"),
        (rendered((3, 10), mm_placeholders={"image": []}), "bad_answer"),
        (rendered((3, 10), mm_placeholders={}), "bad_answer"),
        (rendered((3, 10), mm_hashes={"image": ["a-clients-uuid"]}), "unnamed"),
        (
            rendered(mm_hashes={"video": [f"{MEDIUM}1"]}, mm_placeholders={"video": [{"offset": 3, "length": 10}]}),
            "kind",
        ),
        (rendered((440, 10)), "at_end"),
    ],
)
def test_what_is_not_known_well_enough_has_a_reason(answer: Any, failure: str) -> None:
    assert seen_in(encoded(answer), 1).failure == failure


@given(st.lists(st.tuples(st.integers(-2, 12), st.integers(-2, 12)), max_size=4))
def test_media_that_overlap_or_leave_the_prompt_are_no_answer(places: list[tuple[int, int]]) -> None:
    seen = seen_in(encoded(rendered(*places, ids=IDS[:12])), len(places))
    whole = [set(range(start, start + length)) for start, length in places]
    apart = all(one.isdisjoint(other) for i, one in enumerate(whole) for other in whole[:i])
    in_order = places == sorted(places) and all(length > 0 for _, length in places)
    inside = all(part <= set(range(11)) for part in whole)
    assert (seen.failure == "") == (bool(places) and apart and in_order and inside)
    assert not isinstance(seen, RenderedMedia) or len(seen.insets) in (0, len(places))


def test_short_prompts_are_asked_about_now_and_then() -> None:
    worth, guess = Worth(), MediaGuess(100, 1)
    assert worth.asks(guess, 4000), "nothing is known yet"
    worth.learn(guess, 400)
    asked = [worth.asks(guess, 4000) for _ in range(2 * EXPLORED)]
    assert sum(asked) == 2
    assert worth.asks(MediaGuess(100, 4), 4000), f"{TOKENS_EACH} each are too many"
    worth.learn(guess, 5000)
    assert worth.asks(guess, 4000)


def test_blocks_before_an_image_are_those_of_a_text_and_the_others_are_its_own() -> None:
    memory = PromptMemory(text_tokenizer())
    call, guessed = read_call(Endpoint.CHAT, encoded(chat(text(), IMAGE)), MODEL, memory)
    seen = seen_in(encoded(rendered((40, 20))), 1)
    prompt = prompt_from(call, seen.tokens, "media", MODEL, memory, insets=seen.insets)
    plain = prompt_from(call, seen.tokens, "media", MODEL, memory)
    assert (prompt.num_tokens, prompt.is_alone, prompt.has_media, prompt.is_plain) == (len(IDS), False, True, False)
    assert prompt.hashes[:2] == plain.hashes[:2]
    assert not set(prompt.hashes[2:]) & set(plain.hashes)
    assert prompt.salt == plain.salt == guessed.salt
    assert (guessed.is_alone, guessed.guess and guessed.guess.number) == (True, 1)


def test_a_tenants_image_is_nobody_elses() -> None:
    memory = PromptMemory(text_tokenizer())
    call, _ = read_call(Endpoint.CHAT, encoded(chat(text(), IMAGE)), MODEL, memory)
    salted, _ = read_call(Endpoint.CHAT, encoded(chat(text(), IMAGE, cache_salt="x")), MODEL, memory)
    seen = seen_in(encoded(rendered((40, 20))), 1)
    one, other = (prompt_from(each, seen.tokens, "media", MODEL, memory, insets=seen.insets) for each in (call, salted))
    assert not set(one.hashes) & set(other.hashes)
    assert other.salt == namespaced(one.salt, other.namespace)


@asynccontextmanager
async def seeing(**fields: Any) -> AsyncIterator[World]:
    """A world in which every node takes media."""
    async with world(**fields) as w:
        for node in w.nodes.nodes:
            node.takes_media = True
            node.become(pb.NODE_STATE_READY)
        known = w.gateway.clusters
        await until(lambda: all(node.info is not None and node.info.takes_media for node in known.nodes))
        yield w


async def said(w: World, *parts: Any, **fields: Any) -> dict[str, Any]:
    body = chat(*parts, max_tokens=4, **fields) | {"model": "scripted"}
    async with w.http.post(Endpoint.CHAT, json=body) as response:
        assert response.status == 200, await response.text()
        await response.read()
    await w.settled()
    return max(await w.records(), key=lambda record: int(record["seq"]))


@on_loop
async def test_a_chat_with_an_image_is_prefilled_elsewhere() -> None:
    async with seeing() as w:
        fabric = w.nodes.remote[0].fabric
        fabric.rendered = rendered((3, 10))
        record = await said(w, text(WORDS * 5), IMAGE, stream=True)
        assert (record["route"], record["reason"], record["fallbacks"]) == ("remote", "long", [])
        assert record["total"] == len(IDS)
        (question,) = fabric.asked_to_render
        assert (question["mm_payload"], "kv_transfer_params" in question) == ("none", False)
        legs = [body for node in w.nodes.nodes for body in node.bodies]
        assert len(legs) == 2
        for leg in legs:
            assert leg["messages"] == question["messages"]
            assert "prompt_token_ids" not in leg["kv_transfer_params"]
            assert "resumable" not in leg["kv_transfer_params"]
        assert 'prfaas_prompt_readings_total{how="seen"} 1.0' in await w.metrics()


@on_loop
async def test_an_image_that_is_read_in_another_process_travels_as_well() -> None:
    async with seeing() as w:
        w.nodes.remote[0].fabric.rendered = rendered((3, 10))
        large = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{'AAAA' * 200_000}"}}
        record = await said(w, text(WORDS * 5), large)
        assert (record["route"], record["total"], record["fallbacks"]) == ("remote", len(IDS), [])


@on_loop
async def test_who_does_not_see_computes_no_image() -> None:
    async with seeing(remote=2, local=0) as w:
        blind = w.nodes.remote[0]
        blind.takes_media = False
        blind.become(pb.NODE_STATE_READY)
        known = w.gateway.clusters
        await until(lambda: not all(node.info and node.info.takes_media for node in known.nodes))
        blind.fabric.rendered = rendered((3, 10))
        for _ in range(3):
            assert (await said(w, text(WORDS * 5), IMAGE))["route"] == "remote"
        assert not blind.bodies


@on_loop
async def test_nobody_is_asked_where_nobody_else_could_compute_it() -> None:
    async with seeing(remote=0, local=0, decode=2) as w:
        fabric = w.nodes.decode[0].fabric
        fabric.rendered = rendered((3, 10))
        record = await said(w, text(WORDS * 5), IMAGE)
        assert (record["reason"], record["fallbacks"], fabric.asked_to_render) == ("unshared", [], [])


@pytest.mark.parametrize(
    ("part", "fields", "why"),
    [
        (IMAGE | {"uuid": "logo"}, {}, "named"),
        ({"type": "image_url", "image_url": {"url": "https://a.test/b.png"}}, {}, "address"),
        ({"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}, {}, "kind"),
        (IMAGE, {"truncate_prompt_tokens": 100}, "truncated"),
    ],
)
@on_loop
async def test_what_no_engine_is_asked_for_is_counted(part: Any, fields: dict[str, Any], why: str) -> None:
    async with seeing(allowed_media_domains=("a.test",)) as w:
        record = await said(w, text(WORDS * 5), part, **fields)
        assert (record["reason"], record["fallbacks"]) == ("unshared", [f"media_{why}"])
        assert not w.nodes.remote[0].fabric.asked_to_render


@on_loop
async def test_engines_that_cannot_say_are_not_asked_again_for_a_while() -> None:
    async with seeing() as w:
        fabric = w.nodes.remote[0].fabric
        for answer, why in ((None, "404"), ({"token_ids": IDS}, "bad_answer")):
            fabric.rendered = answer
            style = {"reasoning_effort": "low"} if answer else {}
            assert (await said(w, text(WORDS * 5), IMAGE, **style))["fallbacks"] == [f"media_{why}"]
            assert (await said(w, text(WORDS * 5), IMAGE, **style))["fallbacks"] == ["media_differs"]
        assert len(fabric.asked_to_render) == 2


@pytest.mark.parametrize("why", ["digest_mismatch", "multimodal"])
@on_loop
async def test_engines_that_see_otherwise_are_found_out(why: str) -> None:
    async with seeing() as w:
        fabric = w.nodes.remote[0].fabric
        fabric.rendered = rendered((3, 10))
        w.nodes.remote[0].script.prefill = [f"409 {why}"]
        record = await said(w, text(WORDS * 5), IMAGE)
        assert record["fallbacks"] == [f"prefill_{why}", "recompute_no_prefill"]
        await until(lambda: w.gateway.door.rooms.engine_readings.num_styles)
        record = await said(w, text(WORDS * 5), IMAGE)
        assert (record["reason"], record["fallbacks"]) == ("unshared", ["media_differs"])
