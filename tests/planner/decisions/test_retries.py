"""What follows a failure: the whole table."""

import pytest

from planner.decisions.retries import RULES, Failure, Next, Stage, failure_of, rule_after, tries_of


def test_every_failure_that_a_stage_can_have_has_a_rule() -> None:
    never = {(Stage.RESERVE, Failure.LOST), (Stage.RESERVE, Failure.DIED)}  # gRPC says unreachable
    assert set(RULES) == {(stage, failure) for stage in Stage for failure in Failure} - never


@pytest.mark.parametrize(("stage", "failure"), RULES)
def test_nothing_is_tried_for_ever(stage: Stage, failure: Failure) -> None:
    assert rule_after(stage, failure, tries=3, max_tries=3, deaths=0).next is not Next.ELSEWHERE
    assert rule_after(stage, failure, tries=1, max_tries=3, deaths=2).next is Next.REFUSE


@pytest.mark.parametrize("stage", Stage)
def test_what_every_node_would_say_is_asked_of_no_other(stage: Stage) -> None:
    assert failure_of("digest_mismatch") is Failure.REQUEST
    assert rule_after(stage, Failure.REQUEST, tries=1, max_tries=3, deaths=0).next is not Next.ELSEWHERE


def test_who_is_away_has_tried_nothing() -> None:
    for reason in ("converting", "wrong_role", "draining"):
        assert failure_of(reason) is Failure.AWAY
    assert tries_of([Failure.AWAY, Failure.TROUBLE, Failure.AWAY]) == 1
    assert not any(rule.suspect for (_, failure), rule in RULES.items() if failure is Failure.AWAY)
