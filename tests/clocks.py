"""Clocks as machines have them: up for a second or for thirty years, asked every millisecond or not for years."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Final

from hypothesis import strategies as st

YEAR_S: Final = 365 * 86_400.0
STARTS: Final = st.one_of(st.sampled_from([0.0, 1e-3, 42 * 86_400.0, 43 * 86_400.0, 1e9]), st.floats(0.0, 1e9))
PAUSES: Final = st.one_of(
    st.just(0.0), st.floats(1e-6, 1.0), st.floats(1.0, 3600.0), st.floats(0.1, 3.0).map(lambda years: years * YEAR_S)
)


LEAPS: Final = st.one_of(PAUSES, PAUSES.map(lambda pause_s: -pause_s))


def leaping_times(min_size: int = 1, max_size: int = 24) -> st.SearchStrategy[Sequence[float]]:
    """Readings of a clock that is set forwards and backwards, down to 0."""

    def readings(start: float, leaps: list[float]) -> list[float]:
        return list(accumulate(leaps, lambda now, leap_s: max(0.0, now + leap_s), initial=start))

    return st.builds(readings, STARTS, st.lists(LEAPS, min_size=min_size - 1, max_size=max_size - 1))


def times(min_size: int = 1, max_size: int = 24) -> st.SearchStrategy[Sequence[float]]:
    """Readings of one clock, which never goes back."""

    def readings(start: float, pauses: list[float]) -> list[float]:
        return list(accumulate(pauses, initial=start))

    return st.builds(readings, STARTS, st.lists(PAUSES, min_size=min_size - 1, max_size=max_size - 1))
