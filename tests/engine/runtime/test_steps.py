"""What nodes report of their decode steps."""

import pytest

from engine.runtime.steps import LARGEST, StepTimes


def test_steps_are_kept_by_octave_and_recent_ones_count_for_more():
    times = StepTimes()
    assert times.report() == ()
    times.note(1, 0.01)
    times.note(2, 0.02)
    times.note(3, 0.04)
    assert times.report() == ((1.0, pytest.approx(0.01)), (2.5, pytest.approx(0.03)))
    for _ in range(500):
        times.note(1, 0.05)
    assert times.report()[0] == (1.0, pytest.approx(0.05))


def test_what_is_kept_is_bounded_and_nonsense_is_not():
    times = StepTimes()
    for batch in range(1, 10_000):
        times.note(batch, 1e-3 * batch)
    times.note(0, 1.0)
    times.note(1, 0.0)
    report = times.report()
    assert len(report) == LARGEST
    assert list(report) == sorted(report)
    assert report[0] == (1.0, pytest.approx(1e-3))
