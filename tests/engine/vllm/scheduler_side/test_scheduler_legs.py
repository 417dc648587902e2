"""Prefill legs against a scripted agent: what vLLM is told, what the workers are told, what is given back."""

import pytest

from engine.vllm.internals import HELD_STEP, EngineAround
from engine.vllm.scheduler_side.errands import Arrived, ErrandFailed, ErrandWritten
from tests.engine.vllm.builders import BLOCK, tables_for
from tests.engine.vllm.scripted import LAYOUT, LEG, N, Request, World, ticket
from transport.control.messages import Delivered


def test_a_leg_stops_one_token_short_and_hashes_what_is_left(world):
    request = world.arrive(Request(params=LEG))
    assert world.agent.asked == [("begin", N - 1, ticket())]
    assert request.prompt_token_ids == list(range(N - 1))
    assert request.num_prompt_tokens == len(request.all_token_ids) == N - 1
    assert request.block_hashes == [f"of {N - 1}"]
    assert request.sampling_params.stop_token_ids == []


def test_a_leg_waits_for_pages_is_saved_held_and_answers(world):
    request = world.arrive(Request(params=LEG))
    assert world.side.num_new_matched_tokens(request, 0) is None
    world.grant()
    assert world.side.num_new_matched_tokens(request, 0) == 0
    world.side.after_alloc(request, tables_for(LAYOUT, N - 1), 0)
    first = world.schedule(request, BLOCK)
    assert (first.saves[0].start, first.saves[0].stop, first.saves[0].states) == (0, BLOCK, ())
    assert first.grants
    assert request.next_decode_eligible_step == 0
    last = world.schedule(request, N - 1 - BLOCK)
    assert (last.saves[0].start, last.saves[0].stop, last.saves[0].states) == (BLOCK, N - 1, (N - 1,))
    assert not last.grants
    assert world.agent.last == [(1, [])]
    assert request.next_decode_eligible_step == HELD_STEP
    world.agent.events += [
        ErrandWritten(1),
        Arrived(1, Delivered(job="j", ok=True, bytes_total=9, bytes_before_prefill_end=7)),
    ]
    world.idle()
    assert request.next_decode_eligible_step == 0
    answer = world.side.request_finished(request)
    assert answer["delivered"]
    assert (answer["num_tokens"], answer["bytes_total"], answer["bytes_before_prefill_end"]) == (N - 1, 9, 7)
    assert world.agent.ended == [(1, False, "")]
    counts = world.side.take_counts()
    assert (counts.legs, counts.overlapped_bytes) == ({"delivered": 1}, 7)


def test_a_leg_that_is_cached_completely_is_hardly_computed(world):
    request = world.arrive(Request(num_tokens=2 * BLOCK + 1, params=LEG))
    world.grant(2 * BLOCK, cached=2 * BLOCK)
    assert world.side.num_new_matched_tokens(request, 0) is None
    assert world.agent.completed == [1]
    assert request.num_prompt_tokens == 1
    assert world.side.num_new_matched_tokens(request, 0) is None, "held until it has been delivered"
    world.agent.events.append(Arrived(1, Delivered(job="j", ok=True)))
    assert world.side.num_new_matched_tokens(request, 0) == 0
    request.num_preemptions = 1
    assert world.side.num_new_matched_tokens(request, 0) == 0, "it was cut: there is no room for what was cached"
    assert world.side.request_finished(request)["cached_tokens"] == 2 * BLOCK


@pytest.mark.parametrize("reason", ["no_capacity", "layout_mismatch", "agent_gone"])
def test_a_refused_leg_computes_one_token_and_says_why(world, reason):
    request = world.arrive(Request(params=LEG))
    world.agent.events.append(ErrandFailed(1, reason))
    assert world.side.num_new_matched_tokens(request, BLOCK) is None, "vLLM's own hit is that of the whole prompt"
    assert (request.num_prompt_tokens, request.max_tokens) == (1, 1)
    assert world.side.num_new_matched_tokens(request, 0) == 0
    assert world.side.request_finished(request) == {"delivered": False, "reason": reason}
    assert world.side.take_counts().legs == {reason: 1}


