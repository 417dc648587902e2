"""Several models in one gateway: each request is read, routed and answered by its own."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gateway.auth.keyring import digest_of
from gateway.config.gateway import GatewayConfig, NodeAddress
from gateway.config.models import ModelTable
from gateway.config.operators import OperatorConfig
from gateway.config.tenants import TenantConfig
from gateway.models.served import config_of
from planner.decisions.admission.classes import UNPROMISED
from tests.gateway.layouts import LAYOUT
from tests.gateway.memory.pipeline import on_memory_loop, pipeline
from tests.gateway.models.worlds import LONG, OTHER, TABLE, ask, bring, error_of, tokenizers, two_models
from tests.gateway.routing.test_prefix_transfers import holds
from tests.gateway.scripted import ScriptedNode
from tests.gateway.worlds import until
from transport.control.proto import node_pb2 as pb
from transport.control.settings import SettingsError

WHOLE = ModelTable(name=OTHER, tokenizer_dir=TABLE.tokenizer_dir, threshold_tokens=1e9)


def leave(*nodes: ScriptedNode) -> None:
    for node in nodes:
        node.become(pb.NODE_STATE_DRAINING)


@on_memory_loop
async def test_each_request_goes_to_nodes_of_its_model_and_is_counted_there() -> None:
    async with two_models() as w:
        for number in range(6):
            assert await ask(w, "scripted", f"{number} {LONG}") == 200
            assert await ask(w, OTHER, f"{number} {LONG}") == 200
            assert await ask(w, "sibling", f"hello {number}") == 200
        records = await w.records()
        pairs = {(each["model"], each["prefill_node"], each["decode_node"]) for each in records}
        assert pairs == {("scripted", "r0", "d0"), (OTHER, "r1", "d1"), (OTHER, "p1", "d1")}
        counts = await w.counted("prfaas_model_requests_total{")
        assert counts == {"scripted": 6.0, OTHER: 12.0}
        assert {body["model"] for body in w.nodes.decode[1].bodies} == {OTHER}
        await w.settled()


@on_memory_loop
async def test_prompts_are_read_by_their_models_tokenizer_and_compared_with_its_threshold() -> None:
    async with two_models(models=(WHOLE,)) as w:
        assert (await ask(w, "scripted", LONG), await ask(w, OTHER, LONG)) == (200, 200)
        first, other = await w.records()
        assert other["total"] == len(LONG) > 3 * first["total"]
        assert (first["threshold"], other["threshold"]) == (100, 1e9)
        assert (first["route"], other["route"]) == ("remote", "local")
        for model, count in (("scripted", first["total"]), (OTHER, len(LONG))):
            async with w.http.post("/tokenize", json={"model": model, "prompt": LONG}) as answer:
                found = await answer.json()
            assert found["count"] == count
            async with w.http.post("/detokenize", json={"model": model, "tokens": found["tokens"]}) as answer:
                assert (await answer.json())["prompt"] == LONG


@on_memory_loop
async def test_no_prefix_of_one_model_is_found_by_another_with_the_same_weights() -> None:
    twin = ModelTable(name="twin", tokenizer_dir=TABLE.tokenizer_dir)
    async with pipeline(remote=0, local=1, decode=2, tokenizers=tokenizers, models=(twin,)) as w:
        first, second = w.nodes.decode
        bring(second, "twin", LAYOUT)
        bring(w.nodes.local[0], "twin", LAYOUT)
        await until(lambda: w.models.serves("twin"))
        assert w.clusters.models["twin"].hashing == w.clusters.models[""].hashing
        await holds(w, first, [LONG])
        for model in ("scripted", "twin"):
            assert await ask(w, model, LONG) == 200
        own, other = await w.records()
        assert (own["decode_node"], other["decode_node"]) == ("d0", "d1")
        assert own["cached"] > 0 == other["cached"]


@on_memory_loop
async def test_a_model_without_nodes_is_unavailable_by_its_name_and_others_are_served() -> None:
    async with two_models() as w:
        leave(w.nodes.decode[1])
        await until(lambda: not w.models.serves(OTHER))
        found = await error_of(w, OTHER)
        assert (found["status"], found["code"], found["type"]) == (503, "no_decode_node", "server_error")
        assert found["message"] == "The model 'other' has no decode node ready."
        assert await ask(w, "scripted") == 200
        async with w.http.get("/readyz") as whole, w.http.get("/readyz?model=other") as other:
            assert (whole.status, other.status) == (200, 503)
        async with w.http.get("/readyz?model=scripted") as first:
            assert first.status == 200
        async with w.http.get("/metrics") as answer:
            assert 'prfaas_model_ready{model="other"} 0.0' in await answer.text()
        bring(w.nodes.decode[1])
        await until(lambda: w.models.serves(OTHER))
        assert await ask(w, OTHER) == 200


@on_memory_loop
async def test_estimates_and_plans_are_told_by_model_where_there_are_several() -> None:
    async with two_models() as w:
        for model in ("scripted", OTHER):
            assert await ask(w, model, LONG) == 200
        await w.idle()
        async with w.http.get("/metrics") as answer:
            told = await answer.text()
        for model in ("scripted", OTHER):
            assert f'prfaas_plan_version{{model="{model}"}} 0.0' in told
            assert f'prfaas_estimate_error_ratio{{model="{model}",of=' in told
    async with pipeline() as w, w.http.get("/metrics") as answer:
        assert "prfaas_plan_version 0.0" in await answer.text()


@on_memory_loop
async def test_a_model_has_no_more_requests_than_its_table_says() -> None:
    async with two_models(models=(replace(TABLE, max_in_flight=1),)) as w:
        gate = w.nodes.decode[1].script.decode_gate = asyncio.Event()
        first = asyncio.create_task(ask(w, OTHER))
        await until(lambda: w.nodes.decode[1].running)
        found = await error_of(w, OTHER)
        assert (found["status"], found["message"]) == (
            429,
            "The gateway already serves 1 requests of this model, its limit. Please retry.",
        )
        assert await ask(w, "scripted") == 200
        w.configure(replace(w.config, models=(TABLE,)))
        second = asyncio.create_task(ask(w, OTHER))
        await until(lambda: len(w.nodes.decode[1].bodies) == 2)
        gate.set()
        assert (await first, await second) == (200, 200)
        await w.settled()
        await w.idle()
        assert [parts.in_flight for parts in w.models] == [0, 0]


@on_memory_loop
async def test_each_answer_counts_among_the_requests_of_a_model() -> None:
    """As it does among the gateway's."""
    async with two_models(models=(replace(TABLE, max_in_flight=2),)) as w:
        gate = w.nodes.decode[1].script.decode_gate = asyncio.Event()
        assert await ask(w, OTHER, n=3) == 400
        first = asyncio.create_task(ask(w, OTHER))
        await until(lambda: w.nodes.decode[1].running)
        assert await ask(w, OTHER, n=2) == 429
        gate.set()
        assert await first == 200
        await w.idle()  # its place is free a moment after its answer
        assert await ask(w, OTHER, n=2) == 200
        await w.settled()
        await w.idle()
        assert [parts.in_flight for parts in w.models] == [0, 0]


