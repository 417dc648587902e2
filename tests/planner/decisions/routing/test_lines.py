import pytest
from msgspec.structs import replace

from planner.decisions.routing.congestion import is_scarce, pressure
from planner.decisions.routing.lines import own_lines, seen_by_sender, shared_line
from planner.decisions.routing.offload import Reason, Target
from planner.decisions.routing.policy import PlacementPolicy
from planner.decisions.views import LinkView
from planner.simulator.network.divided import BudgetedReport
from tests.planner.worlds import GB, link, pd_decode, pd_prefill, policy, prfaas, request, route


def test_an_idle_line_is_counted_once():
    assert shared_line([link(available_bytes_per_s=GB)] * 3).available_bytes_per_s == GB


def test_a_line_has_at_least_what_its_senders_carry():
    parts = [link(available_bytes_per_s=GB / 4, utilisation=1.0) for _ in range(4)]
    assert shared_line(parts).available_bytes_per_s == GB


def test_what_waits_adds_up_and_the_longest_queue_is_right():
    seen = shared_line(
        [
            link(queued_bytes=GB, promised_bytes=GB, rtt_s=0.04, min_rtt_s=0.04),
            link(queued_bytes=GB, congested=True, rtt_s=0.2, min_rtt_s=0.04),
        ]
    )
    assert (seen.queued_bytes, seen.promised_bytes) == (2 * GB, GB)
    assert (seen.congested, seen.rtt_inflation) == (True, pytest.approx(5.0))


def test_budgets_are_each_senders_own():
    assert shared_line([link(budget_bytes_per_s=GB), link(budget_bytes_per_s=GB)]).budget_bytes_per_s == 2 * GB
    assert shared_line([link(budget_bytes_per_s=GB), link()]).budget_bytes_per_s is None


def test_budgets_that_bind_leave_room_for_all_of_them_and_use_is_of_the_line():
    busy = link(available_bytes_per_s=GB, budget_bytes_per_s=GB, utilisation=1.0)
    idle = link(available_bytes_per_s=GB, budget_bytes_per_s=GB)
    silent = link(available_bytes_per_s=None, budget_bytes_per_s=GB)
    seen = shared_line([busy, idle, silent, silent])
    assert (seen.available_bytes_per_s, seen.budget_bytes_per_s, seen.utilisation) == (4 * GB, 4 * GB, 0.25)
    line = [link(available_bytes_per_s=GB / 2, budget_bytes_per_s=GB, utilisation=1.0) for _ in range(2)]
    assert (shared_line(line).rate_bytes_per_s, shared_line(line).utilisation) == (GB, 1.0)


def held(budget_bytes_per_s: float, utilisation: float) -> LinkView:
    """What gateways make of the report of a sender that its budget holds back."""
    report = BudgetedReport(
        budget_bytes_per_s=budget_bytes_per_s, utilisation=utilisation, queued_bytes=0.0, rtt_s=0.0, min_rtt_s=0.0
    )
    seen = seen_by_sender("east", "west", report, 0, GB)
    assert seen is not None
    return seen


def test_a_line_is_scarce_where_its_senders_use_up_their_budgets():
    one = held(GB, 1.0)
    assert (one.available_bytes_per_s, one.utilisation) == (None, 1.0)
    assert (is_scarce(one, policy()), pressure(one, policy())) == (True, 1.0)
    assert shared_line([one, held(GB, 0.9)]).utilisation == 0.95
    assert shared_line([one, link(available_bytes_per_s=2 * GB, budget_bytes_per_s=GB)]).utilisation == 0.5


def test_a_share_of_a_moment_is_used_as_a_part_of_the_senders_own_budget():
    assert held(GB / 4, 1.0).utilisation == 0.25
    assert held(7 * GB / 4, 1.0).utilisation == 1.75


def test_a_line_that_one_sender_fills_with_the_budgets_of_others_is_full():
    lent, idle = held(7 * GB / 4, 1.0), held(GB / 4, 0.0)
    line = shared_line([lent, idle])
    assert line.utilisation == 0.875
    assert [each.utilisation for _, each in own_lines(line, {"a": lent, "b": idle}, 2)] == [1.0, 0.0]


def senders_of(**own: LinkView) -> LinkView:
    return replace(shared_line([*own.values()]), senders=tuple(own.items()))


OWN = link(available_bytes_per_s=GB, budget_bytes_per_s=GB)
BUSY = replace(OWN, utilisation=1.0, queued_bytes=20 * GB)


@pytest.mark.parametrize("busy", ["r0", "r1"])
def test_a_prompt_leaves_by_the_sender_whose_own_line_is_idle(busy: str):
    idle = {"r0": "r1", "r1": "r0"}[busy]
    line = senders_of(**{busy: BUSY, idle: OWN})
    nodes = [prfaas("r0"), prfaas("r1"), pd_prefill(), pd_decode()]
    found = route(request(60_000), nodes, [line], policy())
    assert (found.target, found.prefill_node, found.reason) == (Target.REMOTE, idle, Reason.LONG)
    assert found.link_s == OWN.arrives_s(found.link_bytes)


def test_where_every_senders_line_is_busy_prompts_stay():
    nodes = [prfaas("r0"), prfaas("r1"), pd_prefill(), pd_decode()]
    found = route(request(60_000), nodes, [senders_of(r0=BUSY, r1=BUSY)], policy())
    assert (found.target, found.reason) == (Target.LOCAL, Reason.CONGESTED)


def test_a_sender_that_is_sooner_in_spite_of_its_line_is_left_to_placement():
    line = senders_of(r0=replace(OWN, queued_bytes=GB), r1=OWN)
    nodes = [prfaas("r0"), prfaas("r1", queue_s=9.0), pd_prefill(queue_s=60.0), pd_decode()]
    assert route(request(60_000), nodes, [line], policy()).prefill_node == "r0"


def test_a_sender_whose_line_is_busy_still_hands_over_its_prefix():
    line = senders_of(r0=BUSY, r1=OWN)
    nodes = [prfaas("r0", cached_tokens=50_000), prfaas("r1"), pd_prefill(queue_s=60.0), pd_decode()]
    rules = policy(placement=PlacementPolicy(fetch_bytes_per_s=100 * GB))
    found = route(request(60_000), nodes, [line], rules)
    assert (found.prefill_node, found.fetch_from) == ("r1", "r0")


def test_senders_have_lines_of_their_own_where_each_has_a_budget_and_all_are_seen():
    seen = {"r0": OWN, "r1": replace(OWN, rtt_s=0.02, min_rtt_s=0.02)}
    line = shared_line([*seen.values()])
    assert [(name, view.rtt_s) for name, view in own_lines(line, seen, 2)] == [("r0", 0.02), ("r1", 0.02)]
    assert own_lines(line, seen, 3) == ()
    assert own_lines(OWN, {"r0": OWN}, 1) == ()
    free = {"r0": OWN, "r1": link()}
    assert own_lines(shared_line([*free.values()]), free, 2) == ()
