"""Plans are proposed, applied, rolled back; versions and terms only grow."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.decisions.plans.live_plan import LivePlan, Mode, PlanInputs, PlanRefusal, PlanSetting, refusal_of
from planner.decisions.views import Role
from planner.errors import ChangeRefused
from planner.solve.control.ledger import DONE, MAX_KEPT, MAX_KEPT_BYTES, PENDING, Draft, Ledger, PlanEvent, PlanLimits

LIMITS = PlanLimits(min_threshold_tokens=100, max_threshold_tokens=50_000)
FOUND = PlanSetting(threshold_tokens=20_000)


def draft(threshold_tokens: float, **fields) -> Draft:
    return Draft(setting=PlanSetting(threshold_tokens=threshold_tokens, **fields), reason="longer prompts", gain=0.1)


def begun() -> Ledger:
    return Ledger().observed(FOUND).led(1, 0.0, "a")[0]


def test_a_plan_is_proposed_applied_and_rolled_back():
    ledger, entry = begun().propose(draft(15_000), LIMITS, 10.0)
    assert entry is not None
    assert (entry.change, entry.version, entry.reason, entry.gain) == (PlanEvent.PROPOSED, 1, "longer prompts", 0.1)
    assert ledger.in_force is None
    assert ledger.setting == FOUND
    ledger, entry = ledger.apply(11.0, "ann", 1)
    assert (entry.by, entry.before, entry.after) == ("ann", FOUND, PlanSetting(threshold_tokens=15_000))
    assert ledger.in_force is not None
    assert (ledger.in_force.version, ledger.in_force.mode, ledger.in_force.by) == (1, Mode.APPLIED, "ann")
    ledger, _ = ledger.propose(draft(12_000), LIMITS, 20.0)
    ledger, _ = ledger.apply(21.0, "ann")
    ledger, entry = ledger.roll_back(22.0, "bob")
    assert ledger.setting == PlanSetting(threshold_tokens=15_000)
    assert entry.reason == "rollback of version 2"
    ledger, _ = ledger.roll_back(23.0, "bob")
    assert ledger.setting == FOUND
    assert ledger.last_version == 4
    with pytest.raises(ChangeRefused, match="nothing to roll back"):
        ledger.roll_back(24.0, "bob")


def test_after_a_rollback_nothing_changes_by_itself():
    ledger = begun().propose(draft(15_000), LIMITS, 10.0)[0].apply(11.0, "controller")[0].roll_back(12.0, "ann")[0]
    assert ledger.propose(draft(15_000), LIMITS, 999.0) == (ledger, None)
    ledger = ledger.resume(1000.0, "ann")[0].propose(draft(15_000), LIMITS, 1001.0)[0]
    assert ledger.may_apply_itself(LIMITS, 1001.0)


def test_a_proposal_that_says_the_same_stands():
    ledger, _ = begun().propose(draft(15_000), LIMITS, 10.0)
    assert ledger.propose(draft(15_100), LIMITS, 20.0) == (ledger, None)
    other, entry = ledger.propose(draft(14_000), LIMITS, 20.0)
    assert other.proposal is not None
    assert other.proposal.version == 2
    assert entry is not None
    with pytest.raises(ChangeRefused, match="version 1 is not proposed; the proposal is version 2"):
        other.apply(21.0, "ann", 1)
    gone, entry = other.withdraw(22.0, "nothing to gain")
    assert gone.proposal is None
    assert entry is not None
    assert entry.change is PlanEvent.WITHDRAWN
    with pytest.raises(ChangeRefused, match="no proposal"):
        gone.apply(23.0, "ann")
    again, _ = gone.propose(draft(14_000), LIMITS, 30.0)
    assert again.proposal is not None
    assert again.proposal.version == 3


def test_what_is_in_force_is_not_proposed():
    ledger = begun()
    assert ledger.propose(draft(20_100), LIMITS, 1.0) == (ledger, None)
    assert ledger.propose(draft(20_100, roles={"p0": Role.DECODE}), LIMITS, 1.0)[0].proposal is not None
    assert ledger.propose(draft(20_000, tie_share=0.5), LIMITS, 1.0)[0].proposal is not None


def test_changes_by_itself_are_apart():
    ledger = begun().propose(draft(15_000), LIMITS, 10.0)[0]
    assert ledger.may_apply_itself(LIMITS, 10.0)
    ledger = ledger.apply(10.0, "controller")[0].propose(draft(10_000), LIMITS, 20.0)[0]
    assert not ledger.may_apply_itself(LIMITS, 69.0)
    assert ledger.may_apply_itself(LIMITS, 70.0)
    assert not ledger.pause(70.0, "ann")[0].may_apply_itself(LIMITS, 70.0)


def test_the_next_leader_goes_on_with_the_same_version():
    ledger = begun().propose(draft(15_000), LIMITS, 10.0)[0].apply(11.0, "ann")[0]
    before = ledger.in_force
    later, entry = msgspec.json.decode(msgspec.json.encode(ledger), type=Ledger).led(2, 20.0, "b")
    assert entry.change is PlanEvent.LED
    assert later.in_force is not None
    assert later.in_force.place == (2, 1)
    assert refusal_of(later.in_force, before) is None
    assert refusal_of(before, later.in_force) is PlanRefusal.STALE_TERM
    with pytest.raises(ChangeRefused, match="term 2 is over"):
        later.led(2, 21.0, "c")


def test_a_plan_that_only_gateways_remember_is_gone_on_with():
    followed = LivePlan(
        version=7, term=3, made_at=0.0, setting=PlanSetting(threshold_tokens=9_000), reason="", mode=Mode.APPLIED
    )
    ledger, entry = begun().adopted(followed, 5.0, "b")
    assert entry is not None
    assert ledger.in_force is not None
    assert ledger.in_force.place == (4, 7)
    assert ledger.propose(draft(15_000), LIMITS, 10.0)[0].last_version == 8
    assert ledger.adopted(followed, 6.0, "b") == (ledger, None)


def test_a_plan_that_is_adopted_takes_the_place_of_one_that_was_followed():
    ledger, _ = begun().propose(draft(15_000, roles={"n0": Role.PREFILL}), LIMITS, 1.0)
    ledger, _ = ledger.apply(2.0, "ann")
    before = ledger.setting
    assert ledger.conversions == {"n0": PENDING}
    followed = LivePlan(version=7, term=1, made_at=0.0, setting=PlanSetting(threshold_tokens=9_000), reason="")
    ledger, _ = ledger.adopted(followed, 5.0, "b")
    assert ledger.conversions == {}
    assert ledger.roll_back(6.0, "ann")[0].in_force.setting == before


def test_the_past_is_bounded():
    ledger, limits = begun(), PlanLimits(resolution=0.0)
    roles = {f"node-{index}": Role.DECODE for index in range(1000)}
    for step in range(2 * MAX_KEPT):
        ledger = ledger.propose(draft(1_000 + 100 * step, roles=roles), limits, step)[0].apply(step, "ann")[0]
    assert len(ledger.back_to) > 5
    assert len(msgspec.json.encode(ledger.back_to)) <= MAX_KEPT_BYTES + 1024
    ledger = begun()
    for step in range(2 * MAX_KEPT):
        ledger = ledger.propose(draft(1_000 + 100 * step), limits, step)[0].apply(step, "ann")[0]
    assert [setting.threshold_tokens for setting in ledger.back_to] == [
        1_000 + 100 * step for step in range(MAX_KEPT - 1, 2 * MAX_KEPT - 1)
    ]


STEPS = st.one_of(
    st.tuples(st.just("propose"), st.floats(0, 1e6)),
    *(st.tuples(st.just(name), st.just(0.0)) for name in ("withdraw", "apply", "roll_back", "pause", "resume", "led")),
)


@given(st.lists(STEPS, max_size=40))
def test_whatever_happens_limits_hold_and_versions_grow(steps):
    ledger, followed, at = begun(), None, 0.0
    for name, threshold in steps:
        at += 1.0
        before = ledger
        try:
            match name:
                case "propose":
                    ledger, _ = ledger.propose(draft(threshold), LIMITS, at)
                case "withdraw":
                    ledger, _ = ledger.withdraw(at, "")
                case "led":
                    ledger, _ = ledger.led(ledger.term + 1, at, "b")
                case _:
                    ledger, _ = getattr(ledger, name)(at, "ann")
        except ChangeRefused:
            assert ledger == before
        assert ledger.last_version >= before.last_version
        if ledger.proposal is not None:
            assert 100 <= ledger.proposal.setting.threshold_tokens <= 50_000
            assert ledger.proposal.version == ledger.last_version
        if ledger.in_force is not None:
            assert 100 <= ledger.in_force.setting.threshold_tokens <= 50_000
            assert refusal_of(ledger.in_force, followed) is None
            assert followed is None or ledger.in_force.place > followed.place or ledger.in_force == followed
            followed = ledger.in_force
        assert msgspec.json.decode(msgspec.json.encode(ledger), type=Ledger) == ledger


def test_only_applied_plans_are_followed():
    plan = LivePlan(version=1, term=1, made_at=0.0, setting=FOUND, reason="", seen=PlanInputs())
    assert refusal_of(plan, None) is PlanRefusal.NOT_APPLIED
    applied = msgspec.structs.replace(plan, mode=Mode.APPLIED)
    assert refusal_of(applied, None) is None
    assert refusal_of(applied, msgspec.structs.replace(applied, version=2)) is PlanRefusal.STALE_VERSION
    assert refusal_of(applied, applied) is None


@pytest.mark.parametrize("fields", [{"threshold_tokens": -1.0}, {"threshold_tokens": 1.0, "tie_share": 2.0}])
def test_a_setting_that_cannot_be_is_refused(fields):
    with pytest.raises(ValueError, match="must be"):
        PlanSetting(**fields)
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(msgspec.json.encode(fields), type=PlanSetting)


def test_a_plan_asks_nothing_of_a_node_that_has_done_it_and_tries_again_where_it_failed():
    roles = {"n0": Role.DECODE, "n1": Role.DECODE}
    ledger = begun().propose(draft(15_000, roles=roles), LIMITS, 10.0)[0].apply(11.0, "ann")[0]
    assert set(ledger.conversions.values()) == {PENDING}
    ledger = ledger.converted(12.0, "n0")[0].converted(12.0, "n1", "drain_timeout")[0]
    ledger = ledger.propose(draft(9_000, roles=roles), LIMITS, 20.0)[0].apply(21.0, "ann")[0]
    assert ledger.conversions == {"n0": DONE, "n1": PENDING}
    ledger = ledger.propose(draft(9_000, roles={"n0": Role.PREFILL}), LIMITS, 30.0)[0].apply(31.0, "ann")[0]
    assert ledger.conversions == {"n0": PENDING}


def test_a_role_that_a_node_has_not_taken_may_be_given_again():
    turned, found = {"n0": Role.DECODE}, {"n0": Role.PREFILL}
    turning = msgspec.structs.replace(draft(15_000, roles=turned), seen=PlanInputs(roles=found))
    ledger = begun().propose(turning, LIMITS, 10.0)[0].apply(11.0, "ann")[0]
    assert dict(ledger.setting.roles) == turned
    ledger = ledger.converted(12.0, "n0", "drain_timeout")[0]
    assert ledger.setting == PlanSetting(threshold_tokens=15_000)  # without it
    assert ledger.propose(draft(15_000), LIMITS, 13.0) == (ledger, None)
    ledger = ledger.propose(turning, LIMITS, 14.0)[0].apply(15.0, "ann")[0]
    assert ledger.conversions == {"n0": PENDING}
    ledger = ledger.converted(16.0, "n0")[0].roll_back(17.0, "ann")[0]
    assert dict(ledger.setting.roles) == found
    assert ledger.conversions == {"n0": PENDING}


def test_of_one_term_the_leader_of_the_greater_id_is_followed():
    def in_force(leader: str):
        ledger = Ledger().observed(FOUND).led(1, 0.0, "controller", leader)[0]
        return ledger.propose(draft(15_000), LIMITS, 10.0)[0].apply(11.0, "ann")[0].in_force

    one, other = in_force("a"), in_force("b")
    assert one.place == other.place
    assert refusal_of(other, one) is None
    assert refusal_of(one, other) is PlanRefusal.STALE_LEADER
    assert refusal_of(in_force(""), one) is PlanRefusal.STALE_LEADER
