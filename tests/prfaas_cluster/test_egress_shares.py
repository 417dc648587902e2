"""A node's part of a line's egress budget: taken from one at a time, over by itself."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from node.errors import NodeRefusal
from prfaas_cluster.egress_shares import MAX_LINES, EgressShares
from tests.pd_cluster.handover import landed, run, two_nodes, until
from transport.control.proto import node_pb2 as pb
from transport.send.client import TransferClient

OWN = 10e6


class Clock:
    now = 100.0


@contextmanager
def shares() -> Iterator[tuple[EgressShares, Clock]]:
    clock = Clock()
    with TransferClient() as client:
        client.set_egress_budget(OWN)
        client.set_egress_budget(None, "near")
        yield EgressShares(client, lambda: clock.now), clock


def share(serial: int, rate: float, **changes: Any) -> pb.EgressShare:
    fields = {"holder": "g", "cluster": "west", "own_bytes_per_s": OWN, "lease_s": 3.0, "until_clock_s": 102.0}
    return pb.EgressShare(serial=serial, bytes_per_s=rate, **(fields | changes))


def refusal(taker: EgressShares, message: pb.EgressShare) -> str:
    with pytest.raises(NodeRefusal) as caught:
        taker.take(message)
    return caught.value.label


def test_what_makes_no_sense_is_refused() -> None:
    with shares() as (taker, _):
        for message in (
            share(1, 0.0), share(1, float("nan")), share(1, 2.0, lease_s=0.0), share(1, 2.0, lease_s=1e9),
            share(1, 2.0, holder=""), share(1, 2.0, own_bytes_per_s=5e6), share(1, 2.0, cluster="near"),
            share(1, 2 * OWN, until_clock_s=99.0), share(1, 2 * OWN, until_clock_s=1e9),
        ):  # fmt: skip
            assert refusal(taker, message) == "bad_request"
        for number in range(MAX_LINES):
            taker.take(share(1, 2.0, cluster=f"c{number}"))
        assert refusal(taker, share(1, 2.0, cluster="one more")) == "share_held"


def test_one_at_a_time_shares_a_line_out_and_what_is_overtaken_counts_no_more() -> None:
    with shares() as (taker, clock):
        taker.take(share(5, 2e6))
        assert refusal(taker, share(9, 3e6, holder="another")) == "share_held"
        assert refusal(taker, share(4, 15e6)) == "bad_request"
        taker.take(share(6, 15e6))
        clock.now = 104.0
        taker.take(share(1, 3e6, holder="another"))


def test_what_leaves_keeps_to_a_share(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with two_nodes(tmp_path, use_shm=False, egress_bytes_per_s={"c": OWN}) as (prefill, decode):
            prefill.shares.take(share(1, 4 * OWN, cluster="c", until_clock_s=prefill.shares.now() + 25.0))
            ticket = await landed(prefill, decode)
            await decode.incoming.commit(ticket.transfer_id, 1.0)
            await until(lambda: prefill.egress.states()[0].budget_bytes_per_s == 4 * OWN)  # once it is sampled
            assert prefill.egress.states()[0].own_budget_bytes_per_s == OWN

    run(scenario())
