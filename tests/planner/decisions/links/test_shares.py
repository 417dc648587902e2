"""Senders of one line share its budget, and whatever is lost or late, they never send more than all of it."""

import random
from dataclasses import dataclass, field, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from planner.decisions.links.shares import FLOOR, Bound, LineSender, RateGrant, SharedBudget, divide
from tests.properties import examples

MB = 1e6


def line(*queued: float, own: float = 10 * MB) -> list[LineSender]:
    return [LineSender(f"n{i}", own, each) for i, each in enumerate(queued)]


def test_what_nobody_needs_goes_to_who_waits_but_for_a_floor():
    assert divide(line(0.0, 0.0)) == {"n0": 10 * MB, "n1": 10 * MB}
    assert divide(line(1 * MB, 1 * MB)) == {"n0": 10 * MB, "n1": 10 * MB}  # it is gone in no time
    assert divide(line(90 * MB, 0.0)) == {"n0": (2 - FLOOR) * 10 * MB, "n1": FLOOR * 10 * MB}
    shared = divide(line(30 * MB, 10 * MB, 0.0))
    assert sum(shared.values()) == 30 * MB
    assert shared["n0"] - 10 * MB == 3 * (shared["n1"] - 10 * MB) > 0


def test_nobody_who_waits_gives_anything_up():
    assert divide(line(90 * MB, 5 * MB)) == {"n0": 10 * MB, "n1": 10 * MB}


def test_nobody_is_raised_before_others_have_answered():
    budget, senders = SharedBudget(), line(90 * MB, 0.0)
    (lower,) = budget.lower(senders, 0.0)
    assert (lower.node_id, lower.bytes_per_s, lower.is_raise) == ("n1", FLOOR * 10 * MB, False)
    assert budget.raise_(senders, 0.1) == []
    budget.answered(lower)
    (raised,) = budget.raise_(senders, 0.1)
    assert (raised.node_id, raised.bytes_per_s) == ("n0", (2 - FLOOR) * 10 * MB)
    assert raised.until <= lower.until


def test_a_budget_follows_those_who_wait_and_comes_back():
    budget = SharedBudget()
    for now in (0.0, 1.0, 2.0):
        for grant in budget.lower(line(90 * MB, 0.0), now):
            budget.answered(grant)
        (raised,) = budget.raise_(line(90 * MB, 0.0), now)
        assert raised.bytes_per_s == (2 - FLOOR) * 10 * MB
        assert raised.until == now + 3.0
    for now in (3.0, 4.0, 5.5, 6.0, 7.0):  # the other way round: what was lent is back when its lease has ended
        for grant in budget.lower(line(0.0, 90 * MB), now):
            budget.answered(grant)
        raised_now = budget.raise_(line(0.0, 90 * MB), now)
    assert [grant.node_id for grant in raised_now] == ["n1"]
    assert (budget.lower(line(0.0, 0.0), 20.0), budget.raise_(line(0.0, 0.0), 20.0)) == ([], [])


def test_what_one_who_is_out_of_sight_has_borrowed_is_nobody_elses():
    budget, (idle, busy, other) = SharedBudget(), line(0.0, 90 * MB, 0.0)
    lowered = budget.lower([idle, busy, other], 0.0)
    for grant in lowered:
        budget.answered(grant)
    (raised,) = budget.raise_([idle, busy, other], 0.0)
    assert ([each.node_id for each in lowered], raised.node_id) == ([idle.node_id, other.node_id], busy.node_id)
    waits = replace(other, queued_bytes=90 * MB)
    for seen in ([idle, waits], [waits], [idle, waits]):
        for grant in budget.lower(seen, 1.0):
            budget.answered(grant)
        assert budget.raise_(seen, 1.0) == []
        assert budget.holds(1.0)
    assert not budget.holds(10.0)


def test_a_lender_that_needs_its_own_has_it_back_once_borrowers_have_let_go():
    budget = SharedBudget()
    for grant in budget.lower(line(90 * MB, 0.0), 0.0):
        budget.answered(grant)
    budget.raise_(line(90 * MB, 0.0), 0.0)
    (lower,) = budget.lower(line(90 * MB, 90 * MB), 1.0)
    assert (lower.node_id, lower.bytes_per_s) == ("n0", 10 * MB)
    assert [grant.node_id for grant in budget.raise_(line(90 * MB, 90 * MB), 1.0)] == [
        "n0"
    ]  # as it may send all the same
    budget.answered(lower)
    (back,) = budget.raise_(line(90 * MB, 90 * MB), 1.1)
    assert (back.node_id, back.bytes_per_s, back.is_raise) == ("n1", 10 * MB, False)


