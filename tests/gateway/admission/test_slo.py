"""Who would not be served as promised is told so before anything is reserved: which stage binds, and when to come again."""

import asyncio
from math import inf
from pathlib import Path
from typing import Any, cast

import aiohttp
import pytest
from msgspec.structs import replace

from gateway.admission.slo import SloGate
from gateway.api.openai import Endpoint
from gateway.cluster.registry import Clusters
from gateway.cluster.served_model import ServedModel
from gateway.config.classes import AdmissionConfig, ClassConfig
from gateway.config.gateway import GatewayConfig, NodeAddress, RoutingConfig
from gateway.prompt.prompt import Hashing, PromptMemory, read_call
from gateway.request.request import Request, RequestProgress, StreamState, Timeline
from planner.decisions.admission.overload import AdmissionPolicy
from planner.decisions.estimates.decoding import STEPS_BELIEVED, LearnedSteps
from planner.decisions.routing.offload import Reason, Route, Target
from tests.gateway.layouts import LAYOUT
from tests.gateway.memory.pipeline import on_memory_loop, pipeline
from tests.gateway.worlds import PATIENCE_S, Deployment, config_for, on_loop, until, world
from tests.prompts.builders import text_tokenizer
from transport.control.proto import node_pb2 as pb

LONG = "the quick brown fox jumps over the lazy dog " * 40
SLOW = RoutingConfig(prefill_tokens_per_s=100.0, decode_slots=1)


def promising(policy: AdmissionPolicy = AdmissionPolicy.PREDICTION, **promised: Any) -> dict[str, Any]:
    classes = {"default": ClassConfig(**promised), "batch": ClassConfig(priority=-1)}
    return {"admission": AdmissionConfig(policy=policy), "classes": classes, "routing": SLOW}


def alone_s(w: Deployment) -> float:
    """What LONG takes on a node that has not been seen at work, at 100 tokens per second."""
    served = w.clusters.served
    assert served is not None
    return len(w.hashes_of(LONG)) * served.layout.block_size / 100.0


async def refused_for(answer: aiohttp.ClientResponse) -> str:
    assert answer.status == 429
    assert int(answer.headers["Retry-After"]) >= 1
    assert int(answer.headers["retry-after-ms"]) >= 1
    error = (await answer.json())["error"]
    assert error["type"] == "rate_limit_error"
    assert answer.headers["x-prfaas-rejected"] == error["code"]
    return str(error["code"])


@on_memory_loop
async def test_a_queue_that_is_too_long_refuses_before_anything_is_reserved() -> None:
    async with pipeline(remote=0, local=1, decode=1, **promising(ttft_s=1000.0)) as w:
        gate = w.nodes.local[0].script.prefill_gate = asyncio.Event()
        w.configure(config_for(w.nodes, **promising(ttft_s=1.5 * alone_s(w))))
        first = asyncio.create_task(w.complete(LONG))
        await until(lambda: w.nodes.local[0].running)
        refused = await w.complete(f"another {LONG}")
        assert await refused_for(refused) == "prefill_overload"
        assert float(refused.headers["retry-after-ms"]) > 0.4 * 1000 * alone_s(w)
        assert len(w.nodes.decode[0].open_reservations) == 1
        batch = asyncio.create_task(w.complete(f"more {LONG}", headers={"x-prfaas-class": "batch"}))
        await until(lambda: w.nodes.local[0].running == 2)  # nothing was promised to it
        gate.set()
        assert [(await each).status for each in (first, batch)] == [200, 200]
        await w.settled()
        await w.idle()
        first_record, *others = sorted(await w.records(), key=lambda each: each["status"], reverse=True)
        assert (first_record["status"], first_record["service_class"], first_record["target"]) == (
            429,
            "default",
            "none",
        )
        assert {each["service_class"] for each in others} == {"default", "batch"}
        metrics = await w.metrics()
        assert 'prfaas_refusals_total{reason="prefill_overload",service_class="default"} 1.0' in metrics
        assert 'prfaas_requests_total{reason="prefill_overload",route="none",status="429"} 1.0' in metrics
        assert all(node.pending_requests == node.pending_tokens == 0 for node in w.clusters.nodes)