def test_workers_have_parts_of_what_a_model_may_have() -> None:
    table = replace(TABLE, max_in_flight=9)
    config = GatewayConfig(nodes=(NodeAddress(agent="127.0.0.1:7001"),), tokenizer_dir=Path("t"), models=(table,))
    limits = [config_of(config, config.catalog, key, workers=4).max_in_flight for key in ("", OTHER)]
    assert limits == [config.max_in_flight, 2]
    with pytest.raises(SettingsError, match=f"{OTHER}.*max_in_flight.*at least the number of workers, 16"):
        replace(config, workers=16)


@on_memory_loop
async def test_the_line_of_one_model_is_none_of_another() -> None:
    async with two_models(max_waiting=1) as w:
        others = next(parts.line for parts in w.models if parts.key == OTHER)
        with others.place() as place:
            waiting = asyncio.create_task(place.wait())
            await until(lambda: len(others))
            assert (others.must_wait(UNPROMISED), w.line.must_wait(UNPROMISED)) == (True, False)
            assert await ask(w, "scripted", LONG) == 200
            with w.line.place() as own:
                await own.wait()  # there is room for it, too
            await waiting


@on_memory_loop
async def test_an_unknown_model_does_not_exist_and_nothing_of_others_is_told() -> None:
    async with two_models() as w:
        found = await error_of(w, "gpt-9")
        assert (found["status"], found["code"], found["param"]) == (404, "model_not_found", "model")
        assert not [name for name in (OTHER, "scripted") if name in found["message"]]
        assert "scripted" not in (await error_of(w, ""))["message"]
        for path in ("/tokenize", "/v1/embeddings", "/v1/messages/count_tokens"):
            async with w.http.post(
                path, json={"model": "gpt-9", "prompt": "a", "input": "a", "messages": []}
            ) as answer:
                assert answer.status == 404, path


