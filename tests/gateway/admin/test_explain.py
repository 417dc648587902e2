"""A dry run says what a request would then do, and leaves nothing behind."""

from typing import Any

from gateway.cluster.node import NodeWork
from gateway.config.gateway import RoutingConfig
from tests.gateway.admission.test_slo import LONG, promising
from tests.gateway.memory.pipeline import Pipelined, on_memory_loop, pipeline
from tests.gateway.routing.test_prefix_transfers import holds
from tests.gateway.scripted import ScriptedNode
from tests.gateway.worlds import until
from transport.control.proto import node_pb2 as pb


async def explained(w: Pipelined, prompt: str, headers: dict[str, str] | None = None, **fields: Any) -> dict[str, Any]:
    body = {"model": "scripted", "prompt": prompt, **fields}
    async with w.http.post("/prfaas/explain", json=body, headers=headers) as answer:
        assert answer.status == 200, await answer.text()
        found: dict[str, Any] = await answer.json()
        return found


async def agrees(w: Pipelined, prompt: str, reason: str) -> dict[str, Any]:
    """The same nodes and reason are explained, then taken; the explanation."""
    found = await explained(w, prompt)
    route = found["decision"]["route"]
    await w.complete(prompt)
    record = (await w.records())[-1]
    assert (record["decode_node"], record["reason"], record["target"]) == (
        route["decode_node"], route["reason"], route["target"],
    )  # fmt: skip
    assert record["prefill_node"] == (route["prefill_node"] or route["decode_node"])
    assert route["reason"] == reason
    assert found["num_tokens"] == record["total"]
    return found


@on_memory_loop
async def test_what_is_explained_is_what_dispatch_then_does() -> None:
    async with pipeline(remote=2, local=2, decode=2) as w:
        await agrees(w, "hello there", "short")
        found = await agrees(w, LONG, "long")
        assert "above the threshold of 100" in found["decision"]["words"]
        held: ScriptedNode = w.nodes.decode[1]
        await holds(w, held, [LONG])
        found = await agrees(w, f"{LONG} and so on", "held")
        assert [each["why_not"] for each in found["decision"]["decodes"] if each["node"] == "d1"] == [""]


@on_memory_loop
async def test_congestion_and_a_link_that_is_down_are_explained_as_they_are_acted_on() -> None:
    slow = RoutingConfig(prefill_tokens_per_s=2_000.0, increment_tokens=0)
    async with pipeline(decode=1, routing=slow) as w:
        (remote,) = w.nodes.remote
        remote.load = pb.Load(links=[pb.Link(peer="west", utilisation=0.99, available_bytes_per_s=1e9)])
        await until(lambda: w.links.status()[0].utilisation > 0.9)
        found = await agrees(w, f"one {LONG}", "congested")
        assert found["decision"]["links"][0]["pressure"] > 0.9
        remote.load = pb.Load()
        for node in w.clusters.nodes:
            if node.id == "r0":
                sender = node
            if node.id == "d0":
                receiver = node
        w.links.failed(sender, receiver)
        found = await agrees(w, f"two {LONG}", "link_down")
        assert [each["why_not"] for each in found["decision"]["prefills"] if each["node"] == "r0"] == [
            "the link from east to west is down"
        ]


@on_memory_loop
async def test_nothing_is_booked_reserved_sent_or_recorded() -> None:
    async with pipeline() as w:
        before = [(node.pending_tokens, node.pending_requests) for node in w.clusters.nodes]
        for _ in range(3):
            await explained(w, LONG)
        assert [(node.pending_tokens, node.pending_requests) for node in w.clusters.nodes] == before
        assert not w.nodes.leftovers()
        assert not any(node.bodies for node in w.nodes.nodes)
        assert await w.records() == []
        assert w.door.rooms.admission.in_flight == 0
        async with w.http.get("/prfaas/load") as answer:
            assert not (await answer.json())["uncached"]["values"]


@on_memory_loop
async def test_a_node_that_no_decision_sees_is_named_with_its_reason() -> None:
    async with pipeline(decode=2) as w:
        w.nodes.decode[0].become(pb.NODE_STATE_DRAINING)
        w.clusters.suspect("p0")
        await until(lambda: w.clusters.by_id("d0").state == "draining")
        found = await explained(w, LONG)
        told = {each["node"]: each["why"] for each in found["left_out"]}
        assert told["d0"] == "it is draining"
        assert told["p0"].startswith("it failed a request")
        w.nodes.decode[1].become(pb.NODE_STATE_DRAINING)
        await until(lambda: w.clusters.by_id("d1").state == "draining")
        found = await explained(w, LONG)
        assert found["decision"] is None
        assert (found["verdict"]["status"], found["verdict"]["code"]) == (503, "no_decode_node")


@on_memory_loop
async def test_a_refusal_is_explained_with_its_stage() -> None:
    async with pipeline(remote=0, local=1, decode=1, **promising(ttft_s=0.001)) as w:
        w.clusters.by_id("p0").take(NodeWork(tokens=10_000))
        verdict = (await explained(w, LONG))["verdict"]
        assert (verdict["accepted"], verdict["status"], verdict["code"]) == (False, 429, "prefill_overload")
        assert verdict["retry_after_s"] > 0
        found = await explained(w, LONG, {"x-prfaas-class": "batch"})
        assert (found["service_class"], found["verdict"]["accepted"]) == ("batch", True)


@on_memory_loop
async def test_what_no_client_could_send_is_refused_as_it_would_be() -> None:
    async with pipeline() as w:
        async with w.http.post("/prfaas/explain", json={"model": "scripted", "messages": []}) as answer:
            assert (answer.status, (await answer.json())["error"]["param"]) == (400, "messages")
        async with w.http.post("/prfaas/explain", data=b"{", headers={"content-type": "application/json"}) as answer:
            assert (answer.status, (await answer.json())["error"]["code"]) == (400, "invalid_json")
        async with w.http.post("/prfaas/explain?endpoint=/v1/nothing", json={}) as answer:
            assert (answer.status, (await answer.json())["error"]["param"]) == (400, "endpoint")
        chat = {"model": "scripted", "messages": [{"role": "user", "content": "hello"}]}
        async with w.http.post("/prfaas/explain", json=chat) as answer:
            as_chat = await answer.json()
            assert as_chat["endpoint"] == "/v1/chat/completions"
        async with w.http.post("/prfaas/explain", json={"model": "scripted", "input": "hello"}) as answer:
            assert (await answer.json())["num_tokens"] == as_chat["num_tokens"]
