"""What a run under churn is judged by."""

from tests.fleet.judgement import NodeSeen, asked_too_little, differences, grown, outcome_of, over_limit

LIVING = {"a": "10.0.0.1:7001", "b": "10.0.0.2:7001"}


def seen(**states: str) -> dict[str, NodeSeen]:
    agents = {**LIVING, "c": "10.0.0.3:7001"}
    return {name: NodeSeen(agents[name], state) for name, state in states.items()}


def test_a_view_is_right_if_it_has_what_lives_and_calls_nothing_else_ready() -> None:
    assert differences(LIVING, seen(a="ready", b="ready")) == []
    assert differences(LIVING, seen(a="ready", b="ready", c="unreachable")) == []


def test_what_a_view_has_wrong_is_named() -> None:
    assert differences(LIVING, seen(a="ready")) == ["b is missing"]
    assert differences(LIVING, seen(a="starting", b="ready")) == ["a is starting"]
    assert differences(LIVING, seen(a="ready", b="ready", c="ready")) == ["c is ready, and not there"]
    moved = {**seen(a="ready", b="ready"), "b": NodeSeen("10.0.0.9:7001", "ready")}
    assert differences(LIVING, moved) == ["b is at 10.0.0.9:7001, not 10.0.0.2:7001"]


def test_a_limit_may_be_exceeded_by_two_percent_and_a_request_at_each_gateway() -> None:
    assert over_limit(2400 + 48 + 3, 600.0, per_minute=240, gateways=3) == ""
    assert over_limit(2400 + 48 + 4, 600.0, per_minute=240, gateways=3)


def test_a_limit_is_tried_by_asking_for_more() -> None:
    assert asked_too_little(2500, 600.0, per_minute=240) == ""
    assert asked_too_little(2300, 600.0, per_minute=240)


def test_a_refusal_loses_nothing_and_everything_else_does() -> None:
    assert [outcome_of(status, False) for status in (429, 503, 500, 502, 0)] == ["refused"] * 2 + ["lost"] * 3
    assert outcome_of(200, True) == "lost"


def test_only_processes_of_before_can_have_grown() -> None:
    assert grown({1: 50}, {1: 60, 2: 900}, 10, "descriptors") == []
    assert grown({1: 50}, {1: 61}, 10, "descriptors") == ["process 1 has 61 descriptors, and had 50"]
