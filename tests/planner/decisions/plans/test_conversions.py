import pytest

from planner.decisions.plans.conversions import NodeStanding, why_not
from planner.decisions.views import ClusterKind, Role

P, D = Role.PREFILL, Role.DECODE


def standing(name: str, role: Role, cluster: str = "west", *, is_ready: bool = True) -> NodeStanding:
    kind = ClusterKind.PRFAAS if cluster == "east" else ClusterKind.PD
    return NodeStanding(node_id=name, cluster=cluster, kind=kind, role=role, is_ready=is_ready)


SITE = [standing("p0", P), standing("p1", P), standing("d0", D), standing("d1", D), standing("far", P, "east")]


@pytest.mark.parametrize(("node", "to"), [("p0", D), ("d1", P), ("p0", P), ("d0", D)])
def test_nothing_speaks_against_it(node: str, to: Role) -> None:
    assert why_not(node, to, SITE) == ""


@pytest.mark.parametrize(
    ("node", "to", "others", "reason"),
    [
        ("d0", P, [], "d0 is the last decode node of west that is ready"),
        ("d0", P, [standing("d1", D, is_ready=False)], "d0 is the last decode node of west that is ready"),
        ("d0", P, [standing("d1", D, "south")], "d0 is the last decode node of west that is ready"),
        ("p0", D, [standing("far", P, "east")], "p0 is the last prefill node of west that is ready"),
        ("far", D, [standing("far", P, "east")], "far belongs to the PrfaaS cluster east: it only prefills"),
        ("d9", P, [], "d9: there is no such node; known are d0, p0"),
        (
            "d1",
            P,
            [standing("d1", D, is_ready=False)],
            "d1 is not ready: it is down, drains, or changes its role already",
        ),
    ],
)
def test_what_speaks_against_it(node: str, to: Role, others: list[NodeStanding], reason: str) -> None:
    assert why_not(node, to, [standing("p0", P), standing("d0", D), *others]) == reason
