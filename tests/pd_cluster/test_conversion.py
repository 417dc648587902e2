"""The table by itself: whatever happens in whatever order, a node ends in a role that it may have."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_cluster.conversion import (
    MAX_EPOCH,
    MAX_LEAP,
    TRANSITIONS,
    Command,
    CommandOutcome,
    Conversion,
    ConversionPhase,
    ConversionStep,
    Effect,
    Event,
    LeapingCommand,
    RoleDrained,
    RoleUnfit,
    StaleCommand,
    Tick,
    Verified,
    step,
)

ROLES = ("prefill", "decode")
AT_FIRST = Conversion(role="prefill", target="prefill")
DRAIN_S, VERIFY_S = 60.0, 30.0


def command(epoch: int, role: str = "decode", drain_s: float = DRAIN_S) -> Command:
    return Command(epoch=epoch, role=role, drain_timeout_s=drain_s, verify_timeout_s=VERIFY_S)


def after(*events: tuple[Event, float], start: Conversion = AT_FIRST) -> ConversionStep:
    last = ConversionStep(start)
    for event, now in events:
        last = step(last.conversion, event, now)
    return last


def test_from_one_role_to_the_other() -> None:
    draining = after((command(1), 10.0))
    assert (draining.conversion.phase, draining.conversion.role) == (ConversionPhase.DRAINING, "prefill")
    assert draining.effects == (Effect.ANNOUNCE, Effect.REMEMBER, Effect.CARRY_OUT)
    verifying = step(draining.conversion, RoleDrained(1), 12.0)
    assert (verifying.conversion.phase, verifying.conversion.role) == (ConversionPhase.VERIFYING, "prefill")
    ended = step(verifying.conversion, Verified(1), 12.5)
    assert ended.effects == (Effect.ANNOUNCE, Effect.REMEMBER, Effect.COUNT)
    conversion = ended.conversion
    assert (conversion.phase, conversion.role, conversion.outcome) == (
        ConversionPhase.STEADY,
        "decode",
        CommandOutcome.CONVERTED,
    )
    assert (conversion.drain_s, conversion.control_s) == (2.0, 0.5)


@pytest.mark.parametrize(
    ("events", "outcome", "detail"),
    [
        ([(Tick(), 69.9), (Tick(), 70.0)], CommandOutcome.DRAIN_TIMEOUT, "requests still ran after 60.0 s"),
        ([(RoleDrained(1), 20.0), (RoleUnfit(1, "it said 500"), 21.0)], CommandOutcome.VERIFY_FAILED, "it said 500"),
        ([(RoleDrained(1), 20.0), (Tick(), 50.0)], CommandOutcome.VERIFY_FAILED, "no answer after 30.0 s"),
        ([(command(2, "prefill"), 20.0)], CommandOutcome.WITHDRAWN, ""),
        ([(RoleDrained(1), 20.0), (command(2, "prefill"), 21.0)], CommandOutcome.WITHDRAWN, ""),
    ],
)
def test_what_restores_the_old_role(events: list[tuple[Event, float]], outcome: CommandOutcome, detail: str) -> None:
    ended = after((command(1), 10.0), *events)
    conversion = ended.conversion
    assert (conversion.phase, conversion.role, conversion.outcome) == (ConversionPhase.STEADY, "prefill", outcome)
    assert conversion.detail == detail
    assert Effect.ANNOUNCE in ended.effects


def test_a_role_that_it_holds_is_had_at_once() -> None:
    ended = after((command(7, "prefill"), 10.0))
    assert (ended.conversion.outcome, ended.conversion.epoch) == (CommandOutcome.UNCHANGED, 7)


@pytest.mark.parametrize("drained", [False, True])
def test_a_newer_command_of_the_same_role_goes_on_with_what_is_under_way(drained: bool) -> None:
    events: list[tuple[Event, float]] = [(RoleDrained(1), 20.0)] if drained else []
    before = after((command(1), 10.0), *events).conversion
    now = step(before, command(2, drain_s=100.0), 21.0).conversion
    assert replace(now, epoch=1, deadline=before.deadline) == before
    assert now.deadline == (before.deadline if drained else 121.0)


@pytest.mark.parametrize("stale", [command(4), command(4, "prefill"), command(5, "prefill"), command(0)])
@pytest.mark.parametrize("events", [[], [(RoleDrained(1), 11.0)], [(RoleDrained(1), 11.0), (Verified(1), 12.0)]])
def test_a_stale_command_is_refused_and_changes_nothing(stale: Command, events: list[tuple[Event, float]]) -> None:
    with pytest.raises(StaleCommand, match="epoch 5 wants decode"):
        after((command(5), 10.0), *events, (stale, 20.0))


def test_an_epoch_that_leaves_no_room_for_others_is_refused() -> None:
    for epoch in (6 + MAX_LEAP, 2**64 - 1):
        with pytest.raises(LeapingCommand, match=f"epoch {epoch} is too far ahead of 5: at most {5 + MAX_LEAP}"):
            after((command(5), 0.0), (command(epoch), 1.0))
    assert after((command(5), 0.0), (command(5 + MAX_LEAP), 1.0)).conversion.epoch == 5 + MAX_LEAP
    late = Conversion(role="decode", epoch=MAX_EPOCH - 1, target="decode")
    assert after((command(MAX_EPOCH, "prefill"), 0.0), start=late).conversion.epoch == MAX_EPOCH
    with pytest.raises(LeapingCommand):
        after((command(MAX_EPOCH + 1, "prefill"), 0.0), start=late)


@pytest.mark.parametrize("events", [[], [(RoleDrained(1), 11.0)], [(RoleDrained(1), 11.0), (RoleUnfit(1, "no"), 12.0)]])
def test_the_same_command_again_changes_nothing(events: list[tuple[Event, float]]) -> None:
    before = after((command(5), 10.0), *events).conversion
    assert step(before, command(5), 20.0) == ConversionStep(before)


def test_news_of_an_earlier_conversion_is_no_news() -> None:
    again = after((command(1), 0.0), (RoleDrained(1), 1.0), (command(2, "prefill"), 2.0), (command(3), 3.0))
    assert again.conversion.phase is ConversionPhase.DRAINING
    for late in (RoleDrained(1), Verified(1), RoleUnfit(1, "no")):
        assert step(again.conversion, late, 4.0) == ConversionStep(again.conversion)


events = st.one_of(
    st.builds(command, st.integers(0, 8), st.sampled_from(ROLES), st.sampled_from([1.0, 5.0])),
    st.builds(RoleDrained, st.integers(0, 4)),
    st.builds(Verified, st.integers(0, 4)),
    st.builds(RoleUnfit, st.integers(0, 4), st.just("no")),
    st.just(Tick()),
)


@given(first=st.sampled_from(ROLES), happens=st.lists(st.tuples(events, st.floats(0.0, 20.0)), max_size=40))
def test_whatever_happens(first: str, happens: list[tuple[Event, float]]) -> None:
    conversion, now = Conversion(role=first, target=first), 0.0
    for event, passes_s in happens:
        now += passes_s
        before = conversion
        try:
            following = step(conversion, event, now)
        except StaleCommand:
            assert isinstance(event, Command)
            continue
        conversion = following.conversion
        assert conversion.role in ROLES
        assert conversion.epoch >= before.epoch
        if conversion.role != before.role:  # the one way in which a role changes
            assert (before.phase, type(event)) == (ConversionPhase.VERIFYING, Verified)
            assert conversion.role == before.target == conversion.target
        if conversion.is_converting:
            assert conversion.target != conversion.role
            assert conversion.outcome is CommandOutcome.PENDING
        if before.is_converting and not conversion.is_converting:
            assert conversion.outcome not in (CommandOutcome.PENDING, CommandOutcome.UNCHANGED)
            assert Effect.COUNT in following.effects
        if Effect.CARRY_OUT in following.effects:
            assert conversion.attempt == before.attempt + 1
    # Time alone ends it, wherever it is.
    for _ in range(2):
        now += 1000.0
        conversion = step(conversion, Tick(), now).conversion
    assert conversion.phase is ConversionPhase.STEADY
    assert conversion.role in ROLES


def test_the_table_has_no_phase_without_a_way_out() -> None:
    for phase in (ConversionPhase.DRAINING, ConversionPhase.VERIFYING):
        assert {Command, Tick} <= {event for at, event in TRANSITIONS if at is phase}
