"""Fallbacks of picked requests, by reason."""

from node.control.picked_counts import MAX_REASONS, OTHER, PickedCounts


def test_peers_cannot_make_reasons_without_end() -> None:
    counts = PickedCounts()
    for number in range(MAX_REASONS + 10):
        counts.fell_back(f"reason{number}")
    counts.fell_back("reason0")
    assert len(counts.fallbacks) == MAX_REASONS + 1
    assert (counts.fallbacks[OTHER], counts.fallbacks["reason0"]) == (10, 2)
    assert counts.requests["fell_back"] == MAX_REASONS + 11


def test_engines_cannot_make_outcomes_of_legs_without_end() -> None:
    counts = PickedCounts()
    for number in range(MAX_REASONS + 10):
        counts.leg_ended(f"outcome{number}")
    assert len(counts.legs) == MAX_REASONS + 1
    assert counts.legs[OTHER] == 10