@on_memory_loop
async def test_a_link_that_is_too_full_refuses() -> None:
    async with pipeline(remote=1, local=0, decode=1, **promising(ttft_s=500.0)) as w:
        (remote,) = w.nodes.remote
        remote.load = pb.Load(links=[pb.Link(peer="west", available_bytes_per_s=1e3, queued_bytes=10**6)])
        await until(lambda: any(view.queued_bytes for view in w.links.views()))
        answer = await w.complete(LONG)
        assert await refused_for(answer) == "link_overload"
        assert w.nodes.decode[0].open_reservations == set()


@on_memory_loop
@pytest.mark.parametrize("policy", [AdmissionPolicy.EARLY, AdmissionPolicy.PREDICTION])
async def test_decode_that_is_too_busy_refuses_at_the_door(policy: AdmissionPolicy) -> None:
    async with pipeline(remote=0, local=1, decode=1, **promising(policy, tbt_ms=50)) as w:
        gate = w.nodes.decode[0].script.decode_gate = asyncio.Event()
        first = asyncio.create_task(w.complete(LONG))
        await until(lambda: w.refusals.running == 1)
        assert await refused_for(await w.complete(f"another {LONG}")) == "decode_overload"
        assert len(w.nodes.local[0].bodies) == 1
        gate.set()
        assert (await first).status == 200
        await w.settled()
        await w.idle()
        assert w.refusals.running == 0
        assert (await w.complete(f"another {LONG}")).status == 200


@on_memory_loop
async def test_what_other_gateways_have_sent_takes_room() -> None:
    async with pipeline(remote=0, local=1, decode=1, **promising(AdmissionPolicy.EARLY, tbt_ms=50)) as w:
        w.nodes.decode[0].load = pb.Load(running=1)
        decode = w.clusters.by_id("d0")
        await until(lambda: decode.others == 1)
        assert await refused_for(await w.complete(LONG)) == "decode_overload"
        w.nodes.decode[0].load = pb.Load()
        await until(lambda: decode.others == 0)
        assert (await w.complete(LONG)).status == 200


@on_memory_loop
async def test_the_baseline_finds_out_after_the_prefill_and_counts_what_it_wasted() -> None:
    async with pipeline(remote=0, local=1, decode=1, **promising(AdmissionPolicy.BASELINE, tbt_ms=50)) as w:
        gate = w.nodes.decode[0].script.decode_gate = asyncio.Event()
        first = asyncio.create_task(w.complete(LONG))
        await until(lambda: w.refusals.running == 1)
        assert await refused_for(await w.complete(f"another {LONG}")) == "decode_overload_after_prefill"
        assert len(w.nodes.local[0].bodies) == 2
        gate.set()
        assert (await first).status == 200
        await w.settled()
        wasted = [record["wasted_prefill_s"] for record in await w.records()]
        assert wasted == [0.01, 0.0]  # as the scripted node says
        assert 'prfaas_wasted_prefill_seconds_total{reason="refused"} 0.01' in await w.metrics()


@on_memory_loop
async def test_a_prefill_whose_client_leaves_is_wasted_as_far_as_it_got() -> None:
    async with pipeline(remote=0, local=1, decode=1, routing=SLOW) as w:
        w.nodes.local[0].script.prefill_gate = asyncio.Event()
        leaving = asyncio.create_task(w.complete(LONG))
        await until(lambda: w.nodes.local[0].running)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        await w.settled()
        (record,) = await w.records()
        assert record["status"] == 499
        assert 0 < record["wasted_prefill_s"] <= record["predicted_ttft_s"]
        assert 'prfaas_wasted_prefill_seconds_total{reason="left"}' in await w.metrics()


@on_memory_loop
async def test_who_computes_its_prompt_on_the_decode_node_after_all_decodes_there_too() -> None:
    async with pipeline(remote=0, local=1, decode=1) as w:
        w.nodes.local[0].script.prefill = ["400 bad_request"]
        w.nodes.decode[0].script.word_interval_s = PATIENCE_S
        asking = asyncio.create_task(w.complete(LONG, stream=True))
        await until(lambda: w.refusals.running == 1)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await w.settled()
        assert await w.fallbacks() == {"prefill_bad_request": 1, "recompute_no_prefill": 1}
        assert w.refusals.running == 0


