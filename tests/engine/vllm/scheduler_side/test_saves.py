"""What steps save: every token and state once, and only while vLLM has it."""

import pytest

from engine.vllm.scheduler_side.errands import Arrived, ErrandWritten, Granted
from engine.vllm.scheduler_side.steps import SaveBlocks, StateOffer
from tests.engine.vllm.builders import BLOCK, full, layout_of, pages_for, state, tables_for
from tests.engine.vllm.scripted import ARENA, LAYOUT, LEG, N, Request, World
from transport.control.messages import Delivered


def test_local_prompts_save_whole_blocks_and_say_which_states_they_could_not(world):
    request = world.arrive(Request())
    assert not world.agent.asked, "a queue of local prompts holds no pages"
    assert world.side.num_new_matched_tokens(request, 0) is None
    assert world.agent.asked == [("begin", 3 * BLOCK, None)]
    world.grant(3 * BLOCK)
    assert world.side.num_new_matched_tokens(request, 0) == 0
    world.side.after_alloc(request, tables_for(LAYOUT, N), 0)
    step = world.schedule(request, N)
    assert (step.saves[0].start, step.saves[0].stop, step.saves[0].states) == (0, 3 * BLOCK, ())
    assert world.agent.last == [(1, [(1, 3 * BLOCK)])], "vLLM had no state there: it computed past it"
    world.agent.events.append(ErrandWritten(1))
    world.idle()
    assert world.agent.ended == [(1, False, "")]


def test_a_state_that_a_step_leaves_behind_is_saved_from_the_block_that_has_it(world):
    """A last chunk of Mamba 2 runs to the end of its prompt, and exports what it had at the last border of blocks."""
    request = world.arrive(Request())
    world.side.num_new_matched_tokens(request, 0)
    world.grant(3 * BLOCK)
    world.side.num_new_matched_tokens(request, 0)
    world.side.after_alloc(request, tables_for(LAYOUT, N), 0)
    world.offers = {"r": [StateOffer(1, 77, 3 * BLOCK), StateOffer(1, 78, BLOCK), StateOffer(1, 79, N + BLOCK)]}
    step = world.schedule(request, N)
    assert (step.saves[0].states, step.saves[0].offers) == ((3 * BLOCK,), (StateOffer(1, 77, 3 * BLOCK),))
    assert world.agent.last == [(1, [])]


def test_a_state_of_which_one_part_is_left_behind_is_not_saved():
    """Two groups of vLLM's have layers of one kind: without one of them there is no state."""
    two = layout_of(full("a", table=0), state("s", table=1), state("t", table=2))
    world = World(layout=two)
    request = world.arrive(Request())
    world.side.num_new_matched_tokens(request, 0)
    world.agent.events.append(Granted(1, pages_for(two, 3 * BLOCK), ARENA))
    world.side.num_new_matched_tokens(request, 0)
    world.side.after_alloc(request, tables_for(two, N), 0)
    world.offers = {"r": [StateOffer(1, 77, 3 * BLOCK)]}
    step = world.schedule(request, N)
    assert (step.saves[0].states, step.saves[0].offers) == ((), ())
    assert world.agent.last == [(1, [(1, 3 * BLOCK)])]


def drafted_end_of_a_leg(
    cached: int, drafts: list[int], *, num_tokens: int, block_tokens: int = BLOCK
) -> SaveBlocks | None:
    """The last step of a leg that has `cached` of its tokens: vLLM adds drafts to a token that is computed alone."""
    layout = layout_of(full("a", table=0), state("s", table=1, block_tokens=block_tokens))
    world = World(layout=layout)
    request = world.arrive(Request(num_tokens=num_tokens + 1, params=LEG))
    world.agent.events.append(Granted(1, pages_for(layout, num_tokens), ARENA))
    world.side.num_new_matched_tokens(request, cached)
    world.side.after_alloc(request, tables_for(layout, num_tokens), 0)
    request.num_computed_tokens, world.drafts = cached, {"r": drafts}
    (save,) = world.schedule(request, num_tokens - cached + len(drafts)).saves
    assert save.stop == num_tokens, "drafts are no part of the prompt"
    assert world.agent.last == [(1, [] if num_tokens in save.states else [(1, num_tokens)])]
    return save


