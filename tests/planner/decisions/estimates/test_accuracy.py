"""Relative errors of the latest predictions."""

import pytest

from planner.decisions.estimates.accuracy import ERRORS_KEPT, Accuracy, Error


def test_nothing_seen_is_no_error():
    assert Accuracy().error == Error(0.0, 0.0, 0)


def test_errors_are_relative_to_what_was_seen():
    accuracy = Accuracy()
    for predicted in (8.0, 10.0, 15.0):
        accuracy.note(predicted, 10.0)
    assert accuracy.error == Error(pytest.approx(0.7 / 3), pytest.approx(0.2), 3)


def test_what_was_not_measured_is_no_sample():
    accuracy = Accuracy()
    accuracy.note(1.0, 0.0)
    assert accuracy.error.samples == 0


def test_only_the_latest_count():
    accuracy = Accuracy()
    for _ in range(ERRORS_KEPT):
        accuracy.note(20.0, 10.0)
    for _ in range(ERRORS_KEPT):
        accuracy.note(10.0, 10.0)
    assert accuracy.error == Error(0.0, 0.0, ERRORS_KEPT)
