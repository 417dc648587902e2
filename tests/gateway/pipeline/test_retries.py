"""What follows a failure before nodes: when some are away, and when engines die."""

import asyncio
import functools
import json

import pytest

from gateway.cluster.registry import NodeTimes
from gateway.tasks import TaskSet
from gateway.telemetry.metrics import Metrics
from gateway.workers.process_scope import SingleProcess
from tests.gateway.memory.pipeline import on_memory_loop, pipeline
from tests.gateway.worlds import PATIENCE_S, Deployment, on_loop, until, world

LONG = "the quick brown fox jumps over the lazy dog " * 40


@on_memory_loop
async def test_any_number_of_nodes_may_be_away() -> None:
    async with pipeline(remote=5, decode=6) as w:
        for node in w.nodes.decode[:5]:
            node.script.decode = ["503 draining"]
        for node in w.nodes.remote[:4]:
            node.script.prefill = ["503 converting"]
        assert (await w.complete(LONG)).status == 200
        await w.settled()


@on_memory_loop
async def test_a_request_waits_for_the_node_that_has_taken_the_place_of_those_that_are_away() -> None:
    async with pipeline(decode=1) as w:
        w.nodes.decode[0].script.decode = ["503 wrong_role"]
        assert (await w.complete(LONG)).status == 200
        assert await w.fallbacks() == {"decode_wrong_role": 1}


async def refused(w: Deployment) -> None:
    response = await w.complete(LONG)
    assert (response.status, (await response.json())["error"]["code"]) == (500, "kills_engines")
    assert response.headers["x-should-retry"] == "false"
    await w.settled()


# The news of a death comes late on a busy machine; it is waited for until it is there.
PATIENT = NodeTimes(death_news_s=PATIENCE_S)
patient = functools.partial(pipeline, node_times=PATIENT)


@on_memory_loop
async def test_a_node_that_has_no_room_and_fails_by_itself_is_asked_no_more() -> None:
    async with pipeline(decode=2) as w:
        for node in w.nodes.decode:
            node.script.reserve = ["RESOURCE_EXHAUSTED"]
            node.script.decode = ["500 internal"] * 9
        response = await w.complete(LONG)
        assert response.status == 503
        assert await w.fallbacks() == {"decode_no_capacity": 2, "decode_internal": 2}
        await w.settled()


@on_memory_loop
async def test_an_answer_without_a_token_has_loaded_nothing_and_its_reservation_is_freed() -> None:
    async with pipeline() as w:
        w.nodes.decode[0].script.decode = ["200 nonsense"]
        assert (await w.complete(LONG)).status == 200
        await w.settled()


@pytest.mark.parametrize("way", ["die", "lament"])
@on_loop
async def test_a_request_that_kills_two_decode_engines_is_not_carried_to_a_third(way: str) -> None:
    async with world(decode=4, node_times=PATIENT) as w:
        for node in w.nodes.decode:
            node.script.decode = [way]
        await refused(w)
        assert sum(len(node.bodies) for node in w.nodes.decode) == 2
        assert await w.fallbacks() == {"decode_engine_died": 2}


@on_memory_loop
async def test_after_that_no_other_request_of_its_kind_is_tried_for_a_while() -> None:
    async with patient(decode=6) as w:
        for node in w.nodes.decode:
            node.script.decode = ["die"]
        assert (await w.complete(LONG, seed=1)).status == 500
        asked = sum(len(node.bodies) for node in w.nodes.decode)
        for node in w.nodes.decode:
            node.script.decode = []
        response = await w.complete(LONG, seed=2)
        assert (response.status, (await response.json())["error"]["code"]) == (503, "shape_kills_engines")
        assert float(response.headers["retry-after"]) > 1
        assert sum(len(node.bodies) for node in w.nodes.decode) == asked == 2
        assert (await w.complete(LONG)).status == 200
        assert (await w.complete("short", seed=3)).status == 200
        assert 'prfaas_engine_killers_total{outcome="refused"} 1.0' in await w.metrics()
        await w.settled()