def test_an_answer_tells_of_the_node_that_gave_it_and_not_of_one_that_failed_before() -> None:
    now, steps = 0.0, LearnedSteps()
    refusals = SloGate(
        GatewayConfig(tokenizer_dir=Path("unused"), nodes=(NodeAddress(agent="127.0.0.1:1"),)),
        cast(Clusters, None),
        steps,
        lambda: now,
    )
    hashing = Hashing(block_size=16, salt=b"salt")
    served = ServedModel("scripted", "scripted", LAYOUT, 4096, hashing)
    body = b'{"model":"scripted","prompt":"x","stream":true}'
    call, prompt = read_call(Endpoint.COMPLETIONS, body, served.as_read(), PromptMemory(text_tokenizer()))
    way = Route(
        target=Target.DECODE, reason=Reason.SHORT, decode_node="d0", prefill_node=None, uncached_tokens=1,
        cached_tokens=0, threshold_tokens=1.0,
    )  # fmt: skip
    for _ in range(2 * STEPS_BELIEVED):
        request = Request(
            "r", "r-1", call, prompt, served, RequestProgress(Timeline(now)), stream=StreamState(events=4)
        )  # three tokens and the end
        refusals.accepted(request, way)
        for node in ("d0", "d1", "d1"):
            refusals.decoding(request, node)
        assert refusals.running == 1
        request.progress.timeline.first_token, request.progress.timeline.last_token = now, now + 1.0
        refusals.left(request)
        now += 1.0
    assert refusals.running == 0
    assert steps.step_s("d1", 1) == pytest.approx(0.5)
    assert steps.step_s("d0", 1) == 0.0


@pytest.mark.parametrize(("options", "events"), [("", 4), (',"stream_options":{"include_usage":true}', 5)])
def test_neither_the_end_of_a_stream_nor_its_usage_is_a_token(options: str, events: int) -> None:
    served = ServedModel("scripted", "scripted", LAYOUT, 4096, Hashing(block_size=16, salt=b"salt"))
    body = f'{{"model":"scripted","prompt":"x","stream":true{options}}}'.encode()
    call, prompt = read_call(Endpoint.COMPLETIONS, body, served.as_read(), PromptMemory(text_tokenizer()))
    timeline = Timeline(0.0, first_token=1.0, last_token=2.0)
    request = Request("r", "r-1", call, prompt, served, RequestProgress(timeline), stream=StreamState(events=events))
    assert (request.output_tokens, request.tbt_s) == (3, 0.5)


@on_memory_loop
async def test_promises_are_kept_account_of() -> None:
    fields = promising(ttft_s=1000.0, tbt_ms=1e6) | {"routing": RoutingConfig()}
    async with pipeline(**fields) as w:
        await w.complete(LONG, stream=True)
        await w.complete(LONG)  # it is not seen when its tokens come
        assert 'prfaas_promises_total{outcome="kept",service_class="default"} 1.0' in await w.metrics()


@on_memory_loop
async def test_forty_long_prompts_at_once_get_an_answer_or_a_reason_and_leave_nothing() -> None:
    """No policy may turn the decode node into a prefill node, nor let a queue grow without end."""
    fields = promising(ttft_s=1.0, tbt_ms=50) | {"max_waiting": 8}
    fields["routing"] = RoutingConfig(decode_prefill_share=0.0, decode_slots=8, prefill_tokens_per_s=1000.0)
    async with pipeline(remote=0, local=2, decode=1, **fields) as w:
        w.nodes.decode[0].script.room = 4
        for node in w.nodes.local:
            node.script.prefill_s = 0.05
        answers = await asyncio.gather(*(w.complete(f"{i} {LONG}", max_tokens=3) for i in range(40)))
        reasons = [await refused_for(answer) for answer in answers if answer.status != 200]
        assert 1 <= len(reasons) < 40
        assert set(reasons) <= {"prefill_overload", "decode_overload", "no_room", "deadline"}
        await w.settled()
        records = await w.records()
        assert len(records) == 40
        assert not any(record["target"] == "decode" for record in records)
        assert w.refusals.running == 0
        assert len(w.line) == 0
        assert all(node.pending_requests == node.pending_tokens == 0 for node in w.clusters.nodes)


