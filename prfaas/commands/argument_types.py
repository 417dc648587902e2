"""What arguments of the command line may be."""

import argparse
from collections.abc import Callable
from datetime import date


def header(text: str) -> tuple[str, str]:
    """NAME:VALUE."""
    name, colon, value = text.partition(":")
    if not colon or not name.strip():
        raise argparse.ArgumentTypeError(f"{text!r}: must be NAME:VALUE")
    return name.strip(), value.strip()


def within(low: int, high: int) -> Callable[[str], int]:
    """Integers from `low` to `high`."""

    def number(text: str) -> int:
        if not text.isdecimal() or not low <= int(text) <= high:
            raise argparse.ArgumentTypeError(f"{text!r}: must be an integer from {low} to {high}")
        return int(text)

    return number


def seconds(text: str) -> float:
    """Above 0, up to a day."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 < value <= 86400.0:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a number of seconds above 0, up to a day")
    return value


def day(text: str) -> date:
    """YYYY-MM-DD."""
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a day, as 2027-01-31") from None


def day_after(today: date) -> Callable[[str], date]:
    """YYYY-MM-DD, later than `today`."""

    def later(text: str) -> date:
        named = day(text)
        if named <= today:
            raise argparse.ArgumentTypeError(f"{text!r}: must be a day after today, {today} (UTC)")
        return named

    return later


def link(text: str) -> tuple[str, str]:
    """Two clusters."""
    source, colon, destination = text.partition(":")
    if not (colon and source and destination):
        raise argparse.ArgumentTypeError(f"{text!r}: must be FROM:TO, such as east:west")
    return source, destination


def label(text: str) -> tuple[str, str]:
    """KEY=VALUE."""
    key, equals, value = text.partition("=")
    if not (key and equals):
        raise argparse.ArgumentTypeError(f"{text!r}: must be KEY=VALUE")
    return key, value
