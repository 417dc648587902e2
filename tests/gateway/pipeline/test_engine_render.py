"""A request whose KVCache was refused for its tokens teaches the gateway its style: the next one is read by an engine."""

from pathlib import Path
from typing import Any

from tests.gateway.memory.pipeline import on_memory_loop, pipeline
from tests.gateway.worlds import Deployment, on_loop, until, world

LONG = "the quick brown fox jumps over the lazy dog " * 40
IDS = [7, 8, 9] * 150


async def chat(w: Deployment, text: str = LONG, **fields: Any) -> dict[str, Any]:
    body = {"model": "scripted", "messages": [{"role": "user", "content": text}]} | fields
    async with w.http.post("/v1/chat/completions", json=body) as response:
        assert response.status == 200, await response.text()
        await response.read()
    await w.settled()
    records = await w.records()
    return max(records, key=lambda record: int(record["seq"]))


async def mistaken(w: Deployment) -> None:
    """A chat goes wrong, and is learned from."""
    w.nodes.remote[0].script.prefill = ["409 digest_mismatch"]
    record = await chat(w)
    assert record["fallbacks"] == ["prefill_digest_mismatch", "recompute_no_prefill"]
    styles = w.door.rooms.engine_readings
    await until(lambda: styles.num_styles)


def legs(w: Deployment) -> list[dict[str, Any]]:
    return [body for node in w.nodes.nodes for body in node.bodies]


@on_memory_loop
async def test_the_next_chat_of_that_style_has_the_engines_tokens_on_both_legs() -> None:
    async with pipeline() as w:
        fabric = w.nodes.remote[0].fabric
        fabric.rendered = {"token_ids": IDS, "sampling_params": {}}
        assert (await chat(w))["fallbacks"] == []
        assert fabric.asked_to_render == []
        await mistaken(w)
        before = len(legs(w))
        record = await chat(w, "another one " + LONG, temperature=0)
        assert (record["fallbacks"], record["total"], record["route"]) == ([], len(IDS), "remote")
        assert fabric.asked_to_render[0]["messages"][0]["content"] == "another one " + LONG
        assert "kv_transfer_params" not in fabric.asked_to_render[0]
        asked = legs(w)
        assert len(asked) == before + 2
        handed = [body["kv_transfer_params"].get("prompt_token_ids") for body in asked]
        assert handed.count(IDS) == 2
        assert 'prfaas_prompt_readings_total{how="engine"} 1.0' in await w.metrics()
        again = await chat(w, LONG, reasoning_effort="low")  # of another style
        assert (again["fallbacks"], len(fabric.asked_to_render)) == ([], 1)


@on_memory_loop
async def test_where_that_is_no_help_its_decode_node_computes_it_alone_and_nobody_else() -> None:
    async with pipeline() as w:
        fabric = w.nodes.remote[0].fabric
        fabric.rendered = {"token_ids": IDS}
        await mistaken(w)
        await mistaken(w)
        record: dict[str, Any] = {}
        while not record or record["reason"] != "unshared":  # what was learned is kept a moment later
            record = await chat(w)
        assert record["fallbacks"] == ["engine_reading_differs"]
        assert record["prefill_node"] == record["decode_node"]


@on_memory_loop
async def test_an_engine_that_does_not_read_for_others_is_asked_once() -> None:
    async with pipeline() as w:
        fabric = w.nodes.remote[0].fabric
        await mistaken(w)
        for fallback in ("engine_reading_404", "engine_reading_differs"):
            record = await chat(w)
            assert (record["reason"], record["fallbacks"]) == ("unshared", [fallback])
        assert len(fabric.asked_to_render) == 1
        assert (await w.fallbacks())["engine_reading_404"] == 1


@on_memory_loop
async def test_an_answer_that_is_none_and_an_engine_that_is_gone_are_counted() -> None:
    async with pipeline(decode=1) as w:
        fabric = w.nodes.remote[0].fabric
        await mistaken(w)
        for rendered in ({}, [], [{"token_ids": IDS}] * 2, {"token_ids": [-1]}, {"token_ids": "x"}):
            fabric.rendered = rendered
            assert (await chat(w))["fallbacks"] == ["engine_reading_bad_answer"]
        fabric.render_status = 400
        assert (await chat(w))["fallbacks"] == ["engine_reading_400"]


@on_memory_loop
async def test_plain_prompts_are_learned_of_as_well() -> None:
    async with pipeline() as w:
        w.nodes.remote[0].script.prefill = ["409 digest_mismatch"]
        await w.complete(LONG)
        await w.idle()
        await until(lambda: w.door.rooms.engine_readings.num_styles)
        w.nodes.remote[0].fabric.rendered = [{"token_ids": IDS}]
        await w.complete(LONG)
        record = max(await w.records(), key=lambda each: int(each["seq"]))
        assert (record["fallbacks"], record["total"]) == ([], len(IDS))
        assert all("prompt_token_ids" not in body["kv_transfer_params"] for body in legs(w))
        await w.settled()


@on_loop
async def test_a_stream_goes_on_from_the_engines_tokens() -> None:
    async with world() as w:
        await mistaken(w)
        w.nodes.remote[0].fabric.rendered = {"token_ids": IDS}
        faults = ["die_after 1"]
        for node in w.nodes.decode:
            node.script.is_resumable, node.script.decode = True, faults  # shared: the node that is asked first dies
        record = await chat(w, stream=True)
        assert (record["takeovers"], record["total"]) == (1, len(IDS))
        going_on = [body["kv_transfer_params"] for body in legs(w) if body["kv_transfer_params"].get("answered")]
        assert going_on
        assert {(*params["prompt_token_ids"], *params["answered"]) for params in going_on} == {(*IDS, 0)}


@on_memory_loop
async def test_chats_of_models_with_renderers_of_their_own_are_read_by_engines_from_the_first_one_on(
    tmp_path: Path,
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt_oss"}')
    async with pipeline(tokenizer_dir=tmp_path) as w:
        fabric = w.nodes.remote[0].fabric
        fabric.rendered = {"token_ids": IDS}
        assert (await chat(w))["total"] == len(IDS)
        await w.complete(LONG)  # plain prompts have nothing to do with it
        assert len(fabric.asked_to_render) == 1
        fabric.rendered = None  # no vLLM, then
        for _ in range(2):
            record = await chat(w)
            assert (record["fallbacks"], record["route"]) == ([], "remote")
        assert len(fabric.asked_to_render) == 2
        await w.settled()