@on_loop
async def test_classes_change_while_the_gateway_runs() -> None:
    async with world(remote=0, **promising(ttft_s=inf)) as w:
        changed = config_for(w.nodes, classes={"gold": ClassConfig(priority=3)})
        assert "classes" not in w.gateway.reload(changed)
        assert (await w.complete(headers={"x-prfaas-class": "gold"})).status == 200
        answer = await w.complete(headers={"x-prfaas-class": "batch"})
        assert (answer.status, (await answer.json())["error"]["code"]) == (400, "unknown_class")
        assert [record["service_class"] for record in await w.records()] == ["gold"]


@pytest.mark.parametrize(("fields", "said"), [("", 400), (',"max_tokens":300', 300), (',"stream":true', 0)])
def test_what_an_engine_said_of_an_answer_that_nobody_waited_for_is_estimated(fields: str, said: int) -> None:
    now, steps = 0.0, LearnedSteps()
    config = GatewayConfig(tokenizer_dir=Path("unused"), nodes=(NodeAddress(agent="127.0.0.1:1"),))
    refusals = SloGate(config, cast(Clusters, None), steps, lambda: now)
    hashing = Hashing(block_size=16, salt=b"salt")
    served = ServedModel("scripted", "scripted", LAYOUT, 4096, hashing)
    body = f'{{"model":"scripted","prompt":"x"{fields}}}'.encode()
    call, prompt = read_call(Endpoint.COMPLETIONS, body, served.as_read(), PromptMemory(text_tokenizer()))
    for _ in range(STEPS_BELIEVED):
        steps.observe("d0", 1, 0.01)
    way = Route(
        target=Target.DECODE, reason=Reason.SHORT, decode_node="d0", prefill_node=None, uncached_tokens=1,
        cached_tokens=0, threshold_tokens=1.0, compute_s=2.0, ttft_s=2.0,
    )  # fmt: skip
    request = Request("r", "r-1", call, prompt, served, RequestProgress(Timeline(now)))
    refusals.accepted(request, way)
    refusals.decoding(request, "d0")
    now = 2.0 + 4.0
    assert refusals.left(request) == pytest.approx(said, abs=1)


@pytest.mark.parametrize("asks_again", [True, False])
def test_what_an_engine_said_that_failed_is_not_paid_for(asks_again: bool) -> None:
    now = 0.0
    config = GatewayConfig(tokenizer_dir=Path("unused"), nodes=(NodeAddress(agent="127.0.0.1:1"),))
    refusals = SloGate(config, cast(Clusters, None), LearnedSteps(), lambda: now)
    hashing = Hashing(block_size=16, salt=b"salt")
    served = ServedModel("scripted", "scripted", LAYOUT, 4096, hashing)
    body = b'{"model":"scripted","prompt":"x"}'
    call, prompt = read_call(Endpoint.COMPLETIONS, body, served.as_read(), PromptMemory(text_tokenizer()))
    way = Route(
        target=Target.DECODE, reason=Reason.SHORT, decode_node="d0", prefill_node=None, uncached_tokens=1,
        cached_tokens=0, threshold_tokens=1.0,
    )  # fmt: skip
    request = Request("r", "r-1", call, prompt, served, RequestProgress(Timeline(now), route=way))
    refusals.accepted(request, way)
    refusals.decoding(request, "d0")
    now = 60.0  # d0 has failed
    request.progress.route = replace(way, decode_node="d1", prefill_node="p0")
    if asks_again:  # after it has waited for room
        refusals.accepted(request, request.progress.route)
    now = 70.0  # its client leaves, as its KVCache is on the way to d1
    assert refusals.left(request) == 0
    assert refusals.running == 0
