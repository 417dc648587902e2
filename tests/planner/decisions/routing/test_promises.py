"""What will be cached on a node counts, from the decision on until it is."""

from hypothesis import given
from hypothesis import strategies as st

from planner.decisions.routing.promises import Promises

A, B, C, D = (letter.encode() for letter in "abcd")


def test_a_prompt_that_goes_on_finds_the_one_before_promised():
    promises = Promises()
    promises.add([A, B])
    assert promises.longest([A, B, C], 0) == 2
    assert promises.longest([A, B], 1) == 2


def test_what_leaves_the_promised_prompt_before_its_end_finds_nothing():
    promises = Promises()
    promises.add([A, B])
    assert promises.longest([A, C, D], 0) == 0
    assert promises.longest([A], 0) == 0


def test_what_is_held_already_is_not_less_for_a_promise():
    promises = Promises()
    promises.add([A])
    assert promises.longest([A, B, C], 2) == 2


def test_two_prompts_with_one_end_promise_it_until_both_are_done():
    promises = Promises()
    promises.add([A, B])
    promises.add([A, B])
    promises.remove([A, B])
    assert promises.longest([A, B, C], 0) == 2
    promises.remove([A, B])
    promises.remove([A, B])
    assert promises.longest([A, B, C], 0) == 0


@given(st.lists(st.lists(st.sampled_from([A, B, C]), max_size=4)))
def test_nothing_is_left_when_all_is_done(prompts):
    promises = Promises()
    for prompt in prompts:
        promises.add(prompt)
    for prompt in prompts:
        promises.remove(prompt)
    assert not len(promises)
