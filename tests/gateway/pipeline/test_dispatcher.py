"""One request's life, before scripted nodes: the happy paths and every failure."""

import asyncio
import json
from dataclasses import replace

import msgspec
import pytest

from tests.gateway.memory.pipeline import Pipelined, on_memory_loop, pipeline
from tests.gateway.worlds import PATIENCE_S, PATIENT, on_loop, until, world
from transport.control.messages import TicketInfo
from transport.control.proto import node_pb2 as pb

LONG = "the quick brown fox jumps over the lazy dog " * 40
SHORT = "hello there"
TEXT = "one two three"


def events(body: bytes) -> list[bytes]:
    return [event.removeprefix(b"data: ") for event in body.split(b"\n\n") if event]


def stream_text(body: bytes) -> str:
    chunks = [json.loads(event) for event in events(body) if event != b"[DONE]"]
    return "".join(choice["text"] for chunk in chunks for choice in chunk.get("choices", []))


def aborted(w: Pipelined) -> list[str]:
    return [reason for node in w.nodes.nodes for _, reason in node.aborts]


# What is counted


@on_memory_loop
async def test_only_streams_have_a_time_to_first_token() -> None:
    async with pipeline() as w:
        await (await w.complete(SHORT)).read()
        await w.settled()
        assert "prfaas_time_to_first_token_seconds_count{" not in await w.metrics()
        await (await w.complete(SHORT, stream=True)).read()
        await w.settled()
        assert 'prfaas_time_to_first_token_seconds_count{route="local"} 1.0' in await w.metrics()
        for record in await w.records():
            assert record["ttft_s"] == round(record["ttft_s"], 6)


# Where it goes


@on_memory_loop
async def test_a_short_prompt_is_prefilled_in_the_decode_cluster() -> None:
    async with pipeline() as w:
        response = await w.complete(SHORT)
        answer = await response.json()
        assert (response.status, answer["choices"][0]["text"]) == (200, TEXT)
        assert response.headers["x-prfaas-route"].startswith("local; node=p0; uncached=")
        assert response.headers["x-prfaas-route"].endswith("; reason=short")
        await w.settled()
        assert aborted(w) == []


@on_loop
async def test_a_long_prompt_goes_remote_and_its_record_says_how() -> None:
    async with world() as w:
        w.nodes.remote[0].script.cached_tokens = 32
        w.nodes.remote[0].script.prefill_s = 0.02
        response = await w.complete(LONG)
        assert response.headers["x-prfaas-route"].startswith("remote; node=r0; uncached=")
        (record,) = await w.records()
        assert (record["status"], record["route"], record["reason"]) == (200, "remote", "long")
        assert (record["prefill_node"], record["decode_node"]) == ("r0", "d0")
        assert (record["cached"], record["uncached"]) == (32, record["total"] - 32)
        assert (record["bytes"], record["overlap"], record["link"]) == (1000, 0.9, "tcp")
        assert record["kv_ready_minus_prefill_end_s"] == pytest.approx(0.002)
        assert list(record["timeline"].values()) == sorted(record["timeline"].values())


@on_memory_loop
async def test_one_token_and_no_prefill_node_are_left_to_the_decode_node() -> None:
    async with pipeline(remote=0, local=0, decode=1) as w:
        single, long = await w.complete([5]), await w.complete(LONG)
        assert single.headers["x-prfaas-route"] == "local; node=d0; uncached=1; reason=single_token"
        assert long.headers["x-prfaas-route"].endswith("reason=no_prefill")
        assert [set(body["kv_transfer_params"]) for body in w.nodes.decode[0].bodies] == [{"salt"}, {"salt"}]


@on_memory_loop
async def test_prompt_logprobs_are_left_to_the_decode_node_which_needs_all_of_the_prompt() -> None:
    async with pipeline() as w:
        response = await w.complete(LONG, prompt_logprobs=1)
        assert response.headers["x-prfaas-route"].endswith("; reason=unshared")
        (record,) = await w.records()
        assert (record["prefill_node"], record["decode_node"], record["cached"]) == ("d0", "d0", 0)
        (body,) = w.nodes.decode[0].bodies
        assert body["prompt_logprobs"] == 1
        assert set(body["kv_transfer_params"]) == {"salt"}


