"""The load over a week: hour by hour from a trace that is long enough, or from a file."""

from pathlib import Path
from typing import Any, Final

import numpy as np

from planner.errors import InputError
from planner.model.profile import Floats
from planner.model.reading import RATE, Range, named, read_columns
from transport.control.settings import require

HOUR_S: Final = 3600.0
DAY_HOURS: Final = 24
WEEK_HOURS: Final = 7 * DAY_HOURS
MOST_PARTS: Final = 7 * 24 * 60  # of a week: minutes
LOAD: Final = Range(0, 1e9)
MEASURED_SHARE: Final = 0.95  # of the time: what lines are billed by is not exceeded in it


def week_of(arrival_s: Floats) -> tuple[float, ...]:
    """Requests/s in each hour of a trace: of its busiest week, or of all its days where it is no week long. Days are whole.

    Of a trace that is no day long nothing is known: ().
    """
    if len(arrival_s) < 2:
        return ()
    since_s = arrival_s - arrival_s[0]
    hours = int(since_s[-1] / HOUR_S + 1) // DAY_HOURS * DAY_HOURS
    if not hours:
        return ()
    counts = np.bincount((since_s / HOUR_S).astype(np.int64), minlength=hours)[:hours]
    if hours > WEEK_HOURS:
        sums = np.convolve(counts, np.ones(WEEK_HOURS), "valid")[::DAY_HOURS]
        first = int(np.argmax(sums)) * DAY_HOURS
        counts = counts[first : first + WEEK_HOURS]
    return tuple((counts / HOUR_S).tolist())


def read_week(path: Path) -> tuple[float, ...]:
    """The column `load` of a CSV file. Raises InputError naming the file, the row and its value."""
    with named(f"week {path}"):
        loads = tuple(load for (load,) in read_columns(path, {"load": LOAD}))
        check_week(loads)
        return loads


def check_week(loads: tuple[float, ...]) -> None:
    """Raises SettingsError for loads that a week cannot have."""
    for at, load in enumerate(loads):
        LOAD.of(f"week[{at}]", load)
    require(len(loads) <= MOST_PARTS, "week", f"{len(loads):,} loads", f"at most {MOST_PARTS:,}, the minutes of a week")
    require(not loads or max(loads) > 0, "week", list(loads), "loads, of which one is above 0")


def fitted_week(said: Any) -> tuple[float, ...]:
    """Requests/s of the hours, as a fitted workload has them. Raises SettingsError."""
    require(isinstance(said, list), "week_req_per_s", said, "numbers")
    loads = tuple(RATE.of(f"week_req_per_s[{at}]", value) for at, value in enumerate(said))
    check_week(loads)
    return loads


def mean_load(week: tuple[float, ...]) -> float:
    """The mean load of a week over that of its busiest part."""
    return float(np.mean(week)) / max(week) if week else 1.0


def load_not_exceeded(week: tuple[float, ...], share: float) -> float:
    """The load that is not exceeded for a share of a week, over that of its busiest part."""
    if not week:
        return 1.0
    ordered = sorted(week)
    return ordered[max(0, int(np.ceil(share * len(ordered))) - 1)] / ordered[-1]


def one_of(week: tuple[float, ...], path: Path | None) -> tuple[float, ...]:
    """The loads that a market says, in itself or in a file. Raises InputError where it says both."""
    if path is None:
        return week
    if week:
        raise InputError("[demand] week and week_file: give one of them")
    return read_week(path)
