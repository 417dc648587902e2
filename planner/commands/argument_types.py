"""What arguments of the command line may be."""

import argparse
from typing import Final

from planner.model.reading import LEAST

LARGEST: Final = 1e9  # of gigabytes, seconds, factors: whatever is measured
MOST: Final = 10_000_000  # of whatever is counted: more requests than that do not fit into memory


def above_zero(text: str) -> float:
    """A number above 0."""
    value = _number(text)
    if not LEAST <= value <= LARGEST:
        raise argparse.ArgumentTypeError(f"{text}: must be above 0, and at most {LARGEST:g}")
    return value


def not_negative(text: str) -> float:
    """A number that is at least 0."""
    value = _number(text)
    if not 0 <= value <= LARGEST:
        raise argparse.ArgumentTypeError(f"{text}: must be at least 0, and at most {LARGEST:g}")
    return value


def whole(text: str) -> int:
    """A whole number of at least 0."""
    value = _whole_number(text)
    if not 0 <= value <= MOST:
        raise argparse.ArgumentTypeError(f"{text}: must be 0 to {MOST}")
    return value


def at_least_one(text: str) -> int:
    """A count."""
    value = _whole_number(text)
    if not 1 <= value <= MOST:
        raise argparse.ArgumentTypeError(f"{text}: must be 1 to {MOST}")
    return value


def share(text: str) -> float:
    """A part of something, above 0."""
    value = _number(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text}: must be in (0, 1]")
    return value


# argparse answers a ValueError with the name of the function, which means nothing to a user.
def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a number") from None


def _whole_number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a whole number") from None
