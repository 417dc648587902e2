"""What failures, answers and probes say of lines and pairs; with real nodes in tests/gateway/cluster/test_links.py."""

from hypothesis import given
from hypothesis import strategies as st

from planner.decisions.links.breaker import BreakerState
from planner.decisions.links.paths import Paths

SENDERS = ("r0", "r1")
RECEIVERS = ("d0", "d1")


def test_a_failure_closes_the_line_to_all_its_senders_and_is_news_once():
    paths = Paths()
    assert paths.failed("r0", ["r1"], "d0", "west", 0.0)
    assert not paths.failed("r1", ["r0"], "d0", "west", 0.1)
    assert [paths.is_up(sender, "d1", "west") for sender in SENDERS] == [False, False]
    assert paths.is_up("r0", "s0", "south")
    assert paths.num_failed == 2


def test_another_receivers_answer_leaves_the_pair_out_alone():
    paths = Paths()
    paths.failed("r0", ["r1"], "d0", "west", 0.0)
    assert paths.in_order("r0", "west", RECEIVERS) == ["d1", "d0"]
    answered = paths.arrived("r0", "d1", "west", 1.0)
    assert (answered.is_back, answered.left_out) == (True, ("d0",))
    assert paths.lost_pairs() == [("r0", "d0")]
    assert paths.cut_off_from("d0") == {"r0"}
    assert not paths.is_up("r1", "d1", "west")  # each comes back by itself
    assert paths.pairs_to_probe(2.0) == [("r0", "d0")]
    assert paths.arrived("r0", "d0", "west", 2.1).left_out == ()
    assert paths.lost_pairs() == []


Step = tuple[str, str, str, float]
steps = st.lists(
    st.tuples(
        st.sampled_from(["failed", "still_down", "arrived", "probe"]), st.sampled_from(SENDERS),
        st.sampled_from(RECEIVERS), st.floats(0.0, 40.0),
    ), max_size=40,
)  # fmt: skip


@given(steps)
def test_whatever_happened_an_answer_puts_a_way_back_and_nothing_is_left_for_who_is_gone(taken: list[Step]) -> None:
    paths, now = Paths(), 0.0
    for what, sender, receiver, wait_s in taken:
        now += wait_s
        if what == "failed":
            paths.failed(sender, [each for each in SENDERS if each != sender], receiver, "west", now)
        elif what == "still_down":
            paths.still_down(sender, receiver, "west", now)
        elif what == "arrived":
            paths.arrived(sender, receiver, "west", now)
            assert paths.is_up(sender, receiver, "west")
            assert paths.state(sender, "west") is BreakerState.CLOSED
        else:
            paths.lines_to_probe(now)
            paths.pairs_to_probe(now)
    for sender in SENDERS:
        for receiver in RECEIVERS:
            paths.arrived(sender, receiver, "west", now)
    for sender in SENDERS:
        paths.arrived(sender, "d0", "west", now)
    assert all(paths.is_up(sender, "d0", "west") for sender in SENDERS)
    paths.failed("r0", ["r1"], "d0", "west", now)
    paths.forget((), ())
    assert (paths.num_failed, paths.not_up(), paths.lost_pairs()) == (0, [], [])
