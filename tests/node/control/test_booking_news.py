"""Watchers hear of many bookings at once, and are not flooded."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from node.control.booking_news import APART_S, MANY, BookingNews


def test_a_few_bookings_wait_for_the_next_report() -> None:
    news = BookingNews()
    assert [news.booked(1.0) for _ in range(MANY - 1)] == [None] * (MANY - 1)
    assert news.booked(1.0) == 0.0
    assert news.booked(1.0) is None  # of the report that is under way
    news.told(1.0)
    later = [news.booked(1.0 + APART_S / 4) for _ in range(MANY)]
    assert later[:-1] == [None] * (MANY - 1)
    assert later[-1] is not None
    assert abs(later[-1] - APART_S * 3 / 4) < 1e-9


@given(st.lists(st.floats(0.0, 0.1), max_size=200))
def test_reports_are_apart_and_nobody_waits_long(pauses: list[float]) -> None:
    news, now = BookingNews(), 10.0
    due_at: float | None = None
    told: list[float] = []
    untold = 0
    for pause in pauses:
        now += pause
        if due_at is not None and due_at <= now:
            news.told(due_at)
            told.append(due_at)
            due_at, untold = None, 0
        untold += 1
        if (wait_s := news.booked(now)) is not None:
            assert due_at is None
            assert 0.0 <= wait_s <= APART_S + 1e-9
            due_at = now + wait_s
        assert due_at is not None or untold < MANY
    assert all(later - earlier >= APART_S - 1e-9 for earlier, later in pairwise(told))