@on_memory_loop
async def test_a_prefix_known_to_be_cached_makes_a_long_prompt_local() -> None:
    async with pipeline(local=1) as w:
        await w.complete(LONG)
        hashes = w.hashes_of(LONG)
        for group in (0, 1):
            event = pb.NodeEvent(stored=pb.BlocksStored(group=group, hashes=b"".join(hashes)))
            w.nodes.local[0].tell(event)
        clusters = w.clusters
        await until(lambda: clusters.index and clusters.index.match("p0", hashes, 16 * len(hashes)).num_tokens)
        w.nodes.local[0].script.cached_tokens = 16 * len(hashes)
        response = await w.complete(LONG)
        assert response.headers["x-prfaas-route"].startswith("local; node=p0; uncached=")
        assert response.headers["x-prfaas-route"].endswith("reason=short")
        assert int(response.headers["x-prfaas-route"].split("uncached=")[1].split(";")[0]) <= 17


# What engines are sent


@on_memory_loop
async def test_the_legs_carry_the_clients_body_and_what_must_be_added() -> None:
    async with pipeline() as w:
        await w.complete(LONG, max_tokens=9, stop=["x"], my_field={"a": [1, 2.50]}, stream=True, min_tokens=2)
        (prefill,), (decode,) = w.nodes.remote[0].bodies, w.nodes.decode[0].bodies
        assert (prefill["stream"], prefill["max_tokens"], "min_tokens" in prefill) == (False, 1, False)
        assert (decode["stream"], decode["max_tokens"], decode["min_tokens"]) == (True, 9, 2)
        assert prefill["my_field"] == decode["my_field"] == {"a": [1, 2.5]}
        ticket = msgspec.convert(prefill["kv_transfer_params"]["ticket"], TicketInfo)
        assert ticket.transfer_id == decode["kv_transfer_params"]["transfer_id"]
        assert ticket.secret == b"s" * 16
        assert ticket.endpoints == (("tcp", "127.0.0.1:1", "h"),)
        assert prefill["kv_transfer_params"]["salt"] == decode["kv_transfer_params"]["salt"]


@on_memory_loop
async def test_both_legs_are_under_way_at_once() -> None:
    async with pipeline() as w:
        gate = w.nodes.remote[0].script.prefill_gate = asyncio.Event()
        answer = asyncio.create_task(w.complete(LONG))
        await until(lambda: (w.nodes.remote[0].running, w.nodes.decode[0].running) == (1, 1))
        gate.set()
        assert (await answer).status == 200


@on_memory_loop
async def test_request_ids_and_trace_headers_go_along() -> None:
    async with pipeline() as w:
        headers = {"x-request-id": "abc-1", "traceparent": "00-1-2-01"}
        body = {"model": "scripted", "prompt": LONG}
        async with w.http.post("/v1/completions", json=body, headers=headers) as response:
            assert response.headers["x-request-id"] == "abc-1"
        for node in (w.nodes.remote[0], w.nodes.decode[0]):
            assert node.headers[0]["X-Request-Id"].startswith("abc-1-")  # unique, should the client repeat itself
            assert node.headers[0]["traceparent"] == "00-1-2-01"


@on_memory_loop
async def test_the_model_is_renamed_for_the_engines_where_it_is_served_under_another_name() -> None:
    async with pipeline(served_model="public-name") as w:
        response = await w.complete(SHORT, model="public-name")
        assert response.status == 200
        assert w.nodes.decode[0].bodies[0]["model"] == "scripted"


# What comes back


@on_memory_loop
async def test_a_stream_is_the_decode_nodes_bytes() -> None:
    async with pipeline() as w:
        response = await w.complete(LONG, stream=True)
        body = await response.read()
        assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        assert response.headers["Cache-Control"] == "no-cache"
        head = b'data: {"id": "x", "object": "text_completion", "created": 0, "model": "scripted", '
        assert body.startswith(head + b'"choices": [{"index": 0, "text": "one"}], "usage": null}\n\n')
        assert body.endswith(b"data: [DONE]\n\n")


@on_memory_loop
async def test_cached_tokens_are_those_of_the_prefill_streamed_or_not() -> None:
    async with pipeline() as w:
        w.nodes.remote[0].script.cached_tokens = 48
        whole = await (await w.complete(LONG)).json()
        streamed = await (await w.complete(LONG, stream=True, stream_options={"include_usage": True})).read()
        usage = json.loads(events(streamed)[-2])["usage"]
        assert whole["usage"] == usage
        assert usage["prompt_tokens_details"] == {"cached_tokens": 48}
        assert stream_text(streamed) == TEXT


