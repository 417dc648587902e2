from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from membership.lines import HOURS_PER_MONTH, Line, LineLevel, by_ends, check_lines, read_lines, uses
from transport.control.settings import SettingsError

GBPS = 1e9 / 8


def line(name: str = "", capacity_gbps: float = 10.0, **said: object) -> Line:
    return Line(source="east", destination="west", name=name, capacity_gbps=capacity_gbps, **said)  # type: ignore[arg-type]


def test_lines_between_the_same_ends_are_one_to_a_plan():
    both = by_ends([
        line("a", 30, price_per_gb=0.02, rtt_ms=20, quantiles_gbps=(15.0,), shared_gbps=5, shared_by=("backups",)),
        line("b", 10, price_per_gb=0.06, price_per_hour_per_gbps=4, budget_per_month=100),
    ])["east", "west"]  # fmt: skip
    assert (both.label, both.capacity_gbps, both.rtt_ms) == ("a + b", 40, 20)
    assert both.bytes_per_s == 35 * GBPS
    assert both.price_per_gb == pytest.approx(0.03)
    assert both.rent_per_hour == pytest.approx(40)
    assert both.quantiles_gbps == (25.0,)
    assert both.budget_per_month == 0  # one of them has none
    assert both.shared_by == ("backups",)


def test_one_line_stays_as_it_is():
    only = line()
    assert by_ends([only]) == {("east", "west"): only}
    assert only.label == "east:west"


def test_what_goes_between_two_clusters_takes_lines_by_what_they_carry():
    (a, b) = uses([line("a", 30), line("b", 10)], {("east", "west"): 20 * GBPS})["east", "west"]
    assert (a.share, b.share) == (0.75, 0.25)
    assert (a.carried_bytes_per_s, b.carried_bytes_per_s) == (15 * GBPS, 5 * GBPS)
    assert a.used_ratio == b.used_ratio == 0.5


@pytest.mark.parametrize(
    ("carried_gbps", "level"),
    [(6.0, LineLevel.OK), (6.5, LineLevel.WARN), (8.0, LineLevel.CRITICAL), (0.0, LineLevel.OK)],
)
def test_a_full_line_says_so(carried_gbps: float, level: LineLevel):
    (use,) = uses([line()], {("east", "west"): carried_gbps * GBPS})["east", "west"]
    assert use.level is level


def test_a_dear_line_says_so_though_it_is_empty():
    rented = line(price_per_hour_per_gbps=1.0, price_per_gb=0.01, budget_per_month=10 * HOURS_PER_MONTH / 0.7)
    (use,) = uses([rented], {})["east", "west"]
    assert use.spend_per_month == use.rent_per_month == pytest.approx(10 * HOURS_PER_MONTH)
    assert use.level is LineLevel.WARN
    (use,) = uses([rented], {("east", "west"): 5 * GBPS})["east", "west"]
    assert use.spend_per_hour == pytest.approx(10 + 0.01 * 5 / 8 * 3600)
    assert use.level is LineLevel.CRITICAL


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"shared_gbps": 11}, "shared_gbps = 11: must be at most 10"),
        ({"shared_by": ("backups",)}, "shared_by"),
        ({"warn_ratio": 0.9}, "critical_ratio = 0.8: must be a number from warn_ratio to 1"),
        ({"price_per_gb": -1}, "price_per_gb = -1"),
        ({"capacity_gbps": float("nan")}, "capacity_gbps"),
        ({"destination": "east"}, "another cluster than the source"),
    ],
)
def test_a_line_that_cannot_be_is_refused(said: dict[str, object], message: str):
    with pytest.raises(SettingsError, match=message.replace("(", r"\(")):
        Line(**{"source": "east", "destination": "west", "capacity_gbps": 10, **said})  # type: ignore[arg-type]


def test_two_lines_need_two_names(tmp_path: Path):
    check_lines([line("a"), line("b"), line()], "lines")
    with pytest.raises(SettingsError, match="called 'east:west'; give each line a name"):
        check_lines([line(), line()], "lines")
    file = tmp_path / "lines.toml"
    file.write_text(2 * '[[lines]]\nsource = "east"\ndestination = "west"\ncapacity_gbps = 10\n')
    with pytest.raises(SettingsError, match=r"lines\.toml: lines: there are two"):
        read_lines(file)


@given(
    st.lists(st.tuples(st.floats(0.001, 400), st.sampled_from([0, 0.25, 1])), min_size=1, max_size=4),
    st.floats(0, 1e11),
)
def test_shares_add_up(capacities: list[tuple[float, float]], carried: float):
    lines = [line(str(at), gbps, shared_gbps=gbps * part) for at, (gbps, part) in enumerate(capacities)]
    found = uses(lines, {("east", "west"): carried})
    if sum(each.bytes_per_s for each in lines):
        assert sum(each.carried_bytes_per_s for each in found["east", "west"]) == pytest.approx(carried)
