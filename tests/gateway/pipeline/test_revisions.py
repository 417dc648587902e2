"""Nodes of two layouts serve one model: each request, its retries and its stream are of one of them."""

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from hybrid_cache.layout.layout import ModelLayout
from hybrid_cache.layout.spec import FullAttention
from tests.gateway.admin.test_explain import explained
from tests.gateway.layouts import LAYOUT
from tests.gateway.memory.pipeline import Pipelined, on_memory_loop, pipeline
from tests.gateway.pipeline.test_takeovers import (
    LONG,
    WORDS,
    error_of,
    forgiving,
    resumable,
    streamed,
    takeovers,
    texts,
)
from tests.gateway.routing.test_prefix_transfers import holds
from tests.gateway.scripted import ScriptedNode
from tests.gateway.worlds import until
from transport.control.proto import node_pb2 as pb

WIDER = replace(LAYOUT, block_size=32)  # the same weights
FINER = replace(
    LAYOUT, dtype="float64", groups=(replace(LAYOUT.groups[0], spec=FullAttention(1024, 512)), LAYOUT.groups[1])
)
RETRAINED = replace(LAYOUT, model="retrained")


async def become(w: Pipelined, layout: ModelLayout, *nodes: ScriptedNode) -> None:
    """These nodes have started anew, with that layout."""
    for node in nodes:
        node.layout = layout
        node.become(pb.NODE_STATE_READY)
    known = [w.clusters.by_id(node.node_id) for node in nodes]
    await until(lambda: all(each.info and each.info.layout_fingerprint == layout.fingerprint for each in known))


async def rolled(w: Pipelined, layout: ModelLayout = WIDER) -> None:
    """Half of the nodes of each kind have that layout."""
    await become(w, layout, w.nodes.remote[1], w.nodes.local[1], w.nodes.decode[1])


@on_memory_loop
async def test_each_request_goes_to_nodes_of_one_revision() -> None:
    async with pipeline(remote=2, local=2, decode=2) as w:
        await rolled(w)
        for number in range(20):
            assert (await w.complete(f"{number} {LONG}")).status == 200
            assert (await w.complete(f"hello {number}")).status == 200
        records = await w.records()
        pairs = {(record["prefill_node"], record["decode_node"]) for record in records}
        assert pairs == {("r0", "d0"), ("r1", "d1"), ("p0", "d0"), ("p1", "d1")}
        assert {(record["decode_node"], record["revision"]) for record in records} == {
            ("d0", LAYOUT.fingerprint[:12]),
            ("d1", WIDER.fingerprint[:12]),
        }
        counts = await w.counted("prfaas_revision_requests_total{")
        assert counts.keys() == {LAYOUT.fingerprint[:12], WIDER.fingerprint[:12]}
        assert sum(counts.values()) == 40
        assert not [record for record in records if record["fallbacks"]]
        await w.settled()


@pytest.mark.parametrize("fields", [{"prompt": "{}", "n": 3}, {"prompt": ["{}", "a {}", "hello {}"]}])
@on_memory_loop
async def test_all_answers_to_one_call_are_of_one_revision(fields: dict[str, Any]) -> None:
    async with pipeline(remote=2, local=2, decode=2, revisions=("scripted", "retrained")) as w:
        await rolled(w, RETRAINED)
        for number in range(12):  # prompts of before draw a call to the nodes that have them
            body = json.loads(json.dumps({"model": "scripted", **fields}).replace("{}", f"{number} {LONG}"))
            async with w.http.post("/v1/completions", json=body) as response:
                assert response.status == 200
        by_call: dict[str, set[str]] = {}
        for record in await w.records():
            by_call.setdefault(record["id"], set()).add(record["revision"])
        assert len(by_call) == 12
        assert {len(revisions) for revisions in by_call.values()} == {1}
        assert len(set.union(*by_call.values())) == 2


@on_memory_loop
async def test_a_revision_without_a_decode_node_gets_nothing() -> None:
    async with pipeline(remote=2, local=2, decode=1) as w:
        await become(w, WIDER, w.nodes.remote[1], w.nodes.local[1])
        for number in range(10):
            assert (await w.complete(f"{number} {LONG}")).status == 200
        assert {record["prefill_node"] for record in await w.records()} == {"r0"}


@pytest.mark.parametrize("accepted", [(), ("scripted", "retrained")])
@on_memory_loop
async def test_other_weights_answer_for_a_model_only_where_the_file_says_so(accepted: tuple[str, ...]) -> None:
    async with pipeline(remote=2, local=2, decode=2, revisions=accepted) as w:
        await rolled(w, RETRAINED)
        for number in range(20):
            await w.complete(f"{number} {LONG}")
        seen = {record["decode_node"] for record in await w.records()}
        assert seen == ({"d0", "d1"} if accepted else {"d0"})


