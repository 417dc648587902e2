"""Senders of one line are dealt its egress budget by what waits at each of them."""

import itertools
import time

import pytest

from gateway.routing.egress_leases import Shares
from gateway.telemetry.metrics import Metrics
from planner.decisions.links.shares import FLOOR, LEASE_S
from tests.gateway.views import Watched, watched
from tests.gateway.worlds import on_loop, until
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