@on_memory_loop
async def test_engines_whose_servers_tell_of_their_death_in_a_stream_have_died_of_it_too() -> None:
    async with patient(decode=4) as w:
        for node in w.nodes.decode:
            node.script.decode = ["lament 200"]
        response = await w.complete(LONG, stream=True)
        assert (response.status, (await response.json())["error"]["code"]) == (500, "kills_engines")
        assert await w.fallbacks() == {"decode_engine_died": 2}
        await w.settled()


@pytest.mark.parametrize("faults", [["kill_after 2", "kill_after 4"], ["lament_after 2", "lament_after 4"]])
@on_memory_loop
async def test_engines_that_die_in_the_middle_of_an_answer_tell_of_its_kind_too(faults: list[str]) -> None:
    async with patient(decode=6) as w:
        in_turn = [*faults]
        for node in w.nodes.decode:
            node.script.words, node.script.is_resumable, node.script.decode = (" w",) * 9, True, in_turn
        response = await w.complete(LONG, seed=1, stream=True)
        assert b"[DONE]" not in await response.read()
        response = await w.complete(LONG, seed=2, stream=True)
        assert (response.status, (await response.json())["error"]["code"]) == (503, "shape_kills_engines")
        await w.settled()


@on_memory_loop
async def test_a_kind_that_was_answered_before_is_not_refused_for_engines_that_died_beside_it() -> None:
    async with patient(decode=6) as w:
        assert (await w.complete(LONG)).status == 200
        for node in w.nodes.decode:
            node.script.decode = ["die"]
        await refused(w)
        for node in w.nodes.decode:
            node.script.decode = []
        assert (await w.complete(LONG)).status == 200
        assert 'prfaas_engine_killers_total{outcome="answered_before"} 1.0' in await w.metrics()


@on_memory_loop
async def test_deaths_of_prefill_engines_count_and_the_client_hears_at_once() -> None:
    async with patient(remote=3) as w:
        for node in w.nodes.remote:
            node.script.prefill = ["die"]
        await refused(w)
        assert sum(len(node.bodies) for node in w.nodes.remote) == 2
        assert await w.fallbacks() == {"prefill_engine_died": 2}


@on_memory_loop
async def test_a_connection_that_breaks_under_a_living_engine_is_no_death() -> None:
    async with pipeline(decode=3) as w:
        for node in w.nodes.decode[:2]:
            node.script.decode = ["drop"]
        assert (await w.complete(LONG)).status == 200
        assert await w.fallbacks() == {"decode_connection_lost": 2}


@on_memory_loop
async def test_after_a_fallback_the_header_says_where_the_prompt_was_computed() -> None:
    async with pipeline() as w:
        w.nodes.remote[0].script.prefill = ["503 draining"]
        response = await w.complete(LONG)
        assert response.headers["x-prfaas-route"].startswith("local; node=p0;")
        (record,) = await w.records()
        assert (record["route"], record["target"]) == ("local", "remote")


@on_memory_loop
async def test_bytes_count_whatever_the_status() -> None:
    async with pipeline(decode=1) as w:
        w.nodes.decode[0].script.decode = ["400 bad_stop"]
        gate = w.nodes.decode[0].script.decode_gate = asyncio.Event()
        asking = asyncio.create_task(w.complete(LONG))
        await until(lambda: w.nodes.remote[0].bodies and not w.nodes.remote[0].running)
        gate.set()
        assert (await asking).status == 400
        assert 'prfaas_kv_transfer_bytes_total{link="west",route="remote",transport="tcp"} 1000.0' in await w.metrics()


@on_loop
async def test_the_end_of_every_task_is_seen() -> None:
    seen: list[str] = []
    tasks = TaskSet(seen.append)

    async def fails(error: Exception) -> None:
        raise error

    tasks.start(fails(KeyError("x")), "foreseen", expected=(KeyError,))
    tasks.start(fails(KeyError("x")), "unforeseen")
    await tasks.join(PATIENCE_S)
    assert seen == ["unforeseen"]