@on_memory_loop
async def test_an_engines_refusal_reaches_the_client_as_it_is() -> None:
    async with pipeline() as w:
        w.nodes.decode[0].script.decode = ["400 bad_stop"]
        response = await w.complete(LONG)
        assert (response.status, (await response.json())["error"]["code"]) == (400, "bad_stop")
        await w.settled()


# When things fail


@on_memory_loop
async def test_a_dying_prefill_node_is_replaced_under_the_same_ticket() -> None:
    async with pipeline(remote=2) as w:
        w.nodes.remote[0].script.prefill = ["die"]
        response = await w.complete(LONG)
        assert (await response.json())["choices"][0]["text"] == TEXT
        tickets = [n.bodies[0]["kv_transfer_params"]["ticket"]["transfer_id"] for n in w.nodes.remote]
        assert tickets[0] == tickets[1]
        assert response.headers["x-prfaas-route"].startswith("remote; node=r1;")
        assert await w.fallbacks() == {"prefill_engine_died": 1}
        await w.settled()


@on_memory_loop
async def test_a_prefill_node_whose_error_is_no_text_is_replaced() -> None:
    async with pipeline() as w:
        w.nodes.remote[0].script.prefill = ["garbled"]
        assert (await w.complete(LONG)).status == 200
        assert await w.fallbacks() == {"prefill_500": 1}
        await w.settled()


@on_memory_loop
async def test_without_another_remote_node_the_local_one_takes_over() -> None:
    async with pipeline() as w:
        w.nodes.remote[0].script.prefill = ["503 no_capacity"]
        response = await w.complete(LONG)
        assert response.status == 200
        (record,) = await w.records()
        assert (record["prefill_node"], record["fallbacks"]) == ("p0", ["prefill_no_capacity"])
        await w.settled()


@on_memory_loop
async def test_without_any_other_prefill_node_the_decode_node_recomputes() -> None:
    async with pipeline(local=0) as w:
        w.nodes.remote[0].script.prefill = ["drop"]
        response = await w.complete(LONG)
        answer = await response.json()
        assert answer["choices"][0]["text"] == TEXT
        assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}  # the decode node's own number
        assert await w.fallbacks() == {"prefill_connection_lost": 1, "recompute_no_prefill": 1}
        assert ("d0-t1", "prefill_failed") in w.nodes.decode[0].aborts
        await w.settled()


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("409 digest_mismatch", "digest_mismatch"),
        *((f"undelivered {reason}", reason) for reason in ("layout_mismatch", "bad_request", "lora", "multimodal")),
        *((f"undelivered {reason}", reason) for reason in ("cache_salt", "prompt_embeds")),
    ],
)
def test_what_every_engine_would_refuse_is_left_to_the_decode_node(answer: str, reason: str) -> None:
    @on_memory_loop
    async def scenario() -> None:
        async with pipeline(remote=2) as w:
            w.nodes.remote[0].script.prefill = [answer]
            assert (await w.complete(LONG)).status == 200
            assert await w.fallbacks() == {f"prefill_{reason}": 1, "recompute_no_prefill": 1}
            assert w.nodes.remote[1].bodies == []

    scenario()


@on_memory_loop
async def test_a_recompute_the_decode_node_chose_is_counted_streamed_or_not() -> None:
    async with pipeline(decode=1) as w:
        node = w.nodes.decode[0]
        node.script.landing_failure = "landing_timeout"
        await w.complete(LONG)
        await w.complete(LONG, stream=True)
        assert await w.fallbacks() == {"recompute_landing_timeout": 2}
        await w.settled()


@on_memory_loop
async def test_a_prefill_that_takes_too_long_is_given_up() -> None:
    async with pipeline(timeouts=replace(PATIENT, prefill_s=1.0)) as w:  # which the next node has to meet, too
        w.nodes.remote[0].script.prefill = ["hang"]
        assert (await w.complete(LONG)).status == 200
        assert await w.fallbacks() == {"prefill_timeout": 1}
        await w.settled()


