"""Landings against a scripted agent: loaded and given back, or recomputed and counted."""

from engine.vllm.scheduler_side.errands import ErrandFailed
from tests.engine.vllm.builders import BLOCK, tables_for
from tests.engine.vllm.scripted import LANDING, LAYOUT, N, Request


def test_a_landing_is_loaded_and_given_back(world):
    request = world.arrive(Request(params=LANDING))
    assert world.side.num_new_matched_tokens(request, 0) is None
    world.grant()
    assert world.side.num_new_matched_tokens(request, BLOCK) == N - 1 - BLOCK
    world.side.after_alloc(request, tables_for(LAYOUT, N - 1), N - 1 - BLOCK)
    step = world.idle()
    assert [(load.start, load.stop) for load in step.loads] == [(BLOCK, N - 1)]
    world.side.loads_ended({"r"}, set())
    assert world.agent.ended == [(1, True, "")]
    assert not world.idle().loads
    assert world.side.take_counts().landed_tokens == N - 1 - BLOCK


def test_a_landing_that_vllm_has_already_is_not_loaded(world):
    request = world.arrive(Request(num_tokens=2 * BLOCK + 1, params=LANDING))
    world.grant(2 * BLOCK)
    assert world.side.num_new_matched_tokens(request, 2 * BLOCK) == 0
    world.side.after_alloc(request, ((), ()), 0)
    assert world.agent.ended == [(1, True, "")]


def test_a_landing_that_fails_goes_on_as_local(world):
    request = world.arrive(Request(params=LANDING))
    world.agent.events.append(ErrandFailed(1, "landing_timeout"))
    assert world.side.num_new_matched_tokens(request, 0) is None
    assert world.agent.asked[1] == ("begin", 3 * BLOCK, None)
    assert world.side.take_counts().fallbacks == {"landing_timeout": 1}


def test_a_load_that_fails_is_recomputed_without_pages(world):
    request = world.arrive(Request(params=LANDING))
    world.grant()
    world.side.after_alloc(request, ((), ()), world.side.num_new_matched_tokens(request, 0))
    world.idle()
    world.side.loads_ended({"r"}, {"r"})
    assert world.agent.ended == [(1, False, "load_failed")]
    assert world.side.num_new_matched_tokens(request, 0) == 0
    assert world.side.take_counts().fallbacks == {"load_failed": 1}


def test_a_landing_that_was_recomputed_says_so(world):
    request = world.arrive(Request(params=LANDING))
    world.grant()
    world.side.after_alloc(request, ((), ()), world.side.num_new_matched_tokens(request, 0))
    world.side.loads_ended({"r"}, {"r"})
    assert world.side.request_finished(request) == {"recomputed": True, "reason": "load_failed"}
    late = world.arrive(Request("late", params=LANDING))
    world.agent.events.append(ErrandFailed(2, "landing_timeout"))
    assert world.side.num_new_matched_tokens(late, 0) is None
    assert world.side.request_finished(late) == {"recomputed": True, "reason": "landing_timeout"}


def test_an_abort_while_loading_gives_back_when_the_load_has_ended(world):
    request = world.arrive(Request(params=LANDING))
    world.grant()
    world.side.after_alloc(request, ((), ()), world.side.num_new_matched_tokens(request, 0))
    world.idle()
    assert world.side.request_finished(request) is None
    assert world.agent.ended == []
    world.side.loads_ended({"r"}, set())
    assert world.agent.ended == [(1, False, "aborted")]
