"""Which stage of an engine hangs, told by what all of them have computed."""

from engine.staged.staged import LOOK_S, STALL_S, Stalls


def looks(stalls, begin_s, seconds, **seen):
    """What a look of that length finds, as often as an engine looks."""
    found = [stalls.look(**seen, now=begin_s + number * LOOK_S) for number in range(int(seconds / LOOK_S) + 1)]
    return found[-1]


def test_a_stage_that_has_something_to_do_and_computes_nothing_hangs():
    stalls = Stalls(2)
    assert looks(stalls, 0.0, STALL_S, given=1, done=[0, 0], beats=[0, 0]) is None
    # Slow, and the second one has nothing yet.
    assert looks(stalls, STALL_S, STALL_S, given=1, done=[0, 0], beats=[1, 0]) is None
    assert looks(stalls, 2 * STALL_S, STALL_S, given=1, done=[1, 0], beats=[1, 0]) is None
    assert stalls.look(given=1, done=[1, 0], beats=[1, 0], now=3 * STALL_S + 1) == 1


def test_of_stages_that_wait_for_each_other_the_last_one_hangs():
    stalls, seen = Stalls(3), {"given": 4, "done": [2, 1, 1], "beats": [9, 5, 4]}  # the first two cannot pass on
    assert looks(stalls, 0.0, STALL_S, **seen) is None
    assert stalls.look(**seen, now=STALL_S + LOOK_S) == 1


def test_a_stage_that_decodes_many_sequences_for_long_does_not_hang():
    stalls = Stalls(1)
    for number in range(64):
        seen = {"given": 64, "done": [number], "beats": [7]}
        assert looks(stalls, STALL_S / 4 * number, STALL_S / 4 - LOOK_S, **seen) is None
    assert looks(stalls, STALL_S * 16, STALL_S + LOOK_S, **seen) == 0


def test_stages_are_not_to_blame_for_time_in_which_the_engine_was_stopped():
    stalls, seen = Stalls(1), {"given": 1, "done": [0], "beats": [7]}
    assert stalls.look(**seen, now=1000.0) is None
    assert stalls.look(**seen, now=1000.0 + LOOK_S) is None
    assert stalls.look(**seen, now=2000.0) is None
    assert looks(stalls, 2000.0, STALL_S, **seen) == 0