@on_memory_loop
@pytest.mark.parametrize("fault", ["die", "drop", "garbled", "500 internal", "503 draining"])
async def test_a_decode_node_that_fails_before_its_first_token_is_replaced(fault: str) -> None:
    async with pipeline() as w:
        w.nodes.decode[0].script.decode = [fault]
        response = await w.complete(LONG, stream=True)
        assert stream_text(await response.read()) == TEXT
        (record,) = await w.records()
        assert record["decode_node"] == "d1"
        assert len(record["fallbacks"]) == 1
        await w.settled()
        assert "request_ended" in aborted(w)


@on_memory_loop
@pytest.mark.parametrize(
    ("fault", "reason", "idle_s"),
    [("die_after_first", "stream_broken", PATIENCE_S), ("stall_after_first", "stream_idle", 0.2)],
)
async def test_a_stream_that_breaks_after_its_first_token_ends_with_an_error_event(
    fault: str, reason: str, idle_s: float
) -> None:
    async with pipeline(decode=1, timeouts=replace(PATIENT, stream_idle_s=idle_s)) as w:
        w.nodes.decode[0].script.decode = [fault]
        response = await w.complete(LONG, stream=True)
        last = json.loads(events(await response.read())[-1])
        assert (last["error"]["type"], last["error"]["code"]) == ("server_error", reason)
        (record,) = await w.records()
        assert (record["fallbacks"], bool(record["error"])) == ([f"decode_{reason}"], True)
        # Its client has had status 200, and no answer: it counts as one that failed.
        assert (response.status, record["status"]) == (200, 502)
        told = await w.metrics()
        assert f'prfaas_streams_broken_total{{reason="{reason}"}} 1.0' in told
        assert ('status="502"' in told, 'status="200"' in told) == (True, False)
        await w.settled()


@on_memory_loop
async def test_an_answer_that_breaks_unstreamed_is_asked_of_another_node() -> None:
    async with pipeline() as w:
        w.nodes.decode[0].script.decode = ["drop"]
        assert (await (await w.complete(LONG)).json())["choices"][0]["text"] == TEXT
        await w.settled()


@on_memory_loop
async def test_a_full_decode_node_is_passed_over_and_used_alone_when_there_is_no_other() -> None:
    async with pipeline() as w:
        w.nodes.decode[0].script.reserve = ["RESOURCE_EXHAUSTED"]
        assert (await w.complete(LONG)).status == 200
        assert (await w.records())[0]["decode_node"] == "d1"
        assert await w.fallbacks() == {"decode_no_capacity": 1}
    async with pipeline(decode=1) as w:
        w.nodes.decode[0].script.reserve = ["RESOURCE_EXHAUSTED"]
        assert (await w.complete(LONG)).status == 200
        (record,) = await w.records()
        assert (record["target"], record["fallbacks"]) == ("decode", ["decode_no_capacity"])


@on_memory_loop
async def test_attempts_are_bounded_and_the_last_answer_is_a_503() -> None:
    async with pipeline(decode=4) as w:
        for node in w.nodes.decode:
            node.script.decode = ["500 internal"] * 9
        response = await w.complete(LONG)
        assert response.status == 503
        assert response.headers["Retry-After"] == "1"
        assert (await response.json())["error"]["code"] == "attempts_exhausted"
        assert sum(len(node.bodies) for node in w.nodes.decode) == 3
        await w.settled()


@on_memory_loop
async def test_nothing_ready_is_a_503_that_says_when_to_come_back() -> None:
    async with pipeline() as w:
        for node in w.nodes.decode:
            node.become(pb.NODE_STATE_DRAINING)
        await until(lambda: not w.clusters.is_ready)
        response = await w.complete(LONG)
        assert (response.status, response.headers["Retry-After"]) == (503, "1")
        assert response.headers["x-prfaas-rejected"] == "no_decode_node"
        async with w.http.get("/health") as health:
            assert health.status == 503


# When the client leaves