@on_memory_loop
async def test_the_list_has_all_models_with_their_names() -> None:
    async with two_models() as w:
        w.nodes.decode[1].adapters = ["tuned"]
        bring(w.nodes.decode[1])
        await until(lambda: w.clusters.models[OTHER].adapters)
        async with w.http.get("/v1/models") as answer:
            cards = (await answer.json())["data"]
        assert [(card["id"], card.get("parent")) for card in cards] == [
            ("scripted", None),
            (OTHER, None),
            ("sibling", OTHER),
            ("tuned", OTHER),
        ]
        async with w.http.get("/v1/models/sibling") as answer:
            assert (await answer.json())["parent"] == OTHER
        assert await ask(w, "tuned") == 200
        assert (await w.records())[-1]["decode_node"] == "d1"


TENANTS = {
    "acme": TenantConfig(keys=(digest_of("a"),), models=(OTHER,)),
    "rival": TenantConfig(keys=(digest_of("r"),)),
}


@on_memory_loop
async def test_a_tenant_uses_and_sees_the_models_that_it_may() -> None:
    async with two_models(tenants=TENANTS) as w:
        own, rivals = {"Authorization": "Bearer a"}, {"Authorization": "Bearer r"}

        async def status(headers: dict[str, str], **fields: Any) -> int:
            return (await w.complete("hello", headers=headers, **fields)).status

        assert await status(own, model=OTHER) == 200
        assert await status(own, model="sibling") == 200
        assert await status(rivals, model="scripted") == 200
        refused = await w.complete("hello", headers=own, model="scripted")
        missing = await w.complete("hello", headers=own, model="missing")
        assert (refused.status, missing.status) == (404, 404)
        assert (await refused.text()).replace("scripted", "missing") == await missing.text()
        async with w.http.get("/v1/models", headers=own) as answer:
            assert [card["id"] for card in (await answer.json())["data"]] == [OTHER, "sibling"]
        async with w.http.get("/v1/models/scripted", headers=own) as answer:
            assert answer.status == 404
        async with w.http.post("/tokenize", headers=own, json={"prompt": "hello"}) as answer:
            assert answer.status == 404
            assert "scripted" not in await answer.text()


@on_memory_loop
async def test_strangers_learn_no_names_of_models_by_asking_whether_they_are_ready() -> None:
    operator = OperatorConfig(name="ann", keys=(digest_of("op"),))
    async with two_models(tenants=TENANTS, operators=(operator,)) as w:
        leave(w.nodes.decode[1])
        await until(lambda: not w.models.serves(OTHER))

        async def ready(model: str, key: str = "") -> tuple[int, str]:
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            async with w.http.get("/readyz", params={"model": model}, headers=headers) as answer:
                return answer.status, await answer.text()

        assert len({await ready(model) for model in ("scripted", OTHER, "sibling", "missing")}) == 1
        assert (await ready("scripted"))[0] == 401
        own = {model: (await ready(model, "a"))[0] for model in ("scripted", OTHER, "missing")}
        assert own == {"scripted": 404, OTHER: 503, "missing": 404}
        assert (await ready("scripted", "r"))[0] == 200
        assert [(await ready(model, "op"))[0] for model in ("scripted", OTHER, "missing")] == [200, 503, 404]
        async with w.http.get("/readyz") as whole:
            assert whole.status == 200


