import numpy as np
import pytest

from planner.simulator.sharing import FairShare


def drain(share: FairShare, now: float) -> list[tuple[float, str]]:
    ends = []
    while (end := share.next_end(now)) is not None:
        now = end
        ends += [(now, item) for item in share.pop_ended(now)]
    return ends


def test_flows_share_equally():
    share = FairShare(lambda flows: 10 / flows)
    share.add(0.0, 100, "a")
    share.add(4.0, 30, "b")  # a has 60 left, both run at 5
    assert drain(share, 4.0) == [(10.0, "b"), (13.0, "a")]


def test_equal_marks_end_together():
    share = FairShare(lambda flows: 10 / flows)
    for item in "abc":
        share.add(0.0, 10, item)
    assert drain(share, 0.0) == [(3.0, "a"), (3.0, "b"), (3.0, "c")]


def test_a_change_of_speed_counts_from_then_on():
    share = FairShare(lambda flows: 10 / flows)
    share.add(0.0, 100, "a")
    share.change_speed(5.0, lambda flows: 1 / flows)
    assert share.next_end(5.0) == 55.0
    share.change_speed(5.0, lambda flows: 0.0)
    assert share.next_end(9.0) == float("inf")


def test_what_is_left():
    share = FairShare(lambda flows: 10 / flows)
    share.add(0.0, 100, "a")
    share.add(0.0, 50, "b")
    assert share.remaining(2.0) == pytest.approx(130)


def test_flows_end_after_millions_of_others():
    """V is beyond 1e13 here: a tolerance on floats would spin for ever."""
    share = FairShare(lambda flows: 1e10 / flows)
    rng = np.random.default_rng(0)
    sizes = rng.lognormal(20, 1, 30_000).tolist()
    share.add(0.0, 1.1e13, "as many as a million others")
    now = share.next_end(0.0)
    assert len(share.pop_ended(now)) == 1
    ended = 0
    for index, size in enumerate(sizes):
        share.add(now, size, index)
        if len(share) > 3:
            now = max(now, share.next_end(now))
            ended += len(share.pop_ended(now))
    ended += len(drain(share, now))
    assert ended == len(sizes)