@on_loop
async def test_work_for_ever_is_begun_again_when_it_ends() -> None:
    seen: list[str] = []
    tasks, begun = TaskSet(seen.append), 0

    async def work() -> None:
        nonlocal begun
        begun += 1
        if begun < 3:
            raise RuntimeError
        await asyncio.sleep(PATIENCE_S)

    tasks.keep(work, "heartbeat")
    await until(lambda: begun == 3)
    assert seen == ["heartbeat"] * 2
    await tasks.cancel()
    assert not len(tasks)


class FailingMetrics(Metrics):
    """Has a bug of ours: it cannot count that a first choice did not work out."""

    def fallback(self, reason: str) -> None:
        raise RuntimeError("an unforeseen failure")


def buggy() -> SingleProcess:
    """What a gateway with that bug has to itself."""
    alone = SingleProcess()
    alone.metrics = FailingMetrics()
    return alone


@on_memory_loop
async def test_an_error_of_ours_in_the_prefills_leg_is_told_at_once() -> None:
    async with pipeline(seat=buggy()) as w:
        w.nodes.remote[0].script.prefill = ["500 internal"]
        response = await w.complete(LONG)
        assert (response.status, (await response.json())["error"]["code"]) == (500, "internal_error")
        assert 'prfaas_unforeseen_errors_total{work="deliver"} 1.0' in await w.metrics()
        await w.settled()


@on_memory_loop
async def test_an_error_of_ours_in_a_stream_is_its_last_event() -> None:
    async with pipeline(seat=buggy()) as w:
        for node in w.nodes.decode:  # each says at the end that it could not use what had landed
            node.script.landing_failure, node.script.word_interval_s = "damaged", 0.05
        response = await w.complete(LONG, stream=True)
        last = (await response.read()).split(b"\n\n")[-2]
        assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "internal_error"
        assert 'prfaas_unforeseen_errors_total{work="relay"} 1.0' in await w.metrics()
        await w.settled()


@on_memory_loop
async def test_a_sick_cluster_is_not_asked_again_for_every_request() -> None:
    async with pipeline(decode=4, retry_share=0.0, least_retries=3) as w:
        for node in w.nodes.decode:
            node.script.decode = ["500 internal"] * 99
        codes = [(await (await w.complete(LONG)).json())["error"]["code"] for _ in range(5)]
        assert codes == ["attempts_exhausted", *["retry_budget_spent"] * 4]
        assert sum(len(node.bodies) for node in w.nodes.decode) == 3 + 2 + 3
        assert 'prfaas_retries_refused_total{stage="decode"} 4.0' in await w.metrics()
        await w.settled()


@on_memory_loop
async def test_prefills_and_answers_share_the_budget() -> None:
    async with pipeline(remote=3, retry_share=0.0, least_retries=1) as w:
        for node in w.nodes.remote:
            node.script.prefill = ["500 internal"] * 99
        assert (await w.complete(LONG)).status == 200
        assert (await w.fallbacks())["prefill_internal"] == 2
        assert 'prfaas_retries_refused_total{stage="prefill"} 1.0' in await w.metrics()
        w.nodes.decode[0].script.decode = w.nodes.decode[1].script.decode = ["500 internal"]
        response = await w.complete(LONG)
        assert (response.status, (await response.json())["error"]["code"]) == (503, "retry_budget_spent")
        await w.settled()


@on_memory_loop
async def test_nodes_that_have_died_are_done_without_however_many_requests_they_had() -> None:
    async with pipeline(decode=3, retry_share=0.0, least_retries=0) as w:
        w.nodes.decode[0].script.decode = ["die"] * 9
        for _ in range(3):
            assert (await w.complete(LONG)).status == 200
        await w.settled()


@on_memory_loop
async def test_a_link_that_fails_is_gone_around_however_many_prompts_were_on_it() -> None:
    async with pipeline(remote=1, local=1, retry_share=0.0, least_retries=0) as w:
        w.nodes.remote[0].script.path_is_down = True
        assert (await w.complete(LONG)).status == 200
        assert await w.fallbacks() == {"prefill_peer_lost": 1}
        assert "prfaas_retries_refused_total{" not in await w.metrics()
        await w.settled()