@on_memory_loop
async def test_a_tenant_may_be_kept_off_the_only_model() -> None:
    async with pipeline(tenants=TENANTS) as w:
        for model in ("scripted", "missing"):
            answer = await w.complete("hello", headers={"Authorization": "Bearer a"}, model=model)
            assert answer.status == 404
            assert "serves" not in await answer.text()
        assert (await w.complete("hello", headers={"Authorization": "Bearer r"})).status == 200


@pytest.mark.parametrize("default", ["", OTHER])
@on_memory_loop
async def test_a_call_that_names_no_model_is_for_the_default_one(default: str) -> None:
    async with two_models(default_model=default) as w:
        async with w.http.post("/tokenize", json={"prompt": LONG}) as answer:
            is_other = (await answer.json())["count"] == len(LONG)
        assert is_other == (default == OTHER)


@on_memory_loop
async def test_each_model_reports_its_own_load_and_nodes() -> None:
    async with two_models() as w:
        assert await ask(w, OTHER, LONG) == 200
        loads = {}
        for query in ("", "?model=other"):
            async with w.http.get(f"/prfaas/load{query}") as answer:
                loads[query] = await answer.json()
        assert {each["node_id"] for each in loads[""]["nodes"]} == {"r0", "p0", "d0"}
        assert {each["node_id"] for each in loads["?model=other"]["nodes"]} == {"r1", "p1", "d1"}
        assert loads[""]["uncached"]["values"] == []
        assert loads["?model=other"]["uncached"]["values"] == [len(LONG)]
        async with w.http.get("/prfaas/load?model=gpt-9") as answer:
            assert answer.status == 404


@on_memory_loop
async def test_an_operator_is_told_of_each_model_and_of_every_nodes_model() -> None:
    async with two_models() as w:
        async with w.http.get("/prfaas/console?since=0") as answer:
            seen = await answer.json()
        assert {each["node"]: each["model"] for each in seen["nodes"]}["d1"] == OTHER
        assert [(each["model"], each["is_ready"], each["nodes"]) for each in seen["models"]] == [
            ("scripted", True, 3),
            (OTHER, True, 3),
        ]
        async with w.http.post("/prfaas/explain", json={"model": OTHER, "prompt": LONG}) as answer:
            told = await answer.json()
        assert (told["model"], told["decision"]["route"]["decode_node"]) == (OTHER, "d1")
        assert {each["node"]: each["why"] for each in told["left_out"]}["d0"] == "it serves the model 'scripted'"
        async with w.http.get("/metrics") as answer:
            page = await answer.text()
        assert 'prfaas_model_ready{model="other"} 1.0' in page
        assert 'prfaas_model_plan_version{model="other"} 0.0' in page


@on_memory_loop
async def test_what_is_learned_of_one_models_nodes_says_nothing_of_anothers() -> None:
    async with two_models() as w:
        w.nodes.remote[1].script.tokens_per_s = 10.0
        assert await ask(w, OTHER, LONG) == 200
        routers = {parts.key: parts.router for parts in w.models}
        assert ("prefill", "east") not in routers[""].errors()
        assert await ask(w, "scripted", LONG) == 200
        assert (await w.records())[-1]["predicted_ttft_s"] < 1.0