def test_a_push_that_fails_ends_the_leg(world):
    request = world.arrive(Request(params=LEG))
    world.grant()
    world.side.num_new_matched_tokens(request, 0)
    world.side.after_alloc(request, tables_for(LAYOUT, N - 1), 0)
    world.schedule(request, N - 1)
    world.agent.events.append(ErrandFailed(1, "peer_lost"))
    world.idle()
    assert request.next_decode_eligible_step == 0
    assert request.max_tokens == 1
    assert world.agent.ended == [(1, False, "peer_lost")]
    assert world.side.request_finished(request) == {"delivered": False, "reason": "peer_lost"}


def test_a_leg_whose_push_fails_computes_no_further_where_the_engine_can_end_it():
    ended = []

    def end(request, answer):
        ended.append((request.request_id, answer))
        return True

    world = World(engine=EngineAround(end=end))
    request = world.arrive(Request(params=LEG))
    world.grant()
    world.side.num_new_matched_tokens(request, 0)
    world.side.after_alloc(request, tables_for(LAYOUT, N - 1), 0)
    world.schedule(request, BLOCK)
    world.agent.events.append(ErrandFailed(1, "peer_lost"))
    assert not world.schedule(request, BLOCK).saves
    assert ended == [("r", {"delivered": False, "reason": "peer_lost"})]
    assert request.max_tokens != 1, "nobody waits for a token"
    world.side.request_finished(request)  # as vLLM tells of what it has aborted
    assert world.agent.ended == [(1, False, "peer_lost")]
    assert world.side.take_counts().legs == {"peer_lost": 1}


def test_a_leg_whose_pages_are_lost_while_it_loads_is_not_held(world):
    request = world.arrive(Request(params=LEG))
    world.grant(cached=2 * BLOCK)
    world.side.after_alloc(request, ((), ()), world.side.num_new_matched_tokens(request, 0))
    world.idle()
    world.agent.events.append(ErrandFailed(1, "agent_gone"))
    world.idle()
    world.side.loads_ended({"r"}, set())  # the ranks were through already
    request.num_computed_tokens = 2 * BLOCK
    assert not world.schedule(request, N - 1 - 2 * BLOCK).saves
    assert (request.next_decode_eligible_step, request.max_tokens) == (0, 1)
    assert world.side.request_finished(request) == {"delivered": False, "reason": "agent_gone"}


def test_a_leg_whose_push_failed_while_it_loaded_in_vain_is_hardly_computed(world):
    request = world.arrive(Request(params=LEG))
    world.grant(cached=2 * BLOCK)
    world.side.after_alloc(request, ((), ()), world.side.num_new_matched_tokens(request, 0))
    world.idle()
    world.agent.events.append(ErrandFailed(1, "peer_lost"))
    world.idle()
    world.side.loads_ended({"r"}, {"r"})
    assert (request.num_prompt_tokens, request.max_tokens) == (1, 1)


def test_a_leg_aborted_while_loading_is_counted(world):
    request = world.arrive(Request(params=LEG))
    world.grant(cached=2 * BLOCK)
    world.side.after_alloc(request, ((), ()), world.side.num_new_matched_tokens(request, 0))
    world.idle()
    world.side.request_finished(request)
    world.side.loads_ended({"r"}, set())
    assert world.side.take_counts().legs == {"aborted": 1}


def test_a_leg_preempted_while_held_waits_and_comes_back_from_its_pages(world):
    request = world.arrive(Request(params=LEG))
    world.grant()
    world.side.num_new_matched_tokens(request, 0)
    world.side.after_alloc(request, tables_for(LAYOUT, N - 1), 0)
    world.schedule(request, N - 1)
    request.num_computed_tokens, request.num_preemptions = 0, 1
    assert world.side.num_new_matched_tokens(request, 0) is None
    world.agent.events.append(Arrived(1, Delivered(job="j", ok=True)))
    assert world.side.num_new_matched_tokens(request, 0) == N - 1
    world.side.after_alloc(request, tables_for(LAYOUT, N - 1), N - 1)
    assert world.idle().loads
    world.side.loads_ended({"r"}, set())
    assert world.side.request_finished(request)["delivered"]