@on_memory_loop
async def test_a_retry_leaves_its_revision_only_when_that_has_no_other_node() -> None:
    async with forgiving(remote=2, local=2, decode=3) as w:
        await rolled(w)  # d0 and d2 are of one revision
        for node in (w.nodes.decode[0], w.nodes.decode[2]):
            node.script.reserve = ["UNAVAILABLE"] * 100
        for number in range(10):
            assert (await w.complete(f"{number} {LONG}")).status == 200
        records = await w.records()
        assert {record["decode_node"] for record in records} == {"d1"}
        moved = [record["fallbacks"] for record in records if record["fallbacks"]]
        assert moved
        for fallbacks in moved:
            before, after = fallbacks.index("other_revision"), len(fallbacks)
            assert [reason.startswith("decode_") for reason in fallbacks[:before]] == [True, True]  # both were tried
            assert before == after - 1
        await w.settled()


@on_memory_loop
async def test_a_full_node_of_the_revision_before_is_asked_in_that_one() -> None:
    async with forgiving(remote=2, local=2, decode=2) as w:
        await rolled(w)
        for number in range(12):
            w.nodes.decode[0].script.reserve = ["RESOURCE_EXHAUSTED"]
            w.nodes.decode[1].script.reserve = ["FAILED_PRECONDITION"]
            assert (await w.complete(f"{number} {LONG}")).status == 200
        records = await w.records()
        assert any("decode_no_capacity" in record["fallbacks"] for record in records)
        assert {(record["decode_node"], record["revision"]) for record in records} == {("d0", LAYOUT.fingerprint[:12])}
        await w.settled()


@on_memory_loop
async def test_a_prefill_node_that_changes_its_revision_meanwhile_is_not_asked() -> None:
    async with pipeline(remote=0, local=3, decode=1) as w:
        gate = w.nodes.decode[0].script.reserve_gate = asyncio.Event()
        asked = asyncio.create_task(w.complete(LONG))
        await until(lambda: bool(w.nodes.decode[0].open_reservations))
        (chosen,) = [node for node in w.nodes.local if w.clusters.by_id(node.node_id).own_requests]
        await become(w, WIDER, chosen)
        gate.set()
        assert (await asked).status == 200
        (record,) = await w.records()
        assert record["fallbacks"] == ["prefill_gone"]
        assert not chosen.bodies
        await w.settled()


@on_memory_loop
async def test_a_stream_goes_on_in_another_revision_of_the_same_weights() -> None:
    async with forgiving(remote=2, local=2, decode=2) as w:
        await rolled(w)
        for _ in range(6):
            resumable(w, "die_after 5")
            assert texts(await streamed(w)) == list(WORDS)
        assert await takeovers(w) == {"continued": 6}
        for record in await w.records():
            assert record["fallbacks"] == ["decode_stream_broken", "other_revision"]


@on_memory_loop
async def test_a_stream_does_not_go_on_by_other_weights() -> None:
    async with forgiving(remote=2, local=2, decode=2, revisions=("scripted", "retrained")) as w:
        await rolled(w, RETRAINED)
        resumable(w, "die_after 5", *["die"] * 20)
        events = await streamed(w)
        assert error_of(events)
        legs = [node.node_id for node in w.nodes.decode for _ in node.bodies]
        assert len(set(legs)) == 1  # its own node was asked again at most
        await w.settled()


@on_memory_loop
async def test_a_prompt_stays_with_the_revision_that_has_its_prefix() -> None:
    async with pipeline(remote=0, local=2, decode=2) as w:
        await become(w, WIDER, w.nodes.local[1], w.nodes.decode[1])
        await holds(w, w.nodes.local[0], [LONG])
        for _ in range(10):
            await w.complete(LONG)
        assert {record["prefill_node"] for record in await w.records()} == {"p0"}


@on_memory_loop
async def test_an_explanation_says_the_share_of_each_revision() -> None:
    async with pipeline(remote=2, local=2, decode=2) as w:
        assert (await explained(w, LONG))["revisions"] == []
        await rolled(w)
        found = await explained(w, LONG)
        assert {each["revision"]: each["share"] for each in found["revisions"]} == {
            LAYOUT.fingerprint: 0.5,
            WIDER.fingerprint: 0.5,
        }
        assert found["roles"] == ["decode", "remote prefill"]
        assert [each["is_chosen"] for each in found["revisions"]].count(True) == 1
        decode = found["decision"]["route"]["decode_node"]
        assert found["revision"] == (LAYOUT if decode == "d0" else WIDER).fingerprint


@on_memory_loop
async def test_an_explanation_predicts_the_bytes_of_its_own_revision() -> None:
    async with pipeline(remote=2, local=0, decode=2) as w:
        await become(w, FINER, w.nodes.remote[1], w.nodes.decode[1])
        found = [await explained(w, LONG) for _ in range(12)]
        sizes = {each["revision"]: each["decision"]["route"]["coded_bytes"] for each in found}
        assert sizes[FINER.fingerprint] > 4 * sizes[LAYOUT.fingerprint] > 0
