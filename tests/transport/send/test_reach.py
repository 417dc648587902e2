"""How long there has been no connection that was worth the name."""

from transport.send.reach import Reach

PATIENCE_S = 5.0


def test_out_of_reach_counts_from_the_first_work() -> None:
    reach = Reach(now=0.0)
    reach.on_work(100.0, connected=False)
    assert reach.lost_for_s(103.0) == 3.0


def test_a_connection_that_carried_something_renews_the_patience() -> None:
    reach = Reach(now=0.0)
    reach.on_all_lost(10.0, PATIENCE_S)
    reach.on_first_up(11.0)
    reach.on_progress()
    reach.on_all_lost(12.0, PATIENCE_S)
    assert reach.lost_for_s(13.0) == 1.0


def test_one_that_broke_before_anything_had_arrived_was_no_more_than_an_attempt() -> None:
    reach = Reach(now=0.0)
    reach.on_all_lost(10.0, PATIENCE_S)
    reach.on_first_up(11.0)
    reach.on_all_lost(12.0, PATIENCE_S)
    assert reach.lost_for_s(13.0) == 3.0


def test_one_that_lasted_counts_though_nothing_was_to_be_sent() -> None:
    reach = Reach(now=0.0)
    reach.on_all_lost(10.0, PATIENCE_S)
    reach.on_first_up(11.0)
    reach.on_all_lost(11.0 + PATIENCE_S + 0.1, PATIENCE_S)
    assert reach.lost_for_s(16.1) == 0.0
