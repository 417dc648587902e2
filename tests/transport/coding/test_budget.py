"""All lines of a node together code within one budget of processor time."""

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transport.coding.budget import BURST_S, LEAST_TOGETHER, CodingBudget
from transport.coding.choice import (
    LEAST_CORES,
    CodingPolicy,
    Compression,
    Quantisation,
    QuantiseWhen,
    RangeFormat,
    Situation,
)
from transport.coding.codec import Codec
from transport.send.lane.coder import PeerCoding
from transport.send.schedule.lanes import LaneTransfer
from transport.wire.manifest import Manifest, Outbox

AUTO = CodingPolicy(compression=Compression.AUTO)
SLOW = Situation(link_bytes_per_s=300e3, backlog_bytes=100 << 20, idle_cores=LEAST_CORES)
ALL = Codec.ZSTD | Codec.INT8


def formats(policy: CodingPolicy) -> dict[str, RangeFormat]:
    return {"kv": RangeFormat("kv", (), policy)}


def slow_line(budget: CodingBudget, policy: CodingPolicy = AUTO) -> PeerCoding:
    """A line for which even a fiftieth of a core is worth it."""
    line = PeerCoding(threading.Lock(), budget)
    line.asked(formats(policy), ALL, 0.0)
    line.on_situation(SLOW, 1.0)
    return line


def test_fifty_slow_lines_take_no_core_of_a_busy_machine() -> None:
    budget = CodingBudget(most_cores=4.0)
    budget.follow(LEAST_CORES, 0.0)
    lines = [slow_line(budget) for _ in range(50)]
    transfer = LaneTransfer(slot=0, transfer_id="t", secret=b"s", outbox=Outbox(Manifest([10])))
    spent_s, uncoded = 0.0, 0
    for hundredths in range(1_000):
        now = 1.0 + hundredths / 100
        for line in lines:
            asked = line.asked(formats(AUTO), ALL, now)
            if asked["kv"] is Codec.RAW:
                uncoded += 1
                continue
            line.on_coded(transfer, asked, (), 0.01, 0, now)
            spent_s += 0.01
    assert spent_s == pytest.approx(10 * LEAST_TOGETHER, rel=0.1)
    assert uncoded == sum(line.accounts().events["no_core_left"] for line in lines) > 0


def test_what_is_always_coded_is_coded_and_paid_for() -> None:
    """Else tokens would depend on how busy the machine is."""
    budget = CodingBudget(most_cores=1.0)
    always = CodingPolicy(quantisation=Quantisation.INT8, quantise_when=QuantiseWhen.ALWAYS)
    line = slow_line(budget, always)
    budget.charge(100.0, 1.0)
    assert line.asked(formats(always), ALL, 1.0) == {"kv": Codec.INT8}
    assert not line.accounts().events["no_core_left"]


def test_after_an_hour_of_what_is_always_coded_other_lines_wait_no_longer() -> None:
    budget = CodingBudget(most_cores=1.0)
    budget.follow(LEAST_CORES, 0.0)
    always = CodingPolicy(quantisation=Quantisation.INT8, quantise_when=QuantiseWhen.ALWAYS)
    line, other = slow_line(budget, always), slow_line(budget)
    transfer = LaneTransfer(slot=0, transfer_id="t", secret=b"s", outbox=Outbox(Manifest([10])))
    for second in range(3_600):
        asked = line.asked(formats(always), ALL, float(second))
        line.on_coded(transfer, asked, (), 2.0, 0, float(second))
    assert other.asked(formats(AUTO), ALL, 3_599.0) == {"kv": Codec.RAW}
    assert other.asked(formats(AUTO), ALL, 3_599.0 + 2 * BURST_S) == {"kv": Codec.ZSTD}


def test_what_waits_for_idle_cores_owes_all_that_it_takes() -> None:
    budget = CodingBudget(most_cores=1.0)
    line = slow_line(budget)
    transfer = LaneTransfer(slot=0, transfer_id="t", secret=b"s", outbox=Outbox(Manifest([10])))
    asked = line.asked(formats(AUTO), ALL, 1.0)
    line.on_coded(transfer, asked, (), 1.0, 0, 1.0)
    assert not budget.is_left(10.0)
    assert budget.is_left(1.1 + 1.0 / LEAST_TOGETHER)


def test_idle_cores_are_all_that_coding_takes_up_to_its_most() -> None:
    budget = CodingBudget(most_cores=2.0)
    assert budget.follow(0.0, 0.0) == 0.0  # not known yet
    assert budget.follow(1.5, 1.0) == 1.5
    assert budget.follow(64.0, 2.0) == 2.0
    assert CodingBudget().most_cores > 0


def test_a_moment_is_earned_once_although_threads_come_late_with_their_time() -> None:
    budget = CodingBudget(most_cores=1.0)
    budget.follow(1.0, 0.0)
    budget.charge(1.0, 0.0)
    for hundredths in range(60):
        budget.charge(0.0, hundredths / 100)
        budget.charge(0.0, (hundredths - 1) / 100)
    assert not budget.is_left(0.6)


spending = st.lists(st.tuples(st.floats(0.0, 0.5), st.floats(0.0, 64.0), st.floats(0.0, 0.2)), max_size=60)


@given(st.floats(0.01, 8.0), spending)
def test_no_more_is_spent_than_is_earned(most_cores: float, spends: list[tuple[float, float, float]]) -> None:
    budget, now, spent_s, largest_s = CodingBudget(most_cores=most_cores), 0.0, 0.0, 0.0
    for pause_s, idle_cores, cpu_s in spends:
        now += pause_s
        assert budget.follow(idle_cores, now) <= most_cores
        if budget.is_left(now):
            budget.charge(cpu_s, now)
            spent_s, largest_s = spent_s + cpu_s, max(largest_s, cpu_s)
    assert spent_s <= most_cores * (now + BURST_S) + largest_s + 1e-9