def waits_s(*, is_shared: bool, seed: int) -> list[float]:
    """How long transfers of 2.3 MB take to leave two senders of 1 MB/s each, which chance gives them, at 80 %; sorted."""
    rng, budget, now, step_s = random.Random(seed), SharedBudget(), 0.0, 0.05
    queues: list[list[list[float]]] = [[], []]  # by sender: when it came, what is left of it
    nodes, waits = [Node(1 * MB), Node(1 * MB)], []
    arrives = 0.0
    for number in range(12_000):
        now = number * step_s
        while arrives <= now:
            queues[rng.randrange(2)].append([arrives, 2.3 * MB * rng.uniform(0.5, 1.5)])
            arrives += rng.expovariate(0.8 * 2 / 2.3)
        if is_shared and number % 20 == 0:
            senders = [LineSender(f"n{i}", 1 * MB, sum(left for _, left in queue)) for i, queue in enumerate(queues)]
            for grant in budget.lower(senders, now):
                nodes[int(grant.node_id[1])].take(grant, now, grant.until - now)
                budget.answered(grant)
            for grant in budget.raise_(senders, now):
                nodes[int(grant.node_id[1])].take(grant, now, grant.until - now)
        for node, queue in zip(nodes, queues, strict=True):
            may = node.rate(now) * step_s
            while queue and may > 0:
                sent = min(may, queue[0][1])
                queue[0][1] -= sent
                may -= sent
                if queue[0][1] <= 0:
                    waits.append(now + step_s - queue.pop(0)[0])
    return sorted(waits)


def test_sharing_is_sooner_than_budgets_of_ones_own():
    for seed in range(5):
        own, shared = (waits_s(is_shared=is_shared, seed=seed) for is_shared in (False, True))
        for quantile in (0.5, 0.9):
            assert shared[int(quantile * len(shared))] < 0.9 * own[int(quantile * len(own))]


@dataclass
class Node:
    """Keeps to what reaches it, as nodes do; all clocks are one."""

    own: float
    taken: Bound = field(default_factory=lambda: Bound(0.0, -1.0))

    def take(self, grant: RateGrant, now: float, lease_s: float) -> None:
        until = grant.until if grant.is_raise else now + lease_s
        if until > now:
            self.taken = Bound(grant.bytes_per_s, until)

    def rate(self, now: float) -> float:
        return self.taken.bytes_per_s if now < self.taken.until else self.own


ROUND = st.tuples(
    st.lists(st.sampled_from([0.0, 1 * MB, 20 * MB, 300 * MB]), min_size=3, max_size=3),  # what waits
    st.lists(st.sampled_from(["answered", "answered", "lost", "unanswered"]), min_size=6, max_size=6),
    st.floats(0.0, 0.6), st.floats(0.05, 4.0),  # how long an answer takes, and until the next round
    st.one_of(st.just(frozenset[int]()), st.frozensets(st.integers(0, 2))),  # senders out of sight
)  # fmt: skip


@settings(max_examples=examples(200))
@given(st.lists(ROUND, max_size=12))
def test_together_they_never_send_more_than_the_budget(rounds):
    owns = [10 * MB, 10 * MB, 30 * MB]
    nodes = {f"n{i}": Node(own) for i, own in enumerate(owns)}
    budget, now = SharedBudget(), 0.0

    def check(until: float) -> None:
        moments = [now, until, *(n.taken.until + late for n in nodes.values() for late in (-1e-6, 1e-6))]
        for moment in moments:
            if now <= moment <= until:
                assert sum(node.rate(moment) for node in nodes.values()) <= sum(owns) * (1 + 1e-9)

    for queued, fates, answer_s, pause_s, unseen in rounds:
        line = enumerate(zip(owns, queued, strict=True))
        senders = [LineSender(f"n{i}", own, each) for i, (own, each) in line if i not in unseen]
        for grant, fate in zip(budget.lower(senders, now), fates, strict=False):
            if fate != "lost":
                nodes[grant.node_id].take(grant, now + answer_s, grant.until - now)
            if fate == "answered":
                budget.answered(grant)
        check(now + answer_s)
        now += answer_s
        for grant, fate in zip(budget.raise_(senders, now), fates[3:], strict=False):
            if fate != "lost":
                nodes[grant.node_id].take(grant, now, grant.until - now)
        check(now + pause_s)
        now += pause_s
