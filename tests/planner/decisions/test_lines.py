import pytest

from planner.decisions.lines import shared_line
from tests.planner.worlds import GB, link


def test_an_idle_line_is_counted_once():
    assert shared_line([link(available_bytes_per_s=GB)] * 3).available_bytes_per_s == GB


def test_a_line_has_at_least_what_its_senders_carry():
    parts = [link(available_bytes_per_s=GB / 4, utilisation=1.0) for _ in range(4)]
    assert shared_line(parts).available_bytes_per_s == GB


def test_what_waits_adds_up_and_the_longest_queue_is_right():
    seen = shared_line(
        [
            link(queued_bytes=GB, promised_bytes=GB, rtt_s=0.04, min_rtt_s=0.04),
            link(queued_bytes=GB, congested=True, rtt_s=0.2, min_rtt_s=0.04),
        ]
    )
    assert (seen.queued_bytes, seen.promised_bytes) == (2 * GB, GB)
    assert (seen.congested, seen.rtt_inflation) == (True, pytest.approx(5.0))


def test_budgets_are_each_senders_own():
    assert shared_line([link(budget_bytes_per_s=GB), link(budget_bytes_per_s=GB)]).budget_bytes_per_s == 2 * GB
    assert shared_line([link(budget_bytes_per_s=GB), link()]).budget_bytes_per_s is None