@on_memory_loop
async def test_a_node_of_no_model_is_not_used_and_it_is_said_why() -> None:
    async with pipeline(
        remote=0, local=1, decode=2, tokenizer_dir=None, served_model="", models=(replace(TABLE, nodes=("scripted",)),)
    ) as w:
        bring(w.nodes.decode[1], model="stranger")
        await until(lambda: any(node.model is None for node in w.clusters.nodes))
        assert await ask(w, OTHER) == 200
        async with w.http.post("/prfaas/explain", json={"model": OTHER, "prompt": "hello"}) as answer:
            left_out = (await answer.json())["left_out"]
        assert left_out == [
            {
                "node": "d1",
                "cluster": "west",
                "role": "decode",
                "why": "no model of this gateway has nodes that call theirs 'stranger'",
            }
        ]


@on_memory_loop
async def test_a_name_of_the_file_is_no_name_that_nodes_of_another_model_have() -> None:
    async with two_models() as w:
        w.nodes.decode[0].adapters = [OTHER, "sibling", "tuned"]
        bring(w.nodes.decode[0], "scripted", LAYOUT)
        await until(lambda: w.clusters.models[""].adapters)
        for name, node in ((OTHER, "d1"), ("sibling", "d1"), ("tuned", "d0")):
            assert await ask(w, name) == 200
            assert (await w.records())[-1]["decode_node"] == node, name
        async with w.http.get("/v1/models") as answer:
            cards = [(card["id"], card.get("parent")) for card in (await answer.json())["data"]]
        assert sorted(cards, key=str) == [(OTHER, None), ("scripted", None), ("sibling", OTHER), ("tuned", "scripted")]
        async with w.http.get("/v1/models/sibling") as answer:
            assert (await answer.json())["parent"] == OTHER


@on_memory_loop
async def test_an_adapter_of_two_models_is_that_of_the_one_that_a_tenant_may_use() -> None:
    async with two_models(tenants=TENANTS) as w:
        for node in w.nodes.decode:
            node.adapters = ["legal"]
            node.become(pb.NODE_STATE_READY)
        await until(lambda: w.clusters.models[OTHER].adapters and w.clusters.models[""].adapters)
        for key, node in (("a", "d1"), ("r", "d0")):
            headers = {"Authorization": f"Bearer {key}"}
            assert (await w.complete("hello", model="legal", headers=headers)).status == 200
            assert (await w.records())[-1]["decode_node"] == node


@on_memory_loop
async def test_each_engine_is_asked_for_its_model_by_the_name_that_it_has_itself() -> None:
    table = replace(TABLE, nodes=("other-a", "other-b"))
    async with pipeline(remote=0, local=1, decode=3, tokenizers=tokenizers, models=(table,)) as w:
        for node, name in zip(w.nodes.decode[1:], table.nodes, strict=True):
            bring(node, name)
        await until(lambda: OTHER in w.models and sum(node.model == OTHER for node in w.clusters.nodes) == 2)
        assert await ask(w, OTHER) == 200
        leave(next(node for node in w.nodes.decode[1:] if node.bodies))
        await until(lambda: sum(node.state == "ready" for node in w.clusters.nodes) == 3)
        assert await ask(w, OTHER) == 200
        async with w.http.post("/v1/embeddings", json={"model": OTHER, "input": "a"}) as answer:
            assert answer.status == 200
        said = [{body["model"] for body in node.bodies} for node in w.nodes.decode[1:]]
        assert said == [{"other-a"}, {"other-b"}]


@on_memory_loop
async def test_what_is_wrong_with_a_body_without_a_usable_name_is_said_in_short() -> None:
    async with two_models(tenants=TENANTS) as w:
        for body in (b"{", b"[]", b'{"model": 5}', b'{"model": ""}', b'{"model": "\\ud800"}', b'{"prompt": "a"}'):
            async with w.http.post("/v1/completions", data=body, headers={"Authorization": "Bearer a"}) as answer:
                assert answer.status == 404
                assert "names no model" in (await answer.json())["error"]["message"], body
        for model in ("x" * 100_000, "\x00", "\u202eother", " other", "OTHER", "other/"):
            refused = await w.complete("hello", headers={"Authorization": "Bearer a"}, model=model)
            assert refused.status == 404
            assert len(await refused.text()) < 600
