"""A line of senders with budgets: prompts leave by one of them, and routing knows what each has to send."""

from dataclasses import replace

import pytest

from planner.decisions.routing.offload import Reason, Route, Target
from planner.decisions.routing.policy import RoutingPolicy
from planner.decisions.views import LinkView
from planner.errors import InputError
from planner.simulator.loop import Loop
from planner.simulator.network.divided import DividedEgress
from planner.simulator.nodes.node import SimulatedRequest
from planner.simulator.scenario import Scenario, Wire
from planner.simulator.world import simulate
from tests.planner.simulator.network.test_links import pair
from tests.planner.simulator.systems import arrivals
from transport.path.link import LinkMonitor, TcpInfo

EAGER = RoutingPolicy(threshold_tokens=500)


def divided(rate: float, senders: int) -> Scenario:
    """A prompt of 1000 tokens takes a second at home, a tenth of one far away, and has 1000 bytes to send."""
    whole = pair([], far=senders)
    wires = [replace(wire, capacity=[(0.0, rate)], senders=senders) for wire in whole.wires]
    return replace(whole, wires=wires)


def test_a_prompt_stays_where_the_line_of_any_one_sender_is_slower_than_home():
    found = simulate(divided(2000.0, senders=4), arrivals([0.0, 10.0], 1000.0))
    assert found.routes == {"local congested": 2}
    assert found.ttft_s == pytest.approx([1.0, 1.0], abs=0.01)


def test_a_prompt_leaves_by_the_sender_whose_own_line_is_free():
    found = simulate(divided(4000.0, senders=2), arrivals([0.0, 0.15], 1000.0))
    assert found.routes == {"remote long": 2}
    assert found.ttft_s == pytest.approx([0.6, 0.6], abs=0.01)  # the first one has computed, and sends still


@pytest.mark.parametrize("senders", [2, 3])
def test_more_nodes_than_parts_would_send_more_than_the_line_carries(senders):
    whole = divided(1000.0, senders=4)
    with pytest.raises(InputError, match=f"link far to pd: senders={senders}: 4 nodes prefill there"):
        replace(whole, wires=[replace(wire, senders=senders) for wire in whole.wires])


@pytest.mark.parametrize(
    ("nodes", "senders", "carried"), [(4, 4, 1000.0), (2, 4, 500.0), (1, 4, 250.0), (64, 64, 1000.0)]
)
def test_nodes_send_no_more_than_their_parts_of_a_line(nodes, senders, carried):
    whole = divided(1000.0, senders=nodes)
    scenario = replace(whole, wires=[replace(wire, senders=senders) for wire in whole.wires], routing=EAGER)
    trace = arrivals([0.0] * 200, 1000.0)
    found, again = simulate(scenario, trace), simulate(scenario, trace)
    assert 0 < found.egress_bytes[1.0].max() <= carried + 0.01
    assert found.ttft_s.tolist() == again.ttft_s.tolist()


def test_a_line_is_as_wide_as_its_parts_and_down_with_them():
    scenario = divided(4000.0, senders=2)
    down = replace(scenario, wires=[replace(wire, capacity=[(0.0, 0.0), (60.0, 4000.0)]) for wire in scenario.wires])
    found = simulate(down, arrivals([0.0, 30.0, 100.0], 1000.0))
    assert found.fallbacks == {"prefill_peer_lost": 1}
    assert found.remote.tolist() == [0.0, 0.0, 1.0]
    assert found.sent_bytes == pytest.approx(1000.0)


def job_for(sender: str) -> SimulatedRequest:
    job = SimulatedRequest(0, 0.0, 1000, 1.0, ())
    job.route = Route(
        target=Target.REMOTE, reason=Reason.LONG, decode_node="d0", prefill_node=sender, uncached_tokens=1000,
        cached_tokens=0, threshold_tokens=500, link_bytes=1000.0,
    )  # fmt: skip
    return job


