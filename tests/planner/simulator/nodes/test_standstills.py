"""What requests see of the times in which their batch stands still."""

import pytest

from planner.simulator.nodes.standstills import LEAST_KEPT, Standstills


def test_a_request_sees_what_is_left_of_a_standstill_and_the_longest_first():
    stands = Standstills()
    for from_s, until_s in ((0.0, 4.0), (10.0, 11.0), (20.0, 22.0)):
        stands.begin(from_s)
        stands.end(until_s, [0.0, 3.0, 12.0])
    assert stands.longest_s(0.0, 1.0) == 4.0
    assert stands.longest_s(3.0, 5.0) == 1.0 + 1.0 + 2.0
    assert stands.longest_s(3.0, 1.5) == pytest.approx(2.0 + 0.5)
    assert stands.longest_s(12.0, 9.0) == 2.0
    assert stands.longest_s(23.0, 9.0) == 0.0


def test_what_no_request_has_seen_is_forgotten():
    stands = Standstills()
    for at in range(3 * LEAST_KEPT):
        stands.begin(float(at))
        stands.end(at + 0.5, [at - 2.0])
    assert len(stands) <= LEAST_KEPT + 4
    stands.end(1e9, [])
    assert stands.longest_s(0.0, 5.0) == 0.0
