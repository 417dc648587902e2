"""Senders of one line are dealt its egress budget by what waits at each of them."""

import itertools
import time

import pytest

from gateway.routing.egress_leases import DRIFT, Shares
from gateway.telemetry.metrics import Metrics
from planner.decisions.links.shares import DEAL_EVERY_S, FLOOR, LEASE_S, LineSender
from planner.simulator.loop import Loop
from planner.simulator.network.divided import DividedEgress
from planner.simulator.scenario import Wire
from tests.gateway.views import Watched, watched
from tests.gateway.worlds import on_loop, until
from tests.planner.simulator.network.test_divided import job_for
from transport.control.proto import node_pb2 as pb

OWN = 10e6


async def report(w: Watched, *queued: int, own: float = OWN) -> None:
    """Each PrfaaS node says what waits at it, and that its clock is at 1000 s."""
    for node, size in zip(w.nodes.remote, queued, strict=True):
        link = pb.Link(peer="west", own_budget_bytes_per_s=own, budget_bytes_per_s=own, queued_bytes=size)
        node.load = pb.Load(links=[link], clock_s=1000.0)
        node.tell(pb.NodeEvent(load=node.load))

    def known() -> list[int]:
        nodes = w.clusters.nodes
        return [link.queued_bytes for node in nodes for link in node.load.links if node.cluster == "east"]

    await until(lambda: known() == list(queued))


@on_loop
async def test_who_has_nothing_to_send_lends_to_who_has() -> None:
    async with watched(remote=2) as w:
        metrics = Metrics()
        shares = Shares(w.clusters.nodes, metrics.upkeep, time.monotonic, "g")
        busy, idle = w.nodes.remote
        await report(w, 0, 0)
        await shares.tick()
        assert busy.shares == idle.shares == []
        await report(w, 90_000_000, 0)
        await shares.tick()
        (lent,), (had,) = idle.shares, busy.shares
        assert (lent.bytes_per_s, had.bytes_per_s) == (FLOOR * OWN, (2 - FLOOR) * OWN)
        assert (lent.own_bytes_per_s, lent.cluster, lent.holder) == (OWN, "west", "g")
        assert lent.lease_s >= LEASE_S * 0.99
        assert had.until_clock_s <= 1000.0 + LEASE_S + 1e-6  # by its own clock, read before its report came
        assert b'prfaas_egress_shares_total{outcome="ok"} 2.0' in metrics.render()


@pytest.mark.parametrize("own", [OWN, 0.0])
@on_loop
async def test_nobody_is_given_what_has_not_been_lent(own: float) -> None:
    async with watched(remote=2) as w:
        metrics = Metrics()
        shares = Shares(w.clusters.nodes, metrics.upkeep, time.monotonic, "g")
        busy, idle = w.nodes.remote
        await report(w, 90_000_000, 0, own=own)
        idle.script.share = list(itertools.repeat("FAILED_PRECONDITION", 2))
        await shares.tick()
        await shares.tick()
        assert busy.shares == []
        assert idle.script.share == ([] if own else ["FAILED_PRECONDITION"] * 2)


Dealt = tuple[float, list[LineSender], dict[str, float]]
"""When, what waits at each sender before it, and what each may send after it."""


def simulated(*sent: tuple[float, str, float]) -> list[Dealt]:
    """A line of two senders, which have bytes to send: when, which, how many."""
    loop, over_s = Loop(), 20.0
    wire = Wire(source="far", destination="pd", capacity=[(0.0, 2 * OWN)], senders=2, shares_egress=True)
    link = DividedEgress(
        wire, loop, lambda now, item: None, lambda now, items: None, 5.0, ["r0", "r1"], lambda: loop.now > over_s
    )
    before: list[list[LineSender]] = []
    after: list[Dealt] = []
    for seconds in range(1, int(over_s)):
        # The round at this time was scheduled later: of equal times the first to be scheduled comes first.
        loop.at(seconds * DEAL_EVERY_S - 1e-9, lambda now, _: before.append(link.line_senders(now)))
        loop.at(seconds + 0.25, lambda now, _: after.append((now - 0.25, before[-1], link.rates_bytes_per_s())))
    for at, sender, size in sent:
        loop.at(at, lambda now, job: link.send(now, *job), (size, job_for(sender)))
    loop.run()
    return after


class Clock:
    now = 0.0


@on_loop
async def test_a_simulated_line_is_dealt_out_as_gateways_deal_it_out() -> None:
    rounds = simulated((0.1, "r0", 1e3), (0.1, "r1", 1e3), (0.5, "r0", 90e6), (6.3, "r1", 30e6), (12.5, "r0", 20e6))
    assert {round(rates["r0"] / OWN, 2) for _, _, rates in rounds} >= {1.0, 2 - FLOOR}
    clock = Clock()
    async with watched(remote=2, clock=lambda: clock.now) as w:
        shares = Shares(w.clusters.nodes, Metrics().upkeep, lambda: clock.now, "g")
        held = dict.fromkeys(("r0", "r1"), (OWN, 0.0))
        for at, senders, rates in rounds:
            clock.now = at
            await report(w, *[round(sender.queued_bytes) for sender in senders])
            await shares.tick()
            for name, node in zip(held, w.nodes.remote, strict=True):
                for share in node.shares:
                    is_raise = share.bytes_per_s > share.own_bytes_per_s
                    left_s = (share.until_clock_s - 1000.0) * DRIFT if is_raise else share.lease_s / DRIFT
                    held[name] = share.bytes_per_s, at + left_s
                node.shares.clear()
            live = {name: rate if at + 0.25 < until_s else OWN for name, (rate, until_s) in held.items()}
            assert rates == pytest.approx(live, rel=1e-6), at
            assert sum(rates.values()) <= 2 * OWN * (1 + 1e-9)
