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


STILL = 500  # bytes delivered, again and again


def listen(reach: Reach, *delivered_bytes: int, owed: bool = True, since: float = 10.0, every_s: float = 0.25) -> None:
    for number, count in enumerate(delivered_bytes):
        reach.on_sample(since + number * every_s, count, owed=owed)


def test_silence_counts_while_something_is_owed_and_nothing_gets_through() -> None:
    reach = Reach(now=0.0)
    listen(reach, *[STILL] * 9)
    assert reach.silent_s == 2.0


def test_bytes_that_get_through_are_no_silence_though_nobody_answers_yet() -> None:
    reach = Reach(now=0.0)
    listen(reach, STILL, STILL, STILL + 1)
    assert reach.silent_s == 0.0


def test_an_answer_ends_silence() -> None:
    reach = Reach(now=0.0)
    listen(reach, STILL, STILL)
    reach.on_progress()
    listen(reach, STILL, since=11.0)
    assert reach.silent_s == 0.0


def test_who_is_owed_nothing_may_hear_nothing() -> None:
    reach = Reach(now=0.0)
    listen(reach, *[STILL] * 9, owed=False)
    assert reach.silent_s == 0.0


def test_a_connection_that_goes_delivers_nothing() -> None:
    reach = Reach(now=0.0)
    listen(reach, 900, 400, 400)
    assert reach.silent_s == 0.5


def test_who_stood_still_has_not_listened() -> None:
    reach = Reach(now=0.0)
    listen(reach, STILL, STILL, every_s=3600.0)
    assert reach.silent_s == 0.5
