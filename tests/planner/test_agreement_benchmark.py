"""Plans and simulations of the same requests, as the commands make them without flags."""

import pytest

from benchmarks.planner.agreement import CONFIG, ScaledTrace, row_of, text_of
from planner.model.site import load_site
from tests.planner.traces import MOONCAKE


@pytest.fixture(scope="module")
def row():
    return row_of(load_site(CONFIG), ScaledTrace(MOONCAKE, 400, 1), 0.5, 0)


def test_a_plan_says_what_its_simulation_finds(row):
    """Of the conversation trace, with prompts on decode nodes and some that go where their prefix is."""
    assert all(row["agrees"].values()), row
    assert row["on decode nodes"][0] == pytest.approx(row["on decode nodes"][1], abs=0.05)
    assert row["load"] == pytest.approx(0.5, abs=0.03)


def test_what_does_not_agree_is_marked(row):
    other = row | {"agrees": row["agrees"] | {"egress": False}}
    assert "(!)" not in text_of([row])
    assert text_of([other]).count("(!)") == 1
