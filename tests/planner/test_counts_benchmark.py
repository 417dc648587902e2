"""The work of a simulation stays what it was: counted, as seconds of a busy machine say nothing."""

from benchmarks.planner.counts import BARS, above, cached, counts_of, uncached


def test_a_simulation_takes_no_more_work_than_its_bars():
    found = {"uncached": counts_of(*uncached(1_000)), "cached": counts_of(*cached(1_000))}
    assert not above(found), found


def test_work_above_a_bar_is_named():
    assert above(BARS) == []
    more = {run: {name: bar + 1 for name, bar in bars.items()} for run, bars in BARS.items()}
    assert above(more) == [f"{run} {name}" for run, bars in BARS.items() for name in bars]
