"""Lines of those who wait, against a plain list."""

from hypothesis import given
from hypothesis import strategies as st

from engine.runtime.lines import Lines

steps = st.lists(
    st.tuples(st.sampled_from(["add", "take", "keep"]), st.sampled_from("abc"), st.integers(0, 5)), max_size=60
)


@given(steps)
def test_each_flow_stands_in_the_order_of_arrival(steps):
    lines, model = Lines(), []
    for number, (what, flow, at) in enumerate(steps):
        own = [who for who in model if who[0] == flow]
        if what == "add":
            model.append((flow, number))
            lines.add(flow, (flow, number))
        elif what == "take" and own:
            chosen = own[at % len(own)]
            model.remove(chosen)
            lines.take(flow, chosen)
        elif what == "keep":
            model = [who for who in model if who[1] % 6 != at]
            lines.keep(lambda who, at=at: who[1] % 6 != at)
        assert sorted(lines) == sorted(model)
        assert len(lines) == len(model)
        assert bool(lines) == bool(model)
        assert set(lines.flows) == {who[0] for who in model}
        for each in "abc":
            assert list(lines.ahead(each, 3)) == [who for who in model if who[0] == each][:3]


def test_flows_stand_in_the_order_in_which_they_began_to_wait():
    lines = Lines()
    for flow in "bab":
        lines.add(flow, flow)
    lines.take("b", "b")
    assert list(lines.flows) == ["b", "a"]
    lines.take("b", "b")
    lines.add("b", "b")
    assert list(lines.flows) == ["a", "b"]
    lines.clear()
    assert not lines
