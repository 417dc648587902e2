"""What follows a failure: the whole table."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.decisions.failures.retries import (
    REPEATING,
    RULES,
    FailedStage,
    FailureKind,
    Next,
    RetryBudget,
    RetryRule,
    adds_enough,
    failure_of,
    rule_after,
    tries_of,
)


def test_every_failure_that_a_stage_can_have_has_a_rule() -> None:
    never = {(FailedStage.RESERVE, FailureKind.LOST), (FailedStage.RESERVE, FailureKind.DIED)}  # gRPC says unreachable
    assert set(RULES) == {(stage, failure) for stage in FailedStage for failure in FailureKind} - never


@pytest.mark.parametrize(("stage", "failure"), RULES)
def test_nothing_is_tried_for_ever(stage: FailedStage, failure: FailureKind) -> None:
    assert rule_after(stage, failure, tries=3, max_tries=3, deaths=0).next is not Next.ELSEWHERE
    assert rule_after(stage, failure, tries=1, max_tries=3, deaths=2).next is Next.REFUSE


@pytest.mark.parametrize("stage", FailedStage)
def test_what_every_node_would_say_is_asked_of_no_other(stage: FailedStage) -> None:
    assert failure_of("digest_mismatch") is FailureKind.REQUEST
    assert rule_after(stage, FailureKind.REQUEST, tries=1, max_tries=3, deaths=0).next is not Next.ELSEWHERE


def test_who_is_away_has_tried_nothing() -> None:
    for reason in ("converting", "wrong_role", "draining"):
        assert failure_of(reason) is FailureKind.AWAY
    assert tries_of([FailureKind.AWAY, FailureKind.TROUBLE, FailureKind.AWAY]) == 1
    assert not any(rule.suspect for (_, failure), rule in RULES.items() if failure is FailureKind.AWAY)


def again(
    budget: RetryBudget, now: float, failure: FailureKind = FailureKind.TIMEOUT, stage: FailedStage = FailedStage.DECODE
) -> RetryRule:
    return budget.rule_after(now, stage, failure, tries=1, max_tries=3, deaths=0)


def test_a_few_are_always_tried_again_and_then_a_share() -> None:
    budget = RetryBudget(0.2, 3)
    found = [again(budget, 0.0) for _ in range(5)]
    assert [rule.next for rule in found] == [Next.ELSEWHERE] * 3 + [Next.REFUSE] * 2
    assert [rule.is_over_budget for rule in found] == [False] * 3 + [True] * 2
    for _ in range(10):
        budget.request(0.0)
    assert [again(budget, 0.0).is_over_budget for _ in range(3)] == [False, False, True]


def test_what_was_tried_is_forgotten() -> None:
    budget = RetryBudget(0.0, 1)
    assert not again(budget, 0.0).is_over_budget
    assert again(budget, 0.0).is_over_budget
    assert not again(budget, 100.0).is_over_budget


@pytest.mark.parametrize("stage", FailedStage)
@pytest.mark.parametrize("failure", FailureKind)
def test_only_what_repeats_work_and_has_shown_nothing_is_refused(stage: FailedStage, failure: FailureKind) -> None:
    if (stage, failure) not in RULES:
        return
    budget = RetryBudget(0.0, 0)
    is_bound = failure in REPEATING and stage is not FailedStage.STREAM
    rule = again(budget, 0.0, failure, stage)
    assert rule.is_over_budget == is_bound
    assert rule.next is (RULES[stage, failure].otherwise if is_bound else RULES[stage, failure].next)


def test_those_that_lost_their_nodes_leave_less_to_others() -> None:
    budget = RetryBudget(0.0, 3)
    for _ in range(3):
        again(budget, 0.0, FailureKind.DIED)
    assert again(budget, 0.0).is_over_budget
    assert not again(budget, 0.0, FailureKind.DIED).is_over_budget


@given(
    share=st.floats(0, 1),
    least=st.integers(0, 5),
    steps=st.lists(st.tuples(st.booleans(), st.floats(0, 30)), max_size=60),
)
def test_a_sick_system_is_asked_little_more_than_a_well_one(
    share: float, least: int, steps: list[tuple[bool, float]]
) -> None:
    budget, now, requests, tries = RetryBudget(share, least), 0.0, 0, 0
    for is_request, pause_s in steps:
        now += pause_s
        if is_request:
            budget.request(now)
            requests += 1
        else:
            tries += not again(budget, now).is_over_budget
    windows = 1 + now / 10.0
    assert tries <= share * requests + (least + 1) * windows


@pytest.mark.parametrize("failure", sorted(REPEATING))
def test_a_stream_that_did_not_go_on_is_a_try_like_others(failure: FailureKind) -> None:
    budget = RetryBudget(0.0, 0)
    first, second = (
        budget.rule_after(0.0, FailedStage.STREAM, failure, tries=tries, max_tries=3, deaths=0) for tries in (1, 2)
    )
    assert (first.next, second.next) == (Next.ELSEWHERE, Next.REFUSE)
    assert second.is_over_budget


def test_a_stream_has_to_go_on_so_far() -> None:
    assert adds_enough(116, 100)
    assert not adds_enough(115, 100)


def tried(budget: RetryBudget, tokens: int) -> int:
    """How many tries of prompts of that length the budget lets through at one time."""
    count = 0
    while not budget.rule_after(
        0.0, FailedStage.DECODE, FailureKind.TIMEOUT, tries=1, max_tries=3, deaths=0, tokens=tokens
    ).is_over_budget:
        count += 1
    return count


@pytest.mark.parametrize(("tokens", "count"), [(1_000, 20), (2_000, 10), (500, 40), (1_000_000, 5), (1, 80)])
def test_a_try_costs_by_its_length_within_bounds(tokens: int, count: int) -> None:
    budget = RetryBudget(0.2, 0)
    for _ in range(100):
        budget.request(0.0, 1_000)
    assert tried(budget, tokens) == pytest.approx(count, abs=2)


@pytest.mark.parametrize("stage", [FailedStage.PREFILL, FailedStage.DECODE])
def test_a_full_engine_has_done_nothing_and_spends_no_budget(stage: FailedStage) -> None:
    budget = RetryBudget(0.2, 1.0)
    failure = failure_of("queue_full")
    for _ in range(100):
        rule = budget.rule_after(0.0, stage, failure, tries=1, max_tries=3, deaths=0)
        assert rule.next is Next.ELSEWHERE
    other = budget.rule_after(0.0, stage, FailureKind.TROUBLE, tries=1, max_tries=3, deaths=0)
    assert other.next is Next.ELSEWHERE