def all_delivered_at(*, shares_egress: bool) -> float:
    """Both senders send a byte; then one of them has four seconds of its own part to send."""
    loop, ends = Loop(), list[float]()
    wire = Wire(source="far", destination="pd", capacity=[(0.0, 500.0)], senders=2, shares_egress=shares_egress)
    link = DividedEgress(
        wire, loop, lambda now, item: ends.append(now), lambda now, items: None, 5.0, ["r0", "r1"],
        lambda: len(ends) == 3,
    )  # fmt: skip
    for at, sender, size in ((0.1, "r0", 1.0), (0.1, "r1", 1.0), (0.5, "r0", 1000.0)):
        loop.at(at, lambda now, sent: link.send(now, *sent), (size, job_for(sender)))
    loop.run()
    return ends[-1]


def test_a_sender_without_anything_to_send_lends_of_its_part_where_egress_is_shared():
    assert all_delivered_at(shares_egress=False) == pytest.approx(4.5)
    # From 1 s on it has 437.5 bytes a second for the 875 that are left.
    assert all_delivered_at(shares_egress=True) == pytest.approx(3.0)


def test_a_line_whose_egress_is_shared_carries_no_more_and_comes_to_an_end():
    kept = replace(divided(500.0, senders=2), routing=EAGER)
    shared = replace(kept, wires=[replace(wire, shares_egress=True) for wire in kept.wires])
    found = simulate(shared, arrivals([0.0] * 50, 1000.0))
    assert found.sent_bytes > 10_000.0
    assert found.egress_bytes[1.0].max() <= 500.01


def own(link: LinkView) -> list[tuple[str, float | None, float, float]]:
    return [(name, seen.rate_bytes_per_s, seen.queued_bytes, seen.promised_bytes) for name, seen in link.senders]


def test_bytes_are_promised_until_they_are_delivered_and_queued_once_they_are_computed():
    wire = Wire(source="far", destination="pd", capacity=[(0.0, 500.0)], senders=2)
    link = DividedEgress(wire, Loop(), lambda now, item: None, lambda now, items: None, 5.0, ["r0", "r1"])
    job = job_for("r1")
    link.promise(job)
    idle = ("r0", 250.0, 0.0, 0.0)
    assert own(link.view(0.0)) == [idle, ("r1", 250.0, 0.0, 1000.0)]
    link.leaves(1000.0)
    link.send(0.0, 1000.0, job, over_s=2.0)
    assert own(link.view(0.0)) == [idle, ("r1", 250.0, 0.0, 1000.0)]
    # Of 500 bytes that are computed, 250 have left.
    assert own(link.view(1.0)) == [idle, ("r1", 250.0, 250.0, 750.0)]
    assert own(link.view(2.0)) == [idle, ("r1", 250.0, 500.0, 500.0)]
    assert own(link.view(3.0)) == [idle, ("r1", 250.0, 250.0, 750.0)]
    link.forget(job)
    line = link.view(4.0)
    assert own(line) == [idle, ("r1", 250.0, 0.0, 0.0)]
    # In four seconds r1 has sent what its budget lets it.
    assert (line.rate_bytes_per_s, line.utilisation) == (500.0, 0.5)
    assert [sender.utilisation for _, sender in line.senders] == [0.0, 1.0]


def test_a_simulated_sender_reports_as_much_use_of_its_budget_as_a_live_one():
    """Two seconds of sending in every five, over a budget of 250 bytes a second."""
    loop = Loop()
    wire = Wire(source="far", destination="pd", capacity=[(0.0, 500.0)], senders=2)
    link = DividedEgress(wire, loop, lambda now, item: None, lambda now, items: None, 5.0, ["r0", "r1"])
    monitor, live, simulated = LinkMonitor("p"), [], []

    def sample(now: float, delivered: float) -> None:
        info = TcpInfo(
            rtt_s=0.0, min_rtt_s=0.0, delivery_rate=1e6, app_limited=True, bytes_delivered=round(delivered),
            bytes_sent=0, bytes_retransmitted=0, in_flight_bytes=0,
        )  # fmt: skip
        live.append(monitor.sample({0: info}, now, budget_bytes_per_s=250.0).utilisation)
        simulated.append(dict(link.view(now).senders)["r0"].utilisation)

    for tenths in range(400):
        now = tenths / 10
        if tenths % 50 == 0:
            loop.at(now, lambda at, _: link.send(at, 500.0, job_for("r0")))
        loop.at(now, sample, 500.0 * (tenths // 50) + 25.0 * min(20, tenths % 50))
    loop.run()
    assert simulated == pytest.approx(live, abs=0.025)
    assert simulated[-1] == pytest.approx(0.4)