def test_a_step_with_drafts_has_its_state_where_its_first_token_put_it() -> None:
    """In the block that its last draft belongs to, and those after it have the states after drafts."""
    number = 3 * BLOCK - 1
    here = drafted_end_of_a_leg(number - 1, [-1], num_tokens=number)
    assert (here.states, here.offers) == ((number,), (StateOffer(1, 3, number),))
    beyond = drafted_end_of_a_leg(number - 1, [-1] * 3, num_tokens=number)
    assert (beyond.states, beyond.offers) == ((number,), (StateOffer(1, 4, number),))
    lone = drafted_end_of_a_leg(number - 1, [-1] * 3, num_tokens=number, block_tokens=1 << 20)
    assert (lone.states, lone.offers) == ((number,), (StateOffer(1, lone.tables[1][0], number),))


def test_the_first_token_of_a_prompt_has_no_state_to_save_if_it_is_padded() -> None:
    """vLLM computes a prompt's first tokens as one piece: drafts would be in its state."""
    first = drafted_end_of_a_leg(0, [-1] * 2, num_tokens=1)
    assert (first.states, first.offers) == ((), ())


@pytest.mark.parametrize("drafts", [0, 3])
def test_a_held_leg_has_room_for_its_padding_and_ends_with_the_token_after_its_delivery(world, drafts: int) -> None:
    """vLLM's second runner verifies what pads a prompt: a leg may have several tokens before its KVCache has arrived."""
    request = world.arrive(Request(params=LEG))
    world.grant()
    world.side.num_new_matched_tokens(request, N - 2)
    world.side.after_alloc(request, tables_for(LAYOUT, N - 1), 0)
    request.num_computed_tokens, world.drafts = N - 2, {"r": [-1] * drafts}
    world.schedule(request, 1 + drafts)
    assert request.max_tokens == 2 + drafts
    world.agent.events.append(Arrived(1, Delivered(job="j", ok=True)))
    world.idle()
    assert request.max_tokens == 1


def test_a_step_with_drafts_behind_several_tokens_has_no_state_to_save() -> None:
    """vLLM does not do so: all of them would be in the state, drafts too."""
    assert drafted_end_of_a_leg(BLOCK, [-1] * 3, num_tokens=2 * BLOCK + 1).states == ()


def test_what_was_computed_is_told_without_the_queue_and_without_what_vllm_had(world):
    request = world.arrive(Request(params=LEG))
    world.grant()
    world.now += 5.0
    world.side.num_new_matched_tokens(request, BLOCK)
    world.side.after_alloc(request, tables_for(LAYOUT, N - 1), 0)
    request.num_computed_tokens = BLOCK
    world.schedule(request, BLOCK)
    world.now += 2.0
    world.schedule(request, N - 1 - 2 * BLOCK)
    assert world.agent.computed == [(N - 1 - BLOCK, 2.0)]


def test_a_preempted_request_saves_nothing_twice(world):
    request = world.arrive(Request(params=LEG))
    world.grant()
    world.side.num_new_matched_tokens(request, 0)
    world.side.after_alloc(request, tables_for(LAYOUT, N - 1), 0)
    world.schedule(request, 2 * BLOCK)
    request.num_computed_tokens, request.num_preemptions = 0, 1
    assert world.side.num_new_matched_tokens(request, 0) == 0
    assert not world.schedule(request, BLOCK).saves
    assert world.schedule(request, 2 * BLOCK).saves[0].start == 2 * BLOCK


def test_a_state_is_saved_only_while_its_block_is_not_computed_past():
    """Without prefix caching a state has one block: after a step it is that of the step's end."""
    one_block = layout_of(full("a", table=0), state("s", table=1, block_tokens=1 << 20))
    world = World(layout=one_block)
    request = world.arrive(Request(params=LEG))
    pages = pages_for(one_block, N - 1)
    pages.states[1][2 * BLOCK] = pages.states[1][N - 1]
    world.agent.events.append(Granted(1, pages, ARENA))
    world.side.num_new_matched_tokens(request, 0)
    world.side.after_alloc(request, tables_for(one_block, N - 1), 0)
    world.schedule(request, BLOCK)
    world.schedule(request, 2 * BLOCK)  # past the length that is wanted
    request.num_computed_tokens, request.num_preemptions = 0, 1
    assert not world.schedule(request, 2 * BLOCK).saves, "computed once more, cut where it is wanted"
    assert world.schedule(request, N - 1 - 2 * BLOCK).saves[0].states == (N - 1,)
    assert world.agent.last == [(1, [(1, 2 * BLOCK)])]
