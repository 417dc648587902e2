"""How many nodes scalers are told that a site should have."""

from math import ceil
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.decisions.plans.offered import NodeReport
from planner.decisions.views import ClusterKind, Role
from planner.solve.control.wishes import LoadAims, site_wishes

AIMS = LoadAims(prefill=2.0, decode=0.5)


def node(number: int, role: Role, *, cluster: str = "home", **fields: Any) -> NodeReport:
    fields = {"state": "ready", "slots": 10, "kind": ClusterKind.PD, **fields}
    return NodeReport(node_id=f"{cluster}-{role}{number}", agent="", cluster=cluster, role=role, **fields)


def test_each_site_and_role_is_told_with_its_reason() -> None:
    nodes = [
        node(0, Role.PREFILL, running=1, waiting=4),
        node(0, Role.DECODE, running=8),
        node(1, Role.DECODE, running=4),
        node(2, Role.DECODE, running=10, state="draining"),
        node(0, Role.PREFILL, cluster="away", kind=ClusterKind.PRFAAS),
    ]
    found = site_wishes(nodes, AIMS)
    assert list(found) == ["away", "home"]
    prefill, decode, away = found["home"].prefill, found["home"].decode, found["away"]
    assert prefill is not None
    assert decode is not None
    assert (prefill.nodes, prefill.load, prefill.wished) == (1, 5.0, 3)
    assert (decode.nodes, decode.wished) == (2, 3)
    assert decode.load == pytest.approx(0.6)
    assert decode.reason == "mean load 0.6 on 2 nodes, 0.5 is aimed at"
    assert (away.kind, away.decode) == (ClusterKind.PRFAAS, None)
    assert away.prefill is not None
    assert away.prefill.wished == 1  # never the last one away


def test_a_site_without_a_node_that_works_is_left_out() -> None:
    assert site_wishes([node(0, Role.DECODE, state="starting")], AIMS) == {}


@given(st.lists(st.integers(0, 50), min_size=1, max_size=8), st.integers(1, 8))
def test_the_same_requests_on_more_nodes_wish_for_as_many(running: list[int], more: int) -> None:
    """A scaler that does as it is told comes to rest."""
    before = site_wishes([node(n, Role.PREFILL, running=each) for n, each in enumerate(running)], AIMS)["home"].prefill
    spread = [*running, *[0] * more]
    after = site_wishes([node(n, Role.PREFILL, running=each) for n, each in enumerate(spread)], AIMS)["home"].prefill
    assert before is not None
    assert after is not None
    assert before.wished == after.wished == max(1, ceil(sum(running) / 2))


@pytest.mark.parametrize("fields", [{"prefill": 0.0}, {"prefill": 5e-324}, {"decode": 9e-4}, {"decode": float("inf")}])
def test_aims_that_cannot_be_are_refused(fields: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"^scale: {next(iter(fields))}=.*: must be at least 0.001 and finite"):
        LoadAims(**fields)
