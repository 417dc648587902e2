"""Real vLLM servers whose models see, behind our gateway: chats with images travel, and no image is taken for another.

What one server alone would answer comes from the decode node's, asked directly under a salt of its own: no KVCache from
elsewhere is of use to it.
"""

import asyncio
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gateway.cluster.served_model import salt_of
from gateway.prompt.media_render import RenderedMedia, seen_in
from hybrid_cache.cache.events import Medium
from hybrid_cache.hashing.block_hash import block_hashes
from hybrid_cache.layout.layout import ModelLayout
from tests.e2e.harness import Bench
from tests.vllm.servers.serving import heard, leg_params, posted
from tests.vllm.servers.vision import AROUND, IMAGE_TOKENS, build_planes, build_vision, picture

MODELS = {"idefics3": build_vision, "paddleocr_vl": build_planes}
CHAT = "/v1/chat/completions"
SMALL = (84, 112)
BLOCK, BLOCKS = 32, 160  # tokens, and how many of them a server has
TRIES = 4

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200), pytest.mark.dimensions(start="images")]


@pytest.fixture(scope="module", params=MODELS)
def bench(request: pytest.FixtureRequest, models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    model = MODELS[request.param](models)
    document = {
        "model": {"path": str(model), "name": "tiny"},
        "gateway": {"port": 0, "threshold_tokens": 300},
        "node": {
            "engine": "vllm",
            "engine_args": ["--dtype", "float32", "--num-gpu-blocks-override", str(BLOCKS)],
            "chunk_tokens": 256,
            "block_size": BLOCK,
            "max_model_len": 2048,
            "cache_bytes": 64 << 20,
        },
        "clusters": [
            {"name": "east", "kind": "prfaas", "nodes": [{"node_id": "far", "role": "prefill", "transport": "tcp"}]},
            {"name": "west", "kind": "pd", "nodes": [{"node_id": "decode0", "role": "decode"}]},
        ],
    }
    with Bench(document, model, tmp_path_factory.mktemp("images")) as running:
        yield running


def image(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def numbers(*which: int) -> dict[str, Any]:
    return {"type": "text", "text": " ".join(map(str, range(*which)))}


def chat(*parts: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {
        "model": "tiny",
        "messages": [{"role": "user", "content": list(parts)}],
        "max_tokens": 12,
        "temperature": 0,
        "ignore_eos": True,
    } | fields


def about(*images: str, which: tuple[int, int] = (0, 120)) -> dict[str, Any]:
    """A chat about images; without any its content has the same form."""
    return chat(*map(image, images), numbers(*which))


@dataclass(frozen=True)
class Said:
    """An answer: its text, prompt tokens, and those of them that were cached."""

    text: str
    tokens: int
    cached: int = 0


async def answered(bench: Bench, url: str, asked: dict[str, Any], name: str = "") -> Said:
    async with bench.session.post(f"{url}{CHAT}", json=asked, headers={"x-request-id": name or bench.name()}) as answer:
        said = await answer.json()
    assert "choices" in said, said
    cached = (said["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return Said(said["choices"][0]["message"]["content"], said["usage"]["prompt_tokens"], cached)


async def alone(bench: Bench, asked: dict[str, Any]) -> Said:
    said = await answered(bench, bench.node("decode0").engine_url, asked | {"cache_salt": uuid.uuid4().hex})
    return Said(said.text, said.tokens)


async def travelled(bench: Bench, asked: dict[str, Any]) -> dict[str, Any]:
    """The record of a chat whose answer was that of one server alone."""
    expected, name = await alone(bench, asked), bench.name()
    said = await answered(bench, bench.system.api_url, asked, name)
    record = await bench.record(name)
    assert (said.text, said.tokens) == (expected.text, expected.tokens), record
    assert (record["total"], record["fallbacks"]) == (expected.tokens, [])
    return record


async def seen(bench: Bench, asked: dict[str, Any], number: int) -> RenderedMedia:
    body = asked | {"mm_payload": "none"}
    async with bench.session.post(f"{bench.node('decode0').engine_url}{CHAT}/render", json=body) as answer:
        found = seen_in(await answer.read(), number)
    assert not found.failure
    return found


def test_images_are_answered_as_by_one_server_and_never_mistaken_for_each_other(bench: Bench) -> None:
    async def scenario() -> None:
        one, other = picture(1), picture(2)
        chats = [about(one), about(other), about(one, other), about(other, one), about()]
        expected = [await alone(bench, each) for each in chats]
        assert len({said.text for said in expected}) == len(chats), "the model must see"
        if bench.model.name == "idefics3":
            assert expected[0].tokens == expected[4].tokens + IMAGE_TOKENS + AROUND
        for again in (False, True):
            for each, alike in zip(chats, expected, strict=True):
                said = await answered(bench, bench.system.api_url, each)
                assert (said.text, said.tokens) == (alike.text, alike.tokens)
                assert said.cached > 0 or not again, "somebody's cache knows them"

    bench.run(scenario())


def test_a_chat_with_images_is_prefilled_remotely_and_delivered(bench: Bench) -> None:
    async def scenario() -> None:
        for asked in (
            about(which=(1000, 1250)),
            about(picture(3), which=(2000, 2250)),
            about(*map(picture, range(4, 9))),
        ):
            record = await travelled(bench, asked)
            assert (record["route"], record["reason"], record["prefill_node"]) == ("remote", "long", "far")
            assert record["bytes"] > 0
        await bench.wait_idle()

    bench.run(scenario())


def test_wherever_images_stand_their_kvcache_is_used(bench: Bench) -> None:
    """In the middle, at both ends of a message, and across each place of a block's border."""

    async def scenario() -> None:
        begins = set()
        for before in range(12):  # each begins otherwise: nothing is held for it
            text = {"type": "text", "text": f"{before}" + " ba" * before}
            shown = [image(picture(20 + before)), numbers(300, 450), *2 * [image(picture(40, SMALL))]]
            asked = chat(*([text] if before else []), *shown)
            begins.update(inset.start % BLOCK for inset in (await seen(bench, asked, 3)).insets)
            record = await travelled(bench, asked)
            assert record["route"] == "remote", record
        assert len(begins) > 10, "else no image crosses a border"

    bench.run(scenario())


def test_a_longer_chat_about_the_same_image_goes_on_from_what_is_cached(bench: Bench) -> None:
    async def scenario() -> None:
        first = await travelled(bench, about(picture(50), which=(0, 200)))
        assert first["cached"] == 0
        longer = await travelled(bench, about(picture(50), which=(0, 300)))
        assert longer["cached"] >= first["total"] - 2 * BLOCK
        other = await travelled(bench, about(picture(51), which=(0, 300)))
        assert (other["cached"], other["total"]) == (0, longer["total"])
        later = [numbers(0, 200), image(picture(52)), numbers(200, 250)]
        first = await travelled(bench, chat(*later))
        other = await travelled(bench, chat(later[0], image(picture(53)), later[2]))
        before = (await seen(bench, chat(*later), 1)).insets[0].start
        assert other["cached"] == before // BLOCK * BLOCK, "what is before the image is everybody's, and no more"

    bench.run(scenario())


def test_the_gateway_hears_what_nodes_hold_of_a_chat_with_an_image(bench: Bench) -> None:
    async def scenario() -> None:
        asked = about(picture(60), which=(500, 700))
        await travelled(bench, asked)
        layout = ModelLayout.from_json((await bench.describe("decode0")).layout_json)
        found = await seen(bench, asked, 1)
        names = block_hashes(found.tokens[:-1], layout.block_size, salt_of(layout), insets=found.insets)
        assert len(names) > 10
        await heard(bench, "decode0", names, Medium.ENGINE)
        await heard(bench, "far", names, Medium.MEMORY)

    bench.run(scenario())


def test_kvcache_of_another_image_is_refused_and_a_landing_that_fails_is_recomputed(bench: Bench) -> None:
    async def scenario() -> None:
        far, decode0 = (f"{bench.node(name).engine_url}{CHAT}" for name in ("far", "decode0"))
        one, other = about(picture(70), which=(0, 100)), about(picture(71), which=(0, 100))
        found = await seen(bench, one, 1)
        assert found.tokens.tolist() == (await seen(bench, other, 1)).tokens.tolist()
        params = await leg_params(bench, "decode0", found.tokens.tolist(), found.insets)
        wrong = await posted(bench, far, other | {"max_tokens": 1, "kv_transfer_params": params})
        assert wrong["kv_transfer_params"] == {"delivered": False, "reason": "digest_mismatch"}
        right = await posted(bench, far, one | {"max_tokens": 1, "kv_transfer_params": params})
        assert right["kv_transfer_params"]["delivered"], right
        claim = {"do_remote_prefill": True, "transfer_id": params["ticket"]["transfer_id"], "salt": params["salt"]}
        for asked, reason in ((other, "digest_mismatch"), (one, "unknown_transfer")):
            said = await posted(bench, decode0, asked | {"kv_transfer_params": claim | {"timeout_s": 5.0}})
            assert said["choices"][0]["message"]["content"] == (await alone(bench, asked)).text
            assert said["kv_transfer_params"] == {"recomputed": True, "reason": reason}
        await bench.wait_idle()

    bench.run(scenario())


def test_chats_that_are_preempted_are_seen_again(bench: Bench) -> None:
    """Their landings are used up by then: their decode node computes them, and has what they show. On a busy machine landings
    may come one after the other, and none is preempted: then others are asked.
    """

    async def preempted(first: int) -> bool:
        asked = [about(picture(first + n), which=(0, 300)) | {"max_tokens": 300} for n in range(4)]
        expected = [await alone(bench, each) for each in asked]
        assert sum(said.tokens + 300 for said in expected) > BLOCKS * BLOCK, "else nobody would be preempted"
        url, names = bench.node("decode0").engine_url, [bench.name() for _ in asked]
        before = await bench.metric(url, "vllm:num_preemptions_total")
        said = await asyncio.gather(
            *(answered(bench, bench.system.api_url, each, name) for each, name in zip(asked, names, strict=True))
        )
        assert [each.text for each in said] == [each.text for each in expected]
        records = [await bench.record(name) for name in names]
        assert [record["fallbacks"] for record in records] == [[]] * len(asked)
        return bool(await bench.metric(url, "vllm:num_preemptions_total") > before)

    async def scenario() -> None:
        for first in range(90, 90 + 4 * TRIES, 4):
            if await preempted(first):
                return
        raise AssertionError(f"{TRIES} times nothing was preempted")

    bench.run(scenario())


def test_what_a_client_names_itself_stays_at_its_decode_node(bench: Bench) -> None:
    async def scenario() -> None:
        shown = await seen(bench, about(picture(80)), 1)
        forged = chat(image(picture(81)) | {"uuid": shown.insets[0].name}, numbers(120))
        name, expected = bench.name(), await alone(bench, chat(image(picture(81)), numbers(120)))
        assert (await answered(bench, bench.system.api_url, forged, name)).text == expected.text
        record = await bench.record(name)
        assert (record["reason"], record["fallbacks"]) == ("unshared", ["media_named"])
        await travelled(bench, about(picture(80)))

    bench.run(scenario())
