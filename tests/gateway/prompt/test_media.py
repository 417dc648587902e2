"""Images and adapters: engines are asked for them, and no KVCache of theirs is anybody else's."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from gateway.api.openai import Endpoint, parse
from gateway.errors import ApiError, BadRequest
from gateway.prompt.media import KINDS, TOKENS_EACH, apart, may_have_media
from gateway.prompt.prompt import Hashing, Prompt, PromptMemory, PromptModel, read_call
from tests.gateway.memory.pipeline import Pipelined, on_memory_loop, pipeline
from tests.gateway.worlds import until
from tests.prompts.builders import text_tokenizer
from transport.control.proto import node_pb2 as pb

IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
OTHER_IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
WORDS = "the quick brown fox " * 40
MODEL = PromptModel(
    names=("m",), max_model_len=1 << 20, hashing=Hashing(16, b"salt"), adapters=frozenset({"terse"}), takes_media=True
)


def chat(*parts: Any, **fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": list(parts)}], **fields}


def read(body: dict[str, Any], model: PromptModel = MODEL) -> Prompt:
    return read_call(Endpoint.CHAT, json.dumps(body).encode(), model, PromptMemory(text_tokenizer()))[1]


def text(words: str = WORDS) -> dict[str, str]:
    return {"type": "text", "text": words}


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("has_type", [True, False])
def test_what_is_no_text_is_taken_apart(kind: str, has_type: bool) -> None:
    medium = {kind: {"url": "x"}} | ({"type": kind} if has_type else {})
    call = parse(Endpoint.CHAT, json.dumps(chat(text("a"), medium, text("b"), top_p=0.5)).encode())
    assert may_have_media(call.fields["messages"])
    found = apart(call, may_be_named=False)
    assert found is not None
    assert found.number == 1
    assert json.loads(found.texts.body({})) == chat(text("a"), text("b"), top_p=0.5)


@pytest.mark.parametrize(
    ("part", "unread"),
    [
        (IMAGE, ""),
        ({"image_url": "data:x"}, ""),
        ({"type": None, "image_url": "data:x"}, ""),
        ({"type": "input_image", "image_url": "data:x"}, ""),
        ({"image_url": "data:x", "video_url": "https://a.test"}, ""),
        # What vLLM would fetch is what counts, whatever stands beside it.
        ({"type": "input_image", "image_url": "https://a.test", "input_image": "data:x"}, "address"),
        ({"type": "input_image", "input_image": "data:x"}, "address"),
        ({"image_url": "https://a.test", "input_image": "data:x"}, "address"),
        ({"type": "video_url", "image_url": "data:x"}, "kind"),
        ({"input_image": "data:x"}, "kind"),
    ],
)
def test_an_image_is_in_the_request_where_vllm_looks_for_it(part: dict[str, Any], unread: str) -> None:
    found = apart(
        parse(Endpoint.CHAT, json.dumps(chat(text("a"), part)).encode()), may_be_named=True, domains={"a.test"}
    )
    assert found is not None
    assert found.unread == unread


def test_words_of_a_text_are_no_media() -> None:
    call = parse(
        Endpoint.CHAT, json.dumps(chat(text('write "image_url" here'), {"type": "text", "text": "x"})).encode()
    )
    assert apart(call, may_be_named=False) is None
    quoted = parse(Endpoint.CHAT, json.dumps({"model": "m", "messages": "image_url"}).encode())
    assert apart(quoted, may_be_named=False) is None


def test_a_prompt_with_an_image_has_blocks_of_its_own_and_a_guessed_length() -> None:
    plain, shown, other = read(chat(text())), read(chat(text(), IMAGE)), read(chat(text(), OTHER_IMAGE))
    assert (plain.is_alone, shown.is_alone, shown.how) == (False, True, "media")
    assert shown.num_tokens == plain.num_tokens + TOKENS_EACH
    names = [set(prompt.hashes) for prompt in (plain, shown, other)]
    assert all(names)
    assert not (names[0] & names[1])
    assert not (names[1] & names[2])
    assert not (names[0] & names[2])
    assert read(chat(text(), IMAGE)) == shown
    assert read(chat(IMAGE, text())).hashes != shown.hashes


def test_a_guess_never_says_that_a_prompt_does_not_fit() -> None:
    short = msgspec.structs.replace(MODEL, max_model_len=400)
    assert read(chat(text(), IMAGE), short).num_tokens == 399
    with pytest.raises(BadRequest, match="maximum context length"):
        read(chat(text(WORDS * 20), IMAGE), short)


def test_an_adapters_prompt_has_blocks_of_its_own() -> None:
    plain, bent = read(chat(text())), read(chat(text(), model="terse"))
    assert (bent.adapter, bent.is_alone, bent.num_tokens) == ("terse", True, plain.num_tokens)
    assert not set(plain.hashes) & set(bent.hashes)
    both = read(chat(text(), IMAGE, model="terse"))
    assert (both.adapter, both.has_media) == ("terse", True)
    with pytest.raises(ApiError, match="does not exist"):
        read(chat(text(), model="other"))


def test_tenants_do_not_find_each_others_media_by_name() -> None:
    named = IMAGE | {"uuid": "logo"}
    assert read(chat(text(), named)).has_media
    ours = msgspec.structs.replace(MODEL, hashing=Hashing(16, b"salt", "team"))
    with pytest.raises(BadRequest, match="media that other clients sent") as refusal:
        read(chat(text(), named), ours)
    assert refusal.value.param == "messages[0].content[1].uuid"


@pytest.mark.parametrize("key", ["image_url", r"image_\u0075rl"])
def test_a_text_with_an_image_inside_is_not_read_as_a_text(key: str) -> None:
    hidden = text() | {"uuid": "logo", "image_url": "http://a/b.png"}  # which vLLM takes for an image
    body = json.dumps(chat(hidden)).replace("image_url", key).encode()
    with pytest.raises(BadRequest, match="cannot have a 'uuid'"):
        read_call(Endpoint.CHAT, body, MODEL, PromptMemory(text_tokenizer()))


def test_a_model_of_texts_takes_nothing_else() -> None:
    with pytest.raises(BadRequest, match="takes text parts only"):
        read(chat(text(), IMAGE), msgspec.structs.replace(MODEL, takes_media=False))


@asynccontextmanager
async def fitted(**nodes: int) -> AsyncIterator[Pipelined]:
    """A gateway whose last decode node sees, and serves `terse`."""
    async with pipeline(**nodes) as w:
        able = w.nodes.decode[-1]
        able.adapters, able.takes_media = ["terse"], True
        able.become(pb.NODE_STATE_READY)
        await until(lambda: w.clusters.served and w.clusters.served.adapters)
        yield w


@on_memory_loop
async def test_an_image_goes_to_an_engine_that_sees_and_to_no_prefill_node() -> None:
    async with fitted(decode=3) as w:
        asked = chat(text(WORDS * 5), IMAGE, max_tokens=4) | {"model": "scripted"}
        for _ in range(4):
            async with w.http.post(Endpoint.CHAT, json=asked) as response:
                assert response.status == 200, await response.text()
                assert response.headers["x-prfaas-route"].startswith("local; node=d2; ")
                assert response.headers["x-prfaas-route"].endswith("reason=unshared")
        body = w.nodes.decode[-1].bodies[-1]
        assert body["messages"] == asked["messages"]
        assert "transfer_id" not in body["kv_transfer_params"]
        assert "resumable" not in body["kv_transfer_params"]
        assert not any(node.bodies for node in w.nodes.nodes if node.node_id != "d2")
        await w.settled()


@on_memory_loop
async def test_an_adapter_is_asked_for_by_its_name_and_listed_below_its_model() -> None:
    async with fitted(decode=2) as w:
        async with w.http.get("/v1/models") as response:
            cards = {card["id"]: card.get("parent") for card in (await response.json())["data"]}
        assert cards == {"scripted": None, "terse": "scripted"}
        async with w.http.get("/v1/models/terse") as response:
            assert (await response.json())["id"] == "terse"
        asked = chat(text(WORDS * 5), max_tokens=4, model="terse", stream=True)
        async with w.http.post(Endpoint.CHAT, json=asked) as response:
            assert (response.status, (await response.text()).count("[DONE]")) == (200, 1)
        (body,) = w.nodes.decode[-1].bodies
        assert body["model"] == "terse"
        assert not any(node.bodies for node in w.nodes.nodes if node.node_id != "d1")
        w.nodes.decode[-1].adapters = []
        w.nodes.decode[-1].become(pb.NODE_STATE_READY)
        await until(lambda: w.clusters.served and not w.clusters.served.adapters)
        async with w.http.post(Endpoint.CHAT, json=asked) as response:
            assert response.status == 404
        await w.settled()


@on_memory_loop
async def test_marks_of_what_nobody_shares_are_told_so() -> None:
    async with fitted(decode=1) as w:
        marked = text(WORDS * 5) | {"prompt_cache_breakpoint": {"mode": "explicit"}}
        async with w.http.post(Endpoint.CHAT, json=chat(marked, IMAGE) | {"model": "scripted"}) as response:
            answer = await response.json()
        assert response.status == 200, answer
        (told,) = answer["usage"]["prompt_tokens_details"]["breakpoints"]
        assert (told["kept"], told["reason"]) == (0, "unshared")
        await w.settled()


@on_memory_loop
async def test_where_nobody_sees_an_image_is_refused() -> None:
    async with pipeline() as w:
        async with w.http.post(Endpoint.CHAT, json=chat(text(), IMAGE) | {"model": "scripted"}) as response:
            error = (await response.json())["error"]
        assert (response.status, error["message"].endswith("takes text parts only.")) == (400, True)
        assert not any(node.bodies for node in w.nodes.nodes)