@on_memory_loop
@pytest.mark.parametrize("stage", ["admitted", "reserving", "prefilling", "decoding"])
async def test_a_client_that_leaves_frees_everything(stage: str) -> None:
    async with pipeline(decode=1) as w:
        (remote,), (decode,) = w.nodes.remote, w.nodes.decode
        if stage != "decoding":
            remote.script.prefill_gate = asyncio.Event()
        decode.script.word_interval_s = PATIENCE_S
        reached = {
            "admitted": lambda: w.admission.in_flight,
            "reserving": lambda: decode.open_reservations,
            "prefilling": lambda: remote.running and decode.running,
            "decoding": lambda: remote.bodies and not remote.running and not decode.open_reservations,
        }
        task = asyncio.create_task(w.complete(LONG, stream=True))
        await until(lambda: w.admission.in_flight)
        await until(reached[stage])
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await w.settled()
        statuses = [record["status"] for record in await w.records()]
        assert statuses == [499] or (stage == "admitted" and not statuses)  # not read yet


@on_loop
async def test_fifty_at_once_and_a_third_of_them_leaving() -> None:
    async with world(remote=2, local=2, decode=3) as w:
        for node in w.nodes.decode:
            node.script.word_interval_s = 0.01
        w.nodes.remote[0].script.prefill = ["die", "503 no_capacity"]
        w.nodes.decode[0].script.decode = ["", "500 x", "", "drop"]

        async def one(number: int) -> int:
            work = w.complete(f"{number} " + (LONG if number % 2 else SHORT), stream=bool(number % 3))
            try:
                async with asyncio.timeout(0.03 if number % 5 == 4 else PATIENCE_S):
                    response = await work
            except TimeoutError:
                return 499
            assert stream_text(await response.read()) == TEXT if number % 3 else response.status == 200
            return response.status

        statuses = await asyncio.gather(*(one(number) for number in range(50)))
        assert statuses.count(200) >= 40
        await w.settled()
        await w.idle()
        assert all(node.pending_requests == node.pending_tokens == 0 for node in w.gateway.clusters.nodes)


@on_memory_loop
async def test_draining_finishes_streams_and_refuses_new_requests() -> None:
    async with pipeline() as w:
        for node in w.nodes.decode:
            node.script.word_interval_s = 0.1
        running = asyncio.create_task(w.complete(LONG, stream=True))
        await until(lambda: w.admission.in_flight)
        drained = asyncio.create_task(w.admission.drained(PATIENCE_S))
        await until(lambda: w.admission.is_draining)
        refused = await w.complete(SHORT)
        assert (refused.status, (await refused.json())["error"]["code"]) == (503, "draining")
        assert stream_text(await (await running).read()) == TEXT
        assert await drained


@on_memory_loop
async def test_too_many_in_flight_is_a_429() -> None:
    async with pipeline(max_in_flight=1) as w:
        gate = w.nodes.local[0].script.prefill_gate = asyncio.Event()
        first = asyncio.create_task(w.complete(SHORT))
        await until(lambda: w.admission.in_flight)
        second = await w.complete(SHORT)
        assert (second.status, second.headers["Retry-After"]) == (429, "1")
        assert (await second.json())["error"]["type"] == "rate_limit_error"
        gate.set()
        assert (await first).status == 200


@on_memory_loop
async def test_what_every_engine_refuses_is_no_nodes_failure() -> None:
    async with pipeline() as w:
        for node in w.nodes.nodes:
            node.script.prefill = node.script.decode = ["400 bad_bias"] * 3
        response = await w.complete(LONG, logit_bias={"100000": 1})
        assert (response.status, (await response.json())["error"]["code"]) == (400, "bad_bias")
        await w.settled()
        assert await w.fallbacks() == {}
        assert (await w.records())[-1]["fallbacks"] == []


@on_memory_loop
async def test_the_route_header_says_where_the_prompt_was_computed_in_the_end() -> None:
    async with pipeline(decode=1) as w:
        (decode,) = w.nodes.decode
        for stream in (True, False):
            for node in (*w.nodes.remote, *w.nodes.local):
                node.script.prefill = ["400 odd"]
            response = await w.complete(LONG, stream=stream)
            route = response.headers["x-prfaas-route"]
            assert response.status == 200
            assert route.startswith(f"local; node={decode.node_id}; uncached=361;")
            assert route.endswith("; fallback=prefill_odd; fallback=recompute_no_prefill")
        await w.settled()
        decode.script.landing_failure = "digest"  # a stream tells this later
        response = await w.complete(LONG)
        assert response.headers["x-prfaas-route"].startswith(f"local; node={decode.node_id}; uncached=361;")
        assert response.headers["x-prfaas-route"].endswith("; fallback=recompute_digest")
